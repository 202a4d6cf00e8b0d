"""Finds cache pages by their tokens, so that a prefix that was computed once is not again.

Keys and values of a page depend on its tokens and on all tokens before them. A page's key is
therefore the entry of the page before it together with its own tokens: two pages have the same key
exactly if the whole prefix is the same.
"""

from itertools import count

Key = tuple[int, tuple[int, ...]]  # the entry before (0: none), the page's tokens

_ROOT = 0


class PrefixIndex:
    """Pages of a cache that are full, by their content. Depends on tokens alone, so that all ranks
    of a tensor-parallel group find the same.
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
