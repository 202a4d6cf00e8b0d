"""Two ranks that compute each row together give what one rank gives, gradients too."""

import pytest
from quick import some
from sequence_parallel_cases import OTHERS
from step_cases import Case
from test_same_losses import by_name

STATES = ("qwen3_5", "bamba", "nemotron_h")  # families whose layers read whole rows
FAMILIES = ("llama", "mistral", "gpt_oss", "qwen3_moe", *STATES, *OTHERS)
ALL = [Case("sequence_parallel", model=name) for name in FAMILIES]
QUICK = [case for case in ALL if case.model in ("gpt_oss", "llama4_text", "qwen3_5")]


@pytest.mark.dist
@pytest.mark.parametrize("case", some(ALL, QUICK), ids=by_name)
def test_two_processes(case, two_processes):
    gaps, _ = two_processes(case)
    assert len(gaps) == 2
    assert {name: gap for name, gap in gaps.items() if max(gap) > 2e-5} == {}
