"""Reward functions score complete prompts while others are generated, with the same results."""

import math
import random
import threading
from functools import partial

import pytest
import torch
from program_cases import trainer_of
from step_cases import Case, my_prompts

from dschat.data.batches import PromptTable
from dschat.inference.protocol import Rollout, SamplingParams
from dschat.rewards.scoring import RewardError

N = 3
WAIT_S = 60


def neighbours(prompt_ids, answer_ids):
    """Of neighbours with the same prompt, how many there are and how many of them are shorter."""
    scores, rows = [], range(len(prompt_ids))
    for i in rows:
        first = next(j for j in range(i, -1, -1) if j == 0 or prompt_ids[j - 1] != prompt_ids[i])
        last = next(j for j in rows[i:] if j + 1 == len(rows) or prompt_ids[j + 1] != prompt_ids[i])
        lengths = [len(answer_ids[j]) for j in range(first, last + 1)]
        scores.append(100.0 * len(lengths) + sum(x < len(answer_ids[i]) for x in lengths))
    return scores


def by_token(answer_ids):
    return [[float(t) for t in ids] if len(ids) % 2 else None for ids in answer_ids]


def column(answers, level):
    return [x + 0.5 for x in level]


async def whole(answers):
    return [float(len(answers))] * len(answers)


class Scripted:
    """A generator whose prompts complete in a given order; those not in it at the end. Before the
    last one it calls ``wait``.
    """

    def __init__(self, rollout, order, wait=lambda: None):
        self.rollout, self.order, self.wait = rollout, list(order), wait

    def generate(self, prompts, sampling, indices, *, answered=None):
        rest = [row for row in indices if row not in self.order]
        for row in (order := [row for row in self.order if row in indices] + rest):
            if row == order[-1]:
                self.wait()
            answers = self.rollout.part(row * sampling.n, (row + 1) * sampling.n)
            answered(indices.index(row), answers)
        return self.rollout


def pending(collector, rollout, order, prompts=None, calls=1, wait=lambda: None):
    """Waits for the scores of ``rollout``, whose prompts complete in that order."""
    prompts = prompts or PromptTable([[2 + i] for i in range(len(rollout) // N)])
    generator = Scripted(rollout, order, wait)
    made = collector.answers_of(generator, prompts, SamplingParams(n=N), 0, calls)
    return partial(collector.sources, *made, 8)


def rollout_of(draw, count):
    lengths = [draw.randint(1, 9) for _ in range(count * N)]
    ids = [[draw.randrange(9) for _ in range(length)] for length in lengths]
    return Rollout(ids, [[-1.0] * len(row) for row in ids], ["stop"] * len(ids))


def plain(sources):
    return [
        (s.name, s.weight, s.scores.nan_to_num(nan=-1).tolist(), s.token_scores, s.applies.tolist())
        for s in sources
    ]


@pytest.mark.parametrize("seed", range(8))
def test_scores_are_those_of_one_call(seed, collector_of):
    """Prompts complete in any order, in one or several calls, and some stand twice."""
    draw = random.Random(seed)
    count = draw.choice([1, 2, 7, 16])
    ids = [[draw.randrange(1, 1 + count)] for _ in range(count)]
    prompts = PromptTable(ids, columns={"level": list(range(count))})
    rollout = rollout_of(draw, count)
    reported = draw.sample(range(count), draw.randint(0, count))
    functions, seen = (neighbours, (by_token, 0.5), column, whole), []
    calls = draw.choice([1, 1, 2, 3])
    for pool in ("none", "thread"):
        collector = collector_of(*functions, reward_pool=pool, reward_workers=3)
        seen.append(plain(pending(collector, rollout, reported, prompts, calls)()))
    assert seen[0] == seen[1]


def test_calls_get_smaller_and_none_is_of_a_part_of_a_prompt(collector_of):
    """The last answer waits for the first call to begin, which waits for the last answer."""
    calls, began, generated = [], threading.Event(), threading.Event()

    def noted(prompts, prompt_ids):
        calls.append([ids[0] - 2 for ids in prompt_ids])
        began.set()
        assert generated.wait(WAIT_S)
        return [0.0] * len(prompts)

    def wait():
        assert began.wait(WAIT_S)
        generated.set()

    collector = collector_of(noted, reward_pool="thread", reward_workers=2)
    order = list(range(16))
    random.Random(1).shuffle(order)
    pending(collector, rollout_of(random.Random(0), 16), order, wait=wait)()
    assert sorted(len(call) // N for call in calls) == [1, 1, 1, 1, 2, 3, 3, 4]
    assert sorted(x for call in calls for x in call) == [i for i in range(16) for _ in range(N)]
    (largest,) = (call for call in calls if len(call) == 4 * N)
    assert largest == [i for i in sorted(order[:4]) for _ in range(N)]


@pytest.mark.parametrize(
    "flags", [{}, {"reward_pool": "thread", "reward_workers": 1}], ids=["none", "one worker"]
)
def test_functions_that_see_all_samples_still_do(flags, collector_of):
    sizes = []

    def noted(answers):
        sizes.append(len(answers))
        return [0.0] * len(answers)

    collector = collector_of(noted, whole, **flags)
    sources = pending(collector, rollout_of(random.Random(0), 5), range(5))()
    assert sizes == [15]
    assert sources[1].scores.tolist() == [15.0] * 15


@pytest.mark.parametrize("mode", ["skip", "error"])
def test_samples_that_fail_are_those_that_fail_in_one_call(mode, collector_of):
    def moody(answer_ids):
        if any(len(ids) > 6 for ids in answer_ids):
            raise ValueError("too long")
        return [1.0] * len(answer_ids)

    flags = {"reward_pool": "thread", "reward_workers": 3, "on_reward_error": mode}
    collector = collector_of(moody, **flags)
    rollout = rollout_of(random.Random(2), 9)
    made = pending(collector, rollout, [4, 1, 8, 0, 2])
    if mode == "error":
        with pytest.raises(
            RewardError, match="too long on 6 samples, the first on the prompt 'w2'"
        ):
            made()
    else:
        (source,) = made()
        failed = [math.isnan(x) for x in source.scores.tolist()]
        assert failed == [len(ids) > 6 for ids in rollout.token_ids]


def graded(prompt_ids, answer_ids):
    return [float(sum(ids) % 7 - len(p)) for p, ids in zip(prompt_ids, answer_ids, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"partial_rollout": True}, {}, {"dynamic_sampling": True}])
def test_a_run_is_the_same_to_the_bit(options, models_folder):
    """With functions that run afterwards, and with a pool that begins early. In one call of the
    generator: products round by how many prompts are answered together.
    """
    case, lines = Case("ppo", iterations=3), []
    for pool in ("none", "thread"):
        torch.manual_seed(0)
        settings = {
            "reward_pool": pool,
            "max_answer_seq_len": 24,
            "generation_batches": 1,
        } | options
        trainer = trainer_of(models_folder, [graded, neighbours], **settings)
        for iteration in range(case.iterations):
            e = trainer.generate_experience(my_prompts(case, iteration, trainer.args))
            trainer.train_rlhf(e)
            timed = ("time/", "throughput/", "memory/")
            lines.append({k: v for k, v in trainer.metrics.items() if not k.startswith(timed)})
        trainer.reward_functions.close()
    assert lines[:3] == lines[3:]
    assert lines[0]["objective/scores/neighbours"] > 200
