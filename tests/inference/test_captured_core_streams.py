"""Streams, rollouts beside them and errors on the device's decode loop."""

import pytest
from captures import LateQueue, assert_idle, on_graphs, use
from families import PROMPTS, assert_same, engine

from dschat.inference import SamplingParams
from dschat.inference.decode_state import DecodeState

FREE = SamplingParams(max_new_tokens=20, n=2, seed=6, ignore_eos=True)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_stream_is_a_rollout_read_late(lag, monkeypatch, engines):
    use(monkeypatch, lag=lag)
    plain, graphs = engines("llama", page_size=4)
    sampling = SamplingParams(max_new_tokens=20, seed=8, ignore_eos=True)
    (whole,) = plain.generate([PROMPTS[1]], sampling).token_ids
    stream = graphs.stream(PROMPTS[1], sampling)
    for count, token in enumerate(stream):
        assert token == whole[count]
        if count < 20 - lag:
            assert graphs.stats.decode_steps == (count + lag if count else 0)
    assert count == 19
    assert_idle(graphs)


def test_a_closed_stream_leaves_nothing_behind(monkeypatch, engines):
    use(monkeypatch)
    plain, graphs = engines("llama", page_size=4)
    stream = graphs.stream(PROMPTS[2], SamplingParams(max_new_tokens=20, seed=1))
    for _ in range(4):
        next(stream)
    stream.close()
    assert_idle(graphs)
    assert_same(graphs.generate(PROMPTS, FREE), plain.generate(PROMPTS, FREE))


def test_streams_and_rollouts_take_turns(monkeypatch, engines):
    """They share rows and ring: each one reads its steps before another one takes them."""
    use(monkeypatch, lag=2)
    plain, graphs = engines("llama", page_size=4)
    sampling = SamplingParams(max_new_tokens=20, seed=8, ignore_eos=True)
    wholes = [plain.generate([p], sampling).token_ids[0] for p in PROMPTS[1:3]]
    streams = [graphs.stream(p, sampling) for p in PROMPTS[1:3]]
    got = [[next(stream) for _ in range(4)] for stream in streams]
    assert_same(graphs.generate(PROMPTS, FREE), plain.generate(PROMPTS, FREE))
    for _ in range(3):
        for tokens, stream in zip(got, streams, strict=True):
            tokens.append(next(stream))
    graphs.stream(PROMPTS[0], sampling).close()
    assert [tokens + list(stream) for tokens, stream in zip(got, streams, strict=True)] == wholes
    assert_idle(graphs)


@pytest.mark.parametrize("count", range(2, 8))
def test_a_stream_beside_a_closed_one(count, monkeypatch, engines):
    """The steps that nobody read run before the first one has its rows back."""
    use(monkeypatch, lag=2, queue=LateQueue())
    plain, graphs = engines("llama", page_size=4)
    sampling = SamplingParams(max_new_tokens=20, seed=8, ignore_eos=True)
    (whole,) = plain.generate([PROMPTS[1]], sampling).token_ids
    stream = graphs.stream(PROMPTS[1], sampling)
    got = [next(stream) for _ in range(4)]
    other = graphs.stream(PROMPTS[0], sampling)
    for _ in range(count):
        next(other)
    other.close()
    assert got + list(stream) == whole
    assert_idle(graphs)


@pytest.mark.parametrize("failing", ["step", "read"])
def test_an_error_in_the_middle_frees_every_page(failing, monkeypatch, engines):
    use(monkeypatch)
    plain, graphs = engines("llama", page_size=4)
    name = "advance" if failing == "step" else "read"
    method, calls = getattr(DecodeState, name), []

    def fail_once(self, *args):
        calls.append(None)
        if len(calls) == 5:
            raise RuntimeError("out of memory")
        return method(self, *args)

    monkeypatch.setattr(DecodeState, name, fail_once)
    sampling = SamplingParams(max_new_tokens=20, n=2, seed=6)
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.generate(PROMPTS, sampling)
    assert_idle(graphs)
    assert_same(graphs.generate(PROMPTS, sampling), plain.generate(PROMPTS, sampling))


def test_weights_that_move_under_a_stream(monkeypatch, module_of):
    """Its graphs read freed memory otherwise."""
    use(monkeypatch)
    module = module_of("llama")
    made, plain = on_graphs(module), engine(module)
    sampling = SamplingParams(max_new_tokens=12, seed=8, ignore_eos=True)
    (whole,) = plain.generate([PROMPTS[1]], sampling).token_ids
    stream = made.stream(PROMPTS[1], sampling)
    got = [next(stream) for _ in range(4)]
    first = made._runner._graphs
    made.borrow_weights({name: p.detach() for name, p in module.named_parameters()})
    assert got + list(stream) == whole
    assert made._runner._graphs is not first
