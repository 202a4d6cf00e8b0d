"""Captured decode steps by Triton kernels draw the tokens of the plain loop."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import quick
import torch
from families import assert_same

from dschat.config.errors import UserError
from dschat.config.rollout import STEP_PARTS
from dschat.inference import SamplingParams
from dschat.inference.model import step_kernels
from dschat.inference.model.linear import Linear, SideProduct
from dschat.inference.model.step_kernels import StepKernels

slow = pytest.mark.slow
DEVICE = torch.device("cuda:0")


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", "1")
    monkeypatch.setattr(step_kernels, "find_spec", lambda name: name)


# -- the choice ------------------------------------------------------------------------------------


def test_kernels_that_triton_cannot_compile(kernels, monkeypatch, caplog):
    """An error where they were asked for, else a warning."""
    monkeypatch.setattr(step_kernels, "_problem", lambda device: "Triton cannot compile")
    with pytest.raises(UserError, match="DSCHAT_CUDA_KERNELS: Triton cannot"):
        step_kernels.choose(DEVICE)
    monkeypatch.delenv("DSCHAT_CUDA_KERNELS")
    assert step_kernels.choose(DEVICE) is None
    assert "without Triton kernels, several times slower: Triton cannot" in caplog.text


def test_a_cpu_has_none(kernels):
    assert step_kernels.choose(torch.device("cpu")) is None


def test_kernels_without_triton_are_an_error(monkeypatch):
    if find_spec("triton"):
        pytest.skip("Triton is here")
    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", "1")
    with pytest.raises(UserError, match="Triton is not installed"):
        step_kernels.choose(DEVICE)


def test_an_unknown_part_is_named(kernels, monkeypatch):
    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", "norm,sampling")
    with pytest.raises(UserError, match="unknown part 'sampling'; list some of attention, norm,"):
        step_kernels.choose(DEVICE)


@pytest.mark.parametrize("value", ["", "0", "liger"])
def test_what_is_no_part_of_a_step_turns_no_kernel_on(value, kernels, monkeypatch):
    monkeypatch.setenv("DSCHAT_CUDA_KERNELS", value)
    assert step_kernels.choose(DEVICE) is None


# -- tokens, interpreted ---------------------------------------------------------------------------

PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13], list(range(2, 32)), [20, 21, 22]]
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


def test_the_state_s_kernels_need_that_of_attention():
    parts = {"norm", "state"}
    assert not StepKernels(torch.device("cpu"), frozenset(parts)).runs("state")
    whole = StepKernels(torch.device("cpu"), frozenset(parts | {"attention"}))
    assert whole.runs("state")
    assert not whole.without("norm").runs("norm")


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
    check(interpreted, name, order, False, requests, PAGES, STEP_PARTS, True)


@slow
@pytest.mark.parametrize("part", STEP_PARTS)
def test_tokens_stay_the_same_if_one_part_runs_by_torch(interpreted, part):
    parts = set(STEP_PARTS) - {part}
    check(interpreted, "qwen3", "kvq", False, [(PROMPTS[:2], LONGER)], {"page_size": 16}, parts)
