"""Everything that touches deepseek-recipe: conversations become prompt ids, output ids become reasoning, text and calls.

No other module knows a marker, a template or the markup of a tool call, but for the grammar in `tool_grammar`.

    ChatConversation ──convert──► recipe conversation ──encode──► prompt ids
                                        └────────────► ParsingPlan ──new_parser──► OutputParser

The rules of the wire (thinking off unless asked for, numbers as effort, a trailing assistant text becoming a user turn)
are not recipe's and live in `chat_conversation`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import deepseek_recipe as dr
import msgspec

from sglang.srt.errors import BadRequest

logger = logging.getLogger(__name__)

MODEL_NAME = "DeepSeek-V4.1-Flash"  # the name recipe knows the prompt format by
IMAGE_TOKEN = "<｜deepseek_image｜>"  # spelling of the V4.1 checkpoint; recipe's default is that of V4
THINK_END = "</think>"
_ASSISTANT, _THINK_START = "<｜Assistant｜>", "<think>"
_MARKUP_TOKENS = (_THINK_START, THINK_END, "｜DSML｜")

# Quick tasks end the prompt with one token. `action` comes after the generation header, the others in its place.
TASK_TOKENS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}
_TASKS_AFTER_HEADER = frozenset({"action"})

# A number as effort is rendered as the tier that prints 75, whose digits are then replaced.
_NUMBERED_TIER, _NUMBERED_TIER_LINE, _EFFORT_LINE = "high", "Reasoning Effort: 75", "Reasoning Effort: {}"

Api = Literal["chat", "messages", "responses"]
_REQUEST_TYPES: dict[str, Any] = {"chat": dr.ChatCompletionRequest, "messages": dr.MessagesRequest, "responses": dr.ResponsesRequest}
_FINISH_REASONS = {"stop": dr.InferenceFinishReason.Stop, "length": dr.InferenceFinishReason.Length}


@dataclass(frozen=True)
class ChatConversation:
    """What the prompt depends on, in the words of recipe's chat adapter."""

    messages: list[dict[str, Any]]
    thinking: bool = False
    effort: str | int | None = None  # a named tier, or 1..100; ignored when thinking is off
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    task: str | None = None

    def body(self) -> dict[str, Any]:
        """The request that recipe converts. Only what shapes the prompt: sampling rules stay the server's."""
        body: dict[str, Any] = {"model": MODEL_NAME, "messages": self.messages}
        body["thinking"] = {"type": "enabled" if self.thinking else "disabled"}
        if self.thinking and self.effort is not None:
            body["reasoning_effort"] = self.effort if isinstance(self.effort, str) else _NUMBERED_TIER
        if self.tools:
            body["tools"] = self.tools
            if self.tool_choice is not None:
                body["tool_choice"] = self.tool_choice
        if self.response_format is not None:
            body["response_format"] = self.response_format
        return body


@dataclass(frozen=True)
class ParsingPlan:
    """Where parsing of the output starts and what it looks for; follows from the prompt."""

    stage: dr.ThinkingInitialStage | None = None  # None: the prompt ended outside reasoning
    tool_calls: bool = False
    starts_in_tool_calls: bool = False
    json_output: bool = False

    @property
    def starts_in_reasoning(self) -> bool:
        return self.stage is not None and self.stage.starts_in_reasoning()


@dataclass(frozen=True)
class RenderedPrompt:
    ids: list[int]
    plan: ParsingPlan = field(default_factory=ParsingPlan)
    tools: list[dict[str, Any]] = field(default_factory=list)  # as shown, those with `strict` normalised


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of one call. `name` only on the first piece of a call."""

    index: int
    arguments: str
    name: str | None = None


class OutputDelta(msgspec.Struct):
    """What some output ids mean, in the order reasoning, content, calls (an output never goes back)."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = []

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class Recipe:
    """Prompt rendering and output parsing for one tokenizer. Stateless after construction; safe to call from threads."""

    def __init__(self, tokenizer_json: str, *, model_names: Sequence[str] = ()):
        """`tokenizer_json` is the text of tokenizer.json; `model_names` are further names `convert` accepts."""
        self._tokenizer = dr.Tokenizer.from_str(tokenizer_json)
        self._special_tokens = dr.SpecialTokens(image=IMAGE_TOKEN)
        self._encoding = dr.DeepseekV41Encoding().with_special_tokens(self._special_tokens).with_tokenizer(self._tokenizer)
        options = dr.ConversionOptions().with_special_tokens(self._special_tokens)
        for name in model_names:
            options = options.with_model_alias(name, dr.ModelVersion.DeepseekV41Flash)
        self._options = options
        added = {token["content"]: token["id"] for token in json.loads(tokenizer_json).get("added_tokens", [])}
        self._added = added
        self.think_end_id: int | None = added.get(THINK_END)
        self.markup_ids = frozenset(added[token] for token in _MARKUP_TOKENS if token in added)

    # -- render --------------------------------------------------------------------------------------------------------

    def convert(self, api: Api, body: dict[str, Any]) -> dr.ConversationRequest:
        """Check a request body of one API. Raises BadRequest with recipe's reason."""
        try:
            # As text: a number that JSON can write and Rust cannot hold is then an error of the field it stands in.
            return _REQUEST_TYPES[api](msgspec.json.encode(body)).convert(self._options)
        except dr.ConversionError as error:
            raise BadRequest(_conversion_message(error)) from error
        except ValueError as error:
            raise BadRequest(str(error)) from error

    def prompt_text(self, request: dr.ConversationRequest) -> str:
        """The prompt as text, markers spelled out. For logs and tests: never encode it."""
        return self._encoding.render_conversation(request.conversation).prompt

    def prompt_markers(self, request: dr.ConversationRequest) -> list[str]:
        """The markers of the prompt in order, without look-alikes that a user typed."""
        rendered = self._encoding.render_conversation(request.conversation)
        return [rendered.prompt[start:end] for start, end in rendered.special_ranges]

    def encode(self, request: dr.ConversationRequest) -> list[int]:
        """Prompt ids. Raises BadRequest if the tokenizer lacks a marker that the prompt needs."""
        try:
            return self._encoding.encode(request.conversation)
        except RuntimeError as error:
            raise BadRequest(f"this model cannot chat: {error}; use /v1/completions or /generate") from error

    def render(self, chat: ChatConversation) -> RenderedPrompt:
        """Prompt ids of a chat and the plan for what the model will answer. Raises BadRequest."""
        request = self.convert("chat", chat.body())
        if any(message.image_sources for message in request.conversation.messages):
            raise BadRequest("this model server has no vision yet: send text parts only", param="messages")
        ids = self.encode(request)
        if chat.thinking and isinstance(chat.effort, int):
            ids = self._with_effort_number(ids, chat.effort)
        options = request.parsing_options
        plan = ParsingPlan(
            stage=options.thinking_initial_stage,
            tool_calls=options.parse_tool_calls,
            starts_in_tool_calls=options.starts_in_tool_calls,
            json_output=options.parse_json_output,
        )
        if chat.task is not None:
            return self._with_task(ids, plan, chat.task, chat.thinking)
        return RenderedPrompt(ids, plan, _normalised_tools(request))

    def plan_for_ids(self, chat: ChatConversation) -> ParsingPlan:
        """The plan when the client brought the prompt ids itself: only the thinking switch and the tools count."""
        stage = dr.ThinkingInitialStage.ReasoningStart if chat.thinking else None
        return ParsingPlan(stage=stage, tool_calls=bool(chat.tools))

    def normalised_tools(self, chat: ChatConversation) -> list[dict[str, Any]]:
        """The tools as `render` would show them. Raises BadRequest."""
        return _normalised_tools(self.convert("chat", chat.body())) if chat.tools else []

    def _with_effort_number(self, ids: list[int], effort: int) -> list[int]:
        # Digits are a pre-token of their own, so exchanging them leaves the tokens around them as they were.
        line = self._tokenizer.encode(_NUMBERED_TIER_LINE)
        for start in range(len(ids) - len(line) + 1):
            if ids[start : start + len(line)] == line:
                return ids[:start] + self._tokenizer.encode(_EFFORT_LINE.format(effort)) + ids[start + len(line) :]
        raise BadRequest("reasoning_effort as a number is not possible with this tokenizer; use a named effort", param="reasoning_effort")

    def _with_task(self, ids: list[int], plan: ParsingPlan, task: str, thinking: bool) -> RenderedPrompt:
        if task not in TASK_TOKENS:
            raise BadRequest(f"task must be one of {', '.join(TASK_TOKENS)}, found {task!r}", param="task")
        token = self._added.get(TASK_TOKENS[task])
        header = [self._added.get(_ASSISTANT), self._added.get(_THINK_START if thinking else THINK_END)]
        if token is None:
            raise BadRequest(f"this model's tokenizer has no {TASK_TOKENS[task]} token", param="task")
        if ids[-2:] != header:
            raise BadRequest("a task needs a conversation that ends with a user message", param="task")
        if task in _TASKS_AFTER_HEADER:
            return RenderedPrompt([*ids, token], ParsingPlan(stage=plan.stage))
        return RenderedPrompt([*ids[:-2], token], ParsingPlan())

    # -- parse ---------------------------------------------------------------------------------------------------------

    def new_parser(self, plan: ParsingPlan) -> OutputParser:
        options = dr.ParsingOptions(
            parse_tool_calls=plan.tool_calls,
            starts_in_tool_calls=plan.starts_in_tool_calls,
            parse_json_output=plan.json_output,
            thinking_initial_stage=plan.stage,
            special_tokens=self._special_tokens,
        )
        # The generator frames chunks for the hosted API; the frame is thrown away and only the pieces are used.
        frame = dr.ChatCompletionRequest.chunk_generator(
            dr.ConversationRequest(dr.Conversation(), dr.ModelVersion.DeepseekV41Flash), "", MODEL_NAME
        )
        return OutputParser(dr.StreamProcessor(frame, options, self._tokenizer))


class OutputParser:
    """One choice's output. Fed ids in any split, its deltas concatenate to the same reasoning, content and calls.

    Markers count only as the ids the model sampled: a model that *writes about* `</think>` in ordinary pieces is quoted,
    not obeyed.
    """

    def __init__(self, processor: dr.StreamProcessor):
        self._processor = processor

    def push_ids(self, ids: Sequence[int]) -> OutputDelta:
        """The meaning of further output ids. Characters that are not complete yet wait inside."""
        return self._push(dr.InferenceChunk.tokens(ids)) if ids else OutputDelta()

    def push_text(self, text: str) -> OutputDelta:
        """The meaning of text that is only a part of a token: what is left of one that a stop string cut."""
        return self._push(dr.InferenceChunk.text(text)) if text else OutputDelta()

    def finish(self, reason: str) -> OutputDelta:
        """Flush; `reason` is stop, length or abort."""
        if self._processor.finished:
            return OutputDelta()
        if reason in _FINISH_REASONS:
            return self._push(dr.InferenceChunk.finish(_FINISH_REASONS[reason]))
        return _merged(self._processor.finish())

    def _push(self, chunk: dr.InferenceChunk) -> OutputDelta:
        return OutputDelta() if self._processor.finished else _merged(self._processor.push(chunk))


class _Function(msgspec.Struct):
    arguments: str = ""
    name: str | None = None


class _ToolCall(msgspec.Struct):
    index: int
    function: _Function


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def _merged(chunks: Sequence[Any]) -> OutputDelta:
    merged = OutputDelta(tool_calls=[])
    for chunk in chunks:
        for choice in _decode_chunk(chunk.to_json()).choices:
            merged.reasoning += choice.delta.reasoning_content or ""
            merged.content += choice.delta.content or ""
            merged.tool_calls += [ToolCallDelta(c.index, c.function.arguments, c.function.name) for c in choice.delta.tool_calls or ()]
    return merged


def _normalised_tools(request: dr.ConversationRequest) -> list[dict[str, Any]]:
    """The tools of a conversation; recipe has rebuilt the schemas of strict ones."""
    constraint = request.inference_options.output_constraint
    return json.loads(constraint.schema) if constraint is not None and constraint.kind.startswith("tool_call") else []


def _conversion_message(error: dr.ConversionError) -> str:
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.body)
