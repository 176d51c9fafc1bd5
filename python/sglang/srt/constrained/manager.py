"""Compiles grammars beside the scheduler's loop and remembers the results.

One thread compiles: a running compile cannot be interrupted, and on a machine with few cores a second one would take time
from the model. What was compiled, or turned out to be wrong, is kept up to a bound in bytes, so that neither a popular
schema nor a popular mistake costs twice. A result that comes too late for its request is kept all the same.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from sglang.srt.constrained.constraint import GrammarText
from sglang.srt.constrained.grammar import CompiledGrammar, GrammarBackend, GrammarError

logger = logging.getLogger(__name__)

ERROR_BYTES = 1024
"""What a remembered refusal counts in the cache, besides its text."""


class GrammarManager:
    """`submit` gives a future of a compiled grammar; equal grammars share one. Used from the scheduler thread."""

    def __init__(self, make_backend: Callable[[], GrammarBackend], cache_bytes: int):
        """`make_backend` is called in the compile thread: loading a grammar library takes seconds."""
        self._make_backend = make_backend
        self._backend: GrammarBackend | None = None
        self._cache = _Cache(cache_bytes)
        self._running: dict[GrammarText, Future[CompiledGrammar]] = {}
        self._lock = threading.RLock()  # a future that is done at once calls back inside submit
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def warm_up(self) -> None:
        """Load the backend now, in the compile thread, and not with the first request."""
        self._pool.submit(self._load)

    def submit(self, grammar: GrammarText) -> Future[CompiledGrammar]:
        """A future that raises GrammarError if the grammar is wrong. It is done at once if the result is known."""
        with self._lock:
            known = self._cache.get(grammar)
            if known is not None:
                return known
            future = self._running.get(grammar)
            if future is None:
                future = self._running[grammar] = self._pool.submit(self._compile, grammar)
                future.add_done_callback(lambda done: self._keep(grammar, done))
            return future

    @property
    def num_cached_bytes(self) -> int:
        return self._cache.num_bytes

    def close(self) -> None:
        """Start no further compiles; one that runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> GrammarBackend:
        if self._backend is None:
            self._backend = self._make_backend()
        return self._backend

    def _compile(self, grammar: GrammarText) -> CompiledGrammar:
        try:
            return self._load().compile(grammar)
        except GrammarError:
            raise
        except Exception as error:
            # A fault of ours or of the library must not look like the client's, nor reach the loop.
            logger.exception("compiling a %s failed", grammar.kind)
            raise GrammarError(f"the compiler failed with {type(error).__name__}") from error

    def _keep(self, grammar: GrammarText, done: Future[CompiledGrammar]) -> None:
        with self._lock:
            self._running.pop(grammar, None)
            if done.cancelled():
                return
            size = ERROR_BYTES if done.exception() is not None else done.result().num_bytes
            self._cache.put(grammar, done, size + len(grammar.text))


class _Cache:
    """Finished futures, least recently used first, bounded by the bytes they stand for."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._entries: OrderedDict[GrammarText, tuple[Future[CompiledGrammar], int]] = OrderedDict()
        self.num_bytes = 0

    def get(self, grammar: GrammarText) -> Future[CompiledGrammar] | None:
        entry = self._entries.get(grammar)
        if entry is None:
            return None
        self._entries.move_to_end(grammar)
        return entry[0]

    def put(self, grammar: GrammarText, done: Future[CompiledGrammar], size: int) -> None:
        """Larger than the whole bound: not kept."""
        if size > self._max_bytes or grammar in self._entries:
            return
        self._entries[grammar] = done, size
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.num_bytes -= freed
