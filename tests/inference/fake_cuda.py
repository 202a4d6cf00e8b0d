"""Runs code on a fake CUDA device, with shapes and dtypes but no data, and counts what it does.

Needs neither a GPU nor torch's CUDA build: torch's FakeTensorMode refuses operands on two devices,
as CUDA does, and each operator, copy and host read is counted. What a captured step does is counted
apart. torch's CPU build lacks a device guard for CUDA, so one that does nothing is compiled.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from families import saved
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoModelForCausalLM

from dschat.config.rollout import VARIABLE
from dschat.distributed.machine import user_cache
from dschat.inference import EngineConfig, InferenceEngine, UnsupportedModel, model_spec

DEVICE = torch.device("cuda:0")
READ, TO_DEVICE, TO_HOST = "host read", "copy to device", "copy to host"
WAITS = (READ, TO_DEVICE, TO_HOST)

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
}
"""
_aten = torch.ops.aten
_FREE = {"empty", "empty_strided", "new_empty", "_unsafe_view", "lift_fresh", "detach", "alias"}


@functools.cache
def _guard() -> ctypes.CDLL | None:
    """The device guard, compiled once per machine and torch; None without a compiler."""
    compiler, root = shutil.which("g++"), Path(torch.__file__).parent
    if compiler is None:
        return None
    key = hashlib.sha256(f"{root} {torch.__version__} {_GUARD}".encode()).hexdigest()[:16]
    library = user_cache() / f"fake_cuda_guard-{key}.so"
    if not library.is_file():
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            source, built = Path(folder, "guard.cpp"), Path(folder, "guard.so")
            source.write_text(_GUARD)
            paths = [f"-I{root}/include", f"-L{root}/lib", "-lc10"]
            command = [compiler, "-std=c++20", "-shared", "-fPIC", source, "-o", built, *paths]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
            os.replace(built, library)
    return ctypes.CDLL(str(library))


class Watch(TorchDispatchMode):
    """Counts device operators, copies and host reads; ``counts`` by (inside a capture, name).

    Views and allocations are free. Attention and RMS norm are one operator each, as on CUDA.
    """

    def __init__(self):
        super().__init__()
        self.counts, self.inside = Counter(), False

    def note(self, name):
        self.counts[self.inside, name] += 1

    def capture(self, step):
        """Stands for a CUDA graph: what ``step`` does after a first run is counted as inside."""
        step()

        def replay():
            self.inside = True
            try:
                return step()
            finally:
                self.inside = False

        return replay

    @property
    def tolist(self):
        """Stands for a tensor's ``tolist``: its shape, filled with ones or halves."""

        def tolist(tensor):
            if tensor.is_cuda:
                self.note(READ)
            return _filled(tensor.shape, 0.5 if tensor.is_floating_point() else 1)

        return tolist

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func.name() == "aten::_local_scalar_dense":
            if args[0].is_cuda:
                self.note(READ)
            return 1
        if func is _aten.scaled_dot_product_attention.default:
            return self._attention(*args, **kwargs)
        if func.name() == "aten::_grouped_mm" and not self._is_fast(*args[:2]):
            self.note(READ)  # of the ends of the groups
            return args[0].new_empty(len(args[0]), args[1].shape[-1])
        if func is _aten.rms_norm.default:
            self.note("rms_norm")
            return torch.empty_like(args[0])
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        return result

    def _count(self, func, args, kwargs, result):
        name = func.overloadpacket.__name__
        source = {"copy_": args[1:2], "_to_copy": args[:1]}.get(name, ())
        if source and isinstance(source[0], torch.Tensor):
            copied_from, copied_to = source[0].device.type, result.device.type
            if copied_from != copied_to:
                waits = TO_DEVICE if copied_to == "cuda" else TO_HOST
                behind = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
                return self.note(f"{name} behind the host" if behind else waits)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        on_device = any(isinstance(t, torch.Tensor) and t.is_cuda for t in outputs)
        on_device |= func.namespace == "dschat"  # may return nothing
        if on_device and not func.is_view and name not in _FREE:
            self.note(name)
        return None

    @staticmethod
    def _is_fast(*operands):
        """Whether they are of torch's kernels for Hopper and Blackwell."""
        is_bf16 = all(x.dtype == torch.bfloat16 for x in operands)
        return is_bf16 and torch.cuda.get_device_capability()[0] in (9, 10)

    def _attention(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        self.note("scaled_dot_product_attention")
        assert q.device == k.device == v.device == DEVICE
        assert q.dtype == k.dtype == v.dtype
        assert k.shape == v.shape
        assert options.get("enable_gqa") or q.shape[1] == k.shape[1]
        if attn_mask is not None:
            assert not is_causal
            assert attn_mask.dtype == q.dtype  # CUDA takes no other, unlike a CPU
            torch.broadcast_shapes(attn_mask.shape, (*q.shape[:-1], k.shape[-2]))
        # As flash attention lays it out: heads of a token are adjacent.
        return torch.empty_like(q.transpose(1, 2)).transpose(1, 2)


def _filled(shape, value):
    return [_filled(shape[1:], value) for _ in range(shape[0])] if shape else value


class _Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1.0


@contextlib.contextmanager
def fake_cuda(capability=(9, 0)):
    """A scope with a fake CUDA device; yields its `Watch`. Skips the test without a compiler."""
    if _guard() is None:
        pytest.skip("needs g++ for a CUDA device guard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)  # a CUDA build would look for a GPU
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        # Torch's operators, unless a test asks for kernels: Triton may be missing here.
        patch.setenv(VARIABLE, os.environ.get(VARIABLE, "0"))
        watch = Watch()
        patch.setattr(FakeTensor, "tolist", watch.tolist)
        with FakeTensorMode() as watch.mode, watch:
            yield watch


def fake_weights(config, dtype, adjacent=False):
    """The parameters of ``config``'s module by name, each an allocation or all ``adjacent``.

    As in DeepSpeed's flat buffers, matrices lie before vectors.
    """
    with _disable_current_modes(), torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
        named = [*module.named_parameters(), *saved(module)]
    parameters = dict(sorted(named, key=lambda item: item[1].dim() == 1))
    sizes = [p.numel() for p in parameters.values()]
    if adjacent:
        stored = torch.empty(sum(sizes), dtype=dtype, device=DEVICE).split(sizes)
    else:
        stored = [torch.empty(size, dtype=dtype, device=DEVICE) for size in sizes]
    return {
        name: part.view(p.shape) for (name, p), part in zip(parameters.items(), stored, strict=True)
    }


def fake_engine(watch, config, dtype=torch.bfloat16, borrowed="", in_module=False, **knobs):
    """An engine on the fake device whose decode steps are captured by ``watch``.

    ``borrowed``: the weights are read in place, each an allocation ("parts") or all "adjacent".
    ``in_module``: it runs transformers' own module.
    """
    knobs = {"max_num_seqs": 8, "max_seq_len": 64, "kv_cache_gib": 1e3} | knobs
    module = None
    with _disable_current_modes(), contextlib.suppress(UnsupportedModel):
        model_spec(config)  # found by a trial on the CPU, once
    if in_module:
        with DEVICE:
            module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    made = InferenceEngine(config, dtype, DEVICE, EngineConfig(**knobs), module=module)
    if made.captures:
        made._capture = watch.capture
    if in_module:
        with warnings.catch_warnings(action="ignore"):  # fake tensors have no addresses
            made.weights.use()
        return made
    tensors = fake_weights(config, dtype, borrowed == "adjacent")
    if borrowed:
        made.weights.borrow(tensors)
    else:
        made.weights.load(tensors.items())
    return made
