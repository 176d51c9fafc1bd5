"""SGLang's own routes. Generation is in generate.py, everything else a worker answers is here."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from sglang.srt.entrypoints.generate import answer, encode_all, read_job, stream
from sglang.srt.entrypoints.request_body import read_object
from sglang.srt.entrypoints.sse import DONE, EventStream, data_event, until_disconnect
from sglang.srt.errors import BadRequest, ServiceError
from sglang.srt.managers.sequence import SequenceRequest
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability import metrics
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.version import __version__

if TYPE_CHECKING:  # the OpenAI routes use this module's helpers
    from sglang.srt.entrypoints.openai.serving_chat import ChatServing

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 20.0
"""How long /health_generate waits for one token."""
MAX_FLUSH_WAIT_S = 600.0


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON reply; msgspec writes numbers that JSON lacks (infinities) as null."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class NativeRoutes:
    """Handlers, bound to one tokenizer manager."""

    def __init__(self, manager: TokenizerManager, launch_command: str = "", chat: ChatServing | None = None):
        """`chat` renders messages for /tokenize."""
        self._manager = manager
        self._chat = chat
        self._launch_command = launch_command

    def router(self) -> APIRouter:
        """All native routes."""
        router = APIRouter()
        routes: list[tuple[str, Callable[..., Any], str]] = [
            ("/", self.root, "GET HEAD"),
            ("/generate", self.generate, "POST PUT"),
            ("/abort_request", self.abort_request, "POST"),
            ("/health", self.health, "GET"),
            ("/health_generate", self.health_generate, "GET"),
            ("/ready", self.ready, "GET"),
            ("/ping", self.ping, "GET"),
            ("/model_info", self.model_info, "GET"),
            ("/get_model_info", self.model_info, "GET"),
            ("/server_info", self.server_info, "GET"),
            ("/get_server_info", self.server_info, "GET"),
            ("/flush_cache", self.flush_cache, "GET POST"),
            ("/tokenize", self.tokenize, "POST"),
            ("/v1/tokenize", self.tokenize, "POST"),
            ("/detokenize", self.detokenize, "POST"),
            ("/v1/detokenize", self.detokenize, "POST"),
        ]
        if self._manager.args.enable_metrics:
            routes.append(("/metrics", self.metrics, "GET"))
        for path, handler, methods in routes:
            for method in methods.split():  # one by one: each becomes an operation of the OpenAPI description
                router.add_api_route(path, handler, methods=[method])
        return router

    # -- generation --------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        """Continue prompts; see the API chapter for fields."""
        job = await read_job(await read_object(request), self._manager)
        if job.is_stream:
            return EventStream(_events(stream(job, self._manager)), "native")
        return json_response(await until_disconnect(request, answer(job, self._manager)))

    async def abort_request(self, request: Request) -> Response:
        """Stop one request or all; always 200, because the request may just have ended."""
        body = await read_object(request, may_be_empty=True)
        rid, abort_all = body.get("rid") or "", body.get("abort_all") or False
        if not isinstance(rid, str) or not isinstance(abort_all, bool):
            raise BadRequest("rid must be a string and abort_all true or false")
        self._manager.abort(rid, abort_all=abort_all)
        return Response()

    # -- state -------------------------------------------------------------------------------------------------------

    async def root(self) -> Response:
        """What this address is, for someone who opens it in a browser."""
        return json_response({"server": f"sglang {__version__}", "model": self._manager.args.model_name, "description": "/openapi.json"})

    async def health(self) -> Response:
        """Liveness: this process and the scheduler live, and are not on their way out."""
        return Response(status_code=200 if self._manager.is_alive and not self._manager.is_draining else 503)

    async def ready(self) -> Response:
        """Readiness: new requests are welcome."""
        return Response(status_code=200 if self._manager.is_ready else 503)

    async def ping(self) -> Response:
        """This process answers."""
        return Response()

    async def health_generate(self) -> Response:
        """Really produce a token. While others are being served, any token of theirs proves as much."""
        if not self._manager.is_alive or self._manager.is_draining:
            return Response(status_code=503)
        started = time.monotonic()
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await generate_one_token(self._manager, "HEALTH_CHECK")
        except (ServiceError, TimeoutError) as error:
            if self._manager.last_output_at <= started:
                logger.warning("health check failed: %s", error or "no token in time")
                return Response(status_code=503)
        return Response()

    async def model_info(self) -> Response:
        """What the model is."""
        args, model = self._manager.args, self._manager.model
        return json_response(
            {
                "model_path": args.model_path,
                "served_model_name": args.model_name,
                "tokenizer_path": args.resolved_tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "load_format": "auto",
                "reasoning_parser": args.reasoning_parser,
                "tool_call_parser": args.tool_call_parser,
                "disaggregation_mode": args.disaggregation_mode,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": model.model_type,
                "architectures": model.architectures,
                "vocab_size": model.vocab_size,
                "max_model_len": self._manager.context_length,
            }
        )

    async def server_info(self) -> Response:
        """All resolved arguments, flat, and what the scheduler says of itself, once flat and once per rank."""
        state = await self._manager.get_state()
        own = {key: value for key, value in state.items() if key != "server_args"}
        return json_response(
            {
                **self._manager.args.public_dict(),
                "served_model_name": self._manager.args.model_name,
                "tokenizer_path": self._manager.args.resolved_tokenizer_path,
                **own,
                "internal_states": [own],
                "version": __version__,
                "launch_command": self._launch_command,
            }
        )

    async def flush_cache(self, request: Request) -> Response:
        """Drop the prefix cache; 400 while requests run, after waiting `timeout` seconds for them to end."""
        text = request.query_params.get("timeout", "0")
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        if not 0 <= timeout_s <= MAX_FLUSH_WAIT_S:
            raise BadRequest(f"timeout must be a number of seconds in [0, {MAX_FLUSH_WAIT_S:g}], got {text[:50]!r}", param="timeout")
        done, message = await self._manager.flush_cache(timeout_s)
        return PlainTextResponse(f"{message or ('cache flushed' if done else 'cache not flushed')}\n", 200 if done else 400)

    async def metrics(self) -> Response:
        """Prometheus text format."""
        return Response(self._manager.metrics.expose(), headers={"Content-Type": metrics.CONTENT_TYPE})

    # -- text and ids ------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Ids of `prompt`, a string or a list of strings; or of the prompt that a chat request with these `messages` would have."""
        body = await read_object(request)
        prompt, messages = body.get("prompt"), body.get("messages")
        if (prompt is None) == (messages is None):
            raise BadRequest(f"exactly one of prompt and messages must be given, found {'neither' if prompt is None else 'both'}")
        many = isinstance(prompt, list)
        if messages is not None:
            ids = [await self._render(await request.body())]
        else:
            texts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
            if not texts or not all(isinstance(text, str) for text in texts):
                raise BadRequest("prompt must be a string or a list of strings", param="prompt")
            ids = await encode_all(texts, self._manager)
        count = [len(item) for item in ids] if many else len(ids[0])
        return json_response({"tokens": ids if many else ids[0], "count": count, "max_model_len": self._manager.context_length})

    async def _render(self, body: bytes) -> list[int]:
        if self._chat is None:
            raise BadRequest("messages cannot be rendered here; send a prompt", param="messages")
        return (await self._chat.render(self._chat.read(body))).ids

    async def detokenize(self, request: Request) -> Response:
        """Text of `tokens`, a list of ids or a list of such lists."""
        body = await read_object(request)
        tokens, skip = body.get("tokens"), body.get("skip_special_tokens", True)
        many = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
        lists: list[Any] = tokens if isinstance(tokens, list) and many else [tokens]
        vocab_size = self._manager.model.vocab_size
        for ids in lists:
            if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
                raise BadRequest(f"tokens must be a list of ids in [0, {vocab_size - 1}], or a list of such lists", param="tokens")
        if not isinstance(skip, bool):
            raise BadRequest("skip_special_tokens must be true or false", param="skip_special_tokens")
        texts = [self._manager.tokenizer.decode(ids, skip_special_tokens=skip) for ids in lists]
        return json_response({"text": texts if many else texts[0]})


async def generate_one_token(manager: TokenizerManager, label: str) -> None:
    """One greedy token from a one-token prompt. Raises the ServiceError it ended with, if any; not counted in the metrics."""
    seq = SequenceRequest(
        rid=f"{label}_{manager.new_rid()}",
        input_ids=[manager.tokenizer.bos_id or 0],
        sampling=SamplingParams(max_new_tokens=1, temperature=1.0, top_k=1, ignore_eos=True, sampling_seed=0),
        stream=False,
        label=label,
    )
    async with aclosing(manager.run(seq, is_internal=True)) as outputs:
        async for _ in outputs:
            pass


async def _events(pieces: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces) as source:
        async for piece in source:
            yield data_event(piece)
    yield DONE
