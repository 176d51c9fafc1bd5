"""The OpenAI routes of this version: models, completions, chat completions. Errors become replies in the app's own handler."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.native_routes import json_response
from sglang.srt.entrypoints.openai.serving_base import Serving, collect, stream
from sglang.srt.entrypoints.openai.serving_chat import ChatServing
from sglang.srt.entrypoints.openai.serving_completions import CompletionServing
from sglang.srt.entrypoints.openai.serving_models import ModelServing
from sglang.srt.entrypoints.sse import EventStream, until_disconnect
from sglang.srt.managers.tokenizer_manager import TokenizerManager


def build_router(tm: TokenizerManager) -> APIRouter:
    """Routes over one tokenizer manager; it need not have been started yet."""
    router = APIRouter()
    models, chat, completions = ModelServing(tm), ChatServing(tm), CompletionServing(tm)

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_response(models.list())

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return json_response(models.get(name))

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        return await _answer(chat, request)

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        return await _answer(completions, request)

    return router


async def _answer(serving: Serving[Any], request: Request) -> Response:
    """One request from its body to its reply, whole or streamed."""
    reply = await serving.prepare(serving.read(await request.body()))
    if reply.request.stream:
        return EventStream(stream(serving.tm, reply), "openai")
    return json_response(await until_disconnect(request, collect(serving.tm, reply)))
