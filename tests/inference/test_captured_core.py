"""The device's decode loop: the same rollouts as step by step, whatever is scheduled.

A replay is the step's code run again (`again`) or its frozen operators (`soft_capture`). The work
of the device is done at once or as late as possible (`LateQueue`).
"""

from dataclasses import replace

import pytest
import torch
from captures import LateQueue, assert_idle, graphs_of, noted, on_graphs, steps_of, use
from families import CONFIGS, EOS, PROMPTS, VOCAB, assert_same, cache_gib, engine, remember
from quick import each_once
from soft_graph import soft_capture
from torch.overrides import TorchFunctionMode

from dschat.inference import SamplingParams
from dschat.inference.decode_state import DecodeState

HALF = tuple(range(0, VOCAB, 2))  # stop ids: an answer hardly lives to its eighth token
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("lag", "queue", "speculate"), each_once([0, 1, 2], [None, LateQueue], ["history", "off"])
)
def test_preempted_sequences(queue, lag, speculate, monkeypatch, module_of):
    """Few pages: some steps have room for the newest tokens and none for drafts."""
    use(monkeypatch, lag, queue and queue())
    plain = engine(module_of("llama"))
    sampling = SamplingParams(max_new_tokens=20, n=2, seed=6, stop_token_ids=(3,))
    expected, preemptions = plain.generate(PROMPTS, sampling), 0
    sizes = {"kv_cache_gib": cache_gib(plain, 56), "page_size": 4, "max_num_seqs": 6}
    made = on_graphs(module_of("llama"), speculate=speculate, **sizes)
    for changed in (0.0, 0.2, 0.5):
        if made.speculation:
            remember(made, PROMPTS, expected, changed)
        assert_same(made.generate(PROMPTS, sampling), expected)
        assert (made.stats.accepted_tokens > 20) == (speculate == "history")
        preemptions += made.stats.preemptions
        assert_idle(made)
    assert preemptions > 0


# What a step reads

READS = {"tolist", "item", "numpy", "cpu", "cuda", "__array__", "nonzero", "any", "all"}
READS |= {f"__{kind}__" for kind in ("bool", "int", "float", "index", "contains")}
READS |= {"tensor", "as_tensor", "from_numpy", "pin_memory"}
KINDS = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.9, "temperature": 0.7, "min_new_tokens": 4},
    {"top_k": 5, "min_p": 0.02, "stop_token_ids": (3, 5)},
]


class Calls(TorchFunctionMode):
    """Lists torch's functions that are called while it is active."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.made.append((function.__name__, args, kwargs))
        return function(*args, **kwargs)


@pytest.mark.parametrize(("name", "kind"), each_once(["opt", "bloom", "mistral"], KINDS))
def test_a_step_neither_reads_nor_copies(name, kind, monkeypatch, module_of, operators_of_torch):
    use(monkeypatch)
    calls = Calls()

    def capture(step):
        step()  # the warm-up: it makes what later ones find

        def replay():
            with calls:
                step()

        return replay

    made = on_graphs(module_of(name), capture, page_size=4)
    made.generate(PROMPTS[1:4], SamplingParams(max_new_tokens=12, **kind))
    assert len(calls.made) > 20 * made.stats.decode_steps  # it does see the step
    for function, args, kwargs in calls.made:
        if function in ("any", "all"):  # of a row of tokens, which stays on the device
            assert len(args) == 2
            continue
        assert function not in READS
        moves = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, (torch.device, str))]
        assert function != "to" or not moves


def test_soft_captures_are_as_strict_as_cuda():
    """A host number is frozen at its value, and a read of a tensor's fails."""
    number, x = [2.0], torch.ones(3)
    replay = soft_capture(lambda: x.mul_(number[0]))
    number[0], before = 7.0, x.clone()
    replay()
    assert torch.equal(x, 2 * before)
    with pytest.raises(RuntimeError):
        soft_capture(lambda: x * x.sum().item())


@pytest.mark.parametrize("page_size", [4, pytest.param(None, marks=SLOW)])
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=SLOW) for n in CONFIGS if n != "llama")]
)
def test_a_graph_reads_every_number_from_memory(name, page_size, monkeypatch, engines):
    """One graph; seed, temperature, top-p, limits, stop ids and prompt numbers change under it."""
    plain, graphs = engines(name, soft_capture, max_num_seqs=2, page_size=page_size)
    use(monkeypatch)
    for seed, temperature, top_p, stops in ((1, 0.7, 0.9, (3,)), (2, 1.4, 0.6, HALF[:12])):
        sampling = SamplingParams(
            max_new_tokens=9 + seed,
            min_new_tokens=7 + seed,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
            stop_token_ids=stops,
            ignore_eos=True,
        )
        numbers = [seed, 10 * seed]
        expected = plain.generate(PROMPTS[1:3], sampling, numbers)
        assert_same(graphs.generate(PROMPTS[1:3], sampling, numbers), expected)
    assert sorted(size for size, *_ in steps_of(graphs)) in ([2], [1, 2])


# How far the host runs ahead


def test_without_stop_ids_the_host_reads_once(monkeypatch, engines):
    queue = LateQueue()
    use(monkeypatch, queue=queue)
    plain, graphs = engines("llama")
    one = SamplingParams(max_new_tokens=30, seed=6, ignore_eos=True)
    assert_same(graphs.generate(PROMPTS, one), plain.generate(PROMPTS, one))
    assert graphs.stats.decode_steps == 29
    assert queue.longest >= 29  # nothing waited in between


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_with_stop_ids_it_reads_some_steps_late(lag, monkeypatch, engines):
    use(monkeypatch, lag=lag)
    _, graphs = engines("llama")
    unread, read = [], DecodeState.read

    def counted(self):
        unread.append(self.num_unread - 1)
        return read(self)

    monkeypatch.setattr(DecodeState, "read", counted)
    graphs.generate([PROMPTS[1]], SamplingParams(max_new_tokens=30, seed=6, stop_token_ids=(999,)))
    assert len(unread) == graphs.stats.decode_steps
    assert max(unread) == min(lag, len(unread) - 1)


def test_a_ring_that_is_full(monkeypatch, module_of):
    """More steps than the ring has slots, from one in its middle on, and a late device."""
    use(monkeypatch, queue=LateQueue())
    sampling = SamplingParams(max_new_tokens=280, seed=3, ignore_eos=True)
    module, prompts, limits = module_of("bloom"), [[6, 7], [5]], [100, 280]
    expected = engine(module, max_seq_len=300).generate(prompts, sampling, None, limits)
    made = on_graphs(module, max_seq_len=300, page_size=16, max_num_seqs=1)
    assert_same(made.generate(prompts, sampling, None, limits), expected)


def test_sequences_are_admitted_as_early_as_step_by_step(monkeypatch, engines):
    use(monkeypatch)
    plain, graphs = engines("llama", page_size=4)
    for name in ("_separate_prefill", "_samples_apart"):
        monkeypatch.setattr(plain, name, True)
    sampling = SamplingParams(max_new_tokens=20, n=3, seed=6, ignore_eos=True)
    limits = [20, 3, 3, 5, 5, 9, 14, 16]
    expected = plain.generate(PROMPTS, sampling, max_new_tokens=limits)
    assert_same(graphs.generate(PROMPTS, sampling, max_new_tokens=limits), expected)
    assert graphs.stats.decode_steps == plain.stats.decode_steps


def test_where_no_page_is_free_the_steps_go_on(monkeypatch, module_of):
    """Slots are free, but samples that wait for pages do not interrupt the others."""
    use(monkeypatch)
    gib = cache_gib(engine(module_of("llama")), 80)
    made = on_graphs(module_of("llama"), kv_cache_gib=gib, max_num_seqs=6, page_size=64)
    entered = noted(monkeypatch, DecodeState, "enter")
    assert made.cache.num_pages == 1  # each sample waits for the one before
    made.generate(PROMPTS[:2], SamplingParams(max_new_tokens=20, n=2, seed=6, ignore_eos=True))
    assert made.stats.decode_steps == 4 * 19
    assert len(entered) == 4


def test_sizes_shrink_as_sequences_end(monkeypatch, engines):
    use(monkeypatch)
    plain, graphs = engines("llama")
    limits = [20, 3, 3, 5, 5, 9, 14, 16]
    one = SamplingParams(max_new_tokens=20, seed=6, ignore_eos=True)
    expected = plain.generate(PROMPTS, one, max_new_tokens=limits)
    assert_same(graphs.generate(PROMPTS, one, max_new_tokens=limits), expected)
    assert {size for size, *_ in steps_of(graphs)} == {1, 2, 4, 8}


@pytest.mark.parametrize("by", ["length", "stop id"])
def test_rows_that_have_ended_write_nothing(by, monkeypatch, engines):
    """The last of four ends early, and the others keep the size of the steps."""
    use(monkeypatch)
    plain, graphs = engines("llama", page_size=4)
    sampling = SamplingParams(max_new_tokens=30, seed=3, ignore_eos=True)
    prompts, limits = [PROMPTS[6], PROMPTS[4], PROMPTS[3], PROMPTS[0]], [30] * 4
    expected = plain.generate(prompts, sampling)
    if by == "length":
        limits[3] = 3
    else:
        *others, last = expected.token_ids
        stop = next(t for t in last[1:] if not any(t in ids for ids in others))
        assert last.index(stop) < 15
        sampling = replace(sampling, stop_token_ids=(stop,))
    expected = plain.generate(prompts, sampling, max_new_tokens=limits)
    assert_same(graphs.generate(prompts, sampling, max_new_tokens=limits), expected)
    assert len(graphs_of(graphs)._graphs) == 1


def test_eos_ends_an_answer(monkeypatch, engines):
    use(monkeypatch)
    plain, graphs = engines("gpt2")
    sampling = SamplingParams(max_new_tokens=30, n=4, seed=2)
    got = graphs.generate(PROMPTS, sampling)
    assert_same(got, plain.generate(PROMPTS, sampling))
    assert {"stop", "length"} == set(got.finish_reasons)
    assert any(ids[-1] == EOS for ids in got.token_ids)
