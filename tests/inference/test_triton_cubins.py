"""Machine code of the Triton kernels for sm_90 and sm_80: no spills, occupancy, wide loads,
copies ahead of their use.

Compiled with the launches that the kernels plan; no GPU is needed.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from quick import slow, some

from dschat.inference import SamplingParams
from dschat.inference.kernels.cuda import Workspace

SHARED = {90: 227 << 10, 80: 163 << 10}  # bytes of a multiprocessor


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


def adapted(rows, outputs, inputs, rank, *how):
    """A product with LoRA's factors beside the weight."""
    name, args = product(rows, outputs, inputs, *how)
    height = args[1].shape[0]
    return name, (*args, None, True, (meta(rows, rank), meta(height, rank)))


def drawing(vocab, greedy=False, forbids=False, truncation=(False, False, False)):
    forbidden = (meta(8, dtype=torch.bool), integers(8, 2)) if forbids else (None, None)
    blocks = meta(8, 4, -(-vocab // 2048), dtype=torch.float32)
    columns = meta(3, 8, dtype=torch.float64), integers(3, 8), integers(3, 8)
    out = integers(8, 2), integers(8), meta(8, dtype=torch.float32)
    applies = greedy, not greedy, *truncation
    return "draw", (meta(8, vocab), *columns, *applies, *forbidden, vocab, blocks, *out)


def attention(batch, heads, kv_heads, size, page_size=32, **options):
    rotary = options.get("rotary", 0)
    slopes = meta(heads, dtype=torch.float32) if options.get("alibi") else None
    norms = [meta(size) if options.get("norms") else None] * 2
    angles = [meta(4096, rotary) if rotary else None] * 2
    made = partial(meta, dtype=options.get("dtype", torch.bfloat16))
    return "paged_decode", (
        *(made(batch, heads + 2 * kv_heads, size), (0, heads, heads + kv_heads, 1)),
        made(1 << 16, 2 * kv_heads, size),
        *(
            made(batch, heads * size),
            integers(batch),
            integers(batch),
            integers(batch, 16),
            page_size,
            slopes,
        ),
        *(options.get("window"), options.get("chunk"), 0.1, options.get("softcap")),
        *(meta(heads) if options.get("sinks") else None, *norms, options.get("offset", 0.0), 1e-6),
        *(*angles, options.get("adjacent", False), None, SPACE),
    )


def mixture(rows, count, per_token, size, inner, is_transposed=False):
    """Of gpt-oss if the weights are transposed, else of the usual kind."""

    def weights(outputs, inputs):
        if is_transposed:
            return meta(count, inputs, outputs).transpose(1, 2), meta(count, outputs)
        return meta(count, outputs, inputs), None

    choices = rows * per_token
    shares = meta(rows, per_token, dtype=torch.float32)
    gate = ("pairs", "silu", 1.702, 7.0) if is_transposed else ("halves", "silu", 0.0, 0.0)
    return "experts", (
        *(meta(rows, size), integers(rows, per_token), shares),
        *(*weights(2 * inner, size), *weights(size, inner), *gate),
        *(meta(choices, inner), meta(choices, size), meta(rows, size)),
    )


READ = (
    "rows.plan_read",
    (integers(8, 64), integers(64, 16), 32, 1023, integers(6, 8), meta(8, dtype=torch.bool)),
)


def advance(num_stops):
    state = integers(8, 64), meta(128, 2, 1, 64, dtype=torch.float64), integers(1)
    stops = integers(8, num_stops) if num_stops else None
    return "rows.plan_advance", (integers(8), meta(8, dtype=torch.float32), *state, stops)


def embedding(size):
    positions = integers(8), meta(2050, size)
    return "rows.plan_embed", (integers(8), meta(50272, size), *positions, 2, meta(8, size))


@dataclass(frozen=True)
class Wanted:
    """``programs`` at once on an H100's multiprocessor, loads of 128 bits (or 16-byte copies), and
    with tensor cores, copies ahead of a product.
    """

    launch: tuple
    programs: int
    wide_loads: int = 2
    tensor_cores: bool = False
    ahead: int = 2  # both operands of the next product


FOLLOWING = {
    "product": (*product(8, 2048, 2048), {}),
    "product-gated": (*product(16, 11008, 4096, "silu", True), {}),
    "product-transposed": (*product(1, 2304, 768, transposed=True), {}),
    "attention": (*attention(8, 32, 32, 64), {"next_weight": meta(2048, 2048)}),
    "norm": (*norm(2048, True), {"next_weight": meta(6144, 2048)}),
    "last-norm": (*norm(2048, True), {}),
    "draw": (*drawing(50272, truncation=(True, True, True)), {}),
    "read": (*READ, {}),
    "advance": (*advance(16), {}),
    "embed": (*embedding(2048), {}),
    "experts": (*mixture(32, 32, 4, 2048, 768), {}),
}
QUICK = ("product-opt-out", "attention-opt")
WANTED = {
    "product-opt-out": Wanted(product(8, 2048, 2048), 2, 8, True),
    "attention-opt": Wanted(attention(8, 32, 32, 64), 5, 16, True),
    "norm-2048": Wanted(norm(2048, True), 8),
    "draw-opt": Wanted(drawing(50272), 4),
    "attention-llama3": Wanted(attention(64, 32, 8, 128, rotary=128), 4, 24, True),
    **{f"norm-{n}": Wanted(norm(n, n < 4096), 2) for n in (768, 1600, 4096, 8192)},
    "read": Wanted(READ, 4, 0),
    "advance": Wanted(advance(16), 4, 0),
    "advance-without-stops": Wanted(advance(0), 4, 0),
    "embed": Wanted(embedding(2048), 8),
    "draw-greedy": Wanted(drawing(32000, greedy=True), 4),
    "draw-nucleus": Wanted(drawing(50272, truncation=(False, True, False)), 2),
    "draw-truncated": Wanted(drawing(152064, forbids=True, truncation=(True, True, True)), 2),
    "draw-qwen-min-new-tokens": Wanted(drawing(152064, forbids=True), 4),
    # The factors are multiplied when the weight's copies are done.
    "product-adapted": Wanted(adapted(8, 6144, 4096, 192), 1, 8, True, ahead=0),
    "product-adapted-gated": Wanted(
        adapted(16, 14336, 4096, 64, "silu", True), 1, 8, True, ahead=0
    ),
    "product-gemma3-32": Wanted(product(32, 6912, 1152, "gelu", True), 1, 8, True),
    "product-llama-32": Wanted(product(32, 4096, 14336), 2, 8, True),
    "product-opt-qkv": Wanted(product(8, 6144, 2048), 1, 8, True),
    "product-opt-up": Wanted(product(8, 8192, 2048, "relu"), 1, 8, True),
    "product-opt-down": Wanted(product(8, 2048, 8192), 2, 8, True),
    "product-opt-head": Wanted(product(8, 50272, 2048), 1, 8, True),
    "product-gpt2-qkv": Wanted(product(1, 2304, 768), 2, 8, True),
    "product-gpt2-qkv-transposed": Wanted(product(1, 2304, 768, transposed=True), 2, 8, True),
    "product-gpt2-up": Wanted(product(1, 3072, 768, "gelu_new"), 2, 8, True),
    "product-llama-gated-9": Wanted(product(9, 11008, 4096, "silu", True), 1, 8, True),
    "product-llama-gated-16": Wanted(product(16, 11008, 4096, "silu", True), 1, 8, True),
    "product-llama-down": Wanted(product(16, 4096, 11008), 2, 8, True),
    "product-bloom": Wanted(product(16, 4096, 1024, "gelu"), 2, 8, True),
    "attention-gpt2-splits": Wanted(attention(1, 12, 12, 64), 5, 16, True),
    "attention-page-64": Wanted(attention(8, 32, 32, 64, page_size=64), 5, 16, True),
    "attention-llama": Wanted(attention(64, 32, 32, 128, rotary=128), 3, 24, True, ahead=0),
    "attention-gemma3": Wanted(
        attention(32, 4, 1, 256, rotary=256, norms=True, offset=1.0, window=512), 2, 32, True
    ),
    "attention-gemma2": Wanted(attention(8, 16, 8, 256, rotary=256, softcap=50.0), 2, 32, True),
    "attention-gpt-oss": Wanted(
        attention(32, 64, 8, 64, rotary=64, sinks=True, window=128), 4, 16, True
    ),
    "attention-llama4": Wanted(
        attention(8, 40, 8, 128, rotary=128, adjacent=True, chunk=8192), 3, 24, True
    ),
    "attention-bloom": Wanted(attention(8, 32, 32, 128, alibi=True), 3, 24, True),
    "attention-qwen3": Wanted(attention(8, 32, 8, 128, rotary=128, norms=True), 4, 24, True),
    "attention-phi": Wanted(attention(8, 32, 32, 80, rotary=32), 3, 24, True),
    "attention-96": Wanted(attention(8, 32, 32, 96, rotary=96, window=2048), 3, 24, True),
    "attention-gemma": Wanted(attention(8, 8, 4, 256, rotary=256, window=1024), 2, 48, True),
    "attention-one-kv-head": Wanted(attention(1, 32, 1, 256, rotary=256), 2, 48, True),
}


def programs_at_once(report, capability):
    """Programs of a report that fit on a multiprocessor of 65,536 registers, 2,048 threads."""
    registers = -(-report["registers"] // 8) * 8 * report["threads"]
    shared = report["shared"] + 1024  # the system's share
    return min(65536 // registers, 2048 // report["threads"], SHARED[capability] // shared)


def check(compiling, wanted, capability):
    name, args = wanted.launch
    programs = wanted.programs * SHARED[capability] // SHARED[90]
    for report in compiling("triton_cubins.cubin", name, args, capability):
        problems = {
            "spills": report["stack"] or report["local"],
            "too few at once": programs_at_once(report, capability) < programs,
            "narrow loads": report["wide_loads"] < wanted.wide_loads,
            "no tensor cores": wanted.tensor_cores and not report["tensor_cores"],
            "nothing copied ahead": wanted.tensor_cores and report["copies"] < wanted.ahead,
        }
        found = [problem for problem, there in problems.items() if there]
        assert not found, f"{', '.join(found)}: {report}"


MIXTURES = {
    "qwen3-30b-a3b": mixture(64, 128, 8, 2048, 768),
    "gpt-oss-20b": mixture(32, 32, 4, 2880, 2880, is_transposed=True),
    "mixtral": mixture(8, 8, 2, 4096, 14336),
    "many-rows": mixture(256, 64, 8, 2048, 768),
}


@pytest.mark.parametrize("name", some(MIXTURES, ["gpt-oss-20b"]))
@pytest.mark.parametrize("capability", [90, *slow([80])])
def test_machine_code_of_experts(compiling, name, capability):
    """Two products, then a sum that is as short as a norm."""
    reports = compiling("triton_cubins.cubin", *MIXTURES[name], capability)
    for report in reports[:2]:
        assert not report["stack"]
        assert not report["local"]
        assert programs_at_once(report, capability) >= 1
        assert report["wide_loads"] >= 16
        assert report["tensor_cores"]
        assert report["copies"] >= 2
    assert programs_at_once(reports[2], capability) >= 8


@pytest.mark.parametrize("name", some(WANTED, QUICK))
@pytest.mark.parametrize("capability", [90, *slow([80])])
def test_machine_code(compiling, name, capability):
    check(compiling, WANTED[name], capability)


FREE = SamplingParams(ignore_eos=True)
BOUND = SamplingParams(stop_token_ids=(3,), min_new_tokens=2, top_p=0.9, top_k=5, min_p=0.1)
GREEDY = SamplingParams(temperature=0.0)
ALWAYS = {"_read_rows", "_embed", "_add_norm", "_skinny", "_paged_decode"}
ALWAYS |= {"_mass", "_choose", "_advance_rows"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "sampling"), [(1, FREE), (16, BOUND), (8, GREEDY)], ids=["free", "bound", "greedy"]
)
@pytest.mark.parametrize("name", ["llama", "opt", "bloom", "qwen3", "mistral"])
def test_whole_steps_compile(name, rows, sampling, compiling):
    dtype = torch.float32 if name in ("opt", "qwen3") else torch.bfloat16
    reports = compiling("triton_cubins.step_reports", name, dtype, sampling, rows, 90)
    kernels = {kernel for kernel, _ in reports}
    assert kernels == ALWAYS | ({"_threshold"} if sampling is BOUND else set())


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_attention_in_fp32_fits(size, capability, compiling):
    launch = attention(1, 32, 1, size, rotary=size, dtype=torch.float32)
    (report,) = compiling("triton_cubins.cubin", *launch, capability)
    assert programs_at_once(report, capability) >= 1


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


def test_narrow_loads_are_found(compiling):
    with pytest.raises(AssertionError, match="narrow loads"):
        check(compiling, Wanted(norm(2047, True), 1), 90)  # rows do not start at 16 bytes


PARTS = {"product": product(8, 2048, 2048), "attention": attention(1, 12, 12, 64)}


@pytest.mark.slow
@pytest.mark.parametrize("launch", PARTS.values(), ids=PARTS)
def test_partial_results_are_stored_before_a_program_counts_itself(compiling, launch):
    (report,) = compiling("triton_cubins.cubin", *launch, 90)
    assert report["synchronizes"]
