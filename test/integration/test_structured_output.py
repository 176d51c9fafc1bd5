"""Structured output through the front door: a real worker that can be made to say any text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.served import serve, write_demo_checkpoint

BAD: list[dict[str, str]] = [
    {"json_schema": '{"type":"objectt"}'}, {"json_schema": '{"type":'}, {"json_schema": '{"$ref":"#/definitions/x"}'},
    {"json_schema": '{"type":"array","items":[{"type":"string"}]}'}, {"json_schema": '{"type":"integer","minimum":5,"maximum":2}'},
    {"regex": "(ab"}, {"regex": "(?=a)b"}, {"ebnf": 'a ::= "x"'}, {"ebnf": 'root ::= "a'},
]  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("structured")
    checkpoint: Path = write_demo_checkpoint(directory / "checkpoint")
    with serve(checkpoint, directory / "log", "--max-total-tokens", "8192", "--page-size", "16") as worker:
        yield worker.url


def generate(url: str, sampling: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"text": "say it", "sampling_params": {"max_new_tokens": 40, **sampling}, **fields}
    return httpx.post(url + "/generate", json=body, timeout=120)


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("text", ["🙂🙂🙂", "삼겹살 👩‍👩‍👧 𝒳"])
def test_split_characters_never_become_replacement_characters(url: str, text: str) -> None:
    whole = generate(url, {"regex": text}).json()
    assert whole["text"] == text and whole["meta_info"]["finish_reason"]["type"] == "stop"
    streamed = events(generate(url, {"regex": text}, stream=True))
    assert streamed[-1]["text"] == text
    assert all(text.startswith(event["text"]) for event in streamed)


def test_no_part_of_a_stop_string_is_ever_sent(url: str) -> None:
    for stop in (["END"], ["END", "NEVER"]):
        streamed = events(generate(url, {"regex": "abcENDdef", "stop": stop}, stream=True))
        assert streamed[-1]["text"] == "abc" and not any("E" in event["text"] for event in streamed)
        assert streamed[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}
    kept = events(generate(url, {"regex": "abcENDdef", "stop": ["END"], "no_stop_trim": True}, stream=True))
    assert kept[-1]["text"] == "abcEND"


def test_bad_grammars_are_refused_with_the_reason_while_others_run(url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        normal = [pool.submit(generate, url, {"max_new_tokens": 20, "ignore_eos": True}) for _ in range(4)]
        refused = [(grammar, pool.submit(generate, url, grammar, stream=stream)) for grammar in BAD for stream in (False, True)]
        for grammar, future in refused:
            reply = future.result()
            assert reply.status_code == 400 and reply.headers["content-type"].startswith("application/json"), (grammar, reply.text)
            message = reply.json()["error"]["message"]
            assert "cannot be used: " in message and "/project" not in message
        assert [future.result().json()["meta_info"]["completion_tokens"] for future in normal] == [20] * 4
    assert generate(url, {"json_schema": '{"type":"object"}'}).json()["text"].startswith("{")


def test_openai_routes_and_so_args_constrain_too(url: str) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    body = {"messages": [{"role": "user", "content": "json"}], "response_format": form, "max_tokens": 200, "seed": 1, "temperature": 0.01}
    choice = httpx.post(url + "/v1/chat/completions", json=body, timeout=120).json()["choices"][0]
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"])["ok"], bool)
    text = httpx.post(url + "/v1/completions", json={"prompt": "x", "regex": "(yes|no)"}, timeout=120).json()["choices"][0]["text"]
    assert text in ("yes", "no")
    so_args = {"schema_type": "regex", "schema": "xyz", "trigger_token_ids": [300, 301], "bound_token_id": 302}
    reply = generate(url, {"logit_bias": {"302": 100}}, so_args=so_args).json()
    assert reply["output_ids"][:3] == [302, 300, 301] and reply["text"].endswith("xyz")
    bad = generate(url, {}, so_args={"schema_type": "serialized", "schema": "x"})
    assert bad.status_code == 400 and "schema_type" in bad.json()["error"]["message"]


def test_what_a_schema_asks_in_vain_is_said_in_the_reply(url: str) -> None:
    schema = '{"type":"array","items":{"type":"boolean"},"maxItems":1,"uniqueItems":true}'
    meta = generate(url, {"json_schema": schema}).json()["meta_info"]
    assert meta["grammar_warnings"] == ["not enforced: / uniqueItems"]
    strict = generate(url, {}, so_args={"schema_type": "json", "schema": schema})
    assert strict.status_code == 400 and "/ uniqueItems" in strict.json()["error"]["message"]
