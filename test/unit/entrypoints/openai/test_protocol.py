from __future__ import annotations

import pytest

from sglang.srt.entrypoints.openai.protocol import ChatRequest, CompletionRequest, parse
from sglang.srt.errors import BadRequest

GOOD = b'{"messages": [{"role": "user", "content": "x"}]'


def test_null_means_default_and_unknown_fields_are_ignored() -> None:
    nulls = b', "n": null, "stream": null, "temperature": null, "stream_options": {"include_usage": null}'
    request = parse(GOOD + nulls + b', "zzz": 1}', ChatRequest)
    assert (request.n, request.stream, request.temperature, request.includes_usage(False)) == (1, False, None, False)
    assert parse(b'{"prompt": "x", "max_tokens": null}', CompletionRequest).max_tokens == 16


def test_usage_in_streams_is_the_servers_choice_unless_said() -> None:
    assert parse(GOOD + b"}", ChatRequest).includes_usage(True)
    assert not parse(GOOD + b', "stream_options": {"include_usage": false}}', ChatRequest).includes_usage(True)


def test_max_completion_tokens_is_the_other_name_of_max_tokens() -> None:
    assert parse(GOOD + b', "max_tokens": 5}', ChatRequest).limit == 5
    assert parse(GOOD + b', "max_tokens": 5, "max_completion_tokens": 0}', ChatRequest).limit == 0
    assert parse(GOOD + b"}", ChatRequest).limit is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b'{"model":', None),
        (b"[]", None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
        (b"x" * 5_000_000, None),
        (b'"' + b"\\u00e9" * 1000, None),
        (b"{}", "messages"),
        (GOOD + b', "max_tokens": "ten"}', "max_tokens"),
        (GOOD + b', "temperature": NaN}', None),
        (GOOD + b', "temperature": [1]}', "temperature"),
        (GOOD + b', "stop": [1]}', "stop"),
        (GOOD + b', "stream_options": {"include_usage": 1}}', "stream_options"),
        (b'{"messages": "x"}', "messages"),
        (b'{"messages": [1]}', "messages"),
        (GOOD + b', "logit_bias": {"1": "a"}}', "logit_bias"),
        (GOOD + b', "tools": {}}', "tools"),
    ],
)
def test_bad_bodies_are_named_shortly(body: bytes, field: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(body, ChatRequest)
    assert refused.value.param == field
    assert 0 < len(refused.value.message) < 600
