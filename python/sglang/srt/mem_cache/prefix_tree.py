"""The parts of the radix tree: nodes of whole pages, and snapshots that hang on them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# A resume point as (page boundary before it, ids from there up to it): what a key must hold to resume at that point.
Resume = tuple[int, tuple[int, ...]]


@dataclass(eq=False)
class Snapshot:
    """A request state at the end of `node` plus `tail_ids`; serves every position of `resumes`."""

    node: Node
    slot: int
    tail_ids: tuple[int, ...]
    tail_page: int | None  # holds tail_ids
    resumes: list[Resume]
    last_used: int = 0
    lock_count: int = 0
    is_dropped: bool = False

    @property
    def num_tokens(self) -> int:
        return self.node.end + len(self.tail_ids)

    @property
    def is_redundant(self) -> bool:
        """All that goes on from here goes one way, and has a state further on. Where ways part, the state serves the next one.

        Ways without a state do not count. Follows the only way down to the first state; stops where a second one begins.
        """
        node, behind = self.node, self.tail_ids
        while True:
            tails, ways = ends_of_run(node.tails, behind), ends_of_run(node.ways, behind)
            if tails:  # the first of a run is a beginning of all that go on from it, and they follow it without a gap
                return all(ids[: len(tails[0])] == tails[0] for ids in tails + ways)
            if not ways or ways[0] != ways[-1]:
                return False
            node, behind = node.children[ways[0]], ()
            if behind in node.snapshots:
                return True

    @property
    def above(self) -> Snapshot | None:
        """The deepest other snapshot on a beginning of this one's ids."""
        node, behind = self.node, self.tail_ids[:-1]
        if self.tail_ids and (found := longest_beginning(node.tails, behind)) is not None:
            return node.snapshots[found]
        while node.parent is not None:
            behind, node = node.first_page, node.parent
            if (found := longest_beginning(node.tails, behind)) is not None:
                return node.snapshots[found]
        return None

    def page_at(self, start: int, page_size: int) -> int:
        """The page on this snapshot's way that holds positions from `start`, a page boundary."""
        if start == self.node.end:
            assert self.tail_page is not None
            return self.tail_page
        node = self.node
        while start < node.start:
            assert node.parent is not None
            node = node.parent
        return node.pages[(start - node.start) // page_size]


@dataclass(eq=False)
class Node:
    """Full pages behind `parent`; `ids` has page_size ids per page. The root of a salt has none."""

    parent: Node | None
    start: int  # position of the first id
    ids: list[int]
    pages: list[int]
    salt: str = ""
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)  # by the ids of their first page
    snapshots: dict[tuple[int, ...], Snapshot] = field(default_factory=dict)  # by tail_ids
    tails: list[tuple[int, ...]] = field(default_factory=list)  # keys of `snapshots`, sorted
    ways: list[tuple[int, ...]] = field(default_factory=list)  # keys of those `children` that have a snapshot below, sorted
    num_snapshots_below: int = 0  # on this node and all under it
    # Page boundary in (start, end], for a root 0 -> ids behind it -> snapshots that serve the position behind those ids.
    # A snapshot far down may be found here, also by keys that leave its way in the middle of a page.
    resumes: dict[int, dict[tuple[int, ...], list[Snapshot]]] = field(default_factory=dict)
    last_used: int = 0
    lock_count: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def is_empty_root(self) -> bool:
        return self.parent is None and not self.children and not self.snapshots and not self.lock_count

    @property
    def first_page(self) -> tuple[int, ...]:
        """The ids that `parent` knows this node by. A root has none."""
        return tuple(self.ids[: len(self.ids) // len(self.pages)])

    def add_snapshot(self, entry: Snapshot) -> None:
        self.snapshots[entry.tail_ids] = entry
        insort(self.tails, entry.tail_ids)
        for node in self.to_root():
            node.num_snapshots_below += 1
            if node.parent is not None and node.num_snapshots_below == 1:
                insort(node.parent.ways, node.first_page)

    def remove_snapshot(self, entry: Snapshot) -> None:
        del self.snapshots[entry.tail_ids]
        del self.tails[bisect_left(self.tails, entry.tail_ids)]
        for node in self.to_root():
            node.num_snapshots_below -= 1
            if node.parent is not None and node.num_snapshots_below == 0:
                del node.parent.ways[bisect_left(node.parent.ways, node.first_page)]

    def to_root(self) -> Iterator[Node]:
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def holding(self, boundary: int) -> Node:
        """The node on the way to here in whose `resumes` a boundary is found."""
        return next(node for node in self.to_root() if node.start < boundary or node.parent is None)

    def split(self, at: int, page_size: int) -> Node:
        """Cut at a page boundary inside; returns the upper part. The lower part keeps its identity, and so locks on it."""
        assert self.parent is not None
        cut = at - self.start
        upper = Node(self.parent, self.start, self.ids[:cut], self.pages[: cut // page_size], self.salt)
        upper.last_used, upper.lock_count = self.last_used, self.lock_count
        upper.resumes = {boundary: found for boundary, found in self.resumes.items() if boundary <= at}
        self.resumes = {boundary: found for boundary, found in self.resumes.items() if boundary > at}
        self.parent.children[upper.first_page] = upper
        self.parent, self.start, self.ids, self.pages = upper, at, self.ids[cut:], self.pages[cut // page_size :]
        upper.children[self.first_page] = self
        upper.num_snapshots_below = self.num_snapshots_below
        upper.ways = [self.first_page] if self.num_snapshots_below else []
        return upper


def resume_points(ids: Sequence[int], num_tokens: int, backtracking: int, page_size: int) -> list[Resume]:
    """All positions that a state at `num_tokens` serves. Position 0 needs no state."""
    points = []
    for position in range(max(1, num_tokens - backtracking), num_tokens + 1):
        boundary = position // page_size * page_size
        points.append((boundary, tuple(ids[boundary:position])))
    return points


def common_length(a: Sequence[int], b: Sequence[int], offset: int) -> int:
    """Length of the common prefix of `a` and b[offset:]. Halves are compared at once: ids of a node can be very many."""
    low, high = 0, min(len(a), len(b) - offset)
    if a[:high] == b[offset : offset + high]:
        return high
    while high - low > 1:  # a[:low] agrees, a[:high] does not
        middle = (low + high) // 2
        if a[low:middle] == b[offset + low : offset + middle]:
            low = middle
        else:
            high = middle
    return low


def ends_of_run(ordered: list[tuple[int, ...]], behind: tuple[int, ...]) -> list[tuple[int, ...]]:
    """First and last of those, in a sorted list, that go on from `behind`; empty if there are none."""
    first = bisect_right(ordered, behind)
    last = bisect_right(ordered, behind, key=lambda ids: ids[: len(behind)]) - 1
    return [ordered[first], ordered[last]] if first <= last else []


def longest_beginning(ordered: list[tuple[int, ...]], ids: tuple[int, ...]) -> tuple[int, ...] | None:
    """The longest of a sorted list that `ids` begins with, or None."""
    while (at := bisect_right(ordered, ids)) > 0:
        nearest = ordered[at - 1]
        common = common_length(nearest, ids, 0)
        if common == len(nearest):
            return nearest
        ids = ids[:common]  # a beginning of ids sorts before `nearest`, so it is a beginning of both
    return None
