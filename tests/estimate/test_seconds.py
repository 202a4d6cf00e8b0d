"""The arithmetic of the time model, by hand."""

from dataclasses import replace

import pytest
import torch

from dschat.estimate.devices import DEVICES, DeviceSpeed, find_speed, speed_of
from dschat.estimate.memory import Model
from dschat.estimate.models import Sizes, Use
from dschat.estimate.seconds import LAUNCH_S, REDUCE_S, Fleet, Rows, Shares
from dschat.observability.flops import ModelShape
from dschat.runtime.deepspeed_engine import ZeroSettings

# 1,000 FLOPs, 100 bytes of memory, 10 of a link, 1 of a network adapter, 5 of PCIe, 20 of host
# memory a second.
DEVICE = DeviceSpeed("toy", 1.0, 1000, 100, 10, 1, 5, 20)
SHARES = Shares(products=0.5, decode=0.5)
# One layer of width 2, one head of 2, an MLP of width 3, 4 words: 2 * (4 * 4 + 2 * 6) = 56 FLOPs a
# token in the layer, 2 * 8 = 16 in the head, 4 * 2 = 8 in attention for each pair of tokens.
SHAPE = ModelShape(1, 2, 28, 0, 4, 2, 2, 2)
ROWS = Rows(4, 2, 3)


def model(stage=0, checkpointing=False, **offload):
    """100 parameters of 2 bytes, which all train."""
    use = Use("x", "--x", "lm", torch.float16, gradient_checkpointing=checkpointing)
    # float32: every stage is supported
    zero = ZeroSettings(stage, torch.float32, **offload)
    return Model("model", use, Sizes(100, 100, 0, SHAPE), "policy", zero, {}, 0)


def fleet(count=1, per_node=8, **shares):
    return Fleet(DEVICE, count, per_node, replace(SHARES, **shares))


def test_passes_by_hand():
    # 5 tokens and 15 pairs: 5 * (56 + 16) + 15 * 8 = 480 FLOPs; 4 sequences at 500 FLOPs a second
    assert fleet().score(model(), ROWS, 1) == pytest.approx(4 * 480 / 500)
    # Backward takes two forwards; recomputing repeats the layer and attention, not the head.
    assert fleet().train(model(), ROWS, 1) == pytest.approx(3 * 4 * 480 / 500)
    recomputed = fleet().train(model(checkpointing=True), ROWS, 1)
    assert recomputed == pytest.approx((3 * 480 + 480 - 5 * 16) * 4 / 500)


def test_prefill_reads_a_prompt_once_for_all_its_samples():
    # 2 tokens and 3 pairs, the head on the last: 2 * 56 + 16 + 3 * 8 = 152 FLOPs
    assert fleet().prefill(model(), ROWS) == pytest.approx(4 * 152 / 500)
    assert fleet().prefill(model(), replace(ROWS, samples=2)) == pytest.approx(2 * 152 / 500)


def test_decode_by_hand():
    """Two at a time: 2 batches of 2 steps, each of which reads 200 bytes of weights and the 8 bytes
    of 3.5 tokens of 2 sequences, at 50 bytes a second; its FLOPs take less.
    """
    decode_s = fleet().decode(model(), ROWS, concurrent=2)
    assert decode_s == pytest.approx(4 * (200 + 2 * 3.5 * 8) / 50)
    copied = fleet(cache_passes=3).decode(model(), ROWS, concurrent=2)
    assert copied == pytest.approx(4 * (200 + 3 * 2 * 3.5 * 8) / 50)
    launched = fleet(step_launches=7e6).decode(model(), ROWS, concurrent=2)
    assert launched - decode_s == pytest.approx(4 * 7e6 * LAUNCH_S)
    # 2 steps after 2 prompt tokens: 2 * 72 in matrices, 2 * 2 + 3 pairs of 8
    fast = Fleet(replace(DEVICE, bandwidth=1e9), 1, 8, SHARES)
    products_s = 4 * (2 * 72 + 7 * 8) / 500
    assert fast.decode(model(), ROWS, concurrent=2) == pytest.approx(products_s)


def test_tensor_parallel_decode_by_hand():
    """Two devices share weights and cache, and reduce 2 x 2 numbers of 2 bytes twice a step."""
    decode_s = fleet(2).decode(model(), ROWS, concurrent=2, tp_size=2)
    # an all-reduce sends its bytes twice, half of them to the other device
    reduced = 2 * (2 * 2 * 2 * 2) * 0.5 / (0.8 * 10)
    assert decode_s == pytest.approx(4 * ((200 + 56) / 2 / 50 + 2 * REDUCE_S + reduced))
    alone = fleet(2).prefill(model(), ROWS)
    # 8 tokens of 2 numbers of 2 bytes
    reduced = 2 * (2 * 8 * 2 * 2) * 0.5 / (0.8 * 10)
    shared = fleet(2).prefill(model(), ROWS, tp_size=2)
    assert shared - alone == pytest.approx(2 * REDUCE_S + reduced)


def test_communication_by_hand():
    """Half of it hides behind products, which take 4 * 480 / 2 / 500 s on two devices."""
    products_s = 1.92
    assert fleet().score(model(3), ROWS, 3) == pytest.approx(2 * products_s)  # nothing to gather
    # 3 micro-batches gather 200 bytes, half of them from the other device, at 8 bytes a second
    links_s = 3 * 100 / 8
    assert fleet(2).score(model(3), ROWS, 3) == pytest.approx(links_s)  # products hide in it
    hidden = fleet(2, products=0.005).score(model(3), ROWS, 3)
    assert hidden == pytest.approx(100 * products_s + links_s / 2)
    # two gathers and a reduction; with ZeRO-2 the reduction
    slow = fleet(2, products=0.005)
    assert slow.train(model(3), ROWS, 3) == pytest.approx(300 * products_s + 3 * links_s / 2)
    assert slow.train(model(2), ROWS, 3) == pytest.approx(300 * products_s + links_s / 2)
    assert slow.train(model(1), ROWS, 3) == pytest.approx(300 * products_s)
    # Two nodes of two: 4 devices, a node's two adapters bring 2 * 1 bytes a second
    far = fleet(4, per_node=2).score(model(3), ROWS, 3)
    assert far == pytest.approx(3 * 150 / (0.8 * 2))
    offloaded = fleet(2).score(model(3, offload_parameters=True), ROWS, 3)
    assert offloaded == pytest.approx(links_s + 3 * 100 / 5)


def test_updates_and_refresh_by_hand():
    """30 bytes an element at 0.6 of the bandwidth; offloaded, 4 bytes cross PCIe and host memory is
    a fifth as fast.
    """
    assert fleet().update(model(), 2) == pytest.approx(2 * 100 * 30 / 60)
    assert fleet(4).update(model(3), 2) == pytest.approx(2 * 25 * 30 / 60)
    away = fleet(4).update(model(3, offload_optimizer=True), 2)
    assert away == pytest.approx(2 * (25 * 30 / 12 + 25 * 4 / 5))
    # ZeRO-2 sends the new weights, ZeRO-1 the gradients too.
    weights_s, shard_s = 200 * 0.75 / 8, 25 * 30 / 60
    assert fleet(4).update(model(2), 1) == pytest.approx(shard_s + weights_s)
    assert fleet(4).update(model(1), 1) == pytest.approx(shard_s + 2 * weights_s)
    copied = fleet(4).refresh(model(3), tp_size=2)
    assert copied == pytest.approx(weights_s + 200 / 50)  # reads and writes 100


def test_devices_by_name():
    assert find_speed("a100-80") is DEVICES["A100-80"]
    assert find_speed("h200-141").memory_gib == 141
    assert speed_of("NVIDIA A100-SXM4-80GB", 85 * 10**9) is DEVICES["A100-80"]
    assert speed_of("NVIDIA A100-SXM4-40GB", 42 * 10**9) is DEVICES["A100-40"]
    assert speed_of("NVIDIA H100 80GB HBM3", 85 * 10**9) is DEVICES["H100-80"]
    assert speed_of("NVIDIA GeForce RTX 3090", 24 * 2**30) is None
