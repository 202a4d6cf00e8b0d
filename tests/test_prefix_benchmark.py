"""`benchmarks/prefix_cache.py` counts what it says."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import prefix_cache  # noqa: E402
from rollout_sides import make_module  # noqa: E402
from rollout_workloads import Case  # noqa: E402


def test_the_prefill_of_common_pages_is_counted_once():
    """A tenth of 512 + 32 tokens, of which 32 fill the only common page."""
    device = torch.device("cpu")
    module = make_module(Case("opt-tiny", 0, 0, 0, 0), device, torch.float32)
    line = prefix_cache.prefix(module, device, 1, 0.1)
    assert line["prefill_tokens"] == {"with": 54 + 63 * (54 - 32), "without": 64 * 54}
    line = prefix_cache.chat(module, device, 1, 0.05)
    turns = {f"turn{number}_s" for number in range(1, 6)}
    assert line["with"].keys() == line["without"].keys() == turns
    assert {f"ratio_{turn.removesuffix('_s')}" for turn in turns} <= line.keys()
