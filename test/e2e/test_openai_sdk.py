"""OpenAI's own client library against the HTTP side, over a real socket; the model behind it plays scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from fakes.front import Worker, scripted_worker, wait_until_idle
from fakes.scripted_scheduler import forever_script

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "w",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    },
}
THINK = {"chat_template_kwargs": {"thinking": True}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with scripted_worker(args={"enable_cache_report": True}, cached_tokens=3) as worker:
        yield worker


@pytest.fixture
def client(worker: Worker) -> Iterator[OpenAI]:
    with client_of(worker) as client:
        yield client


def user(text: str) -> list:
    return [{"role": "user", "content": text}]


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_chat(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="toy", messages=user("[[think]]"), extra_body=THINK)
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content) == ("The answer is 4 😀.", "I think so.")  # type: ignore[attr-defined]
    assert reply.usage is not None and reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.completion_tokens_details is not None and reply.usage.completion_tokens_details.reasoning_tokens == 6
    assert reply.usage.prompt_tokens_details is not None and reply.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="toy", messages=user("[[think]]"), stream=True, stream_options={"include_usage": True}, extra_body=THINK
        )
    )
    *body, last = chunks
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 18
    assert body[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == "The answer is 4 😀."
    assert [chunk.choices[0].finish_reason for chunk in body if chunk.choices[0].finish_reason] == ["stop"]


def test_chat_stream_helper_with_tool_calls(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="toy", messages=user("[[tool]]"), tools=[WEATHER], extra_body={"reasoning_effort": "high"}
    ) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Oslo", "days": 2}


def test_the_answer_to_a_tool_call_goes_back(client: OpenAI) -> None:
    first = client.chat.completions.create(model="toy", messages=user("[[tool]]"), tools=[WEATHER], reasoning_effort="high")
    history = [*user("What is it like?"), first.choices[0].message.model_dump(exclude_none=True)]
    call = first.choices[0].message.tool_calls[0]  # type: ignore[index]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    assert client.chat.completions.create(model="toy", messages=history, tools=[WEATHER]).choices[0].message.content


def test_choices_in_a_stream_all_finish(client: OpenAI) -> None:
    finished = {}
    for chunk in client.chat.completions.create(model="toy", messages=user("hi"), max_tokens=3, n=3, stream=True):
        for choice in chunk.choices:
            if choice.finish_reason:
                finished[choice.index] = choice.finish_reason
    assert finished == dict.fromkeys(range(3), "length")


def test_logprobs(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="toy", messages=user("hi"), max_tokens=3, logprobs=True, top_logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 3 and all(len(entry.top_logprobs) == 2 for entry in logprobs.content)


def test_completions(client: OpenAI) -> None:
    reply = client.completions.create(model="toy", prompt="hi", max_tokens=2, logprobs=2, echo=True)
    assert reply.choices[0].text == "hiHell" and reply.choices[0].logprobs is not None
    texts = [chunk.choices[0].text for chunk in client.completions.create(model="toy", prompt="[[long]]", stream=True, max_tokens=4)]
    assert "".join(texts) == "one two three four"


def test_errors_are_the_sdks_own(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Messages cannot be empty") as refused:
        client.chat.completions.create(model="toy", messages=[])
    assert refused.value.param == "messages" and refused.value.type == "BadRequestError"
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.chat.completions.create(model="toy", messages=user("hi"), max_tokens=10_000, stream=True)
    with pytest.raises(openai.BadRequestError, match="only one of"):
        client.chat.completions.create(
            model="toy", messages=user("json"), response_format={"type": "json_object"}, extra_body={"regex": "a"}
        )


def test_the_key_is_checked() -> None:
    with scripted_worker(args={"api_key": "right"}) as worker:
        with OpenAI(base_url=worker.url + "/v1", api_key="wrong", max_retries=0) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with OpenAI(base_url=worker.url + "/v1", api_key="right", max_retries=0) as client:
            assert client.completions.create(model="toy", prompt="hi", max_tokens=1).choices[0].text == "H"


@pytest.mark.anyio
async def test_async_clients_side_by_side(worker: Worker) -> None:
    async with AsyncOpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as client:

        async def ask(number: int) -> str:
            if number % 2:
                return (await client.chat.completions.create(model="toy", messages=user("[[long]]"))).choices[0].message.content or ""
            stream = await client.chat.completions.create(model="toy", messages=user("[[long]]"), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert set(await asyncio.gather(*map(ask, range(20)))) == {"one two three four five six seven eight nine ten eleven twelve"}


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_client_that_closes_its_stream_is_aborted(route: str) -> None:
    with endless_worker() as (worker, client):
        if route == "chat":
            stream = client.chat.completions.create(model="toy", messages=user("hi"), max_tokens=4000, stream=True)
        else:
            stream = client.completions.create(model="toy", prompt="hi", max_tokens=4000, stream=True)
        next(iter(stream))
        stream.close()
        wait_until_idle(worker)
        assert len(worker.scheduler.aborts()) == 1


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_client_that_gives_up_waiting_is_aborted(route: str) -> None:
    with endless_worker() as (worker, client):
        hasty = client.with_options(timeout=0.3)

        def ask() -> None:
            if route == "chat":
                hasty.chat.completions.create(model="toy", messages=user("hi"), max_tokens=4000, n=2)
            else:
                hasty.completions.create(model="toy", prompt=["hi", "yo"], max_tokens=4000)

        with pytest.raises(openai.APITimeoutError):
            ask()
        wait_until_idle(worker)
        assert len(worker.scheduler.aborts()) == 2


def client_of(worker: Worker) -> OpenAI:
    return OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0)


@contextmanager
def endless_worker() -> Iterator[tuple[Worker, OpenAI]]:
    """A worker whose answers end only with their limit, and a client of it."""
    with scripted_worker(forever_script(42), delay_s=0.01) as worker, client_of(worker) as client:
        yield worker, client
