"""Which grammar a request asks for, and that what a tool grammar lets through is what recipe reads as calls."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from fakes.logits_runner import LogitsRunner
from harness.grammars import VOCAB, backend, manager, toy
from harness.scheduler_bench import Bench
from sglang.srt.constrained.constraint import Constraint, GrammarText
from sglang.srt.entrypoints.openai.chat_conversation import conversation_of
from sglang.srt.entrypoints.openai.constraints import chat_constraint, constraint_of
from sglang.srt.entrypoints.openai.protocol import ChatRequest, CompletionRequest
from sglang.srt.entrypoints.openai.recipe import Recipe
from sglang.srt.errors import BadRequest

THINK_END = 4036
EOS = 1


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": "json, please"}], **fields)


def tool(name: str = "get_weather", *, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": "d", "parameters": parameters}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


WEATHER = {
    "city": {"type": "string", "enum": ["Oslo", "Rome"]},
    "days": {"type": "integer"},
    "where": {"type": "object", "properties": {"x": {"type": "string"}}},
}


def asked(recipe: Recipe, request: ChatRequest) -> Constraint | None:
    rendered = recipe.render(conversation_of(request, {}))
    return chat_constraint(request, rendered.tools, recipe.think_end_id if rendered.plan.starts_in_reasoning else None)


@pytest.mark.parametrize(
    "fields, kind, text, strict",
    [
        ({"regex": "a+"}, "regex", "a+", False),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"', False),
        ({"json_schema": "{}"}, "json_schema", "{}", False),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}', False),
        ({"response_format": {"type": "regex", "regex": "a"}}, "regex", "a", False),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}}, "json_schema", '{"type": "null"}', False),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}, "strict": True}}},
            "json_schema", '{"type": "null"}', True,
        ),
    ],
)  # fmt: skip
def test_fields_and_formats_become_a_grammar(fields, kind, text, strict):
    expected = GrammarText(kind=kind, text=text, strict=strict)
    assert constraint_of(CompletionRequest(prompt="x", **fields)) == Constraint(grammar=expected)
    thinking = chat_constraint(chat(**fields), [], THINK_END)
    assert thinking == Constraint(grammar=expected, trigger_token_ids=(THINK_END,), must_trigger=True)


def test_nothing_asked_is_no_grammar(recipe):
    for request in (
        chat(),
        chat(response_format={"type": "text"}),
        chat(tools=[tool(**WEATHER)]),
        chat(tools=[tool(strict=True)], tool_choice="none"),
    ):
        assert asked(recipe, request) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a", "ebnf": "b"},
        {"regex": "a", "response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
        {"response_format": {"type": "regex"}},
        {"response_format": {"type": "haiku"}},
        {"response_format": {"type": ["x"]}},
        {"tools": [tool()], "tool_choice": "required", "regex": "a"},
        {"tools": [tool(strict=True)], "regex": "a"},
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [tool()], "tool_choice": {"type": "function"}},
    ],
)
def test_contradictions_are_refused(fields):
    request = chat(**fields)
    with pytest.raises(BadRequest):
        chat_constraint(request, request.tools or [], None)


def test_strict_tools_leave_the_text_free_and_enforced_ones_end_thinking(recipe):
    free = asked(recipe, chat(tools=[tool(strict=True, **WEATHER)], thinking=True))
    assert free.trigger_token_ids == (THINK_END,) and not free.must_trigger and free.grammar.strict
    forced = asked(recipe, chat(tools=[tool(**WEATHER)], tool_choice="required", thinking=True))
    assert forced.must_trigger and not forced.grammar.strict


@pytest.fixture(scope="module")
def bench():
    made = Bench(LogitsRunner(vocab_size=VOCAB), eos_ids=toy().eos_ids, tokenizer=toy(), grammars=manager())
    yield made
    made.close()
    made.scheduler.grammars.close()


def spoken(bench: Bench, recipe: Recipe, request: ChatRequest, seed: int, bias: dict[str, float]) -> tuple[str, list[Any], str]:
    """What a random model says under the request's grammar, as recipe parses it: finish type, calls, content."""
    rendered = recipe.render(conversation_of(request, {}))
    constraint = asked(recipe, request)
    rid = bench.submit(rendered.ids, 400, constraint=constraint, params={"sampling_seed": seed, "logit_bias": bias})
    bench.run()
    result = bench.results[rid]
    assert result.finish.status_code is None, result.finish
    parser = recipe.new_parser(rendered.plan)
    calls: list[Any] = []
    content = ""
    for delta in [*(parser.push_ids([token]) for token in result.ids), parser.finish(result.finish.type)]:
        content += delta.content
        for call in delta.tool_calls:
            if call.name is not None:
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return result.finish.type, calls, content


CHOICES = ["required", {"type": "function", "function": {"name": "count"}}]
ENDINGS = {str(toy().encode(text)[0]): 7.0 for text in ('"', "}", "</", ",", '"}', "\n")}


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
@pytest.mark.parametrize("thinking", [False, True])
def test_an_enforced_choice_gives_calls_that_fit_their_schema(bench, recipe, choice, thinking, strict):
    where = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]} | (
        {"additionalProperties": False} if strict else {}
    )
    tools = [tool(strict=strict, **WEATHER | {"where": where}), tool("count", strict=strict, n={"type": "integer"})]
    request = chat(tools=tools, tool_choice=choice, thinking=thinking)
    num_finished = 0
    for seed in range(3):
        kind, calls, content = spoken(bench, recipe, request, seed, ENDINGS | {str(THINK_END): 9.0, "4037": 12.0})
        if kind != "stop":
            continue
        num_finished += 1
        assert calls and content.strip() == ""
        for name, arguments in calls:
            assert name in ("get_weather", "count") and (choice == "required" or name == "count")
            schema = next(t["function"]["parameters"] for t in tools if t["function"]["name"] == name)
            jsonschema.validate(json.loads(arguments), schema)
    assert num_finished >= 1


def test_one_call_only_where_parallel_calls_are_off(bench, recipe):
    request = chat(tools=[tool("f", n={"type": "integer"})], tool_choice="required", parallel_tool_calls=False)
    for seed in range(3):
        kind, calls, _ = spoken(bench, recipe, request, seed, ENDINGS)
        assert kind != "stop" or [name for name, _ in calls] == ["f"]


def test_a_strict_tool_that_the_model_chooses_to_call_follows_its_schema(recipe):
    """Text is free, the marker can only be its token, and once the block is open the schema holds."""
    constraint = asked(recipe, chat(tools=[tool("f", strict=True, n={"type": "integer"})]))
    m = backend().compile(constraint.grammar).new_matcher()

    def feed(*texts: str) -> None:
        for token in (token for text in texts for token in toy().encode(text)):
            assert m.allowed()[token] and m.accept(token), (texts, token)

    feed("Well", ", let us see")
    assert m.allowed()[EOS] and int(m.allowed().sum()) > 2000
    feed('\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="n" string="false">')
    assert not m.allowed()[EOS] and not m.allowed()[toy().encode("x")[0]]
    feed("7</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>")
    assert m.allowed().nonzero().flatten().tolist() == [EOS]
