"""The native routes over a real socket, with a scripted scheduler behind them."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.front import Worker, scripted_worker
from fakes.scripted_scheduler import forever_script, ids_script
from sglang.srt.managers.io_struct import FinishReason

HTTP = httpx.Client(timeout=20, trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
"""One client for all tests: making one takes longer than most requests."""
WIRE = json.loads((Path(__file__).parents[1] / "golden/wire/sglang_0.5.23.json").read_text())
CASES = {case["name"]: case for case in WIRE["cases"]}
NATIVE = [name for name, case in CASES.items() if re.match(r"/(generate|health|tokenize|detokenize|flush_cache)", case["request"]["path"])]

# Ours, and not in the recorded answers: the seed is reported, and metrics are on by default, which adds times.
EXTRA_INFO = {
    "sampling_seed",
    "request_received_ts",
    "api_server_dispatch_finish_ts",
    "request_finished_ts",
    "first_token_latency",
    "decode_throughput",
}
TIMES = {"e2e_latency", "response_sent_to_client_ts"}
MADE_UP = {"id", "cached_tokens", "cached_tokens_details"}


@pytest.fixture(scope="module")
def worker():
    with scripted_worker() as worker:
        yield worker


def generate(worker: Worker, **body: Any) -> httpx.Response:
    return HTTP.post(worker.url + "/generate", json=body)


def events(response: httpx.Response) -> list[Any]:
    """Data of all events; every line is one, and the last is [DONE]."""
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def wait_until(condition: Any, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


# -- the recorded answers of SGLang's own server -------------------------------------------------------------------------


def neutral(answer: Any) -> Any:
    """Without what differs from run to run, after checking that what we add is known."""
    if isinstance(answer, list):
        return [neutral(item) for item in answer]
    if not isinstance(answer, dict) or "meta_info" not in answer:
        return answer
    info = {key: value for key, value in answer["meta_info"].items() if key not in EXTRA_INFO | MADE_UP}
    return {**answer, "meta_info": {key: (0 if key in TIMES else value) for key, value in info.items()}}


@pytest.mark.parametrize("name", NATIVE)
def test_answer_is_that_of_sglang(worker, name):
    case = CASES[name]
    body = case["request"]["body"]
    if name == "generate_too_long":
        body = {"input_ids": [5] * 9000}
    answer = HTTP.request(case["request"]["method"], worker.url + case["request"]["path"], json=body)
    assert answer.status_code == case["status"]
    assert answer.headers.get("content-type", "").split(";")[0] in (case["content_type"], "text/plain")
    if case["status"] == 400:
        assert answer.json()["error"]["message"]
    elif "events" in case:
        expected = [json.loads(event.removeprefix("data: ")) for event in case["events"][:-1]]
        assert last_by_index(neutral(events(answer))) == last_by_index(neutral(expected))
    elif "json" in case:
        assert neutral(answer.json()) == neutral(case["json"])


def last_by_index(pieces: list[dict[str, Any]]) -> dict[Any, Any]:
    return {piece.get("index"): piece for piece in pieces}


# -- generate ------------------------------------------------------------------------------------------------------------


def test_stream_is_cumulative_and_agrees_with_the_whole_answer(worker):
    whole = generate(worker, text="[[long]]", sampling_params={"max_new_tokens": 12}).json()
    pieces = events(generate(worker, text="[[long]]", sampling_params={"max_new_tokens": 12}, stream=True))
    assert pieces[-1]["text"] == whole["text"] and pieces[-1]["output_ids"] == whole["output_ids"]
    for before, after in itertools.pairwise(pieces):
        assert after["text"].startswith(before["text"])
        assert after["meta_info"]["completion_tokens"] > before["meta_info"]["completion_tokens"]
    assert [piece["meta_info"]["finish_reason"] is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert ["e2e_latency" in piece["meta_info"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_incremental_stream_joins_to_the_whole_answer():
    with scripted_worker(args={"incremental_streaming_output": True}) as worker:
        whole = generate(worker, text="[[think]]", sampling_params={"max_new_tokens": 40}, return_logprob=True).json()
        pieces = events(generate(worker, text="[[think]]", sampling_params={"max_new_tokens": 40}, return_logprob=True, stream=True))
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        assert [token for piece in pieces for token in piece["output_ids"]] == whole["output_ids"]
        logprobs = [entry for piece in pieces for entry in piece["meta_info"]["output_token_logprobs"]]
        assert logprobs == whole["meta_info"]["output_token_logprobs"]


def test_several_prompts_with_n_are_numbered_prompt_by_prompt(worker):
    body = {"text": ["[[long]]", "hi"], "sampling_params": [{"n": 2, "max_new_tokens": 3}, {"n": 1, "max_new_tokens": 2}], "rid": "batch"}
    whole = generate(worker, **body).json()
    assert [answer["meta_info"]["id"] for answer in whole] == ["batch_0", "batch_1", "batch_2"]
    assert [answer["meta_info"]["completion_tokens"] for answer in whole] == [3, 3, 2]
    pieces = events(generate(worker, **body, stream=True))
    last = last_by_index(pieces)
    assert [last[index]["text"] for index in range(3)] == [answer["text"] for answer in whole]


def test_seed_is_reported_drawn_when_absent_and_different_per_choice(worker):
    def seeds(**sampling: Any) -> list[int]:
        answers = generate(worker, text="hi", sampling_params={"max_new_tokens": 1, **sampling}).json()
        return [answer["meta_info"]["sampling_seed"] for answer in (answers if isinstance(answers, list) else [answers])]

    assert seeds(sampling_seed=7) == [7]
    three = seeds(sampling_seed=7, n=3)
    assert three[0] == 7 and len(set(three)) == 3 and three == seeds(sampling_seed=7, n=3)
    assert seeds() != seeds()
    assert all(-(2**63) <= seed < 2**63 for seed in seeds(n=8))


def test_random_seed_makes_drawn_seeds_repeatable():
    def drawn() -> list[int]:
        with scripted_worker(args={"random_seed": 3}) as worker:
            return [
                generate(worker, text="hi", sampling_params={"max_new_tokens": 1}).json()["meta_info"]["sampling_seed"] for _ in range(3)
            ]

    assert drawn() == drawn()


def test_logprobs_have_text_only_when_asked(worker):
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True, "logprob_start_len": 0}
    info = generate(worker, **body, top_logprobs_num=2, token_ids_logprob=[9, 8]).json()["meta_info"]
    assert info["input_token_logprobs"] == [[None, 5, None], [-0.25, 6, None], [-0.25, 7, None]]
    assert info["input_top_logprobs"][0] is None and len(info["input_top_logprobs"]) == 3
    assert info["output_token_ids_logprobs"] == [[[-2.0, 9, None], [-2.0, 8, None]]] * 2
    assert info["output_token_logprobs_length"] == 2
    texts = generate(worker, **body, return_text_in_logprobs=True).json()["meta_info"]["output_token_logprobs"]
    assert [text for _, _, text in texts] == ["H", "ell"]


def test_characters_of_several_tokens_are_never_split_in_a_stream(worker):
    pieces = events(generate(worker, text="[[think]]", sampling_params={"max_new_tokens": 40}, stream=True))
    assert all("\ufffd" not in piece["text"] for piece in pieces)
    assert pieces[-1]["text"].endswith("😀.")


def test_no_part_of_a_stop_string_reaches_the_client(worker):
    tokenizer = worker.manager.tokenizer
    with scripted_worker(ids_script(tokenizer.encode("abcENDdef"))) as scripted:
        for stop in (["END"], ["END", "NEVER"]):
            pieces = events(generate(scripted, text="x", sampling_params={"stop": stop, "max_new_tokens": 50}, stream=True))
            assert all("E" not in piece["text"] for piece in pieces)
            assert pieces[-1]["text"] == "abc"
            assert pieces[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}
        kept = {"stop": ["END"], "max_new_tokens": 50, "no_stop_trim": True}
        assert generate(scripted, text="x", sampling_params=kept).json()["text"] == "abcEND"


# -- limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
def test_prompt_plus_max_tokens_over_the_context_is_refused_with_all_numbers(is_stream):
    with scripted_worker(forever_script(5), context_length=2048) as worker:
        refused = generate(worker, input_ids=[5] * 1500, sampling_params={"max_new_tokens": 600, "ignore_eos": True}, stream=is_stream)
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert all(number in message for number in ("2048", "2100", "1500", "600"))
        answer = generate(worker, input_ids=[5] * 2000, sampling_params={"ignore_eos": True}).json()
        assert answer["meta_info"]["completion_tokens"] == 48  # the default of 128 gives way to the room left


def test_allow_auto_truncate_clips_to_the_room_left():
    with scripted_worker(forever_script(5), context_length=2048, args={"allow_auto_truncate": True}) as worker:
        answer = generate(worker, input_ids=[5] * 2000, sampling_params={"max_new_tokens": 600}).json()
        assert answer["meta_info"]["completion_tokens"] == 48


def test_pool_smaller_than_the_context_limits_a_request():
    with scripted_worker(max_request_tokens=100) as worker:
        refused = generate(worker, input_ids=[5] * 90, sampling_params={"max_new_tokens": 20})
        assert refused.status_code == 400
        assert all(number in refused.json()["error"]["message"] for number in ("100", "110", "90", "20"))


# -- bad input -----------------------------------------------------------------------------------------------------------

BAD_BODIES = {
    "unfinished json": b'{"model":',
    "not an object": b"[1]",
    "nan": b'{"text": "a", "sampling_params": {"temperature": NaN}}',
    "deep nesting": b"[" * 100_000,
    "five megabytes of garbage": b"\x00\xff" * 2_500_000,
    "invalid utf-8": b'{"text": "\xff"}',
    "lone surrogate": b'{"text": "\\ud800"}',
}
BAD_FIELDS = [
    {"text": "a", "input_ids": [1]},
    {},
    {"text": 3},
    {"text": []},
    {"text": ""},
    {"input_ids": []},
    {"input_ids": [[]]},
    {"input_ids": [-1]},
    {"input_ids": [4096]},
    {"input_ids": [10**30]},
    {"input_ids": [1.5]},
    {"input_ids": [True]},
    {"input_ids": "12"},
    {"text": "a", "stream": "yes"},
    {"text": "a", "rid": 5},
    {"text": ["a", "b"], "rid": ["x", "x"]},
    {"text": ["a", "b"], "sampling_params": [{}]},
    {"text": "a", "return_logprob": "x"},
    {"text": "a", "logprob_start_len": 99},
    {"text": "a", "top_logprobs_num": -1},
    {"text": "a", "top_logprobs_num": 10**9},
    {"text": "a", "token_ids_logprob": [4096]},
    {"text": "a", "priority": 10**40},
    {"text": "a", "timeout": -1},
    {"text": "a", "image_data": "x"},
    {"text": "a", "swa_restore": "x" * 5000},
    *(
        {"text": "a", "sampling_params": bad}
        for bad in ({"max_new_tokens": "ten"}, {"temperature": -1}, {"top_p": 0}, {"foo": 1}, 7, {"n": 0})
    ),
]


def check_bad_reply(reply: httpx.Response) -> None:
    assert reply.status_code in (400, 422), reply.text
    assert isinstance(reply.json()["error"]["message"], str)
    assert len(reply.content) < 2048
    assert "Traceback" not in reply.text and "/" + "sglang" not in reply.text and ".py" not in reply.text


@pytest.mark.parametrize("name", BAD_BODIES)
def test_malformed_bodies_get_a_short_json_error(worker, name):
    headers = {"content-type": "application/json"}
    check_bad_reply(HTTP.post(worker.url + "/generate", content=BAD_BODIES[name], headers=headers))
    assert generate(worker, text="hi").status_code == 200


@pytest.mark.parametrize("body", BAD_FIELDS, ids=lambda body: str(body)[:60])
@pytest.mark.parametrize("is_stream", [False, True])
def test_bad_fields_get_a_short_json_error(worker, body, is_stream):
    check_bad_reply(generate(worker, **{"stream": is_stream, **body}))


def test_wrong_content_type_is_refused(worker):
    check_bad_reply(HTTP.post(worker.url + "/generate", content=b'{"text": "a"}', headers={"content-type": "text/plain"}))


def test_body_limit_holds_with_and_without_a_declared_length():
    with scripted_worker(args={"max_body_bytes": 1000}) as worker:
        for content in (b'{"text": "' + b"a" * 2000, iter([b'{"text": "', b"a" * 2000])):
            reply = HTTP.post(worker.url + "/generate", content=content, headers={"content-type": "application/json"})
            assert reply.status_code == 413 and reply.json()["error"]["message"]


def test_root_answers_get_and_head(worker):
    assert HTTP.get(worker.url + "/").json()["model"] == "toy"
    assert HTTP.head(worker.url + "/").status_code == 200
    assert "/generate" in HTTP.get(worker.url + "/openapi.json").json()["paths"]


def test_unknown_path_and_method(worker):
    reply = HTTP.get(worker.url + "/nothing/here")
    assert reply.status_code == 404 and reply.json() == {"detail": "Not Found"}
    assert HTTP.get(worker.url + "/generate").status_code == 405


# -- ends --------------------------------------------------------------------------------------------------------------


def test_abort_request_ends_with_an_abort_reason_and_the_tokens_it_had():
    with scripted_worker(forever_script(5), delay_s=0.002) as worker:
        replies: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: replies.append(generate(worker, text="a", rid="me", sampling_params={"max_new_tokens": 5000}))
        )
        thread.start()
        wait_until(lambda: worker.scheduler.num_running == 1)
        time.sleep(0.1)
        assert HTTP.post(worker.url + "/abort_request", json={"rid": "other"}).status_code == 200
        reply = HTTP.post(worker.url + "/abort_request", json={"rid": "me"})
        assert reply.status_code == 200 and reply.content == b""
        thread.join(5)
        answer = replies[0].json()
        assert replies[0].status_code == 200
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] > 0


def test_finished_requests_send_no_abort_and_only_real_aborts_count():
    with scripted_worker() as worker:
        for number in range(20):
            generate(worker, text="hi", stream=bool(number % 2))
        assert worker.scheduler.aborts() == []
        assert metric(worker, "sglang:num_aborted_requests_total") == 0
        assert metric(worker, "sglang:num_requests_total") == 20


@pytest.mark.parametrize("is_stream", [False, True])
def test_client_that_goes_away_is_aborted(is_stream):
    with scripted_worker(forever_script(5), delay_s=0.002) as worker:
        body = json.dumps({"text": "a", "stream": is_stream, "sampling_params": {"max_new_tokens": 6000, "ignore_eos": True}})
        with socket.create_connection(("127.0.0.1", worker.port)) as client:
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall((head + body).encode())
            wait_until(lambda: worker.scheduler.num_running == 1)
            if is_stream:
                assert b"200 OK" in client.recv(100)
        wait_until(lambda: worker.scheduler.num_running == 0, 2.0)
        assert len(worker.scheduler.aborts()) == 1
        wait_until(lambda: worker.manager.num_sequences == 0)
        assert metric(worker, "sglang:num_aborted_requests_total") == 1


def test_running_rid_is_refused_and_may_be_used_again_afterwards():
    with scripted_worker(forever_script(5), delay_s=0.002) as worker:
        with HTTP.stream(
            "POST", worker.url + "/generate", json={"text": "a", "rid": "r", "stream": True, "sampling_params": {"max_new_tokens": 6000}}
        ) as first:
            lines = first.iter_lines()  # kept: a closed iterator closes the connection
            next(lines)
            again = generate(worker, text="a", rid="r", sampling_params={"max_new_tokens": 2})
            assert again.status_code == 400 and "'r'" in again.json()["error"]["message"]
        assert generate(worker, text="a", rid="r", sampling_params={"max_new_tokens": 2}).status_code == 200


def test_error_before_the_first_token_is_a_status_and_after_it_an_event():
    with scripted_worker(forever_script(5), delay_s=0.005) as worker:
        worker.scheduler.refuse_with = FinishReason(type="abort", message="queue is full", status_code=503)
        for is_stream in (False, True):
            reply = generate(worker, text="a", stream=is_stream)
            assert reply.status_code == 503 and reply.headers["retry-after"] and reply.json() == {"error": {"message": "queue is full"}}
        worker.scheduler.refuse_with = None
        with HTTP.stream(
            "POST", worker.url + "/generate", json={"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 6000}}
        ) as reply:
            lines = (line for line in reply.iter_lines() if line)
            assert "output_ids" in next(lines)
            worker.scheduler.stop()
            worker.call(worker.manager.fail, "the scheduler process was killed")
            rest = list(lines)
        assert rest[-1] == "data: [DONE]" and "message" in json.loads(rest[-2].removeprefix("data: "))["error"]


def test_engine_failure_ends_all_requests_and_refuses_new_ones():
    with scripted_worker(forever_script(5), delay_s=0.005) as worker:
        replies: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: replies.append(generate(worker, text="a", sampling_params={"max_new_tokens": 6000})))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: worker.scheduler.num_running == 3)
        assert HTTP.get(worker.url + "/health").status_code == 200
        worker.scheduler.stop()
        worker.call(worker.manager.fail, "the scheduler process was killed")
        for thread in threads:
            thread.join(5)
        assert [reply.status_code for reply in replies] == [500] * 3
        assert generate(worker, text="a").status_code == 503
        assert HTTP.get(worker.url + "/health").status_code == 503


# -- state -------------------------------------------------------------------------------------------------------------


def test_probes_while_loading_and_while_draining():
    with scripted_worker(is_ready=False) as worker:
        statuses = {path: HTTP.get(worker.url + path).status_code for path in ("/health", "/ready", "/health_generate", "/ping")}
        assert statuses == {"/health": 503, "/ready": 503, "/health_generate": 503, "/ping": 200}
        refused = generate(worker, text="a")
        assert refused.status_code == 503 and refused.headers["retry-after"]
    with scripted_worker() as worker:
        assert [HTTP.get(worker.url + path).status_code for path in ("/health", "/ready", "/health_generate")] == [200] * 3
        assert [len(request.input_ids) for request in worker.scheduler.generate_requests()] == [1]
        worker.call(worker.manager.begin_drain)
        assert [HTTP.get(worker.url + path).status_code for path in ("/health", "/ready", "/ping")] == [503, 503, 200]
        assert generate(worker, text="a").status_code == 503


def test_info_routes(worker):
    for path in ("/model_info", "/get_model_info"):
        info = HTTP.get(worker.url + path).json()
        assert info["model_path"] and info["tokenizer_path"] and info["is_generation"] is True and info["served_model_name"] == "toy"
    for path in ("/server_info", "/get_server_info"):
        info = HTTP.get(worker.url + path).json()
        assert info["port"] == 30000 and info["internal_states"][0]["scripted"] is True and info["version"]


def test_secrets_are_not_in_server_info():
    with scripted_worker(args={"api_key": "open sesame", "admin_api_key": "hush"}) as worker:
        text = HTTP.get(worker.url + "/server_info", headers={"authorization": "Bearer open sesame"}).text
        assert "sesame" not in text and "hush" not in text


def test_flush_cache_answers_in_text_and_refuses_while_requests_run():
    with scripted_worker(forever_script(5), delay_s=0.005) as worker:
        for method in ("GET", "POST"):
            reply = HTTP.request(method, worker.url + "/flush_cache?timeout=1")
            assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
        check_bad_reply(HTTP.post(worker.url + "/flush_cache?timeout=soon"))
        with HTTP.stream(
            "POST", worker.url + "/generate", json={"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 6000}}
        ) as running:
            lines = running.iter_lines()  # kept: a closed iterator closes the connection
            next(lines)
            assert HTTP.post(worker.url + "/flush_cache").status_code == 400


def test_keys():
    with scripted_worker(args={"api_key": "one", "admin_api_key": "two"}) as worker:
        for path in ("/health", "/ready", "/ping", "/metrics"):
            assert HTTP.get(worker.url + path).status_code == 200
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 1}}

        def status(path: str, **headers: str) -> int:
            return HTTP.post(worker.url + path, json=body, headers=headers).status_code

        assert status("/generate") == 401
        assert status("/generate", authorization="Bearer two") == 401
        assert status("/generate", authorization="Bearer one") == status("/generate", **{"x-api-key": "one"}) == 200
        assert status("/generate", authorization="Bearer") == status("/generate", authorization="one") == 401
        assert status("/abort_request", authorization="Bearer one") == 401
        assert status("/abort_request", authorization="Bearer two") == 200
        assert HTTP.post(worker.url + "/generate", json=body).json()["error"]["message"] == "Unauthorized"


# -- metrics -----------------------------------------------------------------------------------------------------------


def metric(worker: Worker, name: str) -> float:
    """Sum over the samples of a name."""
    text = HTTP.get(worker.url + "/metrics").text
    found = re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.M)
    assert found, f"{name} is not in /metrics"
    return sum(map(float, found))


def test_latencies_are_observed_for_streams_and_whole_replies_alike():
    with scripted_worker(forever_script(5), cached_tokens=3) as worker:
        sampling = {"max_new_tokens": 20, "ignore_eos": True}
        for is_stream in (False, False, False, True):
            assert generate(worker, input_ids=[5] * 10, sampling_params=sampling, stream=is_stream).status_code == 200
        assert HTTP.get(worker.url + "/health_generate").status_code == 200  # not a user's request: not counted
        assert metric(worker, "sglang:time_to_first_token_seconds_count") == 4
        assert metric(worker, "sglang:inter_token_latency_seconds_count") == 4 * 19
        assert metric(worker, "sglang:e2e_request_latency_seconds_count") == 4
        assert metric(worker, "sglang:num_requests_total") == 4
        assert metric(worker, "sglang:prompt_tokens_total") == 40
        assert metric(worker, "sglang:generation_tokens_total") == 80
        assert metric(worker, "sglang:cached_tokens_total") == 12
        assert metric(worker, "sglang:num_running_reqs") == 0
        text = HTTP.get(worker.url + "/metrics").text
        assert 'engine_type="unified"' in text and 'model_name="toy"' in text
        assert re.search(r'time_to_first_token_seconds_count\{engine_type="unified",is_streaming="True",model_name="toy"\} 1\.0', text)
        assert re.search(r'http_responses_total\{endpoint="/generate",[^}]*status_code="200"\} 4\.0', text)


def test_paths_of_strangers_do_not_become_labels(worker):
    HTTP.get(worker.url + "/attack/123")
    assert "attack" not in HTTP.get(worker.url + "/metrics").text


def test_metrics_can_be_switched_off():
    with scripted_worker(args={"enable_metrics": False}) as worker:
        assert HTTP.get(worker.url + "/metrics").status_code == 404
        assert "queue_time" not in generate(worker, text="hi").json()["meta_info"]


# -- text and ids --------------------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize(worker):
    one = HTTP.post(worker.url + "/tokenize", json={"prompt": "hello"}).json()
    assert one == {"tokens": worker.manager.tokenizer.encode("hello"), "count": len(one["tokens"]), "max_model_len": 8192}
    two = HTTP.post(worker.url + "/v1/tokenize", json={"prompt": ["hello", "you"]}).json()
    assert two["tokens"][0] == one["tokens"] and two["count"] == [len(ids) for ids in two["tokens"]]
    assert HTTP.post(worker.url + "/detokenize", json={"tokens": one["tokens"]}).json() == {"text": "hello"}
    for bad in ({}, {"prompt": 5}, {"prompt": [1]}):
        check_bad_reply(HTTP.post(worker.url + "/tokenize", json=bad))
    for bad in ({}, {"tokens": [-1]}, {"tokens": [4096]}, {"tokens": "a"}):
        check_bad_reply(HTTP.post(worker.url + "/detokenize", json=bad))
