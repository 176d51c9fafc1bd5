"""What a chat request says to the model: the rules of the wire, without rendering."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang.srt.entrypoints.openai.chat_conversation import conversation_of, effort_number, wants_thinking
from sglang.srt.entrypoints.openai.protocol import ChatRequest, parse
from sglang.srt.errors import BadRequest

TOOL = {"type": "function", "function": {"name": "f", "description": None, "parameters": {}}, "strict": None}


def request(messages: list[dict[str, Any]] | None = None, **fields: Any) -> ChatRequest:
    return parse(json.dumps({"messages": messages or [{"role": "user", "content": "hi"}], **fields}).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("fields", "defaults", "thinking"),
    [
        ({}, {}, False),
        ({}, {"thinking": True}, True),
        ({"chat_template_kwargs": {"thinking": True}}, {}, True),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, {}, False),
        ({"chat_template_kwargs": {"thinking": False}}, {"thinking": True}, False),
        ({"thinking": {"type": "enabled"}}, {}, True),
        ({"thinking": {"type": "adaptive"}}, {}, True),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, {"thinking": True}, False),
        ({"thinking": True}, {}, True),
        ({"reasoning_effort": "high"}, {}, True),
        ({"reasoning_effort": "none"}, {"thinking": True}, False),
        ({"reasoning_effort": 10}, {}, True),
        ({"reasoning": {"enabled": True}}, {}, True),
        ({"reasoning": {"enabled": "yes"}}, {}, True),
        ({"reasoning": {"enabled": False}}, {"thinking": True}, False),
        ({"reasoning": {"effort": "low"}}, {}, True),
        ({"reasoning": {"enabled": True, "effort": "none"}}, {}, False),
    ],
)
def test_thinking_is_off_unless_asked_for(fields: dict, defaults: dict, thinking: bool) -> None:
    assert wants_thinking(request(**fields), defaults) is thinking


@pytest.mark.parametrize(("value", "number"), [(1, 1), (100, 100), (50.0, 50), (0.0, 1), (0.3, 30), (0.99, 99)])
def test_effort_numbers(value: float, number: int) -> None:
    assert effort_number(value) == number


@pytest.mark.parametrize("value", [-1, 101, 0.995, 1.5, float("inf"), float("nan"), True])
def test_effort_numbers_out_of_range(value: float) -> None:
    with pytest.raises(BadRequest, match="reasoning_effort"):
        effort_number(value)


@pytest.mark.parametrize(
    ("fields", "defaults", "effort"),
    [
        ({"reasoning_effort": "max"}, {}, "max"),
        ({"reasoning_effort": "30"}, {}, 30),
        ({"reasoning_effort": "0.3"}, {}, 30),
        ({"thinking": {"type": "enabled"}}, {}, None),
        ({"thinking": {"type": "enabled"}}, {"reasoning_effort": "low"}, "low"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, {}, None),
        ({}, {"reasoning_effort": "low"}, None),
    ],
)
def test_effort(fields: dict, defaults: dict, effort: str | int | None) -> None:
    assert conversation_of(request(**fields), defaults).effort == effort


def test_developer_is_system_and_null_content_is_empty() -> None:
    messages = conversation_of(request([{"role": "developer", "content": None}, {"role": "user", "content": "x"}]), {}).messages
    assert messages[0] == {"role": "system", "content": ""}


def test_argument_objects_become_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    user = {"role": "user", "content": "a"}
    messages = [user, {"role": "assistant", "content": None, "tool_calls": [call]}, user]
    (fixed,) = conversation_of(request(messages), {}).messages[1]["tool_calls"]
    assert fixed["function"]["arguments"] == '{"x":"é"}'


def test_an_answer_in_last_place_is_put_as_the_users_words_unless_continued() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert conversation_of(request(messages), {}).messages[-1] == {"role": "user", "content": "b"}
    continued = {"role": "assistant", "content": "b", "prefix": True}
    assert conversation_of(request(messages, continue_final_message=True), {}).messages[-1] == continued
    assert conversation_of(request([messages[0], continued]), {}).messages[-1] == continued


def test_tool_choice_none_hides_the_tools_and_nulls_are_not_printed() -> None:
    assert conversation_of(request(tools=[TOOL], tool_choice="none"), {}).tools is None
    (tool,) = conversation_of(request(tools=[TOOL]), {}).tools or []
    assert tool == {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tool_choice": "sometimes", "tools": [TOOL]},
        {"thinking": {"type": "maybe"}},
        {"reasoning": {"effort": []}},
    ],
)
def test_wishes_that_cannot_be_met(fields: dict) -> None:
    with pytest.raises(BadRequest):
        conversation_of(request(**fields), {})


def test_empty_messages() -> None:
    with pytest.raises(BadRequest, match="Messages cannot be empty"):
        conversation_of(parse(b'{"messages": []}', ChatRequest), {})
