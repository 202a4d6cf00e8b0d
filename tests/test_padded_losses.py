"""`benchmarks/iteration.py`: training on packed rows has the losses of the same work on padded
batches, written as DeepSpeed-Chat and Hugging Face's trainers do it.
"""

import dataclasses

import pytest
from quick import slow

# Large steps and narrow ranges: ratios and values are clipped. Not larger: Adam turns a gradient
# that is rounding noise into a full step, and packed rows round otherwise than padded ones.
LARGE_STEPS = {
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-2,
    "cliprange": [0.01],
    "cliprange_value": 0.01,
}


def losses(side, rounds=3):
    return [side.run(number)["losses"] for number in range(rounds)]


def check_equal(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", ["ppo", *slow(["grpo-prefix"])])
def test_rlhf_losses_are_equal(name, tmp_path):
    from iteration_cases import find_case, write_models
    from iteration_dschat import RLHFSide
    from iteration_padded import PaddedRLHF

    # Several optimizer steps a rollout: the later ones have ratios other than 1.
    case = dataclasses.replace(find_case(name, tiny=True), micro_batch=2)
    write_models(case, tmp_path)
    sides = (RLHFSide, PaddedRLHF)
    ours, theirs = (side(case, tmp_path, 2, **LARGE_STEPS) for side in sides)
    check_equal(losses(ours), losses(theirs))
    clipped = {k: v for k, v in ours.trainer.metrics.items() if k.endswith("clipfrac_avg")}
    assert min(clipped.values()) > 0.02


@pytest.mark.parametrize("name", ["dpo", *slow(["sft", "rm"])])
def test_supervised_losses_are_equal(name, tmp_path):
    from iteration_cases import find_case, write_models
    from iteration_dschat import SupervisedSide
    from iteration_padded import PaddedSupervised

    case = find_case(name, tiny=True)
    write_models(case, tmp_path)
    ours = losses(SupervisedSide(case, tmp_path, 2, learning_rate=1e-2))
    for to_longest in (False, True):
        theirs = PaddedSupervised(case, tmp_path, 2, to_longest=to_longest, learning_rate=1e-2)
        check_equal(ours, losses(theirs))
    values = [loss[name] for loss in ours]
    assert max(values) - min(values) > 1e-3  # DPO's first loss is log 2, whatever the sides do
