"""When a request ends and why, whatever the split of text into tokens and of tokens into steps."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.stop_checker import REGEX_WINDOW, StopChecker
from sglang.srt.managers.tokenizer import BYTE_OF_CHAR, Tokenizer
from sglang.srt.sampling.sampling_params import SamplingParams

TOKENIZER = Tokenizer.load(Path(sglang.__file__).parent / "assets" / "toy_tokenizer")
EOS = frozenset({1})
CHAR_OF_BYTE = {b: c for c, b in BYTE_OF_CHAR.items()}


def checker(room=None, **kwargs):
    kwargs.setdefault("max_new_tokens", None)
    return StopChecker(SamplingParams(**kwargs), EOS, TOKENIZER, context_room=room)


def byte_ids(text):
    """One id per byte: every split of a character that a vocabulary could make."""
    ids = [TOKENIZER.backend.token_to_id(CHAR_OF_BYTE[b]) for b in text.encode()]
    assert TOKENIZER.decode(ids) == text
    return ids


def stop_at(text, one_by_one=True, **kwargs):
    """(text up to and including the last token, what matched) when `text` is generated."""
    ids = byte_ids(text) if one_by_one else TOKENIZER.encode(text)
    count, reason = checker(**kwargs).check_run(ids)
    return TOKENIZER.decode(ids[:count]), reason and reason.matched


# -- ids and length -----------------------------------------------------------------------------------------------------


def test_eos_and_stop_ids():
    assert checker().check_run([5, 6, 1, 7]) == (3, FinishReason(type="stop", matched=1))
    assert checker(stop_token_ids=[6]).check_run([5, 6, 1]) == (2, FinishReason(type="stop", matched=6))
    assert checker(ignore_eos=True).check_run([5, 1, 7]) == (3, None)
    assert checker(ignore_eos=True, stop_token_ids=[1]).check_run([5, 1, 7]) == (2, FinishReason(type="stop", matched=1))


@pytest.mark.parametrize("limit, room, expected", [(3, None, 3), (3, 10, 3), (10, 3, 3), (None, 3, 3)])
def test_length_is_the_smaller_of_limit_and_context(limit, room, expected):
    c = checker(room, max_new_tokens=limit)
    assert c.remaining == expected
    assert c.check_run([5] * 9) == (expected, FinishReason(type="length", length=expected))
    assert c.remaining == 0


def test_a_stop_on_the_last_token_is_a_stop():
    assert checker(max_new_tokens=2).check_run([5, 1]) == (2, FinishReason(type="stop", matched=1))


def test_no_limit():
    c = checker()
    assert c.remaining is None and c.before_first() is None and c.check_run([5] * 500) == (500, None)


def test_nothing_to_generate_ends_before_the_first_token():
    assert checker(max_new_tokens=0).before_first() == FinishReason(type="length", length=0)
    assert checker(0).before_first() == FinishReason(type="length", length=0)
    assert checker(max_new_tokens=1).before_first() is None


def test_stop_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer"):
        StopChecker(SamplingParams(stop=["a"]), EOS)
    assert StopChecker(SamplingParams(), EOS).check(1).matched == 1


# -- strings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("stop", [["END"], ["END", "NEVER"], ["NEVER", "END"]])
def test_a_stop_string_over_token_boundaries(stop, one_by_one):
    text, matched = stop_at("abcENDdef", one_by_one, stop=stop)
    assert matched == "END" and "abcEND" in text


@pytest.mark.parametrize("text, stop", [("겹살 삼겹살 끝", "살 끝"), ("a🙂b🙂🙃c", "🙂🙃"), ("👩‍👩‍👧 x", "‍👧"), ("éé", "éé")])
def test_multi_byte_stop_strings_end_with_their_last_byte(text, stop):
    assert stop_at(text, stop=[stop]) == (text[: text.index(stop) + len(stop)], stop)


def test_the_first_match_in_the_text_wins():
    assert stop_at("one two three", stop=["three", "two"]) == ("one two", "two")


def test_of_several_completed_by_one_token_the_one_that_begins_first():
    word = next(i for i in range(4000) if TOKENIZER.token_bytes(i) == b" which")
    assert checker(stop=["ich", "hi", "whi"]).check(word).matched == "whi"
    assert checker(stop=["whi", "wh"]).check(word).matched == "whi"  # same beginning: order of the list
    assert checker(stop=["wh", "whi"]).check(word).matched == "wh"
    c = checker(stop=["which", "x which"])
    assert c.check(byte_ids("x")[0]) is None and c.check(word).matched == "x which"


def test_a_match_needs_new_text_each_time():
    """An overlapping second match is one of its own; an old match is not found again."""
    assert stop_at("aaab", stop=["aa"], min_new_tokens=3) == ("aaa", "aa")
    assert stop_at("aabb", stop=["aa"], min_new_tokens=3) == ("aabb", None)


def test_stop_strings_are_not_honoured_before_min_new_tokens():
    assert stop_at("xEND.END!", stop=["END"], min_new_tokens=5) == ("xEND.END", "END")
    assert stop_at("xEND.END!", stop=["END"], min_new_tokens=4) == ("xEND", "END")


def test_stop_string_beats_stop_id_on_the_same_token():
    ids = byte_ids("ab")
    assert checker(stop=["b"], stop_token_ids=[ids[1]]).check_run(ids)[1].matched == "b"


def test_special_tokens_are_text_only_when_shown():
    eos_text = TOKENIZER.token_bytes(0).decode()
    ids = [*byte_ids("EN"), 0, *byte_ids("D")]
    assert checker(stop=["END"]).check_run(ids) == (4, FinishReason(type="stop", matched="END"))
    assert checker(stop=["END"], skip_special_tokens=False).check_run(ids) == (4, None)
    assert checker(stop=[eos_text], skip_special_tokens=False).check_run(ids)[0] == 3
    assert checker(stop=[eos_text]).check_run(ids) == (4, None)


def test_ids_without_a_token_are_harmless():
    assert checker(stop=["a"], stop_regex=["b"]).check_run([4096, 10**7]) == (2, None)


ALPHABET = "ab🙂é"


@settings(deadline=None, max_examples=200)
@given(
    st.text(ALPHABET, max_size=40),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    st.integers(0, 12),
    st.randoms(use_true_random=False),
)
def test_any_split_into_steps_gives_the_oracles_end(text, stops, min_new_tokens, rng):
    """Oracle: after every byte, look for a stop string that ends exactly there."""
    ids = byte_ids(text)
    expected = len(ids), None
    for count in range(1, len(ids) + 1):
        so_far = text.encode()[:count]
        ending = [s for s in stops if so_far.endswith(s.encode())]
        if ending and count >= min_new_tokens:
            expected = count, max(ending, key=lambda s: (len(s.encode()), -stops.index(s)))
            break
    c = checker(stop=stops, min_new_tokens=min_new_tokens)
    taken, reason = 0, None
    while taken < len(ids) and reason is None:
        size = rng.randint(1, 6)
        count, reason = c.check_run(ids[taken : taken + size])
        taken += count
    assert (taken, reason and reason.matched) == expected


# -- regexes ------------------------------------------------------------------------------------------------------------


def test_a_regex_ends_at_the_first_token_after_which_it_matches():
    assert stop_at("pi is 3.14159 or so", stop_regex=[r"\d\.\d{2}"]) == ("pi is 3.14", r"\d\.\d{2}")
    assert stop_at("abc", stop_regex=["x", "b"]) == ("ab", "b")
    assert stop_at("a🙂b", stop_regex=["[🙂🙃]"]) == ("a🙂", "[🙂🙃]")


def test_a_stop_string_goes_before_a_regex():
    assert stop_at("abc", stop=["b"], stop_regex=["ab"]) == ("ab", "b")


def test_anchors_mean_the_text_not_the_window():
    filler = "x" * (REGEX_WINDOW + 50)
    assert stop_at("^a" + filler + "b", stop_regex=["^xb?"])[1] is None
    assert stop_at(filler + "word", stop_regex=[r"\bx"])[1] == r"\bx"  # at the very beginning
    assert stop_at("-" + filler + "!", stop_regex=[r"\bx+!"])[1] is None  # its beginning has left the window
    assert stop_at("abc", stop_regex=["c$"]) == ("abc", "c$")


def test_a_catastrophic_pattern_costs_nothing():
    assert stop_at("a" * 3000, stop_regex=["(a+)+$x", "(a|aa)+b"]) == ("a" * 3000, None)


def test_memory_does_not_grow_with_the_text():
    c = checker(stop=["END", "x" * 50], stop_regex=["y"])
    for _ in range(50):
        c.check_run(byte_ids("z" * 100))
    assert len(c._strings._tail) == 49 and len(c._regexes._window) == REGEX_WINDOW + 1
