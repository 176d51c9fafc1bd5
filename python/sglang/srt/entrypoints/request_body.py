"""Reading a request's body: bytes, then one JSON object, with errors a client can act on."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from sglang.srt.errors import BadRequest

_decode = msgspec.json.Decoder().decode
_MAX_QUOTED_CHARS = 200


async def read_object(request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The body as a JSON object; {} for an empty body where that is allowed. Raises BadRequest."""
    body = await request.body()
    return {} if may_be_empty and not body.strip() else parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """One JSON object. Raises BadRequest for anything else, with the parser's reason but never the body itself."""
    try:
        value = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the request body is not valid JSON: {str(error)[:_MAX_QUOTED_CHARS]}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the request body must be a JSON object, found {type(value).__name__}")
    return value
