"""POST /v1/chat/completions: messages in; reasoning, text and tool calls out."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.entrypoints.openai.chat_choice import ChatChoice
from sglang.srt.entrypoints.openai.chat_conversation import conversation_of
from sglang.srt.entrypoints.openai.constraints import chat_constraint
from sglang.srt.entrypoints.openai.protocol import ChatRequest
from sglang.srt.entrypoints.openai.recipe import OutputDelta, Recipe, RenderedPrompt
from sglang.srt.entrypoints.openai.serving_base import ChoicesReply, Json, Serving
from sglang.srt.errors import BadRequest, ConfigError
from sglang.srt.managers.sequence import SequenceOutput, SequenceRequest
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
        turn = await self.turn(request)
        return ChatReply(
            request,
            id=self.new_id(),
            model=request.model or self.tm.args.model_name,
            report_cache=self.tm.args.enable_cache_report,
            include_usage=self.include_usage(request),
            turn=turn,
        )

    async def turn(self, request: ChatRequest) -> ChatTurn:
        """Render, tokenize and check a request; all chat formats come through here. Raises BadRequest."""
        rendered = await self.render(request)
        think_end_id = self.recipe.think_end_id if rendered.plan.starts_in_reasoning else None
        sequences = self.sequences_of(
            request,
            [rendered.ids],
            self.sampling(request, request.limit),
            return_logprob=request.logprobs,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else 0,
            constraint=chat_constraint(request, rendered.tools, think_end_id),
        )
        return ChatTurn(sequences, [ChatChoice(request, self.recipe, self.tm.tokenizer, rendered.plan) for _ in sequences])

    async def render(self, request: ChatRequest) -> RenderedPrompt:
        """The prompt of a request. Raises BadRequest."""
        conversation = conversation_of(request, self._template_kwargs)
        if request.input_ids is not None:
            return RenderedPrompt(request.input_ids, self.recipe.plan_for_ids(conversation), self.recipe.normalised_tools(conversation))
        if sum(len(str(message)) for message in conversation.messages) > _RENDER_IN_THREAD_BYTES:
            return await asyncio.to_thread(self.recipe.render, conversation)
        return self.recipe.render(conversation)


@dataclass(frozen=True)
class ChatTurn:
    """A chat that is ready to run: what the scheduler gets, and for each sequence who reads its output."""

    sequences: list[SequenceRequest]
    choices: list[ChatChoice]


class ChatReply(ChoicesReply):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    request: ChatRequest

    def __init__(self, request: ChatRequest, *, turn: ChatTurn, **common: Any):
        super().__init__(request, sequences=turn.sequences, **common)
        self._choices = turn.choices

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

    def _finish_chunks(self) -> Iterator[Json]:
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


def _stream_deltas(delta: OutputDelta, choice: ChatChoice) -> Iterator[Json]:
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
