"""Stores keys and values in a pool of reference-counted pages.

A page holds `page_size` tokens of all layers. Several sequences may share a page; it is free again
when the last one releases it. A full page may then still be found by its tokens (`PrefixIndex`),
until it is allocated for others: pages that nothing can find first, then the least recently used.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat.inference.model.states import StatePool

Key = tuple[int, tuple[int, ...]]  # the entry before (0: none), the page's tokens

_ROOT = 0


class PrefixIndex:
    """Pages of a cache that are full, by their content, so that a prefix is computed once. Depends
    on tokens alone, so that all ranks of a tensor-parallel group find the same.

    Keys and values of a page depend on its tokens and on all tokens before them. A page's key is
    therefore the entry of the page before it together with its own tokens: two pages have the same
    key exactly if the whole prefix is the same.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._entries: dict[Key, tuple[int, int]] = {}  # page, and the number of its entry
        self._keys: dict[int, Key] = {}  # of each page
        self._numbers = count(_ROOT + 1)  # never used again: a key's parent cannot be replaced

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def find(self, tokens: list[int]) -> tuple[list[int], Key | None]:
        """The pages that hold the start of ``tokens``, and the key of the page that would come
        next; None if ``tokens`` do not fill one more.
        """
        pages: list[int] = []
        parent, size = _ROOT, self._page_size
        for first in range(0, len(tokens) - size + 1, size):
            key = parent, tuple(tokens[first : first + size])
            entry = self._entries.get(key)
            if entry is None:
                return pages, key
            pages.append(entry[0])
            parent = entry[1]
        return pages, None

    def add(self, tokens: list[int], pages: list[int]) -> None:
        """Enter the pages that ``tokens`` fill; where another page has the content, that one
        stays.
        """
        parent, size = _ROOT, self._page_size
        # NOTE: the page after the last full one has no key.
        for page, first in zip(pages, range(0, len(tokens) - size + 1, size), strict=False):
            key = parent, tuple(tokens[first : first + size])
            if key not in self._entries:
                if page in self._keys:  # under another page's entry, which was dropped
                    self.remove(page)
                self._entries[key], self._keys[page] = (page, next(self._numbers)), key
            parent = self._entries[key][1]

    def remove(self, page: int) -> None:
        """Drop a page. Those after it cannot be found any more; they stay until dropped."""
        del self._entries[self._keys.pop(page)]

    def clear(self) -> None:
        self._entries.clear()
        self._keys.clear()


class KVCache:
    """``num_pages`` pages, and a trash page for the rows that pad a captured batch.

    ``pairs`` (layers, num_pages + 1, page_size, 2, kv heads, head size): a token's keys and values
    of a layer are adjacent, as the decoder computes them. Its slot in a layer is
    page * page_size + offset.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        keeps_prefixes: bool = False,
        states: StatePool | None = None,
        keeps_experts: bool = False,
    ) -> None:
        """``keeps_prefixes``: full pages can be found by their tokens. ``states``: of layers that
        have no keys and values. ``keeps_experts``: see `keep_experts`.
        """
        shape = (num_layers, num_pages + 1, page_size, 2, num_kv_heads, head_size)
        # NOTE: zeros, not empty: masked keys have weight 0, and 0 x NaN is NaN. Tensors created in
        # inference mode could not be written outside it.
        with torch.inference_mode(False):
            self.pairs = torch.zeros(shape, dtype=dtype, device=device)
            # Views that every step needs: slots, keys and values.
            self.layers = [
                (layer.view(-1, 2 * num_kv_heads, head_size), layer[:, :, 0], layer[:, :, 1])
                for layer in self.pairs
            ]
        self.num_pages, self.page_size = num_pages, page_size
        self.trash_page = num_pages
        self._free = list(range(num_pages))  # a heap: the lowest number first
        self._users = [0] * num_pages
        self.keeps_prefixes, self.states = keeps_prefixes, states
        self.keeps_experts = keeps_experts
        self._experts: dict[Hashable, Tensor] = {}  # by router: (num_pages + 1, page_size, k)
        self._index = PrefixIndex(page_size)
        self._idle: OrderedDict[int, None] = OrderedDict()  # free but in the index, oldest first

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take the ``count`` lowest free pages, with one user each."""
        assert count <= self.num_free, "more pages than there are"
        pages = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        while len(pages) < count:
            page, _ = self._idle.popitem(last=False)
            self._index.remove(page)
            pages.append(page)
        for page in pages:
            self._users[page] = 1
        return pages

    def retain(self, pages: list[int]) -> None:
        for page in pages:
            if self._users[page] == 0:
                del self._idle[page]
            self._users[page] += 1

    def release(self, pages: list[int]) -> None:
        """Remove a user from each page; pages without users become free."""
        for page in reversed(pages):  # a prefix is found by its first page, which goes last
            self._users[page] -= 1
            assert self._users[page] >= 0
            if self._users[page] == 0:
                if page in self._index:
                    self._idle[page] = None
                else:
                    heapq.heappush(self._free, page)

    # -- prefixes ----------------------------------------------------------------------------------

    def find(self, tokens: list[int]) -> tuple[list[int], Key | None]:
        """See `PrefixIndex.find`. The caller must `retain` the pages before it allocates others."""
        return self._index.find(tokens) if self.keeps_prefixes else ([], None)

    def publish(self, tokens: list[int], pages: list[int]) -> None:
        """Add the pages that ``tokens`` fill to the prefix index, once they are computed."""
        if self.keeps_prefixes:
            self._index.add(tokens, pages)

    def withdraw(self, page: int) -> None:
        """Remove a page from the prefix index before it is overwritten."""
        if page in self._index:
            self._index.remove(page)

    def forget(self) -> None:
        """Empty the prefix index: the weights have changed."""
        self._index.clear()
        for page in self._idle:
            heapq.heappush(self._free, page)
        self._idle.clear()

    # -- pages -------------------------------------------------------------------------------------

    def num_users(self, page: int) -> int:
        return self._users[page]

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` tokens of a page, in all layers."""
        self.pairs[:, target, :num_tokens].copy_(self.pairs[:, source, :num_tokens])
        for experts in self._experts.values():
            experts[target, :num_tokens].copy_(experts[source, :num_tokens])

    # -- experts -----------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def keep_experts(self, slots: Tensor, router: Hashable, chosen: Tensor, count: int) -> None:
        """Write the experts ``chosen`` (T, k), of ``count``, beside the keys in ``slots``. Routers
        of a model call it in the same order in every step.
        """
        if router not in self._experts:
            shape = *self.pairs.shape[1:3], chosen.shape[1]
            dtype = torch.int8 if count <= 128 else torch.int16  # also holds -1: not known
            self._experts[router] = torch.zeros(shape, dtype=dtype, device=chosen.device)
        rows = self._experts[router].flatten(0, 1)
        rows.index_copy_(0, slots, chosen.to(rows.dtype))

    def experts_of(self, pages: list[int], num_tokens: int) -> Tensor | None:
        """The experts of the first ``num_tokens`` in ``pages``, and -1 for a further token, which
        was not computed: (1 + tokens, routers, k); None: not kept.
        """
        kept = [rows[pages].flatten(0, 1)[:num_tokens] for rows in self._experts.values()]
        return F.pad(torch.stack(kept, 1), (0, 0, 0, 0, 0, 1), value=-1) if kept else None

    # -- moved pages -------------------------------------------------------------------------------

    def swap_out(self, page: int, num_tokens: int) -> int:
        """Move a page with one user to the lowest free page if that is lower; its new number."""
        if not self._free or self._free[0] > page:
            return page
        (target,) = self.allocate(1)
        self.copy_page(page, target, num_tokens)
        self.release([page])
        return target
