"""Holds the decoder's weights: this rank's share of a stream of checkpoint tensors.

A load writes every weight exactly once, else it raises an error that names the tensor. Queries,
keys and values are fused into one matrix, gate and up into another. A tensor-parallel rank keeps
its rows (of qkv, up, embedding and head) or columns (of out and down), and so of every expert.
`Weights.borrow` copies nothing: the decoder then reads the tensors of the module in training.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from dschat.config import UserError
from dschat.distributed import RankGroup
from dschat.inference.model.borrowed import BorrowedLinear, BorrowedPart
from dschat.inference.model.linear import Linear, SideProduct, fastest_backends
from dschat.inference.model.spec import (
    ModelSpec,
    Share,
    WeightSource,
    check_shares,
    is_expert,
    kind_of,
)
from dschat.models.cpu_matmul import Backend, Shape

AnyLinear = Linear | BorrowedLinear
_ALIGNED_RANK = 8  # a grouped product reads rows of 16 bytes
LoraFactors = tuple[str, Tensor, Tensor, float]  # weight's name, A (r, in), B (out, r), scaling


class WeightMismatch(UserError):
    """The tensors do not match the model; the message names one."""


class Weights:
    """Linears by name (``layers.0.qkv``) and other tensors by name (``layers.0.norm1.weight``).

    An expert's linears end in its number (``layers.0.experts.up.3``). On a device their weights are
    slices of one tensor, which has the name without it.

    Raises:
        UserError: the size of ``group`` does not divide the heads or the MLP.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, group: RankGroup
    ) -> None:
        check_shares(spec, group.size)
        self.spec, self.dtype, self.device, self.group = spec, dtype, device, group
        self._share = Share(spec, group.rank, group.size)
        self.num_heads = spec.num_heads // group.size
        self.num_kv_heads = spec.num_kv_heads // group.size
        self.intermediate_size = spec.intermediate_size // group.size
        self.vocab_size = self._share.shape("embed")[0]
        self.linears: dict[str, AnyLinear] = {}
        self.tensors: dict[str, Tensor] = {}
        self._sources = list(spec.layer_sources())
        self._by_name: dict[str, list[WeightSource]] = defaultdict(list)
        for source in self._sources:
            self._by_name[source.name].append(source)
        self._parts: dict[str, set[str]] = defaultdict(set)  # target -> parts that fill it
        for source in self._sources:
            self._parts[source.target].add(source.part)
        self._stacks = device.type != "cpu"
        self._borrowed = False
        self.version = 0  # changes when tensors and linears are replaced, not when written in place
        self.loads = 0  # changes with every value that is loaded
        self.names = frozenset(self._by_name)

    def _create(self) -> None:
        """Create all tensors and linears, without their values."""
        if self.tensors:
            return
        self.version += 1
        self._add_ones()
        for source in self._sources:
            base = source.target.rpartition(".")[0]
            shape = self._share.linear_shape(base)
            if shape is not None and base not in self.linears:
                self.linears[base] = self._new_linear(base, shape)
            elif shape is None and source.target not in self.tensors:
                dtype = torch.float32 if kind_of(base) == "correction" else self.dtype
                zeros = torch.zeros(self._share.shape(base), dtype=dtype, device=self.device)
                self.tensors[source.target] = zeros

    def _add_ones(self) -> None:
        """Weights of norms that have none."""
        for base in self.spec.bare_norms:
            shape = self._share.shape(base)
            self.tensors[f"{base}.weight"] = torch.ones(shape, dtype=self.dtype, device=self.device)

    def _new_linear(self, base: str, shape: Shape) -> Linear:
        has_bias = f"{base}.bias" in self._parts
        is_stacked = self._stacks and is_expert(base)
        shared = self.tensors["embed.weight"] if self._head_is_shared(base) else None
        shared = self._slice_of_stack(f"{base}.weight", shape) if is_stacked else shared
        how: tuple[torch.dtype, torch.device, Backend]
        how = self.dtype, self.device, self.backends[shape]
        if kind_of(base) == "router" and self.spec.experts and self.spec.experts.precise:
            how = torch.float32, self.device, "plain"
        linear = Linear(shape, has_bias, *how, shared)
        if is_stacked and has_bias:
            linear.bias = self._slice_of_stack(f"{base}.bias", shape[:1])
        return linear

    def _slice_of_stack(self, target: str, shape: tuple[int, ...]) -> Tensor:
        """An expert's part of the tensor that has all experts' ``target``."""
        base, _, suffix = target.rpartition(".")
        name, _, number = base.rpartition(".")
        assert self.spec.experts is not None
        if f"{name}.{suffix}" not in self.tensors:
            shape = (self.spec.experts.count, *shape)
            zeros = torch.zeros(shape, dtype=self.dtype, device=self.device)
            self.tensors[f"{name}.{suffix}"] = zeros
        return self.tensors[f"{name}.{suffix}"][int(number)]

    def _head_is_shared(self, base: str) -> bool:
        """Whether the head is the tied embedding; a packing back end stores it in both forms."""
        return base == "head" and self.spec.tied

    @cached_property
    def backends(self) -> dict[Shape, Backend]:
        """Backend of the linear layers of each shape (out, in)."""
        shapes = (self._share.linear_shape(s.target.rpartition(".")[0]) for s in self._sources)
        return fastest_backends(filter(None, shapes), self.dtype, self.device)

    def _is_whole(self, source: WeightSource) -> bool:
        """Whether the checkpoint's tensor is the whole target: nothing to slice or fuse."""
        return self.group.size == 1 and not source.part and not source.interleaved

    def _owned(self, base: str) -> Linear | None:
        """The linear layer ``base``; None if it is another kind of tensor."""
        linear = self.linears.get(base)
        assert not isinstance(linear, BorrowedLinear)
        return linear

    def _write(self, source: WeightSource, full: Tensor) -> None:
        base, _, suffix = source.target.rpartition(".")
        kind = kind_of(base)
        linear = self._owned(base)
        if linear is None:
            target = self.tensors[source.target]
        elif suffix == "bias":
            assert linear.bias is not None
            target = linear.bias
        else:
            target = linear.open()
        if suffix == "weight" and linear is not None:
            full = self._share.local_columns(source, full)
        if suffix == "bias" and kind in ("out", "down", "shared_down") and self.group.rank > 0:
            return  # partial sums are added up: only rank 0 adds the bias
        for first, rows in self._share.local_rows(source, full):
            target[first : first + rows.shape[0]].copy_(rows)

    # -- loading -----------------------------------------------------------------------------------

    # NOTE: a stream may yield live parameters, and the caller may be in inference mode. The copies
    # must neither require gradients nor be writable in inference mode only.
    @torch.inference_mode(False)
    @torch.no_grad()
    def load(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a whole stream of (Hugging Face name, tensor).

        Raises:
            WeightMismatch: a tensor is missing, unknown, of another shape, or repeated.
        """
        assert not self._borrowed, "borrowed weights cannot be written"
        self.loads += 1
        self._create()
        waiting = {target: parts - {""} for target, parts in self._parts.items()}
        seen: set[str] = set()
        for name, tensor in stream:
            if name in seen:
                raise WeightMismatch(f"the weights contain {name} twice")
            seen.add(name)
            if self._is_tied_head(name):
                continue
            self._check_tensor(name, tuple(tensor.shape))
            for source in self._by_name[name]:
                part = _own_part(source, tensor)
                waiting[source.target].discard(source.part)
                base, _, suffix = source.target.rpartition(".")
                linear = self._owned(base) if suffix == "weight" else None
                if linear is not None and self._head_is_shared(base):
                    linear.seal()
                elif linear is not None and linear.packs and self._is_whole(source):
                    linear.pack(part)
                else:
                    self._write(source, part)
                    if linear is not None and not (source.part and waiting[source.target]):
                        linear.seal()
                del part
            del tensor  # NOTE: it may keep a whole bucket alive while the next one is gathered
        self._check_complete(seen)

    def check(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Raise the ``WeightMismatch`` that `load` would raise, before any weight is allocated."""
        seen = set()
        for name, shape in shapes:
            seen.add(name)
            if not self._is_tied_head(name):
                self._check_tensor(name, shape)
        self._check_complete(seen)

    def _is_tied_head(self, name: str) -> bool:
        """Whether ``name`` is a stored copy of a tied head."""
        return self.spec.tied and name not in self._by_name and name.endswith("lm_head.weight")

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._by_name:
            raise WeightMismatch(f"the weights contain {name}, which the model does not have")
        for source in self._by_name[name]:
            expected = self._share.full_shape(source)
            if shape != expected:
                raise WeightMismatch(
                    f"the weights contain {name} in shape {shape} instead of {expected}"
                )

    def _check_complete(self, seen: set[str]) -> None:
        replaced = {s.instead for s in self._sources if s.instead and s.name in seen}
        expected = {
            s.name for s in self._sources if bool(s.instead) == ((s.instead or s.name) in replaced)
        }
        if twice := sorted(replaced & seen):
            raise WeightMismatch(f"the weights contain {twice[0]} twice")
        missing = sorted(expected - seen)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise WeightMismatch(f"the weights lack {missing[0]}{more}")

    def borrow(self, tensors: Mapping[str, Tensor]) -> None:
        """Read ``tensors`` (by Hugging Face name) in place from now on, without a copy.

        Raises:
            WeightMismatch: one is missing.
        """
        assert self.group.size == 1, "a share of a weight cannot be borrowed"
        self._check_complete(set(tensors))
        self._borrowed = True
        self.version += 1
        self._add_ones()
        self.loads += 1
        parts: dict[str, dict[str, BorrowedPart]] = defaultdict(dict)
        biases: dict[tuple[str, str], Tensor] = {}
        # Biases come first.
        for source in sorted(self._sources, key=lambda s: s.target.endswith(".weight")):
            base, _, suffix = source.target.rpartition(".")
            if source.instead:
                continue
            tensor = tensors[source.name].detach()
            if self._stacks and source.index == 0:
                stack = base.rpartition(".")[0]
                whole = tensor.transpose(1, 2) if source.transposed else tensor
                self.tensors[f"{stack}.{suffix}"] = whole
            tensor = _own_part(source, tensor)
            if self._share.linear_shape(base) is None:
                self.tensors[source.target] = tensor
            elif suffix == "bias":
                biases[base, source.part] = tensor
            else:
                bias = biases.get((base, source.part))
                parts[base][source.part] = BorrowedPart(tensor, bias, source.interleaved)
        self.linears.update({base: BorrowedLinear(named) for base, named in parts.items()})

    def fused_names(self) -> list[list[str]]:
        """Names of the checkpoint tensors that a product can read as one if they are adjacent."""
        groups: dict[str, list[str]] = defaultdict(list)
        for source in self._sources:
            if source.part and not source.instead:
                groups[source.target].append(source.name)
        return list(groups.values())

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_adapters(self, adapters: Iterable[LoraFactors]) -> None:
        """Replace all LoRA side products by those of ``adapters``.

        Raises:
            WeightMismatch: an adapter's weight is not a linear layer of the decoder, or repeated.
        """
        self.loads += 1
        factors: dict[str, list[tuple[WeightSource, Tensor, Tensor]]] = defaultdict(list)
        seen: set[str] = set()
        for name, a, b, scaling in adapters:
            if name in seen:
                raise WeightMismatch(f"the adapters contain {name} twice")
            seen.add(name)
            if name not in self._by_name:
                raise WeightMismatch(f"the adapters contain {name}, which the model does not have")
            b = b.float() * scaling
            for source in self._by_name[name]:
                base = source.target.rpartition(".")[0]
                if kind_of(base) == "mixer":
                    continue  # transformers reads the weight itself, past an adapter
                if base not in self.linears:
                    raise WeightMismatch(f"no side product can be added to {name}; merge it")
                factors[base].append((source, *self._share.factors(source, a, b)))
        for linear in self.linears.values():
            if linear.side is not None:
                linear.side.b.zero_()
        for base, items in factors.items():
            shape = self._share.linear_shape(base)
            assert shape is not None
            self._set_side(base, shape, items)

    def _set_side(
        self, base: str, shape: tuple[int, int], items: list[tuple[WeightSource, Tensor, Tensor]]
    ) -> None:
        """Join the factors of a fused weight into one pair: A stacked, B block-diagonal."""
        linear, rank = self.linears[base], sum(a.shape[0] for _, a, _ in items)
        is_stacked = self._stacks and is_expert(base)
        if is_stacked:
            rank = -(-rank // _ALIGNED_RANK) * _ALIGNED_RANK
        if linear.side is None:
            self.version += 1
            shapes = {"lora_a": (rank, shape[1]), "lora_b": (shape[0], rank)}
            linear.side = SideProduct(
                *(
                    self._slice_of_stack(f"{base}.{name}", size)
                    if is_stacked
                    else torch.zeros(size, dtype=self.dtype, device=self.device)
                    for name, size in shapes.items()
                )
            )
        assert linear.side.a.shape[0] == rank, "the rank of adapters cannot change"
        first = 0
        for source, a, b in items:
            last = first + a.shape[0]
            linear.side.a[first:last].copy_(self._share.local_columns(source, a))
            placed = self._share.local_rows(source, b)
            if isinstance(linear, BorrowedLinear):  # rows are computed as they are stored
                placed = iter([(linear.first_row[source.part], b)])
            for row, rows in placed:
                linear.side.b[row : row + rows.shape[0], first:last].copy_(rows)
            first = last

    # -- size --------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Free the weights until the next `load`; borrowed ones are left alone."""
        if self._borrowed:
            return
        for linear in self.linears.values():  # NOTE: a decoder still holds the objects
            assert isinstance(linear, Linear)
            linear.drop()
        self.tensors.clear()
        self.linears.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's weights; borrowed ones are not counted."""
        tensors = {} if self._borrowed else self.tensors
        # Linears count adapters, and biases, which of experts are parts of one tensor.
        own = (
            tensor.nbytes
            for name, tensor in tensors.items()
            if ".lora_" not in name and f"{name.removesuffix('.bias')}.0" not in self.linears
        )
        return sum(own) + sum(w.nbytes for w in self.linears.values())


def _own_part(source: WeightSource, tensor: Tensor) -> Tensor:
    """What ``source`` takes of a checkpoint's tensor: a matrix (out, in), or a vector."""
    part = tensor if source.index is None else tensor[source.index]
    return part.T if source.transposed and part.dim() == 2 else part
