"""What the output of an OpenAI request has to follow: one grammar, or none.

It is asked for by `regex`, `ebnf` or `json_schema`, by `response_format`, or by tools (`tool_choice` required or a function,
`strict`). A model that thinks first is free until it has stopped thinking.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sglang.srt.constrained.constraint import Constraint, GrammarText
from sglang.srt.entrypoints.openai.protocol import ChatRequest, CommonRequest
from sglang.srt.entrypoints.openai.tool_grammar import optional_calls, required_calls
from sglang.srt.errors import BadRequest

Json = dict[str, Any]

_FIELDS = ("json_schema", "regex", "ebnf")
_FORMATS = ("text", "json_object", "json_schema", "regex", "structural_tag")


def constraint_of(request: CommonRequest) -> Constraint | None:
    """The grammar that the fields common to all routes ask for. Raises BadRequest for two of them, or a broken one."""
    found = [(name, GrammarText(kind=name, text=getattr(request, name))) for name in _FIELDS if getattr(request, name)]
    formatted = _of_response_format(request.response_format)
    if formatted is not None:
        found.append(("response_format", formatted))
    if len(found) > 1:
        raise BadRequest(f"only one of json_schema, regex, ebnf and response_format can be set, got {found[0][0]} and {found[1][0]}",
                         param=found[1][0])  # fmt: skip
    return Constraint(grammar=found[0][1]) if found else None


def chat_constraint(request: ChatRequest, tools: Sequence[Json], think_end_id: int | None) -> Constraint | None:
    """The same for a chat, whose tools may ask for one too. `tools` as recipe normalised them; `think_end_id` is the end of
    thinking, None where the model does not think."""
    asked = constraint_of(request)
    calls = _of_tools(request, tools)
    if asked is not None and calls is not None:
        raise BadRequest(
            "tool_choice required or a function, and strict tools, cannot be combined with another grammar", param="tool_choice"
        )
    grammar = asked.grammar if asked is not None else calls
    if grammar is None:
        return None
    if think_end_id is None:
        return Constraint(grammar=grammar)
    # Strict tools leave the text free, so an answer that never stops thinking breaks no promise of theirs.
    return Constraint(grammar=grammar, trigger_token_ids=(think_end_id,), must_trigger=asked is not None or _is_enforced(request))


def _is_enforced(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or isinstance(request.tool_choice, dict)


def _of_response_format(response_format: Json | None) -> GrammarText | None:
    if response_format is None:
        return None
    kind = response_format.get("type", "text")
    match kind:
        case "text":
            return None
        case "json_object":
            return GrammarText(kind="json_schema", text='{"type": "object"}')
        case "json_schema":
            wrapped = response_format.get("json_schema")
            if not isinstance(wrapped, dict) or not isinstance(wrapped.get("schema"), (dict, bool)):
                raise BadRequest("response_format.json_schema must be an object with a schema", param="response_format")
            text = json.dumps(wrapped["schema"], ensure_ascii=False)
            return GrammarText(kind="json_schema", text=text, strict=wrapped.get("strict") is True)
        case "regex":
            pattern = response_format.get("regex", response_format.get("pattern"))
            if not isinstance(pattern, str) or not pattern:
                raise BadRequest("response_format.regex must be a pattern", param="response_format")
            return GrammarText(kind="regex", text=pattern)
        case "structural_tag":
            return GrammarText(kind="structural_tag", text=json.dumps(response_format, ensure_ascii=False))
    raise BadRequest(f"response_format.type must be one of {', '.join(_FORMATS)}, found {str(kind)[:40]!r}", param="response_format")


def _of_tools(request: ChatRequest, tools: Sequence[Json]) -> GrammarText | None:
    """A grammar if calls are enforced, or a tool is strict."""
    strict = any(tool["function"].get("strict") is True for tool in tools)
    choice = request.tool_choice
    if choice == "none" or not tools:
        return None
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        tools = [tool for tool in tools if tool["function"].get("name") == name]
        if not tools:
            raise BadRequest(f"tool_choice names a function that is not among the tools: {str(name)[:64]!r}", param="tool_choice")
    elif choice != "required":
        if not strict:
            return None
        return GrammarText(kind="structural_tag", text=optional_calls(tools, parallel=request.parallel_tool_calls), strict=True)
    return GrammarText(kind="structural_tag", text=required_calls(tools, parallel=request.parallel_tool_calls), strict=strict)
