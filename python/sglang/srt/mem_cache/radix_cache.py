"""The prefix cache: a radix tree over whole pages of token ids, with snapshots of the request state (design.md §5).

A node is a run of full pages. A snapshot stands at a position n that need not be a page boundary: it hangs on the node that
ends at the last boundary before n and owns the partly filled page behind it, its tail. The state at n serves every
position m with n - backtracking <= m <= n, so an equal prompt, of which one token must be computed anew, is still a hit.

The tree owns its pages and slots. Locks go from a node up to the root, so what is unlocked is a set of whole subtrees, and
all of it can be evicted: snapshots before the pages they stand on, least recently used first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sglang.srt.mem_cache.allocator import PagePool


@dataclass(frozen=True)
class CacheKey:
    """What KV depends on: token ids, and a salt for everything else. Different salts share nothing."""

    ids: list[int]
    salt: str = ""


@dataclass(eq=False)
class Snapshot:
    """A request state at the end of `node` plus `tail_ids`."""

    node: Node
    slot: int
    tail_ids: tuple[int, ...]
    tail_page: int | None  # holds tail_ids
    last_used: int = 0
    lock_count: int = 0

    @property
    def num_tokens(self) -> int:
        return self.node.end + len(self.tail_ids)


@dataclass(eq=False)
class Node:
    """Full pages behind `parent`; `ids` has page_size ids per page. The root of a salt has none."""

    parent: Node | None
    start: int  # position of the first id
    ids: list[int]
    pages: list[int]
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)  # by the ids of their first page
    snapshots: dict[tuple[int, ...], Snapshot] = field(default_factory=dict)  # by tail_ids
    last_used: int = 0
    lock_count: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(eq=False)
class PrefixMatch:
    """What the tree has of a key. Valid until something is evicted: lock it at once."""

    num_tokens: int = 0  # computing can resume here; 0: a miss
    full_match_tokens: int = 0  # tokens whose pages exist, >= num_tokens
    pages: list[int] = field(default_factory=list)  # shared full pages
    tail_page: int | None = None  # its first num_tokens % page_size tokens are to be copied into a page of the request's own
    snapshot: int | None = None  # slot of the state to copy
    snapshot_tokens: int = 0  # position at which it was taken, >= num_tokens; its rings are written up to there
    node: Node | None = None  # deepest node that `pages` or the tail need
    entry: Snapshot | None = None

    @staticmethod
    def miss() -> PrefixMatch:
        return PrefixMatch()


@dataclass
class InsertResult:
    """What was handed over but not taken, because the tree has it: the caller's again."""

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
        self._snapshots: list[Snapshot] = []
        self.held_pages = 0  # all pages the tree owns, tails included
        self._locked_pages = 0

    # -- match --------------------------------------------------------------------------------------------------------

    def match(self, key: CacheKey, limit: int, mode: Literal["exact", "bounded"] = "exact") -> PrefixMatch:
        """The longest usable prefix of `key`, at most `limit` tokens. `bounded` needs no snapshot, only pages."""
        root = self._roots.get(key.salt)
        if root is None:
            return PrefixMatch.miss()
        path, common = self._walk(root, key.ids)
        full = min(common, limit)
        if mode == "bounded":
            return self._result(path, full // self.page_size * self.page_size, full, None)
        best, best_at = None, 0
        for node in path:
            for entry in node.snapshots.values():
                position = min(limit, common, node.end) if common < node.end else self._reach(entry, key.ids, limit)
                if position > best_at and position >= entry.num_tokens - self._backtracking:
                    best, best_at = entry, position
        return self._result(path, best_at, max(full, best_at), best)

    def _walk(self, root: Node, ids: list[int]) -> tuple[list[Node], int]:
        """Nodes along `ids`, the last one perhaps matched in part, and the number of ids matched."""
        path, node, at = [root], root, 0
        while (child := node.children.get(tuple(ids[at : at + self.page_size]))) is not None:
            path.append(child)
            shared = _common(child.ids, ids, at)
            at += shared
            if shared < len(child.ids):
                break
            node = child
        return path, at

    def _reach(self, entry: Snapshot, ids: list[int], limit: int) -> int:
        """Last position that `ids` shares with the way to a snapshot on a wholly matched node."""
        end = entry.node.end
        return min(limit, end + _common(list(entry.tail_ids), ids, end))

    def _result(self, path: list[Node], num_tokens: int, full: int, entry: Snapshot | None) -> PrefixMatch:
        num_pages, rest = divmod(num_tokens, self.page_size)
        last = entry.node if entry else next(n for n in reversed(path) if n.start < num_tokens or n is path[0])
        pages = [page for node in path[: path.index(last) + 1] for page in node.pages]
        if entry is None:
            return PrefixMatch(num_tokens, full, pages[:num_pages], node=last)
        # Deeper nodes may hold the same ids, but only the snapshot's own way is locked with it.
        tail = None if not rest else entry.tail_page if num_tokens > last.end else pages[num_pages]
        return PrefixMatch(num_tokens, full, pages[:num_pages], tail, entry.slot, entry.num_tokens, last, entry)

    # -- lock ---------------------------------------------------------------------------------------------------------

    def lock(self, match: PrefixMatch) -> None:
        """Keep from eviction what the match needs: its nodes, and its snapshot with the tail page."""
        if match.node is None:
            return
        if match.entry is None and match.node.end > match.num_tokens:  # pages only: lock no more than is used
            match.node = self._split(match.node, match.num_tokens)
        for node in _to_root(match.node):
            self._locked_pages += len(node.pages) if node.lock_count == 0 else 0
            node.lock_count += 1
            node.last_used = next(self._clock)
        if match.entry is not None:
            self._locked_pages += match.entry.tail_page is not None and match.entry.lock_count == 0
            match.entry.lock_count += 1
            match.entry.last_used = next(self._clock)

    def unlock(self, match: PrefixMatch) -> None:
        if match.node is None:
            return
        for node in _to_root(match.node):
            node.lock_count -= 1
            self._locked_pages -= len(node.pages) if node.lock_count == 0 else 0
        if match.entry is not None:
            match.entry.lock_count -= 1
            self._locked_pages -= match.entry.tail_page is not None and match.entry.lock_count == 0

    # -- insert -------------------------------------------------------------------------------------------------------

    def insert(self, key: CacheKey, pages: list[int], num_tokens: int, snapshot: int | None) -> InsertResult:
        """Take over pages and state of the first `num_tokens` of `key`.

        `pages` covers them; a last, partial page is taken only with a snapshot that stands on it. A page that the tree owns
        already (the same id at the same place) is no duplicate.
        """
        if self._disabled:
            return InsertResult(list(pages), [] if snapshot is None else [snapshot])
        root = self._roots.setdefault(key.salt, Node(None, 0, [], []))
        num_full = num_tokens // self.page_size
        ids = key.ids[: num_full * self.page_size]
        path, at = self._walk(root, ids)
        node = path[-1]
        if at < node.end:
            at = at // self.page_size * self.page_size
            node = self._split(node, at)
        rejected = InsertResult()
        owned = [page for n in reversed(list(_to_root(node))) for page in n.pages]
        rejected.pages += [page for page, mine in zip(pages, owned) if page != mine]
        if at < len(ids):
            child = Node(node, at, ids[at:], pages[at // self.page_size : num_full])
            node.children[tuple(child.ids[: self.page_size])] = child
            self.held_pages += len(child.pages)
            node = child
        for n in _to_root(node):
            n.last_used = next(self._clock)
        if snapshot is not None:
            self._add_snapshot(node, tuple(key.ids[num_full * self.page_size : num_tokens]), pages[num_full:], snapshot, rejected)
        else:
            rejected.pages += pages[num_full:]
        return rejected

    def _add_snapshot(self, node: Node, tail_ids: tuple[int, ...], tail: list[int], slot: int, rejected: InsertResult) -> None:
        existing = node.snapshots.get(tail_ids)
        if existing is not None:
            existing.last_used = next(self._clock)
        if existing is not None or (len(self._snapshots) >= self.max_snapshots and not self.evict_snapshots(1)):
            rejected.pages += tail
            rejected.slots.append(slot)
            return
        entry = Snapshot(node, slot, tail_ids, tail[0] if tail else None, next(self._clock))
        node.snapshots[tail_ids] = entry
        self._snapshots.append(entry)
        self.held_pages += len(tail)

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node at a page boundary; returns the upper part. The lower part keeps its identity, and so its locks."""
        if at <= node.start:
            return node.parent
        cut = at - node.start
        upper = Node(node.parent, node.start, node.ids[:cut], node.pages[: cut // self.page_size])
        upper.last_used, upper.lock_count = node.last_used, node.lock_count
        node.parent.children[tuple(upper.ids[: self.page_size])] = upper
        node.parent, node.start, node.ids, node.pages = upper, at, node.ids[cut:], node.pages[cut // self.page_size :]
        upper.children[tuple(node.ids[: self.page_size])] = node
        return upper

    # -- evict --------------------------------------------------------------------------------------------------------

    @property
    def evictable_pages(self) -> int:
        return self.held_pages - self._locked_pages

    @property
    def evictable_snapshots(self) -> int:
        return sum(entry.lock_count == 0 for entry in self._snapshots)

    @property
    def held_snapshots(self) -> int:
        return len(self._snapshots)

    def evict_snapshots(self, count: int) -> int:
        """Free the least recently used unlocked snapshots; returns how many."""
        chosen = sorted((e for e in self._snapshots if e.lock_count == 0), key=lambda e: e.last_used)[:count]
        for entry in chosen:
            self._drop(entry)
        return len(chosen)

    def _drop(self, entry: Snapshot) -> int:
        """Remove one snapshot; returns the pages freed."""
        self._snapshots.remove(entry)
        del entry.node.snapshots[entry.tail_ids]
        self._slots.free([entry.slot])
        if entry.tail_page is None:
            return 0
        self._pages.free([entry.tail_page])
        self.held_pages -= 1
        return 1

    def evict_pages(self, count: int) -> int:
        """Free at least `count` pages if that many are evictable; returns how many. Ends of branches go first."""
        freed = 0
        while freed < count:
            leaves = sorted((n for n in self._nodes() if not n.children and n.lock_count == 0 and n.parent), key=lambda n: n.last_used)
            if not leaves:
                break
            for leaf in leaves:
                if freed >= count:
                    break
                freed += self._evict_from(leaf, count - freed)
        if freed < count:  # tails on locked nodes
            for entry in sorted((e for e in self._snapshots if not e.lock_count and e.tail_page is not None), key=lambda e: e.last_used):
                if freed >= count:
                    break
                freed += self._drop(entry)
        return freed

    def _evict_from(self, leaf: Node, count: int) -> int:
        freed = sum(self._drop(entry) for entry in list(leaf.snapshots.values()))
        take = min(len(leaf.pages), max(0, count - freed))
        if take == 0:
            return freed
        first = tuple(leaf.ids[: self.page_size])
        gone = leaf.pages[-take:]
        del leaf.pages[-take:]
        del leaf.ids[-take * self.page_size :]
        self._pages.free(gone)
        self.held_pages -= take
        if not leaf.pages:
            del leaf.parent.children[first]
        return freed + take

    def flush(self) -> None:
        """Free everything. Raises RuntimeError if anything is locked."""
        if self._locked_pages or any(entry.lock_count for entry in self._snapshots) or any(n.lock_count for n in self._nodes()):
            raise RuntimeError(f"the cache is in use: {self._locked_pages} pages are locked")
        for node in self._nodes():
            self._pages.free(node.pages)
        for entry in list(self._snapshots):
            self._drop(entry)
        self._roots.clear()
        self.held_pages = 0

    # -- books --------------------------------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def check(self) -> None:
        """Raises AssertionError, with the numbers, if counts and tree disagree."""
        nodes = list(self._nodes())
        pages = [p for n in nodes for p in n.pages] + [e.tail_page for e in self._snapshots if e.tail_page is not None]
        assert len(pages) == self.held_pages, f"{len(pages)} pages in the tree, {self.held_pages} in the books"
        assert len(set(pages)) == len(pages), "a page is in the tree twice"
        assert len(self._snapshots) == sum(len(n.snapshots) for n in nodes), "snapshots are lost"
        locked = sum(len(n.pages) for n in nodes if n.lock_count) + sum(
            1 for e in self._snapshots if e.lock_count and e.tail_page is not None
        )
        assert locked == self._locked_pages, f"{locked} pages locked in the tree, {self._locked_pages} in the books"


def _common(a: Sequence[int], b: Sequence[int], offset: int) -> int:
    """Length of the common prefix of `a` and b[offset:]."""
    other = b[offset : offset + len(a)]
    if a == other:  # compared at once: most often all of a node matches
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, other)) if x != y), min(len(a), len(other)))


def _to_root(node: Node) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent
