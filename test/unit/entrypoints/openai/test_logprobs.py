from __future__ import annotations

import math

import pytest

from sglang.srt.entrypoints.openai.logprobs import CompletionLogprobs, chat_logprobs, incomplete_tail, token_name
from sglang.srt.managers.io_struct import TokenLogprobs


def logprobs_of(ids: list[int], top: int = 0) -> TokenLogprobs:
    tops = [[(-0.5, token), (-2.0, 42)][:top] for token in ids] if top else None
    return TokenLogprobs(ids=ids, logprobs=[-0.5] * len(ids), top=tops)


def test_every_byte_of_a_character_is_reported(tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    entries = chat_logprobs(logprobs_of(ids), tokenizer)
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "😀".encode()
    assert entries[0]["token"] == "bytes:\\xf0" and entries[0]["top_logprobs"] == []


def test_alternatives_come_best_first(tokenizer) -> None:
    (entry,) = chat_logprobs(logprobs_of(tokenizer.encode("one"), top=2), tokenizer)
    assert [(t["token"], t["logprob"]) for t in entry["top_logprobs"]] == [("one", -0.5), ("H", -2.0)]


def test_minus_infinity_becomes_a_number_json_can_say(tokenizer) -> None:
    (entry,) = chat_logprobs(TokenLogprobs(ids=[42], logprobs=[-math.inf]), tokenizer)
    assert entry["logprob"] == -9999.0


@pytest.mark.parametrize("size", [1, 2, 100])
def test_text_offsets_point_at_the_token_in_the_text(tokenizer, size: int) -> None:
    text = "one 😀é two"
    ids = tokenizer.encode(text)
    counter = CompletionLogprobs(tokenizer, start=3)
    parts = [counter.take(logprobs_of(ids[i : i + size], top=1)) for i in range(0, len(ids), size)]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    for token, offset in zip(ids, offsets, strict=True):
        name = token_name(token, tokenizer)
        if not name.startswith("bytes:"):
            assert ("abc" + text)[offset:].startswith(name)
    assert parts[0]["top_logprobs"][0] == {token_name(ids[0], tokenizer): -0.5}


def test_first_prompt_token_has_no_logprob(tokenizer) -> None:
    part = CompletionLogprobs(tokenizer).take(TokenLogprobs(ids=[42, 604], logprobs=[None, -1.0], top=[None, [(-1.0, 604)]]))
    assert part["token_logprobs"] == [None, -1.0] and part["top_logprobs"] == [None, {"ell": -1.0}]


@pytest.mark.parametrize("text", ["a", "é", "鱼", "😀"])
def test_incomplete_tail_is_what_is_missing_its_end(text: str) -> None:
    data = text.encode()
    for size in range(len(data) + 1):
        assert incomplete_tail(b"x" + data[:size]) == (data[:size] if 0 < size < len(data) else b"")


def test_incomplete_tail_of_bytes_that_can_begin_nothing() -> None:
    assert incomplete_tail(b"\x80\x80\x80\x80") == b"" and incomplete_tail(b"") == b""
