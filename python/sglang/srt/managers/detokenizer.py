"""Step "detokenize": ids of one sequence to text, in pieces that never have to be taken back.

Three promises. A piece never holds part of a character: its bytes wait until they decode. A piece never holds part of a
stop string that is going to be cut: text that could begin one waits until it turns out not to. And the pieces put
together are exactly what decoding all ids at once gives, up to the cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """One per sequence. Bytes are kept only while they may still have to be cut, so each token costs the same."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        no_stop_trim: bool = False,
    ):
        """`spaces_between_special_tokens` changes nothing: a byte-level vocabulary has no such spaces."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._no_stop_trim = no_stop_trim
        self._stops = {text: text.encode() for text in stop}
        # A stop string that stays in the text may be shown as it comes.
        self._held_for = [] if no_stop_trim else list(self._stops.values())
        self._keep = max((len(encoded) for encoded in self._stops.values()), default=1) - 1
        self._recent = b""  # the end of the text: shown bytes in which a match may begin, then those not shown yet
        self._num_shown = 0  # of `_recent`: given to the decoder, cannot be taken back
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._finished = False

    def push(self, ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """New text from new ids; with `finish`, the rest of the text, after which nothing may follow (ValueError).

        A stop that was matched ends with the last of `ids`: its text is cut, or kept with no_stop_trim. Bytes that never
        became a character come out as U+FFFD at the end.
        """
        if self._finished:
            raise ValueError("the sequence has already finished")
        pieces = [self._tokenizer.visible_bytes(token_id, self._skip_special) for token_id in ids]
        self._recent += b"".join(pieces)
        if finish is None:
            return self._show(len(self._recent) - held_back(self._recent[self._num_shown :], self._held_for))
        self._finished = True
        return self._show(self._end_of_text(pieces[-1] if pieces else b"", finish.matched), final=True)

    def _show(self, end: int, final: bool = False) -> str:
        """Decode what is new up to `end`, and forget what no match can begin in any more."""
        text = self._decoder.decode(self._recent[self._num_shown : end], final)
        cut = max(0, min(end, len(self._recent) - self._keep))
        self._recent = self._recent[cut:]
        self._num_shown = end - cut
        return text

    def _end_of_text(self, last: bytes, matched: int | str | None) -> int:
        """Where in `_recent` the text ends, when the last token's bytes completed what was matched."""
        if isinstance(matched, int):
            return len(self._recent) - (0 if self._no_stop_trim else len(last))
        stop = self._stops.get(matched) if matched is not None else None
        if stop is None:  # length, abort, the end of a grammar, or a stop regex: all text counts
            return len(self._recent)
        # A match that ends before the last token was not honoured: it came before min_new_tokens.
        start = self._recent.find(stop, max(0, len(self._recent) - len(last) - len(stop) + 1))
        if start < 0:
            return len(self._recent)
        return start + len(stop) if self._no_stop_trim else start


def held_back(text: bytes, stops: Sequence[bytes]) -> int:
    """Length of the longest end of `text` that begins one of `stops` without completing it."""
    longest = 0
    for stop in stops:
        start = max(0, len(text) - len(stop) + 1)
        while (start := text.find(stop[:1], start)) >= 0 and len(text) - start > longest:
            if stop.startswith(text[start:]):
                longest = len(text) - start
                break
            start += 1
    return longest
