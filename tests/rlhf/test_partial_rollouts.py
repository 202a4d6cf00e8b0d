"""Rollouts that carry unfinished prompts into the next iteration, with a real engine."""

import json

import pytest
import torch
from program_cases import ppo_trainer
from step_cases import Case, my_prompts
from tiny_models import EOS

from dschat.inference.protocol import Rollout, SamplingParams
from dschat.rlhf import rollout_policies
from dschat.rlhf.rollout_policies import OpenPrompt
from dschat.rlhf.run_state import Run

CASE = Case("ppo", iterations=3)
WANTED = 8  # prompts in a rollout, each with two answers


def trainer_of(models_folder, **options):
    options = {"partial_rollout": True, "max_answer_seq_len": 24} | options
    return ppo_trainer(models_folder, **options)


def prompts_of(iteration, trainer):
    """Different from each other in all iterations, so that answers are known by their prompts."""
    prompts = my_prompts(CASE, iteration, trainer.args)
    return [[*ids[:4], 3 + iteration, 3 + i] for i, ids in enumerate(prompts)]


def answers_of(e):
    """Prompt -> its answers, in order."""
    found = {}
    for ids, length, p in zip(e.input_ids, e.lengths, e.prompt_lengths, strict=True):
        found.setdefault(tuple(ids[:p].tolist()), []).append(ids[p:length].tolist())
    return found


def test_rollouts_are_full_groups_are_whole_and_nobody_waits_too_long(models_folder):
    trainer = trainer_of(models_folder, max_staleness=2)
    asked, answered, carried = [], [], 0
    for iteration in range(CASE.iterations):
        asked += [tuple(ids) for ids in prompts_of(iteration, trainer)]
        e = trainer.generate_experience(prompts_of(iteration, trainer))
        groups = answers_of(e)
        assert e.numbers.tolist() == list(range(2 * WANTED))
        assert len(groups) == WANTED
        for answers in groups.values():
            assert len(answers) == 2
            assert all(len(a) == 24 or a[-1] == EOS for a in answers)
            assert all(EOS not in a[:-1] for a in answers)
        answered += groups
        assert e.finished.tolist() == [a[-1] == EOS for g in groups.values() for a in g]
        metrics = trainer.metrics
        assert metrics["rollout/staleness_max"] <= 2
        assert metrics["rollout/staleness"] <= metrics["rollout/staleness_max"]
        carried += metrics["rollout/carried_tokens"] > 0
        assert metrics["rollout/carried_prompts"] == 4  # half of a rollout's
        trainer.train_rlhf(e)
    assert carried == CASE.iterations
    extra = len(answered) + 4 - len(asked)  # drawn once, to have half a rollout more under way
    assert extra == 4
    assert set(answered) <= set(asked)


@pytest.mark.slow
def test_the_oldest_are_completed_when_they_are_due(models_folder, monkeypatch):
    """Where an answer never ends before it must: those that are due do, then the newest."""

    def advance(generator, opened, sampling, numbers, wanted, num_due, answered):
        newest = opened[num_due:][::-1][: max(0, wanted - num_due)]
        for prompt in opened:
            prompt.staleness += bool(prompt.token_ids)
            ends = prompt in opened[:num_due] or any(prompt is other for other in newest)
            prompt.token_ids = [[5, EOS] if ends else [5]] * sampling.n
            prompt.logprobs = [[-1.0] * (1 + ends)] * sampling.n
            prompt.finish_reasons = ["stop" if ends else None] * sampling.n
        for row, prompt in enumerate(opened):
            if prompt.is_complete:
                answered(row, Rollout(prompt.token_ids, prompt.logprobs, prompt.finish_reasons))

    monkeypatch.setattr(rollout_policies, "advance", advance)
    trainer = trainer_of(models_folder, max_staleness=2)
    oldest = []
    for iteration in range(6):
        trainer.generate_experience(prompts_of(iteration, trainer))
        oldest.append(trainer.metrics["rollout/staleness_max"])
    assert oldest == [0, 0, 2, 0, 2, 0]  # half of a rollout's wait, and then half of the third's


def test_tokens_keep_the_logprobs_they_were_drawn_with(models_folder):
    """A large step between two rollouts: the continued answers' first tokens show the old policy,
    whose probability the importance weight divides by.
    """
    trainer = trainer_of(models_folder, rollout_is="tis", rollout_is_range=[0.5, 1e6], kl_coef=0.0)
    trainer.train_rlhf(trainer.generate_experience(prompts_of(0, trainer)))
    (under_way,) = trainer.collector.policy.state_dict()["under_way"]
    begun = {
        (tuple(p["ids"]), i): (tokens, logprobs)
        for p in under_way["open"]
        for i, (tokens, logprobs) in enumerate(zip(p["token_ids"], p["logprobs"], strict=True))
    }
    begun = {key: (list(tokens), list(lps)) for key, (tokens, lps) in begun.items()}
    assert sum(len(tokens) for tokens, _ in begun.values()) > 0
    e = trainer.generate_experience(prompts_of(1, trainer))
    seen = 0
    for row in range(e.num_sequences):
        p, end = int(e.prompt_lengths[row]), int(e.lengths[row])
        key = tuple(e.input_ids[row, :p].tolist()), int(e.numbers[row]) % 2
        tokens, logprobs = begun.get(key, ([], []))
        n = len(tokens)
        assert e.input_ids[row, p:end].tolist()[:n] == tokens
        assert e.rollout_logprobs[row, :n].tolist() == pytest.approx(logprobs)
        gap = (e.logprobs - e.rollout_logprobs)[row, : end - p]
        torch.testing.assert_close(e.weights[row, : end - p], gap.exp())
        if n:
            seen += 1
            assert gap[:n].abs().max() > 1e-3
        assert gap[n:].abs().max() < 1e-4 if end - p > n else True
    assert seen > 0


def test_a_resumed_run_continues_the_same_answers(models_folder):
    first, second = (trainer_of(models_folder) for _ in range(2))
    first.generate_experience(prompts_of(0, first))
    state = json.loads(json.dumps(Run(first).state_dict()))
    Run(second).load_state_dict(state)
    first.iteration = second.iteration = 1
    one, other = (t.generate_experience(prompts_of(1, t)) for t in (first, second))
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.rollout_logprobs, other.rollout_logprobs)
    assert first.metrics["rollout/staleness"] == second.metrics["rollout/staleness"]


def test_what_was_saved_before_experts_were_kept():
    state = OpenPrompt([5, 6], [[7], [8, 9]], [[-1.0], [-2.0, -3.0]], [None, "stop"]).state()
    del state["experts"]
    request = OpenPrompt.of_state(state).request(SamplingParams(4, n=2), 0)
    assert [s.answer for s in request.sequences] == [[7], [8, 9]]
    assert [s.experts for s in request.sequences] == [None, None]


def test_another_number_of_ranks_shares_what_is_under_way(models_folder):
    trainer = trainer_of(models_folder)
    trainer.generate_experience(prompts_of(0, trainer))
    state = trainer.collector.state_dict()
    (part,) = state["under_way"]
    opened = [prompt | {"staleness": 1} for prompt in part["open"]]
    older = part | {"ages": [age + 1 for age in part["ages"]], "open": opened}
    trainer.collector.policy.load_state_dict(state | {"under_way": [part, older]})
    (taken,) = trainer.collector.policy.state_dict()["under_way"]
    assert taken["ages"] == [2] * 4 + [1] * 4
    trainer.generate_experience(prompts_of(1, trainer))
    assert trainer.metrics["rollout/staleness_max"] == 2
