"""The offline engine: the service without HTTP.

    with Engine(model_path="...") as engine:
        engine.generate("Hello", {"max_new_tokens": 8})["text"]

The tokenizer manager runs in an event loop of its own in a background thread, so the same engine may be used from
synchronous code, from any event loop, and from several threads. Requests and results are those of /generate.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from sglang.srt.entrypoints.generate import GenerateJob, answer, read_job, stream
from sglang.srt.entrypoints.launcher import EngineCore
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs

T = TypeVar("T")
Result = dict[str, Any]


class Engine:
    """One model in a process of its own. Close it with `shutdown()` or use it in a `with` block."""

    def __init__(self, **server_args: Any):
        """Fields of ServerArgs; model_path is needed. Raises ConfigError if they or the checkpoint do not work, and
        EngineFailed if the engine does not start. Returns when the model is loaded."""
        command = server_args.pop("scheduler_command", None)  # for tests: another scheduler
        server_args.setdefault("log_level", "error")
        self._core = EngineCore(ServerArgs(**server_args), command=command)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="sglang engine", daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, _shut_down, self._core, self._loop, self._thread)
        try:
            self._do(self._start())
        except BaseException:
            self.shutdown()
            raise

    @property
    def server_args(self) -> ServerArgs:
        return self._core.args

    @property
    def tokenizer(self) -> Tokenizer:
        return self._core.manager.tokenizer

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Result | list[Result] | Iterator[Result]:
        """Continue one prompt (a dict comes back) or several (a list). `fields` are further fields of /generate, such as
        return_logprob, top_logprobs_num, rid, cache_salt. With `stream`, an iterator of cumulative pieces; leaving it early
        aborts. Raises BadRequest and the other service errors."""
        body = _body(prompt, input_ids, sampling_params, stream, fields)
        if not stream:
            return self._do(self._answer(body))
        return self._stream(body)

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        *,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Result | list[Result] | AsyncIterator[Result]:
        """The same for asynchronous code: `await` it; with `stream`, then iterate with `async for`."""
        body = _body(prompt, input_ids, sampling_params, stream, fields)
        if not stream:
            return await self._await(self._answer(body))
        return self._async_stream(body)

    def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Drop the prefix cache; False while requests run."""
        return self._do(self._core.manager.flush_cache(timeout_s))[0]

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Stop one request, or all; they end with a finish reason of type abort."""
        self._loop.call_soon_threadsafe(lambda: self._core.manager.abort(rid, abort_all=abort_all))

    def get_server_info(self) -> dict[str, Any]:
        """All arguments and the scheduler's state."""
        state = self._do(self._core.manager.get_state())
        return {**self.server_args.public_dict(), **state, "internal_states": [state]}

    def shutdown(self) -> None:
        """Abort what runs and end the process. Safe to call twice."""
        self._close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    # -- between the caller's thread and the engine's loop -------------------------------------------------------------

    async def _start(self) -> None:
        await self._core.start()
        await self._core.wait_ready()

    async def _answer(self, body: dict[str, Any]) -> Result | list[Result]:
        return await answer(await read_job(body, self._manager), self._manager)

    @property
    def _manager(self) -> TokenizerManager:
        return self._core.manager

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the engine was shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run in the engine's loop; a Ctrl-C while waiting cancels it."""
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _await(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """The same for a caller in another event loop; cancelling the caller cancels `work`."""
        return asyncio.wrap_future(self._submit(work))

    def _stream(self, body: dict[str, Any]) -> Iterator[Result]:
        pieces = _Pieces(self._do(read_job(body, self._manager)), self._manager)
        try:
            while (piece := self._do(pieces.next())) is not None:
                yield piece
        finally:
            if not self._loop.is_closed():
                self._do(pieces.close())

    async def _async_stream(self, body: dict[str, Any]) -> AsyncIterator[Result]:
        pieces = _Pieces(await self._await(read_job(body, self._manager)), self._manager)
        try:
            while (piece := await self._await(pieces.next())) is not None:
                yield piece
        finally:
            if not self._loop.is_closed():
                await self._await(pieces.close())


class _Pieces:
    """A stream that lives in the engine's loop and is pulled from outside; None is its end."""

    def __init__(self, job: GenerateJob, manager: TokenizerManager):
        self._pieces = stream(job, manager)

    async def next(self) -> Result | None:
        return await anext(self._pieces, None)

    async def close(self) -> None:
        await self._pieces.aclose()


def _body(prompt: Any, input_ids: Any, sampling_params: Any, is_stream: bool, fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "text": prompt, "input_ids": input_ids, "sampling_params": sampling_params, "stream": is_stream}


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _shut_down(core: EngineCore, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Runs at shutdown(), at garbage collection, or at the interpreter's exit, whichever is first."""

    async def stop() -> None:
        await core.drain(0.0)
        await core.stop()

    asyncio.run_coroutine_threadsafe(stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
