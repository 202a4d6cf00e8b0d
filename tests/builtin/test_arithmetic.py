"""builtin/arithmetic: right references, demonstrations that stop early, no leaks."""

import re
from collections import Counter
from pathlib import Path

import pytest

from dschat.builtin.arithmetic import addition_rows, arithmetic_rows
from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.config import CommonConfig, UserError
from dschat.data.sources.splits import load_source
from dschat.runtime.gold_eval import gold_knows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.slow)])
def rows(request):
    return arithmetic_rows(request.param)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def steps_of(prompt):
    total, *terms = re.fullmatch(r"([1-9])([+-][1-9])([+-][1-9])([+-][1-9])=", prompt).groups()
    total, steps = int(total), []
    for term in terms:
        total += int(term)
        steps.append(total)
    return steps


def test_prompts_are_unique_and_references_right(rows):
    assert {split: len(found) for split, found in rows.items()} == {"train": 24_000, "eval": 500}
    every = rows["train"] + rows["eval"]
    assert len({row["prompt"] for row in every}) == len(every)
    for row in every:
        assert list(row) == ["prompt", "reference", "demonstration"]
        steps = steps_of(row["prompt"])
        assert row["reference"] == str(steps[-1])
        assert min(steps) >= 0


def test_demonstrations_are_right_and_a_third_of_them_finish(rows):
    every = rows["train"] + rows["eval"]
    stops = Counter()
    for row in every:
        shown = [int(step) for step in row["demonstration"].split(",")]
        assert shown == steps_of(row["prompt"])[: len(shown)]
        stops[len(shown)] += 1
    shares = {stop: number / len(every) for stop, number in stops.items()}
    assert shares == pytest.approx({1: 0.33, 2: 0.33, 3: 0.34}, abs=0.012)  # four deviations


def test_every_digit_and_sign_is_a_token(tokenizer, rows):
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows["eval"]]
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    assert {len(prompt) for prompt in ids} == {len("<7-3+5+8=>")}
    assert [len(tokenizer.tokenize(answer)) for answer in ("9", "4,9,17")] == [1, 6]


def test_step_2_is_refused_and_the_gold_scorer_does_not_apply():
    config = CommonConfig(data_path=["builtin/arithmetic"])
    with pytest.raises(UserError, match=r"builtin/arithmetic has no chosen answers.* step 2"):
        load_source("builtin/arithmetic", config, "reward")
    assert gold_knows(["builtin/chat", "builtin/chat:0.5"])
    assert not gold_knows(["builtin/chat", "builtin/arithmetic"])


def test_additions_are_right_and_none_is_held_out_twice():
    rows = addition_rows()
    numbers = {split: [] for split in rows}
    for split, part in rows.items():
        for row in part:
            said = re.fullmatch(
                r"What is (\d\d) plus (\d\d)\? Answer with the number only\.", row["prompt"]
            )
            first, second = map(int, said.groups())
            assert row["reference"] == str(first + second)
            numbers[split].append((first, second))
    assert {split: len(part) for split, part in numbers.items()} == {"train": 2000, "eval": 200}
    sets = {frozenset(pair) for part in numbers.values() for pair in part}
    assert len(sets) == 2200
    first, second = (sorted(column) for column in zip(*numbers["train"], strict=True))
    assert abs(sum(first) - sum(second)) < 0.02 * sum(first)  # either may be the larger one
