"""The OpenAI routes over a scripted model: streams, whole replies, errors; each promise once on every route it concerns."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from fakes.scripted_scheduler import forever_script, ids_script
from sglang.srt.entrypoints.openai.serving_base import model_sampling_defaults
from sglang.srt.errors import ConfigError
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.server_args import ServerArgs

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
THINK = {"chat_template_kwargs": {"thinking": True}}
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}
EOS = 1


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    return {"messages": HI, **fields} if path == CHAT else {"prompt": "hi", "max_tokens": 100, **fields}


def spelt(tokenizer, text: str) -> list[int]:
    """One token a character (or less), then EOS."""
    return [token for char in text for token in tokenizer.encode(char)] + [EOS]


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.removesuffix("\n\n").split("\n\n")
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(choice: dict[str, Any]) -> str:
    """The visible text of a choice, whole or streamed, on either route."""
    return choice["text"] if "text" in choice else (choice.get("delta") or choice["message"]).get("content") or ""


async def both_ways(f, path: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The same request whole and streamed."""
    whole = await f.post(path, body_for(path, **fields))
    assert whole.status_code == 200, whole.text
    streamed = await f.post(path, body_for(path, stream=True, **fields))
    return whole.json(), chunks_of(streamed)


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("text", ["🙂🙂🙂", "삼겹살 👩‍👩‍👧 𝒳"])
async def test_characters_are_never_split(front, tokenizer, path: str, text: str) -> None:
    async with front(ids_script(spelt(tokenizer, text))) as f:
        whole, chunks = await both_ways(f, path)
    pieces = [text_of(choice) for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == text_of(whole["choices"][0]) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_character_that_never_ends_is_shown_as_lost(front, tokenizer, path: str) -> None:
    async with front(ids_script([*tokenizer.encode("a"), *tokenizer.encode("🙂")[:2], EOS])) as f:
        whole, chunks = await both_ways(f, path)
    assert text_of(whole["choices"][0]) == "".join(text_of(c["choices"][0]) for c in chunks) == "a\ufffd"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stops", [["END"], ["END", "NEVER"], "END"])
async def test_no_part_of_a_stop_string_reaches_the_client(front, tokenizer, path: str, stops: Any) -> None:
    async with front(ids_script(spelt(tokenizer, "abcENDdef"))) as f:
        whole, chunks = await both_ways(f, path, stop=stops)
        kept, kept_chunks = await both_ways(f, path, stop=stops, no_stop_trim=True)
    assert text_of(whole["choices"][0]) == "".join(text_of(c["choices"][0]) for c in chunks) == "abc"
    assert not any("E" in text_of(c["choices"][0]) for c in chunks)
    assert text_of(kept["choices"][0]) == "".join(text_of(c["choices"][0]) for c in kept_chunks) == "abcEND"
    for choice in (whole["choices"][0], chunks[-1]["choices"][0], kept["choices"][0]):
        assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "END")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stop_string_that_ends_inside_a_token(front, tokenizer, path: str) -> None:
    async with front(ids_script([*tokenizer.encode("one two three four five"), EOS])) as f:
        whole, chunks = await both_ways(f, path, stop="thr")
    assert text_of(whole["choices"][0]) == "".join(text_of(c["choices"][0]) for c in chunks) == "one two "


async def test_a_stop_string_inside_reasoning_ends_the_answer(front, tokenizer) -> None:
    ids = [*spelt(tokenizer, "aENDb")[:-1], *tokenizer.encode("</think>x"), EOS]
    async with front(ids_script(ids)) as f:
        whole, _ = await both_ways(f, CHAT, stop="END", **THINK)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"], whole["choices"][0]["matched_stop"]) == ("a", "", "END")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stop_regex_ends_the_answer(front, tokenizer, path: str) -> None:
    async with front(ids_script(spelt(tokenizer, "abc1def"))) as f:
        whole, chunks = await both_ways(f, path, stop_regex="[0-9]")
    assert text_of(whole["choices"][0]) == "".join(text_of(c["choices"][0]) for c in chunks) == "abc1"
    assert whole["choices"][0]["matched_stop"] == "[0-9]"


async def test_special_tokens_are_left_out_unless_wanted(front, tokenizer) -> None:
    async with front(ids_script([*tokenizer.encode("a"), 2, *tokenizer.encode("b"), EOS])) as f:
        assert (await f.post(CHAT, body_for(CHAT))).json()["choices"][0]["message"]["content"] == "ab"
        shown = (await f.post(CHAT, body_for(CHAT, skip_special_tokens=False))).json()["choices"][0]
    assert shown["message"]["content"] == "a<｜▁pad▁｜>b" and shown["matched_stop"] == EOS


# -- thinking and tools ------------------------------------------------------------------------------------------------


async def test_thinking_that_uses_up_the_budget(front, tokenizer) -> None:
    async with front(ids_script([*tokenizer.encode("I think so, and I go on thinking"), EOS])) as f:
        whole, chunks = await both_ways(f, CHAT, max_tokens=4, **THINK)
        off = (await f.post(CHAT, body_for(CHAT, max_tokens=4))).json()
    choice = whole["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"], whole["usage"]["completion_tokens"]) == ("length", "", 4)
    assert choice["message"]["reasoning_content"] and whole["usage"]["reasoning_tokens"] == 4
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        assert not (delta.get("content") and delta.get("reasoning_content"))
    assert "".join(c["choices"][0]["delta"].get("reasoning_content") or "" for c in chunks) == choice["message"]["reasoning_content"]
    assert off["choices"][0]["message"]["reasoning_content"] is None and off["choices"][0]["message"]["content"]


async def test_reasoning_in_one_piece_when_it_is_not_to_be_streamed(front) -> None:
    async with front() as f:
        body = {"messages": [{"role": "user", "content": "[[think]]"}], "stream": True, "stream_reasoning": False, **THINK}
        chunks = chunks_of(await f.post(CHAT, body))
    pieces = [c["choices"][0]["delta"]["reasoning_content"] for c in chunks if c["choices"][0]["delta"].get("reasoning_content")]
    assert pieces == ["I think so."]


async def test_reasoning_joins_the_content_when_it_is_not_to_be_separated(front) -> None:
    async with front() as f:
        body = {"messages": [{"role": "user", "content": "[[think]]"}], "stream": True, "separate_reasoning": False, **THINK}
        chunks = chunks_of(await f.post(CHAT, body))
    assert "".join(text_of(c["choices"][0]) for c in chunks) == "I think so.The answer is 4 😀."
    assert not any(c["choices"][0]["delta"]["reasoning_content"] for c in chunks)


def call(command: str) -> str:
    return (
        '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="bash">\n'
        f'<｜DSML｜ parameter name="command" string="true">{command}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    )


@pytest.mark.parametrize("command", ["ls 2>&1", 'echo "é\n\t🙂"', "a <b </x> < /"])
async def test_tool_arguments_arrive_whole(front, tokenizer, command: str) -> None:
    async with front(ids_script([*tokenizer.encode("Look." + call(command)), EOS])) as f:
        whole, chunks = await both_ways(f, CHAT, tools=[BASH])
    choice = whole["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Look.")
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "bash" and json.loads(made["function"]["arguments"]) == {"command": command}
    pieces = [piece for c in chunks for piece in c["choices"][0]["delta"].get("tool_calls") or []]
    assert all(piece["index"] == 0 and piece["function"]["arguments"] is not None for piece in pieces)
    only_the_first = [True] + [False] * (len(pieces) - 1)
    assert [bool(piece["id"]) for piece in pieces] == [bool(piece["function"]["name"]) for piece in pieces] == only_the_first
    assert "".join(piece["function"]["arguments"] for piece in pieces) == made["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_length_wins_over_tool_calls(front, tokenizer) -> None:
    ids = tokenizer.encode(call("ls -l and more"))
    async with front(ids_script([*ids, EOS])) as f:
        choice = (await f.post(CHAT, body_for(CHAT, tools=[BASH], max_tokens=len(ids) - 25))).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"]


# -- choices, usage, logprobs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_choices_each_finish_once_and_share_the_prompt_count(front, path: str) -> None:
    async with front() as f:
        whole, chunks = await both_ways(f, path, n=3, stream_options={"include_usage": True})
        await f.post(path, body_for(path, n=3, seed=5))
        seeds = [request.sampling.sampling_seed for request in f.scheduler.generate_requests()]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    finished = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert whole["usage"]["prompt_tokens"] == (5 if path == CHAT else 1)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert seeds[-3] == 5 and len(set(seeds)) == 9


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_seed_reaches_the_sampler_and_is_reported(front, path: str) -> None:
    async with front() as f:
        given = (await f.post(path, body_for(path, seed=-7))).json()
        drawn = (await f.post(path, body_for(path))).json()
        first, second = f.scheduler.generate_requests()
    assert first.sampling.sampling_seed == given["metadata"]["sampling_seed"] == -7
    assert second.sampling.sampling_seed == drawn["metadata"]["sampling_seed"] != -7


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_sampling_comes_from_the_request_then_the_model(front, path: str) -> None:
    sampling = {
        "temperature": 0.5, "top_p": 0.6, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.2,
        "presence_penalty": 0.3, "logit_bias": {"5": -100}, "stop_token_ids": [9], "ignore_eos": True,
    }  # fmt: skip
    async with front() as f:
        await f.post(path, body_for(path, min_tokens=2, max_tokens=3, **sampling))
        await f.post(path, body_for(path, max_tokens=None, temperature=0))
        asked, default = (request.sampling for request in f.scheduler.generate_requests())
    for name, value in sampling.items():
        assert getattr(asked, name) == value
    assert (asked.min_new_tokens, asked.max_new_tokens) == (2, 3)
    assert (default.top_k, default.top_p) == (1, 1.0)
    assert default.max_new_tokens == (8192 - 5 if path == CHAT else 16)


def test_sampling_defaults_of_the_model(tmp_path) -> None:
    config = tmp_path / "generation_config.json"
    args = ServerArgs(model_path=str(tmp_path))
    assert model_sampling_defaults(args) == {}
    config.write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": 0, "eos_token_id": 1, "do_sample": true}')
    assert model_sampling_defaults(args) == {"temperature": 0.6, "top_p": 0.95}
    assert model_sampling_defaults(ServerArgs(model_path=str(tmp_path), sampling_defaults="openai")) == {}
    for broken in ('{"temperature": -1}', "[]", "{"):
        config.write_text(broken)
        assert model_sampling_defaults(args) == {}


async def test_template_defaults_of_the_server_hold_until_a_request_says_otherwise(front) -> None:
    body = {"messages": [{"role": "user", "content": "[[think]]"}]}
    async with front(args={"default_chat_template_kwargs": '{"thinking": true, "reasoning_effort": 7}'}) as f:
        on = (await f.post(CHAT, body)).json()
        off = (await f.post(CHAT, {**body, "thinking": {"type": "disabled"}})).json()
        prompt = f.tm.tokenizer.decode(f.scheduler.generate_requests()[0].input_ids)
    assert on["choices"][0]["message"]["reasoning_content"] and not off["choices"][0]["message"]["reasoning_content"]
    assert "Reasoning Effort: 7 " in prompt


@pytest.mark.parametrize("effort", ['"loud"', "1000", "[]"])
async def test_a_bad_template_default_fails_the_launch(front, effort: str) -> None:
    with pytest.raises(ConfigError, match="--default-chat-template-kwargs"):
        async with front(args={"default_chat_template_kwargs": f'{{"reasoning_effort": {effort}}}'}):
            pass


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_cached_tokens_are_reported_when_the_server_says_so(front, path: str) -> None:
    ids = list(range(100, 500))
    body = {"input_ids": ids} if path == CHAT else {"prompt": ids}
    async with front(cached_tokens=384) as f:
        whole, chunks = await both_ways(f, path, stream_options={"include_usage": True}, return_cached_tokens_details=True, **body)
    assert whole["usage"]["prompt_tokens_details"] == chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 384}
    assert whole["sglext"] == chunks[-1]["sglext"] == {"cached_tokens_details": {"device": 384, "host": 0}}
    async with front(cached_tokens=384, args={"enable_cache_report": False}) as f:
        assert (await f.post(path, body_for(path, **body))).json()["usage"]["prompt_tokens_details"] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_in_streams_comes_only_when_asked_for(front, path: str) -> None:
    async with front() as f:
        plain = chunks_of(await f.post(path, body_for(path, stream=True)))
        every = chunks_of(await f.post(path, body_for(path, stream=True, stream_options={"continuous_usage_stats": True})))
    assert not any(chunk.get("usage") for chunk in plain) and all(chunk["choices"] for chunk in plain)
    totals = [chunk["usage"]["completion_tokens"] for chunk in every]
    assert totals == sorted(totals) and totals[-1] > 1
    async with front(args={"stream_response_default_include_usage": True}) as f:
        assert chunks_of(await f.post(path, body_for(path, stream=True)))[-1]["usage"]["total_tokens"]


@pytest.mark.parametrize("size", ["whole", "stream"])
async def test_chat_logprobs_are_one_per_token_also_for_characters_in_pieces(front, tokenizer, size: str) -> None:
    ids = [*tokenizer.encode("a🙂"), EOS]
    async with front(ids_script(ids)) as f:
        body = body_for(CHAT, logprobs=True, top_logprobs=2, stream=size == "stream")
        answer = await f.post(CHAT, body)
        none = (await f.post(CHAT, body_for(CHAT, top_logprobs=2))).json()
    choices = [answer.json()["choices"][0]] if size == "whole" else [c["choices"][0] for c in chunks_of(answer)]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert len(entries) == len(ids) and all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]).decode() == "a🙂"
    assert none["choices"][0]["logprobs"] is None


async def test_completion_logprobs_are_one_per_token_and_point_into_the_text(front, tokenizer) -> None:
    ids = [*tokenizer.encode("a🙂b"), EOS]
    async with front(ids_script(ids)) as f:
        whole, chunks = await both_ways(f, COMPLETIONS, logprobs=1, echo=True, prompt="hi there")
        scored = (await f.post(COMPLETIONS, {"prompt": "hi there", "echo": True, "logprobs": 0, "max_tokens": 0})).json()
    logprobs = whole["choices"][0]["logprobs"]
    prompt_ids = tokenizer.encode("hi there")
    assert len(logprobs["tokens"]) == len(prompt_ids) + len(ids) and logprobs["token_logprobs"][0] is None
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [offset for part in streamed for offset in part["text_offset"]] == logprobs["text_offset"]
    text = whole["choices"][0]["text"]
    assert text == "hi therea🙂b" and logprobs["text_offset"][len(prompt_ids)] == len("hi there")
    assert scored["choices"][0]["text"] == "hi there" and len(scored["choices"][0]["logprobs"]["tokens"]) == len(prompt_ids)
    assert scored["usage"]["completion_tokens"] == 0


async def test_prompts_in_lists_are_numbered_prompt_by_prompt(front, tokenizer) -> None:
    async with front() as f:
        reply = (await f.post(COMPLETIONS, {"prompt": ["hi", "[[long]]"], "n": 2, "max_tokens": 100, "echo": True})).json()
        ids = (await f.post(COMPLETIONS, {"prompt": [[42], tokenizer.encode("[[long]]")], "max_tokens": 1})).json()
    assert [choice["text"][:2] for choice in reply["choices"]] == ["hi", "hi", "[[", "[["]
    assert [choice["text"] for choice in ids["choices"]] == ["H", "one"]


async def test_an_echo_of_ids_shows_special_tokens_as_the_answer_does(front, tokenizer) -> None:
    body = {"prompt": [0, *tokenizer.encode("hi")], "echo": True, "logprobs": 0, "max_tokens": 1}
    async with front() as f:
        hidden = (await f.post(COMPLETIONS, body)).json()["choices"][0]
        shown = (await f.post(COMPLETIONS, {**body, "skip_special_tokens": False})).json()["choices"][0]
    assert (hidden["text"], hidden["logprobs"]["text_offset"]) == ("hiH", [0, 0, 2])
    bos = "<｜begin▁of▁sentence｜>"
    assert (shown["text"], shown["logprobs"]["text_offset"]) == (bos + "hiH", [0, len(bos), len(bos) + 2])


async def test_what_can_be_asked_for_beside_the_answer(front, tokenizer) -> None:
    async with front() as f:
        asked = {"return_token_ids": True, "return_meta_info": True}
        chat = (await f.post(CHAT, body_for(CHAT, return_prompt_token_ids=True, rid="r1", **asked))).json()
        text = (await f.post(COMPLETIONS, body_for(COMPLETIONS, **asked))).json()
        chunks = chunks_of(await f.post(CHAT, body_for(CHAT, stream=True, **asked)))
    ids = [*tokenizer.encode("Hello world. This is a test."), EOS]
    assert len(chat["prompt_token_ids"]) == 5 and chat["choices"][0]["token_ids"] == text["choices"][0]["token_ids"] == ids
    assert chat["choices"][0]["meta_info"]["id"] == "r1"
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == ids
    assert chunks[-1]["choices"][0]["meta_info"]["completion_tokens"] == len(ids)


# -- errors ------------------------------------------------------------------------------------------------------------

BAD = {
    "nothing": b"",
    "half an object": b'{"model":',
    "a list": b"[]",
    "garbage": b"\xff\x00" * 1000,
    "deep": b'{"messages":' + b"[" * 50_000,
}
BAD_FIELDS: list[dict[str, Any]] = [
    {"max_tokens": "ten"}, {"max_tokens": -1}, {"max_tokens": 10**30}, {"max_tokens": 9000}, {"temperature": -1}, {"temperature": "hot"},
    {"top_p": 0}, {"top_p": 1.5}, {"top_k": 0}, {"n": 0}, {"n": 10**9}, {"n": "2"}, {"seed": 2**70}, {"seed": 1.5}, {"stop": [""]},
    {"stop": ["x"] * 100}, {"stop": 5}, {"logit_bias": {"x": 1}}, {"logit_bias": {"999999": 1}}, {"logit_bias": []},
    {"min_tokens": 50, "max_tokens": 10}, {"stop_regex": "(ab"}, {"stop_token_ids": [-1]}, {"rid": ""}, {"rid": 5}, {"timeout": -1},
    {"stream": "yes"}, {"stream_options": []}, {"repetition_penalty": 0}, {"frequency_penalty": 3}, {"priority": "high"},
    {"regex": "a", "ebnf": "root ::= \"a\""}, {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"regex": "a", "response_format": {"type": "regex", "regex": "a"}}, {"response_format": {"type": "poem"}},
    {"response_format": "json"}, {"cache_salt": "x" * 5000}, {"user": 5},
]  # fmt: skip
BAD_CHAT: list[dict[str, Any]] = [
    {"messages": []}, {"messages": "hi"}, {"messages": [{}]}, {"messages": [{"role": "zzz", "content": "x"}]}, {"messages": [5]},
    {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "user", "content": [{"type": "zzz"}]}]},
    {"messages": [{"role": "user", "content": "\ud800"}]}, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
    {"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}, {"role": "user", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]},
    {"tools": [{}]}, {"tools": 5}, {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"tools": [BASH], "tool_choice": {"type": "function", "function": {"name": "fish"}}}, {"tool_choice": "required"},
    {"tools": [BASH], "tool_choice": "required", "regex": "a"}, {"reasoning_effort": "loud"},
    {"reasoning_effort": 1000}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 1}, {"input_ids": [-1]}, {"input_ids": [10**9]},
    {"input_ids": []}, {"task": "dance"}, {"response_format": {"type": "json_object"}},
]  # fmt: skip
BAD_COMPLETION: list[dict[str, Any]] = [
    {"prompt": None}, {"prompt": []}, {"prompt": ""}, {"prompt": [[]]}, {"prompt": ["a", 1]}, {"prompt": [-1]}, {"prompt": [4096]},
    {"prompt": {"a": 1}}, {"prompt": "\ud800"}, {"prompt": [1.5]}, {"prompt": [10**30]}, {"logprobs": -1}, {"logprobs": 1000},
    {"suffix": "x"}, {"prompt": ["x"] * 5000}, {"prompt": [True]},
]  # fmt: skip


def check_refusal(response: httpx.Response) -> None:
    assert response.status_code == 400, (response.status_code, response.text[:300])
    assert response.headers["content-type"] == "application/json"
    reply = response.json()
    assert reply["object"] == "error" and reply["message"] and reply["error"]["message"] == reply["message"]
    assert reply["type"] == reply["error"]["type"] == "BadRequestError" and reply["code"] == 400
    assert len(response.content) < 2048
    for leak in ("Traceback", 'File "', "/python/", "site-packages"):
        assert leak not in response.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streamed", [False, True])
async def test_every_bad_request_is_a_json_error_and_the_next_good_one_works(front, path: str, streamed: bool) -> None:
    async with front() as f:
        for body in BAD.values():
            check_refusal(await f.http.post(path, content=body, headers={"content-type": "application/json"}))
        for fields in BAD_FIELDS + (BAD_CHAT if path == CHAT else BAD_COMPLETION):
            # not httpx's own JSON: it refuses lone surrogates
            content = json.dumps(body_for(path, **{"stream": streamed, **fields})).encode()
            check_refusal(await f.http.post(path, content=content, headers={"content-type": "application/json"}))
        check_refusal(await f.http.post(path, content=b"x" * 100_000, headers={"content-type": "text/plain"}))
        nan = json.dumps(body_for(path, temperature=float("nan"))).encode()
        check_refusal(await f.http.post(path, content=nan, headers={"content-type": "application/json"}))
        good = await f.post(path, body_for(path))
        assert good.status_code == 200 and f.tm.num_sequences == 0


async def test_prompt_and_limit_beyond_the_context(front) -> None:
    ids = list(range(100, 1600))
    async with front(context_length=2048) as f:
        for path, body in ((CHAT, {"input_ids": ids}), (COMPLETIONS, {"prompt": ids})):
            for streamed in (False, True):
                refused = await f.post(path, body_for(path, max_tokens=600, stream=streamed, **body))
                assert refused.status_code == 400
                assert all(number in refused.json()["message"] for number in ("2048", "2100", "1500", "600"))
        await f.post(CHAT, {"messages": HI, "input_ids": ids})
        assert f.scheduler.generate_requests()[-1].sampling.max_new_tokens == 548


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_refusals_of_the_scheduler_keep_their_status(front, path: str) -> None:
    async with front() as f:
        f.scheduler.refuse_with = FinishReason(type="abort", message="queue is full", status_code=503)
        for streamed in (False, True):
            refused = await f.post(path, body_for(path, stream=streamed))
            assert (refused.status_code, refused.json()["error"]["message"]) == (503, "queue is full")
            assert refused.headers["retry-after"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_that_dies_ends_with_an_error_event(front, path: str) -> None:
    async with front(forever_script(42), delay_s=0.01) as f:
        asking = asyncio.create_task(f.post(path, body_for(path, max_tokens=5000, stream=True)))
        while not f.scheduler.num_running or f.scheduler._num_tokens < 3:
            await asyncio.sleep(0.01)
        f.tm.fail("it broke")
        answer = await asking
    *_, error, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert "engine stopped" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert '"finish_reason":"' not in answer.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_aborted_request_ends_with_what_it_had(front, path: str, streamed: bool) -> None:
    async with front(forever_script(42), delay_s=0.01) as f:
        asking = asyncio.create_task(f.post(path, body_for(path, max_tokens=5000, stream=streamed, rid="mine")))
        while not f.scheduler.num_running or f.scheduler._num_tokens < 3:
            await asyncio.sleep(0.01)
        f.tm.abort("mine")
        answer = await asking
    replies = chunks_of(answer) if streamed else [answer.json()]
    assert replies[-1]["choices"][0]["finish_reason"] == "abort"
    assert "".join(text_of(reply["choices"][0]) for reply in replies).startswith("HHH")


async def test_models(front) -> None:
    async with front() as f:
        (card,) = (await f.http.get("/v1/models")).json()["data"]
        assert card["id"] == "toy" and card["max_model_len"] == 8192
        assert (await f.http.get("/v1/models/toy")).json() == card
        missing = await f.http.get("/v1/models/a/b")
        assert missing.status_code == 404 and missing.json()["error"]["message"]


async def test_the_model_name_is_echoed_and_not_checked(front) -> None:
    async with front() as f:
        assert (await f.post(CHAT, body_for(CHAT, model="other"))).json()["model"] == "other"
        assert (await f.post(CHAT, body_for(CHAT))).json()["model"] == "toy"
