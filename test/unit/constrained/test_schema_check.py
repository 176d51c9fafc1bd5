"""Which keywords are reported as not enforced, with their place."""

from __future__ import annotations

import pytest

from sglang.srt.constrained.grammar import GrammarError
from sglang.srt.constrained.schema_check import MAX_NESTING, check_nesting, ignored_keywords, sum_of_length_bounds

OBJECT = {"type": "object"}
A, B = {"type": "integer"}, {"type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {}, A, {"type": ["string", "null"], "minLength": 2}, {"enum": ["a", 1, None]}, {"const": {"x": 1}}, {"type": "string", "const": "a"},
        {"type": "integer", "minimum": 1, "maximum": 5}, {"type": "integer", "multipleOf": 3}, {"type": "string", "pattern": "^a+$"},
        {"type": "string", "format": "date"}, {"type": "array", "items": A, "minItems": 1, "uniqueItems": False},
        {**OBJECT, "properties": {"a": A}, "required": ["a"], "additionalProperties": False, "minProperties": 1},
        {"properties": {"a": A}, "required": ["a"]}, {"anyOf": [A, B]}, {"type": ["integer", "string"], "anyOf": [A, B]},
        {"oneOf": [A, B]}, {"allOf": [A]}, {"$ref": "#/$defs/a", "$defs": {"a": A}, "description": "d"},
        {"oneOf": [{**OBJECT, "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]}, {"title": "t", "examples": [1]},
        {**OBJECT, "properties": {"not": A, "if": B}}, {**OBJECT, "propertyNames": {"pattern": "^a$"}}, True,
    ],
)  # fmt: skip
def test_what_is_enforced_is_not_reported(schema):
    assert ignored_keywords(schema) == []


@pytest.mark.parametrize(
    "schema, expected",
    [
        ({"type": "array", "uniqueItems": True}, "/ uniqueItems"),
        ({"not": A}, "/ not"),
        ({"type": "array", "contains": A}, "/ contains"),
        ({"allOf": [A, B]}, "/ allOf"),
        ({"allOf": [A], "minimum": 3}, "/ minimum"),
        ({"anyOf": [A, B], "maxLength": 3}, "/ maxLength"),
        ({"oneOf": [A, {"type": "number"}]}, "/ oneOf"),
        ({"oneOf": [{**OBJECT, "properties": {"k": {"const": "a"}}}, OBJECT]}, "/ oneOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}, "maximum": 3}, "/ maximum"),
        ({"$ref": "other.json"}, "/ $ref"),
        ({"type": "integer", "enum": ["a", 1]}, "/ type"),
        ({"type": "string", "enum": ["a", "abc"], "minLength": 2}, "/ minLength"),
        ({"minimum": 3}, "/ minimum"),
        ({"required": ["a"]}, "/ required"),
        ({**OBJECT, "properties": {"a": A}, "required": ["z"]}, "/ required"),
        ({"type": "number", "multipleOf": 0.5}, "/ multipleOf"),
        ({"type": "integer", "multipleOf": 3, "minimum": 4}, "/ multipleOf"),
        ({"type": "string", "pattern": "^a", "minLength": 3}, "/ minLength"),
        ({"type": "string", "pattern": "^a", "format": "date"}, "/ pattern"),
        ({"type": "string", "format": "bogus"}, "/ format"),
        ({**OBJECT, "properties": {"a": A}, "patternProperties": {"^a": A}}, "/ patternProperties"),
        ({**OBJECT, "patternProperties": {"^a": A}, "additionalProperties": False}, "/ patternProperties"),
        ({**OBJECT, "properties": {"a": A}, "propertyNames": {"pattern": "^a"}}, "/ propertyNames"),
        ({**OBJECT, "properties": {'a"b': A}}, "/ properties"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "/ dependentRequired"),
        ({**OBJECT, "properties": {"a/b": {"type": "array", "items": {"if": A}}}}, "/properties/a~1b/items if"),
        ({"$defs": {"x": {"unevaluatedProperties": False}}}, "/$defs/x unevaluatedProperties"),
    ],
)
def test_what_is_not_enforced_is_reported_with_its_pointer(schema, expected):
    assert ignored_keywords(schema) == [expected]


def test_lengths_in_markup_are_not_enforced():
    assert ignored_keywords({**OBJECT, "properties": {"a": {"type": "string", "maxLength": 3}}}, "/x", is_markup=True) == [
        "/x/properties/a maxLength"
    ]


def test_length_bounds_are_summed_over_the_whole_schema():
    schema = {
        "anyOf": [{"minLength": 3, "maxLength": 40}, {"items": {"maxLength": 50}}],
        "$defs": {"a": {"maxLength": 7}},
        "maxLength": "x",
    }
    assert sum_of_length_bounds(schema) == 100


def test_nesting_is_bounded():
    check_nesting("[{(" * (MAX_NESTING // 3) + ")}]" * 1000)
    with pytest.raises(GrammarError, match=str(MAX_NESTING)):
        check_nesting("(" * (MAX_NESTING + 1))
