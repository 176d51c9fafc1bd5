"""Requests that only a grammar can answer truthfully.

There is no grammar backend in this version. Ignoring the wish would look like a broken model, so it is refused: here, for
all OpenAI routes. When grammars arrive, `refuse_constraints` and its callers go.
"""

from __future__ import annotations

from sglang.srt.entrypoints.openai.protocol import ChatRequest, CommonRequest
from sglang.srt.errors import BadRequest


def refuse_constraints(request: CommonRequest) -> None:
    """Raise BadRequest if the reply would have to follow a grammar."""
    field = _constraint_of(request)
    if field is not None:
        raise BadRequest(f"structured output is not available in this version: leave out {field}", param=field.split(" ")[0])


def _constraint_of(request: CommonRequest) -> str | None:
    """The field that asks for a grammar, in words."""
    for field in ("json_schema", "regex", "ebnf"):
        if getattr(request, field):
            return field
    kind = (request.response_format or {}).get("type", "text")
    if kind != "text":
        return f"response_format of type {str(kind)[:40]}"
    if not isinstance(request, ChatRequest):
        return None
    if request.tool_choice == "required" or isinstance(request.tool_choice, dict):
        return "tool_choice other than auto and none"
    for tool in request.tools or []:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("strict") and request.tool_choice != "none":
            return "tools with strict"
    return None
