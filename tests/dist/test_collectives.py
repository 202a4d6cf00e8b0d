"""What `dschat.distributed` sends between two ranks arrives."""

import pytest
from step_cases import Case
from test_same_losses import by_name


@pytest.mark.dist
@pytest.mark.parametrize("case", [Case("collectives")], ids=by_name)
def test_two_processes(case, two_processes):
    result, _ = two_processes(case)
    exchanged = result["exchanged"]
    assert [value["from"] for value in exchanged] == [0, 1]
    assert {value["to"] for value in exchanged} == {0}  # the result is rank 0's
    assert [len(value["text"]) for value in exchanged] == [1, 1000]
    assert result["gathered"] == [[True] * 6] * 2
    gaps, moved = result["routed"]
    assert max(gaps) < 1e-6  # not one expert's half beside another's
    assert moved == [False, True, False, True]
    alone, pairs = result["moves"]
    assert [len(rows) for rows in alone] == [3, 3]
    assert sorted(pairs) == [[0, 1], [2, 3]]  # answers to one prompt stay together
    assert result["budgets"] == [[4 * 512, [2, 4, 8, 4]]] * 2
