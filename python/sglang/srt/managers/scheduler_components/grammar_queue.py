"""Requests whose grammar is being compiled. They hold no memory and no place; the loop never waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

from sglang.srt.constrained.grammar import CompiledGrammar, GrammarError
from sglang.srt.constrained.grammar_state import GrammarState
from sglang.srt.constrained.manager import GrammarManager
from sglang.srt.errors import BadRequest, Overloaded, ServiceError
from sglang.srt.managers.request import Req, ReqState

POLL_S = 0.002
"""How long the loop sleeps at a time while there is nothing but compiles to wait for."""


class GrammarQueue:
    """Waits for compiles on behalf of requests, each for a limited time."""

    def __init__(self, manager: GrammarManager | None, eos_ids: frozenset[int], vocab_size: int, timeout_s: float):
        """Without a manager, requests with a grammar are refused."""
        self._manager = manager
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._compiling: dict[Req, tuple[Future[CompiledGrammar], float]] = {}  # with the time they came

    def __len__(self) -> int:
        return len(self._compiling)

    def add(self, req: Req, now: float) -> None:
        """Start to compile. Raises BadRequest if this server has no grammar backend."""
        assert req.msg.constraint is not None, "only requests with a grammar come here"
        if self._manager is None:
            raise BadRequest(
                f"structured output is off on this server (--grammar-backend none): leave out {req.msg.constraint.grammar.kind}"
            )
        self._compiling[req] = self._manager.submit(req.msg.constraint.grammar), now
        req.state = ReqState.COMPILING

    def remove(self, req: Req) -> None:
        """The request ended otherwise; its compile goes on for the cache."""
        del self._compiling[req]

    def take_finished(self, now: float) -> Iterator[tuple[Req, ServiceError | None]]:
        """Requests that need not wait any more, in order of arrival: with their grammar state set, or with the error that ends them."""
        for req, (future, since) in list(self._compiling.items()):
            if future.done():
                yield req, self._begin(req, future)
            elif now - since >= self._timeout_s:
                yield req, self._too_slow(future)

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()

    def _begin(self, req: Req, future: Future[CompiledGrammar]) -> ServiceError | None:
        assert req.msg.constraint is not None
        try:
            req.grammar = GrammarState(req.msg.constraint, future.result(), self._eos_ids, self._vocab_size)
        except GrammarError as error:
            return BadRequest(str(error))
        return None

    def _too_slow(self, future: Future[CompiledGrammar]) -> ServiceError:
        if future.running():
            return BadRequest(
                f"compiling the grammar took longer than {self._timeout_s:g} s (--grammar-timeout-s); simplify it, "
                "or try again later: the result is kept"
            )
        return Overloaded(f"other grammars were compiled for {self._timeout_s:g} s before this one's turn; try again later")
