"""The OpenAI routes of this version: models, completions, chat completions."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from sglang.srt.entrypoints.error_replies import as_service_error, error_response
from sglang.srt.entrypoints.openai.serving_base import Serving, collect, stream
from sglang.srt.entrypoints.openai.serving_chat import ChatServing
from sglang.srt.entrypoints.openai.serving_completions import CompletionServing
from sglang.srt.entrypoints.openai.serving_models import ModelServing
from sglang.srt.entrypoints.sse import EventStream, until_disconnect
from sglang.srt.errors import BadRequest, ServiceError
from sglang.srt.managers.tokenizer_manager import TokenizerManager


def build_router(tm: TokenizerManager) -> APIRouter:
    """Routes over one tokenizer manager. Every error leaves in OpenAI's shape."""
    router = APIRouter()
    models, chat, completions = ModelServing(tm), ChatServing(tm), CompletionServing(tm)

    @router.get("/v1/models")
    async def list_models() -> Response:
        return _json(models.list())

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        try:
            return _json(models.get(name))
        except ServiceError as error:
            return error_response("openai", error)

    @router.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await _answer(chat, http)

    @router.post("/v1/completions")
    async def create_completion(http: Request) -> Response:
        return await _answer(completions, http)

    return router


async def _answer(serving: Serving[Any], http: Request) -> Response:
    """One request from its body to its reply, whole or streamed."""
    try:
        _require_json(http)
        reply = await serving.prepare(serving.read(await http.body()))
        if reply.request.stream:
            return EventStream(stream(serving.tm, reply), "openai")
        return _json(await until_disconnect(http, collect(serving.tm, reply)))
    except Exception as error:
        return error_response("openai", as_service_error(error, http.url.path))


def _require_json(http: Request) -> None:
    kind = http.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise BadRequest(f"the request body must be application/json, found {kind[:100]}")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
