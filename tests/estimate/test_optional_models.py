"""The optional models of a step: critic, reference, reward model, teacher."""

import pytest
import torch
from estimates import estimated, pairs_estimate
from quick import slow

from dschat.estimate.models import Models, Use


def rlhf_estimate(tiny, **knobs):
    fields = {
        name: tiny("llama") for name in ("actor_model_name_or_path", "critic_model_name_or_path")
    }
    return estimated(fields | {"max_prompt_seq_len": 16, "max_answer_seq_len": 16} | knobs)


GRPO = {"advantage_estimator": "grpo", "num_samples_per_prompt": 4}
PROGRAM = {"reward_fn": ["length"], "critic_model_name_or_path": ""}


@pytest.mark.parametrize(
    ("knobs", "absent"),
    [
        *slow([({}, set()), (GRPO | {"kl_coef": 0.1}, {"critic"}), (PROGRAM, {"reward"})]),
        *slow([({"kl_coef": 0.0}, {"reference"}), ({"kl_coef": 0.0, "log_kl": True}, set())]),
        (GRPO | PROGRAM | {"kl_coef": 0.0}, {"critic", "reference", "reward"}),
        # the actor without adapters is the reference
        (GRPO | PROGRAM | {"actor_lora_dim": 8, "kl_coef": 0.1}, {"critic", "reference", "reward"}),
        # critic, reward model of another checkpoint, and a reward function
        (PROGRAM | {"reward_model_name_or_path": "small"}, set()),
    ],
    ids=lambda value: "-".join(sorted(value)) or "none",  # the same in every process
)
def test_models_that_are_not_loaded_take_no_memory(tiny, knobs, absent):
    if "reward_model_name_or_path" in knobs:
        knobs = knobs | {"reward_model_name_or_path": tiny("llama")}
    done = rlhf_estimate(tiny, **knobs)
    for mode in done.modes:
        loaded = {
            name for name in ("critic", "reward", "reference") if f"{name} weights" in mode.items
        }
        assert loaded == {"critic", "reward", "reference"} - absent, mode.name
    text = " ".join(done.models)
    assert ("critic: " in text) == ("critic" not in absent)
    assert ("reward: " in text) == ("reward" not in absent)
    assert ("reference: " in text) == ("reference" not in absent)


def test_memory_of_a_critic(tiny):
    """bf16 on one GPU: masters and moments take 12 bytes per parameter, weights 2."""
    with_critic, without = rlhf_estimate(tiny), rlhf_estimate(tiny, **GRPO)
    sizes = Models().sizes(Use(tiny("llama"), "--x", "score", torch.bfloat16))
    pair = [
        mode for done in (with_critic, without) for mode in done.modes if mode.name == "scoring"
    ]
    states = [mode.items["optimizer states"] for mode in pair]
    assert states[0] - states[1] == 12 * sizes.total
    assert pair[0].items["critic weights"] == 2 * sizes.total


def test_models_on_one_base_hold_their_adapters_and_heads(tiny):
    """Of rank 4 on q and o (32, 32), k and v (32, 16), three of (32, 48), in two layers."""
    trained = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)) + 32
    done = rlhf_estimate(tiny, actor_lora_dim=4, share_base=True)
    apart = rlhf_estimate(tiny, actor_lora_dim=4, critic_lora_dim=4)
    whole = Models().sizes(Use(tiny("llama"), "--x", "score", torch.bfloat16)).total
    for mode, other in zip(done.modes, apart.modes, strict=True):
        for name in ("critic", "reward"):
            assert mode.items[f"{name} weights"] == 2 * trained
        assert mode.items["actor weights"] == other.items["actor weights"]
        assert mode.items["optimizer states"] == other.items["optimizer states"]
        assert other.items["reward weights"] == 2 * whole


def test_the_policy_on_pairs_by_hand(tiny):
    """Training takes the memory of SFT with twice the rows, plus a frozen copy if loaded."""
    rows = {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 32}
    sft = {"model_name_or_path": tiny("llama"), "max_seq_len": 32} | rows
    plain = estimated(sft, number=1)
    live = pairs_estimate(tiny)
    before = pairs_estimate(tiny, precompute_ref_logprobs=True)
    weights = 2 * Models().sizes(Use(tiny("llama"), "--x", "lm", torch.bfloat16)).total
    assert before.peak.total == plain.peak.total
    assert live.peak.items["reference weights"] == weights == live.peak.items["model weights"]
    assert live.peak.total == plain.peak.total + weights
    assert not before.peak.items.get("reference weights")
    away = pairs_estimate(tiny, offload=["frozen"])
    assert away.host["reference weights"] == weights
    lora = pairs_estimate(tiny, lora_dim=8)
    assert not lora.peak.items.get("reference weights")
    assert [len(done.models) for done in (live, before, lora)] == [2, 1, 1]
    assert live.number == 2


def test_a_teacher_can_be_offloaded(tiny):
    """Its weights are counted at its own size, and go to the host."""
    llama, gpt2 = tiny("llama"), tiny("gpt2")
    fields = {"actor_model_name_or_path": llama, "critic_model_name_or_path": llama}
    before = estimated(fields | {"teacher_model_name_or_path": gpt2})
    size = Models().sizes(Use(gpt2, "--x", "lm", torch.bfloat16)).total
    scoring = next(mode for mode in before.modes if mode.name == "scoring")
    assert scoring.items["teacher weights"] == pytest.approx(2 * size, rel=0.01)
    away = estimated(fields | {"teacher_model_name_or_path": gpt2, "offload": ["teacher"]})
    assert all("teacher weights" not in mode.items for mode in away.modes)
    assert any(line.startswith("teacher: ") for line in away.models)
