"""The decoder's weights: a stream of checkpoint tensors in, this rank's share of each, in place.

Every destination is written exactly once a load, or it is an error that names the tensor. Queries,
keys and values are fused into one matrix, gate and up into another; a tensor-parallel rank keeps
the rows (of qkv, up, embedding and head) or columns (of out and down) that are its own. Or nothing
is copied, and the decoder reads somebody else's storage. It must not know where a stream comes
from, nor how the decoder computes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from dschat.config import UserError
from dschat.distributed import Group
from dschat.inference.model.architectures import ModelSpec, WeightSource
from dschat.inference.model.linear import (
    BorrowedLinear,
    BorrowedPart,
    Linear,
    SideProduct,
    best_backend,
)

Adapter = tuple[str, Tensor, Tensor, float]  # weight's name, A (r, in), B (out, r), scaling


class WeightMismatch(UserError):
    """The tensors are not those of the model; the message names one."""


def check_shares(spec: ModelSpec, size: int) -> None:
    """Raise ``UserError`` unless ``size`` ranks can share the heads and the MLP evenly."""
    for what, count in (
        ("attention heads", spec.num_heads),
        ("key-value heads", spec.num_kv_heads),
        ("MLP columns", spec.intermediate_size),
    ):
        if count % size:
            raise UserError(
                f"--inference_tp_size {size} does not divide the model's {count} {what}"
            )


class Weights:
    """Linears by name (``layers.0.qkv``) and other tensors by name (``layers.0.norm1.weight``).

    Raises:
        UserError: ``group`` cannot share the heads or the MLP.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        keep_panels: bool = False,
    ) -> None:
        check_shares(spec, group.size)
        self.spec, self.dtype, self.device, self.group = spec, dtype, device, group
        self.num_heads = spec.num_heads // group.size
        self.num_kv_heads = spec.num_kv_heads // group.size
        self.intermediate_size = spec.intermediate_size // group.size
        self.vocab_size = -(-spec.vocab_size // group.size)  # the last rank's may be padding
        self.linears: dict[str, Linear | BorrowedLinear] = {}
        self.tensors: dict[str, Tensor] = {}
        self.backend = best_backend(device, dtype)
        self.has_panels = keep_panels  # see small_step
        self._sources = list(spec.layer_sources())
        self._by_name: dict[str, list[WeightSource]] = defaultdict(list)
        for source in self._sources:
            self._by_name[source.name].append(source)
        self._parts: dict[str, set[str]] = defaultdict(set)  # target -> parts that fill it
        for source in self._sources:
            self._parts[source.target].add(source.part)
        self._borrowed = False
        self.version = 0  # changes when tensors and linears are other objects than before
        self.names = frozenset(self._by_name)

    # -- what there is -----------------------------------------------------------------------------

    def _linear_shape(self, name: str) -> tuple[int, int] | None:
        """(out, in) of this rank's share; None for what is no matrix product."""
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
        """Of the whole tensor, as the checkpoint stores it."""
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
        """Places for everything, still empty."""
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
                    self.backend,
                    shared,
                    self.has_panels,
                )

    def _head_is_shared(self, base: str) -> bool:
        """Whether the head is the embedding: one tensor, of which packing makes another form."""
        return base == "head" and self.spec.tied

    # -- this rank's share -------------------------------------------------------------------------

    def _rank_slice(self, rows: Tensor, count: int) -> Tensor:
        return rows[self.group.rank * count : (self.group.rank + 1) * count]

    def _local_rows(self, source: WeightSource, full: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of this rank's share of ``full``, whose first dimension is rows."""
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
        """``matrix`` (..., in) cut to the inputs this rank has."""
        kind = source.target.rpartition(".")[0].rpartition(".")[2]
        count = {"out": self.num_heads * self.spec.head_size, "down": self.intermediate_size}
        if kind not in count:
            return matrix
        return self._rank_slice(matrix.T, count[kind]).T

    def _is_whole(self, source: WeightSource) -> bool:
        """Whether the checkpoint's tensor is this rank's whole matrix: nothing to cut or join."""
        return self.group.size == 1 and not source.part and not source.interleaved

    def _write(self, source: WeightSource, full: Tensor) -> None:
        base, _, suffix = source.target.rpartition(".")
        kind = base.rpartition(".")[2]
        linear = self.linears.get(base)
        if linear is None:
            place = self.tensors[source.target]
        elif suffix == "bias":
            place = linear.bias
        else:
            place = linear.open()
        if source.transposed and suffix == "weight":
            full = full.T
        if suffix == "weight" and linear is not None:
            full = self._local_columns(source, full)
        if suffix == "bias" and kind in ("out", "down") and self.group.rank > 0:
            return  # partial sums are added up: the bias belongs to one of them
        for first, rows in self._local_rows(source, full):
            place[first : first + rows.shape[0]].copy_(rows)

    # -- the ways in -------------------------------------------------------------------------------

    # NOTE: a stream may bring live parameters, and the caller may be in inference mode. Neither may
    # leave its mark: a copy that needs gradients, or one that only inference mode may overwrite.
    @torch.inference_mode(False)
    @torch.no_grad()
    def load(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Read a whole stream of (Hugging Face name, tensor).

        Raises:
            WeightMismatch: a tensor is missing, unknown, of another shape, or came twice.
        """
        assert not self._borrowed, "these weights are somebody else's"
        self._create()
        waiting = {target: set(parts) for target, parts in self._parts.items()}
        seen: set[str] = set()
        for name, tensor in stream:
            if name in seen:
                raise WeightMismatch(f"the weights bring {name} twice")
            seen.add(name)
            if self._is_copy(name):
                continue
            self._check_tensor(name, tuple(tensor.shape))
            for source in self._by_name[name]:
                waiting[source.target].discard(source.part)
                base, _, suffix = source.target.rpartition(".")
                linear = self.linears.get(base) if suffix == "weight" else None
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
        """Raise ``WeightMismatch`` where `load` would, before there is a place for any weight."""
        seen = set()
        for name, shape in shapes:
            seen.add(name)
            if not self._is_copy(name):
                self._check_tensor(name, shape)
        self._check_complete(seen)

    def _is_copy(self, name: str) -> bool:
        """Whether this is the head again, which is the embedding."""
        return self.spec.tied and name not in self._by_name and name.endswith("lm_head.weight")

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._by_name:
            raise WeightMismatch(f"the weights bring {name}, which the model does not have")
        for source in self._by_name[name]:
            expected = self._full_shape(source)
            if shape != expected:
                raise WeightMismatch(
                    f"the weights bring {name} in shape {shape} instead of {expected}"
                )

    def _check_complete(self, seen: set[str]) -> None:
        missing = sorted(set(self._by_name) - seen)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise WeightMismatch(f"the weights lack {missing[0]}{more}")

    def borrow(self, tensors: Mapping[str, Tensor]) -> None:
        """Read ``tensors`` (by Hugging Face name) where they lie, from now on. Nothing is copied.

        Raises:
            WeightMismatch: one is missing.
        """
        assert self.group.size == 1, "a share of a weight cannot be borrowed"
        missing = sorted(set(self._by_name) - set(tensors))
        if missing:
            raise WeightMismatch(f"the weights lack {missing[0]}")
        self._borrowed = True
        self.version += 1
        grouped: dict[str, list[WeightSource]] = defaultdict(list)
        for source in self._sources:
            base, _, suffix = source.target.rpartition(".")
            if self._linear_shape(base) is None:
                self.tensors[source.target] = tensors[source.name]
            elif suffix == "weight":
                grouped[base].append(source)
        for base, sources in grouped.items():
            parts = []
            for source in sources:
                bias_name = f"{source.name.removesuffix('weight')}bias"
                bias = tensors[bias_name] if f"{base}.bias" in self._parts else None
                heads = self.spec.num_heads if source.interleaved else 0
                parts.append(BorrowedPart(tensors[source.name], bias, source.transposed, heads))
            self.linears[base] = BorrowedLinear(parts)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_adapters(self, adapters: Iterable[Adapter]) -> None:
        """Put LoRA factors beside their weights, in place of all those of the version before.

        Raises:
            WeightMismatch: an adapter's weight is no matrix product of the decoder, or came twice.
        """
        found: dict[str, list[tuple[WeightSource, Tensor, Tensor]]] = defaultdict(list)
        seen: set[str] = set()
        for name, a, b, scaling in adapters:
            if name in seen:
                raise WeightMismatch(f"the adapters bring {name} twice")
            seen.add(name)
            if name not in self._by_name:
                raise WeightMismatch(f"the adapters bring {name}, which the model does not have")
            for source in self._by_name[name]:
                base = source.target.rpartition(".")[0]
                if base not in self.linears:
                    raise WeightMismatch(f"no side product can be added to {name}; merge it")
                found[base].append((source, a, b.float() * scaling))
        for linear in self.linears.values():
            if linear.side is not None:
                linear.side.b.zero_()
        for base, items in found.items():
            self._set_side(self.linears[base], self._linear_shape(base), items)

    def _set_side(
        self,
        linear: Linear | BorrowedLinear,
        shape: tuple[int, int],
        items: list[tuple[WeightSource, Tensor, Tensor]],
    ) -> None:
        """One pair of factors for a fused weight: the A's stacked, the B's on a block diagonal."""
        rank = sum(a.shape[0] for _, a, _ in items)
        if linear.side is None:
            self.version += 1
            made = {"dtype": self.dtype, "device": self.device}
            linear.side = SideProduct(
                torch.zeros(rank, shape[1], **made), torch.zeros(shape[0], rank, **made)
            )
        assert linear.side.a.shape[0] == rank, "adapters keep their rank"
        first = 0
        for source, a, b in items:
            last = first + a.shape[0]
            linear.side.a[first:last].copy_(self._local_columns(source, a))
            for row, rows in self._local_rows(source, b):
                linear.side.b[row : row + rows.shape[0], first:last].copy_(rows)
            first = last

    # -- size --------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Let the weights go until the next `load`; borrowed ones stay where they are."""
        if self._borrowed:
            return
        for linear in self.linears.values():  # NOTE: a decoder has looked them up, and holds them
            linear.drop()
        self.tensors.clear()
        self.linears.clear()

    @property
    def nbytes(self) -> int:
        """Bytes this rank holds for the rollout alone; borrowed weights are not counted."""
        own = 0 if self._borrowed else sum(t.nbytes for t in self.tensors.values())
        return own + sum(linear.nbytes for linear in self.linears.values())
