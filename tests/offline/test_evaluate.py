"""``dschat eval``: every task against transformers and NumPy in float64, and what it writes."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat.config import UserError, parser
from dschat.offline.commands import run_eval
from dschat.offline.evaluate import evaluate
from dschat.offline.flags import EvalConfig, GenerateConfig
from dschat.offline.generate import generate
from dschat.offline.results import labels_of
from dschat.offline.statistics import wilson


def run(*flags):
    return evaluate(parser.parse(EvalConfig, list(map(str, flags))))


def value(results, metric: str, model: str) -> dict:
    (row,) = [r for r in results.metrics if (r["metric"], r["model"]) == (metric, model)]
    return row


class Reference:
    """Log-probs by transformers' own forward and NumPy's softmax, one text at a time."""

    def __init__(self, path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._module = AutoModelForCausalLM.from_pretrained(path).double().eval()

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Of every token but the first."""
        with torch.no_grad():
            logits = self._module(torch.tensor([ids])).logits[0, :-1].numpy()
        logits = logits - logits.max(1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return logprobs[np.arange(len(ids) - 1), ids[1:]]

    def answer(self, prompt: str, answer: str, eos: bool) -> np.ndarray:
        before, after = (self.tokenizer(text)["input_ids"] for text in (prompt, answer))
        ids = before + after + [self.tokenizer.eos_token_id] * eos
        return self.logprobs(ids)[len(before) - 1 :]

    def greedy(self, prompt: str, num_tokens: int) -> str:
        ids = self.tokenizer(prompt)["input_ids"]
        start = len(ids)
        while len(ids) < start + num_tokens:
            with torch.no_grad():
                ids.append(int(self._module(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == self.tokenizer.eos_token_id:
                break
        return self.tokenizer.decode(ids[start:], skip_special_tokens=True)


@pytest.fixture
def rows() -> list[dict]:
    rng = np.random.default_rng(0)

    def words(most: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(2, 64, size=rng.integers(1, most + 1)))

    return [
        {"prompt": words(6), "reference": words(3), "choices": [words(4) for _ in range(3)]}
        for _ in range(24)
    ]


def test_perplexity(models, rows, write):
    data = write("rows.jsonl", rows)
    path = (models / "llama", models / "opt")
    results = run("--path", *path, "--data_path", data, "--task", "perplexity")
    for name in ("llama", "opt"):
        reference = Reference(models / name)
        parts = [reference.answer(r["prompt"], r["reference"], eos=True) for r in rows]
        expected = np.exp(-np.concatenate(parts).mean())
        row = value(results, "perplexity", name)
        assert row["value"] == pytest.approx(expected, rel=1e-5)
        assert row["low"] < row["value"] < row["high"]
    (difference,) = results.differences
    values = [value(results, "perplexity", name)["value"] for name in ("opt", "llama")]
    assert difference["value"] == pytest.approx(values[0] - values[1])
    assert (difference["model"], difference["baseline"]) == ("opt", "llama")


def test_perplexity_of_plain_text_in_windows(models, write):
    """Texts longer than the model are read in windows of its 64 positions."""
    texts = [" ".join(f"w{2 + (7 * i + n) % 61}" for i in range(n)) for n in (1, 5, 64, 65, 150)]
    data = write("texts.jsonl", [{"body": text} for text in texts])
    words = ("--text_column", "body", "--task", "perplexity")
    results = run("--path", models / "llama", "--data_path", data, *words)
    reference, parts = Reference(models / "llama"), []
    for text in texts:
        ids = reference.tokenizer(text)["input_ids"]
        parts += [reference.logprobs(ids[i : i + 64]) for i in range(0, len(ids), 64)]
    expected = np.exp(-np.concatenate(parts).mean())
    assert value(results, "perplexity", "llama")["value"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("form", ["number", "letter", "text"])
def test_choice(form, models, rows, write):
    for number, row in enumerate(rows):
        right = number % 3
        row["label"] = {"number": right, "letter": "ABC"[right], "text": row["choices"][right]}[
            form
        ]
        del row["reference"]
    data = write("rows.jsonl", rows)
    results = run("--path", models / "llama", "--data_path", data, "--task", "choice")
    reference = Reference(models / "llama")
    parts = [[reference.answer(r["prompt"], c, eos=False) for c in r["choices"]] for r in rows]
    for metric, by in (("choice/total", np.sum), ("choice/token", np.mean)):
        picked = [int(np.argmax([by(part) for part in row])) for row in parts]
        num_right = sum(pick == number % 3 for number, pick in enumerate(picked))
        row = value(results, metric, "llama")
        assert row["value"] == num_right / 24
        assert row["low"] == pytest.approx(wilson(num_right, 24, 0.95).low)
        assert row["interval"] == "wilson"


def test_answers_are_greedy_and_compared(models, rows, write):
    """References that some greedy answers equal, up to punctuation."""
    reference = Reference(models / "opt")
    answers = [reference.greedy(row["prompt"], 4) for row in rows]
    for number, row in enumerate(rows):
        row["reference"] = ["w1", f"The {answers[number]}!" if number % 3 else "none"]
    words = ("--task", "exact_match", "f1", "--max_new_tokens", 4)
    results = run("--path", models / "opt", "--data_path", write("rows.jsonl", rows), *words)
    assert value(results, "exact_match", "opt")["value"] == 16 / 24
    assert value(results, "f1", "opt")["value"] >= 16 / 24
    assert results.num_rows == 24


def test_win_rate_and_score(models, rows, write):
    """Scores by a function: the number of tokens, EOS included."""
    function = write("length.py", [])
    with open(function, "w") as file:
        file.write("def score(answer_ids):\n    return [float(len(ids)) for ids in answer_ids]\n")
    words = (
        "--max_new_tokens",
        3,
        "--reward_fn",
        f"{function}:score",
        "--task",
        "win_rate",
        "score",
    )
    data, paths = write("rows.jsonl", rows), (models / "llama", models / "opt")
    short = [{"prompt": row["prompt"], "answer": "w5 " * (i % 3)} for i, row in enumerate(rows)]
    words += ("--answers", write("short.jsonl", short))
    results = run("--path", *paths, "--data_path", data, *words)
    lengths = {}
    for name in ("llama", "opt"):
        reference = Reference(models / name)
        answers = [reference.greedy(row["prompt"], 3).split() for row in rows]
        lengths[name] = np.array([min(3, len(answer) + 1) for answer in answers])
    lengths["short.jsonl"] = np.array([i % 3 + 1 for i in range(len(rows))])
    wanted = np.array([len(row["reference"].split()) + 1 for row in rows])

    def wins(a: np.ndarray, b: np.ndarray) -> float:
        return float(((a > b) + 0.5 * (a == b)).mean())

    for name, own in lengths.items():
        assert value(results, "score", name)["value"] == pytest.approx(own.mean())
        assert value(results, "win_rate/reference", name)["value"] == wins(own, wanted)
    for name in ("opt", "short.jsonl"):  # not against the one before
        expected = wins(lengths[name], lengths["llama"])
        assert value(results, "win_rate/first", name)["value"] == expected
    assert expected != wins(lengths["short.jsonl"], lengths["opt"])


def test_answer_files_count_as_models(models, rows, write, tmp_path):
    """A file of greedy answers has the values of the model that wrote it."""
    data, out = write("rows.jsonl", rows), tmp_path / "answers.jsonl"
    words = f"--path {models}/llama --data_path {data} --max_new_tokens 4 --temperature 0"
    generate(parser.parse(GenerateConfig, [*words.split(), "--out", str(out)]))
    results = run(*words.split(), "--answers", out, "--task", "f1", "exact_match")
    (difference, _) = results.differences
    assert (difference["value"], difference["low"], difference["high"]) == (0, 0, 0)
    assert difference["model"] == "answers.jsonl"


def test_rows_without_a_reference_are_dropped(models, write, caplog):
    caplog.set_level("WARNING", "dschat")
    rows = [{"prompt": "w2", "answer": "7"}, {"prompt": "w3", "answer": None}]
    rows += [{"prompt": "w4", "answer": "none"}]
    words = ("--task", "numeric", "--max_new_tokens", 2)
    results = run("--path", models / "llama", "--data_path", write("rows.jsonl", rows), *words)
    assert results.num_rows == 1
    assert "1 with no reference answer, 1 with a reference without a number" in caplog.text


def test_gold_is_the_gold_scorer(tmp_path, write):
    from dschat.builtin.chat_rows import builtin_rows

    rows = builtin_rows()["eval"][:20]
    lines = [
        {"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r[role]}
        for r, role in zip(rows, ["chosen", "rejected"] * 10, strict=True)
    ]
    answers = write("answers.jsonl", lines)
    words = ("--data_path", "builtin/chat", "--task", "gold", "--max_rows", 20)
    row = value(run("--answers", answers, *words), "gold", "answers.jsonl")
    assert 0.5 <= row["value"] < 0.7  # chosen answers have 1.0, rejected ones at most 0.5


def test_table_and_json(models, rows, write, tmp_path, monkeypatch, capsys):
    out = tmp_path / "eval.json"
    argv = ["--path", f"{models}/llama", f"{models}/opt", "--data_path", write("r.jsonl", rows)]
    argv += ["--task", "perplexity", "--out", str(out), "--confidence", "0.9"]
    monkeypatch.setattr("sys.argv", ["dschat eval", *argv])
    for _ in range(2):  # its own output may be replaced
        run_eval()
    printed = capsys.readouterr().out
    assert "90% interval" in printed
    assert "24 rows; differences from llama, paired" in printed
    content = json.loads(out.read_text())
    assert content["settings"]["confidence"] == 0.9
    for row in content["metrics"]:
        number = row["value"]
        shown = f"{number:.4g}" if number >= 100 else f"{number:.3f}"
        assert f" {shown} " in printed


def test_labels_tell_paths_apart():
    assert labels_of(["a/step1_sft", "b/actor/"]) == ["step1_sft", "actor"]
    assert labels_of(["x/actor", "y/actor"]) == ["x/actor", "y/actor"]


def test_a_wrong_row_is_named(models, write):
    data = write("rows.jsonl", [{"prompt": "w2", "reference": " ".join(["w3"] * 70)}])
    with pytest.raises(UserError, match=r"rows.jsonl:1: prompt and answer have 72 tokens"):
        run("--path", models / "llama", "--data_path", data, "--task", "perplexity")
