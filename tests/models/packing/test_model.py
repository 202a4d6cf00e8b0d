"""Packed rows against transformers' own forward, row by row, for every family.

Log-probs, entropies, scores and gradients; which families are padded instead, and how that is found
out.
"""

import copy
import logging
import pickle
import re
from pathlib import Path

import families
import pytest
import tiny_models
import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    RecurrentGemmaConfig,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from dschat.config import UserError
from dschat.models.language_model import LanguageModel
from dschat.models.lora import adapters_off, prepare_for_training
from dschat.models.packing import pack
from dschat.models.packing.model import WINDOW_IN_MASK
from dschat.models.score_model import ScoreModel
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_frozen, sharded_loading

# Prompts that two, three and no rows share; one token; a prompt without an answer; answers longer
# than the windows of all families here.
ROWS = [
    [5, 6, 7, 8, 9, 10, 11, 12, 13],
    [5, 6, 7, 8, 9, 20, 21],
    [3],
    [5, 6, 7, 8, 9, 10, 11, 12, 13],
    [30, 31, 32, 33, 34, 35, 36, 37],
    [40],
    [50, 51, 52],
    [50, 51, 53, 54, 55, 56, 57, 58, 59],
]
PROMPTS = [5, 5, 1, 5, 8, 0, 2, 2]
TEMPERATURE = 0.7
_SIZES = tiny_models._IDS | tiny_models._SMALL | {"num_key_value_heads": 1, "head_dim": 16}
_SIZES |= {"intermediate_size": 48}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERS = {
    "cohere": lambda: CohereConfig(**_SIZES, logit_scale=0.25),
    "recurrent_gemma": lambda: RecurrentGemmaConfig(
        **tiny_models.OTHERS["recurrent_gemma"]().to_diff_dict() | {"logits_soft_cap": 2.0}
    ),
    "gemma2": lambda: Gemma2Config(
        **_SIZES, attn_logit_softcapping=2.0, final_logit_softcapping=2.0, sliding_window=4
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES,
        final_logit_softcapping=2.0,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek": lambda: DeepseekV3Config(
        **{k: v for k, v in _SIZES.items() if k not in ("head_dim", "num_key_value_heads")},
        **_EXPERTS,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **{k: v for k, v in _SIZES.items() if k != "head_dim"},
        **_EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=16,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=0,
    ),
}
LIBRARY = {f"tiny_{name}": made for name, made in tiny_models.OTHERS.items()}
CONFIGS = families.CONFIGS | LIBRARY | OTHERS
# Families whose rows are padded, with the reason that a log line gives.
PADDED = {
    "bloom": "attention is eager",
    "bloom_residual_after_norm": "attention is eager",
    "tiny_gpt_neo": "attention is eager",
    "tiny_bamba": "transformers' interface",
    "tiny_recurrent_gemma": "recurrent state",
    "recurrent_gemma": "recurrent state",
    "gemma2": "attention is eager",
    "qwen2_moe": "in the mask alone",
}
FULL_LOGITS = ("tiny_recurrent_gemma", "recurrent_gemma", "gemma2", "gemma3", "cohere")
CORE = (*families.CORE, *OTHERS)


def build(name):
    """A tiny model of ``CONFIGS[name]``; biases and norms are drawn, so that a lost one shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        return tiny_models._randomised(model)


def checked(model, packing="auto", wrap=LanguageModel):
    """``model`` wrapped, after the check that an engine makes."""
    wrapped = wrap(model, packing)
    wrapped.check(torch.device("cpu"))
    return wrapped


def rows_of(ids=ROWS, prompts=PROMPTS):
    """Reading every column that has a next token."""
    return pack(ids, [range(len(row) - 1) for row in ids], prompts)


def own(model):
    """Log-probs and entropies of ``ROWS`` by transformers' own forward of each row."""
    logprobs, entropies = [], []
    for row in ROWS:
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        logprobs.append(log_p.gather(1, torch.tensor(row[1:]).long().unsqueeze(1))[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(module, *values):
    """Of a sum with a weight for every value, by names without ``PackedModel``'s."""
    module.zero_grad()
    sum((v * torch.linspace(-1, 2, len(v))).sum() for v in values).backward()
    named = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {name: grad.clone() for name, grad in named.items()}


def assert_close(actual, expected, tolerance=1e-5):
    gap, scale = (actual - expected).abs().max(), expected.abs().max()
    assert gap <= tolerance * float(scale), f"{float(gap):.2g} of {float(scale):.2g}"


def assert_same_gradients(ours, theirs, tolerance=2e-5):
    """Each relative to its own largest, or to a tenth of the largest of all: those of the keys'
    biases are roundings of 0.
    """
    assert ours.keys() == theirs.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    for name, grad in theirs.items():
        gap, scale = (ours[name] - grad).abs().max(), max(float(grad.abs().max()), largest / 10)
        assert gap <= tolerance * scale, f"{name}: {float(gap):.2g} of {scale:.2g}"


def assert_same(wrapped, model):
    """The wrapped model's results and gradients are those of ``model`` by its own forward."""
    expected = own(model)
    theirs = gradients(model, *expected)
    results = wrapped(rows_of(), TEMPERATURE, True)
    for actual, reference in zip(results, expected, strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual.detach(), reference.detach())
    assert_same_gradients(gradients(wrapped.model, *results), theirs)
    assert wrapped(rows_of(), TEMPERATURE)[1] is None


def every_family():
    """What is not in ``CORE`` is left to the slow tests."""
    names = [pytest.param(n, marks=() if n in CORE else pytest.mark.slow) for n in CONFIGS]
    return pytest.mark.parametrize("name", names)


# -- equality --------------------------------------------------------------------------------------


@every_family()
@pytest.mark.parametrize("packing", ["auto", "off"])
def test_every_family_is_its_own_forward(name, packing):
    model = build(name)
    wrapped = checked(copy.deepcopy(model), packing)
    assert_same(wrapped, model)
    assert wrapped.packs == (packing == "auto" and name not in PADDED)
    assert wrapped._head_is_linear == (name not in FULL_LOGITS)


@pytest.mark.parametrize(
    "name", ["opt", "opt_350m", "gpt2", "gpt_neox", "llama", "mistral", "bloom"]
)
@pytest.mark.parametrize("packing", ["auto", "off"])
def test_scores_are_those_of_the_score_head(name, packing):
    model = tiny_models.score_model(name)
    wrapped = checked(copy.deepcopy(model), packing, ScoreModel)
    body = getattr(model, model.base_model_prefix)
    expected = torch.cat(
        [model.score(body(torch.tensor([row])).last_hidden_state)[0, :, 0] for row in ROWS]
    )
    scores = wrapped(pack(ROWS, [range(len(row)) for row in ROWS], PROMPTS))
    assert scores.dtype == torch.float32
    assert_close(scores.detach(), expected.detach())
    assert_same_gradients(gradients(wrapped.model, scores), gradients(model, expected))
    assert wrapped.packs == (packing == "auto" and name != "bloom")


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "gemma3", "bloom"])
@pytest.mark.parametrize("lora", [0, 4])
def test_gradient_checkpointing_and_adapters(name, lora):
    """With adapters on and off; both models have the same ones."""
    models = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model = prepare_for_training(
            build(name), checkpointing, lora, 8.0, ["all-linear"], True, "--lora_modules"
        )
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.data.normal_(0, 0.2)
        models.append(model.train())  # transformers checkpoints in training only
    for module in models[1].modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    models[0].eval()
    wrapped = checked(models[1])
    assert_same(wrapped, models[0])
    if lora:
        with_adapters = wrapped(rows_of())[0]
        with adapters_off(wrapped.model), torch.no_grad():
            base = wrapped(rows_of(), TEMPERATURE)[0]
        assert_close(base, own(build(name))[0].detach())
        assert (with_adapters - base).abs().max() > 0.1


def test_rows_do_not_depend_on_their_company():
    model = build("llama")
    wrapped = checked(copy.deepcopy(model))
    expected, _ = own(model)
    together = rows_of()
    for order in (range(8), (7, 2, 0, 5, 4, 1, 6, 3), (2,), (5, 2), (4,), (3, 0)):
        rows = rows_of([ROWS[i] for i in order], [PROMPTS[i] for i in order])
        with torch.no_grad():
            values, _ = wrapped(rows, TEMPERATURE)
        for place, i in enumerate(order):
            if len(ROWS[i]) > 1:
                alone = expected[together.row_of == i].detach()
                assert_close(values[rows.row_of == place], alone)


@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
def test_no_rows_give_every_weight_a_gradient_of_zero(name, packing):
    """Under ZeRO-3 a rank without rows takes part in the backward pass of every weight."""
    wrapped = checked(build(name), packing)
    logprobs, entropy = wrapped(pack([], []), 1.0, True)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert all((p.grad == 0).all() for p in wrapped.parameters())
    scores = checked(tiny_models.score_model("llama"), packing, ScoreModel)
    scores(pack([], [])).sum().backward()
    assert all((p.grad == 0).all() for p in scores.parameters())


@pytest.mark.parametrize("name", ["llama", "opt", "qwen2", "gpt2"])
def test_bf16(name):
    """Packed and padded rows differ by roundings of bf16."""
    model = build(name).bfloat16()
    packed, padded = checked(copy.deepcopy(model)), checked(model, "off")
    with torch.no_grad():
        values, expected = packed(rows_of())[0], padded(rows_of())[0]
    assert packed.packs
    assert values.dtype == torch.float32
    assert (values - expected).abs().mean() < 0.05 * expected.abs().mean()


# -- what cannot be packed -------------------------------------------------------------------------


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


class SoftcappedAttention(LlamaAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, softcap=2.0, **kwargs)


def test_an_argument_that_packed_attention_does_not_have_pads_the_rows():
    model = build("llama")
    for module in model.modules():
        if type(module) is LlamaAttention:
            module.__class__ = SoftcappedAttention
    with pytest.raises(UserError, match="SoftcappedAttention uses softcap"):
        checked(model, "on")


class ScaledLogits(LlamaForCausalLM):
    """A planted family that changes logits after the head, by no field of its configuration."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output


class NamelessBody(LlamaForCausalLM):
    """Its backbone is not where ``base_model_prefix`` says (Llama 4 is one)."""

    base_model_prefix = "language_model"


@pytest.mark.parametrize(("cls", "packs"), [(ScaledLogits, True), (NamelessBody, False)])
def test_a_head_that_cannot_run_alone_runs_inside_its_model(cls, packs):
    torch.manual_seed(0)
    model = cls(families.CONFIGS["llama"]()).eval()
    wrapped = checked(copy.deepcopy(model))
    assert_same(wrapped, model)
    assert not wrapped._head_is_linear
    assert wrapped.packs == packs


def test_families_whose_windows_are_in_masks_alone():
    """All families of transformers that make such masks, by their source: each either tells its
    attention of the window or is in our table, or does not use transformers' interface.
    """
    missing = []
    for path in Path(transformers.models.__file__).parent.glob("*/modeling_*.py"):
        source = path.read_text()
        makes = "create_sliding_window_causal_mask" in source or "create_chunked_" in source
        tells = re.search(r"(?<!config\.)\bsliding_window=", source)
        if makes and not tells and "_supports_attention_backend = True" in source:
            missing.append(path.parent.name)
    assert {name.removesuffix("_text") for name in WINDOW_IN_MASK} <= set(missing)
    # PaliGemma and the assistants are no causal language models.
    assert set(missing) - {name.removesuffix("_text") for name in WINDOW_IN_MASK} <= {
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


# -- the wrapped module ----------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_its_own_head(copied):
    wrapped = checked(build("llama_tied"))
    before, _ = wrapped(rows_of())
    other = copied(wrapped)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    assert torch.equal(wrapped(rows_of())[0], before)
    assert_close(other(rows_of(), TEMPERATURE)[0].detach(), own(other.model)[0].detach())


def test_the_model_inside_generates_and_is_saved_as_before(tmp_path):
    """Left-padded prompts longer than the window; and no trace of our attention on the disk."""
    ids = torch.tensor([[0] * 5 + [5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 16]])
    mask = torch.tensor([[0] * 5 + [1] * 3, [1] * 8])
    for name in ("llama", "mistral"):
        model = build(name)
        options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
        expected = model.generate(ids, **options)
        wrapped = checked(model)
        assert torch.equal(wrapped.base.generate(ids, **options), expected)
        wrapped(rows_of())
        assert torch.equal(wrapped.base.generate(ids, **options), expected)
        wrapped.base.save_pretrained(tmp_path / name)
        assert "dschat" not in (tmp_path / name / "config.json").read_text()
