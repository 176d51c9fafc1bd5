"""POST /v1/chat/completions: messages in; reasoning, text and tool calls out."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Iterator
from typing import Any

from sglang.srt.entrypoints.openai.chat_conversation import conversation_of
from sglang.srt.entrypoints.openai.constraints import chat_constraint
from sglang.srt.entrypoints.openai.logprobs import chat_logprobs
from sglang.srt.entrypoints.openai.protocol import ChatRequest, as_list
from sglang.srt.entrypoints.openai.recipe import OutputDelta, ParsingPlan, Recipe, RenderedPrompt, ToolCallDelta
from sglang.srt.entrypoints.openai.serving_base import Json, Reply, Serving
from sglang.srt.entrypoints.openai.stop_hold import StopHold
from sglang.srt.entrypoints.openai.usage import ReasoningCounter
from sglang.srt.errors import BadRequest, ConfigError
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.sequence import SequenceOutput
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

# Rendering more than this many bytes of messages takes longer than other requests should wait for the event loop.
_RENDER_IN_THREAD_BYTES = 32_768


class ChatServing(Serving[ChatRequest]):
    request_type = ChatRequest
    id_prefix = "chatcmpl-"

    def __init__(self, tm: TokenizerManager):
        super().__init__(tm)
        self.recipe = Recipe(tm.tokenizer.backend.to_str())
        self._template_kwargs: Json = json.loads(tm.args.default_chat_template_kwargs)
        self._check_defaults()

    def _check_defaults(self) -> None:
        """Render once, thinking, so that a bad default fails the launch and not every request.

        A tokenizer without chat markers is only warned about: the other routes work with it.
        """
        probe = ChatRequest(messages=[{"role": "user", "content": ""}], thinking=True)
        try:
            request = self.recipe.convert("chat", conversation_of(probe, self._template_kwargs).body())
        except BadRequest as error:
            raise ConfigError(f"--default-chat-template-kwargs cannot be used: {error.message}") from error
        try:
            self.recipe.encode(request)
        except BadRequest as error:
            logger.warning("%s", error.message)

    async def prepare(self, request: ChatRequest) -> ChatReply:
        rendered = await self._render(request)
        think_end_id = self.recipe.think_end_id if rendered.plan.starts_in_reasoning else None
        sequences = self.sequences_of(
            request,
            [rendered.ids],
            self.sampling(request, request.limit),
            return_logprob=request.logprobs,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else 0,
            constraint=chat_constraint(request, rendered.tools, think_end_id),
        )
        return ChatReply(
            request,
            id=self.new_id(),
            model=request.model or self.tm.args.model_name,
            sequences=sequences,
            report_cache=self.tm.args.enable_cache_report,
            recipe=self.recipe,
            tokenizer=self.tm.tokenizer,
            plan=rendered.plan,
        )

    async def _render(self, request: ChatRequest) -> RenderedPrompt:
        conversation = conversation_of(request, self._template_kwargs)
        if request.input_ids is not None:
            return RenderedPrompt(request.input_ids, self.recipe.plan_for_ids(conversation), self.recipe.normalised_tools(conversation))
        if sum(len(str(message)) for message in conversation.messages) > _RENDER_IN_THREAD_BYTES:
            return await asyncio.to_thread(self.recipe.render, conversation)
        return self.recipe.render(conversation)


class ChatReply(Reply):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    request: ChatRequest

    def __init__(self, request: ChatRequest, *, recipe: Recipe, tokenizer: Tokenizer, plan: ParsingPlan, **common: Any):
        super().__init__(request, **common)
        self._tokenizer = tokenizer
        self._choices = [_Choice(request, recipe, tokenizer, plan) for _ in self.sequences]

    def _take(self, index: int, output: SequenceOutput) -> Iterator[Json]:
        choice = self._choices[index]
        first = not choice.started
        delta = choice.take(output)
        self.usages[index].reasoning_tokens = choice.reasoning_tokens
        if not self.request.stream:
            return
        if first:
            yield self._delta_chunk(index, {"reasoning_content": None, "role": "assistant", "content": ""})
        logprobs = choice.take_logprobs() if delta else None
        for piece in _stream_deltas(delta, choice):
            # The logprobs of a step belong to the first thing it shows.
            yield self._delta_chunk(index, piece, logprobs=logprobs)
            logprobs = None

    def end(self) -> Iterator[Json]:
        for index, choice in enumerate(self._choices):
            chunk = self._delta_chunk(index, {"reasoning_content": None}, logprobs=choice.take_logprobs())
            chunk["choices"][0] |= {"finish_reason": choice.finish_reason, "matched_stop": choice.matched_stop}
            if self.request.return_meta_info:
                chunk["choices"][0]["meta_info"] = self.meta_info(index)
            yield chunk

    def _delta_chunk(self, index: int, delta: Json, logprobs: list[Json] | None = None) -> Json:
        choice: Json = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": None,
            "matched_stop": None,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = self._choices[index].take_ids()
        return self.chunk([choice])

    def _choice(self, index: int) -> Json:
        choice = self._choices[index]
        logprobs = choice.take_logprobs()
        result: Json = {
            "index": index,
            "message": choice.message(),
            "logprobs": {"content": logprobs} if self.request.logprobs else None,
            "finish_reason": choice.finish_reason,
            "matched_stop": choice.matched_stop,
        }
        if self.request.return_token_ids:
            result["token_ids"] = choice.take_ids()
        if self.request.return_meta_info:
            result["meta_info"] = self.meta_info(index)
        return result

    def whole(self) -> Json:
        reply = super().whole()
        return reply | {"prompt_token_ids": self.sequences[0].input_ids} if self.request.return_prompt_token_ids else reply


class _Choice:
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


def _stream_deltas(delta: OutputDelta, choice: _Choice) -> Iterator[Json]:
    """The `delta` objects for one step. None of them carries two kinds of output."""
    if delta.reasoning:
        yield {"reasoning_content": delta.reasoning}
    if delta.content:
        yield {"reasoning_content": None, "content": delta.content}
    for call in delta.tool_calls:
        named = call.name is not None
        piece = {
            "id": choice.call_id(call.index) if named else None,
            "index": call.index,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        yield {"role": None, "content": None, "reasoning_content": None, "tool_calls": [piece]}
