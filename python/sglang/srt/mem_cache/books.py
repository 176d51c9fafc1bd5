"""Where every page and slot is: free + evictable + held = total."""

from __future__ import annotations

from sglang.srt.mem_cache.allocator import PagePool
from sglang.srt.mem_cache.radix_cache import RadixCache


def pool_table(pages: PagePool, slots: PagePool, tree: RadixCache) -> dict[str, dict[str, int]]:
    """Pool name -> total, free, evictable, held (by running requests, or locked for them)."""
    table = {}
    for name, pool, evictable in (("pages", pages, tree.evictable_pages), ("slots", slots, tree.evictable_snapshots)):
        held = pool.total - pool.free_count - evictable
        table[name] = {"total": pool.total, "free": pool.free_count, "evictable": evictable, "held": held}
    return table


def idle_problem(pages: PagePool, slots: PagePool, tree: RadixCache) -> str | None:
    """While nothing runs: why the books do not balance, or None. Walks the whole tree."""
    lost = {name: row["held"] for name, row in pool_table(pages, slots, tree).items() if row["held"]}
    if lost:
        return f"held although nothing runs: {lost}"
    try:
        tree.check(own_pages=(), own_slots=())
    except AssertionError as error:
        return str(error)
    return None
