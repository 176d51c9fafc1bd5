"""Decides, in the scheduler, after which token a request ends, and why.

The checker is fed the emitted ids one by one, so what it says cannot depend on how many came in one step. For one token
the order is: stop string, stop regex, EOS or stop id, length. Text is what the client sees: special tokens that are
skipped are no part of it. Matched tokens stay in the ids and in the counts; cutting the text is the detokeniser's task.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.sampling.sampling_params import SamplingParams, compile_stop_regex

REGEX_WINDOW = 1024
"""Characters at the end of the text in which a stop regex may match; a bound on its cost per token."""


class StopChecker:
    """One per request, kept over retraction. Time and memory per token do not grow with the text."""

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: frozenset[int],
        tokenizer: Tokenizer | None = None,
        *,
        context_room: int | None = None,
    ):
        """`context_room`: tokens the context leaves after the prompt. ValueError: text stops without a tokenizer, or an
        invalid regex (the parser of requests lets neither through)."""
        if (params.stop or params.stop_regex) and tokenizer is None:
            raise ValueError("stop strings and stop regexes need a tokenizer")
        self.num_tokens = 0
        limits = [limit for limit in (params.max_new_tokens, context_room) if limit is not None]
        self.max_tokens: int | None = min(limits) if limits else None
        self._min_tokens = params.min_new_tokens
        self._end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._strings = _StringSearch(params.stop) if params.stop else None
        self._regexes = _RegexSearch(params.stop_regex) if params.stop_regex else None

    @property
    def remaining(self) -> int | None:
        """Tokens that may still be emitted; None: no limit."""
        return None if self.max_tokens is None else self.max_tokens - self.num_tokens

    def before_first(self) -> FinishReason | None:
        """The reason to end before any token: max_new_tokens 0, or a full context."""
        return FinishReason(type="length", length=0) if self.max_tokens is not None and self.max_tokens <= 0 else None

    def check(self, token_id: int) -> FinishReason | None:
        """Take the next emitted id. A reason means that it is the last one."""
        self.num_tokens += 1
        matched: int | str | None = self._match_text(token_id)
        if matched is None and token_id in self._end_ids:
            matched = token_id
        if matched is not None and self.num_tokens >= self._min_tokens:
            return FinishReason(type="stop", matched=matched)
        if self.max_tokens is not None and self.num_tokens >= self.max_tokens:
            return FinishReason(type="length", length=self.num_tokens)
        return None

    def check_run(self, ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Take the ids of one step in order: how many of them count, and why the request ends there, if it does."""
        for count, token_id in enumerate(ids, start=1):
            reason = self.check(token_id)
            if reason is not None:
                return count, reason
        return len(ids), None

    def _match_text(self, token_id: int) -> str | None:
        """The stop string or pattern that this token completes. Searched also before min_new_tokens, to stay in step."""
        if self._tokenizer is None or (self._strings is None and self._regexes is None):
            return None
        new = self._tokenizer.visible_bytes(token_id, self._skip_special)
        by_string = self._strings.feed(new) if self._strings else None
        by_regex = self._regexes.feed(new) if self._regexes else None
        return by_string if by_string is not None else by_regex


class _StringSearch:
    """Finds the stop string that new bytes complete. UTF-8 is self-synchronising, so bytes match where characters do."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [(stop, stop.encode()) for stop in stops]
        self._keep = max(len(encoded) for _, encoded in self._stops) - 1
        self._tail = b""  # the last bytes of the text: as many as can begin a match that new bytes complete

    def feed(self, new: bytes) -> str | None:
        """Among the matches that end within `new`: the one that begins first, then the first in the list."""
        text = self._tail + new
        found: tuple[int, str] | None = None
        for stop, encoded in self._stops:
            start = text.find(encoded, max(0, len(self._tail) - len(encoded) + 1))
            if start >= 0 and (found is None or start < found[0]):
                found = start, stop
        self._tail = text[max(0, len(text) - self._keep) :]
        return found[1] if found else None


class _RegexSearch:
    """Finds the first pattern that matches the text so far, looking at its last REGEX_WINDOW characters."""

    def __init__(self, patterns: Sequence[str]):
        self._patterns = [(pattern, compile_stop_regex(pattern)) for pattern in patterns]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._window = ""  # one character more than is searched: ^ and \b must see that text comes before

    def feed(self, new: bytes) -> str | None:
        """The first pattern of the list that matches; None, without a search, while a character is incomplete."""
        text = self._decoder.decode(new)
        if not text:
            return None
        self._window = (self._window + text)[-(REGEX_WINDOW + 1) :]
        start = 1 if len(self._window) > REGEX_WINDOW else 0
        return next((pattern for pattern, compiled in self._patterns if compiled.search(self._window, start)), None)
