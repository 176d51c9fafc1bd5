"""Messages requests in the words of a chat request: from there on the two are one.

Thinking is on only if `thinking` says enabled or adaptive; its budget is not enforced. `output_config.effort` says how
thorough thinking is, but does not switch it on.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatRequest, common_fields
from sglang.srt.errors import BadRequest

Json = dict[str, Any]

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request_of(request: CountTokensRequest) -> ChatRequest:
    """The same request as a chat. Raises BadRequest for what this server cannot show to the model."""
    fields = common_fields(request)
    if isinstance(request, MessagesRequest):
        fields["max_tokens"] = request.max_tokens
        fields["stop"] = request.stop_sequences or fields["stop"]
    if request.tools:
        fields["tools"] = [_tool(tool) for tool in request.tools]
    if request.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(request.tool_choice)
        fields["parallel_tool_calls"] = not request.tool_choice.get("disable_parallel_tool_use", False)
    return ChatRequest(
        messages=_messages(request),
        thinking=request.thinking,
        chat_template_kwargs=_template_kwargs(request),
        **fields | _response_format(request),
    )


def _template_kwargs(request: CountTokensRequest) -> Json | None:
    effort = (request.output_config or {}).get("effort")
    return (request.chat_template_kwargs or {}) | ({"reasoning_effort": effort} if effort is not None else {}) or None


def _response_format(request: CountTokensRequest) -> Json:
    wanted = (request.output_config or {}).get("format")
    if wanted is None:
        return {}
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise BadRequest("output_config.format must be an object with type json_schema and a schema", param="output_config")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"]}}}


def _tool(tool: Json) -> Json:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise BadRequest(f"tools of type {str(kind)[:60]!r} run on Anthropic's servers; this server has none", param="tools")
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise BadRequest("a tool needs a name and an input_schema", param="tools")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function | ({"strict": True} if tool.get("strict") is True else {})}


def _tool_choice(choice: Json) -> str | Json:
    kind = choice.get("type")
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        raise BadRequest(f"tool_choice.type must be auto, any, none, or tool with a name, found {str(kind)[:60]!r}", param="tool_choice")
    return _TOOL_CHOICES[kind]


def _messages(request: CountTokensRequest) -> list[Json]:
    messages: list[Json] = []
    if request.system:
        messages.append({"role": "system", "content": _parts(request.system, "system")})
    if not request.messages:
        raise BadRequest("messages must not be empty", param="messages")
    for number, message in enumerate(request.messages):
        role, content, where = message.get("role"), message.get("content"), f"messages.{number}"
        if not isinstance(content, (str, list)):
            raise BadRequest(f"{where}.content must be a string or a list of blocks", param="messages")
        if role == "user":
            messages += _user(content, where)
        elif role == "assistant":
            messages.append(_assistant(content, where))
        elif role == "system":
            messages.append({"role": "system", "content": _parts(content, where)})
        else:
            raise BadRequest(f"{where}.role must be user or assistant, found {str(role)[:60]!r}", param="messages")
    return messages


def _user(content: str | list[Any], where: str) -> list[Json]:
    """The results of tools come first, each a message of its own; then what the user says."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results = [block for block in content if _kind(block, where) == "tool_result"]
    others = [block for block in content if block["type"] != "tool_result"]
    messages: list[Json] = []
    for block in results:
        text = _parts(block.get("content") or "", f"{where}.tool_result")
        messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
    if others or not results:
        messages.append({"role": "user", "content": _parts(others, where)})
    return messages


def _assistant(content: str | list[Any], where: str) -> Json:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in content:
        match _kind(block, where):
            case "thinking":
                thoughts.append(_text(block, "thinking", where))
            case "redacted_thinking":
                pass  # encrypted by another service, for itself
            case "tool_use":
                calls.append(_call(block, where))
            case _:
                texts.append(block)
    message: Json = {"role": "assistant", "content": _parts(texts, where)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | {"tool_calls": calls} if calls else message


def _call(block: Json, where: str) -> Json:
    if not isinstance(block.get("id"), str) or not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        raise BadRequest(f"{where}: a tool_use block needs an id, a name and an input object", param="messages")
    arguments = msgspec.json.encode(block["input"]).decode()
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _parts(content: str | list[Any], where: str) -> str | list[Json]:
    """Text, or chat's content parts where there are several; how parts are joined is recipe's business."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content must be a string or a list of blocks", param="messages")
    parts = [part for block in content for part in _part(block, where)]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts or ""


def _part(block: Any, where: str) -> list[Json]:
    kind = _kind(block, where)
    if kind == "text":
        return [{"type": "text", "text": _text(block, "text", where)}]
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if kind == "image":
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        return [{"type": "image_url", "image_url": {"url": url}}]
    if kind == "document" and source.get("type") == "text":
        return [{"type": "text", "text": _text(source, "data", where)}]
    what = f"document blocks with a source of type {str(source.get('type'))[:60]}" if kind == "document" else f"{kind[:60]} blocks"
    raise BadRequest(f"{where}: {what} are not supported", param="messages")


def _kind(block: Any, where: str) -> str:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise BadRequest(f"{where}: every content block must be an object with a type", param="messages")
    return block["type"]


def _text(block: Json, field: str, where: str) -> str:
    if not isinstance(block.get(field), str):
        raise BadRequest(f"{where}: {field} must be a string", param="messages")
    return block[field]
