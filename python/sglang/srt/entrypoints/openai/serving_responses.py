"""POST /v1/responses, and what can be done with a response afterwards.

Responses are kept only with --enable-response-store. Then a request may go on from an earlier response, run in the background,
be read again, cancelled and deleted; without it those are a 400, and everything else works.
"""

from __future__ import annotations

import asyncio
import logging

from sglang.srt.entrypoints.error_replies import as_service_error
from sglang.srt.entrypoints.openai.response_store import ResponseStore, StoredResponse
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesRequest, chat_request_of, messages_of
from sglang.srt.entrypoints.openai.responses_reply import ResponsesReply
from sglang.srt.entrypoints.openai.serving_base import Json, Route, collect
from sglang.srt.entrypoints.openai.serving_chat import ChatServing
from sglang.srt.errors import BadRequest, NotFound

logger = logging.getLogger(__name__)


class ResponsesServing(Route[ResponsesRequest]):
    request_type = ResponsesRequest
    id_prefix = "resp_"

    def __init__(self, chat: ChatServing):
        super().__init__(chat.tm)
        self._chat = chat
        args = chat.tm.args
        self._store = ResponseStore(args.response_store_bytes) if args.enable_response_store else None
        self._running: dict[str, asyncio.Task[None]] = {}  # background responses

    async def prepare(self, request: ResponsesRequest) -> ResponsesReply:
        if request.n != 1:
            raise BadRequest("a response has one answer: leave out n", param="n")
        history: list[Json] = []
        if request.previous_response_id is not None:
            history = self._history(request.previous_response_id)
        if request.background:
            self._check_background(request)
        new = messages_of(request.input)
        chat_request = chat_request_of(request, history, new)
        turn = await self._chat.turn(chat_request)

        def keep(response: Json, answer: Json) -> None:
            if self._store is not None and request.store:
                self._store.put(response, [*history, *new, answer])

        return ResponsesReply(
            request,
            id=self.new_id(),
            model=request.model or self.tm.args.model_name,
            turn=turn,
            may_call=bool(chat_request.tools) and chat_request.tool_choice != "none",
            on_end=keep,
        )

    def run_in_background(self, reply: ResponsesReply) -> Json:
        """Start a response that nobody waits for; what `get` tells of it until it has ended."""
        assert self._store is not None, "checked by prepare"
        self._store.put(reply.snapshot("in_progress"), [])
        task = asyncio.create_task(self._run(reply), name=reply.id)
        self._running[reply.id] = task
        task.add_done_callback(lambda _: self._running.pop(reply.id, None))
        return reply.snapshot("queued")

    async def _run(self, reply: ResponsesReply) -> None:
        assert self._store is not None
        try:
            await collect(self.tm, reply)
        except asyncio.CancelledError:
            self._store.put(reply.snapshot("cancelled"), [])
        except Exception as error:  # nobody awaits a background task: what failed is told to whoever asks for the response
            logger.warning("background response %s failed: %s", reply.id, type(error).__name__)
            self._store.put(reply.failure(as_service_error(error, "/v1/responses")), [])

    def get(self, id: str) -> Json:
        """A response as it stands. Raises BadRequest without a store, NotFound for an unknown id."""
        return self._stored(id, "response_id").response

    async def cancel(self, id: str) -> Json:
        """Stop a background response; one that has ended stays as it is. Raises BadRequest, NotFound."""
        stored = self._stored(id, "response_id")
        if not stored.response.get("background"):
            raise BadRequest("only background responses can be cancelled; close the connection to stop another one", param="response_id")
        task = self._running.get(id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        return self.get(id)

    async def delete(self, id: str) -> Json:
        """Forget a response; one that still runs is stopped. Raises BadRequest, NotFound."""
        stored = self._stored(id, "response_id")
        if stored.response.get("background"):
            await self.cancel(id)
        assert self._store is not None
        self._store.remove(id)
        return {"id": id, "object": "response.deleted", "deleted": True}

    def _history(self, id: str) -> list[Json]:
        stored = self._stored(id, "previous_response_id")
        if not stored.messages:
            status = stored.response["status"]
            raise BadRequest(f"response {id} cannot be continued: its status is {status}", param="previous_response_id")
        return stored.messages

    def _stored(self, id: str, param: str) -> StoredResponse:
        if self._store is None:
            raise _store_disabled(param)
        stored = self._store.get(id)
        if stored is None:
            raise NotFound(f"Response with id {id[:80]!r} not found", param=param)
        return stored

    def _check_background(self, request: ResponsesRequest) -> None:
        if self._store is None:
            raise _store_disabled("background")
        if not request.store or request.stream:
            raise BadRequest("background needs store, and does not go together with stream", param="background")


def _store_disabled(param: str) -> BadRequest:
    return BadRequest(f"Response store is disabled; start the server with --enable-response-store to use {param}", param=param)
