"""The Messages API. Errors become replies in the app's own handler."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.anthropic.serving_messages import MessagesServing
from sglang.srt.entrypoints.native_routes import json_response
from sglang.srt.entrypoints.openai.router import answer
from sglang.srt.entrypoints.openai.serving_chat import ChatServing


def build_router(chat: ChatServing) -> APIRouter:
    """Routes over the chat route, which renders and parses for them."""
    router = APIRouter()
    messages = MessagesServing(chat)

    @router.post("/v1/messages")
    async def create_message(request: Request) -> Response:
        return await answer(messages, request)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        return json_response(await messages.count_tokens(await request.body()))

    return router
