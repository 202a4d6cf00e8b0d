"""Two ranks that compute each row together give what one rank gives, gradients too."""

import pytest
from step_cases import Case
from test_same_losses import by_name


@pytest.mark.dist
@pytest.mark.parametrize("case", [Case("sequence_parallel")], ids=by_name)
def test_two_processes(case, two_processes):
    gaps, _ = two_processes(case)
    assert len(gaps) == 16
    assert {name: gap for name, gap in gaps.items() if max(gap) > 2e-5} == {}
