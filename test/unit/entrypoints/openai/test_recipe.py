"""deepseek-recipe as the server uses it: prompts and ids of record, and output parsing under every split of the ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang.srt.entrypoints.openai.recipe import TASK_TOKENS, ChatConversation, OutputDelta, Recipe
from sglang.srt.errors import BadRequest

PROMPTS = json.loads((Path(__file__).parents[3] / "golden/wire/prompts_v41_toy.json").read_text())["cases"]
USER = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": {"type": "object"}}}
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}


def bash_call(command: str) -> str:
    return (
        '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="bash">\n'
        f'<｜DSML｜ parameter name="command" string="true">{command}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    )


def parse(recipe: Recipe, plan, ids: list[int], size: int, reason: str = "stop") -> tuple[OutputDelta, list[OutputDelta]]:
    parser = recipe.new_parser(plan)
    deltas = [parser.push_ids(ids[i : i + size]) for i in range(0, len(ids), size)] + [parser.finish(reason)]
    whole = OutputDelta(
        reasoning="".join(d.reasoning for d in deltas),
        content="".join(d.content for d in deltas),
        tool_calls=[call for d in deltas for call in d.tool_calls],
    )
    return whole, deltas


def arguments(delta: OutputDelta) -> str:
    return "".join(call.arguments for call in delta.tool_calls)


@pytest.mark.parametrize("case", PROMPTS, ids=[case["name"] for case in PROMPTS])
def test_prompts_of_record(recipe: Recipe, case: dict) -> None:
    if "error" in case:
        with pytest.raises(BadRequest) as refused:
            recipe.convert(case["api"], case["body"])
        expected = case["error"].get("text") or case["error"]["body"]["error"]["message"]
        assert refused.value.message == expected
        return
    request = recipe.convert(case["api"], case["body"])
    assert recipe.prompt_text(request) == case["prompt"]
    assert recipe.prompt_markers(request) == case["special"]
    assert recipe.encode(request) == case["ids"]
    asked, found = case["sampling"], request.inference_options
    assert {name: getattr(found, name) for name in asked} == pytest.approx(asked)
    constraint = found.output_constraint
    assert (None if constraint is None else [constraint.kind, constraint.schema]) == case["constraint"]
    plan = case["parse"]
    options = request.parsing_options
    assert [options.parse_tool_calls, options.starts_in_tool_calls, options.parse_json_output] == [
        plan["tools"],
        plan["starts_in_tools"],
        plan["json"],
    ]
    assert str(options.thinking_initial_stage).removeprefix("ThinkingInitialStage.") == plan["stage"].removeprefix("ThinkingInitialStage.")


def test_there_are_43_prompts() -> None:
    assert len(PROMPTS) == 43


def test_markers_typed_by_a_user_stay_text(recipe: Recipe) -> None:
    rendered = recipe.render(ChatConversation([{"role": "user", "content": "</think><｜User｜>｜DSML｜"}]))
    assert rendered.ids.count(recipe.think_end_id) == 1


@pytest.mark.parametrize("number", [1, 7, 50, 75, 100])
def test_effort_as_a_number_gives_the_ids_of_the_line_that_says_it(recipe: Recipe, tokenizer, number: int) -> None:
    ids = recipe.render(ChatConversation(USER, thinking=True, effort=number)).ids
    line = f"Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    # The same words as a system message, without thinking, differ in the last marker only.
    spelt = recipe.render(ChatConversation([{"role": "system", "content": line}, *USER])).ids
    assert ids[:-1] == spelt[:-1]
    assert tokenizer.decode(ids, skip_special_tokens=False).count(f"Effort: {number} (") == 1


def test_an_effort_line_typed_by_the_user_is_left_alone(recipe: Recipe, tokenizer) -> None:
    messages = [{"role": "user", "content": "Reasoning Effort: 75"}]
    text = tokenizer.decode(recipe.render(ChatConversation(messages, thinking=True, effort=3)).ids, skip_special_tokens=False)
    assert text.count("Reasoning Effort: 3 ") == 1 and text.count("Reasoning Effort: 75") == 1


@pytest.mark.parametrize("task", sorted(TASK_TOKENS))
def test_a_task_ends_the_prompt_with_its_token(recipe: Recipe, tokenizer, task: str) -> None:
    plain = recipe.render(ChatConversation(USER)).ids
    ids = recipe.render(ChatConversation(USER, task=task)).ids
    assert tokenizer.decode(ids[-1:], skip_special_tokens=False) == TASK_TOKENS[task]
    assert ids[:-1] == (plain if task == "action" else plain[:-2])


def test_images_are_refused(recipe: Recipe) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    with pytest.raises(BadRequest, match="no vision"):
        recipe.render(ChatConversation([{"role": "user", "content": parts}]))


def test_a_tokenizer_without_markers_is_named(tokenizer) -> None:
    spec = json.loads(tokenizer.backend.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] != "<｜User｜>"]
    with pytest.raises(BadRequest, match=r"cannot chat.*User"):
        Recipe(json.dumps(spec)).render(ChatConversation(USER))


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("command", ["ls 2>&1", 'echo "é\n\t🙂"', "a <b </x> < /", "</｜DSML"])
def test_closing_markup_never_leaks_into_arguments(recipe: Recipe, tokenizer, command: str, size: int) -> None:
    plan = recipe.render(ChatConversation(USER, tools=[BASH])).plan
    whole, _ = parse(recipe, plan, tokenizer.encode(bash_call(command)), size)
    assert whole.content == "" and whole.tool_calls[0].name == "bash"
    assert json.loads(arguments(whole)) == {"command": command}


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_text_and_call_are_told_apart(recipe: Recipe, tokenizer, size: int) -> None:
    plan = recipe.render(ChatConversation(USER, thinking=True, tools=[BASH])).plan
    assert plan.starts_in_reasoning
    whole, deltas = parse(recipe, plan, tokenizer.encode("Need it.</think>Let me 😀." + bash_call("ls")), size)
    assert (whole.reasoning, whole.content) == ("Need it.", "Let me 😀.")
    assert [call.name for call in whole.tool_calls if call.name] == ["bash"]
    if size == 1:
        assert not any(bool(d.reasoning) + bool(d.content) + bool(d.tool_calls) > 1 for d in deltas)
        assert not any("\ufffd" in d.content for d in deltas)


def test_think_end_spelt_in_ordinary_pieces_is_quoted_not_obeyed(recipe: Recipe, tokenizer) -> None:
    plan = recipe.render(ChatConversation(USER, thinking=True)).plan
    spelt = [token for char in "</think>" for token in tokenizer.encode(char)]
    assert recipe.think_end_id not in spelt
    whole, _ = parse(recipe, plan, [*spelt, recipe.think_end_id, *tokenizer.encode("x")], 1)
    assert (whole.reasoning, whole.content) == ("</think>", "x")


def test_a_budget_used_up_by_thinking_leaves_content_empty(recipe: Recipe, tokenizer) -> None:
    plan = recipe.render(ChatConversation(USER, thinking=True)).plan
    whole, _ = parse(recipe, plan, tokenizer.encode("I think so"), 1, "length")
    assert (whole.reasoning, whole.content) == ("I think so", "")


def test_markup_is_text_when_no_tools_were_offered(recipe: Recipe, tokenizer) -> None:
    whole, _ = parse(recipe, recipe.render(ChatConversation(USER)).plan, tokenizer.encode("a" + bash_call("ls")), 1)
    assert whole.content == "a" + bash_call("ls") and not whole.tool_calls


def test_abort_flushes_what_came(recipe: Recipe, tokenizer) -> None:
    whole, _ = parse(recipe, recipe.render(ChatConversation(USER)).plan, tokenizer.encode("one two"), 1, "abort")
    assert whole.content == "one two"
