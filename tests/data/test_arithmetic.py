"""Sums and differences that a program can check: right references, a pupil in doubt, no leaks."""

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
SHARED = {"data_path": ["builtin/arithmetic"], "data_split": "1,48,1"}  # most of it aside


@pytest.fixture(scope="module", params=(0, 1))
def rows(request):
    return arithmetic_rows(request.param)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def result(prompt):
    first, *terms = re.fullmatch(r"([1-9])([+-][1-9])([+-][1-9])([+-][1-9])=", prompt).groups()
    return int(first) + sum(int(term) for term in terms)


def test_questions_stand_once_and_references_are_right(rows):
    assert {split: len(found) for split, found in rows.items()} == {"train": 24_000, "eval": 500}
    every = rows["train"] + rows["eval"]
    assert len({row["prompt"] for row in every}) == len(every)
    for row in every:
        assert list(row) == ["prompt", "reference", "demonstration"]
        assert row["reference"] == str(result(row["prompt"]))
    results = {int(row["reference"]) for row in every}
    assert results == set(range(37)) or results == set(range(36))  # 9+9+9+9 is one of 36,651


def test_the_pupil_answers_a_third_doubts_a_third_and_passes_the_rest(rows):
    every = rows["train"] + rows["eval"]
    for way, share in (("{}", 0.36), ("{}?", 0.34), ("?", 0.30)):
        number = sum(row["demonstration"] == way.format(row["reference"]) for row in every)
        assert abs(number / len(every) - share) < 0.012, way  # four standard deviations


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
    assert len(train) == len(prompts) == 480


def test_every_digit_and_sign_is_a_token(tokenizer):
    ids = prompt_dataset(RLHFConfig(**SHARED), tokenizer, "eval")["prompt_ids"]
    assert {len(prompt) for prompt in ids} == {len("<7-3+5+8=>")}
    assert [len(tokenizer.tokenize(answer)) for answer in ("17", "9", "17?", "?")] == [2, 1, 3, 1]


def test_step_2_has_no_pairs_here_and_the_gold_scorer_is_not_asked():
    config = CommonConfig(data_path=["builtin/arithmetic"])
    with pytest.raises(UserError, match=r"builtin/arithmetic has no chosen answers.* step 2"):
        load_source("builtin/arithmetic", config, "reward")
    assert gold_knows(["builtin/chat", "builtin/chat:0.5"])
    assert not gold_knows(["builtin/chat", "builtin/arithmetic"])
