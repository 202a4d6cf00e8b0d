"""The report of ``python -m dschat.data`` and its errors; train.py's check of the sources."""

from pathlib import Path

import pytest
from data_files import put
from python_process import environment, python

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.config import UserError
from dschat.config.data import ShowConfig
from dschat.data.inspect import WIDTH, show
from dschat.launch.run_plan import _check_inputs

pytestmark = pytest.mark.usefixtures("in_tmp_path")
TOKENIZER = tiny_tokenizer()


def pairs(num):
    return [{"prompt": f"p{i}: ", "chosen": "yes\nyes", "rejected": "no"} for i in range(num)]


def report(*paths, **knobs):
    lines = list(show(ShowConfig(data_path=list(paths), **knobs), TOKENIZER))
    assert max(map(len, lines)) <= WIDTH
    return "\n".join(lines)


def test_columns_splits_lengths_and_examples():
    text = report(put(Path("x.jsonl"), pairs(40)), max_seq_len=9)
    assert "uses prompt <- prompt, chosen <- chosen, rejected <- rejected" in text
    for step, rows in ((1, 8), (2, 15), (3, 15)):
        left = f"({38 - rows} are for the other steps; see --data_split)"
        assert f"data for step {step}: {rows} of 38 training rows {left}, 2 of 2" in text
    assert "(100.0%) lost the beginning of the prompt" in text
    first = text.partition("  example 1: ")[2].splitlines()
    num_answer = len(TOKENIZER("yes\nyes")["input_ids"]) + 1
    assert first[0] == f"9 tokens, {num_answer} with loss"
    assert first[1].startswith("    | ")
    assert first[2] == r"    > yes\nyes<|end|>"
    assert "\n    chosen:\n    > yes\\nyes<|end|>\n    rejected:\n    > no<|end|>\n" in text


def test_where_held_out_rows_come_from():
    path, other = put(Path("x.jsonl"), pairs(40)), put(Path("y.jsonl"), pairs(5))
    assert "\n  evaluation rows: no split of its own: a share is held out\n" in report(path)
    text = report(path, eval_data_path=[other])
    assert "\n  evaluation rows: those of --eval_data_path\n" in text
    assert "of 40 training rows (32 are for the other steps; see --data_split), 5 of 5" in text


def test_chats_show_their_special_tokens_and_each_turn_with_loss():
    turns = [("user", "u"), ("assistant", "r"), ("user", "v"), ("assistant", "w")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    text = report(put(Path("x.jsonl"), [row] * 3), eval_fraction=0.0, data_split="1,0,0", step="1")
    assert (
        "    | <|user|>u<|assistant|>\n    > r<|end|>\n"
        "    | <|user|>v<|assistant|>\n    > w<|end|>\n"
    ) in text


def test_step_3_shows_the_columns_for_reward_functions():
    rows = [{"prompt": "2+2=", "reference": "4", "tests": ["t" * 200], "level": None}]
    text = report(put(Path("x.jsonl"), rows), eval_fraction=0.0, data_split="0,0,1", step="3")
    assert "\n  for reward functions: level, reference, tests\n" in text
    assert "\n    level = None\n    reference = '4'\n    tests = ['ttt" in text
    assert text.endswith("t ...")
    alone = put(Path("y.jsonl"), [{"prompt": "hi"}])
    assert "functions: none" in report(alone, eval_fraction=0.0, data_split="0,0,1", step="3")


def test_dropped_rows_and_the_steps_that_cannot_use_the_data():
    rows = [{"question": f"q{i}", "answer": "a"} for i in range(20)]
    path = put(Path("x.jsonl"), [*rows, {"question": "", "answer": "a"}])
    text = " ".join(report(path).split())
    assert "dropped 1 of 21 rows (1 with no usable prompt); namely: x.jsonl:21: no usable" in text
    assert (
        "step 2 (reward model) cannot use this data: --data_path: x.jsonl has no rejected" in text
    )
    with pytest.raises(UserError, match="no rejected answers"):
        report(path, step="2")
    with pytest.raises(UserError, match="x.jsonl:21"):
        report(path, on_bad_row="error")


@pytest.mark.slow
def test_as_a_command(tmp_path):
    """Exit code 0 and the report on stdout; or 2, one line on stderr and nothing on stdout."""
    rows = pairs(40)
    for row in rows:
        row["chosen"] += "\x1b[2J\u202e"
        row["tag\x1b]0;"] = 1
    path = put(Path("x.jsonl"), rows)
    env = environment(HF_DATASETS_CACHE=str(tmp_path / "c"))
    done = python("-m", "dschat.data", path, "--step", "1", cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "example 3" in done.stdout
    assert r"yes\nyes\x1b[2J\u202e<|end|>" in done.stdout
    assert r"tag\x1b]0;" in done.stdout
    assert "\x1b" not in done.stdout
    done = python("-m", "dschat.data", path, "none.jsonl", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    mistake = "error: --data_path: no such data file: none.jsonl; check the path\n"
    assert done.stderr == mistake


# -- train.py's check before any step runs


@pytest.mark.parametrize(
    "name",
    ["no.csv", "no.parquet:0.5", "no.jsonl.gz", "no/*.jsonl", "no/", "~/no/such", "x[1].json"],
)
def test_train_py_finds_a_missing_source_at_once(name):
    with pytest.raises(UserError, match="--data_path: no such data file"):
        _check_inputs({"data_path": [name]}, made_here=())


@pytest.mark.parametrize(
    "name", ["d/x.csv", "d/*.csv:2", "d/", "d", "owner/name:en:0.5", "d/x.csv:1e-1"]
)
def test_train_py_accepts_existing_paths_and_hub_names(name, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.csv").write_text("prompt\nq\n")
    assert _check_inputs({"data_path": [name]}, made_here=()) is None
