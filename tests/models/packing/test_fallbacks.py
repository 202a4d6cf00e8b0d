"""Which models are not packed or do not run their heads alone, and how that is found out."""

import copy
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import families
import pytest
import torch
import transformers
from own_forward import (
    PADDED,
    TEMPERATURE,
    assert_close,
    assert_same,
    build,
    checked,
    own,
    rows_of,
    runs_head_alone,
)
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations import hub_kernels
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import dschat.distributed as dist
from dschat.config import UserError
from dschat.models.heads import LanguageModel
from dschat.models.packing.attention import WINDOW_IN_MASK
from dschat.models.packing.model import packing_problem
from dschat.models.packing.states import by_torch, mixers
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_frozen, sharded_loading


@pytest.mark.parametrize("name", PADDED)
def test_padded_families_say_why_once(name, caplog):
    with caplog.at_level(logging.INFO, logger="dschat"):
        wrapped = checked(build(name))
        wrapped(rows_of())
    (record,) = [r for r in caplog.records if r.name == "dschat"]
    assert PADDED[name] in record.getMessage()
    with pytest.raises(UserError, match="--packing on: .* --packing auto pads its rows"):
        LanguageModel(build(name), "on")


class ShiftingMLP(LlamaMLP):
    """A planted fault: tokens mix outside attention, as in a short convolution."""

    def forward(self, x):
        return super().forward(x + 0.5 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


@pytest.fixture
def shifting():
    model = build("llama")
    for module in model.modules():
        if type(module) is LlamaMLP:
            module.__class__ = ShiftingMLP
    return model


def test_a_family_that_mixes_tokens_elsewhere_is_found_out(shifting, caplog):
    wrapped = LanguageModel(copy.deepcopy(shifting))
    assert wrapped.packs  # nothing but its results tells
    with caplog.at_level(logging.INFO, logger="dschat"):
        wrapped.check(torch.device("cpu"))
    assert not wrapped.packs
    assert_same(wrapped, shifting)
    assert wrapped.base.config._attn_implementation == "sdpa"
    (record,) = caplog.records
    assert "hidden states differ by" in record.getMessage()
    with pytest.raises(UserError, match="--packing on: .*hidden states differ"):
        checked(shifting, "on")


def test_dropout_is_no_difference():
    model = AutoModelForCausalLM.from_config(
        transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=16, vocab_size=64, attn_pdrop=0.5, resid_pdrop=0.5
        )
    )
    wrapped = LanguageModel(model, "on").train()
    wrapped.check(torch.device("cpu"))
    assert wrapped.packs
    assert runs_head_alone(wrapped)
    assert model.training


@pytest.mark.parametrize(
    ("dtype", "rounding", "fault"), [(torch.float32, 5e-4, 4e-3), (torch.bfloat16, 0.03, 0.1)]
)
def test_more_than_rounding_is_a_difference(dtype, rounding, fault):
    """Relative to the largest value; not where one probe alone differs, which a router may do."""
    wrapped = LanguageModel(build("llama").to(dtype))
    expected = torch.ones(12, 4)
    expected[0] = 2.0
    for gap, found in ((rounding, None), (fault, pytest.approx(fault, rel=1e-3))):
        assert wrapped.gap(expected + 2 * gap, expected) == found
    one_probe = expected + torch.tensor([1.0, 0.0, 0.0]).repeat_interleave(4).unsqueeze(1)
    assert wrapped.gap(one_probe, expected) is None
    one_column = expected + torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat(3).unsqueeze(1)
    assert wrapped.gap(one_column, expected) == 0.5


class BiasedAttention(LlamaAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, position_bias=2.0, **kwargs)


def test_an_argument_that_packed_attention_does_not_have_pads_the_rows():
    model = build("llama")
    for module in model.modules():
        if type(module) is LlamaAttention:
            module.__class__ = BiasedAttention
    with pytest.raises(UserError, match="BiasedAttention uses position_bias"):
        checked(model, "on")


class ScaledLogits(LlamaForCausalLM):
    """A planted family that changes logits after the head, by no field of its configuration."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output


class NamelessBody(LlamaForCausalLM):
    """Its backbone is neither where ``base_model_prefix`` says nor in ``model``."""

    base_model_prefix = "language_model"

    def __init__(self, config):
        super().__init__(config)
        self.stack = self.model
        del self.model

    def forward(self, input_ids, **kwargs):
        hidden = self.stack(input_ids=input_ids, **kwargs).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden))


@pytest.mark.parametrize(("cls", "packs"), [(ScaledLogits, True), (NamelessBody, False)])
def test_a_head_that_cannot_run_alone_runs_inside_its_model(cls, packs):
    torch.manual_seed(0)
    model = cls(families.CONFIGS["llama"]()).eval()
    wrapped = checked(copy.deepcopy(model))
    assert_same(wrapped, model)
    assert not runs_head_alone(wrapped)
    assert wrapped.packs == packs


def test_a_layer_with_a_state_that_takes_no_rows_pads_them():
    model, failures = build("tiny_bamba"), [RuntimeError("sizes of tensors")]
    _, mixer = mixers(model)[0]
    forward = mixer.forward

    def fails_once(*args, **options):
        if failures:
            raise failures.pop()
        return forward(*args, **options)

    mixer.forward = fails_once
    wrapped = checked(model)
    assert (wrapped.packs, wrapped.by_row, failures) == (False, False, [])
    assert_same(wrapped, build("tiny_bamba"))


@pytest.mark.parametrize(("name", "by_row"), [("llama", False), ("tiny_bamba", True)])
def test_layers_with_states_read_rows(name, by_row):
    model = build(name)
    assert packing_problem(model) == ""
    wrapped = checked(model)
    assert (wrapped.packs, wrapped.by_row) == (True, by_row)
    assert not checked(build(name), "off").by_row


def test_kernels_of_other_packages_run_on_gpus_alone(monkeypatch, tmp_path):
    """Also where they are installed: they read no CPU's memory, and the meta device has none."""
    decorate = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
    if decorate is None:
        pytest.skip("this transformers does not call them")
    (tmp_path / "some_kernels.py").write_text("def scan(x): return 'kernel'\n")
    monkeypatch.syspath_prepend(tmp_path)
    scan = decorate("scan", "some_kernels")(lambda x: "torch")
    assert scan(0) == "torch"
    monkeypatch.setattr(dist, "has_gpu", lambda: True)
    assert scan(0) == "kernel"
    with by_torch():
        assert scan(0) == "torch"
    assert scan(0) == "kernel"


_KERNELS = """
from types import SimpleNamespace
def fail(*_, **__): raise RuntimeError("memory of a GPU")
rule = SimpleNamespace(chunk_gated_delta_rule=fail, fused_recurrent_gated_delta_rule=fail)
ops = SimpleNamespace(gated_delta_rule=rule)
"""
_SAVED = """
import sys
from pathlib import Path
import torch
from tiny_models import causal_lm
import dschat.distributed as dist
from dschat.checkpoint.saved_check import check_saved, probe_values
from dschat.models.heads import LanguageModel
model, folder = causal_lm("qwen3_5"), Path(sys.argv[1])
model.save_pretrained(folder)
packed = LanguageModel(model)
expected = probe_values(packed, model.config, torch.device("cpu"))
dist.has_gpu = lambda: True
try:
    probe_values(packed, model.config, torch.device("cpu"))
except RuntimeError as error:
    print(error)
check_saved(folder, model, expected)
"""


@pytest.mark.slow
def test_a_saved_model_is_checked_on_the_cpu_of_a_machine_with_kernels(tmp_path):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text(_KERNELS)
    done = subprocess.run(
        [sys.executable, "-c", _SAVED, str(tmp_path / "saved")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "memory of a GPU"  # without the check's context


@pytest.mark.slow  # its reason is another version of transformers
def test_families_whose_windows_are_in_masks_alone():
    """All families of transformers that make such masks, by their source: each either tells its
    attention of the window or is in our table, or is not packed.
    """
    missing = []
    for path in Path(transformers.models.__file__).parent.glob("*/modeling_*.py"):
        source = path.read_text()
        makes = "create_sliding_window_causal_mask" in source or "create_chunked_" in source
        tells = re.search(r"(?<!config\.)\bsliding_window=", source)
        if makes and not tells and "_supports_attention_backend = True" in source:
            missing.append(path.parent.name)
    assert {name.removesuffix("_text") for name in WINDOW_IN_MASK} <= set(missing)
    # Doge computes a mask of its own; PaliGemma and the assistants are no causal language models.
    assert set(missing) - {name.removesuffix("_text") for name in WINDOW_IN_MASK} <= {
        "doge",
        "gemma4_assistant",
        "gemma4_unified_assistant",
        "moonshine_streaming",
        "paligemma",
    }


def test_sharded_weights_are_checked_too(shifting, tmp_path):
    """Under ZeRO-3 they are there in the engine's forward only, and gone after the check."""
    shifting.save_pretrained(tmp_path)
    section = {"stage3_param_persistence_threshold": 0}  # small weights would stay
    zero = ZeroSettings(3, torch.float32, overrides={"zero_optimization": section})
    with sharded_loading(zero):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for module in model.modules():
        if type(module) is LlamaMLP:
            module.__class__ = ShiftingMLP
    engine = initialize_frozen(LanguageModel(model), zero)
    with torch.no_grad():
        values, _ = engine(rows_of(), TEMPERATURE)
    assert not engine.module.packs
    assert sum(p.numel() for p in engine.parameters()) == 0
    assert_close(values, own(shifting)[0].detach())
