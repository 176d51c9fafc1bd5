"""A wish for structured output, as it travels from a route to the scheduler."""

from __future__ import annotations

import msgspec


class GrammarText(msgspec.Struct, frozen=True):
    """A grammar as a client wrote it; equal ones are compiled once."""

    kind: str  # json_schema, regex, ebnf or structural_tag
    text: str
    strict: bool = False  # json_schema: no keys beyond the schema's; refuse what cannot be enforced instead of warning


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grammar and where in the output it begins. Without a trigger it holds from the first token."""

    grammar: GrammarText
    trigger_token_ids: tuple[int, ...] = ()  # text is free until these ids have come, one after another
    bound_token_id: int | None = None  # once seen in the free text, the trigger is forced, and the grammar begins
    must_trigger: bool = False  # the answer may not end before the trigger
