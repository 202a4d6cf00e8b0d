"""Code of the Triton kernels for sm_90: kernels wait for each other.

Compiled with the launches that the kernels plan; no GPU is needed.
"""

import pytest
import torch

from dschat.inference.kernels.cuda import Workspace


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def integers(*shape):
    return meta(*shape, dtype=torch.int64)


SPACE = Workspace(meta(1 << 21, dtype=torch.float32), meta(4096, dtype=torch.int32))


def norm(size, layer_norm):
    h = meta(8, size)
    return "add_norm", (h, h, meta(size), meta(size) if layer_norm else None, 1e-5, h)


def product(rows, outputs, inputs, activation="", gated=False, transposed=False):
    weight = meta(outputs * (2 if gated else 1), inputs)
    weight = weight.T.contiguous().T if transposed else weight
    bias = None if gated else meta(outputs)
    args = (meta(rows, inputs), weight, bias, activation, gated, meta(rows, outputs), SPACE)
    return "skinny_linear", args


def drawing(vocab):
    blocks = meta(8, 4, -(-vocab // 2048), dtype=torch.float32)
    columns = meta(3, 8, dtype=torch.float64), integers(3, 8), integers(3, 8)
    out = integers(8, 2), integers(8), meta(8, dtype=torch.float32)
    return "draw", (meta(8, vocab), *columns, False, *[True] * 4, None, None, vocab, blocks, *out)


def attention(batch, heads, size):
    """Without rotation, norms, window, softcap and sinks."""
    return "paged_decode", (
        *(meta(batch, 3 * heads, size), (0, heads, 2 * heads, 1), meta(1 << 16, 2 * heads, size)),
        *(meta(batch, heads * size), integers(batch), integers(batch), integers(batch, 16), 32),
        *(None, None, None, 0.1, None, None, None, None, 0.0, 1e-6),
        *(None, None, False, None, SPACE),
    )


def mixture(rows, count, per_token, size, inner):
    choices = rows * per_token
    shares = meta(rows, per_token, dtype=torch.float32)
    return "experts", (
        *(meta(rows, size), integers(rows, per_token), shares),
        *(meta(count, 2 * inner, size), None, meta(count, size, inner), None),
        *("halves", "silu", 0.0, 0.0),
        *(meta(choices, inner), meta(choices, size), meta(rows, size)),
    )


READ = (
    "rows.plan_read",
    (integers(8, 64), integers(64, 16), 32, 1023, integers(6, 8), meta(8, dtype=torch.bool)),
)


STATE = integers(8, 64), meta(128, 2, 1, 64, dtype=torch.float64), integers(1)
ADVANCE = (
    "rows.plan_advance",
    (integers(8), meta(8, dtype=torch.float32), *STATE, integers(8, 16)),
)


def embedding(size):
    positions = integers(8), meta(2050, size)
    return "rows.plan_embed", (integers(8), meta(50272, size), *positions, 2, meta(8, size))


FOLLOWING = {
    "product": (*product(8, 2048, 2048), {}),
    "product-gated": (*product(16, 11008, 4096, "silu", True), {}),
    "product-transposed": (*product(1, 2304, 768, transposed=True), {}),
    "attention": (*attention(8, 32, 64), {"next_weight": meta(2048, 2048)}),
    "norm": (*norm(2048, True), {"next_weight": meta(6144, 2048)}),
    "last-norm": (*norm(2048, True), {}),
    "draw": (*drawing(50272), {}),
    "read": (*READ, {}),
    "advance": (*ADVANCE, {}),
    "embed": (*embedding(2048), {}),
    "experts": (*mixture(32, 32, 4, 2048, 768), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("launch", FOLLOWING.values(), ids=FOLLOWING)
def test_on_hopper_every_kernel_waits_for_the_one_before(launch, compiling):
    """Once, and before it stores anything; weights are fetched without waiting."""
    name, args, options = launch
    wanted = (1, True, "next_weight" in options, name == "skinny_linear")
    for found in compiling("triton_cubins.following", name, args, options):
        assert found == wanted


def test_a_weight_that_begins_anywhere_is_not_fetched(compiling):
    name, args = norm(2048, True)
    weight = torch.empty(6144 * 2048 + 1, dtype=torch.bfloat16)[1:].view(6144, 2048)
    for *_, fetches, _ in compiling("triton_cubins.following", name, args, {"next_weight": weight}):
        assert not fetches
