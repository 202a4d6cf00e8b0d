"""Holds the decoder's weights: this rank's share of a stream of checkpoint tensors.

A load writes every weight exactly once, else it raises an error that names the tensor. Queries,
keys and values are fused into one matrix, gate and up into another. A tensor-parallel rank keeps
its rows (of qkv, up, embedding and head) or columns (of out and down). `Weights.borrow` copies
nothing: the decoder then reads the tensors of the module in training.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from dschat.config import UserError
from dschat.distributed import RankGroup
from dschat.inference.model.architectures import ModelSpec, WeightSource, check_shares
from dschat.inference.model.borrowed import BorrowedLinear, BorrowedPart
from dschat.inference.model.linear import Linear, SideProduct, fastest_backends
from dschat.models.cpu_matmul import Backend, Shape

AnyLinear = Linear | BorrowedLinear
DECODE_ROWS = 16  # of the products that are timed
LoraFactors = tuple[str, Tensor, Tensor, float]  # weight's name, A (r, in), B (out, r), scaling


class WeightMismatch(UserError):
    """The tensors do not match the model; the message names one."""


class Weights:
    """Linears by name (``layers.0.qkv``) and other tensors by name (``layers.0.norm1.weight``).

    Raises:
        UserError: the size of ``group`` does not divide the heads or the MLP.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup,
    ) -> None:
        check_shares(spec, group.size)
        self.spec, self.dtype, self.device, self.group = spec, dtype, device, group
        self.num_heads = spec.num_heads // group.size
        self.num_kv_heads = spec.num_kv_heads // group.size
        self.intermediate_size = spec.intermediate_size // group.size
        self.vocab_size = -(-spec.vocab_size // group.size)  # the last rank's may be padding
        self.linears: dict[str, AnyLinear] = {}
        self.tensors: dict[str, Tensor] = {}
        self._sources = list(spec.layer_sources())
        self._by_name: dict[str, list[WeightSource]] = defaultdict(list)
        for source in self._sources:
            self._by_name[source.name].append(source)
        self._parts: dict[str, set[str]] = defaultdict(set)  # target -> parts that fill it
        for source in self._sources:
            self._parts[source.target].add(source.part)
        self._borrowed = False
        self.version = 0  # changes when tensors and linears are replaced, not when written in place
        self.loads = 0  # changes with every value that is loaded
        self.names = frozenset(self._by_name)

    # -- shapes ------------------------------------------------------------------------------------

    def _linear_shape(self, name: str) -> tuple[int, int] | None:
        """(out, in) of this rank's share; None if ``name`` is not a linear layer."""
        spec, size = self.spec, self.spec.hidden_size
        return {
            "qkv": ((self.num_heads + 2 * self.num_kv_heads) * spec.head_size, size),
            "out": (size, self.num_heads * spec.head_size),
            "up": (self.intermediate_size * (2 if spec.gated else 1), size),
            "down": (size, self.intermediate_size),
            "head": (self.vocab_size, spec.embedding_size),
            "project_in": (size, spec.embedding_size),
            "project_out": (spec.embedding_size, size),
        }.get(name.rpartition(".")[2])

    def _full_shape(self, source: WeightSource) -> tuple[int, ...]:
        """Shape of the whole tensor, as the checkpoint stores it."""
        spec, base = self.spec, source.target.rpartition(".")[0]
        kind = base.rpartition(".")[2]
        if source.target == "embed.weight":
            return (spec.vocab_size, spec.embedding_size)
        if source.target == "positions.weight":
            return (spec.num_positions, spec.hidden_size)
        shape = self._linear_shape(base)
        if shape is None:
            return (spec.head_size if kind in ("q_norm", "k_norm") else spec.hidden_size,)
        rows = {
            ("qkv", "q"): spec.num_heads * spec.head_size,
            ("qkv", "k"): spec.num_kv_heads * spec.head_size,
            ("qkv", "v"): spec.num_kv_heads * spec.head_size,
            ("qkv", ""): (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size,
            ("up", ""): spec.intermediate_size,
            ("up", "gate"): spec.intermediate_size,
            ("up", "up"): spec.intermediate_size,
            ("head", ""): spec.vocab_size,
        }.get((kind, source.part), shape[0])
        columns = {
            "out": spec.num_heads * spec.head_size,
            "down": spec.intermediate_size,
        }.get(kind, shape[1])
        if source.target.endswith(".bias"):
            return (rows,)
        return (columns, rows) if source.transposed else (rows, columns)

    def _create(self) -> None:
        """Create all tensors and linears, without their values."""
        if self.tensors:
            return
        self.version += 1
        for source in self._sources:
            base, _, kind = source.target.rpartition(".")
            shape = self._linear_shape(base)
            if shape is None:
                full = self._full_shape(source)
                if source.target == "embed.weight":
                    full = (self.vocab_size, full[1])
                if source.target not in self.tensors:
                    empty = torch.zeros(full, dtype=self.dtype, device=self.device)
                    self.tensors[source.target] = empty
            elif base not in self.linears:
                has_bias = f"{base}.bias" in self._parts
                shared = self.tensors["embed.weight"] if self._head_is_shared(base) else None
                self.linears[base] = Linear(
                    shape,
                    has_bias,
                    self.dtype,
                    self.device,
                    self.backends[shape],
                    shared,
                )

    def _head_is_shared(self, base: str) -> bool:
        """Whether the head is the tied embedding; a packing back end stores it in both forms."""
        return base == "head" and self.spec.tied

    @cached_property
    def backends(self) -> dict[Shape, Backend]:
        """Backend of the linear layers of each shape (out, in)."""
        shapes = (self._linear_shape(s.target.rpartition(".")[0]) for s in self._sources)
        return fastest_backends(filter(None, shapes), DECODE_ROWS, self.dtype, self.device)

    # -- this rank's share -------------------------------------------------------------------------

    def _rank_slice(self, rows: Tensor, count: int) -> Tensor:
        return rows[self.group.rank * count : (self.group.rank + 1) * count]

    def _local_rows(self, source: WeightSource, full: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields (first row in the target, rows): this rank's share of the rows of ``full``."""
        kind = source.target.rpartition(".")[0].rpartition(".")[2]
        spec = self.spec
        q, kv = self.num_heads * spec.head_size, self.num_kv_heads * spec.head_size
        if kind == "qkv" and not source.part:
            if source.interleaved:
                per_head = full.view(spec.num_heads, 3, spec.head_size, *full.shape[1:])
                parts = [p.reshape(-1, *full.shape[1:]) for p in per_head.unbind(1)]
            else:
                whole = spec.num_kv_heads * spec.head_size
                parts = full.split([spec.num_heads * spec.head_size, whole, whole])
            for first, count, part in zip((0, q, q + kv), (q, kv, kv), parts, strict=True):
                yield first, self._rank_slice(part, count)
        elif kind == "qkv":
            first = {"q": 0, "k": q, "v": q + kv}[source.part]
            yield first, self._rank_slice(full, q if source.part == "q" else kv)
        elif kind == "up":
            first = self.intermediate_size if source.part == "up" else 0
            yield first, self._rank_slice(full, self.intermediate_size)
        elif kind in ("head", "embed"):
            yield 0, self._rank_slice(full, self.vocab_size)
        else:
            yield 0, full

    def _local_columns(self, source: WeightSource, matrix: Tensor) -> Tensor:
        """``matrix`` (..., in) cut to this rank's inputs."""
        kind = source.target.rpartition(".")[0].rpartition(".")[2]
        count = {"out": self.num_heads * self.spec.head_size, "down": self.intermediate_size}
        if kind not in count:
            return matrix
        return self._rank_slice(matrix.T, count[kind]).T

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
        kind = base.rpartition(".")[2]
        linear = self._owned(base)
        if linear is None:
            target = self.tensors[source.target]
        elif suffix == "bias":
            assert linear.bias is not None
            target = linear.bias
        else:
            target = linear.open()
        if source.transposed and suffix == "weight":
            full = full.T
        if suffix == "weight" and linear is not None:
            full = self._local_columns(source, full)
        if suffix == "bias" and kind in ("out", "down") and self.group.rank > 0:
            return  # partial sums are added up: only rank 0 adds the bias
        for first, rows in self._local_rows(source, full):
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
        waiting = {target: set(parts) for target, parts in self._parts.items()}
        seen: set[str] = set()
        for name, tensor in stream:
            if name in seen:
                raise WeightMismatch(f"the weights contain {name} twice")
            seen.add(name)
            if self._is_tied_head(name):
                continue
            self._check_tensor(name, tuple(tensor.shape))
            for source in self._by_name[name]:
                waiting[source.target].discard(source.part)
                base, _, suffix = source.target.rpartition(".")
                linear = self._owned(base) if suffix == "weight" else None
                if linear is not None and self._head_is_shared(base):
                    linear.seal()
                elif linear is not None and linear.packs and self._is_whole(source):
                    linear.pack(tensor.T if source.transposed else tensor)
                else:
                    self._write(source, tensor)
                    if linear is not None and not waiting[source.target]:
                        linear.seal()
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
            expected = self._full_shape(source)
            if shape != expected:
                raise WeightMismatch(
                    f"the weights contain {name} in shape {shape} instead of {expected}"
                )

    def _check_complete(self, seen: set[str]) -> None:
        missing = sorted(set(self._by_name) - seen)
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
        self.loads += 1
        parts: dict[str, dict[str, BorrowedPart]] = defaultdict(dict)
        for source in self._sources:
            base, _, suffix = source.target.rpartition(".")
            if self._linear_shape(base) is None:
                self.tensors[source.target] = tensors[source.name]
            elif suffix == "weight":
                bias_name = f"{source.name.removesuffix('weight')}bias"
                bias = tensors[bias_name].detach() if f"{base}.bias" in self._parts else None
                weight = tensors[source.name].detach()
                part = BorrowedPart(weight, bias, source.transposed, source.interleaved)
                parts[base][source.part] = part
        self.linears.update({base: BorrowedLinear(named) for base, named in parts.items()})

    def fused_names(self) -> list[list[str]]:
        """Names of the checkpoint tensors that a product can read as one if they are adjacent."""
        groups: dict[str, list[str]] = defaultdict(list)
        for source in self._sources:
            if source.part:
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
            for source in self._by_name[name]:
                base = source.target.rpartition(".")[0]
                if base not in self.linears:
                    raise WeightMismatch(f"no side product can be added to {name}; merge it")
                factors[base].append((source, a, b.float() * scaling))
        for linear in self.linears.values():
            if linear.side is not None:
                linear.side.b.zero_()
        for base, items in factors.items():
            shape = self._linear_shape(base)
            assert shape is not None
            self._set_side(self.linears[base], shape, items)

    def _set_side(
        self,
        linear: AnyLinear,
        shape: tuple[int, int],
        items: list[tuple[WeightSource, Tensor, Tensor]],
    ) -> None:
        """Join the factors of a fused weight into one pair: A stacked, B block-diagonal."""
        rank = sum(a.shape[0] for _, a, _ in items)
        if linear.side is None:
            self.version += 1
            linear.side = SideProduct(
                torch.zeros(rank, shape[1], dtype=self.dtype, device=self.device),
                torch.zeros(shape[0], rank, dtype=self.dtype, device=self.device),
            )
        assert linear.side.a.shape[0] == rank, "the rank of adapters cannot change"
        first = 0
        for source, a, b in items:
            last = first + a.shape[0]
            linear.side.a[first:last].copy_(self._local_columns(source, a))
            placed = self._local_rows(source, b)
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
        tensors = [] if self._borrowed else self.tensors.values()
        return sum(t.nbytes for t in tensors) + sum(w.nbytes for w in self.linears.values())
