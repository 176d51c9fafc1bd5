"""Bodies of errors by family of routes."""

from __future__ import annotations

import json
import logging

import pytest

from sglang.srt import errors
from sglang.srt.entrypoints.error_replies import as_service_error, error_body, error_response, family_of

ALL = [
    errors.BadRequest,
    errors.ContextTooLong,
    errors.Unauthorized,
    errors.NotFound,
    errors.Aborted,
    errors.EngineFailed,
    errors.Overloaded,
]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("family", ["native", "openai", "anthropic"])
def test_every_family_has_error_message_and_stays_small(family, kind):
    for message in ("wrong", '\n\\"' * 5000, "😀" * 5000, "\ud800", "\x00" * 5000):
        reply = error_response(family, kind(message))
        assert reply.status_code == kind.status
        assert json.loads(reply.body)["error"]["message"]
        assert len(reply.body) < 2048


def test_shapes():
    error = errors.BadRequest("wrong", param="top_p")
    assert error_body("native", error) == {"error": {"message": "wrong"}}
    fields = {"message": "wrong", "type": "BadRequestError", "param": "top_p", "code": 400}
    assert error_body("openai", error) == {"object": "error", **fields, "error": fields}
    assert error_body("anthropic", error) == {"type": "error", "error": {"type": "invalid_request_error", "message": "wrong"}}


def test_overload_says_when_to_come_back():
    assert error_response("native", errors.Overloaded("full", retry_after_s=7)).headers["retry-after"] == "7"


def test_paths_choose_the_family():
    assert family_of("/generate") == family_of("/flush_cache") == "native"
    assert family_of("/v1/chat/completions") == family_of("/v1/models") == "openai"
    assert family_of("/v1/messages") == family_of("/v1/messages/count_tokens") == "anthropic"


def test_internal_errors_are_logged_and_not_shown(caplog):
    with caplog.at_level(logging.ERROR):
        error = as_service_error(KeyError("/home/secret/file.py"), "/generate")
    assert error.status == 500
    assert "secret" not in error.message
    reference = error.message.split("reference ")[1].split(";")[0]
    assert reference in caplog.text and "secret" in caplog.text
