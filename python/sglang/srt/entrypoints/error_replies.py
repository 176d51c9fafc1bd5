"""The one place where an error becomes a response body. Each family of routes has the shape its clients read.

    native     {"error": {"message"}}
    openai     {"object": "error", "message", "type", "param", "code", "error": {the same}}: flat as SGLang sends it, and
               nested where OpenAI's SDKs look
    anthropic  {"type": "error", "error": {"type", "message"}}

`error.message` exists in all of them. A message never holds a path of this machine or a stack trace, and is cut to a length
that keeps every reply under 2 KB.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from sglang.srt.errors import EngineFailed, Overloaded, ServiceError

logger = logging.getLogger(__name__)

Family = Literal["native", "openai", "anthropic"]

_MAX_MESSAGE_BYTES = {"native": 1700, "openai": 850, "anthropic": 1700}  # as JSON; OpenAI's shape holds it twice
_ANTHROPIC_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ANTHROPIC_TYPES |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


def family_of(path: str) -> Family:
    """Which shape the clients of a path read."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    return "openai" if path.startswith("/v1/") else "native"


def error_body(family: Family, error: ServiceError) -> dict[str, Any]:
    """The JSON object for an error."""
    message = _clip(error.message, _MAX_MESSAGE_BYTES[family])
    if family == "native":
        return {"error": {"message": message}}
    if family == "anthropic":
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    fields = {"message": message, "type": error.kind, "param": error.param, "code": error.status}
    return {"object": "error", **fields, "error": fields}


def error_response(family: Family, error: ServiceError) -> Response:
    """The whole reply: status, body, and Retry-After where waiting helps."""
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else None
    return Response(msgspec.json.encode(error_body(family, error)), error.status, headers, "application/json")


def as_service_error(error: Exception, where: str) -> ServiceError:
    """What the client is told of any exception. Ours is logged with an id that the reply carries, and nothing more is said."""
    if isinstance(error, ServiceError):
        return error
    reference = secrets.token_hex(4)
    logger.error("internal error %s in %s", reference, where, exc_info=error)
    return EngineFailed(f"internal error, reference {reference}; the server's log has the details")


def _clip(text: str, max_bytes: int) -> str:
    """`text` shortened until its JSON has at most `max_bytes`; a lone surrogate becomes a question mark."""
    text = text[:max_bytes].encode("utf-8", "replace").decode()
    if len(msgspec.json.encode(text)) <= max_bytes:
        return text
    while len(msgspec.json.encode(text + "...")) > max_bytes:
        text = text[: len(text) * 9 // 10]
    return text + "..."
