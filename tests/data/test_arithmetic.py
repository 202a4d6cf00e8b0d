"""Sums and differences that a program can check: right references, a lazy pupil, nothing leaks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dschat.builtin_eval import gold_knows
from dschat.builtin_model import tiny_tokenizer
from dschat.config import CommonConfig, RLHFConfig, SFTConfig, UserError
from dschat.data.arithmetic import arithmetic_rows
from dschat.data.batches import PromptBatches
from dschat.data.sources import load_source
from dschat.data.tokenize import prompt_dataset, sft_dataset

ROOT = Path(__file__).parents[2]
SHARED = {"data_path": ["builtin/arithmetic"], "data_split": "1,0,1"}


@pytest.fixture(scope="module", params=(0, 1))
def rows(request):
    return arithmetic_rows(request.param)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def result(prompt):
    a, operator, b = re.fullmatch(r"([1-9]\d)([+-])([1-9]\d)=", prompt).groups()
    return int(a) + int(b) if operator == "+" else int(a) - int(b)


def test_every_sum_and_difference_of_two_digits_stands_once(rows):
    assert {split: len(found) for split, found in rows.items()} == {"train": 6835, "eval": 500}
    every = rows["train"] + rows["eval"]
    assert len({row["prompt"] for row in every}) == len(every)
    # by hand: for a in 10..89 the 90 - a numbers b from 10 on; for a in 10..99 the a - 9 up to a
    sums = sum("+" in row["prompt"] for row in every)
    assert sums == sum(90 - a for a in range(10, 90)) == 3240
    assert len(every) - sums == sum(a - 9 for a in range(10, 100)) == 4095


def test_references_are_right_and_short(rows):
    for row in rows["train"] + rows["eval"]:
        assert list(row) == ["prompt", "reference", "demonstration"]
        assert row["reference"] == str(result(row["prompt"]))
        assert 0 <= int(row["reference"]) < 100


def test_the_pupil_works_a_third_out_rounds_a_third_down_and_leaves_the_rest(rows):
    counts = {"right": 0, "rounded": 0, "left": 0}
    for row in rows["train"] + rows["eval"]:
        right, given = int(row["reference"]), row["demonstration"]
        if right % 10 == 0:
            continue  # rounded or not is the same here
        way = "left" if given == "?" else "right" if given == str(right) else "rounded"
        assert way != "rounded" or int(given) == right - right % 10
        counts[way] += 1
    shares = {way: count / sum(counts.values()) for way, count in counts.items()}
    assert shares == pytest.approx({"right": 0.36, "rounded": 0.34, "left": 0.30}, abs=0.025)


def test_rows_depend_on_the_seed_alone():
    source = (
        "import json; from dschat.data.arithmetic import arithmetic_rows as a; "
        "print(json.dumps(a(3)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == arithmetic_rows(3) != arithmetic_rows(4)


def test_step_1_learns_demonstrations_and_step_3_has_other_prompts_with_references(tokenizer):
    train, held_out = sft_dataset(SFTConfig(**SHARED), tokenizer, "both")
    demonstrations = {
        row["prompt"]: row["demonstration"] for part in arithmetic_rows().values() for row in part
    }
    seen = set()
    for table in (train, held_out):
        for ids in table["input_ids"]:
            text = tokenizer.decode(ids).removeprefix("<|user|>").removesuffix("<|end|>")
            prompt, answer = text.split("<|assistant|>")
            assert answer == demonstrations[prompt]
            seen.add(prompt)
    prompts = prompt_dataset(RLHFConfig(**SHARED), tokenizer)
    batch = next(iter(PromptBatches(prompts, len(prompts), 0, 1, seed=0)))
    assert not seen & set(batch.texts)
    assert batch.columns["reference"] == [str(result(text)) for text in batch.texts]
    assert len(train) + len(prompts) == 6835
    assert abs(len(train) - len(prompts)) <= 1


def test_every_digit_and_sign_is_a_token(tokenizer):
    ids = prompt_dataset(RLHFConfig(**SHARED), tokenizer, "eval")["prompt_ids"]
    assert {len(prompt) for prompt in ids} == {len("<") + len("47+38=") + len(">")}
    assert [len(tokenizer.tokenize(answer)) for answer in ("85", "9", "?")] == [2, 1, 1]


def test_step_2_has_no_pairs_here_and_the_gold_scorer_is_not_asked():
    config = CommonConfig(data_path=["builtin/arithmetic"])
    with pytest.raises(UserError, match=r"builtin/arithmetic has no chosen answers.* step 2"):
        load_source("builtin/arithmetic", config, "reward")
    assert gold_knows(["builtin/chat", "builtin/chat:0.5"])
    assert not gold_knows(["builtin/chat", "builtin/arithmetic"])
