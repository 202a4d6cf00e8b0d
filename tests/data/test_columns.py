"""A row's other columns reach the reward functions of step 3 unchanged."""

import datetime
import re
from pathlib import Path

import datasets
import pytest
from data_files import load, step_table

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.data.batches import PromptBatches, prompt_columns, prompts_of

TOKENIZER = tiny_tokenizer()
VALUES = {
    "answer": "4",
    "number": 4,
    "share": 0.1,
    "right": True,
    "tests": ["f(1) == 2", {"input": [1, 2], "output": None}],
    "unicode": "é日 \ud800",
    "nothing": None,
    "prompt_ids": "a name of ours",
}


def one_batch(*paths, **knobs):
    """All prompts of the first rollout, in the order of their texts."""
    table = step_table([*paths], TOKENIZER, "rlhf", **knobs)
    batch = next(iter(PromptBatches(table, 64, 0, 1, seed=0)))
    order = sorted(range(len(batch)), key=batch.texts.__getitem__)
    assert all(len(values) == len(batch) for values in batch.columns.values())
    columns = {name: [values[i] for i in order] for name, values in batch.columns.items()}
    return [batch.texts[i] for i in order], columns, prompt_columns(table)


def test_values_are_unchanged_for_any_column_name(write):
    texts, columns, names = one_batch(write([{"prompt": "q", **VALUES}]))
    assert texts == ["q"]
    assert columns == {name: [value] for name, value in VALUES.items()}
    assert names == set(VALUES)


def test_prompts_alone_have_no_columns(write):
    texts, columns, names = one_batch(write([{"prompt": "a"}, {"prompt": "b"}]))
    assert (texts, columns, names) == (["a", "b"], {}, set())


def test_columns_stay_with_their_prompts_and_missing_ones_are_none(write):
    first = write([{"prompt": f"p{i}", "reference": i} for i in range(9)], "a.jsonl")
    second = write([{"question": f"q{i}", "tests": [i], "answer": i} for i in range(3)], "b.jsonl")
    texts, columns, names = one_batch(first, second)
    assert texts == [*(f"p{i}" for i in range(9)), "q0", "q1", "q2"]
    assert columns == {
        "reference": [*range(9), None, None, None],
        "tests": [*[None] * 9, [0], [1], [2]],
        "answer": [*[None] * 9, 0, 1, 2],
    }
    assert names == set(columns)


def test_a_dialogue_is_kept_whole_and_its_text_is_the_last_user_turn(write):
    dialogue = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    texts, columns, _ = one_batch(write([{"messages": dialogue, "level": 1}]))
    assert texts == ["2+2?"]
    assert columns == {"messages": [dialogue], "level": [1]}
    asked = [{"role": "system", "content": "s"}, *dialogue[:1]]
    row = {"prompt": asked, "reward_model": {"ground_truth": "4"}}
    texts, columns, _ = one_batch(write([row], "b.jsonl"))
    assert (texts, columns) == (["2+2?"], {"reward_model": [{"ground_truth": "4"}]})


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_rank_has_every_column_even_without_a_prompt(write, world):
    path = write([{"prompt": f"p{i}", "n": i} for i in range(3)])
    table = step_table(path, TOKENIZER, "rlhf")
    parts = [next(iter(PromptBatches(table, 3, r, world, seed=0))) for r in range(world)]
    assert [list(part.columns) for part in parts] == [["n"]] * world
    pairs = [pair for part in parts for pair in zip(part.texts, part.columns["n"], strict=True)]
    assert sorted(pairs) == [("p0", 0), ("p1", 1), ("p2", 2)]


def test_held_out_prompts_have_their_columns(write):
    path, held = write([{"prompt": "a", "n": 1}]), write([{"prompt": "b", "m": 2}], "held.jsonl")
    _, held_out = step_table(path, TOKENIZER, "rlhf", "both", eval_data_path=[held])
    columns = prompts_of([held_out[0]]).columns
    assert columns["m"] == [2]
    assert set(columns) == prompt_columns(held_out)


def test_values_that_json_cannot_represent_become_text(tmp_path):
    path = tmp_path / "rows.parquet"
    row = {"prompt": "q", "day": datetime.date(2026, 1, 2), "scores": [0.5, 1.5]}
    datasets.Dataset.from_list([row]).to_parquet(path)
    _, columns, _ = one_batch(str(path))
    assert columns == {"day": ["2026-01-02"], "scores": [[0.5, 1.5]]}


def test_an_unreadable_line_is_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "n": 1}\nnot JSON\n{"prompt": "b", "n": 2}\n')
    _, columns, _ = one_batch(str(path), on_bad_row="skip")
    assert columns == {"n": [1, 2]}


def test_steps_without_reward_functions_keep_no_columns(write):
    path = write([{"prompt": "q", "chosen": "a", "rejected": "b", "tests": "t"}])
    for purpose in ("sft", "reward"):
        assert [example.columns for example in load(path, purpose)] == [None]


def test_the_example_in_the_docs_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    blocks = {kind: text for kind, text in re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)}
    (tmp_path / "prompts.jsonl").write_text(blocks["jsonl"])
    monkeypatch.chdir(tmp_path)
    exec(blocks["python"], {})
