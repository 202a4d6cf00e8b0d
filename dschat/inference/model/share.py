"""Says which part of each checkpoint tensor a tensor-parallel rank holds, and in which rows.

Rows of qkv, up, embedding and head are shared out, columns of out and down; of norms and sinks what
belongs to the rank's heads.
"""

from collections.abc import Iterator

from torch import Tensor

from dschat.inference.model.spec import ModelSpec, WeightSource


class Share:
    """The share of ``rank`` among ``size`` ranks."""

    def __init__(self, spec: ModelSpec, rank: int, size: int) -> None:
        self.spec, self.rank, self.size = spec, rank, size
        self.num_heads = spec.num_heads // size
        self.num_kv_heads = spec.num_kv_heads // size
        self.intermediate_size = spec.intermediate_size // size
        self.vocab_size = -(-spec.vocab_size // size)  # the last rank's may be padding

    def _inner_size(self, base: str) -> int:
        """Intermediate size of the MLP or expert that ``base`` is of, before sharding."""
        experts = self.spec.experts
        return experts.size if experts and is_expert(base) else self.spec.intermediate_size

    def linear_shape(self, base: str) -> tuple[int, int] | None:
        """(out, in) of this rank's share; None if ``base`` is not a linear layer."""
        spec, size = self.spec, self.spec.hidden_size
        inner = self._inner_size(base) // self.size
        return {
            "qkv": ((self.num_heads + 2 * self.num_kv_heads) * spec.head_size, size),
            "out": (size, self.num_heads * spec.head_size),
            "up": (inner * (2 if spec.gated else 1), size),
            "down": (size, inner),
            "router": (spec.experts.count if spec.experts else 0, size),
            "head": (self.vocab_size, spec.embedding_size),
            "project_in": (size, spec.embedding_size),
            "project_out": (spec.embedding_size, size),
        }.get(kind_of(base))

    def full_shape(self, source: WeightSource) -> tuple[int, ...]:
        """Shape of the whole tensor, as the checkpoint stores it."""
        shape, experts = self._full_part_shape(source), self.spec.experts
        return (experts.count, *shape) if experts and source.index is not None else shape

    def _full_part_shape(self, source: WeightSource) -> tuple[int, ...]:
        """Shape of what fills the target: of an expert, where the tensor has all."""
        spec, base = self.spec, source.target.rpartition(".")[0]
        kind, inner = kind_of(base), self._inner_size(base)
        if source.target == "embed.weight":
            return (spec.vocab_size, spec.embedding_size)
        if source.target == "positions.weight":
            return (spec.num_positions, spec.hidden_size)
        shape = self.linear_shape(base)
        if shape is None:
            return (self.vector_size(kind, self.size),)
        rows = {
            ("qkv", "q"): spec.num_heads * spec.head_size,
            ("qkv", "k"): spec.num_kv_heads * spec.head_size,
            ("qkv", "v"): spec.num_kv_heads * spec.head_size,
            ("qkv", ""): (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size,
            ("up", ""): inner * (2 if spec.gated else 1),
            ("up", "gate"): inner,
            ("up", "up"): inner,
            ("head", ""): spec.vocab_size,
        }.get((kind, source.part), shape[0])
        columns = {
            "out": spec.num_heads * spec.head_size,
            "down": inner,
        }.get(kind, shape[1])
        if source.target.endswith(".bias"):
            return (rows,)
        return (columns, rows) if source.transposed else (rows, columns)

    def vector_size(self, kind: str, num_ranks: int = 1) -> int:
        """Elements on one rank, or on ``num_ranks`` together, of what is not a linear layer."""
        spec, num_heads = self.spec, self.num_heads * num_ranks
        if kind == "sinks":
            return num_heads
        if kind not in ("q_norm", "k_norm"):
            return spec.hidden_size
        count = num_heads if kind == "q_norm" else self.num_kv_heads * num_ranks
        return spec.head_size * (count if spec.whole_qk_norm else 1)

    def _rank_slice(self, rows: Tensor, count: int) -> Tensor:
        return rows[self.rank * count : (self.rank + 1) * count]

    def local_rows(self, source: WeightSource, full: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields (first row in the target, rows): this rank's share of the rows of ``full``."""
        base, spec = source.target.rpartition(".")[0], self.spec
        kind, inner = kind_of(base), self._inner_size(base) // self.size
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
        elif kind == "up" and spec.gated and not source.part:
            halves = (full[::2], full[1::2]) if source.interleaved else full.chunk(2)
            for first, half in zip((0, inner), halves, strict=True):
                yield first, self._rank_slice(half, inner)
        elif kind == "up":
            yield inner if source.part == "up" else 0, self._rank_slice(full, inner)
        elif kind in ("head", "embed"):
            yield 0, self._rank_slice(full, self.vocab_size)
        elif kind in ("q_norm", "k_norm", "sinks"):
            count = self.vector_size(kind)
            yield 0, self._rank_slice(full, count) if full.shape[0] > count else full
        else:
            yield 0, full

    def factors(self, source: WeightSource, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """LoRA's factors A (r, in) and B (out, r) of an expert, as PEFT has them of all."""
        if source.index is None or self.spec.experts is None:
            return a, b
        count, i = self.spec.experts.count, source.index
        return a.unflatten(0, (count, -1))[i], b.unflatten(1, (-1, count))[..., i]

    def local_columns(self, source: WeightSource, matrix: Tensor) -> Tensor:
        """``matrix`` (..., in) cut to this rank's inputs."""
        base = source.target.rpartition(".")[0]
        kind, inner = kind_of(base), self._inner_size(base) // self.size
        count = {"out": self.num_heads * self.spec.head_size, "down": inner}
        if kind not in count:
            return matrix
        return self._rank_slice(matrix.T, count[kind]).T


def is_expert(base: str) -> bool:
    return base.rpartition(".")[2].isdigit()


def kind_of(base: str) -> str:
    """What a weight is: qkv, norm1, ...; an expert's is up or down."""
    return base.split(".")[-2 if is_expert(base) else -1]
