"""`benchmarks/rollout_reuse.py` counts what it says."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import rollout_reuse  # noqa: E402
from rollout_reuse import Setting  # noqa: E402
from rollout_sides import make_module  # noqa: E402
from rollout_workloads import Case  # noqa: E402


def test_the_prefill_of_common_pages_is_counted_once():
    """A tenth of 512 + 32 tokens, of which 32 fill the only common page."""
    device = torch.device("cpu")
    module = make_module(Case("opt-tiny", 0, 0, 0, 0), device, torch.float32)
    line = rollout_reuse.prefix(Setting(module, device, 1, 0.1))
    assert line["prefill_tokens"] == {"with": 54 + 63 * (54 - 32), "without": 64 * 54}
    line = rollout_reuse.chat(Setting(module, device, 1, 0.05))
    turns = {f"turn{number}_s" for number in range(1, 6)}
    assert line["with"].keys() == line["without"].keys() == turns
    assert {f"ratio_{turn.removesuffix('_s')}" for turn in turns} <= line.keys()


def test_no_prompt_is_measured_twice(monkeypatch):
    drawn = []
    prompts = Setting.prompts
    monkeypatch.setattr(
        Setting, "prompts", lambda *args, **kw: drawn.append(prompts(*args, **kw)) or drawn[-1]
    )
    module = make_module(Case("opt-tiny", 0, 0, 0, 0), torch.device("cpu"), torch.float32)
    for case in (rollout_reuse.speculate, rollout_reuse.partial):
        drawn.clear()
        case(Setting(module, torch.device("cpu"), 2, 0.1, rows=4))
        ids = [tuple(prompt) for call in drawn for prompt in call]
        assert len(set(ids)) == len(ids) > 6


def test_speculation_and_partial_rollouts_report_all_sides():
    device = torch.device("cpu")
    module = make_module(Case("opt-tiny", 0, 0, 0, 0), device, torch.float32)
    line = rollout_reuse.speculate(Setting(module, device, 1, 0.2, rows=3))
    for side in ("history", "auto", "off"):
        assert line[side].keys() == {"fresh_s", "again_s"}
    assert {"ratio_again_history", "ratio_fresh_auto"} <= line.keys()
    line = rollout_reuse.partial(Setting(module, device, 2, 0.1, rows=4))
    assert line["ratio_answer"] > 0


def test_equal_answers_are_computed_once():
    """Greedily, 3 x 8 answers of 13 tokens: 12 steps of 3 rows instead of 24."""
    device = torch.device("cpu")
    module = make_module(Case("opt-tiny", 0, 0, 0, 0), device, torch.float32)
    line = rollout_reuse.alike(Setting(module, device, 1, 0.2, rows=3))
    assert line["rows"] == {"with": 36, "without": 288}
