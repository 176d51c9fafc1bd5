"""Every error a user can meet, as one tree, and the HTTP status of each.

    ServiceError
    ├── BadRequest 400            the request cannot be served as written
    │   ├── ContextTooLong 400    prompt + max_tokens exceed the context
    │   └── BodyTooLarge 413      the body exceeds --max-body-bytes
    ├── NotFound 404
    ├── Unauthorized 401
    ├── Overloaded 503            queue full; carries Retry-After
    ├── DeadlineExceeded 504      the request's own deadline passed
    ├── Aborted 499               the client asked for it, or went away
    └── EngineFailed 500          our mistake; the message names a request id, never a path
    ConfigError                   start-up: flags or checkpoint are wrong; printed as one line, exit code 2

A user's mistake is a 4xx and never marks a worker as sick.
"""

from __future__ import annotations


class ServiceError(Exception):
    """Base of everything that is answered over HTTP. `message` is safe to show to a client."""

    status = 500
    kind = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(ServiceError):
    status = 400
    kind = "BadRequestError"


class ContextTooLong(BadRequest):
    pass


class BodyTooLarge(BadRequest):
    status = 413


class Unauthorized(ServiceError):
    status = 401
    kind = "AuthenticationError"


class NotFound(ServiceError):
    status = 404
    kind = "NotFoundError"


class Aborted(ServiceError):
    status = 499
    kind = "Aborted"


class EngineFailed(ServiceError):
    status = 500
    kind = "InternalServerError"


class Overloaded(ServiceError):
    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after_s: int = 1):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(ServiceError):
    status = 504
    kind = "DeadlineExceeded"


class ConfigError(Exception):
    """Flags or checkpoint cannot be used. The message is one line: what was asked, what was found, what to do."""


_BY_STATUS: dict[int, type[ServiceError]] = {
    cls.status: cls for cls in (BadRequest, Unauthorized, NotFound, Aborted, EngineFailed, Overloaded, DeadlineExceeded)
}


def from_status(status: int, message: str) -> ServiceError:
    """The error for a status that came from another process (a finish reason carries only status and message)."""
    if status in _BY_STATUS:
        return _BY_STATUS[status](message)
    return BadRequest(message) if 400 <= status < 500 else EngineFailed(message)
