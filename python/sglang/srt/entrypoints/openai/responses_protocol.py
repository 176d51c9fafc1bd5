"""Body of POST /v1/responses, and the items of its input in the words of a chat.

One turn of the model is several items there (reasoning, message, calls) and one message here: items of a turn are put
together again, so that the history renders as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatRequest, CommonRequest, common_fields
from sglang.srt.errors import BadRequest

Json = dict[str, Any]

LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for logprobs."""
_DROPPED_TOOLS = ("web_search", "web_search_preview", "file_search")
"""Hosted tools that clients offer by default; the model is not told of them, as recipe does it."""


class ResponsesRequest(CommonRequest, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None  # None: the context that is left
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None
    truncation: str = "disabled"
    store: bool = True
    previous_response_id: str | None = None
    background: bool = False
    conversation: Any = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or [])


def chat_request_of(request: ResponsesRequest, history: list[Json], new: list[Json]) -> ChatRequest:
    """The same request as a chat: `history` are the messages of earlier responses, `new` those of the input. Raises BadRequest."""
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise BadRequest(f"{name} is not supported by this server; send the items in input", param=name)
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    fields = common_fields(request)
    wanted = _response_format(request.text)
    if wanted is not None:
        fields["response_format"] = wanted
    return ChatRequest(
        messages=instructions + history + new,
        max_tokens=request.max_output_tokens,
        tools=[_tool(tool) for tool in request.tools or [] if tool.get("type") not in _DROPPED_TOOLS] or None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning=request.reasoning,
        chat_template_kwargs=request.chat_template_kwargs,
        logprobs=request.wants_logprobs,
        top_logprobs=request.top_logprobs,
        **fields,
    )


def messages_of(items: str | list[Json]) -> list[Json]:
    """Chat messages for input items. Raises BadRequest for items this server cannot show to the model."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    turns = _Turns()
    for number, item in enumerate(items):
        turns.add(item, f"input[{number}]")
    return [{**message, "content": _simple(message["content"])} for message in turns.messages]


class _Turns:
    """Messages so far. Items of the assistant join the last message while it is the assistant's."""

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def add(self, item: Json, where: str) -> None:
        kind = item.get("type", "message")
        match kind:
            case "message" if item.get("role") == "assistant":
                self._assistant()["content"] += _parts(item.get("content"), where)
            case "message":
                if item.get("role") not in ("user", "system", "developer"):
                    raise BadRequest(f"{where}.role must be user, system, developer or assistant", param="input")
                self.messages.append({"role": item["role"], "content": _parts(item.get("content"), where)})
            case "reasoning":
                thoughts = _texts(item.get("content")) or _texts(item.get("summary"))
                if thoughts:  # without them it is encrypted by another service, for itself
                    message = self._assistant()
                    message["reasoning_content"] = message.get("reasoning_content", "") + "\n".join(thoughts)
            case "function_call":
                self._assistant().setdefault("tool_calls", []).append(_call(item, where))
            case "function_call_output":
                self.messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _parts(item.get("output"), where)})
            case _:
                raise BadRequest(f"{where}: items of type {str(kind)[:60]!r} are not supported", param="input")

    def _assistant(self) -> Json:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": []})
        return self.messages[-1]


def _call(item: Json, where: str) -> Json:
    if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
        raise BadRequest(f"{where}: a function_call needs call_id, name and arguments, all strings", param="input")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _parts(content: Any, where: str) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadRequest(f"{where}: content must be a string or a list of parts", param="input")
    return [_part(part, where) for part in content]


def _part(part: Any, where: str) -> Json:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return {"type": "text", "text": text}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise BadRequest(f"{where}: content parts of type {str(kind)[:60]!r} are not supported, or lack their text", param="input")


def _simple(parts: list[Json]) -> str | list[Json]:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts or ""


def _texts(parts: Any) -> list[str]:
    if not isinstance(parts, Iterable):
        return []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str) and part["text"]]


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise BadRequest(f"tools of type {str(tool.get('type'))[:60]!r} are not supported; offer functions", param="tools")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function | ({"strict": True} if tool.get("strict") is True else {})}


def _tool_choice(choice: str | Json) -> str | Json:
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    raise BadRequest("tool_choice must be auto, none, required, or a function with a name", param="tool_choice")


def _response_format(text: Json | None) -> Json | None:
    wanted = (text or {}).get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise BadRequest("text.format must be an object", param="text")
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: value for name, value in wanted.items() if name != "type"}}
