"""POST /v1/messages and /v1/messages/count_tokens: a chat, framed as content blocks.

    message_start, then for each block: content_block_start, content_block_delta*, content_block_stop;
    then message_delta with the reason to stop, message_stop

Blocks follow one another and never overlap. A stream that breaks ends with an `error` event; nothing follows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sglang.srt.entrypoints.anthropic.conversion import chat_request_of
from sglang.srt.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from sglang.srt.entrypoints.error_replies import error_body
from sglang.srt.entrypoints.openai.protocol import parse
from sglang.srt.entrypoints.openai.serving_base import Json, Reply, Route
from sglang.srt.entrypoints.openai.serving_chat import ChatServing, ChatTurn
from sglang.srt.entrypoints.sse import named_event
from sglang.srt.errors import Aborted, BadRequest, ServiceError
from sglang.srt.managers.sequence import SequenceOutput

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesServing(Route[MessagesRequest]):
    request_type = MessagesRequest
    id_prefix = "msg_"

    def __init__(self, chat: ChatServing):
        super().__init__(chat.tm)
        self._chat = chat

    async def prepare(self, request: MessagesRequest) -> MessagesReply:
        if request.n != 1:
            raise BadRequest("a message has one answer: leave out n", param="n")
        if request.max_tokens < 1:
            raise BadRequest(f"max_tokens must be at least 1, found {request.max_tokens}", param="max_tokens")
        turn = await self._chat.turn(chat_request_of(request))
        return MessagesReply(request, id=self.new_id(), model=request.model or self.tm.args.model_name, turn=turn)

    async def count_tokens(self, body: bytes) -> Json:
        """Tokens of the prompt that a request would have. Raises BadRequest."""
        rendered = await self._chat.render(chat_request_of(parse(body, CountTokensRequest)))
        return {"input_tokens": len(rendered.ids)}


class MessagesReply(Reply):
    family = "anthropic"
    request: MessagesRequest

    def __init__(self, request: MessagesRequest, *, turn: ChatTurn, **common: Any):
        super().__init__(request, sequences=turn.sequences, **common)
        (self._choice,) = turn.choices
        self._blocks: list[Json] = []
        self._is_open = False  # the last block
        self._arguments = ""  # of the last block, if it is a call

    def event(self, chunk: Json) -> bytes:
        return named_event(chunk["type"], chunk)

    def error_event(self, error: ServiceError) -> bytes:
        return named_event("error", error_body(self.family, error))

    def _take(self, index: int, output: SequenceOutput) -> Iterator[Json]:
        if not self._choice.started:
            yield {"type": "message_start", "message": self._message([], self._usage() | {"output_tokens": 0}, None, None)}
        delta = self._choice.take(output)
        if delta.reasoning:
            yield from self._append("thinking", delta.reasoning)
        if delta.content:
            yield from self._append("text", delta.content)
        for call in delta.tool_calls:
            if call.name is not None:
                yield from self._open({"type": "tool_use", "id": self._choice.call_id(call.index), "name": call.name, "input": {}})
            if call.arguments:
                self._arguments += call.arguments
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def end(self) -> Iterator[Json]:
        """Raises Aborted: this format has no word for an answer that somebody stopped."""
        yield from self._close()
        if self._choice.finish_reason == "abort":
            raise Aborted("the request was aborted")
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": self.usages[0].completion_tokens}}
        yield {"type": "message_stop"}

    def whole(self) -> Json:
        for _ in self.end():
            pass
        return self._message(self._blocks, self._usage(), *self._stop())

    def _append(self, kind: str, text: str) -> Iterator[Json]:
        """Add text to a block of this kind, which is opened if the last one is another."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            # Some clients require the signature. Nothing is signed here.
            yield from self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _open(self, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open, self._arguments = True, ""
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if not self._is_open:
            return
        self._is_open = False
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = _input_of(self._arguments)
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _stop(self) -> tuple[str | None, str | None]:
        matched = self._choice.matched_stop
        if isinstance(matched, str):
            return "stop_sequence", matched
        return _STOP_REASONS.get(self._choice.finish_reason or ""), None

    def _usage(self) -> Json:
        usage = self.usages[0]
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
        }

    def _message(self, content: list[Json], usage: Json, reason: str | None, sequence: str | None) -> Json:
        fixed = {"id": self.id, "type": "message", "role": "assistant", "content": content, "model": self.model}
        return fixed | {"stop_reason": reason, "stop_sequence": sequence, "usage": usage}


def _input_of(arguments: str) -> Json:
    """A call's arguments as an object. What is none, because the model erred or was cut off, is handed on as text."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": arguments}
