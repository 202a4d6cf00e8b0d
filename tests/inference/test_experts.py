"""Mixtures of experts: all ways to run them agree, and a checkpoint has one of two forms."""

import copy
from collections import Counter

import pytest
import torch
from fake_cuda import fake_cuda, fake_engine
from fake_steps import PROMPTS as SHORT
from fake_steps import SAMPLED, waits
from families import CONFIGS, PROMPTS, empty_engine, engine, logprob_gap, on_stacks, stream
from quick import each_once, slow
from test_weights import base_tensors, factors, with_adapters

from dschat.config import UserError
from dschat.inference import SamplingParams
from dschat.inference.model import experts
from dschat.inference.model.architectures import check_shares, model_spec
from dschat.inference.model.experts import Experts

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
    ran = []
    if way == "grouped":
        monkeypatch.setattr(torch, "bfloat16", torch.float32)
    for owner, called in ((Experts, "_one_by_one"), (experts, "all_experts")):
        inner = getattr(owner, called)
        monkeypatch.setattr(
            owner, called, lambda *args, name=called, f=inner: (ran.append(name), f(*args))[1]
        )
    rollout = made.generate(PROMPTS, SAMPLING)
    monkeypatch.undo()
    assert set(ran) == {"_one_by_one" if way == "grouped" else "all_experts"}
    assert logprob_gap(module, PROMPTS, rollout) < 5e-5
    assert rollout.token_ids == engine(module).generate(PROMPTS, SAMPLING).token_ids


def test_prompts_run_through_their_own_experts_on_older_gpus_too(module_of, monkeypatch):
    """All experts on all rows are the price of a captured step, which has fewer rows."""
    made = on_stacks(empty_engine(module_of("qwen3_moe").config))
    made.weights.load(stream(module_of("qwen3_moe")))
    expected = made.generate(PROMPTS, SAMPLING)
    rows = {"_one_by_one": [], "all_experts": []}
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    monkeypatch.setattr(experts, "has_grouped_product", lambda x: False)
    monkeypatch.setattr(experts, "_MOST_CAPTURED", 12)
    tokens = {"_one_by_one": lambda mlp, x, *_: len(x) // mlp.spec.per_token}
    for owner, called in ((Experts, "_one_by_one"), (experts, "all_experts")):
        inner, count = getattr(owner, called), tokens.get(called, lambda _, x, *__: len(x))
        monkeypatch.setattr(
            owner,
            called,
            lambda *args, n=called, f=inner, c=count: (rows[n].append(c(*args)), f(*args))[1],
        )
    assert made.generate(PROMPTS, SAMPLING).token_ids == expected.token_ids
    assert min(rows["_one_by_one"]) > 12 >= max(rows["all_experts"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow([torch.float32])])
@pytest.mark.parametrize("name", ["qwen3_moe", *slow(["gpt_oss"])])
def test_no_captured_step_reads_on_the_host(name, dtype):
    with fake_cuda() as watch:
        made = fake_engine(watch, CONFIGS[name](), dtype)
        made.generate(SHORT, SAMPLED)
    captured = Counter({key: n for (inside, key), n in watch.counts.items() if inside})
    assert captured
    assert waits(captured) == 0


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


def test_ranks_share_each_experts_columns():
    config = CONFIGS["qwen3_moe"]()
    config.moe_intermediate_size = 17
    with pytest.raises(UserError, match="does not divide the model's 17 expert columns"):
        check_shares(model_spec(config), 2)


def test_side_products_on_stacks():
    """LoRA's factors of all experts, which PEFT has in one tensor."""
    wrapped = with_adapters("qwen3_moe", seed=1)
    merged = copy.deepcopy(wrapped).merge_and_unload()
    made = on_stacks(empty_engine(wrapped.config))
    made.weights.load(base_tensors(wrapped).items())
    made.weights.load_adapters(factors(wrapped))
    assert logprob_gap(merged, PROMPTS, made.generate(PROMPTS, SAMPLING)) < 8e-5
