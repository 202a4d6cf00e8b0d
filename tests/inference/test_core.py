"""Requests that arrive, end and are cancelled while others run."""

import numpy as np
import pytest
import torch
from captures import on_graphs, use
from families import PROMPTS, engine

from dschat.inference import SamplingParams
from dschat.inference.requests.sequence import Request


def answers_of(request, events):
    """The tokens of each complete sample, and log-probs, as the events tell them."""
    found = {}
    for event in events:
        if event.sequence.request is request:
            tokens, logprobs = found.setdefault(event.sequence.sample, ([], []))
            tokens.append(event.token)
            logprobs.append(event.logprob)
    over = {e.sequence.sample for e in events if e.sequence.request is request and e.is_last}
    return [found[i] for i in sorted(over)]


@pytest.mark.parametrize("make", [engine, on_graphs])
def test_one_sample_is_cancelled(make, module_of):
    made = make(module_of("llama"), max_num_seqs=2)
    core = made.core()
    sampling = SamplingParams(max_new_tokens=10, n=4, seed=1, ignore_eos=True)
    request = Request(PROMPTS[0], sampling)
    core.add(request)
    events = core.step()
    if make is on_graphs:
        events += core.step()  # is under way
    for sample in (0, 3):  # one that runs, one that waits
        core.cancel(request, sample)
    events += core.events()
    expected = engine(module_of("llama")).generate([PROMPTS[0]], sampling).token_ids
    assert [tokens for tokens, _ in answers_of(request, events)] == expected[1:3]
    assert made.cache.num_free == made.cache.num_pages


@pytest.mark.parametrize("sample", [None, 1])
@pytest.mark.parametrize("steps", [2, 4])
def test_nothing_is_heard_of_what_was_cancelled(steps, sample, monkeypatch, module_of):
    """Though its tokens are drawn: captured steps are read late."""
    use(monkeypatch, 2)
    made = on_graphs(module_of("llama"), max_num_seqs=8)
    core = made.core()
    sampling = SamplingParams(max_new_tokens=6, n=2, seed=1, stop_token_ids=(999,))
    gone, kept = Request(PROMPTS[0], sampling), Request(PROMPTS[1], sampling, 1)
    core.add_all([gone, kept], None)
    for _ in range(steps):
        core.step()
    core.cancel(gone, sample)
    later = list(core.events())
    heard = {e.sequence.sample for e in later if e.sequence.request is gone}
    assert heard == (set() if sample is None else {0})
    expected = engine(module_of("llama")).generate([PROMPTS[1]], sampling, [1]).token_ids
    assert kept.rollout().token_ids == expected
    again = Request(PROMPTS[0], sampling)  # in a row of the same number
    core.add(again)
    assert sum(event.is_last for event in core.events()) == 2


def test_likeliest_tokens(module_of):
    module = module_of("llama")
    core = engine(module).core()
    sampling = SamplingParams(3, temperature=0.5, seed=2)
    request, plain = Request(PROMPTS[0], sampling, num_top=4), Request(PROMPTS[1], sampling)
    for each in (request, plain):
        core.add(each)
    assert sum(event.is_last for event in core.events()) == 2
    assert not plain.top
    answer = request.sequences[0].answer
    with torch.no_grad():
        logits = module(torch.tensor([PROMPTS[0] + answer])).logits[0].double().numpy() / 0.5
    for i, top in enumerate(request.top[0]):
        row = logits[len(PROMPTS[0]) - 1 + i]
        logprobs = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        best = np.argsort(-logprobs)[:4]
        assert [token for token, _ in top] == best.tolist()
        assert [value for _, value in top] == pytest.approx(logprobs[best], abs=1e-4)
