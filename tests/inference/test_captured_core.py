"""The device's decode loop: the same rollouts as step by step, whatever is scheduled.

A replay is the step's code run again (`again`) or its frozen operators (`soft_capture`). The work
of the device is done at once or as late as possible (`LateQueue`).
"""

from dataclasses import replace

import pytest
from captures import LateQueue, on_graphs, steps_of, use
from families import CONFIGS, PROMPTS, assert_same, engine
from quick import slow, some
from soft_graph import soft_capture

from dschat.inference import SamplingParams
from dschat.inference.protocol import Rollout
from dschat.inference.requests.core import Core
from dschat.inference.requests.sequence import Request

# What a step reads


@pytest.mark.parametrize("page_size", [4, *slow([None])])
@pytest.mark.parametrize("name", some(CONFIGS, ["llama"]))
def test_a_graph_reads_every_number_from_memory(name, page_size, monkeypatch, engines):
    """One graph serves two batches that differ in seeds, temperatures, truncation, lengths, stop
    ids and prompt numbers, of each of their rows.
    """
    plain, graphs = engines(name, soft_capture, max_num_seqs=4, page_size=page_size)
    use(monkeypatch)
    first = [
        SamplingParams(18, temperature=0.0, ignore_eos=True),
        SamplingParams(20, temperature=0.6, seed=1, stop_token_ids=(3, 5), min_new_tokens=6),
        SamplingParams(17, top_p=0.7, seed=2, top_k=9),
        SamplingParams(19, min_p=0.05, temperature=1.5, seed=3, ignore_eos=True),
    ]
    second = [replace(s, seed=s.seed + 7, max_new_tokens=16) for s in reversed(first)]
    second[0] = replace(second[0], temperature=0.9, min_p=0.2)
    for samplings in (first, second):
        numbers = [samplings[1].seed * i for i in range(4)]
        requests = list(map(Request, PROMPTS, samplings, numbers))
        core = graphs.core()
        core.add_all(requests, None)
        assert sum(event.is_last for event in core.events()) == 4
        for request, number in zip(requests, numbers, strict=True):
            expected = plain.generate([request.ids], request.sampling, [number])
            assert_same(request.rollout(), expected)
    assert [size for size, *_ in steps_of(graphs)].count(4) == 1


# How far the host runs ahead


def test_without_stop_ids_the_host_reads_once(monkeypatch, engines):
    queue = LateQueue()
    use(monkeypatch, queue=queue)
    plain, graphs = engines("llama")
    one = SamplingParams(max_new_tokens=30, seed=6, ignore_eos=True)
    assert_same(graphs.generate(PROMPTS, one), plain.generate(PROMPTS, one))
    assert graphs.stats.decode_steps == 29
    assert queue.longest >= 29  # nothing waited in between


@pytest.mark.parametrize("lag", [0, *slow([1, 2]), 5])
def test_with_stop_ids_it_reads_some_steps_late(lag, monkeypatch, engines):
    use(monkeypatch, lag=lag)
    core = engines("llama")[1].core()
    sampling = SamplingParams(max_new_tokens=30, seed=6, stop_token_ids=(999,))
    core.add(Request(PROMPTS[1], sampling))
    unread = []
    while core.has_work:
        core.step()
        unread.append(core.stats.decode_steps - core.stats.decode_tokens)
    assert core.stats.decode_steps > lag
    assert max(unread) == lag


@pytest.mark.slow
def test_a_ring_that_is_full(monkeypatch, module_of):
    """More steps than the ring has slots, from one in its middle on, and a late device."""
    use(monkeypatch, queue=LateQueue())
    sampling = SamplingParams(max_new_tokens=280, seed=3, ignore_eos=True)
    module, prompts, limits = module_of("bloom"), [[6, 7], [5]], [100, 280]
    expected = engine(module, max_seq_len=300).generate(prompts, sampling, None, limits)
    made = on_graphs(module, max_seq_len=300, page_size=16, max_num_seqs=1)
    assert_same(made.generate(prompts, sampling, None, limits), expected)


def test_sequences_are_admitted_as_early_as_step_by_step(monkeypatch, engines):
    """And the size of the steps shrinks as the last ones end."""
    use(monkeypatch)
    _, graphs = engines("llama", page_size=4)
    sampling = SamplingParams(max_new_tokens=20, n=3, seed=6, ignore_eos=True)
    limits = [20, 3, 3, 5, 5, 9, 14, 16]
    requests = list(map(Request, PROMPTS, [sampling] * 8, range(8), limits))
    eager = Core(graphs)
    eager.add_all(requests, None)
    assert len(list(eager.events())) == 3 * sum(limits)
    graphs.forget_prefixes()
    expected = Rollout.joined(request.rollout() for request in requests)
    assert_same(graphs.generate(PROMPTS, sampling, max_new_tokens=limits), expected)
    assert graphs.stats.decode_steps == eager.stats.decode_steps
    assert {size for size, *_ in steps_of(graphs)} == {1, 2, 4, 8}
