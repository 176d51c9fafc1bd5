"""Our answers beside those of SGLang 0.5.23's own server, request by request, over the same scripted model.

Equal means: same status, same keys, same values, except for ids, times, made-up logprobs and cache counts. How a stream is
cut into pieces depends on timing, so pieces of one kind in a row are joined first. Every other difference is in
`ALLOWED` or `DELIBERATE` and explained in docs/api-differences.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

WIRE = json.loads((Path(__file__).parents[3] / "golden/wire/sglang_0.5.23.json").read_text())
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in WIRE["cases"]}
pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[4] / "docs/api-differences.md"

OURS = [name for name, case in CASES.items() if re.fullmatch(r"/v1/(?!tokenize|detokenize).*", case["request"]["path"])]

# Differences within an answer: pattern of the case, pattern of the difference, heading that explains it in the document.
ALLOWED = [
    (r".*", r".*/metadata/sampling_seed extra", "Seeds are reported"),
    (r".*_meta_info", r".*/meta_info/(sampling_seed|.*_ts|.*_latency|.*_time|decode_throughput) extra", "Seeds are reported"),
    (r"chat_tool_stream", r".*/matched_stop is None, not 1", "`matched_stop` is null beside tool calls"),
    (r"messages.*", r".*/stop_(sequence|reason) extra", "A message says how it stopped"),
    (r"messages.*", r".*/signature extra", "Thinking blocks have an empty signature"),
    (r"responses.*", r".*/text is {'format': {'type': 'text'}}, not None", "`text` is never null"),
    (r"responses.*", r".*/tools/0/(tools|defer_loading|format) missing", "Tools are repeated as they were sent"),
    (r"responses_tool_stream", r".*/phase is None, not 'commentary'", "A phase is said when it is known"),
    (r"responses_max_stream", r".*/(text|delta) is 'one two', not 'one'", "`max_output_tokens` is taken at its word"),
    (r"responses_max_stream", r".*/output_tokens is 2, not 1", "`max_output_tokens` is taken at its word"),
    (r"responses_max_stream", r".*/total_tokens is 14, not 13", "`max_output_tokens` is taken at its word"),
]
# A case that is answered otherwise on purpose: the heading that explains it.
DELIBERATE = {
    "chat_thinking_field_ignored": "`thinking` is honoured in chat",
    "completions_echo_logprobs": "`text_offset` is filled, and `echo` has the prompt's logprobs",
}


@pytest.mark.parametrize("name", OURS)
async def test_answer_is_that_of_sglang(front, name: str) -> None:
    case = CASES[name]
    async with front() as f:
        request = case["request"]
        answer = await f.http.request(request["method"], request["path"], json=request["body"])
    if name in DELIBERATE:
        DELIBERATE_CHECKS[name](answer)
        return
    assert answer.status_code == case["status"]
    assert answer.headers["content-type"].split(";")[0] == case["content_type"]
    if "events" in case and case["events"][0].startswith("event: "):
        lines = [line for line in answer.text.split("\n") if line]
        check_sequence_numbers(lines)
        expected, actual = named_events(case["events"]), named_events(lines)
    elif "events" in case:
        assert answer.text.endswith("data: [DONE]\n\n")
        expected = events(case["events"])
        actual = events(answer.text.removesuffix("\n\n").split("\n\n"))
    elif case["status"] >= 400:
        check_error(answer.json(), case)
        return
    else:
        expected, actual = case["json"], answer.json()
    found = differences(neutral(expected), neutral(actual), "")
    allowed = [pattern for cases, pattern, _ in ALLOWED if re.fullmatch(cases, name)]
    assert not [difference for difference in found if not any(re.fullmatch(pattern, difference) for pattern in allowed)]


def check_error(actual: dict[str, Any], case: dict[str, Any]) -> None:
    """Flat as SGLang's and nested as OpenAI's, or Anthropic's shape; with a message of our own."""
    if case["json"].get("type") == "error":
        assert {**actual, "error": {**actual["error"], "message": ""}} == {
            **case["json"],
            "error": {**case["json"]["error"], "message": ""},
        }
        assert "max_tokens" in actual["error"]["message"]
        return
    nested = case["json"].get("error", case["json"])
    assert set(nested) <= set(actual) | set(actual["error"])
    assert set(actual) == {"object", "message", "type", "param", "code", "error"}
    assert actual["error"] == {key: actual[key] for key in ("message", "type", "param", "code")}
    assert actual["code"] == case["status"] and actual["message"]


def check_thinking_field(answer: Any) -> None:
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I think so.", "The answer is 4 😀.")


def check_text_offset(answer: Any) -> None:
    ours, theirs = answer.json()["choices"][0], CASES["completions_echo_logprobs"]["json"]["choices"][0]
    assert ours["text"] == theirs["text"] and ours["finish_reason"] == theirs["finish_reason"]
    assert ours["logprobs"]["text_offset"] == [0, 2, 3]
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert ours["logprobs"][key][1:] == theirs["logprobs"][key]


DELIBERATE_CHECKS = {
    "chat_thinking_field_ignored": check_thinking_field,
    "completions_echo_logprobs": check_text_offset,
}


def test_every_recorded_request_is_accounted_for() -> None:
    elsewhere = r"/(generate|health|flush_cache|tokenize|detokenize)"  # compared by the native routes' own tests
    native = [name for name, case in CASES.items() if re.match(elsewhere, case["request"]["path"])]
    assert len(CASES) == 57
    assert (len(OURS), len(native)) == (38, 19)
    assert set(DELIBERATE) == set(DELIBERATE_CHECKS) <= set(OURS)


def test_every_difference_is_explained_in_the_document() -> None:
    text = DOCS.read_text()
    for heading in {*(heading for _, _, heading in ALLOWED), *DELIBERATE.values()}:
        assert f"### {heading}\n" in text


# -- comparing ---------------------------------------------------------------------------------------------------------


def events(lines: list[str]) -> list[Any]:
    """Chunks of a stream per choice, pieces of one kind joined; then those without choices."""
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    assert len({chunk["object"] for chunk in chunks}) == 1
    by_choice: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined = by_choice.setdefault(choice["index"], [])
            chunk = {key: value for key, value in chunk.items() if not (key == "usage" and value is None)}
            if not (joined and joins(joined[-1]["choices"][0], choice)):
                joined.append({**chunk, "choices": [choice]})
    return [*(joined for _, joined in sorted(by_choice.items())), [chunk for chunk in chunks if not chunk["choices"]]]


def named_events(lines: list[str]) -> list[Any]:
    """(name, body) of each event, deltas of one kind in a row joined, without numbers."""
    result: list[tuple[str, dict[str, Any]]] = []
    for name, data in zip(lines[::2], lines[1::2], strict=True):
        body = json.loads(data.removeprefix("data: "))
        body.pop("sequence_number", None)
        assert name == f"event: {body['type']}"
        last = result[-1][1] if result else {"type": ""}
        if not (body["type"] == last["type"] and joins_delta(last, body)):
            result.append((name, body))
    return [list(event) for event in result]


def joins_delta(before: dict[str, Any], event: dict[str, Any]) -> bool:
    """Append the text of one delta to the one before it. Two events of one type that are no deltas stay two."""
    old, new = before.get("delta"), event.get("delta")
    if isinstance(old, str) and isinstance(new, str):
        before["delta"] = old + new
        return True
    if not isinstance(old, dict) or not isinstance(new, dict) or old.keys() != new.keys():
        return False
    (field,) = old.keys() - {"type"}
    old[field] += new[field]
    return True


def check_sequence_numbers(lines: list[str]) -> None:
    numbers = [body["sequence_number"] for body in map(json.loads, (line[6:] for line in lines[1::2])) if "sequence_number" in body]
    assert numbers == list(range(len(numbers)))


def joins(before: dict[str, Any], choice: dict[str, Any]) -> bool:
    """Append a piece to the one before it, if both are of one kind and neither carries anything else."""
    if before["finish_reason"] or choice["finish_reason"] or before["logprobs"] or choice["logprobs"]:
        return False
    if "text" in choice:
        before["text"] += choice["text"]
        return True
    old, new = before["delta"], choice["delta"]
    if "tool_calls" in old and "tool_calls" in new and new["tool_calls"][0]["id"] is None and old["tool_calls"][0]["id"] is None:
        old["tool_calls"][0]["function"]["arguments"] += new["tool_calls"][0]["function"]["arguments"]
        return True
    for kind in ("content", "reasoning_content"):
        if set(old) == set(new) and "role" not in new and old.get(kind) and new.get(kind):
            old[kind] += new[kind]
            return True
    return False


def neutral(value: Any, key: str = "") -> Any:
    """Without what differs between two runs of one server."""
    if isinstance(value, dict):
        if "cache_read_input_tokens" in value:  # the cached part of the prompt is made up, the sum is not
            value = {**value, "input_tokens": value["input_tokens"] + value["cache_read_input_tokens"], "cache_read_input_tokens": 0}
        return {name: neutral(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [neutral(inner, key) for inner in value]
    if key in ("id", "item_id", "call_id") and isinstance(value, str) and value != "toy":
        return (re.match(r"(call|msg|rs|fc|resp)_", value) or ["ID"])[0]
    if key in ("created", "created_at", "e2e_latency", "response_sent_to_client_ts", "cached_tokens", "device"):
        return 0
    return value


def differences(expected: Any, actual: Any, path: str) -> list[str]:
    """`path kind` for every place where two JSON values differ."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        found = [f"{path}/{key} missing" for key in expected.keys() - actual.keys()]
        found += [f"{path}/{key} extra" for key in actual.keys() - expected.keys()]
        for key in expected.keys() & actual.keys():
            found += differences(expected[key], actual[key], f"{path}/{key}")
        return found
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        return [d for i, pair in enumerate(zip(expected, actual, strict=True)) for d in differences(*pair, f"{path}/{i}")]
    return [] if expected == actual and type(expected) is type(actual) else [f"{path} is {actual!r}, not {expected!r}"]
