"""Load-balancing loss of mixtures of experts: transformers' own number, on real tokens."""

import logging

import pytest
import torch
import transformers
from packaging import version
from quick import each_once
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat.config import RewardConfig
from dschat.models.heads import LanguageModel, ScoreModel
from dschat.models.lora import prepare_for_training
from dschat.models.routing import MAX_LOAD, METRIC, router_metrics, routers_of, watch_routers
from dschat.supervised.loop import RewardTask, SFTTask
from dschat.supervised.preference import PreferenceTask
from tests.observability.test_flops import COUNTED, EXPERTS, config_of

LATER = {
    "jetmoe": EXPERTS | {"kv_channels": 8, "num_key_value_heads": 2, "num_attention_heads": 4},
    "phimoe": EXPERTS | {"router_jitter_noise": 0.0},
    "qwen3_5_moe_text": COUNTED["qwen3_moe"]
    | {"shared_expert_intermediate_size": 16, "layer_types": ["full_attention"] * 4},
}
FAMILIES = {
    family: COUNTED.get(family) or LATER[family]
    for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", *LATER)
}
ROWS = [[5, 9, 11, 3, 8, 20, 31], [7, 6, 5], [12, 40, 41, 42, 43]]


def model_of(family: str, coefficient: float = 0.5):
    torch.manual_seed(0)
    config = config_of(family, **FAMILIES[family])
    config.router_aux_loss_coef = config.aux_loss_coef = coefficient
    return recorded(AutoModelForCausalLM.from_config(config).train())


def recorded(model):
    """``model``; skips the test where an older transformers does not record its routers."""
    is_old = version.parse(transformers.__version__) < version.parse("5.18")
    if is_old and not routers_of(model):
        pytest.skip(f"transformers {transformers.__version__} records no routers of this family")
    return model


def wrapped(model, packing: str = "auto", wrap=LanguageModel, asked=None, is_policy: bool = False):
    packed = wrap(model, packing)
    watch_routers(packed, asked, is_policy)
    packed.check(torch.device("cpu"))
    return packed


def sft_rows(rows=ROWS):
    return [{"input_ids": row, "loss_mask": [True] * len(row)} for row in rows]


def padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


@pytest.mark.parametrize(("family", "packing"), each_once(FAMILIES, ["auto", "off"]))
def test_it_is_transformers_own_loss_on_a_padded_batch(family, packing):
    model = model_of(family)
    ids, mask = padded(ROWS)
    expected = model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    packed, task = wrapped(model, packing), SFTTask()
    batch = task.collate(sft_rows())
    total, sums = task.loss(packed, batch)
    weight = task.weight(batch)
    assert sums[METRIC].item() / weight == pytest.approx(expected.item(), rel=1e-5)
    assert task.summarize({k: float(v) for k, v in sums.items()})[METRIC] == pytest.approx(
        expected.item(), rel=1e-5
    )
    added = total - sums["loss"]
    assert added.item() == pytest.approx(0.5 * weight * expected.item(), rel=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "granitemoe"])
def test_the_gradient_is_that_of_the_sum(family):
    """Also where the head is not a plain product (GraniteMoE scales its logits)."""
    model, rows = model_of(family), ROWS[:1]
    ids = torch.tensor(rows)
    out = model(input_ids=ids, output_router_logits=True)
    logprobs = out.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    (-logprobs.sum() + 0.5 * (len(rows[0]) - 1) * out.aux_loss).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    task = SFTTask()
    batch = task.collate(sft_rows(rows))
    assert task.weight(batch) == len(rows[0]) - 1
    task.loss(wrapped(model), batch)[0].backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_reward_models_add_it_too():
    config = model_of("qwen3_moe").config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    packed, task = wrapped(model, wrap=ScoreModel), RewardTask()
    row = {"chosen_ids": ROWS[0], "rejected_ids": ROWS[2], "prompt_length": 1}
    batch = task.collate([row])
    total, sums = task.loss(packed, batch)
    assert (total - sums["loss"]).item() == pytest.approx(0.5 * sums[METRIC].item(), rel=1e-5)
    total.backward()
    router = next(p for n, p in model.named_parameters() if n.endswith("gate.weight"))
    assert router.grad.abs().sum() > 0


def test_with_adapters_and_checkpointing():
    def gradients(coefficient: float) -> dict[str, torch.Tensor]:
        model = model_of("qwen3_moe", coefficient)
        args = (True, 4, 8.0, ["q_proj"], True, "--lora_dim")
        packed, task = wrapped(prepare_for_training(model, *args)), SFTTask()
        task.loss(packed, task.collate(sft_rows()))[0].backward()
        return {n: p.grad for n, p in packed.named_parameters() if p.grad is not None}

    without, small, large = (gradients(c) for c in (0.0, 0.1, 0.2))
    assert any(small[n].ne(without[n]).any() for n in without)
    for name in without:  # linear in the coefficient, through recomputed layers too
        expected = 2 * small[name] - without[name]
        torch.testing.assert_close(large[name], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_an_empty_micro_batch_adds_nothing(packing):
    """A rank with fewer rows than others runs a dummy token, in the same collectives."""
    packed, task = wrapped(model_of("mixtral"), packing), SFTTask()
    total, sums = task.loss(packed, task.collate([]))
    total.backward()
    assert total.item() == sums[METRIC].item() == 0.0


def test_evaluation_has_none():
    packed, task = wrapped(model_of("mixtral")), SFTTask()
    with torch.no_grad():
        total, sums = task.loss(packed, task.collate(sft_rows()))
    assert METRIC not in sums
    assert total == sums["loss"]


def test_policies_add_it_where_asked():
    """DPO: both answers of a pair are rows of one micro-batch, which counts half the answers."""
    model = model_of("mixtral", 0.0)
    ids, mask = padded(ROWS[:2])
    expected = model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    row = {"chosen_ids": ROWS[0], "rejected_ids": ROWS[1], "prompt_length": 1}
    task = PreferenceTask(RewardConfig(loss="dpo", precompute_ref_logprobs=True))
    packed = wrapped(model, asked=0.25, is_policy=True)
    batch = task.collate([row | {"ref_logps": [0.0, 0.0]}])
    total, sums = task.loss(packed, batch)
    assert task.weight(batch) == 1
    assert (total - sums["loss"]).item() == pytest.approx(0.25 * expected.item(), rel=1e-4)
    metrics = task.summarize({k: float(v) for k, v in sums.items()})
    assert metrics[METRIC] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_load_of_the_busiest_expert(checkpointing):
    """Over the micro-batches of a step; counted by hand from the router's choices."""
    model = model_of("qwen3_moe", 0.0)
    if checkpointing:
        model.gradient_checkpointing_enable()
    packed, task = wrapped(model), SFTTask()
    assert router_metrics(packed) == {}
    for row in ROWS:
        task.loss(packed, task.collate(sft_rows([row])))[0].backward()
    with torch.no_grad():
        task.loss(packed, task.collate(sft_rows()))  # an evaluation is not counted
        logits = [model(input_ids=torch.tensor([row]), output_router_logits=True) for row in ROWS]
    largest = 0.0
    for layer in zip(*(out.router_logits for out in logits), strict=True):
        chosen = torch.cat(layer).topk(model.config.num_experts_per_tok).indices
        load = chosen.flatten().bincount(minlength=model.config.num_experts).double()
        largest = max(largest, float(load.max() / load.mean()))
    assert router_metrics(packed) == {MAX_LOAD: pytest.approx(largest)}
    assert router_metrics(packed) == {}
    assert router_metrics(LanguageModel(other_model("llama"))) == {}


def other_model(family: str, **sizes):
    return AutoModelForCausalLM.from_config(config_of(family, **sizes))


@pytest.mark.parametrize(
    ("made", "asked", "is_policy", "said"),
    [
        (lambda: model_of("mixtral"), None, True, "_coef 0.5 is not applied to a policy"),
        (lambda: model_of("mixtral"), 0.0, False, ""),
        (lambda: model_of("mixtral"), 0.0, True, ""),
        (lambda: model_of("mixtral", 0.0), None, False, ""),
        (lambda: other_model("llama"), None, False, ""),
        (lambda: other_model("llama"), 0.1, True, "aux_loss_coef: LlamaForCausalLM has no experts"),
        (
            lambda: other_model("llama4_text", **EXPERTS, intermediate_size_mlp=48),
            *(None, False, "is not applied: its class has no such loss"),
        ),
    ],
)
def test_without_a_coefficient_or_experts_there_is_none(made, asked, is_policy, said, caplog):
    packed, task = LanguageModel(made()), SFTTask()
    caplog.clear()
    with caplog.at_level(logging.INFO, "dschat"):
        watch_routers(packed, asked, is_policy)
    assert len(caplog.messages) == bool(said)
    assert said in caplog.text
    assert packed.router_loss is None
    total, sums = task.loss(packed, task.collate(sft_rows()))
    assert METRIC not in sums
    assert total == sums["loss"]
