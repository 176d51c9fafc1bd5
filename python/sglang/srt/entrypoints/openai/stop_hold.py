"""Output ids wait here until no stop string can claim them and their characters are complete.

The text routes get text that the detokeniser has already held back and cut. The chat parser needs ids, because only ids tell
a marker from text that looks like one; so the same rule is applied to ids: an id is shown when its bytes can no longer
belong to a stop string, and a matched string is cut before any of it was shown.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sglang.srt.entrypoints.openai.logprobs import incomplete_tail
from sglang.srt.managers.detokenizer import held_back
from sglang.srt.managers.tokenizer import Tokenizer


class StopHold:
    """Ids of one choice between the scheduler and the parser."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, keep_stop: bool = False, hidden: Collection[int] = ()):
        """`stop` are the request's stop strings; ids in `hidden` have no text (skip_special_tokens) and are dropped."""
        self._tokenizer = tokenizer
        self._stops = {text: text.encode() for text in stop}
        self._keep_stop = keep_stop
        self._hidden = hidden
        self._ids: list[int] = []

    def take(self, ids: Sequence[int]) -> list[int]:
        """Add new ids; returns those that are safe to show now."""
        self._ids += (token for token in ids if token not in self._hidden)
        text = self._text()
        return self._release(self._whole_ids(text, len(text) - held_back(text, list(self._stops.values()))))

    def finish(self, ids: Sequence[int], matched: int | str | None) -> tuple[list[int], str]:
        """The last ids to show, and the text after them: of a token that the stop string divides, or what is there of a
        character that was never finished.

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
        rest = text[sum(len(self._tokenizer.token_bytes(token)) for token in shown) : cut]
        self._ids = []
        return shown, rest.decode(errors="replace")

    def _text(self) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, self._ids))

    def _whole_ids(self, text: bytes, limit: int) -> int:
        """How many ids lie before `limit`, and end with a whole character: a cut must not divide one."""
        end = count = 0
        for number, token in enumerate(self._ids, start=1):
            end += len(self._tokenizer.token_bytes(token))
            if end > limit:
                break
            if not incomplete_tail(text[max(0, end - 4) : end]):
                count = number
        return count

    def _release(self, count: int) -> list[int]:
        released, self._ids = self._ids[:count], self._ids[count:]
        return released
