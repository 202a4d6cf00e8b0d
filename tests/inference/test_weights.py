"""The decoder's weights: copied, borrowed, and with LoRA side products.

The oracle is the module that the weights come from, or PEFT's own merge.
"""

import copy
import re

import pytest
import torch
from families import (
    PROMPTS,
    build,
    empty_engine,
    engine,
    every_family,
    logprob_gap,
    on_stacks,
    reference_logprobs,
    stream,
)
from quick import slow

from dschat.config import UserError
from dschat.inference import SamplingParams
from dschat.models.lora import adapters, add_lora

SAMPLING = SamplingParams(max_new_tokens=10, n=2, seed=7, ignore_eos=True)
GAP = 5e-5
STATES_GAP = {"qwen3_5_text": 3e-4, "kimi_linear": 2e-4}  # states amplify rounding
LORA_GAP = 8e-5  # merged and unmerged sums are rounded otherwise; the factors are drawn wide


def borrowing(module, **knobs):
    made = empty_engine(module.config, **knobs)
    made.weights.borrow({**dict(module.named_parameters()), **dict(module.named_buffers())})
    return made


# Copies


@every_family()
def test_a_second_load_replaces_the_first_in_place(name, module_of):
    made = engine(build(name, seed=1))
    first = made.generate(PROMPTS, SAMPLING)
    addresses = {key: t.data_ptr() for key, t in made.weights.tensors.items()}
    size = made.weights.nbytes
    made.weights.load(stream(module_of(name)))
    assert {key: t.data_ptr() for key, t in made.weights.tensors.items()} == addresses
    assert made.weights.nbytes == size
    second = made.generate(PROMPTS, SAMPLING)
    assert second.token_ids != first.token_ids
    assert second == engine(module_of(name)).generate(PROMPTS, SAMPLING)


@every_family()
def test_what_is_held_is_what_the_model_has(name, module_of):
    """A tied embedding is stored twice if the head is packed: F.embedding cannot read a packing."""
    module, made = module_of(name), engine(module_of(name))
    held = {t.data_ptr(): t.nbytes for t in module.state_dict().values()}  # routers' biases, too
    expected = sum(held.values())
    if module.config.tie_word_embeddings and made.weights.linears["head"].packs:
        expected += module.get_input_embeddings().weight.nbytes
    ones = (f"{base}.weight" for base in made.weights.spec.bare_norms)
    expected += sum(made.weights.tensors[name].nbytes for name in ones)
    assert made.weights.nbytes == expected


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_in_one_tensor_are_counted_once(name, module_of):
    module = module_of(name)
    made = on_stacks(empty_engine(module.config))
    made.weights.load(stream(module))
    assert made.weights.nbytes == sum(p.nbytes for p in module.parameters())


def lent(module):
    """The buffer of a bucket is reused once the next tensor is asked for."""
    for name, tensor in stream(module):
        buffer = tensor.clone()
        yield name, buffer
        buffer.fill_(float("nan"))


@pytest.mark.parametrize(
    ("name", "weights_of"),
    [
        ("gpt2", lambda module: reversed(list(stream(module)))),
        ("llama_tied", lent),
        # The second name of a tie.
        ("llama_tied", lambda m: [*stream(m), ("lm_head.weight", m.lm_head.weight.detach())]),
    ],
    ids=["in any order", "lent", "with both names of a tie"],
)
def test_a_stream_of_weights(name, weights_of, module_of):
    module = module_of(name)
    made = empty_engine(module.config)
    made.weights.load(weights_of(module))
    assert made.generate(PROMPTS, SAMPLING) == engine(module).generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_live_parameters_leave_no_graph_behind(name, module_of):
    module = module_of(name)
    made = empty_engine(module.config)
    made.weights.load(module.named_parameters())
    held = [*made.weights.tensors.values(), *(x.bias for x in made.weights.linears.values())]
    assert not any(t.requires_grad for t in held if t is not None)


def test_inference_mode_may_come_and_go(module_of):
    """What is made inside it can be written outside it."""
    module = module_of("llama")
    with torch.inference_mode():
        made = engine(module)
        expected = made.generate(PROMPTS, SAMPLING)
    made.weights.load(stream(module))
    assert made.generate(PROMPTS, SAMPLING) == expected


def test_weights_that_were_let_go_come_back(module_of):
    module = module_of("opt")
    made = engine(module)
    expected, size = made.generate(PROMPTS, SAMPLING), made.weights.nbytes
    made.release_weights()
    made.release_cache()
    assert made.weights.nbytes == 0
    made.weights.load(stream(module))
    assert made.weights.nbytes == size
    assert made.generate(PROMPTS, SAMPLING) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s + s[3:4], r"the weights contain \S+ twice"),
        (lambda s: s[:3] + s[4:], r"the weights lack \S+$"),
        (lambda s: [*s, ("model.rotary.weight", torch.ones(1))], "model.rotary.weight, which the"),
        (lambda s: [(n, t[None] if re.search("norm|ln_", n) else t) for n, t in s], "in shape"),
    ],
    ids=["twice", "missing", "unknown", "shape"],
)
@pytest.mark.parametrize("name", ["gpt2", *slow(["llama", "bloom"])])
def test_every_destination_is_written_once(name, change, message, module_of):
    made = empty_engine(module_of(name).config)
    with pytest.raises(UserError, match=message):
        made.weights.load(change(list(stream(module_of(name)))))


# Borrowed


@every_family()
def test_borrowed_weights_give_the_same_answers_and_follow_the_module(name):
    module = build(name)
    made = borrowing(module)
    assert made.weights.nbytes == 0
    rollout = made.generate(PROMPTS, SAMPLING)
    assert rollout.token_ids == engine(module).generate(PROMPTS, SAMPLING).token_ids
    gap = STATES_GAP.get(name, GAP)
    assert logprob_gap(module, PROMPTS, rollout) < gap
    with torch.no_grad():  # as an optimizer does: every parameter, in place
        for parameter, other in zip(module.parameters(), build(name, 1).parameters(), strict=True):
            parameter.copy_(other)
    after = made.generate(PROMPTS, SAMPLING)
    assert after.token_ids != rollout.token_ids
    assert logprob_gap(module, PROMPTS, after) < gap


def test_a_borrowed_module_still_trains(module_of):
    """Generation reads: gradients and values stay the module's."""
    module = build("llama")
    made = borrowing(module)
    state = copy.deepcopy(module.state_dict())
    made.generate(PROMPTS, SAMPLING)
    made.release_weights()  # theirs are not dropped
    module(torch.tensor([PROMPTS[1]])).logits.sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert all(torch.equal(state[key], t) for key, t in module.state_dict().items())
    assert len(made.generate(PROMPTS, SAMPLING)) == 2 * len(PROMPTS)


def test_a_borrowed_weight_that_is_missing_is_named(module_of):
    module = module_of("llama")
    tensors = dict(module.named_parameters())
    del tensors["model.norm.weight"]
    with pytest.raises(UserError, match="the weights lack model.norm.weight"):
        empty_engine(module.config).weights.borrow(tensors)


# LoRA beside the weights


def with_adapters(name, seed):
    """A module wrapped by PEFT, both factors drawn: B is zero at the start of a training."""
    wrapped = add_lora(build(name), 3, 5.0, ["all-linear"], True, "--actor_lora_modules")
    redraw(wrapped, seed)
    return wrapped.eval()


@torch.no_grad()
def redraw(wrapped, seed):
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in wrapped.named_parameters():
        if ".lora_" in key:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def base_tensors(wrapped):
    names = {
        key: key.removeprefix("base_model.model.").replace(".base_layer", "")
        for key, _ in wrapped.named_parameters()
    }
    return {names[k]: p.detach() for k, p in wrapped.named_parameters() if ".lora_" not in k}


def factors(wrapped):
    return [
        (weight, wrapped.get_parameter(a.a_name), wrapped.get_parameter(a.b_name), a.scaling)
        for weight, a in adapters(wrapped).items()
    ]


def engine_on_base(wrapped, layout="copy", **knobs):
    """An engine with the weights beside which adapters may come."""
    made = empty_engine(wrapped.config, **knobs)
    if layout == "copy":
        made.weights.load(base_tensors(wrapped).items())
    else:
        made.weights.borrow(base_tensors(wrapped))
    return made


# Separate q, k and v; (in, out) and fused; interleaved; projections around the embedding.
LORA_CASES = [("gpt2", "copy"), ("bloom", "borrowed")]
SLOW_LORA_CASES = [("llama", "copy"), ("opt_350m", "copy")]
SLOW_LORA_CASES += [("gpt2", "borrowed"), ("opt", "copy"), ("opt", "borrowed"), ("bloom", "copy")]
SLOW_LORA_CASES += [("llama_biases", "copy"), ("qwen3", "borrowed"), ("opt_350m", "borrowed")]
SLOW_LORA_CASES += [("llama", "borrowed"), ("gpt_neox", "copy"), ("qwen3", "copy")]
SLOW_LORA_CASES += [("gemma3", "borrowed"), ("qwen3_moe", "copy")]


@pytest.mark.parametrize(("name", "layout"), LORA_CASES + slow(SLOW_LORA_CASES))
def test_a_side_product_is_what_peft_merges(name, layout):
    wrapped = with_adapters(name, seed=1)
    made = engine_on_base(wrapped, layout, page_size=8)
    bare = made.generate(PROMPTS, SAMPLING)
    found = set()
    for seed in (1, 2, 3):  # refreshed twice in place: nothing of a version before may stay
        redraw(wrapped, seed)
        made.weights.load_adapters(factors(wrapped) if seed < 3 else factors(wrapped)[::-1])
        sides = [linear.side for linear in made.weights.linears.values() if linear.side is not None]
        found.add(tuple((side.a.data_ptr(), side.b.data_ptr()) for side in sides))
        merged = copy.deepcopy(wrapped).merge_and_unload()
        rollout = made.generate(PROMPTS, SAMPLING)
        assert rollout.token_ids != bare.token_ids
        assert logprob_gap(merged, PROMPTS, rollout) < LORA_GAP
    assert len(found) == 1
    made.weights.load_adapters([])  # what no longer comes is gone
    assert made.generate(PROMPTS, SAMPLING).token_ids == bare.token_ids


def test_adapters_that_transformers_reads_past():
    """Jamba multiplies by the weight of `dt_proj`, not by the module, in training as here."""
    wrapped = with_adapters("jamba", seed=1)
    assert any("dt_proj" in name for name, *_ in factors(wrapped))
    made = engine_on_base(wrapped)
    made.weights.load_adapters(factors(wrapped))
    assert logprob_gap(wrapped, PROMPTS, made.generate(PROMPTS, SAMPLING)) < LORA_GAP


def test_adapters_on_some_of_the_fused_parts():
    """DeepSpeed-Chat's habit: q and v only. The rows of k get nothing."""
    wrapped = add_lora(build("llama"), 2, 4.0, ["q_proj", "v_proj"], True, "--actor_lora_modules")
    redraw(wrapped, 4)
    made = engine_on_base(wrapped)
    made.weights.load_adapters(factors(wrapped))
    merged = copy.deepcopy(wrapped).merge_and_unload()
    assert logprob_gap(merged, PROMPTS, made.generate(PROMPTS, SAMPLING)) < LORA_GAP


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("model.embed_tokens.weight", "no side product can be added to model.embed_tokens.weight"),
        ("model.layers.7.mlp.up_proj.weight", "layers.7.mlp.up_proj.weight, which the model does"),
    ],
)
def test_adapters_that_fit_nowhere(weight, message, module_of):
    made = engine(module_of("llama"))
    with pytest.raises(UserError, match=message):
        made.weights.load_adapters([(weight, torch.ones(2, 32), torch.ones(64, 2), 1.0)])


def test_an_adapter_that_comes_twice():
    wrapped = with_adapters("llama", seed=5)
    made = engine_on_base(wrapped)
    with pytest.raises(UserError, match=r"the adapters contain \S+ twice"):
        made.weights.load_adapters(factors(wrapped) + factors(wrapped)[:1])


def test_the_oracle_tells_models_apart(module_of):
    """Log-probs of another seed's model are far away: the tolerance means something."""
    answer = engine(module_of("llama")).generate([PROMPTS[1]], SAMPLING).token_ids[0]
    ours = reference_logprobs(module_of("llama"), PROMPTS[1], answer)
    theirs = reference_logprobs(build("llama", seed=1), PROMPTS[1], answer)
    assert (ours - theirs).abs().mean() > 0.3
