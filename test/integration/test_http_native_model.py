"""The whole worker with a model: HTTP process, scheduler process, a tiny checkpoint. Known faults through the front door."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import sglang

TEST = Path(__file__).parents[1]
CHECKPOINT = TEST / "golden/mini-s1/checkpoint"
CONTEXT = 1024
HTTP = httpx.Client(timeout=60, trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TEST.parent / "python"), "OMP_NUM_THREADS": "1"}
PROMPT = [5, 77, 301, 12, 9, 460, 33, 8]
ROUTES = ["/generate", "/v1/completions"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serve(*flags: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A worker that is ready: its address and its process."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.cli.main", "serve", str(CHECKPOINT), "--port", str(port), "--context-length", str(CONTEXT)]
    command += ["--max-total-tokens", "4096", "--max-running-requests", "8", "--page-size", "16", "--enable-cache-report", *flags]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 90
        while status(url + "/ready") != 200:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline, "the worker did not become ready"
            time.sleep(0.05)
        yield url, process
    finally:
        process.kill()
        process.communicate()


def status(address: str) -> int | None:
    try:
        return HTTP.get(address).status_code
    except httpx.TransportError:
        return None


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve() as (url, _):
        yield url
        assert metric(url, "sglang:num_running_reqs") == 0
        assert metric(url, "sglang:books_balanced") == 1


def body_for(route: str, ids: list[int], **sampling: Any) -> dict[str, Any]:
    """The same wish in the words of each route."""
    if route == "/generate":
        return {"input_ids": ids, "sampling_params": sampling}
    names = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
    return {"prompt": ids, **{names.get(name, name): value for name, value in sampling.items()}}


def generate(url: str, ids: list[int] | None = None, **sampling: Any) -> dict[str, Any]:
    reply = HTTP.post(url + "/generate", json=body_for("/generate", ids or PROMPT, **sampling))
    assert reply.status_code == 200, reply.text
    return reply.json()


def metric(url: str, name: str) -> float:
    """Sum over the samples of a name."""
    found = re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", HTTP.get(url + "/metrics").text, re.M)
    assert found, f"{name} is not in /metrics"
    return sum(map(float, found))


def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_stream_whole_reply_and_batch_give_the_same_tokens(url):
    sampling = {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.95, "sampling_seed": 11, "ignore_eos": True}
    whole = generate(url, **sampling)
    with HTTP.stream("POST", url + "/generate", json={**body_for("/generate", PROMPT, **sampling), "stream": True}) as reply:
        pieces = [json.loads(line.removeprefix("data: ")) for line in reply.iter_lines() if line and "[DONE]" not in line]
    batch = HTTP.post(url + "/generate", json={"input_ids": [PROMPT, [9] * 40, PROMPT], "sampling_params": sampling}).json()
    for answer in (pieces[-1], batch[0], batch[2]):
        assert (answer["output_ids"], answer["text"]) == (whole["output_ids"], whole["text"])
    assert len(pieces) > 6  # it did come in pieces


def test_answer_can_be_reproduced_from_the_reported_seed(url):
    first = generate(url, max_new_tokens=8, ignore_eos=True)
    again = generate(url, max_new_tokens=8, ignore_eos=True, sampling_seed=first["meta_info"]["sampling_seed"])
    assert again["output_ids"] == first["output_ids"]


def test_seed_decides_on_every_route_and_routes_agree(url):
    def text(route: str, seed: int) -> str:
        body = body_for(route, PROMPT, max_new_tokens=10, temperature=1.0, top_p=1.0, sampling_seed=seed, ignore_eos=True)
        answer = HTTP.post(url + route, json=body).json()
        return answer["text"] if route == "/generate" else answer["choices"][0]["text"]

    for seed in (0, 1, 2):
        assert len({text(route, seed) for route in ROUTES for _ in range(2)}) == 1
    assert len({text("/generate", seed) for seed in (0, 1, 2)}) == 3


def test_choices_of_one_request_differ_and_the_first_is_that_of_n_1(url):
    sampling = {"max_new_tokens": 8, "sampling_seed": 5, "ignore_eos": True}
    one = generate(url, **sampling)
    three = generate(url, n=3, **sampling)
    assert three[0]["output_ids"] == one["output_ids"]
    assert len({tuple(answer["output_ids"]) for answer in three}) == 3


def test_penalties_change_the_output(url):
    x, y = 40, 41

    def ids(bias: dict[str, float], **penalties: float) -> list[int]:
        return generate(url, max_new_tokens=12, temperature=0, ignore_eos=True, logit_bias=bias, **penalties)["output_ids"]

    far = {str(x): 1000.0, str(y): 996.0}
    assert set(ids(far)) == {x}
    assert y in ids(far, frequency_penalty=2.0)[:12]
    near = {str(x): 1000.0, str(y): 999.0}
    gap = generate(url, max_new_tokens=1, temperature=0, logit_bias=near)["output_ids"]
    assert gap == [x]
    assert y in ids(near, presence_penalty=2.0)[:12]


def test_stop_string_stop_id_and_length_end_as_they_say(url):
    full = generate(url, max_new_tokens=24, temperature=0, ignore_eos=True)
    assert full["meta_info"]["finish_reason"] == {"type": "length", "length": 24}
    stop_id = full["output_ids"][10]
    first = full["output_ids"].index(stop_id)
    by_id = generate(url, max_new_tokens=24, temperature=0, ignore_eos=True, stop_token_ids=[stop_id])
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    assert by_id["output_ids"] == full["output_ids"][: first + 1]
    piece = next(piece for piece in re.findall(r"[ -~]{2}", full["text"]))
    by_text = generate(url, max_new_tokens=24, temperature=0, ignore_eos=True, stop=[piece])
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": piece}
    assert by_text["text"] == full["text"][: full["text"].index(piece)]


def test_input_and_output_logprobs(url):
    body = {**body_for("/generate", PROMPT, max_new_tokens=4, temperature=0, ignore_eos=True), "return_logprob": True}
    info = HTTP.post(url + "/generate", json={**body, "logprob_start_len": 0, "top_logprobs_num": 2}).json()["meta_info"]
    assert [entry[1] for entry in info["input_token_logprobs"]] == PROMPT
    assert info["input_token_logprobs"][0][0] is None
    assert all(entry[0] <= 0 for entry in info["input_token_logprobs"][1:])
    for chosen, top in zip(info["output_token_logprobs"], info["output_top_logprobs"], strict=True):
        assert chosen == top[0] and len(top) == 2 and top[0][0] >= top[1][0]  # greedy takes the best


def test_max_new_tokens_0_only_fills_the_cache(url):
    prompt = [400 + n % 90 for n in range(100)]
    empty = generate(url, prompt, max_new_tokens=0)
    assert empty["output_ids"] == [] and empty["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert empty["meta_info"]["completion_tokens"] == 0
    assert generate(url, prompt, max_new_tokens=1)["meta_info"]["cached_tokens"] > 0


def test_cached_tokens_are_reported_alike_on_both_routes_and_in_the_hit_rate(url):
    prompt = [200 + n % 250 for n in range(400)]
    before = metric(url, "sglang:cache_hit_rate")
    assert generate(url, prompt, max_new_tokens=2)["meta_info"]["cached_tokens"] == 0
    native = generate(url, prompt, max_new_tokens=2)["meta_info"]["cached_tokens"]
    usage = HTTP.post(url + "/v1/completions", json=body_for("/v1/completions", prompt, max_new_tokens=2)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == native > 0
    assert metric(url, "sglang:cache_hit_rate") > before


def test_flush_cache_forgets(url):
    prompt = [300 + n % 150 for n in range(200)]
    generate(url, prompt, max_new_tokens=2)
    assert HTTP.post(url + "/flush_cache?timeout=5").status_code == 200
    assert generate(url, prompt, max_new_tokens=2)["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("route", ROUTES)
def test_prompt_plus_max_tokens_over_the_context_is_refused_with_all_numbers(url, route):
    reply = HTTP.post(url + route, json=body_for(route, [5] * 700, max_new_tokens=400))
    assert reply.status_code == 400
    assert all(number in reply.json()["error"]["message"] for number in ("1024", "1100", "700", "400"))


def test_room_left_is_used_when_there_is_no_limit(url):
    answer = generate(url, [5] * 1015, ignore_eos=True)
    assert answer["meta_info"]["completion_tokens"] == 9


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_client_that_goes_away_frees_its_memory(url, route, is_stream):
    wait_until(lambda: metric(url, "sglang:num_used_tokens") == 0)
    aborted = metric(url, "sglang:num_aborted_requests_total")
    body = json.dumps({**body_for(route, PROMPT, max_new_tokens=1000, ignore_eos=True), "stream": is_stream})
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        if is_stream:
            assert b"200 OK" in client.recv(100)
        wait_until(lambda: HTTP.get(url + "/server_info").json()["internal_states"][0]["stats"]["num_running_reqs"] == 1)
    wait_until(lambda: metric(url, "sglang:num_aborted_requests_total") == aborted + 1, 2.0)
    wait_until(lambda: metric(url, "sglang:num_used_tokens") == metric(url, "sglang:num_running_reqs") == 0, 2.0)


def test_ordinary_ends_are_not_aborts_and_an_abort_keeps_its_tokens(url):
    before = metric(url, "sglang:num_aborted_requests_total")
    for _ in range(5):
        with HTTP.stream("POST", url + "/generate", json={**body_for("/generate", PROMPT, max_new_tokens=3), "stream": True}) as reply:
            assert list(reply.iter_lines())[-2] == "data: [DONE]"
    assert metric(url, "sglang:num_aborted_requests_total") == before
    with HTTP.stream(
        "POST",
        url + "/generate",
        json={**body_for("/generate", PROMPT, max_new_tokens=1000, ignore_eos=True), "stream": True, "rid": "victim"},
    ) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        HTTP.post(url + "/abort_request", json={"rid": "victim"})
        last = json.loads(list(lines)[-2].removeprefix("data: "))
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(last["output_ids"]) == last["meta_info"]["completion_tokens"] > 0
    assert metric(url, "sglang:num_aborted_requests_total") == before + 1


def test_latency_counts_cover_streams_and_whole_replies(url):
    names = ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count", "num_requests_total")
    before = [metric(url, f"sglang:{name}") for name in names]
    for is_stream in (False, False, False, True):
        HTTP.post(url + "/generate", json={**body_for("/generate", PROMPT, max_new_tokens=20, ignore_eos=True), "stream": is_stream})
    after = [metric(url, f"sglang:{name}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 4 * 19, 4]


def test_request_deadline_is_a_504(url):
    body = {**body_for("/generate", PROMPT, max_new_tokens=1000, ignore_eos=True), "timeout": 0.05}
    reply = HTTP.post(url + "/generate", json=body)
    assert reply.status_code == 504 and reply.json()["error"]["message"]


def test_more_prompts_than_slots_are_all_answered(url):
    prompts = [[number % 500 + 3, 7, 9] * 5 for number in range(20)]
    answers = HTTP.post(
        url + "/generate", json={"input_ids": prompts, "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}}
    ).json()
    assert [len(answer["output_ids"]) for answer in answers] == [3] * 20
    assert generate(url, prompts[17], max_new_tokens=3, temperature=0, ignore_eos=True)["output_ids"] == answers[17]["output_ids"]


def test_bad_input_harms_nobody(url):
    for body in (
        {"input_ids": [-1]},
        {"input_ids": [512]},
        {"text": "a", "input_ids": [1]},
        {"text": "a", "sampling_params": {"temperature": -1}},
    ):
        assert HTTP.post(url + "/generate", json=body).status_code == 400
    assert generate(url, max_new_tokens=1)["meta_info"]["completion_tokens"] == 1


def test_info_names_the_scheduler_state(url):
    info = HTTP.get(url + "/server_info").json()
    assert info["context_length"] == CONTEXT and info["max_total_num_tokens"] == 4096
    assert info["internal_states"][0]["memory"]
    model = HTTP.get(url + "/model_info").json()
    assert model["architectures"] == ["DeepseekV41ForCausalLM"] and Path(model["model_path"]).is_dir()


def test_health_generate_makes_a_token_without_counting_it(url):
    before = metric(url, "sglang:num_requests_total")
    assert HTTP.get(url + "/health_generate").status_code == 200
    assert metric(url, "sglang:num_requests_total") == before


def test_full_queue_is_a_503_with_retry_after():
    with serve("--max-running-requests", "1", "--max-queued-requests", "0") as (url, process):
        body = {**body_for("/generate", PROMPT, max_new_tokens=1000, ignore_eos=True), "stream": True}
        with HTTP.stream("POST", url + "/generate", json=body) as running:
            lines = running.iter_lines()
            next(lines)
            refused = HTTP.post(url + "/generate", json=body_for("/generate", PROMPT, max_new_tokens=1))
            assert refused.status_code == 503 and refused.headers["retry-after"]
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 0 and "Traceback" not in stderr, stderr


def scheduler_pid(process: subprocess.Popen) -> int:
    (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(pid)


def is_running(pid: int) -> bool:
    """False also for one that has ended but was not collected."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.mark.parametrize("victim", ["http", "scheduler"])
def test_no_process_outlives_the_other(victim):
    with serve() as (_, process):
        scheduler = scheduler_pid(process)
        os.kill(process.pid if victim == "http" else scheduler, signal.SIGKILL)
        wait_until(lambda: not is_running(scheduler) and not is_running(process.pid))
        if victim == "scheduler":
            assert process.wait() == 1


def test_offline_engine_gives_the_tokens_of_the_server(url):
    sampling = {"max_new_tokens": 6, "temperature": 0.8, "sampling_seed": 3, "ignore_eos": True}
    with sglang.Engine(
        model_path=str(CHECKPOINT), context_length=CONTEXT, max_total_tokens=2048, max_running_requests=2, page_size=16
    ) as engine:
        offline = engine.generate(input_ids=PROMPT, sampling_params=sampling)
        pieces = list(engine.generate(input_ids=PROMPT, sampling_params=sampling, stream=True))
    assert offline["output_ids"] == pieces[-1]["output_ids"] == generate(url, **sampling)["output_ids"]
