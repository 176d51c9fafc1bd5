"""What a grammar is to the rest of the worker: a constraint that was asked for, compiled once, matched by each request.

    Constraint ──GrammarManager (compile thread)──► CompiledGrammar ──new_matcher──► Matcher, inside a GrammarState

A backend is anything that turns a `GrammarText` into a `CompiledGrammar`. It runs in the compile thread; matchers run in
the scheduler thread, one per request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.constrained.constraint import GrammarText


class GrammarError(Exception):
    """A grammar cannot be compiled; the message is the compiler's reason and is safe to show to a client."""


class Matcher(Protocol):
    """The state of one output in one grammar."""

    def allowed(self) -> torch.Tensor:
        """bool [V] on the CPU: ids that may come next. EOS is among them exactly where the output may end."""

    def accept(self, token_id: int) -> bool:
        """Take the next id. False, and nothing changed, if the grammar does not allow it."""

    def rollback(self, count: int) -> None:
        """Forget the last `count` accepted ids."""

    @property
    def is_terminated(self) -> bool:
        """EOS has been accepted."""


@dataclass(frozen=True)
class CompiledGrammar:
    """Shared by all requests with the same text. `ignored` names what of a schema is not enforced, as "/pointer keyword"."""

    new_matcher: Callable[[], Matcher]
    num_bytes: int  # memory, for the cache's bound
    ignored: tuple[str, ...] = ()


class GrammarBackend(Protocol):
    def compile(self, grammar: GrammarText) -> CompiledGrammar:
        """Blocks for milliseconds to seconds. Raises GrammarError with the reason."""
