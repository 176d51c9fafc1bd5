"""The OpenAI routes: models, completions, chat completions, responses. Errors become replies in the app's own handler."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.native_routes import json_response
from sglang.srt.entrypoints.openai.protocol import CommonRequest
from sglang.srt.entrypoints.openai.serving_base import Route, collect, stream
from sglang.srt.entrypoints.openai.serving_chat import ChatServing
from sglang.srt.entrypoints.openai.serving_completions import CompletionServing
from sglang.srt.entrypoints.openai.serving_models import ModelServing
from sglang.srt.entrypoints.openai.serving_responses import ResponsesServing
from sglang.srt.entrypoints.sse import EventStream, until_disconnect


def build_router(chat: ChatServing) -> APIRouter:
    """Routes over the chat route and its tokenizer manager, which need not have been started yet."""
    router = APIRouter()
    models, completions, responses = ModelServing(chat.tm), CompletionServing(chat.tm), ResponsesServing(chat)

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_response(models.list())

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return json_response(models.get(name))

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        return await answer(chat, request)

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        return await answer(completions, request)

    @router.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        parsed = responses.read(await request.body())
        if parsed.background:
            return json_response(responses.run_in_background(await responses.prepare(parsed)))
        return await answer_parsed(responses, parsed, request)

    @router.get("/v1/responses/{response_id}")
    async def get_response(response_id: str) -> Response:
        return json_response(responses.get(response_id))

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        return json_response(await responses.delete(response_id))

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str) -> Response:
        return json_response(await responses.cancel(response_id))

    return router


async def answer(route: Route[Any], request: Request) -> Response:
    """One request from its body to its reply, whole or streamed."""
    return await answer_parsed(route, route.read(await request.body()), request)


async def answer_parsed(route: Route[Any], parsed: CommonRequest, request: Request) -> Response:
    """The same from the parsed body on; `request` must have been read."""
    reply = await route.prepare(parsed)
    if reply.request.stream:
        return EventStream(stream(route.tm, reply), reply.family, error_events=reply.error_event)
    return json_response(await until_disconnect(request, collect(route.tm, reply)))
