"""Reward functions as TRL, OpenRLHF and verl document them, and a call of what is loaded."""

FILE = """
import asyncio

import torch


def shortness(prompts, completions, log_metric, log_extra, trainer_state):  # TRL, on text
    lengths = [len(completion) for completion in completions]
    log_metric("mean_length", torch.tensor(lengths).float().mean())
    log_extra("length", lengths)
    return [-float(length) - trainer_state.global_step for length in lengths]


def any_arguments(completions, **kwargs):  # TRL
    kwargs["log_metric"]("calls", 3)
    return [float(kwargs["trainer_state"].global_step)] * len(completions)


def own(answers, **kwargs):  # dschat
    assert not {"log_metric", "trainer_state"} & {*kwargs}
    return [0.0] * len(answers)


def by_ids(completion_ids, **kwargs):  # TRL
    assert len(kwargs["completions"]) == len(kwargs["prompts"]) == len(completion_ids)
    kwargs["log_metric"]("calls", 1)
    return [float(isinstance(prompt, list)) for prompt in kwargs["prompts"]]


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):  # verl's batch form
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [compute_score(*row) for row in rows]


async def later_reward(queries, prompts, labels):  # OpenRLHF
    await asyncio.sleep(0)
    return {"rewards": reward_func(queries, prompts, labels)["rewards"]}


class Later:  # verl
    async def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        await asyncio.sleep(0)
        return compute_score(data_source, solution_str, ground_truth, extra_info)


def reward_func(queries, prompts, labels):  # OpenRLHF
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    scores = torch.tensor([float(q.endswith(str(a))) for q, a in zip(queries, labels)])
    return {"rewards": scores, "scores": scores, "extra_logs": {"n": scores}}


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):  # verl
    assert data_source in ("", "math")
    found = float(solution_str == ground_truth) + bonus
    return {"score": found, "acc": found} if extra_info else found
"""


def scores_of(functions, given):
    functions.check_columns(given.columns)
    return [source.scores.tolist() for source in functions.score(given).result()]
