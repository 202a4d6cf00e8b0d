"""Weights, gradients and optimizer states under ZeRO, by hand."""

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from dschat.estimate import zero
from dschat.estimate.zero import Held, frozen_bytes, training_bytes
from dschat.runtime.deepspeed_engine import ZeroSettings

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def training(stage: int, dtype: torch.dtype, processes: int, trained: int = 1000, **knobs):
    """1000 parameters, the largest tensor has 400, on a CPU (which allocates used buckets only)."""
    settings = ZeroSettings(stage, dtype, **knobs)
    return training_bytes(1000, trained, 400, settings, processes, on_gpu=False)


# (stage, dtype, processes): weights, masters + moments, per gradient, partition, gradients held.
# fp32: 4 bytes per weight; ZeRO-0 has no masters and 8 bytes of moments; from ZeRO-1 on 4 + 8 for
# this process's partition of 1000 or 125. bf16 raises the stage to 2 at least, where one process
# adds each gradient to the partition.
BY_HAND = {
    (0, FP32, 1): (4000, 8000, 4, 0, 0),
    (0, FP32, 8): (4000, 8000, 4, 0, 0),
    (1, FP32, 1): (4000, 12000, 4, 0, 0),
    (1, FP32, 8): (4000, 1500, 4, 0, 0),
    (2, FP32, 1): (4000, 12000, 0, 4000, 0),
    (2, FP32, 8): (4000, 1500, 4, 500, 0),
    (3, FP32, 1): (4000, 12000, 0, 0, 4000),
    (3, FP32, 8): (500, 1500, 0, 0, 500),
    (0, BF16, 1): (2000, 12000, 0, 4000, 0),
    (0, BF16, 8): (2000, 1500, 2, 500, 0),
    (2, BF16, 1): (2000, 12000, 0, 4000, 0),
    (2, BF16, 8): (2000, 1500, 2, 500, 0),
    (3, BF16, 1): (2000, 12000, 0, 0, 4000),
    (3, BF16, 8): (250, 1500, 0, 0, 500),
    (0, FP16, 8): (2000, 1500, 2, 0, 0),
    (2, FP16, 8): (2000, 1500, 2, 250, 0),
}


@pytest.mark.parametrize("case", BY_HAND, ids=lambda c: f"zero{c[0]}-{str(c[1])[6:]}-x{c[2]}")
def test_weights_gradients_and_optimizer_by_hand(case):
    t = training(*case)
    optimizer = t.masters + t.moments
    computed = t.weights, optimizer, t.per_gradient, t.partition, t.gradients
    weights, states, per_gradient, partition, gradients = BY_HAND[case]
    assert computed == (Held(weights), Held(states), per_gradient, partition, Held(gradients))


@pytest.mark.parametrize(("bits", "weights"), [(4, 320 + 2 * 200), (8, 600 + 2 * 200), (0, 1600)])
def test_quantized_by_hand(bits, weights):
    """600 of 800 weights in linear layers, of which the largest has 256: half a byte each, and for
    every 64 a scale of a byte, and 4 bytes for 256 scales.
    """
    settings = ZeroSettings(2, BF16, weight_bits=bits)
    held, gathered = frozen_bytes(800, settings, 1, (600, 256))
    assert held.device == pytest.approx(weights, abs=11)
    assert gathered == (512 if bits else 0)


def test_lora_by_hand():
    """100 of 1000 parameters train: only they have states and gradients."""
    t = training(0, FP32, 8, trained=100)
    assert (t.weights, t.moments) == (Held(4000), Held(800))
    assert t.update == (400, 400)  # gradients, and their flat copy during the reduction
    t = training(3, BF16, 8, trained=100)  # 13 of 100 to each of 8 processes; 125 of 1000
    assert (t.weights, t.masters + t.moments, t.gradients) == (Held(250), Held(156), Held(52))


def test_offload_by_hand():
    """Masters, moments, gradients and a 16-bit copy are on the host, 125 elements of each."""
    t = training(2, BF16, 8, offload_optimizer=True)
    assert t.masters + t.moments == Held(0, 1500)
    assert t.gradients == Held(800, 125 * 6 + 800)  # plus a buffer of one tensor on each side
    assert t.weights == Held(2000)
    t = training(3, BF16, 8, offload_optimizer=True, offload_parameters=True)
    assert (t.weights, t.gradients) == (Held(0, 250), Held(0, 1000))
    assert t.gathered == 2000  # a pass gathers the weights of all processes


def test_a_gpu_holds_the_whole_bucket():
    t = training_bytes(1000, 1000, 400, ZeroSettings(2, BF16), 8, on_gpu=True)
    assert t.backward == 2 * 500_000_000
    small = {"zero_optimization": {"reduce_bucket_size": 600}}
    t = training_bytes(1000, 1000, 400, ZeroSettings(2, BF16, overrides=small), 1, on_gpu=True)
    assert t.reduces_early
    assert t.backward == 2 * 600 + 2 * 600 + 4 * 400


def test_one_process_needs_no_bucket():
    t = training_bytes(1000, 1000, 400, ZeroSettings(2, BF16), 1, on_gpu=True)
    assert (t.per_gradient, t.partition, t.backward) == (0, 4000, 1600)
    assert t.update == (4000, 0)
    t = training_bytes(1000, 1000, 400, ZeroSettings(2, FP16), 1, on_gpu=True)
    assert (t.partition, t.update) == (2000, (2000, 4000))  # summed in fp16, applied in fp32


def test_constants_are_those_of_the_libraries():
    defaults = DeepSpeedZeroConfig(stage=3)
    names = {"stage3_max_live_parameters": "max_live_parameters"}
    for name, value in zero.BUCKET_DEFAULTS.items():
        assert getattr(defaults, names.get(name, name)) == value
    from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE

    assert zero.ALLREDUCE_BUCKET == MEMORY_OPT_ALLREDUCE_SIZE
