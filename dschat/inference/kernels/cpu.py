"""Compiles cpu_kernels.c and cpu_products.c on first use and calls their kernels on tensors.

Besides its matrix products, a decode step takes about a hundred torch operations, whose launch
costs more than their computation. The kernels need a call or two per layer instead; the products
are one of those that are timed. The system's C compiler builds them into the user's cache folder,
once per source, compiler and processor. If that fails, `load` returns None and torch's operations
are used.

NOTE: the kernels read raw addresses. Tensors must be contiguous fp32 on the CPU (indices int64)
unless a docstring says otherwise; callers check that once, not in every call.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat.config.errors import first_line
from dschat.distributed.machine import processor, user_cache

logger = logging.getLogger("dschat")

_FOLDER = Path(__file__).parent
_HEADER = _FOLDER / "cpu_kernels.h"
_SOURCES = [_FOLDER / "cpu_kernels.c", _FOLDER / "cpu_products.c"]
COMPILERS = ("cc", "gcc", "clang")
# No -ffast-math: it reorders sums, so that answers would depend on the compiler.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_DIGEST_BYTES = hashlib.sha256().digest_size

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "dschat_add_norm": (*[_POINTER] * 5, _INT, _INT, _FLOAT, _FLOAT),
    "dschat_silu_mul": (_POINTER, _POINTER, _INT, _INT),
    "dschat_norm_and_rotate": (
        *(_POINTER, *[_INT] * 5),
        *(_POINTER, _POINTER, _FLOAT, _FLOAT, _POINTER, _POINTER, _POINTER, _INT),
    ),
    "dschat_decode_attention": (*[_POINTER] * 4, _INT, _FLOAT, _INT),
    "dschat_use_openmp": (_POINTER, _POINTER, _POINTER),
    "dschat_packed_size": (_INT, _INT),
    "dschat_pack": (_POINTER, _POINTER, _INT, _INT),
    "dschat_product": (*[_POINTER] * 4, *[_INT] * 5),
    "dschat_products": (*[_POINTER] * 5, *[_INT] * 4),
    "dschat_draw": (_POINTER, _INT, _INT, _INT, ctypes.c_double, _POINTER, _POINTER, _POINTER),
}


class _Step(ctypes.Structure):
    """``struct step`` of cpu_kernels.c, field by field."""

    _fields_ = [
        *((n, _INT) for n in ("rows", "num_heads", "num_kv_heads", "head_size", "page_size")),
        ("table_stride", _INT),
        *((n, _POINTER) for n in ("lengths", "table", "slot_mapping", "slopes")),
    ]


class Kernels:
    """The kernels of the compiled library at ``path``. Products and attention use the threads of
    ``openmp``, see `_openmp_of_torch`; None: the calling one.

    Those that may take milliseconds release the GIL: the threads of a server work meanwhile.
    """

    def __init__(self, path: Path, openmp: list[int | None] | None) -> None:
        holding, releasing = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        for name, types in _SIGNATURES.items():
            for library in (holding, releasing):
                function = getattr(library, name)
                function.argtypes, function.restype = types, None
        holding.dschat_packed_size.restype = _INT
        if openmp is not None:
            holding.dschat_use_openmp(*openmp)
        self._holding, self.releasing = holding, releasing

    def add_norm(
        self,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        offset: float = 0.0,
    ) -> Tensor:
        """``x`` (rows, n) += ``added``, in place. Returns its layer norm by ``weight`` +
        ``offset``, or its RMS norm if ``bias`` is None (Zhang and Sennrich 2019, equation 4).
        """
        out = torch.empty_like(x)
        self._holding.dschat_add_norm(
            x.data_ptr(),
            None if added is None else added.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *x.shape,
            eps,
            offset,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``gate_up`` (rows, 2 n) -> silu(gate) * up (rows, n)."""
        rows, size = gate_up.shape
        out = gate_up.new_empty(rows, size // 2)
        self._holding.dschat_silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size // 2)
        return out

    def pack(self, weight: Tensor, packed: Tensor | None = None) -> Tensor:
        """``weight`` (out, in) in the order that `product` reads; into ``packed``, an earlier
        result, if given.
        """
        weight = weight.contiguous()
        if packed is None:
            packed = weight.new_empty(self._holding.dschat_packed_size(*weight.shape))
        self.releasing.dschat_pack(weight.data_ptr(), packed.data_ptr(), *weight.shape)
        return packed

    def product(self, x: Tensor, packed: Tensor, outs: int, bias: Tensor | None) -> Tensor:
        """``x`` (rows, in), times the `packed` weight of ``outs`` outputs -> (rows, out):
        x weight^T + bias.
        """
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows, size = x.shape
        out = x.new_empty(rows, outs)
        self.releasing.dschat_product(
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            x.stride(0),
            outs,
            size,
            torch.get_num_threads(),
        )
        return out

    def products(
        self,
        x: Tensor,
        counts: list[int],
        packed: list[Tensor],
        outs: int,
        biases: list[Tensor] | None,
    ) -> Tensor:
        """`product` of the first ``counts[0]`` rows with the first weight, of the next ones with
        the second, and so on: ``x`` (rows, in) -> (rows, out).
        """
        x = x.contiguous()
        out = x.new_empty(x.shape[0], outs)
        pointers = _POINTER * len(counts)

        def addresses(tensors: list[Tensor] | None) -> ctypes.Array[Any] | None:
            return None if tensors is None else pointers(*(t.data_ptr() for t in tensors))

        self.releasing.dschat_products(
            x.data_ptr(),
            addresses(packed),
            addresses(biases),
            out.data_ptr(),
            (_INT * len(counts))(*counts),
            len(counts),
            outs,
            x.shape[1],
            torch.get_num_threads(),
        )
        return out

    def norm_and_rotate(
        self,
        heads_THD: Tensor,
        num_heads: int,
        num_kv_heads: int,
        norms: tuple[Tensor, Tensor, float, float] | None,
        rotary: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """Normalize and rotate the query and key heads of (T, H + 2 K, D), in place.

        ``norms``: weights (D,) of the RMS norms of query and of key heads, eps, and what is added
        to the weights. ``rotary``: positions (T,), cos and sin of every position (P, rotary dim),
        see `dschat.inference.model.positions.Rotary`.
        """
        rows, all_heads, head_size = heads_THD.shape
        q_weight = k_weight = positions = cos = sin = None
        eps, offset, rotary_dim = 0.0, 0.0, 0
        if norms is not None:
            q_weight, k_weight = norms[0].data_ptr(), norms[1].data_ptr()
            eps, offset = norms[2:]
        if rotary is not None:
            positions, cos, sin = rotary[0].data_ptr(), rotary[1].data_ptr(), rotary[2].data_ptr()
            rotary_dim = rotary[1].shape[1]
        self._holding.dschat_norm_and_rotate(
            heads_THD.data_ptr(),
            rows,
            all_heads * head_size,
            num_heads,
            num_kv_heads,
            head_size,
            q_weight,
            k_weight,
            eps,
            offset,
            positions,
            cos,
            sin,
            rotary_dim,
        )

    def draw(
        self, logits: Tensor, temperature: float, uniform: Tensor, num_tokens: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """`dschat.inference.sampling.sample` without truncation: ``logits`` (R, V), ``uniform``
        (R,) float64 -> ids (R,) int64 below ``num_tokens`` and log-probs (R,) fp32.
        """
        num_rows, size = logits.shape
        ids = uniform.new_empty(num_rows, dtype=torch.int64)
        logprobs = logits.new_empty(num_rows)
        self.releasing.dschat_draw(
            logits.data_ptr(),
            num_rows,
            size,
            min(num_tokens or size, size),
            temperature,
            uniform.data_ptr(),
            ids.data_ptr(),
            logprobs.data_ptr(),
        )
        return ids, logprobs


class DecodeAttention:
    """Attention of a step in which B sequences decode one token each, for all layers. Keeps the
    step's tensors alive.

    Args:
        lengths: (B,) keys that each attends to, its own included.
        slot_mapping: (B,) cache slots to write the new keys and values to first; None: they are
            already written.
        block_table: (B, pages), rows of any stride; None: sequence b is in page b.
        slopes: (H,) ALiBi's.
    """

    def __init__(
        self,
        kernels: Kernels,
        lengths: Tensor,
        slot_mapping: Tensor | None,
        block_table: Tensor | None,
        page_size: int,
        slopes: Tensor | None,
    ) -> None:
        self._function = kernels.releasing.dschat_decode_attention
        self._tensors = lengths, slot_mapping, block_table, slopes
        self._step = _Step(
            rows=lengths.shape[0],
            page_size=page_size,
            table_stride=0 if block_table is None else block_table.stride(0),
            lengths=lengths.data_ptr(),
            table=None if block_table is None else block_table.data_ptr(),
            slot_mapping=None if slot_mapping is None else slot_mapping.data_ptr(),
            slopes=None if slopes is None else slopes.data_ptr(),
        )

    def __call__(
        self, heads_THD: Tensor, rows_N2KD: Tensor, window: int | None, scale: float
    ) -> Tensor:
        """Heads (B or more, H + 2 K, D) and a layer's cache (slots, 2 K, D), with K keys before K
        values in each slot -> (B, H * D).
        """
        step = self._step
        num_pairs, head_size = rows_N2KD.shape[1:]
        num_heads = heads_THD.shape[1] - num_pairs
        step.num_heads, step.num_kv_heads = num_heads, num_pairs // 2
        step.head_size = head_size
        out = heads_THD.new_empty(step.rows, num_heads * head_size)
        self._function(
            ctypes.addressof(self._step),
            heads_THD.data_ptr(),
            rows_N2KD.data_ptr(),
            out.data_ptr(),
            window or 0,
            scale,
            torch.get_num_threads(),
        )
        return out


# -- compiling -------------------------------------------------------------------------------------


@functools.cache
def load() -> Kernels | None:
    """The kernels, compiled on first use (a second or two, once per machine).

    None with ``DSCHAT_CPU_KERNELS=0``, without a C compiler, or if compilation fails; decoding is
    then slower.
    """
    if os.environ.get("DSCHAT_CPU_KERNELS") == "0":
        return None
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        logger.info("no C compiler (gcc or clang): decoding on the CPU is slower without")
        return None
    try:
        return Kernels(compiled_library(compiler), _openmp_of_torch())
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        reason = first_line(error)
        logger.warning("the C kernels cannot be used (%s): decoding on the CPU is slower", reason)
        return None


def _openmp_of_torch() -> list[int | None] | None:
    """Addresses of the functions by which torch's OpenMP runs on its threads. A second runtime, as
    the compiler would link, competes with torch's for the cores.
    """
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:  # not Linux
        return None
    libraries = sorted(path for path in mapped if re.search(r"lib([gi]?omp|iomp5)[^/]*\.so", path))
    libraries.sort(key=lambda path: not path.startswith(str(Path(torch.__file__).parent)))
    for library in map(ctypes.CDLL, libraries):
        names = ("GOMP_parallel", "omp_get_num_threads", "omp_get_thread_num")
        with contextlib.suppress(AttributeError):
            return [ctypes.cast(getattr(library, name), _POINTER).value for name in names]
    return None


def compiled_library(compiler: str) -> Path:
    """Path of the compiled library, built if the cache folder lacks it.

    The file ends in the library's SHA-256: loading a damaged library would crash the process.
    """
    path = user_cache() / f"cpu_kernels-{_key(compiler)}.so"
    if path.is_file() and _is_whole(path.read_bytes()):
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # NOTE: ranks may compile at the same time. Each writes its own file; the last rename wins.
    handle, temporary = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, "-o", temporary, *map(str, _SOURCES), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"{compiler}: {done.stderr.strip()[:500]}")
        compiled = Path(temporary).read_bytes()
        Path(temporary).write_bytes(compiled + hashlib.sha256(compiled).digest())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def _is_whole(data: bytes) -> bool:
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def _key(compiler: str) -> str:
    """Hash of all that the machine code depends on: different machines may share a home folder."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30).stdout
    sources = [path.read_bytes() for path in (_HEADER, *_SOURCES)]
    parts = [*sources, " ".join(_FLAGS).encode(), version, processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
