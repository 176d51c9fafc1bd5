"""`so_args` of the native route and the offline engine: DeepInfer's way to ask for structured output."""

from __future__ import annotations

from typing import Any

from sglang.srt.constrained.constraint import Constraint, GrammarText
from sglang.srt.errors import BadRequest

_KINDS = {"json": "json_schema", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural_tag"}
_FIELDS = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")


def read_so_args(value: Any) -> Constraint | None:
    """The constraint in a request's `so_args`; None for null. JSON schemas are strict. Raises BadRequest."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequest(f"so_args must be an object, got {type(value).__name__}", param="so_args")
    unknown = next((name for name in value if name not in _FIELDS), None)
    if unknown is not None:
        raise BadRequest(f"so_args has no field {str(unknown)[:64]!r}; it has {', '.join(_FIELDS)}", param="so_args")
    kind = value.get("schema_type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadRequest(f"so_args.schema_type must be one of {', '.join(_KINDS)}, got {str(kind)[:64]!r}", param="so_args")
    schema = value.get("schema")
    if not isinstance(schema, str) or not schema:
        raise BadRequest("so_args.schema must be a string, and not empty", param="so_args")
    trigger, bound = value.get("trigger_token_ids"), value.get("bound_token_id")
    if trigger is not None and not (isinstance(trigger, list) and trigger and all(type(token) is int for token in trigger)):
        raise BadRequest("so_args.trigger_token_ids must be a list of ids, and not empty", param="so_args")
    if bound is not None and type(bound) is not int:
        raise BadRequest("so_args.bound_token_id must be an id", param="so_args")
    grammar = GrammarText(kind=_KINDS[kind], text=schema, strict=kind == "json")
    return Constraint(grammar=grammar, trigger_token_ids=tuple(trigger or ()), bound_token_id=bound)
