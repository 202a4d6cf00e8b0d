"""What is known of a model while its roles are found: the calls of its `Trial`, and the sources and
facts of its `ModelSpec` so far; and comparisons.

Shapes: T tokens.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from dschat.inference.model.module_parts import rms_norms
from dschat.inference.model.spec import MixerSpec, WeightSource
from dschat.inference.model.trial import Attended, Call, Trial


class NotFound(Exception):
    """Why the decoder cannot run a model."""


def need(condition: Any, reason: str) -> None:
    if not condition:
        raise NotFound(reason)


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Whether they differ by roundings of the largest value."""
    if actual.shape != expected.shape:
        return False
    return bool((actual - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-7)


def ratio(actual: Tensor, expected: Tensor) -> float | None:
    """r with actual = r * expected; None if there is none."""
    r = float((actual * expected).sum() / expected.square().sum())
    r = 1.0 if abs(r - 1) < 1e-5 else r
    return r if is_close(r * expected, actual) else None


class Findings:
    """See above; ``sources`` and ``facts`` grow."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.config = trial, trial.model.config
        self.names = {module: name for name, module in trial.model.named_modules()}
        self.rms = {norm.module: norm for norm in rms_norms(trial.model)}
        self.tensors = trial.model.state_dict(keep_vars=True)
        self.attended = [call for call in trial.calls if isinstance(call, Attended)]
        self.head_size = self.attended[0].q.shape[2] if self.attended else 0
        self.sources: list[WeightSource] = []
        self.bare_norms: set[str] = set()
        self.facts: dict[str, Any] = {}
        self.mixers: dict[int, MixerSpec] = {}  # by layer

    # -- what was called ---------------------------------------------------------------------------

    def module(self, name: str) -> Any:
        return self.trial.model.get_submodule(name)

    def weight_of(self, module: Any) -> str:
        return f"{self.names[module]}.weight"

    def called(self, name: str) -> Call:
        """The last call of the module ``name``."""
        calls = (c for c in reversed(self.trial.calls) if isinstance(c, Call) and c.name == name)
        return next(calls)

    def rows(self, x: Tensor) -> Tensor:
        """(T, ...) of a tensor with a row for each token."""
        return x.reshape(len(self.trial.ids), -1)

    def read(self, call: Call) -> Tensor:
        return self.rows(call.inputs[0])

    def result(self, call: Call) -> Tensor:
        return self.rows(call.output)

    def is_norm(self, module: Any) -> bool:
        weight = module._parameters.get("weight")
        is_named = "norm" in type(module).__name__.lower() and not [*module.children()]
        is_known = module in self.rms or isinstance(module, nn.LayerNorm)
        return is_known or (is_named and (weight is None or weight.dim() == 1))

    # -- what was found ----------------------------------------------------------------------------

    def fact(self, **facts: Any) -> None:
        """Fields of the spec, which all layers share."""
        for name, value in facts.items():
            before = self.facts.setdefault(name, value)
            need(before == value, f"layers differ in {name}")

    def take(self, module: Any, target: str, part: str = "", interleaved: bool = False) -> None:
        """The weight and bias of ``module`` fill ``target``."""
        name, transposed = self.names[module], isinstance(module, Conv1D)
        for suffix in ("weight", "bias"):
            if getattr(module, suffix, None) is not None:
                names = f"{name}.{suffix}", f"{target}.{suffix}"
                self.sources.append(WeightSource(*names, part, transposed, interleaved))

    def take_norm(self, call: Call, target: str, x: Tensor, y: Tensor) -> None:
        """``call``'s module computes ``y`` from ``x`` as the decoder's norms do."""
        module, name = call.module, call.name
        weight, bias = (getattr(module, part, None) for part in ("weight", "bias"))
        named = (getattr(module, key, None) for key in ("eps", "variance_epsilon"))
        eps: float = next(filter(None, named), 0.0 if weight is not None else 1e-5)
        if module in self.rms:
            norm = self.rms[module]
            self.fact(norm="rmsnorm", norm_eps=norm.eps, norm_offset=norm.offset)
        elif weight is None:
            is_rms = is_close(F.rms_norm(x, x.shape[-1:], None, eps), y)
            is_known = is_rms or is_close(F.layer_norm(x, x.shape[-1:], None, None, eps), y)
            need(is_known, f"{name} is no known norm")
            self.fact(norm="rmsnorm" if is_rms else "layernorm", norm_eps=eps, norm_offset=0.0)
            self.bare_norms.add(target)
            return
        else:
            offsets = (
                offset
                for offset in (0.0, 1.0)
                if is_close(F.layer_norm(x, weight.shape, weight + offset, bias, eps), y)
            )
            offset = next(offsets, None)
            need(offset is not None, f"{name} is no known norm")
            self.fact(norm="layernorm", norm_eps=eps, norm_offset=offset)
        self.take(module, target)

    def activations(self) -> list[str]:
        """Names of the config, and one that modules compute without a name."""
        values = self.config.to_dict().values()
        return sorted({v for v in values if isinstance(v, str) and v in ACT2FN} | {"silu"})

    def share(self, start: Tensor, added: Tensor, total: Tensor) -> float | None:
        """r with total = start + r * added; None if there is none."""
        # MiniCPM divides by the root of its layers.
        depth = len(self.module(self.trial.layers)) ** -0.5
        given = [v * depth for v in self.config.to_dict().values() if isinstance(v, float)]
        r = self.exact(float(((total - start) * added).sum() / added.square().sum()), *given)
        return r if is_close(start + r * added, total) else None

    def exact(self, value: float, *others: float) -> float:
        """A number of the config, or its inverse, that ``value`` is up to rounding."""
        given = [v for v in self.config.to_dict().values() if isinstance(v, float) and v]
        known = (1.0, *others, *given, *(1 / v for v in given))
        return next((k for k in known if abs(k / value - 1) < 1e-4), value)
