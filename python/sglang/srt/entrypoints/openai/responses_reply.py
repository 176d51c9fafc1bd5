"""A chat framed as a response: items of output, and the events that build them up.

    response.created, response.in_progress
    for each item   output_item.added, [content_part.added], …delta*, …done, [content_part.done], output_item.done
    at the end      response.completed, or response.incomplete

Items follow one another: reasoning, a message, calls. Sequence numbers have no gaps. A stream that breaks ends with an
`error` event.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.entrypoints.error_replies import error_body
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_base import Json, Reply
from sglang.srt.entrypoints.openai.serving_chat import ChatTurn
from sglang.srt.entrypoints.sse import named_event
from sglang.srt.errors import ServiceError
from sglang.srt.managers.sequence import SequenceOutput

_STATUSES = {"stop": "completed", "tool_calls": "completed", "length": "incomplete", "abort": "cancelled"}
_EVENTS = {"completed": "response.completed", "incomplete": "response.incomplete", "cancelled": "response.incomplete"}
_DEFAULT_TEXT: Json = {"format": {"type": "text"}}

OnEnd = Callable[[Json, Json], None]
"""Called once with the final response object and the assistant's chat message."""


class ResponsesReply(Reply):
    request: ResponsesRequest

    def __init__(self, request: ResponsesRequest, *, turn: ChatTurn, may_call: bool, on_end: OnEnd, **common: Any):
        """`may_call`: tools were offered, so a message may turn out to be the commentary before a call."""
        super().__init__(request, sequences=turn.sequences, **common)
        (self._choice,) = turn.choices
        self._may_call = may_call
        self._on_end = on_end
        self._items: list[Json] = []
        self._is_open = False  # the last item
        self._logprobs = _TextLogprobs()
        self._next_number = 0

    def event(self, chunk: Json) -> bytes:
        return named_event(chunk["type"], chunk)

    def error_event(self, error: ServiceError) -> bytes:
        """Flat as OpenAI describes it, and nested where its SDK looks."""
        body = error_body(self.family, error)
        return self.event(self._numbered("error", code=str(error.status), message=body["message"], param=error.param, error=body["error"]))

    def snapshot(self, status: str) -> Json:
        """The response object in a status. Its output and usage are there once it has ended."""
        request, ended = self.request, status in _EVENTS
        response: Json = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "output": self._items if ended else [],
            "status": status,
            "usage": self._usage() if ended else None,
            "parallel_tool_calls": request.parallel_tool_calls,
            "tool_choice": request.tool_choice,
            "tools": [_shown_tool(tool) for tool in request.tools or []],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": (request.reasoning or {}).get("summary")},
            "store": request.store,
            "temperature": request.temperature,
            "text": _DEFAULT_TEXT | (request.text or {}),
            "top_p": request.top_p,
            "truncation": request.truncation,
            "user": request.user,
            "metadata": request.metadata or {},
        }
        return response | {"background": True} if request.background else response

    def failure(self, error: ServiceError) -> Json:
        """The response object of a background response that came to nothing."""
        return self.snapshot("failed") | {"error": {"code": "server_error", "message": error.message}}

    def whole(self) -> Json:
        for _ in self.end():
            pass
        return self.snapshot(self._status)

    def _take(self, index: int, output: SequenceOutput) -> Iterator[Json]:
        if not self._choice.started:
            for name in ("created", "in_progress"):
                yield self._numbered(f"response.{name}", response=self.snapshot("in_progress"))
        thought_before = self._choice.reasoning_tokens
        delta = self._choice.take(output)
        self.usages[index].reasoning_tokens = self._choice.reasoning_tokens
        self._logprobs.add(self._choice.take_logprobs()[self._choice.reasoning_tokens - thought_before :])
        if delta.reasoning:
            yield from self._open_text("reasoning", "rs_", {"summary": [], "content": [], "encrypted_content": None})
            yield from self._append("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            phase = None if self._may_call else "final_answer"  # with tools it shows at the end of the message
            yield from self._open_text("message", "msg_", {"content": [], "role": "assistant", "phase": phase})
            logprobs = self._logprobs.take(delta.content)
            if self.request.wants_logprobs:
                self._items[-1]["content"][0]["logprobs"] += logprobs
            yield from self._append("response.output_text.delta", delta.content, logprobs=logprobs)
        for call in delta.tool_calls:
            if call.name is not None:
                yield from self._close(next_is_call=True)
                fields = {"arguments": "", "call_id": self._choice.call_id(call.index), "name": call.name}
                yield self._open("function_call", "fc_", fields)
            if call.arguments:
                self._items[-1]["arguments"] += call.arguments
                yield self._of_item("response.function_call_arguments.delta", delta=call.arguments)

    def end(self) -> Iterator[Json]:
        yield from self._close()
        response = self.snapshot(self._status)
        self._on_end(response, self._choice.message())
        yield self._numbered(_EVENTS[self._status], response=response)

    @property
    def _status(self) -> str:
        return _STATUSES.get(self._choice.finish_reason or "stop", "completed")

    # -- items -------------------------------------------------------------------------------------------------------

    def _open(self, kind: str, prefix: str, fields: Json) -> Json:
        self._is_open = True
        self._items.append({"type": kind, "id": prefix + uuid.uuid4().hex, "status": "in_progress", **fields})
        return self._numbered("response.output_item.added", output_index=len(self._items) - 1, item=_copy(self._items[-1]))

    def _open_text(self, kind: str, prefix: str, fields: Json) -> Iterator[Json]:
        """Have an item of this kind with one part, which is opened if the last item is another."""
        if self._is_open and self._items[-1]["type"] == kind:
            return
        yield from self._close()
        yield self._open(kind, prefix, fields)
        logprobs: Json = {"logprobs": [] if self.request.wants_logprobs else None}
        is_message = kind == "message"
        part = {"type": "output_text", "annotations": [], "text": "", **logprobs} if is_message else {"type": "reasoning_text", "text": ""}
        self._items[-1]["content"].append(part)
        yield self._of_item("response.content_part.added", content_index=0, part=dict(part))

    def _append(self, event: str, text: str, **fields: Any) -> Iterator[Json]:
        self._items[-1]["content"][0]["text"] += text
        yield self._of_item(event, content_index=0, delta=text, **fields)

    def _close(self, *, next_is_call: bool = False) -> Iterator[Json]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "function_call":
            # A call that was cut off must not be made.
            item["status"] = "completed" if self._choice.finish_reason in (None, "tool_calls") else "incomplete"
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            if item["type"] == "message":
                item["phase"] = "commentary" if next_is_call else "final_answer"
                yield self._of_item("response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"] or [])
            else:
                yield self._of_item("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._numbered("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _of_item(self, event: str, **fields: Any) -> Json:
        return self._numbered(event, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _numbered(self, event: str, **fields: Any) -> Json:
        number, self._next_number = self._next_number, self._next_number + 1
        return {"type": event, "sequence_number": number, **fields}

    def _usage(self) -> Json:
        usage = self.usages[0]
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


class _TextLogprobs:
    """Logprobs of the tokens of a message's text, however its tokens were bundled: neither markup, nor what ends it."""

    def __init__(self) -> None:
        self._waiting: list[Json] = []
        self._room = 0  # bytes of text whose tokens have not been taken; negative while the end of a token is held back
        self._started = False

    def add(self, entries: list[Json]) -> None:
        self._waiting += entries

    def take(self, text: str) -> list[Json]:
        """Those of the tokens that begin within the text so far, of which `text` is the newest part."""
        self._room += len(text.encode())
        taken: list[Json] = []
        while self._waiting and self._room > 0:
            entry = self._waiting.pop(0)
            size = self._size(entry)
            if size:
                self._started = True
                taken.append(entry)
            self._room -= size
        return taken

    def _size(self, entry: Json) -> int:
        """Bytes of a token in the text, whose leading newlines were removed."""
        data = bytes(entry["bytes"])
        return len(data if self._started else data.lstrip(b"\n"))


def _copy(item: Json) -> Json:
    """An item as it is now; its list of parts will grow."""
    return {name: list(value) if isinstance(value, list) else value for name, value in item.items()}


def _shown_tool(tool: Json) -> Json:
    return {"description": None, "strict": False, **tool} if tool.get("type") == "function" else tool
