"""Messages become chats. recipe has a Messages adapter of its own, which we do not use: it is the oracle of prompts here."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang.srt.entrypoints.anthropic.conversion import chat_request_of
from sglang.srt.entrypoints.anthropic.protocol import MessagesRequest
from sglang.srt.entrypoints.openai.chat_conversation import conversation_of
from sglang.srt.entrypoints.openai.protocol import ChatRequest, parse
from sglang.srt.entrypoints.openai.recipe import MODEL_NAME
from sglang.srt.errors import BadRequest

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
THINKING = {"type": "enabled", "budget_tokens": 1024}
CALLS = [{"type": "tool_use", "id": f"c{n}", "name": "f", "input": {"x": n}} for n in (1, 2)]


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def result(number: int, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"c{number}", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def chat_of(**body: Any) -> ChatRequest:
    return chat_request_of(parse(msgspec.json.encode({"max_tokens": 5, **body}), MessagesRequest))


PROMPTS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [user("hi")]},
    "blocks": {"system": [text("a"), text("b")], "messages": [user([text("x"), text("y")]), assistant([text("1"), text("2")]), user("z")]},
    "system inside": {"system": "s", "messages": [user("x"), assistant("y"), {"role": "system", "content": "t"}, user("z")]},
    "thinking": {"thinking": THINKING, "messages": [user("x"), assistant([{"type": "thinking", "thinking": "r"}, text("y")]), user("z")]},
    "effort": {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}, "messages": [user("x")]},
    "tools": {
        "thinking": THINKING,
        "tools": [TOOL],
        "messages": [
            user("x"),
            assistant([{"type": "thinking", "thinking": "r", "signature": ""}, text("y"), *CALLS]),
            user([result(2, "two"), result(1, [text("p"), text("q")]), text("z")]),
        ],
    },
    "tools unused": {"tools": [TOOL], "tool_choice": {"type": "none"}, "messages": [user("x")]},
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_those_of_recipes_own_adapter(recipe, name: str) -> None:
    body = PROMPTS[name]
    theirs = recipe.convert("messages", {"model": MODEL_NAME, "max_tokens": 5, "thinking": {"type": "disabled"}, **body})
    ours = recipe.render(conversation_of(chat_of(**body), {}))
    assert ours.ids == recipe.encode(theirs)


def test_effort_alone_does_not_switch_thinking_on() -> None:
    chat = chat_of(messages=[user("x")], output_config={"effort": "high"})
    assert not conversation_of(chat, {}).thinking


def test_fields_get_their_chat_names() -> None:
    chat = chat_of(
        messages=[user("x")],
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
        stream=True,
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert (chat.max_tokens, chat.stop, chat.temperature, chat.top_k, chat.stream) == (5, ["END"], 0.5, 3, True)
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}} and not chat.parallel_tool_calls
    assert chat.response_format == {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}}
    assert chat_of(messages=[user("x")], tools=[TOOL], tool_choice={"type": "any"}).tool_choice == "required"


def test_text_documents_are_shown_and_encrypted_thinking_is_not() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "doc"}}
    chat = chat_of(messages=[user([document]), assistant([{"type": "redacted_thinking", "data": "xx"}, text("a")]), user("b")])
    assert chat.messages == [user("doc"), assistant("a"), user("b")]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "empty"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": [user(5)]}, "content"),
    ({"messages": [user([5])]}, "block"),
    ({"messages": [user([{"type": "text"}])]}, "text must be"),
    ({"messages": [user([{"type": "search_result"}])]}, "search_result"),
    ({"messages": [user([{"type": "document", "source": {"type": "base64"}}])]}, "base64"),
    ({"messages": [user("x"), assistant([{"type": "tool_use", "id": "c"}])]}, "tool_use"),
    ({"messages": [user("x")], "tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search"),
    ({"messages": [user("x")], "tools": [{"name": "f"}]}, "input_schema"),
    ({"messages": [user("x")], "tool_choice": {"type": "maybe"}}, "tool_choice"),
    ({"messages": [user("x")], "output_config": {"format": {"type": "regex"}}}, "output_config"),
]


@pytest.mark.parametrize(("body", "word"), REFUSED)
def test_what_cannot_be_shown_to_the_model_is_refused_by_name(body: dict[str, Any], word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        chat_of(**body)
