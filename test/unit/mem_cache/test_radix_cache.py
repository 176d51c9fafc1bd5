"""The prefix cache: small cases by hand, then random operations against a model that knows what is on every page."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.allocator import PagePool
from sglang.srt.mem_cache.radix_cache import CacheKey, PrefixMatch, RadixCache

PAGE = 4
BACKTRACKING = 3


class World:
    """Pools, a tree, and what was written where."""

    def __init__(self, num_pages: int = 60, num_slots: int = 20, max_snapshots: int = 8):
        self.pages, self.slots = PagePool(num_pages), PagePool(num_slots)
        self.tree = RadixCache(PAGE, self.pages, self.slots, max_snapshots, BACKTRACKING)
        self.page_ids: dict[int, tuple[str, tuple[int, ...]]] = {}  # page -> salt and whole prefix up to its last written id
        self.slot_ids: dict[int, tuple[str, tuple[int, ...]]] = {}

    def put(self, ids: list[int], salt: str = "", *, snapshot: bool = True) -> bool:
        """What a request does in its life: match, lock, compute, insert, unlock. False if pages or slots are short."""
        key = CacheKey(ids, salt)
        match = self.tree.match(key, len(ids) - 1)
        self.check_match(key, match, len(ids) - 1)
        self.tree.lock(match)
        num_pages = -(-len(ids) // PAGE) if snapshot else len(ids) // PAGE
        own = self.take(self.pages, num_pages - len(match.pages), self.tree.evict_pages)
        slot = self.take(self.slots, 1, self.tree.evict_snapshots) if snapshot else []
        if own is None or slot is None:
            self.pages.free(own or [])
            self.slots.free(slot or [])
            self.tree.unlock(match)
            return False
        pages = match.pages + own
        for number, page in enumerate(own, len(match.pages)):
            self.page_ids[page] = (salt, tuple(ids[: (number + 1) * PAGE]))
        if snapshot:
            self.slot_ids[slot[0]] = (salt, tuple(ids))
        num_tokens = len(ids) if snapshot else num_pages * PAGE
        rejected = self.tree.insert(key, pages, num_tokens, slot[0] if snapshot else None)
        assert not set(rejected.pages) & set(match.pages)
        self.pages.free(rejected.pages)
        self.slots.free(rejected.slots)
        self.tree.unlock(match)
        return True

    @staticmethod
    def take(pool: PagePool, count: int, evict) -> list[int] | None:
        if count > pool.free_count:
            evict(count - pool.free_count)
        return pool.alloc(count)

    def check_match(self, key: CacheKey, match: PrefixMatch, limit: int) -> None:
        """Everything a match points at holds what the key says."""
        assert 0 <= match.num_tokens <= limit
        assert match.num_tokens <= match.full_match_tokens <= limit
        assert len(match.pages) == match.num_tokens // PAGE
        tail = [match.tail_page] if match.num_tokens % PAGE else []
        for number, page in enumerate(match.pages + tail):
            salt, ids = self.page_ids[page]
            upto = min((number + 1) * PAGE, match.num_tokens)
            assert salt == key.salt
            assert list(ids[:upto]) == key.ids[:upto]
        if match.num_tokens:
            salt, ids = self.slot_ids[match.snapshot]
            assert salt == key.salt
            assert list(ids[: match.num_tokens]) == key.ids[: match.num_tokens]
            assert len(ids) == match.snapshot_tokens
            assert match.snapshot_tokens - BACKTRACKING <= match.num_tokens <= match.snapshot_tokens

    def check(self) -> None:
        """Nothing is shared by two owners, nothing is lost."""
        self.tree.check()
        assert self.pages.free_count + self.tree.held_pages == self.pages.total
        assert self.slots.free_count + self.tree.held_snapshots == self.slots.total

    def matched(self, ids: list[int], limit: int | None = None, mode: str = "exact", salt: str = "") -> int:
        return self.tree.match(CacheKey(ids, salt), len(ids) if limit is None else limit, mode).num_tokens


@pytest.fixture
def world():
    return World()


def test_a_state_serves_positions_shortly_before_it(world):
    ids = list(range(10))
    world.put(ids)
    assert [world.matched(ids, limit) for limit in (10, 9, 8, 7)] == [10, 9, 8, 7]
    assert world.matched(ids, 6) == 0  # further back than the rings reach
    assert world.matched([*ids, 77]) == 10
    assert world.matched([*ids[:8], 77, 78]) == 8
    assert world.matched([*ids[:6], 77, 78, 79]) == 0


def test_without_a_state_pages_are_found_but_not_used(world):
    world.put(list(range(12)), snapshot=False)
    match = world.tree.match(CacheKey(list(range(20))), 19)
    assert (match.num_tokens, match.full_match_tokens) == (0, 12)
    assert world.tree.match(CacheKey(list(range(20))), 8, mode="bounded").pages
    assert world.matched(list(range(20)), 11, "bounded") == 8


def test_the_deepest_state_wins(world):
    world.put(list(range(8)))
    world.put(list(range(15)))
    assert world.matched(list(range(30))) == 15
    assert world.matched([*range(10), 99, 99, 99]) == 8


def test_branches_share_their_common_pages(world):
    world.put([*range(8), 1, 1, 1, 1])
    before = world.pages.free_count
    world.put([*range(8), 2, 2, 2, 2])
    assert before - world.pages.free_count == 1  # the second branch's first two pages were duplicates
    world.check()


def test_salts_share_nothing(world):
    world.put(list(range(8)), "a")
    assert world.matched(list(range(8)), salt="b") == 0
    assert world.matched(list(range(8)), salt="a") == 8


def test_snapshots_go_before_pages_and_the_oldest_first(world):
    for first in range(3):
        world.put([first] * 9)
    world.matched([0] * 9)
    assert world.tree.evict_snapshots(1) == 1
    assert [world.matched([first] * 9) for first in range(3)] == [0, 9, 9]
    assert world.tree.match(CacheKey([0] * 9), 9).full_match_tokens == 8
    assert world.tree.evict_pages(2) >= 2
    assert world.tree.match(CacheKey([0] * 9), 9).full_match_tokens == 0
    assert world.matched([1] * 9) == 9
    world.check()


def test_what_is_locked_stays(world):
    ids = list(range(20))
    world.put(ids)
    match = world.tree.match(CacheKey(ids), 19)
    world.tree.lock(match)
    assert (world.tree.evictable_pages, world.tree.evictable_snapshots) == (0, 0)
    assert (world.tree.evict_pages(100), world.tree.evict_snapshots(100)) == (0, 0)
    with pytest.raises(RuntimeError, match="in use"):
        world.tree.flush()
    world.tree.unlock(match)
    assert world.tree.evict_pages(100) == 5
    world.check()


def test_a_lock_on_pages_holds_no_more_than_it_uses(world):
    world.put(list(range(20)), snapshot=False)
    match = world.tree.match(CacheKey(list(range(20))), 8, mode="bounded")
    world.tree.lock(match)
    assert world.tree.evictable_pages == 3
    assert world.tree.evict_pages(5) == 3
    world.tree.unlock(match)
    assert world.matched(list(range(20)), mode="bounded") == 8
    world.check()


def test_the_number_of_snapshots_is_bounded():
    world = World(max_snapshots=3)
    for first in range(6):
        world.put([first] * 5)
        world.check()
    assert world.tree.held_snapshots == 3
    assert [world.matched([first] * 5) for first in range(6)] == [0, 0, 0, 5, 5, 5]


def test_a_flush_frees_everything(world):
    for first in range(5):
        world.put([first] * 13)
    world.tree.flush()
    assert (world.pages.free_count, world.slots.free_count) == (60, 20)
    world.check()
    world.put([1] * 5)
    world.check()


def test_a_disabled_cache_takes_nothing():
    tree = RadixCache(PAGE, PagePool(4), PagePool(2), 2, BACKTRACKING, disabled=True)
    result = tree.insert(CacheKey(list(range(8))), [0, 1], 8, 1)
    assert (result.pages, result.slots) == ([0, 1], [1])
    assert tree.match(CacheKey(list(range(8))), 8).num_tokens == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_500_random_operations_lose_and_share_nothing(seed):
    """Twenty examples make 10,000 operations. Locks are held over other operations, as running requests do."""
    rng = random.Random(seed)
    world, held = World(), []
    known: list[list[int]] = [[]]
    for _ in range(500):
        base = rng.choice(known[-20:])
        ids = base[: rng.randint(0, len(base))] + [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        ids = ids[:40]
        salt = rng.choice(["", "", "s"])
        match rng.randrange(12):
            case 0:
                world.tree.evict_pages(rng.randint(1, 10))
            case 1:
                world.tree.evict_snapshots(rng.randint(1, 3))
            case 2 | 3 if len(held) < 4:
                match = world.tree.match(CacheKey(ids, salt), len(ids) - 1, rng.choice(["exact", "bounded"]))
                world.tree.lock(match)
                held.append((CacheKey(ids, salt), match))
            case 4 if held:
                key, match = held.pop(rng.randrange(len(held)))
                pages = match.pages + ([match.tail_page] if match.tail_page is not None else [])
                assert all(world.page_ids[page][1][:1] == tuple(key.ids[:1]) for page in pages)
                if match.snapshot is not None:
                    world.check_match(key, match, len(key.ids) - 1)  # nothing it needs was evicted or rewritten
                world.tree.unlock(match)
            case 5 if not held and rng.random() < 0.05:
                world.tree.flush()
            case _:
                if world.put(ids, salt, snapshot=rng.random() < 0.7):
                    known.append(ids)
        world.check()
    for _, match in held:
        world.tree.unlock(match)
    assert world.tree.evictable_pages == world.tree.held_pages
    world.tree.flush()
    assert (world.pages.free_count, world.slots.free_count) == (world.pages.total, world.slots.total)
