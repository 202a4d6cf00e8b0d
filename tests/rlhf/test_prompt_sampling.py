"""Which prompts are drawn: by the scores of their answers so far, or by a column."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from environment_of_cases import Replies
from program_cases import trainer_of
from rank_threads import on_ranks, this_rank
from step_rows import PROMPTS

import dschat.distributed as dist
from dschat.config import RLHFConfig, UserError
from dschat.data.batches import PromptBatches
from dschat.rlhf.prompt_sampling import AdaptivePrompts, difficulties
from dschat.rlhf.prompts import PromptQueue
from dschat.rlhf.run_state import Run


def drawn_by(num_prompts, size=2, samples=4, rank=0, world=1, seed=7):
    rows = [{"prompt_ids": [3 + place]} for place in range(num_prompts)]
    return AdaptivePrompts(PromptBatches(rows, size, rank, world, seed), samples)


def answers(places, scores, scored=None, samples=4):
    """An experience's fields that count: ``places`` are the prompts' own, one each."""
    scores = torch.tensor(scores).flatten()
    return SimpleNamespace(
        numbers=torch.arange(len(scores)),
        places=[place for place in places for _ in range(samples)],
        scores=scores,
        scored=torch.ones(len(scores), dtype=torch.bool) if scored is None else scored,
    )


def test_variances_by_hand():
    prompts = drawn_by(4)
    assert prompts.variances().tolist() == [1, 1, 1, 1]
    found = prompts.observe(answers([0, 1], [[1.0, 0, 0, 1], [1, 1, 1, 1]]), None)
    # Squares 1 and 0, of 3 independent distances each: on average 1/6, which counts as 3 more.
    assert found == {"sampling/mixed": 0.5, "sampling/new": 1.0}
    assert prompts.variances() == pytest.approx([(3 / 6 + 1) / 6, 0.5 / 6, 1 / 6, 1 / 6])
    found = prompts.observe(answers([0, 2], [[0.0, 0, 0, 0], [2, 2, 4, 4]]), None)
    assert found == {"sampling/mixed": 0.5, "sampling/new": 0.5}
    mean = (0.5 + 4) / (4.5 + 3 + 3)  # half of the first group's still counts
    expected = [(3 * mean + 0.5) / 7.5, mean / 2, (3 * mean + 4) / 6, mean]
    assert prompts.variances() == pytest.approx(expected)


@pytest.mark.parametrize("score", [0.1, 1 / 3, 7.3])
def test_equal_scores_have_no_variance(score):
    prompts = drawn_by(2)
    assert prompts.observe(answers([0], [[score] * 4]), None)["sampling/mixed"] == 0
    assert prompts.variances().tolist() == [1, 1]  # all alike: none is better


def test_scores_count_as_the_reward_has_them():
    prompts = drawn_by(2)
    scored = torch.tensor([True, True, False, True] * 2)
    e = answers([0, 1], [[5.0, 7, 0, 9], [0, 1, 3, torch.nan]], scored)
    assert prompts.observe(e, 1.0) == {"sampling/mixed": 0.5, "sampling/new": 1}
    assert prompts.state_dict() == {"places": [0, 1], "sums": [[0, 0.5], [2, 1]]}


def test_prompts_of_a_caller_are_not_counted():
    prompts = drawn_by(2)
    e = answers([0], [[0.0, 1, 0, 1]])
    e.places = None
    assert prompts.observe(e, None) == {"sampling/mixed": 0, "sampling/new": 0}
    assert prompts.state_dict()["places"] == []


def test_prompts_are_drawn_in_proportion_and_all_keep_a_chance():
    prompts = drawn_by(4, size=1)
    for _ in range(20):  # always right, always wrong, mixed; one is never answered
        prompts.observe(answers([0, 1, 2], [[1.0] * 4, [0.0] * 4, [0.0, 1, 1, 1]]), None)
    counts = Counter(next(prompts).places[0] for _ in range(4000))
    shares = prompts.variances() / prompts.variances().sum()
    assert [counts[i] / 4000 for i in range(4)] == pytest.approx(shares, abs=0.025)
    assert shares[2] > 6 * shares[0] == pytest.approx(6 * shares[1])
    assert shares.min() > 0.05


def test_a_prompt_that_becomes_learnable_is_found():
    prompts = drawn_by(2)
    prompts.observe(answers([1], [[0.0, 1, 1, 1]]), None)
    for _ in range(20):
        prompts.observe(answers([0], [[0.0] * 4]), None)
    before = prompts.variances()
    prompts.observe(answers([0], [[0.0, 0, 0, 1]]), None)
    prompts.observe(answers([0], [[0.0, 1, 0, 1]]), None)
    assert before[0] < before[1] / 3
    assert prompts.variances()[0] > prompts.variances()[1] * 0.9


def test_the_prompts_of_a_draw_differ():
    prompts = drawn_by(5, size=4)
    prompts.observe(answers([0], [[0.0, 9, 9, 0]]), None)
    assert all(len(set(next(prompts).places)) == 4 for _ in range(50))


def learned(member, world, rounds=6):
    """Drawn prompts of all ranks, whose answers are scored by their place and their number."""
    prompts, draws = drawn_by(12, 5, 4, member.rank, world), []
    for _ in range(rounds):
        table = next(prompts)
        assert table.ids == [[3 + place] for place in table.places]
        before = sum(member.gather_objects(len(table))[: member.rank])
        scores = [[0.1 * p + (p % 3) * 0.3**n for n in range(4)] for p in table.places]
        e = answers(table.places, scores or [[]])
        e.numbers = e.numbers + 4 * before
        metrics = prompts.observe(e, None)
        draws.append((sum(member.gather_objects(table.places), []), metrics))
    return draws, prompts.state_dict()


def test_draws_and_state_are_the_same_on_any_number_of_ranks(monkeypatch):
    monkeypatch.setattr(dist, "gather_objects", lambda value: this_rank().gather_objects(value))
    (alone,) = on_ranks(1, lambda member: learned(member, 1))
    for world in (2, 3, 7):  # of five prompts: some ranks have none
        assert (
            on_ranks(world, lambda member, world=world: learned(member, world)) == [alone] * world
        )


def test_a_resumed_queue_draws_the_same():
    first, second = (PromptQueue(drawn_by(9)) for _ in range(2))
    for places in ([0, 4], [8, 0]):
        first.take(3, None)
        first.observe(answers(places, [[0.1, 1, 0.7, 0], [0.3, 0.3, 0.9, 1]]), None)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [first.take(3, None) for _ in range(5)] == [second.take(3, None) for _ in range(5)]
    assert first.state_dict() == second.state_dict()
    third = PromptQueue(drawn_by(9))
    third.load_state_dict({"left": {"ids": []}, "taken": 4})  # of a run without the flag
    assert third.state_dict()["adaptive"]["places"] == []


def mostly_alike(prompt_ids, answer_ids):
    both = zip(prompt_ids, answer_ids, strict=True)
    return [float(sum(a) % 2) if p[-1] % 2 else 0.0 for p, a in both]


@pytest.mark.parametrize(
    "options",
    [{}, {"dynamic_sampling": True}, {"partial_rollout": True}, {"environment": Replies}],
    ids=["rounds", "dynamic", "partial", "episodes"],
)
def test_all_answers_count_and_a_resumed_run_draws_the_same(options, models_folder):
    environment = options.pop("environment", None)

    def trainer():
        rows = [{"prompt_ids": ids} for ids in PROMPTS]
        prompts = AdaptivePrompts(PromptBatches(rows, 8, 0, 1, seed=3), 2)
        made = trainer_of(models_folder, [mostly_alike], prompts, **options)
        if environment:
            made = type(made)(
                *(made.engine, made.args, None, [mostly_alike], prompts),
                environment=environment,
            )
        return made, prompts

    (first, ours), (second, theirs) = trainer(), trainer()
    for iteration in range(2):
        first.generate_experience(next(ours))
        assert 0 < first.metrics["sampling/mixed"] < 1
        first.iteration = iteration + 1
    assert len(ours.state_dict()["places"]) >= 8
    Run(second).load_state_dict(json.loads(json.dumps(Run(first).state_dict())))
    for _ in range(2):
        one, other = (t.generate_experience(next(p)) for t, p in ((first, ours), (second, theirs)))
        assert one.places == other.places
        assert torch.equal(one.input_ids, other.input_ids)
    assert ours.state_dict() == theirs.state_dict()


# -- by a column -----------------------------------------------------------------------------------


def leveled(levels):
    columns = [{} if level is None else {"level": level, "x": "y"} for level in levels]
    return [
        {"prompt_ids": [3 + i], "columns": json.dumps(values)} for i, values in enumerate(columns)
    ]


def test_every_epoch_goes_from_easy_to_hard():
    levels = [2, 0.5, 1, -3, 2, 1, 0.5, 7, 2, 2, 0.5]
    rows = leveled(levels)
    batches = PromptBatches(rows, 4, 0, 1, 5, difficulties(rows, "level"))
    epochs = [[ids[0] - 3 for table in batches.epoch(n) for ids in table] for n in range(40)]
    for places in epochs:
        assert len(set(places)) == 8
        found = [levels[place] for place in places]
        assert found == sorted(found)
    assert len(set(map(tuple, epochs))) > 30  # ties are in another order each time
    assert {place for places in epochs for place in places} == set(range(11))  # also the hardest
    halves = [PromptBatches(rows, 4, r, 2, 5, difficulties(rows, "level")) for r in (0, 1)]
    shares = [[list(table) for table in half.epoch(0)] for half in halves]
    whole = [[[3 + place] for place in epochs[0][i : i + 4]] for i in (0, 4)]
    assert [a + b for a, b in zip(*shares, strict=True)] == whole


@pytest.mark.parametrize(
    ("levels", "column", "error"),
    [
        ([1, 2], "lvl", "curriculum:lvl: prompts have no such column; choose from: level, x"),
        ([1, None], "level", "curriculum:level: prompts have no such column; choose from: none"),
        ([1, "2"], "level", "curriculum:level: a prompt has '2' there; give every prompt a num"),
        ([1, True], "level", "curriculum:level: a prompt has True there"),
        ([1, float("nan")], "level", "curriculum:level: a prompt has nan there"),
    ],
)
def test_columns_that_are_no_numbers(levels, column, error):
    with pytest.raises(UserError, match=f"^--prompt_sampling {error}"):
        difficulties(leveled(levels), column)


def test_a_column_may_have_colons():
    config = {"actor_model_name_or_path": "m", "reward_fn": ["f"], "advantage_estimator": "rloo"}
    config |= {"num_samples_per_prompt": 2, "prompt_sampling": "curriculum:a:b"}
    RLHFConfig(**config).validate()
    assert np.array_equal(difficulties([{"columns": '{"a:b": 1}'}], "a:b"), [1.0])
