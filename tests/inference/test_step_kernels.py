"""Captured decode steps by Triton kernels: the plain loop's tokens, and seven operators a layer."""

from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import pytest
import quick
import torch
from fake_cuda import DEVICE, fake_cuda
from fake_steps import PROMPTS, SAMPLED, decode_step, operators, waits
from families import CONFIGS, assert_same
from test_module_decoder import config_of

from dschat.config.errors import UserError
from dschat.config.rollout import STEP_PARTS
from dschat.inference import SamplingParams, model_spec
from dschat.inference.model import step_kernels
from dschat.inference.model.linear import Linear, SideProduct
from dschat.inference.model.step_kernels import StepKernels

slow = pytest.mark.slow


@pytest.fixture
def kernels(monkeypatch):
    """Engines on the fake device use them; the operators' fake versions need no Triton."""
    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", "1")
    monkeypatch.setattr(step_kernels, "find_spec", lambda name: name)


# -- the choice ------------------------------------------------------------------------------------


def test_kernels_are_the_default_where_triton_compiles(kernels, monkeypatch, caplog):
    """A machine on which it cannot is named; the errors of Triton are not RuntimeErrors."""

    class CompilationError(Exception):
        pass

    def refuse(*args):
        raise CompilationError("fatal error: Python.h\nmore")

    with fake_cuda():
        monkeypatch.delenv("DSCHAT_CUDA_KERNELS")
        assert all(map(step_kernels.choose(DEVICE).runs, STEP_PARTS))
        monkeypatch.setattr(step_kernels.operators, "add_norm", refuse)
        assert step_kernels.choose(DEVICE) is None
    problem = "Triton cannot compile a kernel here: fatal error: Python.h; install a C compiler"
    assert f"without Triton kernels, several times slower: {problem}" in caplog.text
    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", "1")
    with pytest.raises(UserError, match=problem) as error:
        decode_step(CONFIGS["llama"]())  # before weights load
    assert "\n" not in str(error.value)


def test_a_cpu_has_none(kernels):
    assert step_kernels.choose(torch.device("cpu")) is None


def test_kernels_without_triton_are_an_error(monkeypatch):
    if find_spec("triton"):
        pytest.skip("Triton is here")
    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", "1")
    with pytest.raises(UserError, match="Triton is not installed"):
        step_kernels.choose(DEVICE)


OF_TORCH = {
    "attention": "scaled_dot_product_attention",
    "norm": "rms_norm",
    "product": "mm",
    "draw": "argmax",
    "state": "embedding",
}
OF_KERNELS = {
    "attention": "paged_decode",
    "norm": "add_norm",
    "product": "skinny_linear",
    "draw": "draw",
    "state": "read_rows",
}


@pytest.mark.parametrize("part", quick.some(OF_TORCH, ["product"]))
@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=slow)])
def test_each_part_has_a_switch(part, alone, kernels, monkeypatch):
    """One part by its kernel and the rest by torch, or the other way round. The state's kernels
    need that of attention.
    """
    by_kernels = {part} if alone else set(OF_TORCH) - {part}
    by_kernels |= {"attention"} if alone and part == "state" else set()
    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", ",".join(sorted(by_kernels)))
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    captured, _ = decode_step(CONFIGS["llama"](), sampling=greedy)
    if "attention" not in by_kernels:
        by_kernels.discard("state")
    assert captured["advance_rows"] == captured["embed"] == captured["read_rows"]
    found = {name for name in OF_KERNELS if captured[OF_KERNELS[name]]}
    assert found == by_kernels
    assert {name for name in OF_TORCH if captured[OF_TORCH[name]]} == set(OF_TORCH) - by_kernels
    assert waits(captured) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "by_kernel"),
    [("gemma3_text", 2), ("qwen3_5_text", 1), ("gpt_oss", 2)],
)
def test_modules_attend_by_the_kernel(name, by_kernel, kernels):
    captured, _ = decode_step(config_of(name), in_module=True, page_size=16)
    assert captured["paged_decode"] == by_kernel
    assert captured["read_rows"] == 1
    assert captured["skinny_linear"] > 4
    assert captured["scaled_dot_product_attention"] == 0
    assert captured["draw"] == 1
    assert waits(captured) == 0


def test_an_unknown_part_is_named(kernels, monkeypatch):
    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", "norm,sampling")
    with pytest.raises(UserError, match="unknown part 'sampling'; list some of attention, norm,"):
        step_kernels.choose(DEVICE)


@pytest.mark.parametrize("value", ["", "0", "liger"])
def test_what_is_no_part_of_a_step_turns_no_kernel_on(value, kernels, monkeypatch):
    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", value)
    assert step_kernels.choose(DEVICE) is None


# -- operators -------------------------------------------------------------------------------------

# Norms 2, products 4, attention.
LAYER = 7
# Around the layers: reading the rows, embedding, final norm, head, draw (two kernels), advancing.
AROUND = 6

BUDGETS = {
    "llama": (LAYER, AROUND),
    "opt": (LAYER, AROUND),
    "gpt_neox": (LAYER + 1, AROUND),  # adds its parallel branches
    "bloom": (LAYER, AROUND + 1),  # norm of the embedding
}


def check_budget(captured, around, num_layers, budget):
    per_layer, others = budget
    assert operators(captured) <= per_layer * num_layers + others
    assert captured["paged_decode"] == num_layers
    assert captured["draw"] == 1
    assert waits(captured) == 0
    assert around == {}


@pytest.mark.parametrize(
    ("name", "borrowed"), quick.some(product(BUDGETS, ["adjacent", ""]), [("opt", "adjacent")])
)
def test_a_layer_takes_seven_operators(name, borrowed, kernels):
    config = CONFIGS[name]()
    check_budget(*decode_step(config, borrowed=borrowed), config.num_hidden_layers, BUDGETS[name])


@pytest.mark.parametrize("name", quick.some(CONFIGS, ["gemma3"]))
def test_every_family_decodes_by_kernels(name, kernels):
    config = CONFIGS[name]()
    captured, _ = decode_step(config, page_size=16)
    assert waits(captured) == 0
    assert captured["paged_decode"] == config.num_hidden_layers
    assert captured["scaled_dot_product_attention"] == captured["index"] == 0
    assert model_spec(config).experts is not None or captured["index_copy_"] == 0


# -- where torch computes --------------------------------------------------------------------------


@slow
def test_more_rows_than_a_product_takes(kernels):
    captured, _ = decode_step(CONFIGS["llama"](), [[5, 6]] * 65, max_num_seqs=96)
    assert "skinny_linear" not in captured
    assert captured["mm"] == 4 * 2 + 1
    assert captured["paged_decode"] == 2


@pytest.mark.slow
def test_parts_that_are_apart(kernels):
    """Products of qkv and of gate and up by torch, the others by kernels."""
    captured, _ = decode_step(CONFIGS["llama"](), borrowed="parts")
    assert captured["skinny_linear"] == 2 * 2 + 1
    assert captured["cat"] == 2 * 2


BOUND = {"temperature": 0.5, "min_new_tokens": 4, "stop_token_ids": (60,)}
OTHERS = {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}, {"top_p": 0.9, "temperature": 0.0}


@pytest.mark.parametrize("options", [BOUND, *quick.slow(OTHERS)], ids=str)
def test_every_sampling_is_drawn_by_kernels(options, kernels):
    captured, _ = decode_step(CONFIGS["llama"](), sampling=replace(SAMPLED, **options))
    assert captured["draw"] == 1
    assert waits(captured) == 0


# -- tokens, interpreted ---------------------------------------------------------------------------

SHORT = SamplingParams(max_new_tokens=3, seed=5, ignore_eos=True)
LONGER = SamplingParams(max_new_tokens=5, seed=1, temperature=0.8, stop_token_ids=(3, 17, 40))
PAGES = {"page_size": 4}


def check(interpreted, *args):
    for got, expected in interpreted("triton_rollouts.rollouts", *args):
        assert_same(got, expected)


@pytest.mark.parametrize("name", ["gemma3_text", *quick.slow(["qwen3_moe", "qwen3_5_text"])])
def test_a_module_draws_the_same_tokens(interpreted, name):
    """Of the first one's layers, one has a window of six keys."""
    arguments = name, [[5, 6, 7] * 3], LONGER
    assert_same(*interpreted("triton_rollouts.module_rollouts", *arguments))


def test_tokens_are_those_of_the_plain_loop(interpreted):
    check(interpreted, "llama", "", False, [([[5, 6, 7]], SHORT)], PAGES)


@slow
@pytest.mark.parametrize(
    ("name", "order", "page_size"),
    [
        ("llama", "", None),
        ("llama_biases", "vkq", 16),  # up before gate
        ("opt", "kvq", 16),
        ("bloom", "as is", 16),  # interleaved
        ("gpt_neox", "as is", None),
        ("gpt2", "as is", 16),  # transposed
        ("qwen3", "kvq", 16),
        ("opt_350m", "", 16),
        ("mistral", "", 16),
        ("gemma2", "", 16),  # softcaps; norms of 1 + weight
        ("gemma3", "as is", 16),  # two rotations
        ("gpt_oss", "as is", 16),  # sinks; experts in pairs, transposed
        ("gpt_oss", "", None),
        ("qwen3_moe", "", 16),
        ("mixtral", "as is", 16),
        ("cohere2", "", 16),  # adjacent elements are rotated
        ("olmo2", "", 16),  # norms of all heads together
        ("ministral3", "", 16),  # queries grow
    ],
)
def test_frozen_steps_draw_the_tokens_of_the_plain_loop(interpreted, name, order, page_size):
    """Seeds, temperatures and the shortest answer change under one captured step."""
    requests = [
        (PROMPTS[:2], LONGER),
        (PROMPTS[:2], replace(LONGER, seed=2, temperature=1.3, min_new_tokens=3)),
        (PROMPTS[:2], replace(LONGER, temperature=0.0)),
    ]
    check(interpreted, name, order, True, requests, {"page_size": page_size})


def test_a_product_has_its_adapters():
    linear = Linear((6, 32), False, torch.float32, torch.device("cpu"), "plain")
    linear.open()
    linear.side = SideProduct(torch.ones(2, 32), torch.ones(6, 2))
    assert StepKernels(torch.device("cpu")).takes(linear, torch.ones(3, 32), "silu")


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("llama", ""),
        *quick.slow([("gpt2", ""), ("opt", ""), ("gemma2", "")]),
        *quick.slow([("llama_biases", "vkq"), ("gpt2", "as is"), ("bloom", "as is")]),
    ],
)
def test_adapters_beside_the_weights(interpreted, name, order):
    """Also of fused, gated, transposed and interleaved products."""
    requests = [([[5, 6, 7]], SHORT)]
    check(interpreted, name, order, False, requests, PAGES, tuple(OF_TORCH), True)


@slow
@pytest.mark.parametrize("part", OF_TORCH)
def test_tokens_stay_the_same_if_one_part_runs_by_torch(interpreted, part):
    parts = set(OF_TORCH) - {part}
    check(interpreted, "qwen3", "kvq", False, [(PROMPTS[:2], LONGER)], {"page_size": 16}, parts)
