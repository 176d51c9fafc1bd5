"""The prefix cache: a radix tree over whole pages of token ids, with snapshots of the request state (design.md §5).

A node is a run of full pages. A snapshot stands at a position n that need not be a page boundary: it hangs on the node that
ends at the last boundary before n and owns the partly filled page behind it, its tail. The state at n serves every
position m with n - backtracking <= m <= n, so an equal prompt, of which one token must be computed anew, is still a hit, and
so is a prompt that differs in the last token. Such an m may lie before the boundary, in a page that is shared in full.

Who needs which lock, and how long:

- Pages in a request's page table: from `match` until the request's end, or until it has locked a deeper match. `lock` keeps
  the node and all above it, `unlock` lets go.
- The snapshot and the tail page: only until they are copied. `lock` keeps them as well, `unlock_state` lets go early, as soon
  as the copies are ordered before any later use of that memory.

The tree owns its pages and slots. Locks go from a node up to the root, so what is unlocked is a set of whole subtrees, and
all of it can be evicted: snapshots before the pages they stand on. Snapshots with one continuation that has a snapshot
further on go first, so that many long sessions stay reusable at their ends; apart from that, the least recently used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from sglang.srt.mem_cache.allocator import PagePool
from sglang.srt.mem_cache.lru_heap import LruHeap
from sglang.srt.mem_cache.prefix_tree import Node, Snapshot, common_length, resume_points


@dataclass(frozen=True)
class CacheKey:
    """What KV depends on: token ids, and a salt for everything else. Different salts share nothing."""

    ids: list[int]
    salt: str = ""


@dataclass(eq=False)
class PrefixMatch:
    """What the tree has of a key. Valid until the tree changes: lock it at once."""

    num_tokens: int = 0  # computing can resume here; 0: a miss
    full_match_tokens: int = 0  # tokens whose pages exist, >= num_tokens: whole pages, and a tail if a state stands on it
    pages: list[int] = field(default_factory=list)  # shared full pages of the first num_tokens
    tail_page: int | None = None  # its first num_tokens % page_size tokens are to be copied into a page of the request's own
    snapshot: int | None = None  # slot of the state to copy
    snapshot_tokens: int = 0  # position at which it was taken, >= num_tokens; its rings are written up to there
    node: Node | None = None  # deepest node that `pages` or the tail need
    entry: Snapshot | None = None
    is_locked: bool = False
    is_state_locked: bool = False

    @staticmethod
    def miss() -> PrefixMatch:
        return PrefixMatch()


@dataclass
class InsertResult:
    """What was handed over but not taken, because the tree has it or has no room: the caller's again. The rest is the tree's."""

    pages: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class RadixCache:
    """See the module. Not thread-safe; belongs to the scheduler thread."""

    def __init__(self, page_size: int, pages: PagePool, slots: PagePool, max_snapshots: int, backtracking: int, disabled: bool = False):
        self.page_size = page_size
        self.max_snapshots = max_snapshots
        self._pages = pages
        self._slots = slots
        self._backtracking = backtracking
        self._disabled = disabled
        self._clock = itertools.count(1)
        self._roots: dict[str, Node] = {}
        self._leaves = LruHeap[Node](_is_evictable_leaf)
        self._idle = LruHeap[Snapshot](_is_evictable)
        self._redundant = LruHeap[Snapshot](lambda entry: _is_evictable(entry) and entry.is_redundant)
        self.held_pages = 0  # all pages the tree owns, tails included
        self.held_snapshots = 0
        self.num_evicted_pages = 0  # counters since the start; a flush is no eviction
        self.num_evicted_snapshots = 0
        self._locked_pages = 0
        self._locked_snapshots = 0
        self._num_locks = 0  # matches locked

    # -- match --------------------------------------------------------------------------------------------------------

    def match(self, key: CacheKey, limit: int, mode: Literal["exact", "bounded"] = "exact") -> PrefixMatch:
        """The longest usable prefix of `key`, at most `limit` tokens; changes nothing.

        `exact`: a snapshot serves its end. `bounded`: all full pages, no state. `full_match_tokens` is the same in both.
        """
        root = self._roots.get(key.salt)
        if root is None or limit <= 0:
            return PrefixMatch.miss()
        limit = min(limit, len(key.ids))
        # The page that `limit` lies in is looked at too: its first part counts if all of it is there.
        path, whole = self._walk(root, key.ids[: -(-limit // self.page_size) * self.page_size])
        num_tokens, entry = self._deepest_resume(path, key.ids, whole, limit)
        full = max(min(whole, limit), num_tokens)
        if mode == "bounded":
            num_pages = min(whole, limit) // self.page_size
            return self._match_pages(path, num_pages, full)
        if entry is None:
            return PrefixMatch(full_match_tokens=full)
        num_pages, rest = divmod(num_tokens, self.page_size)
        # Deeper nodes may hold the same ids, but only the snapshot's own way is locked with it.
        tail = entry.page_at(num_pages * self.page_size, self.page_size) if rest else None
        pages = _pages_of(path, num_pages)
        return PrefixMatch(num_tokens, full, pages, tail, entry.slot, entry.num_tokens, entry.node, entry)

    def _walk(self, root: Node, ids: list[int]) -> tuple[list[Node], int]:
        """Nodes along `ids`, the last one perhaps matched in part, and the number of ids matched, in whole pages."""
        path, node, at = [root], root, 0
        while (child := node.children.get(tuple(ids[at : at + self.page_size]))) is not None:
            path.append(child)
            at += common_length(child.ids, ids, at) // self.page_size * self.page_size
            if at < child.end:
                break
            node = child
        return path, at

    def _deepest_resume(self, path: list[Node], ids: list[int], whole: int, limit: int) -> tuple[int, Snapshot | None]:
        """Last position at which a snapshot can serve `ids`. A later boundary is a later position, so the first found is it."""
        for node in reversed(path):
            for boundary in sorted(node.resumes, reverse=True):
                if boundary > min(whole, limit):
                    continue
                found = node.resumes[boundary]
                for length in range(min(self.page_size - 1, limit - boundary), -1, -1):
                    entries = found.get(tuple(ids[boundary : boundary + length]))
                    if entries:
                        # Of several, the one taken earliest has to be taken back least.
                        return boundary + length, min(entries, key=lambda entry: entry.num_tokens)
        return 0, None

    def _match_pages(self, path: list[Node], num_pages: int, full: int) -> PrefixMatch:
        if num_pages == 0:
            return PrefixMatch(full_match_tokens=full)
        num_tokens = num_pages * self.page_size
        last = next(node for node in reversed(path) if node.start < num_tokens)
        return PrefixMatch(num_tokens, full, _pages_of(path, num_pages), node=last)

    # -- lock ---------------------------------------------------------------------------------------------------------

    def lock(self, match: PrefixMatch) -> None:
        """Keep from eviction what the match needs: its nodes, and its snapshot with the tail page. A miss needs nothing."""
        if match.is_locked:
            raise RuntimeError("the match is locked already")
        match.is_locked = True
        if match.node is None:
            return
        self._num_locks += 1
        if match.entry is None:  # pages only: lock no more than is used
            match.node = self._node_ending_at(match.node, match.num_tokens)
        now = next(self._clock)
        for node in match.node.to_root():
            self._locked_pages += len(node.pages) if node.lock_count == 0 else 0
            node.lock_count += 1
            node.last_used = now
        if match.entry is not None:
            match.is_state_locked = True
            self._count_locked(match.entry, 1 if match.entry.lock_count == 0 else 0)
            match.entry.lock_count += 1
            match.entry.last_used = now

    def unlock_state(self, match: PrefixMatch) -> None:
        """The snapshot and the tail page have been copied: keep only the pages. Does nothing the second time."""
        if not match.is_state_locked:
            return
        assert match.entry is not None
        match.is_state_locked = False
        match.entry.lock_count -= 1
        self._count_locked(match.entry, -1 if match.entry.lock_count == 0 else 0)
        self._offer(match.entry)

    def unlock(self, match: PrefixMatch) -> None:
        """End of the lock. Raises RuntimeError without one: a lock too few would free memory in use."""
        if not match.is_locked:
            raise RuntimeError("the match is not locked")
        match.is_locked = False
        if match.node is None:
            return
        self.unlock_state(match)
        self._num_locks -= 1
        now = next(self._clock)
        for node in match.node.to_root():
            node.lock_count -= 1
            node.last_used = now
            self._locked_pages -= len(node.pages) if node.lock_count == 0 else 0
            self._forget_empty_root(node)
        self._offer_leaf(match.node)

    def _count_locked(self, entry: Snapshot, change: int) -> None:
        self._locked_snapshots += change
        self._locked_pages += change if entry.tail_page is not None else 0

    # -- insert -------------------------------------------------------------------------------------------------------

    def insert(self, key: CacheKey, pages: list[int], num_tokens: int, snapshot: int | None) -> InsertResult:
        """Take over pages and state of the first `num_tokens` of `key`.

        `pages` covers them. A last, partial page is taken only with a snapshot that stands on it: a request that ends gives its
        own, one that goes on a copy. A page that the tree owns already (the same id at the same place) is no duplicate. A
        request that goes on must lock what it gave, with a `bounded` match, and use the pages of that. The snapshot may be
        evicted at once, if there are `max_snapshots` that are worth more.
        """
        if self._disabled:
            return InsertResult(list(pages), [] if snapshot is None else [snapshot])
        num_full = num_tokens // self.page_size
        node, rejected = self._insert_pages(key, pages[:num_full])
        if snapshot is not None and num_tokens > 0:
            self._insert_snapshot(node, key.ids[:num_tokens], pages[num_full:], snapshot, rejected)
        else:
            rejected.pages += pages[num_full:]
            rejected.slots += [] if snapshot is None else [snapshot]
        self._forget_empty_root(node)
        return rejected

    def _insert_pages(self, key: CacheKey, pages: list[int]) -> tuple[Node, InsertResult]:
        """The node that ends behind `pages`, and duplicates."""
        if key.salt not in self._roots:
            self._roots[key.salt] = Node(None, 0, [], [], key.salt)
        ids = key.ids[: len(pages) * self.page_size]
        path, at = self._walk(self._roots[key.salt], ids)
        owned = _pages_of(path, at // self.page_size)
        node = self._node_ending_at(path[-1], at)
        if at < len(ids):
            child = Node(node, at, ids[at:], pages[at // self.page_size :], key.salt)
            node.children[tuple(child.ids[: self.page_size])] = child
            self.held_pages += len(child.pages)
            node = child
        now = next(self._clock)
        for n in node.to_root():
            n.last_used = now
        self._offer_leaf(node)
        return node, InsertResult([page for page, mine in zip(pages, owned) if page != mine])

    def _node_ending_at(self, node: Node, at: int) -> Node:
        """The node that ends at a page boundary on the way to `node`, made by a cut if need be."""
        node = node.holding(at)
        return node if node.end == at else node.split(at, self.page_size)

    def _insert_snapshot(self, node: Node, ids: list[int], tail: list[int], slot: int, rejected: InsertResult) -> None:
        tail_ids = tuple(ids[node.end :])
        existing = node.snapshots.get(tail_ids)
        if existing is not None:
            existing.last_used = next(self._clock)
        if existing is not None or self.max_snapshots == 0:
            rejected.pages += tail
            rejected.slots.append(slot)
            return
        points = resume_points(ids, len(ids), self._backtracking, self.page_size)
        entry = Snapshot(node, slot, tail_ids, tail[0] if tail else None, points, next(self._clock))
        node.add_snapshot(entry)
        for boundary, behind in points:
            node.holding(boundary).resumes.setdefault(boundary, {}).setdefault(behind, []).append(entry)
        self.held_snapshots += 1
        self.held_pages += len(tail)
        self._offer_with_above(entry)
        # Only now, since the new one may be the least useful: redundant, or the only one that is not locked.
        self.evict_snapshots(self.held_snapshots - self.max_snapshots)

    # -- evict --------------------------------------------------------------------------------------------------------

    @property
    def evictable_pages(self) -> int:
        return self.held_pages - self._locked_pages

    @property
    def evictable_snapshots(self) -> int:
        return self.held_snapshots - self._locked_snapshots

    def _offer(self, entry: Snapshot) -> None:
        """Queue a snapshot for eviction if it has become evictable, or redundant."""
        if _is_evictable(entry):
            self._idle.add(entry)
            if entry.is_redundant:
                self._redundant.add(entry)

    def _offer_with_above(self, entry: Snapshot) -> None:
        """Queue a new snapshot, and the one above, which it may have made redundant."""
        self._offer(entry)
        if (above := entry.above) is not None:
            self._offer(above)

    def _offer_leaf(self, node: Node) -> None:
        if _is_evictable_leaf(node):
            self._leaves.add(node)

    def evict_snapshots(self, count: int) -> int:
        """Free up to `count` unlocked snapshots, redundant ones first; returns how many. Their tail pages go too."""
        for done in range(count):
            entry = self._redundant.pop() or self._idle.pop()
            if entry is None:
                return done
            self._evict(entry)
        return count

    def _evict(self, entry: Snapshot) -> int:
        """Evict one snapshot; returns the pages freed."""
        num_pages = self._drop(entry)
        self.num_evicted_snapshots += 1
        self.num_evicted_pages += num_pages
        self._forget_empty_root(entry.node)
        return num_pages

    def _drop(self, entry: Snapshot) -> int:
        """Remove one snapshot; returns the pages freed."""
        above = entry.above
        entry.is_dropped = True
        entry.node.remove_snapshot(entry)
        for boundary, behind in entry.resumes:
            resumes = entry.node.holding(boundary).resumes
            resumes[boundary][behind].remove(entry)
            if not resumes[boundary][behind]:
                del resumes[boundary][behind]
            if not resumes[boundary]:
                del resumes[boundary]
        if above is not None:
            self._offer(above)
        self.held_snapshots -= 1
        self._slots.free([entry.slot])
        tail = [] if entry.tail_page is None else [entry.tail_page]
        self._pages.free(tail)
        self.held_pages -= len(tail)
        return len(tail)

    def evict_pages(self, count: int) -> int:
        """Free at least `count` pages if that many are evictable; returns how many.

        Ends of branches go first, each after its snapshots; tails on locked nodes when nothing else is left.
        """
        freed = 0
        while freed < count and (leaf := self._leaves.pop()) is not None:
            freed += self._evict_from(leaf, count - freed)
        return freed if freed >= count or not self.evictable_pages else freed + self._evict_tails(count - freed)

    def _evict_tails(self, count: int) -> int:
        """Evict snapshots on locked nodes for their tail pages; those without one stay."""
        freed, spared = 0, []
        while freed < count and self.evictable_pages and (entry := self._idle.pop()) is not None:
            if entry.tail_page is None:
                spared.append(entry)
            else:
                freed += self._evict(entry)
        for entry in spared:
            self._offer(entry)
        return freed

    def _evict_from(self, leaf: Node, count: int) -> int:
        freed = sum(self._evict(entry) for entry in list(leaf.snapshots.values()))
        take = min(len(leaf.pages), max(0, count - freed))
        first, parent, keep = tuple(leaf.ids[: self.page_size]), leaf.parent, len(leaf.pages) - take
        gone, leaf.pages, leaf.ids = leaf.pages[keep:], leaf.pages[:keep], leaf.ids[: keep * self.page_size]
        self._pages.free(gone)
        self.held_pages -= take
        self.num_evicted_pages += take
        if not leaf.pages:
            assert parent is not None  # a root is no leaf
            del parent.children[first]
            self._offer_leaf(parent)
            self._forget_empty_root(parent)
        else:
            self._offer_leaf(leaf)
        return freed + take

    def _forget_empty_root(self, node: Node) -> None:
        """Salts come from clients and are many."""
        if node.is_empty_root and self._roots.get(node.salt) is node:
            del self._roots[node.salt]

    def flush(self) -> None:
        """Free everything. Raises RuntimeError if anything is locked."""
        if self._num_locks:
            raise RuntimeError(f"the cache is in use: {self._num_locks} locks, {self._locked_pages} pages are locked")
        nodes = list(self._nodes())
        for entry in [entry for node in nodes for entry in node.snapshots.values()]:
            self._drop(entry)
        for node in nodes:
            self._pages.free(node.pages)
            self.held_pages -= len(node.pages)
            node.pages = []
        self._roots.clear()

    # -- books --------------------------------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def check(self, own_pages: Iterable[int] | None = None, own_slots: Iterable[int] | None = None) -> None:
        """Walk the whole tree. Raises AssertionError, with the numbers, if counts, tree and pools disagree.

        `own_pages`, `own_slots`: what everybody else holds; then every id must be free, the tree's or one of those, once.
        """
        nodes = list(self._nodes())
        entries = [entry for node in nodes for entry in node.snapshots.values()]
        tails = [entry for entry in entries if entry.tail_page is not None]
        pages = [page for node in nodes for page in node.pages] + [entry.tail_page for entry in tails if entry.tail_page is not None]
        slots = [entry.slot for entry in entries]
        locked = sum(len(node.pages) for node in nodes if node.lock_count) + sum(entry.lock_count > 0 for entry in tails)
        for name, walked, booked in (
            ("pages", len(pages), self.held_pages),
            ("snapshots", len(entries), self.held_snapshots),
            ("locked pages", locked, self._locked_pages),
            ("locked snapshots", sum(entry.lock_count > 0 for entry in entries), self._locked_snapshots),
        ):
            assert walked == booked, f"{walked} {name} in the tree, {booked} in the books"
        for name, pool, ids, others in (("page", self._pages, pages, own_pages), ("slot", self._slots, slots, own_slots)):
            owned = ids + list(others or [])
            assert len(set(owned)) == len(owned), f"a {name} is owned twice"
            assert all(map(pool.is_allocated, owned)), f"a {name} is owned and free"
            if others is not None:
                assert len(owned) + pool.free_count == pool.total, f"{name}s: {len(owned)} owned, {pool.free_count} free of {pool.total}"
        for node in nodes:
            self._check_node(node)

    def _check_node(self, node: Node) -> None:
        where = f"node of positions {node.start} to {node.end}"
        assert len(node.ids) == len(node.pages) * self.page_size, f"{where}: {len(node.ids)} ids on {len(node.pages)} pages"
        assert node.pages or node.parent is None, f"{where}: no pages"
        assert all(child.start == node.end and child.parent is node for child in node.children.values()), f"{where}: children astray"
        used = max([child.lock_count for child in node.children.values()] + [entry.lock_count for entry in node.snapshots.values()] + [0])
        assert node.lock_count >= used, f"{where}: {node.lock_count} locks, {used} below"
        assert not _is_evictable_leaf(node) or node in self._leaves, f"{where}: will never be evicted"
        assert node.tails == sorted(node.snapshots), f"{where}: tails astray"
        assert node.ways == sorted(key for key, child in node.children.items() if child.num_snapshots_below), f"{where}: ways astray"
        below = len(node.snapshots) + sum(child.num_snapshots_below for child in node.children.values())
        assert below == node.num_snapshots_below, f"{where}: {below} snapshots below, {node.num_snapshots_below} in the books"
        for entry in node.snapshots.values():
            assert not _is_evictable(entry) or entry in self._idle, f"{where}: a snapshot will never be evicted"
            redundant = _is_evictable(entry) and entry.is_redundant
            assert not redundant or entry in self._redundant, f"{where}: a snapshot will be evicted too late"
            for boundary, behind in entry.resumes:
                assert entry in node.holding(boundary).resumes[boundary][behind], f"{where}: a snapshot cannot be found"


def _is_evictable(entry: Snapshot) -> bool:
    return not entry.is_dropped and entry.lock_count == 0


def _is_evictable_leaf(node: Node) -> bool:
    return bool(node.pages) and not node.children and node.lock_count == 0


def _pages_of(path: list[Node], count: int) -> list[int]:
    """The first `count` pages along a path."""
    return list(itertools.islice(itertools.chain.from_iterable(node.pages for node in path), count))
