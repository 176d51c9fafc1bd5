"""Anthropic's own client library against the HTTP side, over a real socket; the model behind it plays scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from fakes.front import Worker, scripted_worker, wait_until_idle
from fakes.scripted_scheduler import forever_script

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "w", "input_schema": SCHEMA}
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with scripted_worker(args={"api_key": "right"}, cached_tokens=3) as worker:
        yield worker


@pytest.fixture
def client(worker: Worker) -> Iterator[Anthropic]:
    with client_of(worker) as client:
        yield client


def client_of(worker: Worker) -> Anthropic:
    return Anthropic(base_url=worker.url, api_key="right", max_retries=0)


def user(text: str) -> list:
    return [{"role": "user", "content": text}]


def test_message(client: Anthropic) -> None:
    message = client.messages.create(model="toy", max_tokens=60, messages=user("[[think]]"), thinking=THINKING)
    assert message._request_id is not None
    thinking, text = message.content
    assert thinking.type == "thinking" and (thinking.thinking, thinking.signature) == ("I think so.", "")
    assert text.type == "text" and text.text == "The answer is 4 😀."
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.cache_read_input_tokens, message.usage.output_tokens) == (3, 18)


def test_stream_adds_up_to_the_message(client: Anthropic) -> None:
    with client.messages.stream(model="toy", max_tokens=60, messages=user("[[think]]"), thinking=THINKING) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(model="toy", max_tokens=60, messages=user("[[think]]"), thinking=THINKING)
    assert "".join(texts) == "The answer is 4 😀."
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == whole.stop_reason


def test_tool_use_and_its_result(client: Anthropic) -> None:
    with client.messages.stream(model="toy", max_tokens=200, messages=user("[[tool]]"), thinking=THINKING, tools=[WEATHER]) as stream:
        partial = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert partial and final.stop_reason == "tool_use"
    call = final.content[-1]
    assert call.type == "tool_use" and (call.name, call.input) == ("get_weather", {"city": "Oslo", "days": 2})
    history = [
        *user("How is it?"),
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
    ]
    answer = client.messages.create(model="toy", max_tokens=60, messages=history, tools=[WEATHER])  # type: ignore[arg-type]
    assert answer.content[0].type == "text"


def test_stop_sequence_and_limit(client: Anthropic) -> None:
    stopped = client.messages.create(model="toy", max_tokens=60, messages=user("[[long]]"), stop_sequences=["four"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "four")
    with client.messages.stream(model="toy", max_tokens=2, messages=user("[[long]]")) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens" and final.content[0].type == "text" and final.content[0].text == "one two"


def test_count_tokens(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model="toy", messages=user("hi"), system="be brief", tools=[WEATHER])
    message = client.messages.create(model="toy", messages=user("hi"), system="be brief", tools=[WEATHER], max_tokens=1)
    assert counted.input_tokens == message.usage.input_tokens + 3


def test_errors_are_the_sdks_own(client: Anthropic, worker: Worker) -> None:
    with pytest.raises(anthropic.BadRequestError, match="8192") as refused:
        client.messages.create(model="toy", max_tokens=10_000, messages=user("hi"))
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index, call-overload]
    with pytest.raises(anthropic.BadRequestError), client.messages.stream(model="toy", max_tokens=10_000, messages=user("hi")) as stream:
        list(stream)
    with Anthropic(base_url=worker.url, api_key="wrong", max_retries=0) as other, pytest.raises(anthropic.AuthenticationError):
        other.messages.create(model="toy", max_tokens=1, messages=user("hi"))


@pytest.mark.anyio
async def test_async_clients_side_by_side(worker: Worker) -> None:
    async with AsyncAnthropic(base_url=worker.url, api_key="right", max_retries=0) as client:

        async def ask(number: int) -> str:
            if number % 2:
                message = await client.messages.create(model="toy", max_tokens=60, messages=user("[[long]]"))
                return message.content[0].text  # type: ignore[union-attr]
            async with client.messages.stream(model="toy", max_tokens=60, messages=user("[[long]]")) as stream:
                return await stream.get_final_text()

        assert set(await asyncio.gather(*map(ask, range(10)))) == {"one two three four five six seven eight nine ten eleven twelve"}


def test_clients_that_leave_are_aborted() -> None:
    with scripted_worker(forever_script(42), args={"api_key": "right"}, delay_s=0.01) as worker, client_of(worker) as client:
        with client.messages.stream(model="toy", max_tokens=4000, messages=user("hi")) as stream:
            next(iter(stream))
        wait_until_idle(worker)
        with pytest.raises(anthropic.APITimeoutError):
            client.with_options(timeout=0.3).messages.create(model="toy", max_tokens=4000, messages=user("hi"))
        wait_until_idle(worker)
        assert len(worker.scheduler.aborts()) == 2


def test_a_stream_that_dies_raises() -> None:
    with (
        scripted_worker(forever_script(42), args={"api_key": "right"}, delay_s=0.01) as worker,
        client_of(worker) as client,
        client.messages.stream(model="toy", max_tokens=4000, messages=user("hi")) as stream,
    ):
        events = iter(stream)
        next(events)
        worker.call(worker.manager.fail, "the scheduler is gone")
        with pytest.raises(anthropic.APIStatusError, match="the engine stopped"):
            list(events)
