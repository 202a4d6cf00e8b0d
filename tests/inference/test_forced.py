"""Requests whose answers begin with given tokens, and whose logits are changed by the caller."""

import pytest
import torch
from captures import assert_idle, on_graphs, use
from families import PROMPTS, VOCAB, build, engine, reference_logprobs
from quick import each_once

from dschat.inference import SamplingParams
from dschat.inference.requests import core as core_module
from dschat.inference.requests.sequence import Request


@pytest.fixture(scope="module")
def module():
    return build("llama")


@pytest.fixture(params=["eager", "captured"])
def made(module, monkeypatch, request):
    if request.param == "eager":
        return engine(module)
    use(monkeypatch)
    return on_graphs(module)


def run(made, *requests):
    core = made.core()
    for request in requests:
        core.add(request)
    list(core.events())
    assert_idle(made)
    return [request.rollout() for request in requests]


@pytest.mark.parametrize(("num_rows", "temperature"), each_once([1, 3, 1000], [0.0, 0.7]))
def test_forced_tokens_have_the_log_probs_of_a_forward(
    made, module, monkeypatch, num_rows, temperature
):
    """In one step or many; other requests run beside it, and stop tokens within end nothing."""
    monkeypatch.setattr(core_module, "_FORCED", num_rows * made.num_tokens)
    forced = [(7 * i) % VOCAB for i in range(40)]
    sampling = SamplingParams(
        max_new_tokens=4, n=2, seed=3, temperature=temperature, stop_token_ids=(7, 14)
    )
    asked = Request(PROMPTS[0], sampling, forced=forced)
    beside = Request(PROMPTS[1], SamplingParams(max_new_tokens=20, seed=1))
    rollout, other = run(made, asked, beside)
    for tokens, logprobs, _ in rollout:
        assert tokens[:40] == forced
        expected = reference_logprobs(module, PROMPTS[0], tokens, temperature or 1.0)
        torch.testing.assert_close(torch.tensor(logprobs), expected.float(), atol=1e-4, rtol=0)
    (alone,) = run(made, Request(PROMPTS[1], SamplingParams(max_new_tokens=20, seed=1)))
    assert other.token_ids == alone.token_ids
    # What is drawn after them is what the longer prompt's answer would be.
    (longer,) = run(made, Request(PROMPTS[0] + forced, sampling))
    assert [tokens[40:] for tokens in rollout.token_ids] == longer.token_ids


def test_nothing_is_drawn_where_the_limit_is_0(made):
    (rollout,) = run(made, Request(PROMPTS[0], SamplingParams(), limit=0, forced=[1, 2, 3]))
    assert rollout.token_ids == [[1, 2, 3]]
    assert rollout.finish_reasons == ["length"]


def test_changed_logits_decide_and_the_log_probs_stay(made, module):
    def shape(sequence, logits):
        only = torch.full_like(logits, -torch.inf)
        only[(5 + len(sequence.answer) + sequence.sample) % VOCAB] = 1.0
        return only

    sampling = SamplingParams(max_new_tokens=6, n=2, seed=1, ignore_eos=True)
    rollout, _ = run(
        made,
        Request(PROMPTS[0], sampling, shape=shape),
        Request(PROMPTS[1], SamplingParams(max_new_tokens=9)),
    )
    assert rollout.token_ids == [[5 + i + k for i in range(6)] for k in range(2)]
    for tokens, logprobs, _ in rollout:
        expected = reference_logprobs(module, PROMPTS[0], tokens)
        torch.testing.assert_close(torch.tensor(logprobs), expected.float(), atol=1e-4, rtol=0)
