"""No part of a stop string is ever shown, for any split of the text into tokens and of the tokens into steps."""

from __future__ import annotations

import random

import pytest

from sglang.srt.entrypoints.openai.recipe import ParsingPlan
from sglang.srt.entrypoints.openai.stop_hold import StopHold


def pieces(tokenizer, text: str, rng: random.Random) -> list[int]:
    """Ids of `text`, cut at random places into runs that are tokenized on their own."""
    ids: list[int] = []
    while text:
        size = rng.randint(1, 4)
        ids += tokenizer.encode(text[:size])
        text = text[size:]
    return ids


def cut_where_matched(tokenizer, ids: list[int], stops: list[str]) -> tuple[list[int], str | None]:
    """The ids up to the one that completes a stop string, as the scheduler would end them."""
    data = b""
    for count, token in enumerate(ids, start=1):
        data += tokenizer.token_bytes(token)
        found = [(data.find(stop.encode()), stop) for stop in stops if stop.encode() in data]
        if found:
            return ids[:count], min(found)[1]
    return ids, None


def shown(tokenizer, hold: StopHold, ids: list[int], matched, rng: random.Random) -> tuple[str, list[str]]:
    text, steps = "", []
    while ids:
        size = rng.randint(1, 3)
        step, ids = ids[:size], ids[size:]
        released, rest = hold.take(step) if ids else hold.finish(step, matched)
        text += tokenizer.decode(released) + rest
        steps.append(text)
    return text, steps


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("keep", [False, True])
def test_text_before_the_stop_is_complete_and_nothing_of_it_leaks(tokenizer, seed: int, keep: bool) -> None:
    rng = random.Random(seed)
    stops = rng.choice([["END"], ["END", "NEVER"], ["ab", "bc"], ["🙂x"], ["aaab"], ["\n\n"], ["é"]])
    before = "".join(rng.choice(["a", "b", "é", "🙂", " ", "EN", "\n", "x", "N"]) for _ in range(12))
    text = before + rng.choice(stops) + "tail"
    ids, matched = cut_where_matched(tokenizer, pieces(tokenizer, text, rng), stops)
    final, steps = shown(tokenizer, StopHold(tokenizer, stops, keep_stop=keep), ids, matched, rng)
    whole = text[: text.index(matched)] if matched else text
    assert final == (whole + matched if keep and matched else whole)
    assert all((whole + (matched or "") if keep else whole).startswith(step) for step in steps)


def test_without_stop_strings_nothing_waits(tokenizer) -> None:
    hold = StopHold(tokenizer, [])
    ids = tokenizer.encode("one two")
    assert [hold.take([token]) for token in ids] == [([token], "") for token in ids]


def test_a_beginning_that_turns_out_otherwise_is_shown(tokenizer) -> None:
    ids = [token for char in "foul" for token in tokenizer.encode(char)]
    hold = StopHold(tokenizer, ["four"])
    assert [len(hold.take([token])[0]) for token in ids] == [0, 0, 0, 4]


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_id_is_cut_unless_kept(tokenizer, keep: bool) -> None:
    token = tokenizer.encode("x")[0]
    ids, rest = StopHold(tokenizer, [], keep_stop=keep).finish([token, token], token)
    assert (len(ids), rest) == (2 if keep else 1, "")


def test_hidden_ids_are_dropped_and_do_not_split_a_stop_string(tokenizer) -> None:
    hold = StopHold(tokenizer, ["ab"], hidden={1})
    assert hold.take([*tokenizer.encode("a"), 1]) == ([], "")
    assert hold.finish(tokenizer.encode("b"), "ab") == ([], "")
    assert StopHold(tokenizer, [], hidden={1}).finish([*tokenizer.encode("a"), 1], 1) == (tokenizer.encode("a"), "")


def test_a_regex_match_is_not_cut(tokenizer) -> None:
    ids = tokenizer.encode("a1")
    assert StopHold(tokenizer, []).finish(ids, "[0-9]") == (ids, "")


def test_an_occurrence_that_came_too_early_to_count_stays(tokenizer) -> None:
    # min_new_tokens let the first one pass
    hold = StopHold(tokenizer, ["END"])
    ids, rest = hold.finish([token for word in ("END", "x", "END") for token in tokenizer.encode(word)], "END")
    assert tokenizer.decode(ids) + rest == "ENDx"


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_form_no_character_neither_vanish_nor_wait_for_ever(tokenizer, recipe, seed: int) -> None:
    rng = random.Random(seed)
    of_byte = {tokenizer.token_bytes(token): token for token in range(3, 259)}
    broken = [of_byte[bytes([byte])] for byte in (0x80, 0x80, 0xBF, 0xF0, 0x9F, 0xC3, 0xED, 0xFF)]
    words = [tokenizer.encode(text) for text in ("a", "\ufffd", "é", "🙂", " b")]
    ids = tokenizer.encode("x")
    for _ in range(40):
        ids += rng.choice(words) if rng.random() < 0.4 else [rng.choice(broken)]
    ids += [of_byte[b"\x80"]] * rng.randint(0, 60)
    expected = tokenizer.decode(ids)

    def parsed(size: int) -> tuple[str, int]:
        hold, parser, text, waiting = StopHold(tokenizer, ["END"]), recipe.new_parser(ParsingPlan()), "", 0
        for start in range(0, len(ids), size):
            step, is_last = ids[start : start + size], start + size >= len(ids)
            shown, rest = hold.finish(step, None) if is_last else hold.take(step)
            text += parser.push_ids(shown).content + parser.push_text(rest).content
            waiting = max(waiting, len(hold._ids))
        return text + parser.finish("length").content, waiting

    whole, _ = parsed(len(ids))
    pieces, waiting = parsed(1)
    assert whole == pieces == expected
    assert waiting < 30
