"""Mixtures of experts: all ways to run them agree, and a checkpoint has one of two forms."""

import copy
import math

import pytest
import torch
from families import PROMPTS, empty_engine, engine, logprob_gap, on_stacks, stream
from quick import each_once
from test_weights import base_tensors, factors, with_adapters

from dschat.config import UserError
from dschat.inference import SamplingParams
from dschat.inference.model import experts
from dschat.inference.model.spec import ExpertSpec

pytestmark = pytest.mark.usefixtures("operators_of_torch")
SAMPLING = SamplingParams(max_new_tokens=8, n=2, seed=7, ignore_eos=True)
NAMES = ["qwen3_moe", "gpt_oss"]


@pytest.mark.parametrize(
    ("name", "way", "layout"), each_once(NAMES, ["grouped", "all"], ["copy", "borrowed"])
)
def test_what_runs_on_devices_computes_the_same(name, way, layout, module_of, monkeypatch):
    """torch's grouped product in bf16 there, here in fp32; else all experts on all rows."""
    module, made = module_of(name), on_stacks(empty_engine(module_of(name).config))
    if layout == "copy":
        made.weights.load(stream(module))
    else:
        made.weights.borrow(dict(module.named_parameters()))
    monkeypatch.setattr(experts, "has_grouped_product", lambda x: way == "grouped")
    rollout = made.generate(PROMPTS, SAMPLING)
    assert logprob_gap(module, PROMPTS, rollout) < 5e-5
    assert rollout.token_ids == engine(module).generate(PROMPTS, SAMPLING).token_ids


def test_shares_of_a_sum_that_is_larger_at_least():
    """Of two experts with scores of 1/2 and 1/4: divided by 1."""
    logits = torch.tensor([[0.0, math.log(1 / 3), -9.0]])
    spec = ExpertSpec(3, 2, 0, scoring="sigmoid", least=0.25)
    chosen, shares = experts.choose(spec, logits)
    assert chosen.tolist() == [[0, 1]]
    assert shares.tolist() == [pytest.approx([0.5, 0.25])]


@pytest.mark.parametrize("layout", ["copy", "borrowed"])
def test_a_router_in_fp32_of_a_model_in_16_bits(layout, module_of):
    """Dots 1's: from weights of 16 bits too, as DeepSpeed keeps them."""
    module = copy.deepcopy(module_of("dots1")).bfloat16()
    made = empty_engine(module.config, dtype=torch.bfloat16)
    if layout == "copy":
        made.weights.load(stream(module))
    else:
        made.weights.borrow(dict(stream(module)))
    rollout = made.generate(PROMPTS, SAMPLING)
    router, x = made._decoder._layers[1].mlp, torch.randn(3, 32).bfloat16()
    weight = module.model.layers[1].mlp.gate.weight
    logits = torch.nn.functional.linear(x.float(), weight.float())
    expected = experts.choose(router.spec, logits, router.correction)
    assert all(map(torch.equal, router.choose(x), expected))
    assert len(rollout.token_ids) == 2 * len(PROMPTS)


def by_expert(tensors):
    """The weights as published: gate, up and down of each expert."""
    for name, tensor in tensors:
        if name.endswith("gate_up_proj"):
            for e, (gate, up) in enumerate(x.chunk(2) for x in tensor):
                for part, half in (("gate", gate), ("up", up)):
                    yield name.replace("gate_up_proj", f"{e}.{part}_proj.weight"), half
        elif name.endswith("experts.down_proj"):
            yield from (
                (name.replace("down", f"{e}.down") + ".weight", x) for e, x in enumerate(tensor)
            )
        else:
            yield name, tensor


@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_may_come_apart(is_stacked, module_of):
    module = module_of("qwen3_moe")
    expected = engine(module).generate(PROMPTS, SAMPLING)
    made = empty_engine(module.config)
    made = on_stacks(made) if is_stacked else made
    made.weights.load(by_expert(stream(module)))
    assert made.generate(PROMPTS, SAMPLING).token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, whole: s[:-1], "lack model.layers.2.mlp.experts"),
        (lambda s, whole: s + whole, r"experts.down_proj twice"),
        (lambda s, whole: [(n, t[:1] if "experts.1.up" in n else t) for n, t in s], "in shape"),
    ],
    ids=["missing", "both", "shape"],
)
def test_experts_apart_are_all_there_and_in_one_form(change, message, module_of):
    tensors = [x for x in stream(module_of("qwen3_moe")) if "layers.2.mlp.experts" not in x[0]]
    those = [x for x in stream(module_of("qwen3_moe")) if "layers.2.mlp.experts" in x[0]]
    made = empty_engine(module_of("qwen3_moe").config)
    with pytest.raises(UserError, match=message):
        made.weights.load(tensors + change(list(by_expert(those)), those[-1:]))


def test_side_products_on_stacks():
    """LoRA's factors of all experts, which PEFT has in one tensor."""
    wrapped = with_adapters("qwen3_moe", seed=1)
    merged = copy.deepcopy(wrapped).merge_and_unload()
    made = on_stacks(empty_engine(wrapped.config))
    made.weights.load(base_tensors(wrapped).items())
    made.weights.load_adapters(factors(wrapped))
    assert logprob_gap(merged, PROMPTS, made.generate(PROMPTS, SAMPLING)) < 8e-5
