"""/v1/responses over a scripted model: items, the store, background, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from fakes.scripted_scheduler import forever_script
from sglang.srt.managers.io_struct import FinishReason

pytestmark = pytest.mark.anyio

URL = "/v1/responses"
STORE = {"enable_response_store": True}
WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
THINK = {"reasoning": {"effort": "high"}}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def check_items(events: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Deltas add up to the items, which are opened and closed one after another."""
    texts: dict[str, str] = {}
    opened = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    closed = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    assert closed == output and opened == [item["id"] for item in output]
    for item in output:
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts[item["id"]] == text


@pytest.mark.parametrize("prompt", ["[[think]]", "[[tool]]", "[[long]]", "hi"])
async def test_a_stream_adds_up_to_the_whole_response(front, prompt: str) -> None:
    async with front() as f:
        body = {"input": prompt, "tools": [WEATHER], **THINK}
        whole = (await f.post(URL, body)).json()
        events = events_of(await f.post(URL, {**body, "stream": True}))
        final = events[-1]["response"]
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        check_items(events, final["output"])

        def neutral(response: dict[str, Any]) -> Any:
            return {**response, "id": 0, "created_at": 0, "output": [{**item, "id": 0, "call_id": 0} for item in response["output"]]}

        assert neutral(whole) == neutral(final)


async def test_items_and_phases(front) -> None:
    async with front() as f:
        output = (await f.post(URL, {"input": "[[tool]]", "tools": [WEATHER], **THINK})).json()["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert output[1]["phase"] == "commentary" and json.loads(output[2]["arguments"]) == {"city": "Oslo", "days": 2}
        output = (await f.post(URL, {"input": "[[think]]", "tools": [WEATHER], **THINK})).json()["output"]
        assert [item["type"] for item in output] == ["reasoning", "message"] and output[1]["phase"] == "final_answer"


async def test_a_call_that_is_cut_off_is_incomplete(front) -> None:
    async with front() as f:
        reply = (await f.post(URL, {"input": "[[tool]]", "tools": [WEATHER], "max_output_tokens": 50, **THINK})).json()
        assert (reply["status"], reply["output"][-1]["type"], reply["output"][-1]["status"]) == (
            "incomplete",
            "function_call",
            "incomplete",
        )


async def test_thinking_that_uses_up_the_budget(front) -> None:
    async with front() as f:
        for streamed in (False, True):
            answer = await f.post(URL, {"input": "[[think]]", "max_output_tokens": 4, "stream": streamed, **THINK})
            reply = events_of(answer)[-1]["response"] if streamed else answer.json()
            assert reply["status"] == "incomplete" and reply["incomplete_details"] == {"reason": "max_output_tokens"}
            assert [item["type"] for item in reply["output"]] == ["reasoning"] and reply["output"][0]["content"][0]["text"]
            assert reply["usage"]["output_tokens"] == reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 4


async def test_logprobs_are_those_of_the_answer(front) -> None:
    async with front() as f:
        body = {"input": "[[think]]", "include": ["message.output_text.logprobs"], "top_logprobs": 2, **THINK}
        part = (await f.post(URL, body)).json()["output"][1]["content"][0]
        assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode() == part["text"] == "The answer is 4 😀."
        assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
        events = events_of(await f.post(URL, {**body, "stream": True}))
        deltas = [entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
        assert deltas == part["logprobs"]
        called = (await f.post(URL, {**body, "input": "[[tool]]", "tools": [WEATHER]})).json()["output"][1]["content"][0]
        assert b"".join(bytes(entry["bytes"]) for entry in called["logprobs"]).decode().rstrip() == called["text"]


async def test_a_response_goes_on_from_an_earlier_one(front) -> None:
    async with front(args=STORE) as f:
        first = (await f.post(URL, {"input": "[[tool]]", "instructions": "old", "tools": [WEATHER], **THINK})).json()
        assert (await f.http.get(f"{URL}/{first['id']}")).json() == first
        output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "rain"}
        by_id = {"previous_response_id": first["id"], "input": [output], "tools": [WEATHER], **THINK}
        by_hand = {"input": [{"role": "user", "content": "[[tool]]"}, *first["output"], output], "tools": [WEATHER], **THINK}
        second = (await f.post(URL, {**by_id, "stream": True})).text
        assert f'"previous_response_id":"{first["id"]}"' in second
        await f.post(URL, by_hand)
        asked = [request.input_ids for request in f.scheduler.generate_requests()]
        assert asked[1] == asked[2] and len(asked[1]) > len(asked[0])


async def test_what_is_not_stored_cannot_be_found(front) -> None:
    async with front(args=STORE) as f:
        hidden = (await f.post(URL, {"input": "hi", "store": False})).json()
        deleted = (await f.post(URL, {"input": "hi"})).json()
        assert (await f.http.delete(f"{URL}/{deleted['id']}")).json() == {
            "id": deleted["id"],
            "object": "response.deleted",
            "deleted": True,
        }
        for id in (hidden["id"], deleted["id"], "resp_x"):
            assert (await f.http.get(f"{URL}/{id}")).status_code == 404
            assert (await f.post(URL, {"input": "hi", "previous_response_id": id})).status_code == 404


async def test_the_store_is_bounded(front) -> None:
    async with front(args={**STORE, "response_store_bytes": 4000}) as f:
        ids = [(await f.post(URL, {"input": f"hi {n}"})).json()["id"] for n in range(8)]
        found = [(await f.http.get(f"{URL}/{id}")).status_code == 200 for id in ids]
        assert found[-1] and not found[0] and found == sorted(found)


async def test_without_a_store_everything_that_needs_one_is_refused(front) -> None:
    async with front() as f:
        answers = [
            await f.post(URL, {"input": "hi", "previous_response_id": "resp_1"}),
            await f.post(URL, {"input": "hi", "background": True}),
            await f.http.get(f"{URL}/resp_1"),
            await f.http.delete(f"{URL}/resp_1"),
            await f.post(f"{URL}/resp_1/cancel", {}),
        ]
        for answer in answers:
            assert answer.status_code == 400 and "Response store is disabled" in answer.json()["error"]["message"]


async def poll(f: Any, id: str, *until: str) -> dict[str, Any]:
    for _ in range(500):
        reply = (await f.http.get(f"{URL}/{id}")).json()
        if reply["status"] in until:
            return reply
        await asyncio.sleep(0.01)
    raise AssertionError(f"{id} is still {reply['status']}")


async def test_background_responses_are_polled(front) -> None:
    async with front(args=STORE) as f:
        queued = (await f.post(URL, {"input": "[[long]]", "background": True})).json()
        assert (queued["status"], queued["output"]) == ("queued", [])
        done = await poll(f, queued["id"], "completed")
        assert done["output"][0]["content"][0]["text"].startswith("one two")
        assert (await f.post(f"{URL}/{queued['id']}/cancel", {})).json()["status"] == "completed"
        plain = (await f.post(URL, {"input": "hi"})).json()
        assert (await f.post(f"{URL}/{plain['id']}/cancel", {})).status_code == 400
        assert (await f.post(URL, {"input": "hi", "background": True, "stream": True})).status_code == 400


async def test_cancel_stops_the_model(front) -> None:
    async with front(forever_script(42), args=STORE, delay_s=0.01) as f:
        queued = (await f.post(URL, {"input": "hi", "background": True, "max_output_tokens": 4000})).json()
        while not f.tm.last_output_at:
            await asyncio.sleep(0.01)
        cancelled = (await f.post(f"{URL}/{queued['id']}/cancel", {})).json()
        assert cancelled["status"] == "cancelled"
        going_on = await f.post(URL, {"input": "hi", "previous_response_id": queued["id"]})
        assert going_on.status_code == 400 and "cancelled" in going_on.json()["message"]
        assert await f.tm.wait_idle(2) and len(f.scheduler.aborts()) == 1


async def test_a_background_response_that_fails_says_why(front) -> None:
    async with front(args=STORE) as f:
        f.scheduler.refuse_with = FinishReason(type="abort", message="no room", status_code=503)
        queued = (await f.post(URL, {"input": "hi", "background": True})).json()
        failed = await poll(f, queued["id"], "failed")
        assert failed["error"] == {"code": "server_error", "message": "no room"}


async def test_a_stream_that_dies_ends_with_an_error_event(front) -> None:
    async with front(forever_script(42), delay_s=0.01) as f:
        task = asyncio.create_task(f.post(URL, {"input": "hi", "stream": True}))
        while not f.tm.last_output_at:
            await asyncio.sleep(0.01)
        f.tm.fail("the scheduler is gone")
        last = events_of(await task)[-1]
        assert last["type"] == "error" and last["message"] == last["error"]["message"] and last["code"] == "500"


async def test_an_aborted_response_is_cancelled(front) -> None:
    async with front(forever_script(42), delay_s=0.01) as f:
        task = asyncio.create_task(f.post(URL, {"input": "hi", "stream": True, "rid": "r"}))
        while not f.tm.last_output_at:
            await asyncio.sleep(0.01)
        f.tm.abort("r")
        last = events_of(await task)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_bad_request_is_a_json_error_and_the_next_good_one_works(front, streamed: bool) -> None:
    bad: list[dict[str, Any]] = [
        {"input": None}, {"input": 5}, {"input": []}, {"input": [{"type": "zzz"}]}, {"n": 2}, {"temperature": -1}, {"max_output_tokens": -1},
        {"max_output_tokens": 9000}, {"tools": [{"type": "custom"}]}, {"tool_choice": "maybe"}, {"reasoning": {"effort": "loud"}}, {"text": 5},
    ]  # fmt: skip
    async with front() as f:
        for fields in bad:
            answer = await f.post(URL, {"input": "hi", "stream": streamed, **fields})
            assert answer.status_code == 400, (fields, answer.text)
            assert answer.json()["error"]["message"] and len(answer.content) < 2048
        assert (await f.post(URL, {"input": "hi"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["a"] * 3, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 6}),
        ("/generate", {"text": ["a"] * 3, "sampling_params": {"n": 2}}),
    ],
)
async def test_more_answers_than_can_ever_be_here_are_refused_with_the_numbers(front, path: str, fields: dict[str, Any]) -> None:
    async with front(args={"max_running_requests": 2, "max_queued_requests": 3}) as f:
        answer = await f.post(path, fields)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and all(number in message for number in "6532")
