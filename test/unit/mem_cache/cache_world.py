"""Pools, a tree, and a naive model of them: a list of what was written on every page and slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.mem_cache.allocator import PagePool
from sglang.srt.mem_cache.prefix_tree import Snapshot
from sglang.srt.mem_cache.radix_cache import CacheKey, PrefixMatch, RadixCache

Content = tuple[str, tuple[int, ...]]  # salt, and the whole prefix up to the last id written


def shared(a: tuple[int, ...] | list[int], b: tuple[int, ...] | list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@dataclass(eq=False)
class Running:
    """A request that has matched: its lock, the pages it reads, and those it owns."""

    key: CacheKey
    match: PrefixMatch
    own_pages: list[int]
    slot: int
    state_released: bool = False


class World:
    def __init__(self, num_pages: int = 60, num_slots: int = 20, max_snapshots: int = 8, page_size: int = 4, backtracking: int = 3):
        self.page_size, self.backtracking = page_size, backtracking
        self.pages, self.slots = PagePool(num_pages), PagePool(num_slots)
        self.tree = RadixCache(page_size, self.pages, self.slots, max_snapshots, backtracking)
        self.page_ids: dict[int, Content] = {}
        self.slot_ids: dict[int, Content] = {}
        self.running: list[Running] = []

    # -- what requests do ---------------------------------------------------------------------------------------------

    def start(self, key: CacheKey, mode: str = "exact") -> Running | None:
        """Match, lock, and get memory for the rest. None, and nothing changed, if it is short."""
        match = self.checked_match(key, max(0, len(key.ids) - 1), mode)
        self.tree.lock(match)
        slot = self.take(self.slots, 1, self.tree.evict_snapshots)
        own = self.take(self.pages, -(-len(key.ids) // self.page_size) - len(match.pages), self.tree.evict_pages)
        if slot is None or own is None:
            self.slots.free(slot or [])
            self.pages.free(own or [])
            self.tree.unlock(match)
            return None
        req = Running(key, match, own, slot[0])
        for number, page in enumerate(own, len(match.pages)):
            self.page_ids[page] = (key.salt, tuple(key.ids[: (number + 1) * self.page_size]))
        self.slot_ids[slot[0]] = (key.salt, tuple(key.ids))
        self.running.append(req)
        return req

    def finish(self, req: Running, *, cache: bool = True, snapshot: bool = True) -> None:
        """All memory back: to the tree with the slot as the state, or without one, or to the pools."""
        self.check_held(req)
        self.running.remove(req)
        num_tokens = len(req.key.ids) if snapshot else len(req.key.ids) // self.page_size * self.page_size
        num_pages = -(-num_tokens // self.page_size)
        pages = req.match.pages + req.own_pages
        own, slots = pages[num_pages:], [req.slot]
        if cache:
            result = self.tree.insert(req.key, pages[:num_pages], num_tokens, req.slot if snapshot else None)
            assert not set(result.pages) & set(req.match.pages)
            own = own + result.pages
            slots = result.slots if snapshot else slots
        else:
            own = req.own_pages
        self.tree.unlock(req.match)
        self.pages.free(own)
        self.slots.free(slots)

    def checkpoint(self, req: Running, num_tokens: int) -> bool:
        """A request that goes on gives copies of its state and tail, and its full pages; False if memory is short."""
        num_full, rest = divmod(num_tokens, self.page_size)
        slot = self.take(self.slots, 1, self.tree.evict_snapshots)
        tail = self.take(self.pages, int(rest > 0), self.tree.evict_pages)
        if slot is None or tail is None:
            self.slots.free(slot or [])
            self.pages.free(tail or [])
            return False
        content = (req.key.salt, tuple(req.key.ids[:num_tokens]))
        self.slot_ids[slot[0]] = content
        self.page_ids.update(dict.fromkeys(tail, content))
        pages = req.match.pages + req.own_pages
        result = self.tree.insert(req.key, pages[:num_full] + tail, num_tokens, slot[0])
        self.pages.free(result.pages)
        self.slots.free(result.slots)
        if num_full > len(req.match.pages):
            deeper = self.tree.match(req.key, num_full * self.page_size, "bounded")
            self.tree.lock(deeper)
            self.tree.unlock(req.match)
            req.match, req.own_pages, req.state_released = deeper, pages[num_full:], True
            assert len(deeper.pages) == num_full
        return True

    def put(self, ids: list[int], salt: str = "", *, snapshot: bool = True) -> bool:
        """A whole life. False if pages or slots are short."""
        req = self.start(CacheKey(ids, salt))
        if req is not None:
            self.finish(req, snapshot=snapshot)
        return req is not None

    @staticmethod
    def take(pool: PagePool, count: int, evict: Callable[[int], int]) -> list[int] | None:
        if count > pool.free_count:
            evict(count - pool.free_count)
        return pool.alloc(count)

    def matched(self, ids: list[int], limit: int | None = None, mode: str = "exact", salt: str = "") -> int:
        return self.checked_match(CacheKey(ids, salt), len(ids) if limit is None else limit, mode).num_tokens

    # -- the naive model ----------------------------------------------------------------------------------------------

    def states(self, salt: str) -> list[tuple[int, ...]]:
        """What the tree's snapshots stand on."""
        own = {req.slot for req in self.running}
        tree = [slot for slot in range(self.slots.total) if self.slots.is_allocated(slot) and slot not in own]
        return [ids for slot in tree for where, ids in [self.slot_ids[slot]] if where == salt]

    def tree_pages(self, salt: str) -> set[tuple[int, ...]]:
        """Prefixes that the tree's pages end."""
        own = {page for req in self.running for page in req.own_pages}
        tree = [page for page in range(self.pages.total) if self.pages.is_allocated(page) and page not in own]
        return {ids for page in tree for where, ids in [self.page_ids[page]] if where == salt}

    def best(self, key: CacheKey, limit: int) -> tuple[int, int]:
        """By the rules, from the lists: (position to resume at, tokens whose pages exist)."""
        limit = min(limit, len(key.ids))
        reach = [(min(shared(ids, key.ids), limit), len(ids)) for ids in self.states(key.salt)]
        num_tokens = max((at for at, taken in reach if at >= taken - self.backtracking), default=0)
        full, prefixes = 0, self.tree_pages(key.salt)
        while full < limit and len(page := tuple(key.ids[: full + self.page_size])) == full + self.page_size and page in prefixes:
            full += self.page_size
        return num_tokens, max(num_tokens, min(full, limit))

    def checked_match(self, key: CacheKey, limit: int, mode: str = "exact") -> PrefixMatch:
        match = self.tree.match(key, limit, mode)
        num_tokens, full = self.best(key, limit)
        assert match.full_match_tokens == full
        if mode == "exact":
            assert match.num_tokens == num_tokens
            assert (match.snapshot is None) == (num_tokens == 0)
        else:
            whole = {len(ids) for ids in self.tree_pages(key.salt) if list(ids) == key.ids[: len(ids)] and not len(ids) % self.page_size}
            assert match.num_tokens == max((n for n in whole if n <= min(full, limit)), default=0)
            assert match.snapshot is None
        self.check_content(key, match, state=match.snapshot is not None)
        return match

    def check_content(self, key: CacheKey, match: PrefixMatch, *, state: bool) -> None:
        """Everything a match points at is allocated and holds what the key says."""
        assert len(match.pages) == match.num_tokens // self.page_size
        assert (match.tail_page is None) == (match.num_tokens % self.page_size == 0)
        tail = [match.tail_page] if state and match.tail_page is not None else []
        for number, page in enumerate(match.pages + tail):
            upto = min((number + 1) * self.page_size, match.num_tokens)
            salt, ids = self.page_ids[page]
            assert self.pages.is_allocated(page)
            assert (salt, list(ids[:upto])) == (key.salt, key.ids[:upto])
        if state:
            salt, ids = self.slot_ids[match.snapshot]
            assert self.slots.is_allocated(match.snapshot)
            assert (salt, list(ids[: match.num_tokens])) == (key.salt, key.ids[: match.num_tokens])
            assert len(ids) == match.snapshot_tokens <= match.num_tokens + self.backtracking

    def check_held(self, req: Running) -> None:
        """Nothing a running request needs was evicted or written over."""
        self.check_content(req.key, req.match, state=req.match.snapshot is not None and not req.state_released)

    def check(self) -> None:
        """Nothing is shared by two owners, nothing is lost."""
        self.tree.check([page for req in self.running for page in req.own_pages], [req.slot for req in self.running])
        assert not any(node.is_empty_root for node in self.tree._roots.values())
        entries = [(node.salt, entry) for node in self.tree._nodes() for entry in node.snapshots.values()]
        nearest: dict[Snapshot, Snapshot | None] = {}
        for salt, entry in entries:
            ids = self.slot_ids[entry.slot][1]
            before = [(len(b), e) for s, e in entries if s == salt and ids[: len(b := self.slot_ids[e.slot][1])] == b and e is not entry]
            nearest[entry] = max(before, key=lambda pair: pair[0], default=(0, None))[1]
            assert entry.above is nearest[entry]
        num_next = Counter(nearest.values())
        assert all(entry.is_redundant == (num_next[entry] == 1) for _, entry in entries)
