"""Output ids wait here until no stop string can claim them and their characters are complete.

The text routes get text that the detokeniser has already held back and cut. The chat parser needs ids, because only ids tell
a marker from text that looks like one; so the same rule is applied to ids: an id is shown when its bytes can no longer
belong to a stop string, and a matched string is cut before any of it was shown.

recipe decodes the ids of one push together, and what ends in U+FFFD waits for more or, at the end, is lost with all that was
pushed beside it. So ids leave only up to the end of a whole character. Bytes that become none leave as text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sglang.srt.entrypoints.openai.logprobs import incomplete_tail
from sglang.srt.managers.detokenizer import held_back
from sglang.srt.managers.tokenizer import Tokenizer

_MAX_BROKEN_IDS = 16
"""Ids in a row without a whole character that may wait; a model gone astray can produce them for ever."""

Shown = tuple[list[int], str]
"""Ids to show, and text after them that no ids stand for."""


class StopHold:
    """Ids of one choice between the scheduler and the parser."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, keep_stop: bool = False, hidden: Collection[int] = ()):
        """`stop` are the request's stop strings; ids in `hidden` have no text (skip_special_tokens) and are dropped."""
        self._tokenizer = tokenizer
        self._stops = {text: text.encode() for text in stop}
        self._keep_stop = keep_stop
        self._hidden = hidden
        self._ids: list[int] = []

    def take(self, ids: Sequence[int]) -> Shown:
        """Add new ids; returns what is safe to show now."""
        self._ids += (token for token in ids if token not in self._hidden)
        text = self._text()
        limit = len(text) - held_back(text, list(self._stops.values()))
        shown = self._release(self._whole_ids(text, limit))
        return shown, self._broken(limit - self._size(shown))

    def finish(self, ids: Sequence[int], matched: int | str | None) -> Shown:
        """Add the last ids; returns all that may be shown. A stop string may leave a part of a token.

        `matched` is the scheduler's verdict: the stop id, stop string or stop regex that the last of `ids` completed.
        """
        self._ids += (token for token in ids if token not in self._hidden)
        if isinstance(matched, int) and not self._keep_stop and self._ids and self._ids[-1] == matched:
            self._ids.pop()
        stop = self._stops.get(matched) if isinstance(matched, str) else None
        text = self._text()
        # The match ends within the last token. One without a position, a regex, is not cut.
        last = len(self._tokenizer.token_bytes(self._ids[-1])) if self._ids else 0
        start = -1 if stop is None else text.find(stop, max(0, len(text) - last - len(stop) + 1))
        cut = len(text)
        if stop is not None and start >= 0:
            cut = start + len(stop) if self._keep_stop else start
        shown = self._release(self._whole_ids(text, cut))
        rest = text[self._size(shown) : cut]
        self._ids = []
        return shown, rest.decode(errors="replace")

    def _text(self) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, self._ids))

    def _size(self, ids: Sequence[int]) -> int:
        return sum(len(self._tokenizer.token_bytes(token)) for token in ids)

    def _whole_ids(self, text: bytes, limit: int) -> int:
        """How many ids lie before `limit` and end with a whole character."""
        end = count = 0
        for number, token in enumerate(self._ids, start=1):
            end += len(self._tokenizer.token_bytes(token))
            if end > limit:
                break
            if _ends_with_character(text[max(0, end - 4) : end]):
                count = number
        return count

    def _broken(self, limit: int) -> str:
        """Text of a long run of bytes that form no character, without what may still become one."""
        text = self._text()
        size = count = end = 0
        for number, token in enumerate(self._ids, start=1):
            end += len(self._tokenizer.token_bytes(token))
            if end <= limit and not incomplete_tail(text[:end]):
                size, count = end, number
        if count <= _MAX_BROKEN_IDS:
            return ""
        self._release(count)
        return text[:size].decode(errors="replace")

    def _release(self, count: int) -> list[int]:
        released, self._ids = self._ids[:count], self._ids[count:]
        return released


def _ends_with_character(tail: bytes) -> bool:
    """Whether bytes end with a whole character, for recipe: one that is not U+FFFD. `tail` are the last four or fewer."""
    for size in range(1, len(tail) + 1):
        if tail[-size] & 0xC0 != 0x80:  # the first byte of a character, if there is one
            return tail[-size:].decode(errors="replace")[-1] != "\ufffd"
    return False
