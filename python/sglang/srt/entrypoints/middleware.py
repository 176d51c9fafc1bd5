"""What happens to every HTTP request before and after its route: key, body, counting, and the last catch of errors.

Plain ASGI, because a wrapper around responses would stand between a stream and its client's disconnect.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints.error_replies import as_service_error, error_response, family_of
from sglang.srt.errors import BadRequest, BodyTooLarge, ServiceError, Unauthorized
from sglang.srt.observability.metrics import FrontMetrics
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/health_generate", "/ready", "/ping", "/metrics"})
"""Need no key: probes and scrapers have none."""
ADMIN_PATHS = frozenset({"/flush_cache", "/abort_request"})
"""Need the admin key where there is one, and then refuse the ordinary one."""
_REQUEST_ID_HEADERS = ("x-request-id", "request-id")  # where OpenAI's and Anthropic's clients look
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class ServiceMiddleware:
    """One per app."""

    def __init__(self, app: ASGIApp, *, args: ServerArgs, metrics: FrontMetrics, known_paths: frozenset[str]):
        """`known_paths`: paths that may be a metric's label; anything else is counted as "other", so labels stay few."""
        self._app = app
        self._args = args
        self._metrics = metrics
        self._known_paths = known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"] if scope["method"] in _METHODS else "other"
        endpoint = path if path in self._known_paths else "other"
        response = _Response(send, request_id := _request_id(Headers(scope=scope)))
        started = time.monotonic()
        self._metrics.http_started(endpoint, method)
        try:
            await self._answer(scope, receive, response)
        finally:
            self._metrics.http_ended(endpoint, method, response.status)
            if self._args.log_requests:
                logger.info("%s %s %s %d %.3f s", request_id, method, path, response.status, time.monotonic() - started)

    async def _answer(self, scope: Scope, receive: Receive, response: _Response) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_key(scope["path"], headers)
            limit = self._args.max_body_bytes
            _check_headers(scope["method"], headers, limit)
            await self._app(scope, _limited(receive, limit), response.send)
        except ClientDisconnect:
            return  # it left before its body was here: nobody is left to answer, and nothing of ours failed
        except Exception as error:
            service_error = as_service_error(error, scope["path"])
            if not response.has_started:
                await error_response(family_of(scope["path"]), service_error)(scope, receive, response.send)
            elif not isinstance(error, ServiceError):
                raise  # the reply is broken off; closing the connection is all that is left to say so

    def _check_key(self, path: str, headers: Headers) -> None:
        if path in OPEN_PATHS:
            return
        is_admin = path in ADMIN_PATHS and self._args.admin_api_key is not None
        key = self._args.admin_api_key if is_admin else self._args.api_key
        if key is not None and not hmac.compare_digest(_key_of(headers), key.encode()):
            raise Unauthorized("Unauthorized")


class _Response:
    """Sends a response, with the request's id in its headers, and remembers how far it got.

    The status is 499, as nginx writes it, for a client that left before the start.
    """

    def __init__(self, send: Send, request_id: str):
        self._send = send
        self._request_id = request_id
        self.status = 499
        self.has_started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.has_started = True
            headers = MutableHeaders(scope=message)
            for name in _REQUEST_ID_HEADERS:
                headers[name] = self._request_id
        await self._send(message)


def _request_id(headers: Headers) -> str:
    """The id a client or proxy gave the request, if it is one that a log line can hold, or a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _key_of(headers: Headers) -> bytes:
    """Bearer token, or the header that Anthropic's clients send."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.strip().encode("latin-1")  # the bytes that were sent


def _check_headers(method: str, headers: Headers, limit: int) -> None:
    """Refuse a body by its headers alone. A missing content type is taken for JSON; browsers cannot forge that one."""
    length = headers.get("content-length", "0")
    has_body = length != "0" or "transfer-encoding" in headers
    if method not in ("POST", "PUT", "PATCH") or not has_body:
        return
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise BadRequest(f"the content type must be application/json, got {kind[:100]!r}")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)


def _limited(receive: Receive, limit: int) -> Receive:
    """`receive` that stops a body without a declared length at the same limit."""
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise _too_large(limit)
        return message

    return limited


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body may have {limit} bytes (--max-body-bytes)")
