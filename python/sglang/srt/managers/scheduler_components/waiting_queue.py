"""Requests that hold no memory yet, or no longer."""

from __future__ import annotations

from collections.abc import Iterator

from sglang.srt.errors import Overloaded
from sglang.srt.managers.request import Req, ReqState


class WaitingQueue:
    """A bounded list. Its order means nothing: every step sorts it by the schedule policy."""

    def __init__(self, max_queued_requests: int):
        self._max = max_queued_requests
        self._waiting: list[Req] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Req]:
        return iter(tuple(self._waiting))

    def refuse_if_full(self, others: int, free_places: int) -> None:
        """Raises Overloaded if more wait, with `others` that will come here, than --max-queued-requests and the `free_places`
        that are about to be filled from the queue."""
        waiting = len(self._waiting) + others
        if waiting >= self._max + free_places:
            raise Overloaded(f"{waiting} requests are waiting already (--max-queued-requests {self._max}); try again later")

    def add(self, req: Req) -> None:
        """Enqueue a request that was accepted: new, compiled, or retracted."""
        req.state = ReqState.WAITING
        self._waiting.append(req)

    def remove(self, req: Req) -> None:
        self._waiting.remove(req)
