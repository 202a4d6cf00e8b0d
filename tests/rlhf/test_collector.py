"""Collecting a rollout, without any model: clipping, combined scores, the order of prompts."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from dschat.config import RLHFConfig, UserError
from dschat.data.batches import PromptTable
from dschat.inference.protocol import Rollout, SamplingParams
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rewards.scoring import SourceScores, any_applies
from dschat.rlhf.experience import from_rollout
from dschat.rlhf.prompts import PromptQueue
from dschat.rlhf.rollout_policies import DynamicSampling
from dschat.rlhf.trainer import DeepSpeedPPOTrainer


def rule(answers):
    return [0.0] * len(answers)


@pytest.mark.parametrize(
    ("functions", "reward_model", "clip_reward", "bound", "said"),
    [
        ([], True, None, 5, "score: reward_model x 1, clipped to +-5"),
        ([(rule, 0)], True, None, 5, "reward_model x 1 + rule (logged), clipped to +-5"),
        ([(rule, 0.5)], True, None, None, "reward_model x 1 + rule x 0.5, not clipped"),
        ([rule], False, None, None, "score: rule x 1, not clipped"),
        ([rule], False, 2.0, 2, "score: rule x 1, clipped to +-2"),
    ],
)
def test_what_bounds_the_score(
    functions, reward_model, clip_reward, bound, said, collector_of, caplog
):
    reward = object() if reward_model else None
    with caplog.at_level(logging.INFO, "dschat"):
        collector = collector_of(*functions, reward=reward, clip_reward=clip_reward)
    assert collector.clip == bound
    assert said in caplog.text


def test_groups_that_the_clip_makes_equal_are_dropped(collector_of):
    """Those with a score that is not finite are kept, for the trainer to see."""
    pairs = [[10, 40], [1, 2], [math.inf, math.inf], [math.nan, 1], [-9, 9], [1, 0], [0, 0]]
    scores = torch.tensor(pairs).float().flatten()
    scored = torch.tensor([True] * 11 + [False] * 3)  # 1 and nothing is one score, no difference
    rollout = Rollout([[5]] * 14, [[-1.0]] * 14, ["stop"] * 14)
    for functions, reward, kept in (([], object(), [1, 2, 3, 4]), ([rule], None, range(5))):
        collector = collector_of(*functions, reward=reward)
        e = from_rollout([[i // 2] for i in range(14)], rollout, 0)
        e.scores, e.scored, e.num_prompts = scores, scored, 7
        collector.ask = lambda *_, e=e: (e, None)
        collector.policy = DynamicSampling(1, PromptQueue())
        e, _ = collector.collect(PromptTable([[1]] * 7), SamplingParams(n=2))
        assert e.input_ids[::2, 0].tolist() == [*kept]


def scored(collector, *sources):
    """The experience of answers that came with the scores of ``sources``."""
    count = len(sources[0].scores)
    answers = Rollout([[5, 6]] * count, [[-1.0, -1.0]] * count, ["stop"] * count)
    came_with = SimpleNamespace(result=lambda: [*sources])
    return collector.score(from_rollout([[1]] * count, answers, 0), came_with)


def test_a_source_that_is_only_logged_decides_nothing(collector_of):
    logged = [[math.nan] * 2, math.inf, [0.25, 0.25]]
    sources = [SourceScores("rule", 1.0, [1.0, 2.0, 3.0]), SourceScores("rule_2", 0.0, logged)]
    e = scored(collector_of(rule, (rule, 0)), *sources)
    assert e.scores.tolist() == [1, 2, 3]
    assert not e.token_scores.any()
    means = {"objective/scores/rule": 2, "objective/scores/rule_2": 0.5}
    spread = {"objective/scores/rule_std": (2 / 3) ** 0.5, "objective/scores/rule_2_std": 0}
    assert e.metrics == pytest.approx(means | spread)


def test_an_answer_that_every_source_declines_has_no_score(collector_of, caplog):
    """Nor does it count in a source's mean. What failed is left out; what is only logged, and what
    scores 0, is something else.
    """
    collector = collector_of(rule, (rule, 2.0), (rule, 0.0))
    sources = [
        SourceScores("rule", 1.0, [1.0, None, None, 0.0, None, 2.0]),
        SourceScores("rule_2", 2.0, [None, None, 3.0, None, math.nan, -1.0]),
        SourceScores("rule_3", 0.0, [5.0, 5.0, None, None, None, None]),
    ]
    for _ in range(2):
        e = scored(collector, *sources)
        assert e.numbers.tolist() == [0, 1, 2, 3, 5]
        assert e.scores.tolist() == [1, 0, 6, 0, 0]
        assert e.scored.tolist() == [True, False, True, True, True]
        means = {name: v for name, v in e.metrics.items() if not name.endswith("_std")}
        assert means == {
            "objective/scores/rule": 1,
            "objective/scores/rule_2": 1,
            "objective/scores/rule_3": 5,
            "rollout/unscored": 2,
        }
    assert caplog.text.count("1 of 6 answers have no score: every source returned None") == 1
    assert any_applies([sources[2]]).all()  # nothing has a weight: nothing is declined


COUNTS = ("time/generate_s", "rollout/unscored", "throughput/preemptions")


def test_later_rounds_sample_as_many_prompts_as_are_likely_missing(collector_of):
    """6 of 8 prompts differ: 2 are missing, and 2 x 8 / 6 are asked; 7 of 11: 11 / 7 of them."""
    differ = [[1, 2, 3, 4, 5, 6, 0, 0], [7, 0, 0], [8, 9]]  # one more than is missing
    asked = []

    def ask(sampling, prompts, before):
        pairs, total = differ[len(asked)], len(prompts.ids)
        asked.append(len(prompts.ids))
        rollout = Rollout([[5]] * 2 * total, [[-1.0]] * 2 * total, ["stop"] * 2 * total)
        e = from_rollout(
            prompts.pick([row for row in range(len(prompts)) for _ in range(2)]).ids,
            rollout,
            0,
            before * 2,
        )
        e.scores = torch.tensor([x for pair in pairs for x in (0.0, float(pair))])
        e.num_prompts = total
        e.metrics = dict.fromkeys(COUNTS, 1.0) | {"throughput/occupancy": float(total)}
        return e, None

    more = PromptQueue([[i]] for i in range(100))
    collector = collector_of(rule)
    collector.ask, collector.policy = ask, DynamicSampling(10, more)
    e, _ = collector.collect(PromptTable([[i] for i in range(8)]), SamplingParams(n=2))
    assert asked == [8, 3, 2]
    assert e.num_prompts == 8
    assert e.numbers.tolist() == list(range(16))
    assert e.scores.tolist() == [x for k in range(1, 9) for x in (0, k)]
    assert e.metrics["sampling/kept_prompts"] == 8
    assert e.metrics["sampling/waste"] == pytest.approx(5 / 13)
    weighed = (8 * 8 + 3 * 3 + 2 * 2) / 13  # what is no count is a mean over prompts
    assert e.metrics["throughput/occupancy"] == pytest.approx(weighed)
    assert [e.metrics[name] for name in COUNTS] == [3, 3, 3]


def test_every_iteration_samples_with_its_own_seed():
    knobs = {"max_answer_seq_len": 9, "min_answer_seq_len": 2, "num_samples_per_prompt": 3}
    knobs |= {"temperature": 0.7, "top_p": 0.9, "top_k": 11, "min_p": 0.05, "seed": 5}
    args = RLHFConfig(**knobs)
    trainer = DeepSpeedPPOTrainer(
        SimpleNamespace(reward=None, teacher=None, num_iters=1),
        args,
        reward_functions=RewardFunctions(args, [rule]),
    )
    asked = []
    for trainer.iteration in range(3):
        asked.append(trainer.sampling())
    assert len({sampling.seed for sampling in asked}) == 3
    rest = {"temperature": 0.7, "top_p": 0.9, "top_k": 11, "min_p": 0.05, "n": 3}
    expected = SamplingParams(max_new_tokens=9, min_new_tokens=2, seed=asked[2].seed, **rest)
    assert asked[2] == expected


def test_loaded_reward_functions_are_not_loaded_again():
    args = RLHFConfig()
    functions = RewardFunctions(args, [rule])
    engine = SimpleNamespace(reward=None, teacher=None, num_iters=1)
    trainer = DeepSpeedPPOTrainer(engine, args, reward_functions=functions)
    assert trainer.reward_functions is functions
    with pytest.raises(UserError, match="give reward_fns to RewardFunctions, or"):
        DeepSpeedPPOTrainer(engine, args, reward_fns=[rule], reward_functions=functions)
