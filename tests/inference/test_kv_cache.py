"""Pages of the cache: written, counted, shared, found by their tokens."""

import pytest
import torch

from dschat.inference.model.attention import copy_rows
from dschat.inference.model.kv_cache import KVCache


def cache_of(num_pages):
    """Pages of two tokens."""
    return KVCache(1, num_pages, 2, 1, 1, torch.float32, torch.device("cpu"), keeps_prefixes=True)


def test_pages_are_counted():
    cache = cache_of(4)
    assert [cache.pages_for(i) for i in (1, 2, 3, 8)] == [1, 1, 2, 4]
    pages = cache.allocate(3)
    assert pages == [0, 1, 2]
    cache.retain([0, 1])
    cache.release([2, 0])
    assert (cache.num_free, cache.num_users(0), cache.num_users(1)) == (2, 1, 2)
    assert cache.allocate(1) == [2]
    cache.release([0, 1, 1, 2])
    assert cache.num_free == 4
    with pytest.raises(AssertionError, match="more pages than there are"):
        cache.allocate(5)


def test_pages_that_nothing_finds_are_taken_first_then_the_least_recent():
    cache = cache_of(6)
    old, new = cache.allocate(2), cache.allocate(2)
    cache.publish([1, 2, 3, 4], old)
    cache.publish([1, 2, 7, 8], new)  # its first page is a double, which cannot be found
    cache.release(new)
    cache.release(old)
    assert cache.num_free == 6
    assert cache.find([1, 2, 7, 8, 9]) == ([0, 3], None)
    assert cache.find([1, 2, 5, 6]) == ([0], (1, (5, 6)))
    assert cache.allocate(3) == [2, 4, 5]
    cache.retain([0])
    assert cache.allocate(1) == [3]
    assert cache.find([1, 2, 7, 8]) == ([0], (1, (7, 8)))
    assert cache.allocate(1) == [1]
    assert cache.num_free == 0
    cache.release([0])
    assert cache.allocate(1) == [0]
    assert cache.find([1, 2]) == ([], (0, (1, 2)))


def test_of_a_text_the_last_page_goes_first():
    """The others can still be found."""
    cache = cache_of(3)
    pages = cache.allocate(3)
    cache.publish([1, 2, 3, 4, 5, 6], pages)
    cache.release(pages)
    cache.allocate(1)
    assert cache.find([1, 2, 3, 4, 5, 6])[0] == [0, 1]


def test_a_forgotten_page_is_free_once_nobody_uses_it():
    cache = cache_of(2)
    for page, tokens in zip(cache.allocate(2), ([1, 2], [3, 4]), strict=True):
        cache.publish(tokens, [page])
    cache.release([1])
    cache.forget()
    cache.release([0])
    assert (cache.num_free, cache.find([1, 2])[0], cache.find([3, 4])[0]) == (2, [], [])
    assert cache.allocate(2) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("size", "offset"), [(8, 0), (6, 0), (8, 3)])
def test_rows_of_the_cache_are_copied_whole(size, offset, dtype):
    """Where heads lie at 8 bytes, and where they do not."""
    heads = torch.randn(5 * 12 * size + offset).to(dtype)[offset:].view(5, 12, size)
    values = heads[:, 4:8].unflatten(1, (2, 2))
    slots = torch.tensor([3, 0, 7, 2, 6])
    rows = torch.zeros(9, 2, 2, size, dtype=dtype)
    expected = rows.clone().index_copy_(0, slots, values)
    copy_rows(rows, slots, values)
    assert torch.equal(rows, expected)
