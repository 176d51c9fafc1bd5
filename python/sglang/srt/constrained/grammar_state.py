"""Where one request stands in its constraint: free text, a trigger being forced, or the grammar itself.

    FREE ──trigger seen──────────────────────────► GRAMMAR ──EOS──► terminated
      └──bound id seen──► FORCING (the trigger) ──────┘

The trigger is found as it arrives, id by id (Knuth, Morris, Pratt), so nothing is searched twice and the cost of a token
does not depend on how many came before. Every step can be taken back: a draft that is refused leaves no trace.
"""

from __future__ import annotations

import enum
from collections import deque

import torch

from sglang.srt.constrained.constraint import Constraint
from sglang.srt.constrained.grammar import CompiledGrammar

MAX_ROLLBACK = 64
"""Tokens that can be taken back: far more than a step drafts."""


class Phase(enum.Enum):
    FREE = "free"
    FORCING = "forcing"
    GRAMMAR = "grammar"


class GrammarState:
    """One per request. Lives as long as the request, also while its memory is taken away: it depends on ids only."""

    def __init__(self, constraint: Constraint, compiled: CompiledGrammar, eos_ids: frozenset[int], vocab_size: int):
        self.ignored = compiled.ignored
        self._matcher = compiled.new_matcher()
        self._trigger = constraint.trigger_token_ids
        self._bound = constraint.bound_token_id
        self._fallback = prefix_function(self._trigger)
        self._vocab_size = vocab_size
        self._free_mask: torch.Tensor | None = None  # bool [V]
        if constraint.must_trigger:
            self._free_mask = torch.ones(vocab_size, dtype=torch.bool)
            self._free_mask[[i for i in eos_ids if i < vocab_size]] = False
        self.phase = Phase.FREE if self._trigger else Phase.GRAMMAR
        self._progress = 0  # ids of the trigger seen (FREE) or forced (FORCING)
        self._history: deque[tuple[Phase, int]] = deque(maxlen=MAX_ROLLBACK)  # before each of the last tokens

    def mask(self) -> torch.Tensor | None:
        """bool [V]: ids that may come next; None: all. Not to be called once terminated."""
        if self.phase is Phase.GRAMMAR:
            return self._matcher.allowed()
        if self.phase is Phase.FORCING:
            only = torch.zeros(self._vocab_size, dtype=torch.bool)
            only[self._trigger[self._progress]] = True
            return only
        return self._free_mask

    def advance(self, token_id: int) -> str | None:
        """Take a token that was committed. A reason means that it is not allowed here; the state is then of no more use."""
        before = self.phase, self._progress
        if self.phase is Phase.GRAMMAR:
            if not self._matcher.accept(token_id):
                return f"the grammar does not allow token {token_id} here"
        elif self.phase is Phase.FORCING:
            if token_id != self._trigger[self._progress]:
                return f"the trigger needs token {self._trigger[self._progress]} here, not {token_id}"
            self._progress += 1
        else:
            self._progress = self._seen(token_id)
            if self._progress < len(self._trigger) and token_id == self._bound:
                self.phase, self._progress = Phase.FORCING, 0
        if self.phase is not Phase.GRAMMAR and self._progress == len(self._trigger):
            self.phase, self._progress = Phase.GRAMMAR, 0
        self._history.append(before)
        return None

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens. ValueError for more than are remembered."""
        if not 0 <= count <= len(self._history):
            raise ValueError(f"{count} tokens cannot be taken back, {len(self._history)} are remembered")
        num_matched = 0
        for _ in range(count):
            self.phase, self._progress = self._history.pop()
            num_matched += self.phase is Phase.GRAMMAR
        if num_matched:
            self._matcher.rollback(num_matched)

    @property
    def is_terminated(self) -> bool:
        """The output is complete, and EOS has been taken."""
        return self.phase is Phase.GRAMMAR and self._matcher.is_terminated

    def _seen(self, token_id: int) -> int:
        """How much of the trigger the text ends with, now that `token_id` has come."""
        progress = self._progress
        while progress and token_id != self._trigger[progress]:
            progress = self._fallback[progress - 1]
        return progress + (token_id == self._trigger[progress])


def prefix_function(pattern: tuple[int, ...]) -> list[int]:
    """For each prefix: length of its longest proper prefix that is also its suffix (KMP)."""
    table = [0] * len(pattern)
    for i in range(1, len(pattern)):
        k = table[i - 1]
        while k and pattern[i] != pattern[k]:
            k = table[k - 1]
        table[i] = k + (pattern[i] == pattern[k])
    return table
