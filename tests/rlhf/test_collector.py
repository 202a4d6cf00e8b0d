"""What fills a rollout, without any model: what bounds scores, what counts, which prompts come."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from dschat import dist
from dschat.config import RLHFConfig, UserError
from dschat.rlhf.collect import Collected, Collector, Prompts
from dschat.rlhf.experience import from_rollout
from dschat.rlhf.ppo import DeepSpeedPPOTrainer
from dschat.rlhf.rewards import RewardPrograms, SourceScores
from dschat.rollout import Rollout


def rule(answers):
    return [0.0] * len(answers)


def collector_of(*functions, reward_model=False, more=None, **knobs):
    engine = SimpleNamespace(reward=object() if reward_model else None)
    args = RLHFConfig(**knobs)
    return Collector(engine, args, RewardPrograms.of(args, functions), more)


@pytest.mark.parametrize(
    ("functions", "reward_model", "clip_reward", "bound", "said"),
    [
        ([], True, None, 5, "score: reward_model x 1, clipped to +-5"),
        ([(rule, 0)], True, None, 5, "reward_model x 1 + rule (logged), clipped to +-5"),
        ([(rule, 0.5)], True, None, None, "reward_model x 1 + rule x 0.5, as it is"),
        ([rule], False, None, None, "score: rule x 1, as it is"),
        ([rule], False, 2.0, 2, "score: rule x 1, clipped to +-2"),
    ],
)
def test_what_bounds_the_score(functions, reward_model, clip_reward, bound, said, caplog):
    with caplog.at_level(logging.INFO, "dschat"):
        collector = collector_of(*functions, reward_model=reward_model, clip_reward=clip_reward)
    assert collector.clip == bound
    assert said in caplog.text


def test_groups_that_the_clip_makes_alike_teach_nothing():
    """Those with a score that is not finite are kept, for the trainer to see."""
    pairs = [[10, 40], [1, 2], [math.inf, math.inf], [math.nan, 1], [-9, 9]]
    scores = torch.tensor(pairs).float().flatten()
    e = SimpleNamespace(numbers=torch.arange(14, 24), scores=scores)
    assert collector_of(reward_model=True)._that_differ(e, 7, 5, 2) == [8, 9, 10, 11]
    assert collector_of(rule)._that_differ(e, 7, 5, 2) == [7, 8, 9, 10, 11]


def test_a_source_that_is_only_logged_decides_nothing(monkeypatch):
    collector = collector_of(rule, (rule, 0))
    rollout = Rollout([[5, 6]] * 3, [[-1.0, -1.0]] * 3, ["stop"] * 3)
    collected = Collected(from_rollout([[1]] * 3, rollout, 0), 3, {}, [])
    scores = torch.tensor([1.0, 2.0, 3.0])
    logged = torch.tensor([math.nan, math.inf, 0.5])
    steps = [[math.nan] * 2] * 3
    sources = [SourceScores("rule", 1.0, scores), SourceScores("rule_2", 0.0, logged, steps)]
    monkeypatch.setattr(collector, "sources_of", lambda *_: sources)
    collector.score(collected)
    assert collected.experience.scores.tolist() == [1, 2, 3]
    assert not collected.experience.token_scores.any()
    means = {"objective/scores/rule": 2, "objective/scores/rule_2": 0.5}
    assert collected.metrics == means


def test_what_a_source_says_nothing_of_does_not_count_in_its_mean(monkeypatch):
    collector = collector_of(rule)
    rollout = Rollout([[5]] * 4, [[-1.0]] * 4, ["stop"] * 4)
    collected = Collected(from_rollout([[1]] * 4, rollout, 0), 4, {}, [])
    applies = torch.tensor([True, False, True, False])
    source = SourceScores("rule", 1.0, torch.tensor([1.0, 0, 2.0, 0]), applies=applies)
    monkeypatch.setattr(collector, "sources_of", lambda *_: [source])
    collector.score(collected)
    assert collected.metrics == {"objective/scores/rule": 1.5}


def test_prompts_that_are_used_up_are_asked_anew():
    collector = collector_of(rule, more=iter([[[3]], [[4], [5]]]))
    again = Prompts([[1], [2]])
    rounds = [collector._next_prompts(again, 2).ids for _ in range(4)]
    assert rounds == [[[3], [4]], [[5], [1]], [[2], [1]], [[2], [1]]]


def test_prompts_that_are_used_up_on_one_rank_are_asked_anew_on_all(monkeypatch):
    theirs = Prompts([[9]]), True  # what the other rank brings: its own prompt, as it has no more
    monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, theirs])
    taken = []
    collector = collector_of(rule, more=(taken.append(i) or [[i]] for i in range(9)))
    rounds = [collector._next_prompts(Prompts([[7]]), 2).ids for _ in range(3)]
    assert rounds == [[[0], [9]], [[7], [9]], [[7], [9]]]
    assert taken == [0]


def test_programs_that_are_made_are_not_made_again():
    args = RLHFConfig()
    programs = RewardPrograms.of(args, [rule])
    engine = SimpleNamespace(reward=None)
    trainer = DeepSpeedPPOTrainer(engine, args, programs=programs)
    assert trainer.programs is programs
    with pytest.raises(UserError, match="give reward_fns to RewardPrograms.of"):
        DeepSpeedPPOTrainer(engine, args, reward_fns=[rule], programs=programs)
