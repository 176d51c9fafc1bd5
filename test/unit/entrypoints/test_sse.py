"""Event streams: order of start, events, errors and disconnects, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from sglang.srt.entrypoints.sse import DONE, EventStream, data_event, merge
from sglang.srt.errors import BadRequest, EngineFailed

SCOPE = {"type": "http", "path": "/generate", "method": "POST", "headers": []}


class Client:
    """The other end of an ASGI connection."""

    def __init__(self) -> None:
        self.messages: list[dict] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def is_complete(self) -> bool:
        return not self.messages[-1].get("more_body", False)


async def serve(events: AsyncGenerator[bytes, None], **options) -> Client:
    client = Client()
    await EventStream(events, "native", **options)(SCOPE, client.receive, client.send)
    return client


def test_events_are_sent_one_by_one_with_headers_that_forbid_buffering():
    async def events():
        yield data_event({"a": 1})
        yield DONE

    client = asyncio.run(serve(events()))
    assert client.status == 200
    assert client.body == b'data: {"a":1}\n\ndata: [DONE]\n\n'
    assert client.is_complete
    headers = dict(client.messages[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache" and headers[b"x-accel-buffering"] == b"no"
    assert b"content-length" not in headers


def test_error_before_the_first_event_is_a_plain_reply():
    async def events():
        raise BadRequest("wrong")
        yield b""

    client = asyncio.run(serve(events()))
    assert client.status == 400
    assert client.body == b'{"error":{"message":"wrong"}}'


def test_error_after_an_event_is_one_event_and_the_end():
    async def events():
        yield data_event(1)
        raise EngineFailed("gone")

    client = asyncio.run(serve(events()))
    assert client.status == 200
    assert client.body == b'data: 1\n\ndata: {"error":{"message":"gone"}}\n\ndata: [DONE]\n\n'
    assert client.is_complete
    other = asyncio.run(serve(events(), error_events=lambda error: error.message.encode()))
    assert other.body == b"data: 1\n\ngone"


def test_silence_is_filled_with_comments_only_after_a_while():
    async def events():
        await asyncio.sleep(0.1)
        yield data_event(1)

    client = asyncio.run(serve(events(), keep_alive_s=0.02))
    comments, end = client.body.split(b"data: 1\n\n")
    assert comments and set(comments.split(b"\n\n")) == {b": keep-alive", b""} and end == b""
    assert asyncio.run(serve(events(), keep_alive_s=10)).body == b"data: 1\n\n"


def test_error_after_a_comment_cannot_change_the_status_any_more():
    async def events():
        await asyncio.sleep(0.1)
        raise BadRequest("wrong")
        yield b""

    client = asyncio.run(serve(events(), keep_alive_s=0.02))
    assert client.status == 200
    assert client.body.endswith(b'data: {"error":{"message":"wrong"}}\n\ndata: [DONE]\n\n')


@pytest.mark.parametrize("num_events", [0, 1])
def test_disconnect_closes_the_generator(num_events):
    closed = []

    async def events():
        try:
            for _ in range(num_events):
                yield data_event(1)
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def run() -> None:
        client = Client()
        task = asyncio.create_task(EventStream(events(), "native")(SCOPE, client.receive, client.send))
        await asyncio.sleep(0.01)
        client.gone.set()
        await asyncio.wait_for(task, 2)

    asyncio.run(run())
    assert closed == [True]


def test_disconnect_while_the_client_does_not_read_closes_the_generator_too():
    closed = []

    async def events():
        try:
            while True:
                yield data_event(1)
        finally:
            closed.append(True)

    async def run() -> None:
        client = Client()

        async def stuck(message: dict) -> None:
            await asyncio.sleep(60)

        task = asyncio.create_task(EventStream(events(), "native")(SCOPE, client.receive, stuck))
        await asyncio.sleep(0.01)
        client.gone.set()
        await asyncio.wait_for(task, 2)

    asyncio.run(run())
    assert closed == [True]


# -- merge ---------------------------------------------------------------------------------------------------------------


def numbers(count: int, closed: list[int], fail_at: int | None = None):
    async def generate() -> AsyncGenerator[int, None]:
        try:
            for number in range(count):
                if number == fail_at:
                    raise EngineFailed("gone")
                yield number
                await asyncio.sleep(0)
        finally:
            closed.append(count)

    return generate()


@pytest.mark.parametrize("counts", [[3], [3, 0, 5]])
def test_merge_keeps_each_order_and_closes_all(counts):
    async def run() -> None:
        closed: list[int] = []
        seen: dict[int, list[int]] = {index: [] for index in range(len(counts))}
        async for index, item in merge([numbers(count, closed) for count in counts]):
            seen[index].append(item)
        assert seen == {index: list(range(count)) for index, count in enumerate(counts)}
        assert sorted(closed) == sorted(counts)

    asyncio.run(run())


def test_merge_ends_with_the_first_error_and_closes_the_others():
    async def run() -> None:
        closed: list[int] = []
        with pytest.raises(EngineFailed):
            async for _ in merge([numbers(1000, closed), numbers(5, closed, fail_at=2)]):
                pass
        assert sorted(closed) == [5, 1000]

    asyncio.run(run())


def test_merge_closes_all_when_its_reader_leaves():
    async def run() -> None:
        closed: list[int] = []
        merged = merge([numbers(1000, closed), numbers(2000, closed)])
        await anext(merged)
        await merged.aclose()
        assert set(closed) <= {1000, 2000} and len(closed) >= 1

    asyncio.run(run())
