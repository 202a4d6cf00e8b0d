"""Reward functions as TRL, OpenRLHF and verl document them, and a call of what is loaded."""

FILE = """
import torch


def accuracy(completions, solution, **kwargs):  # TRL, on chats
    contents = [completion[0]["content"] for completion in completions]
    assert all(prompt[-1]["role"] == "user" for prompt in kwargs["prompts"])
    assert len(kwargs["completion_ids"]) == len(contents)
    return [1.0 if content == right else 0.0 for content, right in zip(contents, solution)]


def shortness(prompts, completions, log_metric=None, trainer_state=None):  # TRL, on text
    return [-float(len(completion)) for completion in completions]


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
