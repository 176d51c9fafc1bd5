"""Input items become chat messages. recipe's own Responses adapter, which we do not use, is the oracle of prompts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.openai.chat_conversation import conversation_of
from sglang.srt.entrypoints.openai.protocol import ChatRequest, parse
from sglang.srt.entrypoints.openai.recipe import MODEL_NAME
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest, chat_request_of, messages_of
from sglang.srt.errors import BadRequest

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
OFF, ON = {"reasoning": {"effort": "none"}}, {"reasoning": {"effort": "high"}}


def said(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "res"}


def chat_of(history: list[Any] | None = None, **body: Any) -> ChatRequest:
    request = parse(msgspec.json.encode({"input": "hi", **body}), ResponsesRequest)
    return chat_request_of(request, history or [], messages_of(request.input))


PROMPTS: dict[str, dict[str, Any]] = {
    "text": {**OFF, "input": "hi"},
    "thinking": {**ON, "input": "hi", "instructions": "ins"},
    "messages": {**OFF, "input": [said("developer", "d"), said("user", "a", "b"), said("assistant", "c"), said("user", "e")]},
    "assistant twice": {
        **OFF,
        "input": [{"role": "user", "content": "a"}, said("assistant", "b"), said("assistant", "c"), said("user", "e")],
    },
    "tools": {**ON, "tools": [TOOL], "input": [said("user", "a"), REASONING, said("assistant", "b"), CALL, OUTPUT, said("user", "e")]},
    "call alone": {**OFF, "tools": [TOOL, {"type": "web_search"}], "input": [said("user", "a"), CALL, OUTPUT]},
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_those_of_recipes_own_adapter(recipe, name: str) -> None:
    body = PROMPTS[name]
    theirs = recipe.encode(recipe.convert("responses", {"model": MODEL_NAME, **body}))
    assert recipe.render(conversation_of(chat_of(**body), {})).ids == theirs


def test_history_comes_after_the_instructions() -> None:
    chat = chat_of([{"role": "user", "content": "old"}, {"role": "assistant", "content": "answer"}], instructions="ins", input="new")
    assert [message["content"] for message in chat.messages] == ["ins", "old", "answer", "new"]


def test_fields_get_their_chat_names() -> None:
    chat = chat_of(
        tools=[{**TOOL, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=7,
        stop="END",
        parallel_tool_calls=False,
    )
    assert (chat.limit, chat.stop, chat.logprobs, chat.top_logprobs, chat.parallel_tool_calls) == (7, "END", True, 2, False)
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert chat.tools is not None and chat.tools[0]["function"]["strict"] is True
    assert chat.response_format is not None
    assert chat.response_format["json_schema"] == {"name": "n", "schema": {"type": "object"}, "strict": True}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ({"input": [{"role": "zzz", "content": "x"}]}, "role"),
    ({"input": [{"role": "user", "content": 5}]}, "content"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input_file"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "call_id"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "custom"),
    ({"tools": [{"type": "code_interpreter"}]}, "code_interpreter"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"text": {"format": 5}}, "text.format"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
]


@pytest.mark.parametrize(("body", "word"), REFUSED)
def test_what_cannot_be_shown_to_the_model_is_refused_by_name(body: dict[str, Any], word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        chat_of(**body)
