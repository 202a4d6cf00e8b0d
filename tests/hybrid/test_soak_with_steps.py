"""Many alternating rollouts and optimizer steps, with a cache so small that sequences must wait.

Runs `soak_cases.run_soak`, where a second form of the same actor with a large cache gives the
expected answers. tests/dist does the same with tensor parallelism.
"""

import pytest
from step_cases import Case

MIB = 2**20


def check(result, rollouts):
    (alone,) = result["ranks"]
    assert len(alone["memory"]) == rollouts
    assert alone["wrong"] == []
    assert alone["near"] <= 2  # of thousands of answers: steps are not reproducible to the bit
    assert alone["preemptions"] > rollouts // 4
    assert result["steps"] > rollouts // 4
    return alone["memory"]


def soak(zero, model, rollouts, **options):
    options = {"rollouts": rollouts} | options
    return Case("soak", zero, model=model, options=tuple(options.items()))


def test_a_short_soak(run_here):
    check(run_here(soak(3, "llama", 48))[0], 48)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        soak(0, "gpt2", 200),
        soak(2, "mistral", 200, layout="zero_copy"),
        soak(3, "opt", 200, lora="side"),
        soak(3, "llama", 200, lora="merge", release_cache=True, release_weights=True),
        soak(3, "gpt_neox", 200, offload="parameters"),
    ],
    ids=lambda case: case.name,
)
def test_two_hundred_rollouts(case, run_here):
    """Memory is flat: 45 versions, unfreed, would be 3.5 MiB and more. (A step of ZeRO-3 alone
    leaves 5 KiB in DeepSpeed 0.19.)
    """
    memory = check(run_here(case)[0], 200)
    warm, late = sorted(memory[80:110]), sorted(memory[-30:])
    assert late[15] - warm[15] < 3 * MIB
