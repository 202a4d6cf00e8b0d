"""Says where query, key and value heads stand in the output of their fused product."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class HeadLayout:
    """The query, key and value heads among the H + 2 K heads of a token, as slices.

    A copied weight has queries, keys, values. A borrowed one has the order of its storage, where
    heads may also alternate.
    """

    q: slice
    k: slice
    v: slice

    @classmethod
    def of(
        cls,
        num_heads: int,
        num_kv_heads: int,
        order: Sequence[str] = "qkv",
        interleaved: bool = False,
    ) -> "HeadLayout":
        """Blocks of heads in ``order``; or ``interleaved``: q, k, v of head 0, then of head 1."""
        if interleaved:
            return cls(*(slice(i, None, 3) for i in range(3)))
        slices, first = {}, 0
        for part in order:
            count = num_heads if part == "q" else num_kv_heads
            slices[part] = slice(first, first + count)
            first += count
        return cls(**slices)

    @cached_property
    def in_order(self) -> bool:
        """Whether blocks of queries, keys and values follow each other."""
        return self.k.start == self.q.stop and self.v.start == self.k.stop

    @cached_property
    def origins(self) -> tuple[int, int, int, int]:
        """The first query, key and value head, and the step to the next one of its kind."""
        return self.q.start, self.k.start, self.v.start, self.q.step or 1

    @cached_property
    def rotated(self) -> tuple[slice, ...]:
        """Slices that cover queries and keys: one if they are adjacent blocks."""
        for first, second in ((self.q, self.k), (self.k, self.q)):
            if second.start == first.stop:
                return (slice(first.start, second.stop),)
        return (self.q, self.k)

    def keys_and_values(self, heads_THD: Tensor) -> Tensor | None:
        """One view (T, 2, K, D) of keys and values; None where values precede keys."""
        step = self.v.start - self.k.start
        if step < 0:
            return None
        keys = heads_THD[:, self.k]
        token, head, element = keys.stride()
        return keys.as_strided(
            (keys.shape[0], 2, *keys.shape[1:]),
            (token, step * heads_THD.stride(1), head, element),
            keys.storage_offset(),
        )
