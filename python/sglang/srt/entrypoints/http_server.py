"""The HTTP process: the app, and its life from a free port to an orderly exit.

The port is opened first, so that one in use is noticed before a model is loaded; while the model loads, probes get 503.
SIGTERM drains: new requests get 503, running ones may finish. A second signal does not wait. Exit codes: 0 after a
signal, 1 if the engine failed, 2 for wrong flags or checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.anthropic.router import build_router as build_anthropic_router
from sglang.srt.entrypoints.error_replies import error_response, family_of
from sglang.srt.entrypoints.launcher import EngineCore
from sglang.srt.entrypoints.middleware import ServiceMiddleware
from sglang.srt.entrypoints.native_routes import NativeRoutes
from sglang.srt.entrypoints.openai.router import build_router as build_openai_router
from sglang.srt.entrypoints.openai.serving_chat import ChatServing
from sglang.srt.errors import ConfigError, ServiceError
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability.logging import setup_logging
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 3.0
"""How long replies to failed or aborted requests may take to leave before connections are closed."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def build_app(manager: TokenizerManager, launch_command: str = "") -> FastAPI:
    """The whole HTTP surface over one tokenizer manager; it need not have been started yet."""
    app = FastAPI(title="sglang", version=__version__, docs_url=None, redoc_url=None)
    chat = ChatServing(manager)
    routers = [NativeRoutes(manager, launch_command, chat).router(), build_openai_router(chat), build_anthropic_router(chat)]
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(ServiceError, _reply_to_error)
    known_paths = frozenset(route.path for router in routers for route in router.routes if isinstance(route, APIRoute))
    app.add_middleware(ServiceMiddleware, args=manager.args, metrics=manager.metrics, known_paths=known_paths)
    return app


async def _reply_to_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return error_response(family_of(request.url.path), error)


def run_server(args: ServerArgs, *, scheduler_command: list[str] | None = None) -> int:
    """Serve until a signal; the exit code. Raises ConfigError before anything was started. See EngineCore for `scheduler_command`."""
    setup_logging(args.log_level, "http")
    core = EngineCore(args, command=scheduler_command)
    listener = open_port(args.host, args.port)
    logger.info("server_args %s", json.dumps(args.public_dict()))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Service(core, listener).run())


def open_port(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; pass another --port or --host") from None
    listener.setblocking(False)
    return listener


class _Service:
    """Runs the engine and the HTTP server side by side."""

    def __init__(self, core: EngineCore, listener: socket.socket):
        self._core = core
        self._listener = listener
        app = build_app(core.manager, shlex.join(sys.argv))
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(REPLY_TIMEOUT_S),
            )
        )
        self._asked_to_stop = asyncio.Event()
        self._asked_again = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        await self._core.start()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        try:
            return await self._live(serving)
        finally:
            self._server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            await self._core.stop()
            for number in _STOP_SIGNALS:  # closing the loop would restore the default, and one more signal replace the exit code
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    async def _live(self, serving: asyncio.Task[None]) -> int:
        """Until the exit code is known."""
        starting = asyncio.create_task(self._core.wait_ready())
        asked, died = asyncio.create_task(self._asked_to_stop.wait()), asyncio.create_task(self._core.died.wait())
        try:
            await asyncio.wait([starting, asked, serving], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                try:
                    starting.result()
                except ConfigError as error:
                    print(f"error: {error}", file=sys.stderr)
                    return 2
                except ServiceError as error:
                    print(f"error: {error.message}", file=sys.stderr)
                    return 1
                host, port = self._listener.getsockname()[:2]
                logger.info("ready: %s on http://%s:%d", self._core.args.model_name, host, port)
                await asyncio.wait([asked, died, serving], return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await self._drain()
                return 0
            return 1  # running requests have been failed; uvicorn lets their replies out before it closes
        finally:
            for task in (starting, asked, died):
                task.cancel()
            await asyncio.gather(starting, asked, died, return_exceptions=True)

    async def _drain(self) -> None:
        logger.info("draining: %d requests may run for %g s more", self._core.manager.num_sequences, self._core.args.drain_timeout_s)
        draining = asyncio.create_task(self._core.drain(self._core.args.drain_timeout_s))
        again = asyncio.create_task(self._asked_again.wait())
        died = asyncio.create_task(self._core.died.wait())
        await asyncio.wait([draining, again, died], return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, again, died):
            task.cancel()
        await asyncio.gather(draining, again, died, return_exceptions=True)

    def _on_signal(self) -> None:
        """The first signal asks for a drain, the second ends it."""
        if self._asked_to_stop.is_set():
            self._server.force_exit = True
            self._asked_again.set()
        self._asked_to_stop.set()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal instead of exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
