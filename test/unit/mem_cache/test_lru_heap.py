"""The queue of things to evict."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.lru_heap import LruHeap


@dataclass(eq=False)
class Item:
    last_used: int
    is_eligible: bool = True


def make() -> LruHeap[Item]:
    return LruHeap(lambda item: item.is_eligible)


def test_the_date_counts_at_which_an_item_comes_up():
    heap, items = make(), [Item(date) for date in (3, 1, 2)]
    for item in items:
        heap.add(item)
        heap.add(item)
    items[1].last_used = 9
    assert [heap.pop() for _ in range(4)] == [items[2], items[0], items[1], None]


def test_what_is_not_eligible_is_passed_over_and_can_come_back():
    heap, item = make(), Item(1)
    heap.add(item)
    item.is_eligible = False
    assert heap.pop() is None
    item.is_eligible = True
    assert item not in heap
    heap.add(item)
    assert heap.pop() is item


def test_memory_follows_what_is_eligible():
    heap = make()
    kept = Item(0)
    heap.add(kept)
    for date in range(10_000):
        item = Item(date)
        heap.add(item)
        item.is_eligible = False
    assert len(heap._heap) < 200
    assert heap.pop() is kept
    assert heap.pop() is None
