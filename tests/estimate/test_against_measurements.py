"""The estimates against measured peaks and published figures: sizes that fit, hours."""

import plan_against_published as published
import pytest
from estimates import estimated
from measured_peaks import Peaks

from dschat.estimate.devices import GIB


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    return Peaks(tmp_path_factory.mktemp("peaks"))


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("size", ["llama-22m", "opt-60m", "opt-125m"])
def test_against_measured_peaks(peaks, size, step):
    off = peaks.estimated(size, step) / peaks.measured(size, step) - 1
    print(f"{size}, step {step}: {off:.1%}")  # shown by pytest -s
    assert abs(off) < 0.15


PUBLISHED = {  # GPU: GiB, the largest OPT that trains on it, the next size, and the plan's GiB
    "V100 32G": (32, {"2.7b": 17.9, "6.7b": 33.7}),
    "A6000 48G": (48, {"6.7b": 35.3, "13b": 55.4}),
    "A100 40G": (40, {"6.7b": 35.3, "13b": 55.4}),
    "A100 80G": (80, {"13b": 61.6, "30b": 121.1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("gpu", PUBLISHED)
def test_largest_model_of_a_gpu(opt, gpu):
    """DeepSpeed-Chat's table of the largest actor that its hybrid engine trains on a single GPU.

    The table names GPUs and models, but no settings: not ZeRO, offload, LoRA, precision or lengths.
    So this shows that with one setting for all rows, dschat's estimate agrees with all four, for
    the named size and the next; it does not prove that they used it. The setting: fp16 (a V100 has
    no bf16), ZeRO-2 with offloaded optimizer (their --offload), gradient checkpointing, OPT-350M as
    the reward model, all weights trained, and their scripts' 256 + 256 tokens, 16 prompts per
    rollout, in micro-batches of 8. With LoRA and offloaded reference, 30B would fit on an 80 GB
    device too.
    """
    gib, planned = PUBLISHED[gpu]
    fits, found = [], {}
    for size in planned:
        fields = {
            "actor_model_name_or_path": opt(size),
            "reward_model_name_or_path": opt("350m"),
            "dtype": "fp16",
            "actor_zero_stage": 2,
            "critic_zero_stage": 2,
            "offload": ["auto"],
            "actor_gradient_checkpointing": True,
            "critic_gradient_checkpointing": True,
            "max_prompt_seq_len": 256,
            "max_answer_seq_len": 256,
            "per_device_generation_batch_size": 16,
            "per_device_training_batch_size": 8,
            "eval_batch_size": 8,
        }
        done = estimated(fields, gib=gib)
        found[size] = done.peak.total / GIB
        fits.append(done.peak.total <= done.device.memory)  # ignores this machine's host memory
    assert fits == [True, False]
    assert found == pytest.approx(planned, rel=0.03)  # docs/lab/cost.md


# -- Hours

# Held-out rows that the model misses by more than a third; docs/lab/cost.md says why.
MISSED = {
    "table 1: step 3, opt-30b, 8 x A100-40",
    "table 5: step 2, opt-350m, 64 x A100-80",
    "table 6: step 2, opt-350m, 1 x A6000-48",
    "table 6: step 3, opt-1.3b, 1 x A6000-48",
    "llama-7b, Ray, 1:1:4:2: generation",
    "llama-13b, DeepSpeed-Chat, 8: training",
}


@pytest.fixture(scope="module")
def lines():
    return {line.row: line for line in published.table()}


def test_every_row_is_fitted_or_held_out(lines):
    print("\n".join(map(str, lines.values())))  # shown by pytest -s
    assert len(lines) == 18 + 2 * 9
    assert sum(line.fitted for line in lines.values()) == 3 + 2 * 3
    assert lines["table 2: step 3, opt-66b, 64 x A100-80"].published == 7.5
    assert {name for name, line in lines.items() if line.fitted} & MISSED == set()


def test_held_out_rows_are_within_a_third(lines):
    held_out = {name: line.ratio for name, line in lines.items() if not line.fitted}
    missed = {name for name, ratio in held_out.items() if not 0.67 <= ratio <= 1.5}
    assert missed <= MISSED
    assert len(held_out) - len(missed) >= 20


def test_shares_are_those_of_the_fit():
    stored = {
        "chat": published.DEEPSPEED_CHAT,
        "engine": published.ENGINE,
        "loop": published.HF_LOOP,
    }
    for which, values in published.fit().items():
        for name, value in values.items():
            assert getattr(stored[which], name) == pytest.approx(value, rel=0.02), (which, name)


def test_published_models_have_their_sizes():
    """Billions of parameters, from the papers' tables."""
    sizes = {"opt-6.7b": 6.7, "opt-13b": 13, "opt-30b": 30, "opt-66b": 66, "opt-175b": 175}
    sizes |= {"llama-7b": 6.7, "llama-13b": 13, "llama-34b": 34, "llama-70b": 69}
    for name, billions in sizes.items():
        count = published.parameters(published.SHAPES[name])
        assert count / 1e9 == pytest.approx(billions, rel=0.025), name
