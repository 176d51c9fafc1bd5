"""Who goes first, and how much of a prompt one step computes.

The order of the waiting queue is a sort key. The share of a step is a budget of prompt rows, divided so that nobody
starves:

* One request gets at most `chunked_prefill_size` rows of a step.
* Requests beyond their first chunk together get at most half of `max_prefill_tokens` while others wait.
* Decode rows (one per running request) are outside the budget; every running request that has pages gets its row.

So a prompt that is at the head of the queue, no longer than half the budget, and finds a slot and pages, is computed in the
first step scheduled after its arrival: its first token comes within two steps, plus the one that was in flight. A step has
at most `max_prefill_tokens` prompt rows and `max_running_requests` decode rows, whatever else is running. What can delay it
is memory: the queue is strict, so behind a request that waits for pages others wait too (else it would wait for ever).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang.srt.managers.request import Req

MAX_MATCHED = 64
"""Longest-prefix-first looks at so many waiting requests; in a longer queue the rest keeps arrival order (a match costs time)."""


def rank(req: Req) -> tuple[int, int]:
    """Order of running requests: the last of them is retracted first."""
    return (-req.msg.priority, req.arrival)


def order_waiting(waiting: Iterable[Req], policy: str, matched_tokens: Callable[[Req], int]) -> list[Req]:
    """The waiting requests, next one first.

    `fcfs`: arrival. `priority`: larger priority, then arrival. `lpm`: requests that were retracted (others wait for the same
    memory again otherwise), then the longest cached prefix, then arrival.
    """
    by_arrival = sorted(waiting, key=lambda req: req.arrival)
    if policy == "priority":
        return sorted(by_arrival, key=rank)
    if policy == "lpm":
        head, tail = by_arrival[:MAX_MATCHED], by_arrival[MAX_MATCHED:]
        return sorted(head, key=lambda req: (req.num_retractions == 0, -matched_tokens(req))) + tail
    return by_arrival


class PrefillBudget:
    """Prompt rows left in one step."""

    def __init__(self, max_prefill_tokens: int, chunked_prefill_size: int, others_wait: bool):
        self._left = max_prefill_tokens
        self._left_for_continuing = max(1, max_prefill_tokens // 2) if others_wait else max_prefill_tokens
        self._chunk = chunked_prefill_size if chunked_prefill_size > 0 else max_prefill_tokens

    @property
    def is_spent(self) -> bool:
        return self._left <= 0

    def grant(self, wanted: int, *, is_continuing: bool) -> int:
        """Rows of `wanted` this request may compute now. A single row is a decode: always granted, never counted."""
        if wanted <= 1:
            return wanted
        limit = min(self._left, self._left_for_continuing) if is_continuing else self._left
        return max(0, min(wanted, self._chunk, limit))

    def spend(self, rows: int, *, is_continuing: bool) -> None:
        """Account for rows that are really computed (fewer than granted when pages are short)."""
        if rows > 1:
            self._left -= rows
            if is_continuing:
                self._left_for_continuing -= rows
