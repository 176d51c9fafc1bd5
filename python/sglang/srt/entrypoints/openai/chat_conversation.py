"""The rules of the wire that decide what a chat request says to the model, before deepseek-recipe renders it.

Thinking is off unless asked for. It is asked for, first match wins, by
`chat_template_kwargs.thinking`, `thinking.type`, `reasoning_effort` / `reasoning.effort` (anything but none),
`reasoning.enabled`, the server's default_chat_template_kwargs.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatRequest
from sglang.srt.entrypoints.openai.recipe import ChatConversation
from sglang.srt.errors import BadRequest

_TRUE_WORDS = frozenset({"1", "true", "yes", "y", "on"})


def conversation_of(request: ChatRequest, default_kwargs: dict[str, Any]) -> ChatConversation:
    """What to render for a request; `default_kwargs` are the server's default_chat_template_kwargs. Raises BadRequest."""
    thinking = wants_thinking(request, default_kwargs)
    tools, tool_choice = _tools_of(request)
    return ChatConversation(
        messages=_messages_of(request),
        thinking=thinking,
        effort=_effort_of(request, default_kwargs) if thinking else None,
        tools=tools,
        tool_choice=tool_choice,
        response_format=_shown_format(request.response_format),
        task=request.task,
    )


def _shown_format(response_format: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the prompt says about the form of the answer: nothing of a structural tag, which only the grammar knows."""
    return None if (response_format or {}).get("type") == "structural_tag" else response_format


def wants_thinking(request: ChatRequest, default_kwargs: dict[str, Any]) -> bool:
    """Whether the model shall think before it answers."""
    kwargs = request.chat_template_kwargs or {}
    if kwargs.get("thinking") is not None:
        return bool(kwargs["thinking"])
    if isinstance(request.thinking, bool):
        return request.thinking
    kind = (request.thinking or {}).get("type")
    if kind is not None:
        if kind not in ("enabled", "adaptive", "disabled"):
            raise BadRequest(f"thinking.type must be enabled, adaptive or disabled, found {kind!r}", param="thinking")
        return kind != "disabled"
    effort = _asked_effort(request)
    if effort is not None:
        return effort != "none"
    reasoning = request.reasoning or {}
    enabled = reasoning.get("enabled", reasoning.get("enable"))
    if enabled is not None:
        return enabled.strip().lower() in _TRUE_WORDS if isinstance(enabled, str) else bool(enabled)
    return bool(default_kwargs.get("thinking", False))


def effort_number(value: float) -> int:
    """Effort 1..100 from a whole number 1..100 or a fraction 0..0.99. Raises BadRequest."""
    if isinstance(value, bool) or not math.isfinite(value):
        raise BadRequest(f"reasoning_effort must be a name or a number, found {value!r}", param="reasoning_effort")
    if value == int(value) and 1 <= value <= 100:
        return int(value)
    if 0 <= value <= 0.99:
        return max(1, round(value * 100))
    raise BadRequest(f"reasoning_effort as a number must be 1..100, or a fraction 0..0.99, found {value!r}", param="reasoning_effort")


def _asked_effort(request: ChatRequest) -> str | int | float | None:
    reasoning = request.reasoning or {}
    for effort in (reasoning.get("effort"), reasoning.get("reasoning_effort"), request.reasoning_effort):
        if effort is not None:
            if not isinstance(effort, (str, int, float)):
                raise BadRequest(f"reasoning.effort must be a name or a number, found {type(effort).__name__}", param="reasoning")
            return effort
    return None


def _effort_of(request: ChatRequest, default_kwargs: dict[str, Any]) -> str | int | None:
    """A named tier or a number 1..100; None leaves the choice to the template."""
    kwargs = request.chat_template_kwargs or {}
    wishes = (_asked_effort(request), kwargs.get("reasoning_effort"), default_kwargs.get("reasoning_effort"))
    effort = next((wish for wish in wishes if wish not in (None, "none")), None)
    if isinstance(effort, str) and re.fullmatch(r"\d{1,3}(\.\d+)?", effort.strip()):
        effort = float(effort)
    if effort is not None and not isinstance(effort, (str, int, float)):
        raise BadRequest(f"reasoning_effort must be a name or a number, found {type(effort).__name__}", param="chat_template_kwargs")
    return effort_number(effort) if isinstance(effort, (int, float)) else effort


def _tools_of(request: ChatRequest) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    choice = request.tool_choice
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        raise BadRequest(f"tool_choice must be auto, none, required or a function, found {choice!r}", param="tool_choice")
    if not request.tools:
        if choice == "required" or isinstance(choice, dict):
            word = "required" if isinstance(choice, str) else "a function"
            raise BadRequest(f"Tools cannot be empty if tool choice is set to {word}.", param="tools")
        return None, None
    if choice == "none":
        return None, None
    # An enforced choice is the grammar's work, and the grammar expects the model to open the block itself.
    return [_without_nulls(tool) for tool in request.tools], "auto"


def _messages_of(request: ChatRequest) -> list[dict[str, Any]]:
    if not request.messages:
        raise BadRequest("Messages cannot be empty.", param="messages")
    messages = [_message(message) for message in request.messages]
    last = messages[-1]
    if last.get("role") == "assistant" and isinstance(last["content"], str):
        last.pop("tool_calls", None)
        if request.continue_final_message or last.get("prefix"):
            last["prefix"] = True
        else:
            # A finished answer in last place asks for another turn: it is put to the model as the user's words.
            messages[-1] = {"role": "user", "content": last["content"]}
    return messages


def _message(message: dict[str, Any]) -> dict[str, Any]:
    fixed = dict(message)
    if fixed.get("content") is None:
        fixed["content"] = ""
    if fixed.get("role") == "developer":
        fixed["role"] = "system"
    if fixed.get("reasoning_content") is None:
        fixed.pop("reasoning_content", None)
        if isinstance(fixed.get("reasoning"), str):  # the name some clients return it under
            fixed["reasoning_content"] = fixed["reasoning"]
    calls = fixed.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise BadRequest("tool_calls must be a list", param="messages")
        fixed["tool_calls"] = [_with_text_arguments(call) for call in calls]
    return fixed


def _with_text_arguments(call: Any) -> Any:
    """Arguments sent as an object instead of its JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments", ""), str):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False, separators=(",", ":"))
    return {**call, "function": {**function, "arguments": arguments}}


def _without_nulls(tool: dict[str, Any]) -> dict[str, Any]:
    """recipe would print a null as a value."""
    kept = {key: value for key, value in tool.items() if value is not None}
    if isinstance(kept.get("function"), dict):
        kept["function"] = {key: value for key, value in kept["function"].items() if value is not None}
    return kept
