"""Texts begin with one BOS and end with no EOS, whatever the tokenizer adds: in every step, in
pretraining text and at the server.
"""

import json
from types import SimpleNamespace

import pytest
from byte_tokenizers import byte_tokenizer
from data_files import put, step_table

from dschat.data.pretraining_text import text_dataset
from dschat.data.segments import prompt_text_ids
from dschat.models.tokenizer import text_ids
from dschat.serving.app import _encoded

FRAMES = ("$A", "<s> $A", "<s> $A </s>", "$A </s>", "<|im_start|> <s> $A")
every_frame = pytest.mark.parametrize("frame", FRAMES)


@pytest.fixture(autouse=True)
def own_cache(own_cache):
    """In every test."""


def made(frame):
    """A tokenizer that adds ``frame``, and what stands before a text in it."""
    tokens = {"bos_token": "<s>"} if "<s>" in frame else {}
    head = frame.partition("$A")[0].replace(" ", "")
    return byte_tokenizer("</s>", frame=frame, **tokens), head


@every_frame
@pytest.mark.parametrize("text", ["x", "aa", " the answer", "é日", "a<s>b", "ab</s>", "</s>"])
def test_ids_are_those_of_transformers_without_an_eos_of_its_own(frame, text):
    tokenizer, head = made(frame)
    (ids,) = text_ids(tokenizer, [text])
    assert [*ids, *([tokenizer.eos_token_id] if "</s>" in frame else [])] == tokenizer(
        text
    ).input_ids
    assert text_ids(tokenizer, [head + text, text]) == [ids, ids]
    (alone,) = text_ids(tokenizer, [text], begins=False)
    assert alone == tokenizer(text, add_special_tokens=False).input_ids


@every_frame
def test_one_bos_in_every_step(frame, tmp_path):
    tokenizer, head = made(frame)
    plain = {"prompt": "the question", "chosen": "yes", "rejected": "no"}
    for purpose, column in (("sft", "input_ids"), ("reward", "chosen_ids"), ("rlhf", "prompt_ids")):
        rows = [plain, {**plain, "prompt": head + plain["prompt"]}]
        table = step_table(put(tmp_path / f"{purpose}.jsonl", rows), tokenizer, purpose)
        first, second = table[column]
        assert first == second
        assert tokenizer.decode(first).startswith(head + plain["prompt"])
    assert prompt_text_ids(tokenizer, head + "x") == prompt_text_ids(tokenizer, "x")


@every_frame
def test_prompts_of_completions(frame):
    tokenizer, head = made(frame)
    prompts = ["the question", head + "the question", "", [5, 6]]
    first, second, empty, ids = _encoded(tokenizer, SimpleNamespace(prompts=prompts))[0]
    assert tokenizer.decode(first) == head + "the question"
    assert second == first
    assert tokenizer.decode(empty) == head
    assert ids == [5, 6]


@every_frame
def test_a_bos_before_each_document(frame, tmp_path):
    tokenizer, head = made(frame)
    lines = (json.dumps({"text": text}) for text in ("ab", head + "cd", "the answer"))
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    (block,) = text_dataset(str(tmp_path / "text.jsonl"), "text", tokenizer, 99)["input_ids"]
    assert tokenizer.decode(block) == "".join(f"{head}{t}</s>" for t in ("ab", "cd", "the answer"))
