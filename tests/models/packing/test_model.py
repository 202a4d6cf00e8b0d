"""Packed rows against transformers' own forward, row by row, for every family.

Log-probs, entropies, scores and gradients; adapters, gradient checkpointing, empty micro-batches.
"""

import copy
import pickle
from itertools import product

import pytest
import tiny_models
import torch
from own_forward import (
    CONFIGS,
    FULL_LOGITS,
    OTHERS,
    PADDED,
    PROMPTS,
    ROWS,
    TEMPERATURE,
    assert_close,
    assert_same,
    assert_same_gradients,
    build,
    checked,
    gradients,
    own,
    rows_of,
    runs_head_alone,
)
from quick import each_once, slow, some
from torch import nn

from dschat.models.heads import LanguageModel, ScoreModel
from dschat.models.lora import adapters_off, prepare_for_training
from dschat.models.packing import pack

STATES = ("tiny_qwen3_5", "tiny_nemotron_h", "recurrent_gemma")
QUICK = [(name, "auto") for name in ("opt_350m", "gpt2", "bloom", "llama", "gpt_oss", *OTHERS)]
QUICK += [("gpt_oss", "off")]


# -- equality --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "packing"), some(product(CONFIGS, ["auto", "off"]), QUICK))
def test_every_family_is_its_own_forward(name, packing):
    model = build(name)
    wrapped = LanguageModel(copy.deepcopy(model), packing)
    # A softcap hardly changes the small logits of a model that has not been trained.
    is_known_before = runs_head_alone(wrapped)
    wrapped.check(torch.device("cpu"))
    # 2.6e-5 seen on a processor with AVX-512: its state sums over padded rows.
    assert_same(wrapped, model, 5e-5 if name == "tiny_qwen3_5" else 2e-5)
    assert wrapped.packs == (packing == "auto" and name not in PADDED)
    assert is_known_before == runs_head_alone(wrapped) == (name not in FULL_LOGITS)


@pytest.mark.parametrize(
    ("name", "packing"),
    each_once(
        ["opt", "opt_350m", "gpt2", "gpt_neox", "llama", "mistral", "bloom"], ["auto", "off"]
    ),
)
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


@pytest.mark.parametrize(
    "name", ["gemma3", "tiny_bamba", *slow(["llama", "bloom", "opt", "gpt2", "nemotron"])]
)
@pytest.mark.parametrize("lora", [pytest.param(0, marks=pytest.mark.slow), 4])
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


@pytest.mark.parametrize("name", ["llama", "tiny_bamba"])
def test_rows_do_not_depend_on_their_company(name):
    model = build(name)
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


@pytest.mark.parametrize(
    ("name", "packing"), each_once(["llama", "gemma3", "bloom", "tiny_bamba"], ["auto", "off"])
)
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


@pytest.mark.parametrize("name", ["gpt2", *slow(["llama", "opt", "qwen2"])])
def test_bf16(name):
    """Packed and padded rows differ by roundings of bf16."""
    model = build(name).bfloat16()
    packed, padded = checked(copy.deepcopy(model)), checked(model, "off")
    with torch.no_grad():
        values, expected = packed(rows_of())[0], padded(rows_of())[0]
    assert packed.packs
    assert values.dtype == torch.float32
    assert (values - expected).abs().mean() < 0.05 * expected.abs().mean()


# -- the wrapped module ----------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("name", ["llama_tied", "tiny_bamba"])
def test_a_copy_has_its_own_weights(name, copied):
    wrapped = checked(build(name))
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
