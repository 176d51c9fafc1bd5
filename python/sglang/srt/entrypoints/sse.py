"""Step "stream": server-sent events, and what happens when the client is not there any more.

`EventStream` sends what an async iterator yields. Before the first event nothing is sent, so an error found until then is
an ordinary reply with its status. After it, an error is one last event. While the iterator is silent for some seconds (a long
prefill), comment lines keep proxies from closing the connection; they also end the time in which a status can be chosen.
When the client disconnects the iterator is cancelled and closed, which aborts its sequences.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.entrypoints.error_replies import Family, as_service_error, error_body, error_response
from sglang.srt.errors import Aborted, ServiceError

KEEP_ALIVE_S = 10.0
"""Seconds of silence before a comment line. Some benchmark clients cannot read comments, and do not wait this long."""
DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second: nginx must not collect events

T = TypeVar("T")


def data_event(value: object) -> bytes:
    """One event with a JSON body."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, value: object) -> bytes:
    """One event with a name, as the Messages and Responses routes send them."""
    return b"event: " + name.encode() + b"\n" + data_event(value)


class EventStream(Response):
    """A response whose body is the events of an iterator of ready-made bytes (`data_event`, `named_event`, `DONE`)."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        family: Family,
        *,
        error_events: Callable[[ServiceError], bytes] | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ):
        """`error_events` makes the bytes that end a broken stream; default: the family's error body, then [DONE]."""
        super().__init__(media_type="text/event-stream", headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._family: Family = family
        self._error_events = error_events or self._plain_error
        self._keep_alive_s = keep_alive_s
        self._started = False
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._last_sent = time.monotonic()
        producer = asyncio.create_task(self._produce(scope, receive, send))
        others = [asyncio.create_task(wait_for_disconnect(receive)), asyncio.create_task(self._keep_alive(send))]
        try:
            await asyncio.wait([producer, others[0]], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (producer, *others):
                task.cancel()
            results = await asyncio.gather(producer, *others, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._send(send, event)
        except Exception as error:
            service_error = as_service_error(error, scope["path"])
            if not self._started:
                await error_response(self._family, service_error)(scope, receive, send)
                return
            await self._send(send, self._error_events(service_error))
        if self._started:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True  # before the await: the keep-alive task must not start the response a second time
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._last_sent = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            silent_for = time.monotonic() - self._last_sent
            if silent_for >= self._keep_alive_s:
                await self._send(send, b": keep-alive\n\n")
            else:
                await asyncio.sleep(self._keep_alive_s - silent_for)

    def _plain_error(self, error: ServiceError) -> bytes:
        return data_event(error_body(self._family, error)) + DONE


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    """The result of `work`, which is cancelled (Aborted is raised) if the client goes away meanwhile.

    Call it after the request's body was read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Aborted("the client went away")
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def merge(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several iterators as they come, each with the number of its iterator.

    The first error ends all. Whenever this ends, every iterator has been closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    items: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as source:
                async for item in source:
                    items.put_nowait((index, item))
            items.put_nowait(None)
        except Exception as error:
            items.put_nowait(error)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            entry = await items.get()
            if entry is None:
                num_open -= 1
            elif isinstance(entry, BaseException):
                raise entry
            else:
                yield entry
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
