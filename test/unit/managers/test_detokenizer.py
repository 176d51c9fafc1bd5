"""Streamed text: whole characters, no part of a stop string, and together exactly the one-shot text."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang
from sglang.srt.managers.detokenizer import IncrementalDetokenizer, held_back
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.stop_checker import StopChecker
from sglang.srt.managers.tokenizer import BYTE_OF_CHAR, Tokenizer
from sglang.srt.sampling.sampling_params import SamplingParams

TOKENIZER = Tokenizer.load(Path(sglang.__file__).parent / "assets" / "toy_tokenizer")
LENGTH = FinishReason(type="length", length=1)
CHAR_OF_BYTE = {b: c for c, b in BYTE_OF_CHAR.items()}


def byte_ids(text):
    return [TOKENIZER.backend.token_to_id(CHAR_OF_BYTE[b]) for b in text.encode()]


def pieces(ids, sizes=(1,), finish=LENGTH, **kwargs):
    """What a stream shows when ids come in groups of the given sizes (the last one repeated)."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, **kwargs)
    out, taken, group = [], 0, 0
    while True:
        size = sizes[min(group, len(sizes) - 1)]
        chunk = ids[taken : taken + size]
        taken, group = taken + size, group + 1
        last = taken >= len(ids)
        out.append(detokenizer.push(chunk, finish if last else None))
        if last:
            return out


TEXTS = ["🙂🙂🙂", "삼겹살 👩‍👩‍👧 𝒳", "plain words, and 12345.\n", "👨‍👩‍👧‍👦🏳️‍🌈é", "", "a\r\n\tb", "ﷺ한국어🇰🇷"]


@pytest.mark.parametrize("encode", [TOKENIZER.encode, byte_ids], ids=["tokens", "bytes"])
@pytest.mark.parametrize("text", TEXTS)
def test_characters_are_never_split(text, encode):
    shown = pieces(encode(text))
    assert "".join(shown) == text
    assert not any("�" in piece for piece in shown)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 4100), max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=20), st.booleans())
def test_any_ids_in_any_split_give_the_one_shot_text(ids, sizes, skip):
    assert "".join(pieces(ids, sizes, skip_special_tokens=skip)) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_any_text_in_any_split_comes_back(text, sizes):
    for ids in (TOKENIZER.encode(text), byte_ids(text)):
        shown = pieces(ids, sizes, skip_special_tokens=False)
        assert "".join(shown) == text
        assert all("�" not in piece for piece in shown) or "�" in text


def test_bytes_that_never_complete_are_flushed_as_replacement():
    ids = byte_ids("ok🙂")[:-1]
    shown = pieces(ids)
    assert "".join(shown) == "ok�" == TOKENIZER.decode(ids) and "�" not in "".join(shown[:-1])


def test_special_tokens_are_skipped_or_shown():
    ids = [*TOKENIZER.encode("a"), 1, *TOKENIZER.encode("b")]
    assert "".join(pieces(ids)) == "ab"
    assert "".join(pieces(ids, skip_special_tokens=False)) == "a<｜end▁of▁sentence｜>b"
    assert "".join(pieces(ids, spaces_between_special_tokens=False)) == "ab"


# -- stops --------------------------------------------------------------------------------------------------------------


def generate(text, sizes=(1,), encode=byte_ids, **kwargs):
    """Through the checker, as in the service: ids run until a stop, then the stream of their text."""
    ids = encode(text)
    params = SamplingParams(max_new_tokens=len(ids), **kwargs)
    count, reason = StopChecker(params, frozenset({1}), TOKENIZER).check_run(ids)
    return pieces(
        ids[:count], sizes, reason, stop=params.stop, no_stop_trim=params.no_stop_trim, skip_special_tokens=params.skip_special_tokens
    )


@pytest.mark.parametrize("encode", [TOKENIZER.encode, byte_ids], ids=["tokens", "bytes"])
@pytest.mark.parametrize("stop", [["END"], ["END", "NEVER"]])
def test_no_part_of_a_stop_string_reaches_the_client(stop, encode):
    shown = generate("abcENDdef", encode=encode, stop=stop)
    assert "".join(shown) == "abc"
    assert not any("E" in piece for piece in shown)


@pytest.mark.parametrize("encode", [TOKENIZER.encode, byte_ids], ids=["tokens", "bytes"])
@pytest.mark.parametrize("sizes", [(1,), (2,), (4,), (100,)])
def test_no_stop_trim_keeps_the_stop_string_and_nothing_after_it(encode, sizes):
    assert "".join(generate("abcENDdef", sizes, encode, stop=["END"], no_stop_trim=True)) == "abcEND"


def test_a_kept_stop_string_ends_within_a_token_although_its_beginning_was_shown():
    which = next(i for i in range(4000) if TOKENIZER.token_bytes(i) == b" which")
    stop = FinishReason(type="stop", matched="abc ")
    shown = pieces([*byte_ids("xabc"), which], (1,), stop, stop=["abc "], no_stop_trim=True)
    assert shown == ["x", "a", "b", "c", " "]


def test_the_upstream_recording_of_a_trimmed_and_a_kept_stop():
    text = "one two three four five"
    assert "".join(generate(text, encode=TOKENIZER.encode, stop=["four"])) == "one two three "
    assert "".join(generate(text, encode=TOKENIZER.encode, stop=["four"], no_stop_trim=True)) == "one two three four"


def test_text_that_only_looked_like_a_stop_string_comes_out():
    shown = generate("an ENTRY, the E", stop=["END"])
    assert "".join(shown) == "an ENTRY, the E"
    assert shown[3:6] == ["", "", "ENT"]  # held until T shows that it is no END


def test_held_text_comes_out_when_the_request_ends_otherwise():
    for finish in (LENGTH, FinishReason(type="abort", message="x"), FinishReason(type="stop", matched=None)):
        assert "".join(pieces(byte_ids("abEN"), (1,), finish, stop=["END"])) == "abEN"


def test_a_matched_id_is_cut_with_its_text_or_kept():
    ids = byte_ids("abc")
    stop = FinishReason(type="stop", matched=ids[-1])
    assert "".join(pieces(ids, (1,), stop)) == "ab"
    assert "".join(pieces(ids, (3,), stop, no_stop_trim=True)) == "abc"
    eos = FinishReason(type="stop", matched=1)
    assert "".join(pieces([*ids, 1], (2,), eos, skip_special_tokens=False)) == "abc"
    assert "".join(pieces([*ids, 1], (2,), eos, skip_special_tokens=False, no_stop_trim=True)).startswith("abc<")
    assert "".join(pieces([*byte_ids("abEN"), 1], (1,), eos, stop=["END"])) == "abEN"


def test_a_stop_that_came_before_min_new_tokens_stays():
    assert "".join(generate("xEND.ENDy", stop=["END"], min_new_tokens=5)) == "xEND."
    assert "".join(generate("aaab", stop=["aa"], min_new_tokens=3)) == "a"


def test_a_matched_regex_cuts_nothing():
    assert "".join(generate("ab12c", stop_regex=[r"\d\d"])) == "ab12"


def test_nothing_may_follow_the_end():
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    detokenizer.push([5], LENGTH)
    with pytest.raises(ValueError, match="finished"):
        detokenizer.push([6])


ALPHABET = "ab🙂é"


@settings(deadline=None, max_examples=300)
@given(
    st.text(ALPHABET, min_size=1, max_size=30),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(1, 5), min_size=1, max_size=10),
    st.integers(0, 8),
    st.booleans(),
    st.booleans(),
)
def test_any_stops_in_any_split_show_the_same_text(text, stops, sizes, min_new_tokens, keep, as_tokens):
    encode = TOKENIZER.encode if as_tokens else byte_ids
    min_new_tokens = min(min_new_tokens, len(encode(text)))
    kwargs = {"encode": encode, "stop": stops, "min_new_tokens": min_new_tokens, "no_stop_trim": keep}
    streamed = "".join(generate(text, sizes, **kwargs))
    assert streamed == "".join(generate(text, (1000,), **kwargs))
    assert text.startswith(streamed.rstrip("�"))
    if min_new_tokens == 0 and not keep:
        starts = [text.index(s) for s in stops if s in text]
        assert not any(s in streamed for s in stops)
        assert starts or streamed == text


@given(st.binary(max_size=20), st.lists(st.binary(min_size=1, max_size=6), max_size=4))
def test_held_back_is_the_longest_beginning_of_a_stop(text, stops):
    expected = max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)
    assert held_back(text, stops) == expected


@pytest.mark.parametrize("stop", [[], ["END"]])
def test_the_work_per_token_does_not_grow(stop):
    """Counted in bytes that are kept, not in seconds."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop=stop)
    for token_id in byte_ids("xE🙂" * 500):
        detokenizer.push([token_id])
        assert len(detokenizer._recent) <= 2
