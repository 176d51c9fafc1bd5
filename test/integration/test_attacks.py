"""A real worker with pools far too small, treated badly: what must stay true is that nobody else notices.

Clients leave at random moments, reuse rids, flush, abort and stall; afterwards the books balance and the same seeded requests
have given the same tokens as on a quiet worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from harness.served import Served, serve, write_demo_checkpoint

SMALL = ["--max-total-tokens", "640", "--max-running-requests", "3", "--page-size", "8", "--chunked-prefill-size", "16"]
RANDOM = random.Random(7)
SHARED = [RANDOM.randrange(10, 4000) for _ in range(90)]
HEAD = b"POST /generate HTTP/1.1\r\nhost: worker\r\ncontent-type: application/json\r\n"


def request(index: int) -> dict[str, Any]:
    own = [10 + 13 * index + step for step in range((1, 7, 8, 9, 33)[index % 5])]
    return {
        "input_ids": SHARED[: 20 * (index % 4)] + own,
        "return_logprob": index % 2 == 0,
        "logprob_start_len": 0,
        "sampling_params": {
            "max_new_tokens": 3 + index % 6,
            "ignore_eos": True,
            "sampling_seed": (0, 2**63 - 1, -(2**63))[index % 3],
            "temperature": (0.0, 0.8)[index % 2],
            "frequency_penalty": (0.0, 0.4)[index % 2],
        },
    }


REQUESTS = [request(index) for index in range(8)]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("attacks")
    checkpoint = write_demo_checkpoint(directory / "checkpoint")
    with serve(checkpoint, directory / "log", *SMALL) as served:
        yield served


@pytest.fixture(autouse=True)
def nothing_is_left(worker: Served):
    """After every attack: nothing runs, every page and slot is accounted for, and no internal error was logged."""
    yield
    deadline = time.monotonic() + 20
    while worker.running_requests():
        assert time.monotonic() < deadline, "something still runs"
        time.sleep(0.05)
    assert httpx.post(worker.url + "/flush_cache?timeout=10", timeout=20).status_code == 200
    stats = httpx.get(worker.url + "/server_info", timeout=20).json()["internal_states"][0]["stats"]
    assert stats["books_balanced"] and stats["num_used_tokens"] == 0
    assert all(pool["free"] == pool["total"] for pool in stats["pools"].values())
    log = worker.log.read_text()
    assert "Traceback" not in log and " ERROR " not in log


def generate(worker: Served, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(worker.url + "/generate", json=body, timeout=60)


def tokens(reply: httpx.Response) -> Any:
    value = reply.json()
    info = value["meta_info"]
    # The first prompt logprob is null, and which prompt rows have one does not depend on the cache.
    return value["output_ids"], info.get("output_token_logprobs"), info.get("input_token_logprobs")


def stream_lines(worker: Served, body: dict[str, Any], at_most: int) -> None:
    with httpx.stream("POST", worker.url + "/generate", json={**body, "stream": True}, timeout=60) as reply:
        for number, _ in enumerate(reply.iter_lines()):
            if number >= at_most:
                return


def misbehave(worker: Served, seed: int, stop: threading.Event) -> None:
    """One bad client. Only what the server must not do raises."""
    draw = random.Random(seed)
    while not stop.is_set():
        ids = SHARED[: draw.randrange(1, 90)] + [draw.randrange(10, 4000) for _ in range(draw.randrange(9))]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": draw.choice([0, 1, 40]), "ignore_eos": True}}
        kind = draw.randrange(5)
        with contextlib.suppress(httpx.ReadTimeout):
            if kind == 0:
                stream_lines(worker, body, draw.randrange(6))
            elif kind == 1:
                httpx.post(worker.url + "/generate", json=body, timeout=httpx.Timeout(20, read=draw.random()))
            elif kind == 2:
                reply = generate(worker, {**body, "rid": f"same-{draw.randrange(2)}"})
                assert reply.status_code in (200, 400), reply.text
            elif kind == 3:
                assert httpx.post(worker.url + "/flush_cache", timeout=20).status_code in (200, 400)
            else:
                assert httpx.post(worker.url + "/abort_request", json={"rid": f"same-{draw.randrange(2)}"}, timeout=20).status_code == 200
        stop.wait(0.02)


def test_bad_company_changes_nobodys_tokens(worker):
    quiet = [tokens(generate(worker, body)) for body in REQUESTS]
    stop = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        bad = [pool.submit(misbehave, worker, seed, stop) for seed in range(4)]
        try:
            loud = list(pool.map(lambda body: tokens(generate(worker, body)), REQUESTS))
        finally:
            stop.set()
        for client in bad:
            client.result()
    assert loud == quiet


def test_client_that_leaves_during_its_body_is_no_error(worker):
    for sent in (b"", b"{", b'{"input_ids": [5'):
        with socket.create_connection(("127.0.0.1", httpx.URL(worker.url).port)) as leaver:
            leaver.sendall(HEAD + b"content-length: 100\r\n\r\n" + sent)
            time.sleep(0.05)
    assert generate(worker, REQUESTS[0]).status_code == 200


def test_client_that_does_not_read_its_stream_holds_up_nobody(worker):
    stalled = []
    body = json.dumps({"input_ids": [5, 6], "stream": True, "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}).encode()
    for _ in range(4):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", httpx.URL(worker.url).port))
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        stalled.append(client)
    assert generate(worker, REQUESTS[1]).status_code == 200
    for client in stalled:
        client.close()


def test_bans_that_leave_no_token_are_a_400(worker):
    params = {"max_new_tokens": 2, "min_new_tokens": 2, "stop_token_ids": list(range(4096))}
    reply = generate(worker, {"input_ids": [5, 6], "sampling_params": params})
    assert reply.status_code == 400 and "no token is left" in reply.json()["error"]["message"]


def test_hundred_connections_at_once(worker):
    def one(index: int) -> int:
        body = {"input_ids": [5 + index], "stream": index % 2 == 0, "sampling_params": {"max_new_tokens": 1}}
        return generate(worker, body).status_code

    with ThreadPoolExecutor(100) as pool:
        assert set(pool.map(one, range(100))) == {200}


def test_scheduler_that_was_frozen_goes_on_with_the_same_tokens(worker):
    expected = tokens(generate(worker, REQUESTS[3]))
    (scheduler,) = [child for child in psutil.Process(worker.process.pid).children() if "scheduler_child" in " ".join(child.cmdline())]
    with ThreadPoolExecutor(1) as pool:
        os.kill(scheduler.pid, signal.SIGSTOP)
        try:
            pending = pool.submit(generate, worker, REQUESTS[3])
            assert httpx.get(worker.url + "/health", timeout=5).status_code == 200
            assert httpx.get(worker.url + "/metrics", timeout=5).status_code == 200
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(worker.url + "/generate", json=REQUESTS[0], timeout=0.3)
        finally:
            os.kill(scheduler.pid, signal.SIGCONT)
        assert tokens(pending.result()) == expected


def test_whole_worker_sleeps_when_idle(worker):
    assert generate(worker, REQUESTS[0]).status_code == 200
    own = psutil.Process(worker.process.pid)
    processes = [own, *own.children(recursive=True)]
    time.sleep(0.5)
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    time.sleep(3.0)
    assert sum(sum(process.cpu_times()[:2]) for process in processes) - before < 0.15  # 5 % of a core


def test_context_beyond_the_model_is_refused_before_anything_is_loaded(worker, tmp_path):
    model = httpx.get(worker.url + "/model_info", timeout=5).json()
    says = "--context-length 999999 exceeds the model's max_position_embeddings 32768"
    flags = ("--context-length", "999999")
    with pytest.raises(AssertionError, match=says) as refused, serve(model["model_path"], tmp_path / "log", *flags):
        pass
    assert "loading weights" not in str(refused.value)
