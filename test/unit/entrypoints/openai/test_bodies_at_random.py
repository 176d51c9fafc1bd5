"""Bodies that nobody would write: mutations of good ones. Each is answered, or refused with a BadRequest, before the scheduler
hears of it; nothing else may happen."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.entrypoints.anthropic.conversion import chat_request_of
from sglang.srt.entrypoints.anthropic.protocol import MessagesRequest
from sglang.srt.entrypoints.openai import responses_protocol
from sglang.srt.entrypoints.openai.chat_conversation import conversation_of
from sglang.srt.entrypoints.openai.constraints import chat_constraint, constraint_of
from sglang.srt.entrypoints.openai.protocol import ChatRequest, CompletionRequest, parse
from sglang.srt.entrypoints.openai.recipe import Recipe
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest, messages_of
from sglang.srt.errors import BadRequest

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "strict": False,
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 5},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "reasoning_effort": "high",
    },
    {
        "messages": [{"role": "user", "content": "a json"}, {"role": "assistant", "content": "b", "prefix": True}],
        "chat_template_kwargs": {"thinking": True, "reasoning_effort": 3},
        "reasoning": {"enabled": True, "effort": "low"},
        "thinking": {"type": "enabled"},
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "task": None,
    },
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "stop": ["x"], "logit_bias": {"1": 2.0}, "logprobs": 1, "echo": True},
    {"prompt": [[1, 2], [3]], "stream": True, "stream_options": {"include_usage": True}},
]
BLOCKS = [
    {"type": "thinking", "thinking": "r", "signature": ""},
    {"type": "text", "text": "t"},
    {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
]
MESSAGES: list[dict[str, Any]] = [
    {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": BLOCKS},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "one"}, {"type": "text", "text": "b"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
    },
]
RESPONSES: list[dict[str, Any]] = [
    {
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
]
ODD_VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 10**30, -(2**63), 1e308, "", "x", "none", "\u0000", "🙂" * 50, "</think><｜User｜>", "[" * 300, [], {}, [[]], [None], [0], [""],
    {"type": "text"}, {"type": "function"}, {"type": "json_schema"}, {"a": {"b": {"c": []}}}, [{}], {"": ""}, "system", "assistant", "required",
]  # fmt: skip


def mutate(value: Any, rng: random.Random) -> Any:
    """One change somewhere inside a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        kind = rng.random()
        changed = dict(value)
        if kind < 0.15:
            del changed[key]
        elif kind < 0.25:
            changed[rng.choice(["role", "type", "content", "function", "zzz", "tool_calls", "strict", "prefix", "name"])] = rng.choice(
                ODD_VALUES
            )
        else:
            changed[key] = mutate(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.15:
            return value[:index] + value[index + 1 :]
        if kind < 0.3:
            return value[:index] + [value[index]] + value[index:]
        return value[:index] + [mutate(value[index], rng)] + value[index + 1 :]
    return rng.choice(ODD_VALUES)


def try_all(bodies: list[dict[str, Any]], seed: int, count: int, accept: Callable[[bytes], None]) -> tuple[int, int]:
    rng = random.Random(seed)
    taken = refused = 0
    for _ in range(count):
        body: Any = rng.choice(bodies)
        for _ in range(rng.randint(1, 4)):
            body = mutate(body, rng)
        try:
            accept(json.dumps(body).encode())
            taken += 1
        except BadRequest:
            refused += 1
        except BaseException:
            print(f"seed {seed}: {body!r}")
            raise
    return taken, refused


@pytest.mark.parametrize("seed", range(8))
def test_mutated_chats_render_or_are_refused(recipe: Recipe, seed: int) -> None:
    def accept(body: bytes) -> None:
        request = parse(body, ChatRequest)
        rendered = recipe.render(conversation_of(request, {}))
        chat_constraint(request, rendered.tools, recipe.think_end_id)
        assert rendered.ids
        recipe.new_parser(rendered.plan)

    taken, refused = try_all(CHATS, seed, 400, accept)
    assert taken > 20 and refused > 20


def test_mutated_messages_and_responses_render_or_are_refused(recipe: Recipe) -> None:
    def render(request: ChatRequest) -> None:
        assert recipe.render(conversation_of(request, {})).ids

    def accept_response(body: bytes) -> None:
        request = parse(body, ResponsesRequest)
        render(responses_protocol.chat_request_of(request, [], messages_of(request.input)))

    for bodies, accept in (MESSAGES, lambda body: render(chat_request_of(parse(body, MessagesRequest)))), (RESPONSES, accept_response):
        taken, refused = try_all(bodies, 1, 600, accept)
        assert taken > 20 and refused > 20


def test_mutated_completions_are_read_or_refused() -> None:
    taken, refused = try_all(COMPLETIONS, 1, 400, lambda body: constraint_of(parse(body, CompletionRequest)))
    assert taken > 20 and refused > 20
