"""Masks over the real toy vocabulary: what may come next, and what never may."""

from __future__ import annotations

import json
import random

import pytest
import torch

from harness.grammars import VOCAB, backend, toy
from sglang.srt.constrained.constraint import GrammarText
from sglang.srt.constrained.grammar import GrammarError
from sglang.srt.constrained.xgrammar_backend import MARKER, unpack

EOS = 1
ANY_STRING = '{"type":"string"}'


def matcher(kind: str, text: str, strict: bool = False):
    return backend().compile(GrammarText(kind=kind, text=text, strict=strict)).new_matcher()


def allowed(m) -> set[int]:
    mask = m.allowed()
    assert (mask.dtype, mask.shape) == (torch.bool, (VOCAB,))
    return set(mask.nonzero().flatten().tolist())


def feed(m, text: str) -> None:
    for token in toy().encode(text):
        assert token in allowed(m), (text, token)
        assert m.accept(token)


def markers() -> set[int]:
    return set(toy().backend.get_added_tokens_decoder())


def test_no_special_token_is_allowed_inside_a_string_and_eos_at_its_end_only():
    m = matcher("json_schema", ANY_STRING)
    for text in ('"', "ab", " c", "é"):
        feed(m, text)
        inside = allowed(m)
        assert len(inside) > 2000
        assert not inside & (markers() | {EOS})
        assert max(inside) < toy().vocab_size  # ids without a token
    feed(m, '"')
    assert allowed(m) == {EOS}
    assert m.accept(EOS) and m.is_terminated and allowed(m) == set()


@pytest.mark.parametrize("text", ["🙂🙂🙂", "삼겹살 👩‍👩‍👧 𝒳", "abcENDdef"])
def test_a_regex_for_one_text_allows_its_tokens_and_then_the_end(text):
    m = matcher("regex", text)
    feed(m, text)
    assert allowed(m) == {EOS}


def test_characters_of_several_tokens_are_walked_byte_by_byte():
    m, rng = matcher("regex", "🙂{2}"), random.Random(3)
    ids = []
    while not m.is_terminated:
        ids.append(rng.choice(sorted(allowed(m))))
        assert m.accept(ids[-1])
    assert toy().decode(ids[:-1]) == "🙂🙂"


def test_rollback_undoes_tokens_and_the_end():
    m = matcher("regex", "ab(c|d)")
    before = allowed(m)
    feed(m, "ab")
    middle = allowed(m)
    feed(m, "c")
    m.accept(EOS)
    m.rollback(2)
    assert not m.is_terminated and allowed(m) == middle
    m.rollback(0)
    m.rollback(len(toy().encode("ab")))
    assert allowed(m) == before


BAD = [
    ("json_schema", '{"type":"objectt"}'), ("json_schema", '{"type":'), ("json_schema", '{"$ref":"#/definitions/x"}'),
    ("json_schema", '{"type":"array","items":[{"type":"string"}]}'), ("json_schema", '{"type":"integer","minimum":5,"maximum":2}'),
    ("regex", "(ab"), ("regex", "(?=a)b"), ("ebnf", 'a ::= "x"'), ("ebnf", 'root ::= "a'),
    ("json_schema", "false"), ("json_schema", "7"), ("structural_tag", "{}"), ("structural_tag", "x"), ("structural_tag", "[1]"),
    ("json_schema", "[" * 200 + "]" * 200), ("regex", "(" * 200 + "a" + ")" * 200), ("poem", "x"),
    ("json_schema", '{"type":"string","maxLength":10001}'), ("ebnf", ""),
]  # fmt: skip


@pytest.mark.parametrize("kind, text", BAD)
def test_what_cannot_be_compiled_is_an_error_with_a_reason_in_one_line(kind, text):
    with pytest.raises(GrammarError) as error:
        backend().compile(GrammarText(kind=kind, text=text))
    message = str(error.value)
    assert len(message) > 10 and "\n" not in message and ".cc" not in message and "/project" not in message


def test_what_a_schema_asks_in_vain_is_named_and_refused_if_strict():
    text = '{"type":"object","properties":{"a":{"type":"array","uniqueItems":true}}}'
    assert backend().compile(GrammarText(kind="json_schema", text=text)).ignored == ("/properties/a uniqueItems",)
    with pytest.raises(GrammarError, match="/properties/a uniqueItems"):
        backend().compile(GrammarText(kind="json_schema", text=text, strict=True))
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}
    assert backend().compile(GrammarText(kind="structural_tag", text=json.dumps(tag))).ignored == ("/format/json_schema not",)


def test_strict_allows_no_keys_beyond_the_schema():
    text = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    for strict in (False, True):
        m = matcher("json_schema", text, strict)
        feed(m, '{"a":1')
        comma = toy().encode(",")[0]
        assert (comma in allowed(m)) is not strict


def test_the_marker_of_tool_calls_comes_as_its_token_and_is_never_spelled():
    marker = toy().backend.token_to_id(MARKER)
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": f"<{MARKER} calls>"}}
    m = matcher("structural_tag", json.dumps(tag))
    assert m.accept(toy().encode("<")[0])
    assert allowed(m) == {marker}
    plain = matcher("regex", f"<{MARKER}>")  # elsewhere these are letters like others
    assert plain.accept(toy().encode("<")[0])
    assert marker not in allowed(plain) and allowed(plain)


def test_cost_of_a_token_is_the_number_of_calls_not_the_length():
    m = matcher("regex", "(a|b){3000}")
    calls = []
    inner = m._matcher

    class Counting:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(inner, name)

    m._matcher = Counting()
    token, per_token = toy().encode("a")[0], set()
    for _ in range(2990):
        calls.clear()
        assert m.allowed()[token] and m.accept(token)
        per_token.add(tuple(calls))
    assert per_token == {("is_terminated", "fill_next_token_bitmask", "accept_token")}
    assert m._ids == []  # nothing grows with the text


def test_bits_are_unpacked_lowest_first():
    words = torch.tensor([0b101, -1], dtype=torch.int32)
    assert unpack(words, 40).nonzero().flatten().tolist() == [0, 2, *range(32, 40)]
