"""Request bodies of the OpenAI routes, SGLang's extensions included.

Unknown fields are ignored and an explicit null means the default, because clients send both. Types are strict: "ten" is not
a number. Meaning (ranges, combinations) is checked where it is used, so that a message can say what was expected.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from sglang.srt.entrypoints.request_body import parse_object
from sglang.srt.errors import BadRequest

_MAX_MESSAGE_CHARS = 500  # a reply about a bad body must not carry the body back


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage on every chunk


class CommonRequest(msgspec.Struct, kw_only=True):
    """Fields that chat and completions share. Names and defaults are OpenAI's, then SGLang's."""

    model: str | None = None  # echoed, never checked
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None

    # sampling; None: the model's generation_config.json decides
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    stream_interval: int | None = None
    custom_params: dict[str, Any] | None = None

    # constraints on the output
    response_format: dict[str, Any] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    # the server
    rid: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    timeout: float | None = None  # seconds this request may take in all
    swa_restore: str | None = None
    prefill_truncation: str | None = None

    # what to report
    return_token_ids: bool = False
    return_cached_tokens_details: bool = False
    return_spec_tokens_details: bool = False
    return_meta_info: bool = False

    def includes_usage(self, default: bool) -> bool:
        """Whether a stream ends with a usage chunk; `default` is the server's answer for requests that do not say."""
        asked = self.stream_options.include_usage if self.stream_options else None
        return default if asked is None else asked

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(CommonRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: int = 16
    echo: bool = False
    logprobs: int | None = None  # how many alternatives per token
    suffix: str | None = None


class ChatRequest(CommonRequest, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None  # None: the context that is left
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | int | float | None = None
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    continue_final_message: bool = False
    task: str | None = None
    input_ids: list[int] | None = None  # prompt ids; messages are then not rendered
    return_prompt_token_ids: bool = False

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


R = TypeVar("R", bound=CommonRequest)


def common_fields(request: CommonRequest) -> dict[str, Any]:
    """The fields of CommonRequest, to make a request of another format."""
    return {name: getattr(request, name) for name in CommonRequest.__struct_fields__}


def parse(body: bytes, kind: type[R]) -> R:
    """A request from the bytes of its body. Raises BadRequest that names the field."""
    fields = parse_object(body)
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        message = clip(str(error))
        raise BadRequest(f"invalid request: {message}", param=_field_of(message)) from error


def clip(message: str) -> str:
    """A message short enough for a reply, whatever the client made it quote."""
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[: _MAX_MESSAGE_CHARS - 1] + "…"


def as_list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def _field_of(message: str) -> str | None:
    """The top-level field that msgspec's message points at, e.g. max_tokens for "… - at `$.max_tokens`"."""
    if "`$." in message:
        return message.rsplit("`$.", 1)[1].rstrip("`").split(".")[0].split("[")[0]
    if message.startswith("Object missing required field `"):
        return message.split("`")[1]
    return None
