"""Weights of 8 bits: the products of all ways are those of the rounded weight, and only linear
layers but the head's have one.
"""

import copy

import pytest
import torch
from families import (
    DEFAULT_SIZES,
    POSITIONS,
    PROMPTS,
    build,
    empty_engine,
    engine,
    logprob_gap,
    on_stacks,
    stream,
)
from quick import slow
from rank_threads import on_ranks
from soft_graph import operators_only
from test_weights import base_tensors, factors, with_adapters

from dschat.config import UserError
from dschat.inference import EngineConfig, SamplingParams, UnsupportedModel
from dschat.inference.hf_generator import module_engine
from dschat.inference.kernels import cpu
from dschat.inference.model.linear import (
    Int8Weight,
    Linear,
    fastest_backends,
    int8_backends_for,
)
from dschat.models.training_engine import evaluating

SAMPLING = SamplingParams(max_new_tokens=8, n=2, seed=7, ignore_eos=True)
CPU = torch.device("cpu")
WAYS = ("int8", "int8_widened")


def rounded(weight):
    """By hand: 127 steps on each side of 0, of a size that bf16 holds."""
    step = (weight.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    return (weight / step).round().clamp(-127, 127) * step


@torch.no_grad()
def round_linears(module):
    """``module`` with the weights that an engine keeps in 8 bits."""
    module = copy.deepcopy(module)
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and "lm_head" not in name:
            layer.weight.copy_(rounded(layer.weight))
    return module


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (48, 32), (33, 100), (128, 256), (130, 259)])
def test_a_product_is_that_of_the_rounded_weight(shape, way):
    if way == "int8" and cpu.load() is None:
        pytest.skip("no C compiler")
    torch.manual_seed(shape[1])
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    linear = Linear(shape, True, torch.float32, CPU, way)
    linear.open().copy_(weight)
    linear.seal()
    linear.bias.copy_(bias)
    for rows in (1, 2, 3, 4, 9, 64, 65):
        x = torch.randn(rows, 2 * shape[1])[:, : shape[1]]  # not contiguous
        expected = x.double() @ rounded(weight).double().T + bias
        assert (linear(x) - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)
    assert linear.nbytes == weight.numel() + 8 * shape[0]
    assert not linear(torch.randn(0, shape[1])).numel()


def test_values_and_scales():
    """A row of zeros stays zero; the largest of a row is 127; a new version is written in place."""
    weight = Int8Weight((3, 2), "int8_widened", CPU)
    addresses = weight.values.data_ptr(), weight.scales.data_ptr()
    for factor in (1, 3):
        weight.write(factor * torch.tensor([[0.0, 0.0], [127.0, -63.6], [-1.0, 0.51]]))
        assert weight.values.tolist() == [[0, 0], [127, -64], [-127, 65]]
        torch.testing.assert_close(
            weight.scales[1:], factor * torch.tensor([1.0, 1 / 127]), rtol=4e-3, atol=0
        )
    assert addresses == (weight.values.data_ptr(), weight.scales.data_ptr())


def test_sums_in_fp16_do_not_overflow():
    with torch.inference_mode():
        weight = Int8Weight((2, 4096), "int8_widened", CPU)
    for _ in range(2):  # a new version, outside of that mode
        weight.write(torch.full((2, 4096), 1e-3, requires_grad=True))
    y = weight.product(torch.ones(1, 4096, dtype=torch.float16), None)
    torch.testing.assert_close(y, torch.full_like(y, 4.096), rtol=5e-3, atol=0)


def test_ways_to_multiply():
    assert int8_backends_for(torch.float16) == ["int8_widened"]
    with pytest.raises(UserError, match="^int8 weights on a CPU need .* out$"):
        int8_backends_for(torch.bfloat16)
    with operators_only(), pytest.raises(UserError, match="^int8 weights on a CPU need"):
        int8_backends_for(torch.float32)
    found = fastest_backends([(4, 4)], torch.bfloat16, torch.device("cuda"), True)
    assert found == {(4, 4): "int8_widened"}


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe", *slow(["llama", "opt", "gemma2"])])
def test_the_decoder_is_the_model_of_rounded_weights(name, module_of):
    """Transposed weights, tied heads, biases, experts. Queries, keys, values share no scale."""
    made = engine(module_of(name), quantization="int8")
    assert made.weights.linears["head"].nbytes != made.weights.linears["layers.0.qkv"].nbytes
    rollout = made.generate(PROMPTS, SAMPLING)
    plain = engine(module_of(name)).weights
    assert made.weights.nbytes < plain.nbytes
    gap = logprob_gap(module_of(name), PROMPTS, rollout)
    assert 1e-4 < gap < 3  # of the worst token; weights are drawn wide
    if name == "llama":
        assert logprob_gap(round_linears(module_of(name)), PROMPTS, rollout) < 1e-4


def test_a_refresh_in_place_and_as_on_a_device(module_of):
    module = module_of("llama")
    made = on_stacks(empty_engine(module.config, quantization="int8"))
    made.weights.load(stream(module))
    values = made.weights.linears["layers.0.qkv"]._int8.values
    first, address = made.generate(PROMPTS, SAMPLING), values.data_ptr()
    made.weights.load((name, 1.1 * t) for name, t in stream(module))
    made.weights.load(stream(module))
    assert values.data_ptr() == address
    made.forget_prefixes()
    assert made.generate(PROMPTS, SAMPLING).token_ids == first.token_ids


def test_adapters_beside_the_base(module_of):
    adapted = with_adapters("llama", 3)
    beside = engine(module_of("llama"), quantization="int8")
    beside.weights.load(base_tensors(adapted).items())
    before = beside.generate(PROMPTS, SAMPLING)
    beside.weights.load_adapters(factors(adapted))
    after = beside.generate(PROMPTS, SAMPLING)
    assert before.token_ids != after.token_ids
    with evaluating(adapted):
        assert logprob_gap(adapted, PROMPTS, after) < 1


def test_ranks_that_share_weights_round_their_own(module_of):
    module = module_of("llama")

    def work(member):
        made = engine(module, group=member, quantization="int8")
        return made.generate(PROMPTS if member.rank == 0 else [], SAMPLING)

    rollout = on_ranks(2, work)[0]
    assert logprob_gap(module, PROMPTS, rollout) < 1


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_module_runs_with_rounded_weights(name, module_of):
    module = module_of(name)
    made = module_engine(module, EngineConfig(quantization="int8", **DEFAULT_SIZES))
    with made.weights.in_use():
        rollout = made.generate(PROMPTS, SAMPLING)
    assert logprob_gap(module, PROMPTS, rollout) > 1e-4
    if name == "llama":
        assert logprob_gap(round_linears(module), PROMPTS, rollout) < 1e-4


def test_wrong_decoding_is_found_all_the_same():
    """Plain forwards have the same weights: what is found is not their rounding."""
    sizes = EngineConfig(quantization="int8", max_num_seqs=8, max_seq_len=POSITIONS - 2)
    module = build("gpt2")
    module_engine(module, sizes)

    def shift(module, args, inputs):
        """The positions that a decoder gives, and a plain forward does not."""
        if "position_ids" in inputs:
            return args, inputs | {"position_ids": inputs["position_ids"] + 1}
        return None

    module.register_forward_pre_hook(shift, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="log-probs differ by"):
        module_engine(module, sizes)
