"""The suggested changes save what they state; host memory counts."""

from dataclasses import replace

import pytest
import torch
from estimates import estimated, pairs_estimate

from dschat.config import RewardConfig, SFTConfig, UserError
from dschat.estimate import report
from dschat.estimate.devices import GIB, Device
from dschat.estimate.models import Models, Use
from dschat.estimate.report import _changes, advise


def not_fitting(fields: dict, number: int):
    """An estimate for a GPU with 0.8 of the needed memory, and the function that made it."""
    roomy, _ = estimated(fields, number)
    before, make = estimated(fields, number, gib=0.8 * roomy.peak.total / GIB)
    assert not before.fits
    return before, make


def check_advice(before, make):
    """The advice, after a check that each change saves the stated bytes."""
    advice = advise(before, make)
    assert 1 <= len(advice) <= 3
    after = make(replace(before.config, **advice[0].change.fields))
    assert advice[0].saved == before.peak.total - after.peak.total > 0
    saved = sum(entry.saved for entry in advice)
    assert advice[-1].after.peak.total == before.peak.total - saved
    return advice


@pytest.mark.slow
def test_first_advice_saves_the_stated_bytes(opt):
    fields = {
        "actor_model_name_or_path": opt("small"),
        "reward_model_name_or_path": opt("small"),
        "max_prompt_seq_len": 64,
        "max_answer_seq_len": 64,
    }
    before, make = not_fitting(fields, 3)
    advice = check_advice(before, make)
    text = report.table(before, advice)
    assert "DOES NOT FIT" in text
    first = advice[0]
    assert f"1. {first.change.flags(3)}: saves {first.saved / GIB:.3g} GiB" in text


@pytest.mark.slow
@pytest.mark.parametrize(("number", "config"), [(1, SFTConfig), (2, RewardConfig)])
def test_advice_of_the_other_steps(opt, number, config):
    fields = {"model_name_or_path": opt("small"), "max_seq_len": 128}
    before, make = not_fitting(fields, number)
    assert isinstance(before.config, config)
    assert f"--step{number}." in check_advice(before, make)[0].change.flags(number)


def test_a_step_that_fits_has_no_advice(opt):
    done, make = estimated({"model_name_or_path": opt("350m")}, number=1)
    assert done.fits
    assert advise(done, make) == []


def test_host_memory_counts(opt):
    fields = {"model_name_or_path": opt("1.3b"), "gradient_checkpointing": True}
    done, _ = estimated(fields | {"offload": ["auto"]}, number=1)
    assert done.host["optimizer states"] == 12 * 1_315_758_080
    assert "optimizer states" not in {k for k, v in done.peak.items.items() if v}
    small = replace(done, device=Device("cuda", 80 * GIB, 8 * GIB, "a GPU"))
    assert done.peak.total < small.device.memory
    assert not small.fits
    assert "fits on the device, not in host memory" in report.line(small, [])


@pytest.mark.slow
def test_a_tensor_parallel_size_that_does_not_divide_the_heads(tiny):
    """The error of the run; such a size is not advised either."""
    fields = {"actor_model_name_or_path": tiny("llama"), "critic_model_name_or_path": tiny("llama")}
    refused = "--inference_tp_size 2 does not divide the model's 1 key-value heads"
    with pytest.raises(UserError, match=refused):
        estimated(fields | {"inference_tp_size": 2}, num_processes=2)
    before, make = estimated(fields, num_processes=2, gib=0.7)
    assert not before.fits
    assert {"inference_tp_size": 2} in [change.fields for change in _changes(before)]
    assert all("inference_tp_size" not in entry.change.fields for entry in advise(before, make))


def test_a_teacher_can_be_offloaded(tiny):
    """Its weights are counted at its own size, and go to the host."""
    llama, gpt2 = tiny("llama"), tiny("gpt2")
    fields = {"actor_model_name_or_path": llama, "critic_model_name_or_path": llama}
    before, _ = estimated(fields | {"teacher_model_name_or_path": gpt2})
    assert {"offload": ["teacher"]} in [change.fields for change in _changes(before)]
    size = Models().sizes(Use(gpt2, "--x", "lm", torch.bfloat16)).total
    scoring = next(mode for mode in before.modes if mode.name == "scoring")
    assert scoring.items["teacher weights"] == pytest.approx(2 * size, rel=0.01)
    away, _ = estimated(fields | {"teacher_model_name_or_path": gpt2, "offload": ["teacher"]})
    assert all("teacher weights" not in mode.items for mode in away.modes)
    assert any(line.startswith("teacher: ") for line in away.models)


def test_frozen_layers_can_be_in_4_bits(tiny):
    """Of an actor with adapters, and of the models that do not train."""
    llama = tiny("llama")
    fields = {f"{name}_model_name_or_path": llama for name in ("actor", "reward", "teacher")}
    fields |= {"actor_lora_dim": 4, "load_in_8bit": ["teacher"]}
    before, _ = estimated(fields)
    suggested = [x.fields["load_in_4bit"] for x in _changes(before) if "load_in_4bit" in x.fields]
    assert suggested == [["actor"], ["reward"]]


def test_advice_for_the_policy_on_pairs(tiny):
    """Advises to precompute or offload a loaded reference, but not one that is not loaded."""
    before, _ = pairs_estimate(tiny)
    assert {"precompute_ref_logprobs": True} in [change.fields for change in _changes(before)]
    done, _ = pairs_estimate(tiny, precompute_ref_logprobs=True)
    fields = [change.fields for change in _changes(done)]
    assert {"precompute_ref_logprobs": True} not in fields
    assert {"offload": ["reference"]} not in fields
