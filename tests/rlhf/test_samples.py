"""Sample answers: tokens and their numbers by hand; text of tokens; lines of the log."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.inference.protocol import Rollout
from dschat.rlhf.experience import from_rollout
from dschat.rlhf.reporter import answer_table, format_answers, sample_row, token_texts


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def experience(tokenizer):
    """Two answers to each of two prompts: "ab" and "a", then "b" and one without a score."""
    prompts = [ids_of(tokenizer, text) for text in ("2+2=", "2+2=", "3+3=", "3+3=")]
    a, b = ids_of(tokenizer, "a"), ids_of(tokenizer, "b")
    eos = [tokenizer.eos_token_id]
    answers = [[*a, *b, *eos], [*a, *eos], b, b]
    logprobs = [[-1.0] * len(answer) for answer in answers]
    rollout = Rollout(answers, logprobs, ["stop", "stop", "length", "length"])
    e = from_rollout(prompts, rollout, 0)
    e.logprobs = torch.tensor([[-1.0, -0.5, -0.25], [-1.0, -1, 0], [-2.0, 0, 0], [0.0, 0, 0]])
    e.ref_logprobs = torch.tensor([[-2.0, -0.25, -0.25], [0.0, 0, 0], [-1.0, 0, 0], [0.0, 0, 0]])
    e.advantages = torch.tensor([[0.5, 0.25, -1.0], [0.0, 0, 0], [math.nan, 0, 0], [0.0, 0, 0]])
    e.scores = torch.tensor([1.5, 0.5, -1 / 3, 0.0])
    e.scored = torch.tensor([True, True, True, False])
    return e


def test_a_row_by_hand(experience, tokenizer):
    row = sample_row(experience, tokenizer, 2, has_kl=True)
    assert row["scores"] == [1.5, 0.5, -0.3333, None]
    assert row["answer_lengths"] == [3, 2, 1, 1]
    first, second = row["samples"]  # the first answer to each prompt
    assert first == {
        "prompt": "2+2=",
        "answer": "ab",
        "score": 1.5,
        "answer_length": 3,
        "finished": True,
        "kl": 0.75,
        "tokens": ["a", "b", tokenizer.eos_token],
        "token_kl": [1.0, -0.25, 0.0],
        "advantages": [0.5, 0.25, -1.0],
    }
    assert (second["answer"], second["kl"], second["finished"]) == ("b", -1.0, False)
    assert second["advantages"] == [None]  # JSON has no NaN


def test_without_a_reference_there_is_no_kl(experience, tokenizer):
    (first, _) = sample_row(experience, tokenizer, 2, has_kl=False)["samples"]
    assert (first["kl"], first["token_kl"]) == (None, None)


def test_turns_are_apart_and_have_roles(experience, tokenizer):
    """In prompts of several turns, and in answers with an environment's tokens; nowhere else."""
    turns = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = ids_of(tokenizer, rendered)
    answer = [*ids_of(tokenizer, "ab<|end|><|user|>higher<|assistant|>b"), tokenizer.eos_token_id]
    drawn = [token not in ids_of(tokenizer, "<|user|>higher<|assistant|>") for token in answer]
    rollout = Rollout([answer], [[0.0] * len(answer)], ["stop"], drawn=[drawn])
    for sources, prompt in (([turns], rendered), ([turns[:1]], "u"), (["text"], "uau")):
        e = replace(from_rollout([ids], rollout, 0), sources=sources)
        (sample,) = sample_row(e, tokenizer, 1, has_kl=False)["samples"]
        assert sample["prompt"] == prompt
        assert sample["answer"] == "ab<|end|><|user|>higher<|assistant|>b<|end|>"


def test_lines_of_the_log_show_control_characters_escaped(experience, tokenizer):
    table = answer_table(sample_row(experience, tokenizer, 2, has_kl=True))
    table[1] |= {"answer": "\x1b[2J", "score": None}
    assert format_answers(table, boxed=False).splitlines() == [
        "  +1.50  '2+2=' -> 'ab'",
        "   none  '3+3=' -> '\\x1b[2J'",
    ]


def test_a_table_on_a_terminal_has_no_control_characters(experience, tokenizer):
    table = answer_table(sample_row(experience, tokenizer, 2, has_kl=True))
    table[0]["answer"] = "x\x1b]0;y\x07[bold]z\u202e"
    text = "".join(re.findall(r"[!-~]", format_answers(table, boxed=True)))
    assert r"x\x1b]0;y\x07[bold]z\u202e" in text  # neither a terminal's nor rich's commands
    assert "+1.50" in text
    assert "0.75" in text


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_texts_of_tokens_join_to_the_answer(tokenizer, data):
    """Also special tokens, and tokens that end within a character."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert "".join(texts) == whole


def test_a_character_of_several_tokens_is_with_the_last(tokenizer):
    ids = ids_of(tokenizer, "日")
    assert len(ids) > 1
    assert token_texts(tokenizer, ids) == [""] * (len(ids) - 1) + ["日"]
