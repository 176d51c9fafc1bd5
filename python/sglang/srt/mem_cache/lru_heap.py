"""A queue of things to evict, least recently used first, without a scan."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Dated(Protocol):
    """Has a logical time of its last use; compared and hashed by identity."""

    last_used: int


T = TypeVar("T", bound=Dated)


class LruHeap(Generic[T]):
    """Items wait here with the date they were added at; dates and eligibility are looked at only when an item comes up.

    Whoever makes an item eligible adds it; nobody has to remove one that ceased to be. So a hit costs nothing here.
    """

    def __init__(self, is_eligible: Callable[[T], bool]):
        self._is_eligible = is_eligible
        self._heap: list[tuple[int, int, T]] = []
        self._queued: set[T] = set()
        self._order = itertools.count()  # items of equal date are not compared
        self._compact_at = 64

    def __contains__(self, item: T) -> bool:
        return item in self._queued

    def add(self, item: T) -> None:
        """Queue an eligible item; one that is queued already is left as it is."""
        if item in self._queued:
            return
        self._queued.add(item)
        heapq.heappush(self._heap, (item.last_used, next(self._order), item))
        if len(self._heap) > self._compact_at:
            self._compact()

    def pop(self) -> T | None:
        """The eligible item that was not used for the longest time, no longer queued; None if there is none."""
        while self._heap:
            date, _, item = heapq.heappop(self._heap)
            self._queued.discard(item)
            if not self._is_eligible(item):
                continue
            if item.last_used == date:
                return item
            self.add(item)
        return None

    def _compact(self) -> None:
        """Forget what ceased to be eligible, so that memory follows what could be evicted."""
        self._heap = [entry for entry in self._heap if self._is_eligible(entry[2])]
        self._queued = {item for _, _, item in self._heap}
        heapq.heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + 64
