"""Borrowed weights: fused views where parts are adjacent, in any order; separate parts elsewhere.

The oracles are transformers' forward pass and the engine with copied weights.
"""

import itertools
from collections import Counter

import pytest
import torch
from families import PROMPTS, build, empty_engine, engine, logprob_gap
from quick import slow, some
from test_weights import base_tensors, factors, redraw, with_adapters
from torch.utils._python_dispatch import TorchDispatchMode

from dschat.inference import SamplingParams
from dschat.inference.model.borrowed import (
    BorrowedLinear,
    BorrowedPart,
    HeadLayout,
    are_adjacent,
)

SAMPLING = SamplingParams(max_new_tokens=8, n=2, seed=7, ignore_eos=True)
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)
GAP = 5e-5
# Prompts in several chunks, decodes beside them, sequences in several pages.
CHUNKED = {"page_size": 8, "max_num_batched_tokens": 13}
MLP = "gate", "up"
ORDERS = ["".join(order) for order in itertools.permutations("qkv")]


class Operators(TorchDispatchMode):
    """Counts the matrix products and the joins of their outputs."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        # NOTE: ZeRO-3 replaces torch's linear by addmm and matmul in the whole process.
        self.counts["product"] += name in ("linear", "addmm", "mm", "matmul", "_mkl_linear")
        self.counts["cat"] += name == "cat"
        return func(*args, **(kwargs or {}))


def step_counts(made):
    """Products and joins of one prefill step."""
    made.generate([[5, 6, 7]], ONE_TOKEN)  # makes tables that later steps share
    with Operators() as operators:
        made.generate([[5, 6, 7]], ONE_TOKEN)
    return operators.counts["product"], operators.counts["cat"]


def borrowing(module, tensors=None, **knobs):
    made = empty_engine(module.config, **knobs)
    made.borrow_weights(dict(tensors or module.named_parameters()))
    return made


def parts_of(module, suffix):
    """Per layer, the parameters of q, k, v and of gate, up, if it has them."""
    for layer in getattr(module.model, "decoder", module.model).layers:
        for parent, names in ((layer.self_attn, "qkv"), (getattr(layer, "mlp", None), MLP)):
            layers = [getattr(parent, f"{name}_proj", None) for name in names]
            parts = {n: getattr(x, suffix, None) for n, x in zip(names, layers, strict=True)}
            if None not in parts.values():
                yield parts


def lay_out(module, order, suffixes=("weight", "bias"), gap=0):
    """Move q, k, v of each layer into a buffer in ``order``; gate and up likewise, "up" first
    where v comes before q. ``gap`` elements of NaN lie between the parts.
    """
    mlp_order = ("up", "gate") if order.index("v") < order.index("q") else ("gate", "up")
    for suffix in suffixes:
        for parts in parts_of(module, suffix):
            names = order if "q" in parts else mlp_order
            size = sum(p.numel() + gap for p in parts.values())
            buffer, end = torch.full((size,), float("nan")), 0
            for name in names:
                p = parts[name]
                view = buffer[end : end + p.numel()].view(p.shape).copy_(p.detach())
                p.data = view
                end += p.numel() + gap
    return module


def products(made):
    """Of each layer: those of its qkv, and those of its gate and up."""
    linears = made.weights.linears
    return {
        (len(linears[f"layers.{i}.qkv"].products), len(linears[f"layers.{i}.up"].products))
        for i in range(made.spec.num_layers)
    }


def assert_same_answers(made, module):
    """Those of copied weights, and of transformers."""
    expected = engine(module, **CHUNKED).generate(PROMPTS, SAMPLING)
    rollout = made.generate(PROMPTS, SAMPLING)
    assert rollout.token_ids == expected.token_ids
    assert logprob_gap(module, PROMPTS, rollout) < GAP


# -- fused views -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", some(ORDERS, ["qkv", "vkq"]))
def test_adjacent_parts_are_one_product_in_any_order(order):
    """With biases, rotary positions, and fewer key heads than query heads."""
    module = lay_out(build("llama_biases"), order)
    made = borrowing(module, **CHUNKED)
    assert made.weights.nbytes == 0
    assert products(made) == {(1, 1)}
    assert made.weights.linears["layers.0.qkv"].order == tuple(order)
    assert step_counts(made)[0] == 4 * made.spec.num_layers + 1
    assert_same_answers(made, module)


@pytest.mark.parametrize("order", some(ORDERS, ["kvq"]))
def test_norms_of_heads_in_any_order(order):
    """Qwen3's, on heads of 12."""
    module = lay_out(build("qwen3"), order)
    made = borrowing(module, **CHUNKED)
    assert products(made) == {(1, 1)}
    assert_same_answers(made, module)


@pytest.mark.parametrize("name", ["gpt2", *slow(["gpt_neox", "bloom"])])
def test_a_weight_that_is_whole_is_one_product(name):
    """Transposed, or interleaved by heads: read as it is, and no output is joined."""
    module = build(name)
    made = borrowing(module, **CHUNKED)
    assert products(made) == {(1, 1)}
    rotary_cats = 2 * made.spec.num_layers if name == "gpt_neox" else 0  # of q and of k
    assert step_counts(made) == (4 * made.spec.num_layers + 1, rotary_cats)
    assert_same_answers(made, module)


def test_borrowing_follows_the_module_in_place():
    """Values change, addresses do not: nothing is borrowed again, and graphs stay valid."""
    module = lay_out(build("llama_biases"), "kvq")
    made = borrowing(module)
    before, version = made.generate(PROMPTS, SAMPLING), made.weights.version
    with torch.no_grad():
        others = build("llama_biases", 1).parameters()
        for parameter, other in zip(module.parameters(), others, strict=True):
            parameter.copy_(other)
    assert not made.borrow_weights(dict(module.named_parameters()))
    assert made.weights.version == version
    assert made.generate(PROMPTS, SAMPLING).token_ids != before.token_ids
    assert_same_answers(made, module)


@pytest.mark.parametrize("order", ["kvq", *slow(["qkv"])])
def test_weights_that_moved_are_borrowed_again(order):
    """The old storage is not read, and captured graphs of it are not replayed."""
    module = lay_out(build("llama_biases"), "vqk")
    made = borrowing(module, **CHUNKED)
    made.generate(PROMPTS, SAMPLING)
    old, version = [p.data for p in module.parameters()], made.weights.version
    lay_out(module, order)
    for p in module.parameters():
        p.data = p.data if any(p is q for q in fused(module)) else p.data.clone()
    for tensor in old:
        tensor.fill_(float("nan"))
    assert made.borrow_weights(dict(module.named_parameters()))
    assert made.weights.version > version
    assert made.weights.linears["layers.0.qkv"].order == tuple(order)
    assert_same_answers(made, module)


def fused(module):
    return [p for s in ("weight", "bias") for parts in parts_of(module, s) for p in parts.values()]


# -- separate parts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "planted", ["gap", "biases in another order", *slow(["apart", "biases apart"])]
)
def test_other_storage_is_read_as_parts(planted):
    module = build("llama_biases")
    if planted == "gap":
        lay_out(module, "qkv", gap=8)
    elif planted == "biases apart":
        lay_out(module, "qkv", ["weight"])
    elif planted == "biases in another order":
        lay_out(module, "qkv", ["weight"])
        lay_out(module, "vkq", ["bias"])
    made = borrowing(module, **CHUNKED)
    assert products(made) == {(3, 2)}
    assert step_counts(made)[0] == 7 * made.spec.num_layers + 1
    assert_same_answers(made, module)


def test_what_is_adjacent():
    buffer = torch.arange(60.0)
    first, second = buffer[:24].view(6, 4), buffer[24:32].view(2, 4)
    assert are_adjacent([first, second])
    assert are_adjacent([first])
    assert not are_adjacent([second, first])
    assert not are_adjacent([first, buffer[28:36].view(2, 4)])  # a gap
    assert not are_adjacent([first, buffer[20:28].view(2, 4)])  # an overlap
    assert not are_adjacent([first, buffer[24:32].view(4, 2)])  # rows of another length
    assert not are_adjacent([first, buffer[24:32].view(4, 2).T])  # not contiguous
    assert not are_adjacent([first, second.clone()])  # another storage
    halves = torch.zeros(12, dtype=torch.float64)
    other = halves.untyped_storage()
    double = torch.tensor([], dtype=torch.float64).set_(other, 0, (2, 2))
    single = torch.tensor([], dtype=torch.float32).set_(other, 4, (2, 2))
    assert not are_adjacent([double, single])  # another dtype


def test_what_a_kernel_reads_in_place():
    """A weight that is contiguous, or the transpose of one that is, and its bias."""
    weight, bias, x = torch.randn(6, 4), torch.randn(6), torch.randn(3, 4)
    for part in (weight, weight.T.contiguous().T):
        linear = BorrowedLinear({"": BorrowedPart(part, bias)})
        assert linear.plain[0] is part
        assert linear.plain[1] is bias
        torch.testing.assert_close(linear(x), x @ weight.T + bias)
    assert BorrowedLinear({"": BorrowedPart(weight[:, ::2], None)}).plain is None


# -- where heads are -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [*ORDERS, "interleaved"])
def test_heads_by_hand(order):
    """Two tokens of heads whose values are their names: q 0-3, k 10-11, v 20-21."""
    if order == "interleaved":
        names, layout = [0, 10, 20, 1, 11, 21], HeadLayout.of(2, 2, interleaved=True)
        expected = {"q": [0, 1], "k": [10, 11], "v": [20, 21]}
    else:
        expected = {"q": [0, 1, 2, 3], "k": [10, 11], "v": [20, 21]}
        names, layout = sum((expected[part] for part in order), []), HeadLayout.of(4, 2, order)
    heads = torch.tensor(names).view(1, -1, 1).expand(2, -1, 5) + torch.tensor([[[0]], [[100]]])
    heads = heads.contiguous()
    for part, values in expected.items():
        assert heads[0, getattr(layout, part), 0].tolist() == values
    assert layout.in_order == (order == "qkv")
    rotated = sorted(x for part in layout.rotated for x in heads[0, part, 0].tolist())
    assert rotated == sorted(expected["q"] + expected["k"])
    stored = layout.keys_and_values(heads)
    if order in ("vqk", "vkq", "qvk"):
        assert stored is None
    else:
        assert stored.data_ptr() == heads[:, layout.k].data_ptr()
        assert stored[0, :, :, 0].tolist() == [expected["k"], expected["v"]]
        assert stored[1, :, :, 4].tolist() == [[x + 100 for x in expected[p]] for p in "kv"]


# -- LoRA ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "order"),
    [("llama_biases", "vqk"), *slow([("gpt2", ""), ("llama_biases", "kvq"), ("gpt_neox", "")])],
)
def test_side_products_have_the_rows_of_the_view(name, order):
    wrapped = with_adapters(name, seed=1)
    tensors = base_tensors(wrapped)
    for i in range(2 if order else 0):
        for suffix in ("weight", "bias"):
            module = f"model.layers.{i}"
            for parent, parts in (("self_attn", order), ("mlp", ("up", "gate"))):
                names = [f"{module}.{parent}.{part}_proj.{suffix}" for part in parts]
                joined = torch.cat([tensors[n] for n in names])
                tensors |= zip(names, joined.split([len(tensors[n]) for n in names]), strict=True)
    made = borrowing(wrapped, tensors, **CHUNKED)
    assert products(made) == {(1, 1)}
    for seed in (1, 2):
        redraw(wrapped, seed)
        made.weights.load_adapters(factors(wrapped))
        merged = wrapped.base_model.model
        rollout = made.generate(PROMPTS, SAMPLING)
        assert logprob_gap(merged, PROMPTS, rollout) < 8e-5
