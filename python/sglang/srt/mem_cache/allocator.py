"""Ids of pages or slots, handed out and taken back with exact accounting."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Ids 0..total-1. Who has an id owns it, until it is freed exactly once."""

    def __init__(self, total: int):
        self.total = total
        self._free = list(range(total - 1, -1, -1))  # a stack: the lowest ids go first, recently used ones are reused
        self._is_free = [True] * total

    @property
    def free_count(self) -> int:
        return len(self._free)

    def is_allocated(self, i: int) -> bool:
        return not self._is_free[i]

    def alloc(self, count: int) -> list[int] | None:
        """`count` ids, or None, and nothing taken, if there are not so many."""
        if count > len(self._free):
            return None
        ids = [self._free.pop() for _ in range(count)]
        for i in ids:
            self._is_free[i] = False
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Give ids back. Raises ValueError for an id that is free already or was never ours; earlier ones are then freed."""
        for i in ids:
            if not 0 <= i < self.total or self._is_free[i]:
                raise ValueError(f"id {i} is not allocated (pool of {self.total})")
            self._is_free[i] = True
            self._free.append(i)
