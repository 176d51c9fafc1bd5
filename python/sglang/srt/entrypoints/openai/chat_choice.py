"""One answer of a chat while it comes: ids wait for stop strings, are parsed, and add up to a message.

The three chat formats (chat completions, messages, responses) differ only in how they frame what `take` returns.
"""

from __future__ import annotations

import uuid
from typing import Any

from sglang.srt.entrypoints.openai.logprobs import chat_logprobs
from sglang.srt.entrypoints.openai.protocol import ChatRequest, as_list
from sglang.srt.entrypoints.openai.recipe import OutputDelta, ParsingPlan, Recipe, ToolCallDelta
from sglang.srt.entrypoints.openai.stop_hold import StopHold
from sglang.srt.entrypoints.openai.usage import ReasoningCounter
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.sequence import SequenceOutput
from sglang.srt.managers.tokenizer import Tokenizer

Json = dict[str, Any]


class ChatChoice:
    """One answer: ids wait for stop strings, are parsed, and add up to a message."""

    def __init__(self, request: ChatRequest, recipe: Recipe, tokenizer: Tokenizer, plan: ParsingPlan):
        hidden = tokenizer.special_ids - recipe.markup_ids if request.skip_special_tokens else frozenset()
        self._request = request
        self._tokenizer = tokenizer
        self._hold = StopHold(tokenizer, as_list(request.stop), keep_stop=request.no_stop_trim, hidden=hidden)
        self._parser = recipe.new_parser(plan)
        self._counter = ReasoningCounter(recipe.think_end_id, thinking=plan.starts_in_reasoning)
        self._held_reasoning = ""
        self._logprobs: list[Json] = []  # not shown yet
        self._ids: list[int] = []  # not shown yet
        self._finish: FinishReason | None = None
        self._reasoning = ""
        self._content = ""
        self._calls: list[Json] = []
        self.started = False

    @property
    def reasoning_tokens(self) -> int:
        return self._counter.count

    @property
    def finish_reason(self) -> str | None:
        kind = self._finish.type if self._finish else None
        return "tool_calls" if kind == "stop" and self._calls else kind

    @property
    def matched_stop(self) -> int | str | None:
        return self._finish.matched if self._finish and self.finish_reason == "stop" else None

    def take(self, output: SequenceOutput) -> OutputDelta:
        """What one output adds to the message, in the form the request wants it."""
        self.started = True
        self._counter.take(output.new_ids)
        self._ids += output.new_ids
        if output.output_logprobs is not None:
            self._logprobs += chat_logprobs(output.output_logprobs, self._tokenizer)
        delta = self._shaped(self._parse(output), last=output.finish is not None)
        self._reasoning += delta.reasoning
        self._content += delta.content
        for call in delta.tool_calls:
            self._add_call(call)
        return delta

    def take_logprobs(self) -> list[Json]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def take_ids(self) -> list[int]:
        taken, self._ids = self._ids, []
        return taken

    def message(self) -> Json:
        message: Json = {"role": "assistant", "content": self._content, "reasoning_content": self._reasoning or None}
        return message | {"tool_calls": self._calls} if self._calls else message

    def call_id(self, index: int) -> str:
        return self._calls[index]["id"]

    def _parse(self, output: SequenceOutput) -> OutputDelta:
        self._finish = output.finish
        if output.finish is None:
            ids, text = self._hold.take(output.new_ids)
        else:
            ids, text = self._hold.finish(output.new_ids, output.finish.matched)
        parts = [self._parser.push_ids(ids), self._parser.push_text(text)]
        if output.finish is not None:
            parts.append(self._parser.finish(output.finish.type))
        return OutputDelta(
            reasoning="".join(part.reasoning for part in parts),
            content="".join(part.content for part in parts),
            tool_calls=[call for part in parts for call in part.tool_calls],
        )

    def _shaped(self, delta: OutputDelta, *, last: bool) -> OutputDelta:
        if not self._request.separate_reasoning:
            return OutputDelta(content=delta.reasoning + delta.content, tool_calls=delta.tool_calls)
        if not self._request.stream_reasoning:
            # Reasoning comes in one piece, when it is over.
            self._held_reasoning += delta.reasoning
            delta.reasoning = ""
            if delta or last:
                delta.reasoning, self._held_reasoning = self._held_reasoning, ""
        return delta

    def _add_call(self, piece: ToolCallDelta) -> None:
        if piece.name is not None:
            function = {"name": piece.name, "arguments": piece.arguments}
            self._calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "index": piece.index, "type": "function", "function": function})
        else:
            self._calls[piece.index]["function"]["arguments"] += piece.arguments
