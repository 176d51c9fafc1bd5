"""OpenAI's client library and the Responses API, over a real socket; the model behind it plays scripts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from fakes.front import Worker, scripted_worker, wait_until_idle
from fakes.scripted_scheduler import forever_script

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
}
HIGH: Any = {"effort": "high"}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with scripted_worker(args={"enable_response_store": True}, cached_tokens=3) as worker:
        yield worker


@pytest.fixture
def client(worker: Worker) -> Iterator[OpenAI]:
    with client_of(worker) as client:
        yield client


def client_of(worker: Worker) -> OpenAI:
    return OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0)


def test_response(client: OpenAI) -> None:
    response = client.responses.create(model="toy", input="[[think]]", reasoning=HIGH)
    assert response.output_text == "The answer is 4 😀." and response.status == "completed"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    usage = response.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (3, 6)


def test_stream_helper_adds_up_to_the_response(client: OpenAI) -> None:
    with client.responses.stream(model="toy", input="[[tool]]", reasoning=HIGH, tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    call = final.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Oslo", "days": 2}
    assert final.output_text == "Let me look."


def test_conversation_by_previous_response(client: OpenAI, worker: Worker) -> None:
    first = client.responses.create(model="toy", input="[[tool]]", reasoning=HIGH, tools=[WEATHER])
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    again: Any = [{"role": "user", "content": "[[tool]]"}, *[item.model_dump() for item in first.output], *result]
    client.responses.create(model="toy", input=result, reasoning=HIGH, tools=[WEATHER], previous_response_id=first.id)
    client.responses.create(model="toy", input=again, reasoning=HIGH, tools=[WEATHER])
    one, other = worker.scheduler.generate_requests()[-2:]
    assert one.input_ids == other.input_ids
    assert client.responses.retrieve(first.id).output_text == "Let me look."


def test_background_and_cancel(client: OpenAI) -> None:
    response = client.responses.create(model="toy", input="[[long]]", background=True)
    deadline = time.monotonic() + 5
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        response = client.responses.retrieve(response.id)
    assert response.output_text.startswith("one two three")
    assert client.responses.cancel(response.id).status == "completed"
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_errors_are_the_sdks_own(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="8192") as refused:
        client.responses.create(model="toy", input="hi", max_output_tokens=10_000, stream=True)
    assert refused.value.type == "BadRequestError"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="toy", input="hi", previous_response_id="resp_none")
    with scripted_worker() as bare, client_of(bare) as other, pytest.raises(openai.BadRequestError, match="Response store is disabled"):
        other.responses.retrieve("resp_x")


def test_clients_that_leave_are_aborted() -> None:
    with scripted_worker(forever_script(42), delay_s=0.01) as worker, client_of(worker) as client:
        stream = client.responses.create(model="toy", input="hi", stream=True)
        next(iter(stream))
        stream.close()
        wait_until_idle(worker)
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).responses.create(model="toy", input="hi")
        wait_until_idle(worker)
        assert len(worker.scheduler.aborts()) == 2


def test_a_stream_that_dies_raises() -> None:
    with scripted_worker(forever_script(42), delay_s=0.01) as worker, client_of(worker) as client:
        events = iter(client.responses.create(model="toy", input="hi", stream=True))
        next(events)
        worker.call(worker.manager.fail, "the scheduler is gone")
        with pytest.raises(openai.APIError, match="the engine stopped"):
            list(events)
