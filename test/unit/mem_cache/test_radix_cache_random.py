"""The prefix cache under random operations, against a model that is a list of what is on every page and slot."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from sglang.srt.mem_cache.radix_cache import CacheKey
from unit.mem_cache.cache_world import World

EXAMPLES, STEPS = 110, 160  # upper limits: hypothesis ends many examples early, so operations are counted
MIN_OPERATIONS = 10_000

salts = st.sampled_from(["", "", "", "s"])
few_ids = st.lists(st.integers(0, 1), min_size=1, max_size=8)


class CacheMachine(RuleBasedStateMachine):
    """Requests start, go on, finish and fail in any order, while memory is short. `World` checks every match."""

    num_operations = 0  # of all examples

    def __init__(self):
        super().__init__()
        self.known: list[list[int]] = [[]]

    @initialize(
        page_size=st.sampled_from([2, 4, 8]),
        backtracking=st.sampled_from([0, 3, 6, 9]),
        max_snapshots=st.sampled_from([2, 6, 12]),
        num_pages=st.sampled_from([24, 60]),
    )
    def build(self, page_size, backtracking, max_snapshots, num_pages):
        self.world = World(num_pages, max_snapshots + 4, max_snapshots, page_size, backtracking)

    def ids(self, data, more) -> list[int]:
        """Something known, most often but for its last ids, and more."""
        base = data.draw(st.sampled_from(self.known[-12:]))
        cut = data.draw(st.sampled_from([0, 0, 1, 1, 2, 3, 5, 8, 40]))
        return (base[: max(0, len(base) - cut)] + more)[:40]

    @rule(data=st.data(), more=few_ids, salt=salts, mode=st.sampled_from(["exact", "exact", "bounded"]))
    def start(self, data, more, salt, mode):
        ids = self.ids(data, more)
        if len(self.world.running) < 4 and self.world.start(CacheKey(ids, salt), mode):
            self.known.append(ids)

    @rule(data=st.data(), more=few_ids, salt=salts, snapshot=st.booleans())
    def live(self, data, more, salt, snapshot):
        ids = self.ids(data, more)
        if self.world.put(ids, salt, snapshot=snapshot):
            self.known.append(ids)

    @rule(data=st.data(), more=few_ids, salt=salts, mode=st.sampled_from(["exact", "bounded"]))
    def look(self, data, more, salt, mode):
        ids = self.ids(data, more)
        self.world.checked_match(CacheKey(ids, salt), data.draw(st.integers(0, len(ids) + 2)), mode)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), cache=st.sampled_from([True, True, True, False]), snapshot=st.booleans())
    def finish(self, data, cache, snapshot):
        self.world.finish(data.draw(st.sampled_from(self.world.running)), cache=cache, snapshot=snapshot)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def checkpoint(self, data):
        req = data.draw(st.sampled_from(self.world.running))
        if (first := max(1, req.match.num_tokens)) <= len(req.key.ids):
            self.world.checkpoint(req, data.draw(st.integers(first, len(req.key.ids))))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def state_is_copied(self, data):
        req = data.draw(st.sampled_from(self.world.running))
        req.state_released = True
        self.world.tree.unlock_state(req.match)

    @rule(count=st.integers(1, 10))
    def evict_pages(self, count):
        evictable, free = self.world.tree.evictable_pages, self.world.pages.free_count
        freed = self.world.tree.evict_pages(count)
        assert freed >= min(count, evictable)
        assert self.world.pages.free_count == free + freed

    @rule(count=st.integers(1, 3))
    def evict_snapshots(self, count):
        evictable, free = self.world.tree.evictable_snapshots, self.world.slots.free_count
        assert self.world.tree.evict_snapshots(count) == min(count, evictable)
        assert self.world.slots.free_count == free + min(count, evictable)

    @rule(chance=st.integers(1, 8))
    def flush(self, chance):
        if any(req.match.node is not None for req in self.world.running):
            with pytest.raises(RuntimeError):
                self.world.tree.flush()
        elif chance == 8:
            self.world.tree.flush()
            assert self.world.tree.held_pages == self.world.tree.held_snapshots == 0

    @invariant()
    def books_balance(self):
        if hasattr(self, "world"):
            CacheMachine.num_operations += 1
            self.world.check()
            assert self.world.tree.held_snapshots <= self.world.tree.max_snapshots
            for req in self.world.running:
                self.world.check_held(req)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for req in list(self.world.running):
            self.world.finish(req)
        self.world.check()
        tree = self.world.tree
        assert (tree.evictable_pages, tree.evictable_snapshots) == (tree.held_pages, tree.held_snapshots)
        held = tree.held_pages
        assert tree.evict_pages(1000) == held
        tree.evict_snapshots(1000)  # some stand on no page of their own
        assert (self.world.pages.free_count, self.world.slots.free_count) == (self.world.pages.total, self.world.slots.total)
        assert tree._roots == {}


def test_random_operations_lose_and_share_nothing_and_find_all_there_is():
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]
    limits = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, suppress_health_check=checks)
    CacheMachine.num_operations = -EXAMPLES  # the books are looked at once before the first operation of each
    run_state_machine_as_test(CacheMachine, settings=limits)
    assert CacheMachine.num_operations >= MIN_OPERATIONS
