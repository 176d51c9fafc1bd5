"""Request bodies of the Messages API. SGLang's sampling extensions are accepted here too, under the names they have elsewhere."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.openai.protocol import CommonRequest


class CountTokensRequest(CommonRequest, kw_only=True):
    """What shapes a prompt. Blocks are read by `conversion`."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
