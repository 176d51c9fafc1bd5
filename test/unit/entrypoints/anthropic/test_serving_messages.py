"""/v1/messages over a scripted model: blocks, reasons to stop, errors in Anthropic's shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from fakes.scripted_scheduler import forever_script, ids_script
from sglang.srt.managers.io_struct import FinishReason

pytestmark = pytest.mark.anyio

THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def body(prompt: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 100, "messages": [{"role": "user", "content": prompt}], **fields}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message a stream adds up to; checks the order of its events."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    message, is_open, partial = first["message"], False, ""
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                is_open, partial = True, ""
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                piece, block = event["delta"], message["content"][-1]
                if piece["type"] == "input_json_delta":
                    partial += piece["partial_json"]
                else:
                    block[block["type"]] += piece[block["type"]]
            case "content_block_stop":
                assert is_open and event["index"] == len(message["content"]) - 1
                is_open = False
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(partial)
    assert not is_open
    message["usage"] |= delta["usage"]
    return message | delta["delta"]


async def both_ways(f: Any, **fields: Any) -> dict[str, Any]:
    """The message, which must be the same streamed and not."""
    whole = (await f.post("/v1/messages", body(**fields))).json()
    streamed = joined(events_of(await f.post("/v1/messages", body(**fields, stream=True))))

    def neutral(message: dict[str, Any]) -> dict[str, Any]:
        content = [{**block, "id": ""} if "id" in block else block for block in message["content"]]
        return {**message, "id": "", "content": content}

    assert neutral(whole) == neutral(streamed)
    return whole


@pytest.mark.parametrize("prompt", ["[[think]]", "[[tool]]", "[[long]]", "hi"])
async def test_a_stream_adds_up_to_the_whole_message(front, prompt: str) -> None:
    async with front() as f:
        message = await both_ways(f, prompt=prompt, tools=[TOOL], **THINK)
        assert message["usage"]["output_tokens"] > 0 and message["id"].startswith("msg_")


async def test_a_stop_sequence_is_named(front) -> None:
    async with front() as f:
        message = await both_ways(f, prompt="[[long]]", stop_sequences=["five", "never"])
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "five")
        assert message["content"] == [{"type": "text", "text": "one two three four "}]
        message = await both_ways(f, prompt="[[long]]")
        assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


async def test_thinking_that_uses_up_the_budget(front) -> None:
    async with front() as f:
        message = await both_ways(f, prompt="[[think]]", max_tokens=4, **THINK)
        assert [block["type"] for block in message["content"]] == ["thinking"] and message["content"][0]["thinking"]
        assert message["stop_reason"] == "max_tokens" and message["usage"]["output_tokens"] == 4
        off = await both_ways(f, prompt="hi", max_tokens=4, thinking={"type": "disabled"})
        assert [block["type"] for block in off["content"]] == ["text"] and off["content"][0]["text"]


async def test_a_call_that_is_cut_off_keeps_its_text(front) -> None:
    async with front() as f:
        message = (await f.post("/v1/messages", body("[[tool]]", max_tokens=50, tools=[TOOL], **THINK))).json()
        assert message["stop_reason"] == "max_tokens"
        assert message["content"][-1]["type"] == "tool_use" and message["content"][-1]["input"]["arguments"].startswith('{"city"')


async def test_cached_tokens_are_no_input_tokens(front) -> None:
    async with front(cached_tokens=3) as f:
        usage = (await both_ways(f))["usage"]
        count = (await f.post("/v1/messages/count_tokens", {"messages": body()["messages"]})).json()["input_tokens"]
        assert usage["cache_read_input_tokens"] == 3 and usage["input_tokens"] + 3 == count


BAD: list[dict[str, Any]] = [
    {"max_tokens": None}, {"max_tokens": 0}, {"max_tokens": "ten"}, {"max_tokens": 9000}, {"messages": []}, {"messages": None}, {"n": 2},
    {"temperature": -1}, {"top_p": 0}, {"stop_sequences": [""]}, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, {"thinking": {"type": "on"}},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]}]},
    {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "fish"}},
]  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_bad_request_is_an_anthropic_error_and_the_next_good_one_works(front, streamed: bool) -> None:
    async with front() as f:
        for fields in [*BAD, b"{"]:
            if isinstance(fields, bytes):
                answer = await f.http.post("/v1/messages", content=fields, headers={"content-type": "application/json"})
            else:
                answer = await f.post("/v1/messages", body(**fields, stream=streamed))
            assert answer.status_code == 400, (fields, answer.text)
            assert set(answer.json()) == {"type", "error"} and answer.json()["error"]["type"] == "invalid_request_error"
            assert answer.json()["error"]["message"] and len(answer.content) < 2048
        assert (await f.post("/v1/messages", body())).status_code == 200
        assert not f.scheduler.num_running


@pytest.mark.parametrize(("status", "kind"), [(400, "invalid_request_error"), (503, "overloaded_error"), (500, "api_error")])
async def test_refusals_of_the_scheduler_keep_their_status(front, status: int, kind: str) -> None:
    async with front() as f:
        f.scheduler.refuse_with = FinishReason(type="abort", message="no", status_code=status)
        answer = await f.post("/v1/messages", body(stream=True))
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


@pytest.mark.parametrize("end", ["dies", "abort"])
async def test_a_broken_stream_ends_with_one_error_event(front, end: str) -> None:
    async with front(forever_script(42), delay_s=0.01) as f:
        task = asyncio.create_task(f.post("/v1/messages", body(max_tokens=4000, stream=True, rid="r")))
        while not f.tm.last_output_at:
            await asyncio.sleep(0.01)
        if end == "dies":
            f.tm.fail("the scheduler is gone")
        else:
            f.tm.abort("r")
        events = events_of(await task)
        assert [event["type"] for event in events].count("error") == 1
        assert events[-1]["type"] == "error" and events[-1]["error"]["type"] in ("api_error", "invalid_request_error")


async def test_nothing_said_is_a_message_without_blocks(front, tokenizer) -> None:
    async with front(ids_script([min(tokenizer.eos_ids)])) as f:
        message = await both_ways(f)
        assert (message["content"], message["stop_reason"]) == ([], "end_turn")


async def test_tokenize_renders_messages(front) -> None:
    async with front() as f:
        chat = (await f.post("/tokenize", {"messages": body()["messages"]})).json()
        count = (await f.post("/v1/messages/count_tokens", {"messages": body()["messages"]})).json()["input_tokens"]
        assert chat["count"] == len(chat["tokens"]) == count
        for wrong in ({}, {"prompt": "x", "messages": []}, {"messages": []}):
            assert (await f.post("/tokenize", wrong)).status_code == 400


async def test_every_reply_has_a_request_id(front) -> None:
    async with front() as f:
        for path, given in (("/v1/messages", "abc-1"), ("/v1/chat/completions", ""), ("/health", "no good id"), ("/nowhere", "x" * 200)):
            answer = await f.http.post(path, json=body(), headers={"x-request-id": given})
            assert answer.headers["x-request-id"] == answer.headers["request-id"]
            assert answer.headers["request-id"] == given if given == "abc-1" else len(answer.headers["request-id"]) == 32
