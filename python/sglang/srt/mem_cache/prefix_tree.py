"""The parts of the radix tree: nodes of whole pages, and snapshots that hang on them."""

from __future__ import annotations

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
    above: Snapshot | None = None  # nearest one that stands on a beginning of this one's ids
    below: dict[Snapshot, None] = field(default_factory=dict)  # those for which this one is `above`

    @property
    def num_tokens(self) -> int:
        return self.node.end + len(self.tail_ids)

    @property
    def is_redundant(self) -> bool:
        """All that goes on from here goes one way, and has a state further on. Where ways part, the state serves the next one."""
        return len(self.below) == 1

    def is_beginning_of(self, other: Snapshot) -> bool:
        """True if `other` stands deeper on the same ids."""
        if other.node is self.node:
            return len(other.tail_ids) > len(self.tail_ids) and other.tail_ids[: len(self.tail_ids)] == self.tail_ids
        node = other.node
        while node.start > self.node.end:
            assert node.parent is not None  # only a root starts at 0
            node = node.parent
        return node.parent is self.node and tuple(node.ids[: len(self.tail_ids)]) == self.tail_ids

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
        self.parent.children[tuple(upper.ids[:page_size])] = upper
        self.parent, self.start, self.ids, self.pages = upper, at, self.ids[cut:], self.pages[cut // page_size :]
        upper.children[tuple(self.ids[:page_size])] = self
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
