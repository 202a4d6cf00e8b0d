"""Rollouts on training's own storage, under DeepSpeed: the same answers, without a refresh.

The oracles are a second rollout form with a copy of the weights, transformers' own loop, and the
training form's forward pass.
"""

import itertools

import pytest
import torch
from families import PROMPTS, build
from rollout_cases import GREEDY, SAMPLED, Actor
from test_borrowed import products

from dschat.hybrid.weight_stream import module_shards, place_adjacent
from dschat.inference.model.borrowed import are_adjacent
from dschat.models.lora import unwrapped_name

FAMILIES = ("opt", "opt_350m", "gpt2", "gpt_neox", "bloom", "llama", "mistral", "qwen2", "qwen3")
FAMILIES += ("gemma3", "olmo3", "glm4")
PARTS = {"opt": (3, 1), "opt_350m": (3, 1), "gpt2": (1, 1), "gpt_neox": (1, 1), "bloom": (1, 1)}
PARTS |= {"glm4": (3, 1)}
QUICK = [("llama", 2, True)]
ALL = list(itertools.product(FAMILIES, (0, 1, 2, 3), (False, True)))


@pytest.mark.parametrize(
    ("name", "zero", "lora"),
    QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK],
)
def test_training_storage_is_read_in_place(name, zero, lora):
    actor = Actor(build(name), zero, lora)
    form = actor.form(layout="zero_copy")
    copied = actor.form(layout="copy", lora="merge" if lora else "auto")
    module = actor.form(enabled=False)
    adapter_bytes = actor.num_bytes()[1]
    old = form.enter(0).generate(PROMPTS, SAMPLED)
    form.leave()
    version = form.enter(0).weights.version
    for _ in range(2):
        actor.step()
        generator = form.enter(actor.version)
        assert form.last_refresh.num_bytes == adapter_bytes
        assert form.last_refresh.num_collectives == 0
        assert generator.weights.version == version  # DeepSpeed's step keeps the addresses
        new = generator.generate(PROMPTS, SAMPLED)
        greedy = generator.generate(PROMPTS, GREEDY)
        form.leave()
        expected = copied.enter(actor.version)
        assert new.token_ids == expected.generate(PROMPTS, SAMPLED).token_ids
        copied.leave()
        assert actor.gap(PROMPTS, new) < 1e-4
    assert actor.gap(PROMPTS, old) > 0.1
    theirs = module.enter(actor.version).generate(PROMPTS, GREEDY)
    assert greedy.token_ids == theirs.token_ids
    # DeepSpeed flattens what it trains under ZeRO 1 to 3; stage 0 leaves it where it was loaded.
    is_apart = zero == 0 and not lora
    assert products(generator) == {PARTS.get(name, (3, 2)) if is_apart else (1, 1)}
    assert (generator.weights.nbytes > 0) == lora  # the engine holds adapters only


def test_opt_is_read_in_the_order_of_its_storage():
    generator = Actor(build("opt"), 2).form(layout="zero_copy").enter(0)
    assert generator.weights.linears["layers.1.qkv"].order == ("k", "v", "q")


@pytest.mark.parametrize("zero", [2, 3])
def test_storage_that_stays_is_not_named_again(zero):
    """Names and views of all tensors take ten times as long as their addresses."""
    actor = Actor(build("llama"), zero)
    form = actor.form(layout="zero_copy")
    form.enter(0)
    form.leave()
    actor.step()
    actor.module.named_parameters = None  # calling it is an error
    form.enter(actor.version)
    form.leave()


# -- storage that changes --------------------------------------------------------------------------


@pytest.mark.parametrize(("zero", "lora"), [(2, True), (3, False)])
def test_storage_that_moves_is_noticed_without_a_step(zero, lora):
    """Parts no longer adjacent, old storage poisoned; another rollout of the same version."""
    actor = Actor(build("llama"), zero, lora)
    if lora:
        actor.step()  # adapters are zero before
    form = actor.form(layout="zero_copy")
    generator = form.enter(actor.version)
    expected = generator.generate(PROMPTS, SAMPLED)
    form.leave()
    version, old = generator.weights.version, []
    for parameter in actor.module.parameters():
        holder = getattr(parameter, "ds_tensor", parameter)
        old.append(holder.data)
        holder.data = holder.data.clone()
    for tensor in old:
        tensor.fill_(float("nan"))
    generator = form.enter(actor.version)
    assert generator.weights.version > version
    assert products(generator) == {(3, 2)}
    rollout = generator.generate(PROMPTS, SAMPLED)
    assert rollout.token_ids == expected.token_ids
    assert actor.gap(PROMPTS, rollout) < 1e-4


@pytest.mark.parametrize(
    ("zero", "lora"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)]
)
def test_a_loaded_checkpoint_is_what_generates(zero, lora, tmp_path):
    actor = Actor(build("llama"), zero, lora)
    form = actor.form(layout="zero_copy")
    actor.step()
    expected = form.enter(1).generate(PROMPTS, SAMPLED)
    form.leave()
    actor.engine.save_checkpoint(str(tmp_path), "one")
    actor.step()
    moved = form.enter(2).generate(PROMPTS, SAMPLED)
    form.leave()
    assert moved.token_ids != expected.token_ids
    actor.engine.load_checkpoint(str(tmp_path), "one")
    again = form.enter(3).generate(PROMPTS, SAMPLED)
    assert again == expected
    assert actor.gap(PROMPTS, again) < 1e-4


# -- a frozen base ---------------------------------------------------------------------------------


def lora_actor(zero):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # PEFT draws the adapters
        return Actor(build("llama"), zero, lora=True)


def stored(actor):
    """Checkpoint name -> tensor; adapters under their own names."""
    shards = module_shards(actor.module)
    return {unwrapped_name(s.name) or s.name: s.whole() for s in shards}


@pytest.mark.slow
@pytest.mark.parametrize(
    "zero", [3, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_frozen_base_is_moved_together_and_trains_on(zero):
    actor, twin = lora_actor(zero), lora_actor(zero)
    before = {name: tensor.clone() for name, tensor in stored(actor).items()}
    actor.form(layout="zero_copy")
    after = stored(actor)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for parts in ([f"self_attn.{x}" for x in "qkv"], ["mlp.gate", "mlp.up"]):
        for layer in range(2):
            names = [f"model.layers.{layer}.{part}_proj.weight" for part in parts]
            assert are_adjacent([after[name] for name in names])
            assert not are_adjacent([stored(twin)[name] for name in names])
    for one in (actor, twin):
        one.step()
        one.step()
    ours, theirs = stored(actor), stored(twin)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert not all(torch.equal(ours[name], tensor) for name, tensor in before.items())


def test_what_is_trained_stays_where_it_is():
    """Or the optimizer would write into storage that no one reads."""
    first, second = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    named = {"q": first, "k": second}

    def addresses():
        return first.data_ptr(), second.data_ptr()

    before = addresses()
    second.requires_grad_(False)
    place_adjacent(named, [["q", "k"], ["k", "v"]])
    assert addresses() == before
    first.requires_grad_(False)
    place_adjacent(named, [["q", "k"]])
    assert are_adjacent([first, second])
    after = addresses()
    place_adjacent(named, [["q", "k"]])
    assert addresses() == after


def test_a_step_leaves_no_cached_prefix():
    """The engine's weights change where they are; its keys and values do not follow."""
    actor = Actor(build("llama"), 2)
    form = actor.form(layout="zero_copy", page_size=4)
    for _ in range(2):
        got = form.enter(actor.version).generate([[7] * 21], GREEDY)
        form.leave()
        expected = actor.form().enter(actor.version).generate([[7] * 21], GREEDY)
        assert got.logprobs[0] == pytest.approx(expected.logprobs[0], abs=5e-5)
        actor.step()
