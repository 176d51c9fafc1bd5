"""The toy tokenizer once for all tests, and the HTTP side over a scripted scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.scripted_scheduler import Script, ScriptedScheduler
from sglang.srt.entrypoints.http_server import build_app
from sglang.srt.entrypoints.openai.recipe import Recipe
from sglang.srt.managers.model_info import ModelInfo
from sglang.srt.managers.scheduler_link import SchedulerLink
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs

TOY = Path(__file__).parents[2] / "golden" / "toy_tokenizer"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOY)


@pytest.fixture(scope="session")
def recipe(tokenizer: Tokenizer) -> Recipe:
    return Recipe((TOY / "tokenizer.json").read_text(), model_names=("toy",))


@dataclass
class Front:
    """A client of the OpenAI routes, and what stands behind them."""

    http: httpx.AsyncClient
    tm: TokenizerManager
    scheduler: ScriptedScheduler

    async def post(self, path: str, body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)


Start = Callable[..., AbstractAsyncContextManager[Front]]


@pytest.fixture
def front(tokenizer: Tokenizer) -> Start:
    """`async with front(script, **scheduler options) as f:` the routes, in this process, without a socket for HTTP."""

    @asynccontextmanager
    async def start(script: Script | None = None, *, args: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Front]:
        link = SchedulerLink()
        server_args = ServerArgs(model_path=str(TOY), served_model_name="toy", **{"enable_cache_report": True, **(args or {})})
        tm = TokenizerManager(server_args, tokenizer, ModelInfo(vocab_size=4096, context_length=8192), link)
        tm.start()
        scheduler = ScriptedScheduler(link.to_scheduler, link.from_scheduler, tokenizer, script, **options).start()
        try:
            await tm.wait_ready(10)
            transport = httpx.ASGITransport(app=build_app(tm))
            async with httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=20) as http:
                yield Front(http, tm, scheduler)
        finally:
            scheduler.stop()
            await tm.close()

    return start
