"""Pages and slots of running requests, and what of them the radix tree gets (steps "match the prefix" and "cache").

A request's page table starts with `num_shared_pages` pages that belong to the tree (locked while it runs); the rest is its
own. Memory operations are returned as `PoolOp`s that travel with a step, so they run in order with the forwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.managers.request import Req
from sglang.srt.managers.scheduler_components.step_plan import Snapshot, Step
from sglang.srt.mem_cache import books
from sglang.srt.mem_cache.allocator import PagePool
from sglang.srt.mem_cache.radix_cache import InsertResult, PrefixMatch, RadixCache
from sglang.srt.model_executor.step import PoolOp


@dataclass(frozen=True, slots=True)
class Attachment:
    """A request has got its slot and shared pages."""

    ops: list[PoolOp]  # to run before its first rows
    branch: int  # tokens whose pages the tree has, though perhaps no state: where an earlier prompt branches off


class PageKeeper:
    """Moves pages and slots between the free pools, running requests and the tree."""

    def __init__(self, page_size: int, pages: PagePool, slots: PagePool, tree: RadixCache, replay_tokens: int):
        self.page_size = page_size
        self.pages = pages
        self.slots = slots
        self.tree = tree
        self.replay_tokens = replay_tokens  # rows that rebuild a window in bounded restore

    @property
    def available_pages(self) -> int:
        """Pages that are free, or that eviction can free."""
        return self.pages.free_count + self.tree.evictable_pages

    def matched_tokens(self, req: Req) -> int:
        """Tokens a match would find now; nothing is locked."""
        return self._match(req)[0].num_tokens

    # -- admission ----------------------------------------------------------------------------------------------------

    def attach(self, req: Req, *, headroom: int, use_cache: bool = True) -> Attachment | None:
        """Match the prefix and give `req` a slot and its shared pages.

        None, and nothing changed, unless there is room for all its known tokens plus `headroom` pages. Own pages are
        allocated later, as tokens are computed (`grow`).
        """
        match, replayed = self._match(req) if use_cache else (PrefixMatch.miss(), 0)
        self.tree.lock(match)
        slot = self._take_slot()
        tail = self._take_pages(1) if slot is not None and match.tail_page is not None else []
        num_needed = req.page_count(self.page_size) - len(match.pages) - len(tail or [])
        if slot is None or tail is None or num_needed + headroom > self.available_pages:
            self.pages.free(tail or [])
            self.slots.free([] if slot is None else [slot])
            self.tree.unlock(match)
            return None
        req.lock, req.slot = match, slot
        req.pages, req.num_shared_pages = match.pages + tail, len(match.pages)
        req.num_computed = match.num_tokens - replayed
        # Replayed rows read and keep the shared pages, which are exact; only their windows begin anew.
        req.window_start, req.kv_start = (req.num_computed, match.num_tokens) if replayed else (0, 0)
        req.num_replayed += replayed
        # The rings of a restored state are written up to where it was taken, so taken back twice they would lack positions;
        # replayed windows are complete when the replay is.
        req.state_from = match.num_tokens if replayed else match.snapshot_tokens
        ops = [] if match.tail_page is None else [PoolOp("copy_page", match.tail_page, tail[0])]
        # A match to be replayed has no snapshot: its windows start from nothing, as those of a fresh request do.
        ops.append(PoolOp("copy_slot", match.snapshot, slot) if match.snapshot is not None else PoolOp("reset_slot", slot, slot))
        self.tree.unlock_state(match)  # whoever gets that slot or page next writes it behind these operations
        return Attachment(ops, match.full_match_tokens)

    def _match(self, req: Req) -> tuple[PrefixMatch, int]:
        """The match, and how many of its last tokens are to be replayed because no snapshot has their windows."""
        key, limit = req.cache_key(), req.match_limit
        exact = self.tree.match(key, limit)
        if req.restore != "bounded":
            return exact, 0
        whole = self.tree.match(key, limit, mode="bounded")
        replayed = min(whole.num_tokens, self.replay_tokens)
        # A snapshot that leaves no more to compute than a replay would is better: it is exact.
        return (exact, 0) if whole.num_tokens - replayed <= exact.num_tokens else (whole, replayed)

    def _take_slot(self) -> int | None:
        if not self.slots.free_count:
            self.tree.evict_snapshots(1)
        taken = self.slots.alloc(1)
        return taken[0] if taken else None

    def _take_pages(self, count: int) -> list[int] | None:
        missing = count - self.pages.free_count
        if missing > 0:
            self.tree.evict_pages(missing)
        return self.pages.alloc(count)

    # -- while running ------------------------------------------------------------------------------------------------

    def grow(self, req: Req, num_tokens: int) -> int:
        """Add pages so that `req` can hold `num_tokens`; returns how many tokens it can hold (fewer when pages are short)."""
        missing = -(-num_tokens // self.page_size) - len(req.pages)
        if missing > 0:
            req.pages += self._take_pages(min(missing, self.available_pages)) or []
        return min(num_tokens, len(req.pages) * self.page_size)

    def take_snapshot(self, req: Req) -> tuple[Snapshot, list[PoolOp]] | None:
        """Copy the state of `req` at its computed position. None if it is not fit to be kept, or there is no room: a snapshot is
        never worth a retraction."""
        num_tokens = req.num_computed
        if num_tokens < req.state_from:
            return None
        has_tail = num_tokens % self.page_size != 0
        slot = self._take_slot()
        tail = self._take_pages(1) if slot is not None and has_tail else []
        if slot is None or tail is None:
            self.slots.free([] if slot is None else [slot])
            return None
        ops = [PoolOp("copy_slot", req.slot, slot)]
        if has_tail:
            ops.append(PoolOp("copy_page", req.pages[num_tokens // self.page_size], tail[0]))
        return Snapshot(req, num_tokens, slot, tail[0] if has_tail else None), ops

    def keep_snapshot(self, snapshot: Snapshot, in_flight: Step | None) -> None:
        """Hand a snapshot that has been taken to the tree. From here on the request shares its full pages with the tree.

        Where the tree had these tokens already, the request goes over to the tree's pages (the content is equal bit for
        bit) and its own are freed once no step in flight reads them.
        """
        req, num_tokens = snapshot.req, snapshot.num_tokens
        num_full = num_tokens // self.page_size
        tail = [] if snapshot.tail_page is None else [snapshot.tail_page]
        key = req.cache_key(num_tokens)
        result = self.tree.insert(key, req.pages[:num_full] + tail, num_tokens, snapshot.slot)
        self._free(result, in_flight)
        match = self.tree.match(key, num_full * self.page_size, mode="bounded")
        self.tree.lock(match)
        self.tree.unlock(_held(req))
        req.lock, req.num_shared_pages = match, num_full
        req.pages[:num_full] = match.pages

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        self.slots.free([snapshot.slot])
        self.pages.free([] if snapshot.tail_page is None else [snapshot.tail_page])

    # -- end of residence ---------------------------------------------------------------------------------------------

    def release(self, req: Req, *, cache: bool = True) -> None:
        """Take all memory from `req`, which no step in flight uses. The tree gets what is computed, with the slot as its state."""
        num_tokens = req.num_valid if cache else 0
        is_state_usable = num_tokens >= req.state_from
        kept_pages = -(-num_tokens // self.page_size) if is_state_usable else num_tokens // self.page_size
        own = req.pages[max(kept_pages, req.num_shared_pages) :]
        slot: int | None = req.slot
        if kept_pages:
            snapshot = slot if is_state_usable else None
            num_inserted = num_tokens if is_state_usable else kept_pages * self.page_size
            result = self.tree.insert(req.cache_key(num_inserted), req.pages[:kept_pages], num_inserted, snapshot)
            self._free(result, None)
            slot = None if is_state_usable else slot
        self.tree.unlock(_held(req))
        self.pages.free(own)
        self.slots.free([] if slot is None else [slot])
        req.slot, req.pages, req.num_shared_pages, req.lock = -1, [], 0, None
        req.num_computed, req.window_start, req.kv_start, req.state_from, req.snapshot_points = 0, 0, 0, 0, []

    def _free(self, result: InsertResult, in_flight: Step | None) -> None:
        """Memory that the tree did not take. A step in flight may still read such pages."""
        if in_flight is None:
            self.pages.free(result.pages)
        else:
            in_flight.free_pages += result.pages
        self.slots.free(result.slots)

    # -- books --------------------------------------------------------------------------------------------------------

    def pool_table(self) -> dict[str, dict[str, int]]:
        """Pool name -> total, free, evictable, held."""
        return books.pool_table(self.pages, self.slots, self.tree)

    def books_problem(self) -> str | None:
        """While nothing runs: why the books do not balance, or None."""
        return books.idle_problem(self.pages, self.slots, self.tree)


def _held(req: Req) -> PrefixMatch:
    """The lock that a resident request holds."""
    assert req.lock is not None, f"request {req.rid} is not resident"
    return req.lock
