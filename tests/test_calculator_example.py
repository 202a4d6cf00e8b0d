"""examples/calculator.py: right references, a tool that finds them, one prompt in all steps."""

import json
import re

import pytest

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.config import RLHFConfig, SFTConfig
from dschat.data.segments import prompt_text_ids
from dschat.data.tokenize import prompt_dataset, sft_dataset
from dschat.environments.contract import Observation, ToolResult
from dschat.environments.sources import load_environment
from dschat.environments.template_text import ObservationTokens
from examples.calculator import calculator, calculator_rows


def test_rows():
    rows = calculator_rows()
    assert {split: len(found) for split, found in rows.items()} == {"train": 12_000, "eval": 500}
    every = rows["train"] + rows["eval"]
    assert len({row["prompt"] for row in every}) == len(every)
    calls = 0
    for row in every:
        first, second = map(int, re.fullmatch(r"(\d{4})\*(\d{4})=", row["prompt"]).groups())
        assert row["reference"] == str(first * second)
        turns = row["demonstration"]
        if "tool_calls" not in turns[0]:
            assert turns[0]["content"] != row["reference"]
            continue
        calls += 1
        arguments = turns[0]["tool_calls"][0]["function"]["arguments"]
        assert calculator(**arguments) == turns[1]["content"] == turns[2]["content"]
        assert turns[2]["content"] == row["reference"]
    assert 0.48 < calls / len(every) < 0.52
    assert calculator_rows() == rows != calculator_rows(1)


@pytest.mark.parametrize(
    ("expression", "result"), [("7", "7"), ("2*3+4", "10"), ("10 - 2*3 - 5", "-1"), ("0*9", "0")]
)
def test_the_tool(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize("expression", ["", "1+", "-1", "2**9", "a", "(1)", "1/2", "9" * 101])
def test_what_is_no_expression(expression):
    with pytest.raises(ValueError, match="expression"):
        calculator(expression)


def test_sft_learns_what_step_3_samples(tmp_path):
    """The prompt that step 3 answers, the call and the tool's turn are those of a demonstration.

    Of a few rows, in a file.
    """
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(map(json.dumps, calculator_rows()["train"][:200])))
    shared = {"data_path": [str(few)], "data_split": "1,0,1", "columns": ["chosen=demonstration"]}
    tokenizer = tiny_tokenizer()
    source = load_environment(None, [calculator])
    prompts = prompt_dataset(RLHFConfig(**shared), tokenizer, tools=source.schemas)["prompt_ids"]
    assert tokenizer.decode(prompts[0]).startswith("<|system|>tools: calculator<|user|>")
    learned = sft_dataset(SFTConfig(**shared, max_seq_len=128), tokenizer)
    observations = ObservationTokens(tokenizer, is_chat=True)
    row = next(row for row in learned if len(row["input_ids"]) > 60)
    text = tokenizer.decode(row["input_ids"])
    question = re.search(r"<\|user\|>([\d*]+=)", text)[1]
    result = re.search(r"(\d+)<\|end\|>$", text)[1]
    asked = prompt_text_ids(
        tokenizer, [{"role": "user", "content": question}], tools=source.schemas
    )
    ids = row["input_ids"]
    assert ids[: len(asked)] == asked
    told = observations(Observation(results=(ToolResult("calculator", result),)))
    end = ids.index(tokenizer.eos_token_id) + 1
    assert ids[end : end + len(told)] == told
    drawn = [t for t, is_target in zip(ids, row["loss_mask"], strict=True) if is_target]
    assert drawn == ids[len(asked) : end] + ids[end + len(told) :]
