"""The whole HTTP side over a scripted scheduler, behind a real socket, in a thread of the test.

with scripted_worker(script, args={"api_key": "k"}, delay_s=0.01) as worker:
    httpx.get(worker.url + "/health")
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from fakes.scripted_scheduler import Script, ScriptedScheduler
from sglang.srt.entrypoints.http_server import build_app, open_port
from sglang.srt.managers.model_info import ModelInfo
from sglang.srt.managers.scheduler_link import SchedulerLink
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs

TOY = Path(__file__).parents[1] / "golden" / "toy_tokenizer"


@dataclass
class Worker:
    """A running worker: its address, and what stands behind it."""

    url: str
    port: int
    manager: TokenizerManager
    scheduler: ScriptedScheduler
    loop: asyncio.AbstractEventLoop

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something that belongs to the worker's loop, from the test's thread."""

        async def run() -> Any:
            return function(*args, **kwargs)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)


def wait_until_idle(worker: Worker, timeout_s: float = 2.0) -> None:
    """Until the scheduler has nothing left, which must not take longer."""
    deadline = time.monotonic() + timeout_s
    while worker.scheduler.num_running:
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.02)


@contextlib.contextmanager
def scripted_worker(
    script: Script | None = None, *, args: dict[str, Any] | None = None, is_ready: bool = True, **options: Any
) -> Iterator[Worker]:
    """`options` are those of ScriptedScheduler. With `is_ready` false the scheduler is not started."""
    tokenizer = Tokenizer.load(TOY)
    context_length = options.setdefault("context_length", 8192)
    server_args = ServerArgs(model_path=str(TOY), served_model_name="toy", **(args or {}))
    model = ModelInfo(vocab_size=4096, context_length=context_length, architectures=["DeepseekV41ForCausalLM"])
    started: threading.Event = threading.Event()
    made: list[Worker] = []
    stop = threading.Event()

    async def serve() -> None:
        manager = TokenizerManager(server_args, tokenizer, model, SchedulerLink())
        manager.start()
        scheduler = ScriptedScheduler(manager.link.to_scheduler, manager.link.from_scheduler, tokenizer, script, **options)
        if is_ready:
            scheduler.start()
            await manager.wait_ready(10)
            manager.mark_warm()
        listener = open_port("127.0.0.1", 0)
        port = listener.getsockname()[1]
        config = uvicorn.Config(build_app(manager), lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        made.append(Worker(f"http://127.0.0.1:{port}", port, manager, scheduler, asyncio.get_running_loop()))
        started.set()
        while not stop.is_set():
            await asyncio.sleep(0.02)
        server.should_exit = True
        await serving
        scheduler.stop()
        await manager.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(15), "the worker did not start"
    try:
        yield made[0]
    finally:
        stop.set()
        thread.join(10)
