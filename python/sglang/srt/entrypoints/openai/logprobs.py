"""Logprobs in the two shapes of the OpenAI API."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import TokenLogprobs
from sglang.srt.managers.tokenizer import Tokenizer

# JSON has no minus infinity. A token that a filter or a mask made impossible is reported with this, as OpenAI does.
_LOWEST = -9999.0


def chat_logprobs(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Entries of `logprobs.content` for consecutive output tokens."""
    return [
        {**_entry(token, logprob, tokenizer), "top_logprobs": [_entry(t, p, tokenizer) for p, t in _top(logprobs, i)]}
        for i, (token, logprob) in enumerate(zip(logprobs.ids, logprobs.logprobs, strict=True))
    ]


class CompletionLogprobs:
    """The `logprobs` object of a completion choice; parts of a stream continue each other's `text_offset`."""

    def __init__(self, tokenizer: Tokenizer, start: int = 0, *, skip_special_tokens: bool = True):
        """`start` is the offset in characters of the first token in the choice's text."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._start = start
        self._before = b""

    def take(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        """The object for further tokens. `text_offset` counts whole characters that precede the token."""
        result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for i, (token, logprob) in enumerate(zip(logprobs.ids, logprobs.logprobs, strict=True)):
            result["text_offset"].append(self._start)
            result["token_logprobs"].append(_number(logprob))
            result["tokens"].append(self._name(token))
            result["top_logprobs"].append({self._name(t): _number(p) for p, t in _top(logprobs, i)} or None)
            self._advance(token)
        return result

    def _name(self, token: int) -> str:
        return token_name(token, self._tokenizer)

    def _advance(self, token: int) -> None:
        data = self._before + self._tokenizer.visible_bytes(token, self._skip_special)
        whole = data.decode(errors="ignore")
        self._start += len(whole)
        self._before = incomplete_tail(data)


def token_name(token: int, tokenizer: Tokenizer) -> str:
    """The token as text; a piece of a character is written `bytes:\\xf0\\x9f`, so that no two tokens look alike."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def incomplete_tail(data: bytes) -> bytes:
    """The last bytes that begin a character whose end has not arrived; empty when `data` ends with a whole one."""
    for size in range(1, min(3, len(data)) + 1):
        lead = data[-size]
        if lead >= 0xC0:
            needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return data[-size:] if size < needed else b""
        if lead < 0x80:
            return b""
    return b""


def _top(logprobs: TokenLogprobs, i: int) -> list[tuple[float, int]]:
    return (logprobs.top[i] if logprobs.top else None) or []


def _entry(token: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"token": token_name(token, tokenizer), "bytes": list(tokenizer.token_bytes(token)), "logprob": _number(logprob)}


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST)
