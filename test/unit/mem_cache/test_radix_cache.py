"""The prefix cache, small cases by hand."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.allocator import PagePool
from sglang.srt.mem_cache.books import idle_problem, pool_table
from sglang.srt.mem_cache.radix_cache import CacheKey, PrefixMatch, RadixCache
from unit.mem_cache.cache_world import World


@pytest.fixture
def world():
    """Pages of four tokens; a state can be taken back three."""
    return World()


# -- match ------------------------------------------------------------------------------------------------------------


def test_a_state_serves_positions_shortly_before_it(world):
    ids = list(range(10))
    world.put(ids)
    assert [world.matched(ids, limit) for limit in (10, 9, 8, 7)] == [10, 9, 8, 7]
    assert world.matched(ids, 6) == 0  # further back than the rings reach
    assert world.matched([*ids, 77]) == 10
    assert world.matched([*ids[:8], 77, 78]) == 8
    assert world.matched([*ids[:6], 77, 78, 79]) == 0


@pytest.mark.parametrize("num_tokens", range(2, 14))
def test_an_equal_prompt_and_one_with_another_last_token_hit_just_before_it(num_tokens):
    world = World()
    ids = list(range(num_tokens))
    world.put(ids)
    assert world.matched(ids, num_tokens - 1) == num_tokens - 1
    assert world.matched([*ids[:-1], 99]) == num_tokens - 1
    assert world.matched([*ids[:-1], 99, 100, 101, 102, 103]) == num_tokens - 1


def test_a_hit_before_the_boundary_copies_the_full_page_behind_it():
    world = World(page_size=64, backtracking=6)
    world.put(list(range(66)))
    full, tail = world.tree.match(CacheKey(list(range(66))), 64).pages[0], world.tree.match(CacheKey(list(range(66))), 65).tail_page
    for ids, limit in ((list(range(66)), 63), ([*range(63), 99], 64), (list(range(63)), 63)):
        match = world.checked_match(CacheKey(ids), limit)
        assert (match.num_tokens, match.pages, match.tail_page, match.snapshot_tokens) == (63, [], full, 66)
    assert tail not in (None, full)
    match = world.checked_match(CacheKey(list(range(66))), 64)
    assert (match.num_tokens, match.pages, match.tail_page) == (64, [full], None)
    assert world.matched(list(range(59))) == 0


def test_a_state_can_be_taken_back_over_several_pages():
    world = World(page_size=2, backtracking=7)
    world.put(list(range(12)))
    assert [world.matched([*range(n), 99, 99, 99]) for n in range(12)] == [0, 0, 0, 0, 0, 5, 6, 7, 8, 9, 10, 11]


def test_of_two_states_at_a_position_the_earlier_one_is_taken(world):
    world.put(list(range(10)))
    world.put(list(range(12)))
    assert world.checked_match(CacheKey(list(range(9))), 9).snapshot_tokens == 10


def test_the_deepest_state_wins(world):
    world.put(list(range(8)))
    world.put(list(range(15)))
    assert world.matched(list(range(30))) == 15
    assert world.matched([*range(10), 99, 99, 99]) == 8


def test_several_tails_at_one_node(world):
    for tail in ([20], [20, 21], [30], [30, 31, 32]):
        world.put([*range(4), *tail])
    assert world.tree.held_snapshots == 4
    assert world.matched([*range(4), 20, 21, 22]) == 6
    assert world.matched([*range(4), 20, 99]) == 5
    assert world.matched([*range(4), 30, 31, 99]) == 6
    assert world.matched([*range(4), 99]) == 4
    world.check()


def test_without_a_state_pages_are_found_but_not_used(world):
    world.put(list(range(12)), snapshot=False)
    match = world.checked_match(CacheKey(list(range(20))), 19)
    assert (match.num_tokens, match.full_match_tokens, match.pages) == (0, 12, [])
    assert world.matched(list(range(20)), 11, "bounded") == 8


def test_bounded_gives_whole_pages_and_says_how_much_more_is_there(world):
    world.put(list(range(10)))
    match = world.checked_match(CacheKey(list(range(20))), 19, "bounded")
    assert (match.num_tokens, match.full_match_tokens, len(match.pages), match.tail_page) == (8, 10, 2, None)


def test_salts_share_nothing(world):
    world.put(list(range(8)), "a")
    assert world.matched(list(range(8)), salt="b") == 0
    assert world.matched(list(range(8)), salt="a") == 8


def test_salts_that_hold_nothing_are_forgotten(world):
    for number in range(50):
        world.put([number], str(number))
    assert len(world.tree._roots) == world.tree.held_snapshots == 8
    world.tree.evict_pages(100)
    assert world.tree._roots == {}


# -- insert -----------------------------------------------------------------------------------------------------------


def test_branches_share_their_common_pages(world):
    world.put([*range(8), 1, 1, 1, 1])
    before = world.pages.free_count
    world.put([*range(8), 2, 2, 2, 2])
    assert before - world.pages.free_count == 1  # the second branch's first two pages were duplicates
    world.check()


def test_what_the_tree_has_is_given_back(world):
    world.put(list(range(10)))
    pages, slot = world.pages.alloc(3), world.slots.alloc(1)[0]
    result = world.tree.insert(CacheKey(list(range(10))), pages, 10, slot)
    assert (result.pages, result.slots) == (pages, [slot])


def test_a_partial_page_needs_a_state_that_stands_on_it(world):
    pages = world.pages.alloc(3)
    result = world.tree.insert(CacheKey(list(range(10))), pages, 10, None)
    assert (result.pages, result.slots) == (pages[2:], [])
    assert world.tree.held_pages == 2


def test_nothing_is_kept_of_no_tokens(world):
    slot = world.slots.alloc(1)[0]
    result = world.tree.insert(CacheKey([1, 2]), [], 0, slot)
    assert (result.pages, result.slots) == ([], [slot])
    assert world.tree._roots == {}


def test_a_request_that_goes_on_uses_the_pages_of_the_tree(world):
    first, second = (world.start(CacheKey(list(range(14)))) for _ in range(2))
    assert world.checkpoint(first, 10)
    assert world.checkpoint(second, 10)
    assert second.match.pages == first.match.pages
    assert (world.tree.held_pages, world.tree.held_snapshots, world.tree.evictable_pages) == (3, 1, 1)
    world.check()
    world.finish(first)
    world.finish(second)
    world.check()
    assert world.tree.held_pages == 3 + 1 + 1  # pages of 12 tokens, two tails


# -- locks ------------------------------------------------------------------------------------------------------------


def test_what_is_locked_stays(world):
    ids = list(range(19))
    world.put(ids)
    match = world.tree.match(CacheKey(ids), 18)
    world.tree.lock(match)
    assert (world.tree.evictable_pages, world.tree.evictable_snapshots) == (0, 0)
    assert (world.tree.evict_pages(100), world.tree.evict_snapshots(100)) == (0, 0)
    with pytest.raises(RuntimeError, match="in use"):
        world.tree.flush()
    world.tree.unlock(match)
    assert world.tree.evict_pages(100) == 5
    world.check()


def test_a_state_can_go_once_it_is_copied(world):
    ids = list(range(19))
    world.put(ids)
    match = world.tree.match(CacheKey(ids), 18)
    world.tree.lock(match)
    world.tree.unlock_state(match)
    world.tree.unlock_state(match)
    assert (world.tree.evictable_pages, world.tree.evictable_snapshots) == (1, 1)
    assert world.tree.evict_pages(100) == 1  # the tail; the pages before it are in use
    assert world.slots.free_count == world.slots.total
    with pytest.raises(RuntimeError, match="in use"):
        world.tree.flush()
    world.tree.unlock(match)
    assert world.tree.evict_pages(100) == 4


def test_short_of_pages_a_state_without_a_tail_is_no_victim(world):
    for ids in (list(range(8)), list(range(10))):
        world.put(ids)
    match = world.tree.match(CacheKey(list(range(8))), 8, "bounded")
    world.tree.lock(match)
    assert world.tree.evict_pages(100) == 1
    assert world.matched(list(range(10))) == 8
    world.tree.unlock(match)
    world.check()


def test_a_state_that_was_spared_can_still_be_evicted(world):
    world.put([1] * 8)
    world.put([2] * 10)
    matches = [world.tree.match(CacheKey([first] * 8), 8, "bounded") for first in (1, 2)]
    for match in matches:
        world.tree.lock(match)
    assert world.tree.evict_pages(100) == 1
    world.check()
    assert world.tree.evict_snapshots(1) == 1
    for match in matches:
        world.tree.unlock(match)


def test_a_salt_is_forgotten_when_its_last_lock_ends(world):
    world.put([1, 2, 3], "s")
    match = world.tree.match(CacheKey([1, 2, 3], "s"), 2)
    world.tree.lock(match)
    world.tree.unlock_state(match)
    world.tree.evict_snapshots(1)
    world.tree.unlock(match)
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


def test_a_lock_survives_cuts_above_and_below(world):
    world.put(list(range(24)))
    match = world.tree.match(CacheKey(list(range(24))), 23)
    world.tree.lock(match)
    world.put([*range(8), 99])
    world.put([*range(16), 99])
    world.check()
    assert world.tree.evict_pages(100) == 2
    world.check_content(CacheKey(list(range(24))), match, state=True)
    world.tree.unlock(match)
    assert world.tree.evict_pages(100) == 6
    world.check()


def test_locks_are_counted(world):
    world.put(list(range(8)))
    match = world.tree.match(CacheKey(list(range(8))), 7)
    with pytest.raises(RuntimeError, match="not locked"):
        world.tree.unlock(match)
    world.tree.lock(match)
    with pytest.raises(RuntimeError, match="locked already"):
        world.tree.lock(match)
    world.tree.unlock(match)
    nothing = PrefixMatch.miss()
    world.tree.lock(nothing)
    world.tree.flush()
    world.tree.unlock(nothing)


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_snapshots_go_before_pages_and_the_oldest_first(world):
    for first in range(3):
        world.put([first] * 9)
    world.matched([0] * 9)  # looking is no use
    assert world.tree.evict_snapshots(1) == 1
    assert [world.matched([first] * 9) for first in range(3)] == [0, 9, 9]
    assert world.tree.match(CacheKey([0] * 9), 9).full_match_tokens == 8
    assert world.tree.evict_pages(2) == 2
    assert world.tree.match(CacheKey([0] * 9), 9).full_match_tokens == 0
    assert world.matched([1] * 9) == 9
    assert (world.tree.num_evicted_pages, world.tree.num_evicted_snapshots) == (3, 1)
    world.check()


def test_use_makes_young(world):
    for first in range(3):
        world.put([first] * 9)
    match = world.tree.match(CacheKey([0] * 9), 8)
    world.tree.lock(match)
    world.tree.unlock(match)
    world.tree.evict_snapshots(1)
    assert [world.matched([first] * 9) for first in range(3)] == [9, 0, 9]


def test_a_leaf_is_given_up_page_by_page_from_its_end(world):
    world.put(list(range(20)), snapshot=False)
    assert world.tree.evict_pages(2) == 2
    assert world.matched(list(range(20)), mode="bounded") == 12
    world.check()


def test_the_number_of_snapshots_is_bounded():
    world = World(max_snapshots=3)
    for first in range(6):
        world.put([first] * 5)
        world.check()
    assert world.tree.held_snapshots == 3
    assert [world.matched([first] * 5) for first in range(6)] == [0, 0, 0, 5, 5, 5]


def test_one_short_prompt_after_another_with_room_for_one():
    world = World(max_snapshots=1)
    for first in range(4):
        world.put([first])
        world.check()
        assert world.matched([first]) == 1


def test_a_new_state_does_not_push_out_locked_ones():
    world = World(max_snapshots=1)
    world.put([1] * 6)
    match = world.tree.match(CacheKey([1] * 6), 5)
    world.tree.lock(match)
    world.put([2] * 6)
    world.check()
    assert (world.matched([1] * 6), world.matched([2] * 6)) == (6, 0)
    world.tree.unlock(match)


def test_sessions_that_fit_stay_reusable_at_their_ends():
    """F02: interior snapshots of eight long prompts never cost one of them its last."""
    world = World(num_pages=200, num_slots=20, max_snapshots=8)
    prompts = [[number] * 80 for number in range(8)]
    for ids in prompts:
        req = world.start(CacheKey(ids))
        for at in (20, 40, 60, 80):
            assert world.checkpoint(req, at)
        world.finish(req)
    for _ in range(2):
        for ids in prompts:
            assert world.matched(ids, 79) == 79
            world.put(ids)
    world.check()


def test_a_redundant_state_does_not_push_out_the_end_of_another_session():
    world = World(max_snapshots=2)
    world.put([1] * 20)
    world.put([2] * 20)
    world.put([2] * 9)  # has a longer one behind it
    assert (world.matched([1] * 20), world.matched([2] * 20), world.matched([2] * 9)) == (20, 20, 0)


def test_where_ways_part_a_state_is_not_redundant():
    """The system prompt's state serves the next conversation."""
    world = World(max_snapshots=4)
    system = [7] * 9
    world.put(system)
    world.put([*system, 1])
    assert world.tree.evict_snapshots(1) == 1  # one way: goes first
    assert world.matched([*system, 5, 5]) == 9  # the state one further serves it
    world.put(system)
    world.put([*system, 2, 2])
    world.put([3] * 9)
    match = world.tree.match(CacheKey(system), 9)
    world.tree.lock(match)
    world.tree.unlock(match)
    world.tree.evict_snapshots(1)
    assert (world.matched([*system, 1]), world.matched(system)) == (9, 9)
    assert world.checked_match(CacheKey(system), 9).snapshot_tokens == 9
    world.check()


def test_a_state_is_redundant_again_when_all_but_one_way_are_gone():
    world = World()
    for ids in ([7] * 8, [7] * 8 + [1] * 8, [7] * 8 + [2] * 8, [3] * 8):
        world.put(ids)
    match = world.tree.match(CacheKey([7] * 8), 8)
    world.tree.lock(match)
    world.tree.unlock(match)
    world.tree.evict_snapshots(1)
    assert world.matched([7] * 8 + [1] * 8) == 8
    world.tree.evict_snapshots(1)
    assert (world.matched([7] * 8), world.matched([7] * 8 + [2] * 8), world.matched([3] * 8)) == (0, 16, 8)


# -- books ------------------------------------------------------------------------------------------------------------


def test_a_flush_frees_everything(world):
    for first in range(5):
        world.put([first] * 13)
    world.tree.flush()
    assert (world.pages.free_count, world.slots.free_count) == (60, 20)
    assert world.tree.num_evicted_pages == 0
    world.check()
    world.put([1] * 5)
    world.check()


def test_a_flush_takes_states_before_the_pages_they_stand_on(world):
    """Far down on the only way, where forgetting a state looks at the pages above it."""
    for length in (8, 13, 22):
        world.put(list(range(length)))
    world.tree.flush()
    world.check()
    assert (world.pages.free_count, world.slots.free_count) == (world.pages.total, world.slots.total)


def test_a_disabled_cache_takes_nothing():
    tree = RadixCache(4, PagePool(4), PagePool(2), 2, 3, disabled=True)
    result = tree.insert(CacheKey(list(range(8))), [0, 1], 8, 1)
    assert (result.pages, result.slots) == ([0, 1], [1])
    assert tree.match(CacheKey(list(range(8))), 8).num_tokens == 0


def test_without_room_for_snapshots_only_pages_are_kept():
    world = World(max_snapshots=0)
    world.put(list(range(10)))
    world.check()
    assert (world.tree.held_pages, world.tree.held_snapshots) == (2, 0)


def test_the_table_of_pools(world):
    world.put(list(range(10)))
    req = world.start(CacheKey(list(range(12))))
    table = pool_table(world.pages, world.slots, world.tree)
    assert table["pages"] == {"total": 60, "free": 56, "evictable": 0, "held": 4}
    assert table["slots"] == {"total": 20, "free": 18, "evictable": 0, "held": 2}
    assert "held although nothing runs" in idle_problem(world.pages, world.slots, world.tree)
    world.finish(req)
    assert idle_problem(world.pages, world.slots, world.tree) is None


@pytest.mark.parametrize("damage", ["held_pages", "held_snapshots", "_locked_pages"])
def test_a_wrong_count_is_found(world, damage):
    world.put(list(range(10)))
    setattr(world.tree, damage, getattr(world.tree, damage) + 1)
    with pytest.raises(AssertionError, match="in the books"):
        world.check()
    assert idle_problem(world.pages, world.slots, world.tree) is not None


def test_a_page_with_two_owners_is_found(world):
    world.put(list(range(10)))
    with pytest.raises(AssertionError, match="owned twice"):
        world.tree.check(own_pages=world.tree.match(CacheKey(list(range(10))), 9).pages)
    world.pages.free(world.tree.match(CacheKey(list(range(10))), 9).pages[:1])
    with pytest.raises(AssertionError, match="owned and free"):
        world.tree.check()
