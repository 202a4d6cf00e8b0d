"""The scripts of examples/, with stand-ins for packages that the project does not need."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from python_process import ROOT


class Countdown:
    """Entry k asks for k; scores the digit, and half for a longer text that begins with it."""

    def __init__(self, name, size=1, seed=0):
        assert name == "countdown"
        self.entries = [
            {"question": f"Say {k}", "answer": str(k), "metadata": {"k": k}} for k in range(size)
        ]

    def __getitem__(self, number):
        return self.entries[number]

    def score_answer(self, answer, entry):
        right = str(entry["metadata"]["k"])
        return 1.0 if answer == right else 0.5 * answer.startswith(right)


def test_rows_and_scores_of_reasoning_gym(tmp_path, monkeypatch):
    gym = SimpleNamespace(create_dataset=Countdown)
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    path = ROOT / "examples" / "reasoning_gym_tasks.py"
    spec = importlib.util.spec_from_file_location("reasoning_gym_tasks", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "rows.jsonl"), "countdown"])
    example.main()
    rows = [json.loads(line) for line in Path(tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == example.SIZE
    assert (rows[7]["question"], rows[7]["answer"], rows[7]["task"]) == ("Say 7", "7", "countdown")
    columns = {name: [row[name] for row in rows[:3]] for name in ("task", "entry")}
    assert example.score([" 0\n", "1.", "7"], **columns) == [1.0, 0.5, 0.0]
