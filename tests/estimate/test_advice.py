"""The suggested changes save what they state; host memory counts."""

from dataclasses import replace

import pytest
import torch
from estimates import estimated, pairs_estimate, rlhf_fields

from dschat.config import UserError
from dschat.estimate import report
from dschat.estimate.devices import GIB, Device
from dschat.estimate.models import Models, Use
from dschat.estimate.report import _changes, advise


def suggested(estimate, name):
    """The values of the field ``name`` in the changes that may help."""
    return [change.fields[name] for change in _changes(estimate) if name in change.fields]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_advice_saves_the_stated_bytes(opt, number):
    """On a GPU with 0.8 of the needed memory."""
    fields = {"model_name_or_path": opt("small"), "max_seq_len": 128}
    if number == 3:
        fields = rlhf_fields(opt("small"))
    roomy, _ = estimated(fields, number)
    before, make = estimated(fields, number, gib=0.8 * roomy.peak.total / GIB)
    assert not before.fits
    advice = advise(before, make)
    assert 1 <= len(advice) <= 3
    first = advice[0]
    after = make(replace(before.config, **first.change.fields))
    assert first.saved == before.peak.total - after.peak.total > 0
    saved = sum(entry.saved for entry in advice)
    assert advice[-1].after.peak.total == before.peak.total - saved
    flags, text = first.change.flags(number), report.table(before, advice)
    assert f"--step{number}." in flags
    assert "DOES NOT FIT" in text
    assert f"1. {flags}: saves {first.saved / GIB:.3g} GiB" in text


@pytest.mark.slow
def test_a_step_that_fits_has_no_advice(opt):
    done, make = estimated({"model_name_or_path": opt("350m")}, number=1)
    assert done.fits
    assert advise(done, make) == []


@pytest.mark.slow
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
    assert suggested(before, "inference_tp_size") == [2]
    assert all("inference_tp_size" not in entry.change.fields for entry in advise(before, make))


def test_a_teacher_can_be_offloaded(tiny):
    """Its weights are counted at its own size, and go to the host."""
    llama, gpt2 = tiny("llama"), tiny("gpt2")
    fields = {"actor_model_name_or_path": llama, "critic_model_name_or_path": llama}
    before, _ = estimated(fields | {"teacher_model_name_or_path": gpt2})
    assert ["teacher"] in suggested(before, "offload")
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
    assert suggested(before, "load_in_4bit") == [["actor"], ["reward"]]


def test_advice_for_the_policy_on_pairs(tiny):
    """Advises to precompute or offload a loaded reference, but not one that is not loaded."""
    before, _ = pairs_estimate(tiny)
    assert suggested(before, "precompute_ref_logprobs") == [True]
    assert ["reference"] in suggested(before, "offload")
    done, _ = pairs_estimate(tiny, precompute_ref_logprobs=True)
    assert suggested(done, "precompute_ref_logprobs") == []
    assert ["reference"] not in suggested(done, "offload")
