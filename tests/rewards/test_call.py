"""The arguments of a call, selected by parameter names; and the validation of its result."""

import numpy as np
import pytest
import torch

from dschat.config import UserError
from dschat.rewards.call import Fault, arguments, parameters, shortened, sources_of, values_of


def ours(prompts, answers, prompt_ids, answer_ids, finish_reasons, tests, level=1): ...
def trls(completions, completion_ids, **kwargs): ...
def by_reference(answers, reference): ...
def bound(answers, bonus): ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            ours,
            {
                "prompts": ["p0", "p1"],
                "answers": ["a0", "a1"],
                "prompt_ids": [[0], [0]],
                "answer_ids": [[0], [0, 1]],
                "finish_reasons": ["length", "stop"],
                "tests": [8, 9],
            },
        ),
        (by_reference, {"answers": ["a0", "a1"], "reference": ["r", "s"]}),
        (bound, {"answers": ["a0", "a1"]}),
    ],
)
def test_arguments_follow_the_signature(samples, function, expected):
    given = samples(2, tests=[8, 9], solution=["r", "s"], target=["x", "y"])
    given.prompts[1] = "p1"
    sources = sources_of(parameters(function), {"bonus"}, {}, given.columns)
    assert arguments(sources, given) == expected


def test_a_function_of_trl_gets_all(samples):
    given = samples(2, solution=["r", "s"])
    got = arguments(sources_of(parameters(trls), {}, {}, given.columns), given)
    assert set(got) == {
        *("prompts", "completions", "answers", "prompt_ids", "completion_ids", "answer_ids"),
        *("finish_reasons", "solution"),
    }
    assert got["completions"] == got["answers"] == ["a0", "a1"]
    assert got["completion_ids"] == [[0], [0, 1]]


def test_the_reference_is_the_first_of_its_columns():
    for columns, expected in [
        (["answer", "reference", "solution"], "reference"),
        (["answer", "solution"], "solution"),
        (["target", "answer"], "answer"),
        (["ground_truth"], "ground_truth"),
    ]:
        assert sources_of(parameters(by_reference), {}, {}, columns)["reference"] == expected
    with pytest.raises(UserError, match=r"column reference or solution .*\(it has: a, b\)"):
        sources_of(parameters(by_reference), {}, {}, ["b", "a"])


def test_results():
    lengths = [2, 1, 3]
    for result in (
        [1, 0.5, True],
        (1, 0.5, 1),
        np.array([1, 0.5, 1], dtype=np.float32),
        torch.tensor([1, 0.5, 1]),
        [np.float64(1), torch.tensor(0.5), np.int64(1)],
    ):
        assert values_of(result, lengths) == [1, 0.5, 1]
    mixed = [[0.5, 1], None, torch.tensor([1.0, 2, 3])]
    assert values_of(mixed, lengths) == [[0.5, 1], None, [1, 2, 3]]
    assert values_of([], []) == []


def test_an_invalid_value_is_a_fault_of_its_sample():
    values = values_of([1.0, float("nan"), "1", [1.0], b"", object()], [2] * 6)
    assert values[0] == 1
    assert [(row, v.problem) for row, v in enumerate(values) if isinstance(v, Fault)] == [
        (1, "returned nan"),
        (2, "returned '1', not a number"),
        (3, "returned 1 values for an answer of 2 tokens"),
        (4, "returned b'', not a number"),
        (5, "returned a object, not a number"),
    ]


def test_long_text_loses_its_middle():
    assert shortened("a" * 20, 20) == "a" * 20
    short = shortened("a" * 50 + "b" * 50, 20)
    assert len(short) == 20
    assert short[0] + short[-1] == "ab"
