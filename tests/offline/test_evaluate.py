"""``dschat eval``: scores, wins and the gold scorer, for models and answer files."""

import json

import forked
import numpy as np
import pytest

from dschat.config import parser
from dschat.offline.evaluate import evaluate
from dschat.offline.flags import EvalConfig, GenerateConfig
from dschat.offline.generate import generate


def run(*flags):
    return evaluate(parser.parse(EvalConfig, list(map(str, flags))))


def value(results, metric: str, model: str) -> dict:
    (row,) = [r for r in results.metrics if (r["metric"], r["model"]) == (metric, model)]
    return row


@pytest.fixture
def length(tmp_path) -> tuple[str, str]:
    """A reward: the number of tokens, EOS included; none for one prompt."""
    (tmp_path / "length.py").write_text(
        "def score(answer_ids, prompts):\n"
        "    return [None if p == 'w2' else len(i) / 2 for i, p in zip(answer_ids, prompts)]\n"
    )
    return "--reward_fn", f"{tmp_path}/length.py:score"


def answers_of(path, data: str, out, *flags: str) -> str:
    words = f"--path {path} --data_path {data} --max_new_tokens 4 --temperature 0 --out {out}"
    generate(parser.parse(GenerateConfig, [*words.split(), *flags]))
    return str(out)


def test_scores_and_wins(models, prompts, length, tmp_path):
    """Of models and files: those of the files that `dschat generate` writes."""
    files = [tmp_path / f"{name}.jsonl" for name in ("llama", "opt")]
    for file in files:
        answers_of(models / file.stem, prompts, file, *length)
    one, other = (
        np.array([json.loads(line)["score"] for line in file.read_text().splitlines()], float)
        for file in files
    )
    assert np.isnan(one).sum() == 1
    words = ("--task", "score", "win_rate", "--max_new_tokens", 4, "--data_path", prompts, *length)
    found = run("--path", models / "llama", "--answers", files[1], *words)
    assert value(found, "score", "llama")["value"] == pytest.approx(np.nanmean(one))
    assert value(found, "score", "opt.jsonl")["value"] == pytest.approx(np.nanmean(other))
    assert value(found, "score", "llama")["rows"] == 9
    wins = (other > one) + 0.5 * ~((other > one) | (other < one))
    assert value(found, "win_rate", "opt.jsonl")["value"] == wins.mean()
    assert [row["metric"] for row in found.differences] == ["score"]
    assert found.differences[0]["value"] == pytest.approx(np.nanmean(other - one))
    again = run("--path", models / "llama", f"second={models / 'opt'}", *words)
    for metric in ("score", "win_rate"):
        assert value(again, metric, "second")["value"] == value(found, metric, "opt.jsonl")["value"]


def test_the_data_may_have_the_columns_of_answers(models, write, length):
    data = write("d.jsonl", [{"prompt": "w3 w4", "answer": "w5", "score": 7.0}] * 2)
    words = ("--task", "score", "--max_new_tokens", 4, "--data_path", data, *length)
    assert 0.5 <= value(run("--path", models / "llama", *words), "score", "llama")["value"] <= 2


def test_gold_is_the_gold_scorer(write):
    from dschat.builtin.chat_rows import builtin_rows

    rows = builtin_rows()["eval"][:20]
    lines = [
        {"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r[role]}
        for r, role in zip(rows, ["chosen", "rejected"] * 10, strict=True)
    ]
    row = value(run("--answers", write("a.jsonl", lines), "--task", "gold"), "gold", "a.jsonl")
    assert 0.5 <= row["value"] < 0.7  # chosen answers have 1.0, rejected ones at most 0.5


def test_table_and_json(write, tmp_path):
    lines = [{"prompt": f"w{i}", "answer": "w3", "score": i / 3} for i in range(24)]
    file, out = write("a.jsonl", lines), tmp_path / "eval.json"
    argv = ["--answers", file, "--task", "score", "--out", str(out), "--confidence", "0.9"]
    for _ in range(2):  # its own output may be replaced
        done = forked.run("-m", "dschat", "eval", *argv)
        assert done.code == 0, done.stderr
    printed = done.stdout
    assert "90% interval" in printed
    content = json.loads(out.read_text())
    assert content["settings"]["confidence"] == 0.9
    assert f" {content['metrics'][0]['value']:.3f} " in printed
