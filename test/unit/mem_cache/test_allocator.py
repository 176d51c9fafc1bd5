"""Ids of pages and slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.mem_cache.allocator import PagePool


@given(st.lists(st.integers(-6, 6), max_size=60))
def test_every_id_has_one_owner(amounts):
    """Positive: allocate so many; negative: free so many."""
    pool, owned = PagePool(10), []
    for amount in amounts:
        if amount >= 0:
            ids = pool.alloc(amount)
            assert (ids is None) == (amount > 10 - len(owned))
            owned += ids or []
        else:
            pool.free(owned[:-amount])
            owned = owned[-amount:]
        assert len(set(owned)) == len(owned)
        assert pool.free_count == 10 - len(owned)


@pytest.mark.parametrize("wrong", [3, -1, 10], ids=["free", "negative", "foreign"])
def test_what_is_not_allocated_cannot_be_freed(wrong):
    pool = PagePool(10)
    pool.alloc(2)
    with pytest.raises(ValueError, match="not allocated"):
        pool.free([wrong])
    assert pool.free_count == 8
