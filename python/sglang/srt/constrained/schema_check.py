"""What of a JSON schema xgrammar enforces, and what it passes over in silence.

The library never says that it does not know a keyword: it compiles, and the output breaks the rule. So every schema is
walked first, and each keyword that would not be enforced is named with the JSON pointer of its place. The rules are what
was measured with xgrammar 0.2.9 on small schemas and on the JSON-Schema-Test-Suite, draft 2020-12; where it only allows
less than the schema does (a pattern counts as anchored, the order of keys is the schema's), the output still validates,
and nothing is reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sglang.srt.constrained.grammar import GrammarError

MAX_NESTING = 128
"""Brackets inside brackets of a grammar. The compiler recurses, and its time grows with the square of the depth."""

Json = Any

_LENGTHS = ("minLength", "maxLength")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ITEM_COUNTS = ("minItems", "maxItems")
_PROPERTY_COUNTS = ("minProperties", "maxProperties")
_OBJECT_SHAPES = ("properties", "additionalProperties", "patternProperties", "propertyNames")
_ARRAY_SHAPES = ("items", "prefixItems")
_ASSERTIONS = frozenset(
    {
        *_LENGTHS, *_NUMBERS, *_ITEM_COUNTS, *_PROPERTY_COUNTS, *_OBJECT_SHAPES, *_ARRAY_SHAPES,
        "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef",
        "required", "pattern", "format", "uniqueItems", "contains", "minContains", "maxContains", "additionalItems",
        "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
"""Keywords that can make an instance invalid. All others are annotations, which nobody has to enforce."""
_NEVER = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "unevaluatedItems", "unevaluatedProperties", "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_FORMATS = frozenset(
    {
        "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
        "uri-template", "json-pointer", "relative-json-pointer",
    }
)  # fmt: skip
_KEYWORDS_OF_TYPE = {
    "string": (*_LENGTHS, "pattern", "format"),
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "array": (*_ITEM_COUNTS, *_ARRAY_SHAPES, "uniqueItems"),
    "object": (*_PROPERTY_COUNTS, *_OBJECT_SHAPES, "required"),
}
_NEED_TYPE = frozenset({*_LENGTHS, *_NUMBERS, "pattern", "format"})
"""Passed over where the schema does not say which type it means."""


def check_nesting(text: str) -> None:
    """Raises GrammarError for brackets nested deeper than MAX_NESTING (brackets in quotes count too: a bound, not a parser)."""
    depth = 0
    for char in text:
        if char in "([{":
            depth += 1
            if depth > MAX_NESTING:
                raise GrammarError(f"the grammar nests brackets more than {MAX_NESTING} deep, which this server does not compile")
        elif char in ")]}":
            depth = max(0, depth - 1)


def sum_of_length_bounds(schema: Json) -> int:
    """Sum of minLength and maxLength over a schema and all within it."""
    total = 0
    for node, _ in _nodes(schema, ""):
        total += sum(int(node[name]) for name in _LENGTHS if _is_number(node.get(name)) and node[name] > 0)
    return total


def ignored_keywords(schema: Json, pointer: str = "", *, is_markup: bool = False) -> list[str]:
    """ "/pointer keyword" for everything that would not be enforced, in the order of the text.

    `is_markup`: the object is written as tool-call markup, where lengths of strings are not enforced either.
    """
    found: list[str] = []
    for node, where in _nodes(schema, pointer):
        names = dict.fromkeys(_ignored_in(node))
        if is_markup:
            names |= dict.fromkeys(name for name in _LENGTHS if name in node)
        found += [f"{where or '/'} {name}" for name in names]
    return found


def _ignored_in(node: dict[str, Json]) -> Iterator[str]:
    """Keywords of one schema object, without those inside it, that have no effect or only a part of it."""
    present = [name for name in node if name in _ASSERTIONS]
    yield from (name for name in present if name in _NEVER and not (name == "additionalItems" and "prefixItems" not in node))
    if node.get("uniqueItems") is True:
        yield "uniqueItems"
    decider = next((name for name in ("$ref", "const", "enum", "anyOf", "oneOf", "allOf") if name in node), None)
    if decider is not None:
        yield from _ignored_beside(decider, node, present)
        return
    if "type" not in node:
        yield from (name for name in present if name in _NEED_TYPE)
        if not any(name in node for name in _OBJECT_SHAPES):
            yield from (name for name in (*_PROPERTY_COUNTS, "required") if name in node)
        if not any(name in node for name in _ARRAY_SHAPES):
            yield from (name for name in _ITEM_COUNTS if name in node)
    yield from _ignored_in_string(node)
    yield from _ignored_in_number(node)
    yield from _ignored_in_object(node)


def _ignored_beside(decider: str, node: dict[str, Json], present: list[str]) -> Iterator[str]:
    """The first of these keywords decides alone; what stands beside it counts for nothing."""
    beside = [name for name in present if name != decider and name not in _NEVER]
    if decider in ("const", "enum"):
        values = node["enum"] if decider == "enum" else [node["const"]]
        types = _types(node)
        is_consistent = isinstance(values, list) and (not types or all(_is_of(value, types) for value in values))
        if is_consistent and "type" in beside:
            beside.remove("type")
    if decider == "$ref" and not _is_local(node["$ref"]):
        yield "$ref"
    if decider == "oneOf" and not _are_disjoint(node["oneOf"]):
        yield "oneOf"
    if decider == "allOf" and isinstance(node["allOf"], list) and len(node["allOf"]) > 1:
        yield "allOf"
    if decider in ("anyOf", "oneOf", "allOf") and "type" in beside and _all_have_type(node[decider], _types(node)):
        beside.remove("type")  # said again by every branch
    yield from beside


def _ignored_in_string(node: dict[str, Json]) -> Iterator[str]:
    rules = [name for name in ("pattern", "format") if name in node]
    if "format" in node and node["format"] not in _FORMATS:
        yield "format"
    if rules:  # one rule per string: the library takes format or pattern, and no lengths with it
        yield from (name for name in _LENGTHS if name in node)
    if len(rules) == 2:
        yield "pattern"


def _ignored_in_number(node: dict[str, Json]) -> Iterator[str]:
    factor = node.get("multipleOf")
    if factor is None:
        return
    is_enforced = _types(node) == {"integer"} and isinstance(factor, int) and not any(name in node for name in _NUMBERS[:4])
    if not is_enforced:
        yield "multipleOf"


def _ignored_in_object(node: dict[str, Json]) -> Iterator[str]:
    properties = node.get("properties")
    known = properties if isinstance(properties, dict) else {}
    required = node.get("required")
    if isinstance(required, list) and any(name not in known for name in required):
        yield "required"
    if "patternProperties" in node:
        patterns = node["patternProperties"]
        is_alone = not known and "additionalProperties" not in node and _types(node) == {"object"}
        if not is_alone or not isinstance(patterns, dict) or len(patterns) > 1:
            yield "patternProperties"
    if "propertyNames" in node:
        names, beside = node["propertyNames"], ("additionalProperties", "patternProperties")
        is_alone = not known and not any(isinstance(node.get(name), dict) for name in beside) and _types(node) == {"object"}
        if not is_alone or not isinstance(names, dict) or not _ASSERTIONS & set(names) <= {"type", "pattern", *_LENGTHS}:
            yield "propertyNames"
    if any(json.dumps(name, ensure_ascii=False) != f'"{name}"' for name in known):
        yield "properties"  # a name that JSON writes with a backslash


# -- helpers -----------------------------------------------------------------------------------------------------------

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else")


def _nodes(schema: Json, pointer: str) -> Iterator[tuple[dict[str, Json], str]]:
    """Every schema object and its pointer, outer ones first. Depth is bounded by check_nesting."""
    if not isinstance(schema, dict):
        return
    yield schema, pointer
    for name, value in schema.items():
        if name in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            for key, item in value.items():
                yield from _nodes(item, f"{pointer}/{name}/{_escaped(key)}")
        elif name in _LISTS_OF_SCHEMAS and isinstance(value, list):
            for index, item in enumerate(value):
                yield from _nodes(item, f"{pointer}/{name}/{index}")
        elif name in _SCHEMAS:
            yield from _nodes(value, f"{pointer}/{name}")


def _escaped(key: str) -> str:
    """A key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _types(node: dict[str, Json]) -> set[str]:
    found = node.get("type")
    return {found} if isinstance(found, str) else {t for t in found if isinstance(t, str)} if isinstance(found, list) else set()


def _is_number(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_of(value: Json, types: set[str]) -> bool:
    return bool(_types_of_value(value) & types)


def _types_of_value(value: Json) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}


def _is_local(ref: Json) -> bool:
    """A JSON pointer into this very schema. Anchors, names and addresses are not resolved."""
    return isinstance(ref, str) and (ref == "#" or ref.startswith("#/")) and "%" not in ref and "~" not in ref


def _all_have_type(branches: Json, types: set[str]) -> bool:
    return isinstance(branches, list) and all(isinstance(b, dict) and _types(b) and _types(b) <= types for b in branches)


def _are_disjoint(branches: Json) -> bool:
    """True where no instance can match two branches, as far as types, values and tags show it."""
    if not isinstance(branches, list):
        return False
    return all(_exclude_each_other(a, b) for i, a in enumerate(branches) for b in branches[i + 1 :])


def _exclude_each_other(a: Json, b: Json) -> bool:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return False
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return not values_a & values_b
    types_a, types_b = _instance_types(a), _instance_types(b)
    if types_a and types_b and not types_a & types_b:
        return True
    properties_a, properties_b = a.get("properties"), b.get("properties")
    if types_a != {"object"} or types_b != {"object"} or not (isinstance(properties_a, dict) and isinstance(properties_b, dict)):
        return False
    tags = set(_names(a.get("required"))) & set(_names(b.get("required")))
    return any(_exclude_each_other(properties_a.get(tag), properties_b.get(tag)) for tag in tags)


def _names(required: Json) -> list[str]:
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _values(node: dict[str, Json]) -> set[str] | None:
    """The instances that const or enum allow, spelled in one way; None without either."""
    if "const" in node:
        return {json.dumps(node["const"], sort_keys=True)}
    if isinstance(node.get("enum"), list):
        return {json.dumps(value, sort_keys=True) for value in node["enum"]}
    return None


def _instance_types(node: dict[str, Json]) -> set[str]:
    types = _types(node)
    if "const" in node:
        types = _types_of_value(node["const"])
    elif isinstance(node.get("enum"), list):
        types = set().union(*(_types_of_value(value) for value in node["enum"]))
    return types | {"integer"} if "number" in types else types
