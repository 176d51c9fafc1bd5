"""The worker as a process: start, ports, signals, deaths. The scheduler is the scripted one, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

TEST = Path(__file__).parents[1]
CHECKPOINT = TEST / "golden/mini-s1/checkpoint"
HTTP = httpx.Client(timeout=20, trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
ENVIRONMENT = {**os.environ, "PYTHONPATH": ":".join([str(TEST.parent / "python"), str(TEST)])}

RUN = """
import sys
from sglang.cli.main import run_reporting_errors
from sglang.srt.entrypoints.http_server import run_server
from sglang.srt.server_args import from_cli
sys.exit(run_reporting_errors(lambda argv: run_server(from_cli(argv), scheduler_command={command!r}), sys.argv[1:]))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scripted_command(*options: str) -> list[str]:
    return [sys.executable, str(TEST / "fakes/scripted_scheduler.py"), "{in_addr}", "{out_addr}", str(CHECKPOINT), *options]


class Worker:
    """A worker process and its address."""

    def __init__(self, process: subprocess.Popen, port: int):
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def status(self, path: str) -> int | None:
        """None while nothing listens."""
        try:
            return HTTP.get(self.url + path).status_code
        except httpx.TransportError:
            return None

    def wait_for(self, path: str, status: int | None, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.status(path) != status:
            assert time.monotonic() < deadline, f"{path} did not become {status}"
            assert self.process.poll() is None or status is None, self.process.stderr.read()
            time.sleep(0.02)

    @property
    def scheduler_pid(self) -> int:
        (pid,) = children_of(self.process.pid)
        return pid

    def end(self, timeout_s: float = 15.0) -> tuple[int, str]:
        """Exit code and stderr, once it ends by itself."""
        _, stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, stderr


def children_of(pid: int) -> list[int]:
    """Pids of the processes that a process's main thread started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def worker(*options: str, flags: tuple[str, ...] = (), wait: bool = True) -> Iterator[Worker]:
    port = free_port()
    command = [sys.executable, "-c", RUN.format(command=scripted_command(*options)), str(CHECKPOINT), "--port", str(port), *flags]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    running = Worker(process, port)
    try:
        if wait:
            running.wait_for("/ready", 200)
        yield running
    finally:
        children = children_of(process.pid) if process.poll() is None else []
        process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.communicate()


def generate(url: str, **sampling: Any) -> httpx.Response:
    return HTTP.post(url + "/generate", json={"input_ids": [5, 6], "sampling_params": sampling})


def in_background(function: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """A list that will hold the result, or the exception."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function(*args, **kwargs))
        except Exception as error:
            results.append(error)

    threading.Thread(target=run, daemon=True).start()
    return results


def wait_for_result(results: list[Any], timeout_s: float = 10.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not results:
        assert time.monotonic() < deadline, "no result"
        time.sleep(0.01)
    return results[0]


def test_probes_answer_while_the_model_loads():
    with worker("--ready-after", "1.5", wait=False) as loading:
        loading.wait_for("/health", 503)
        assert loading.status("/ready") == 503 and loading.status("/ping") == 200
        assert generate(loading.url).status_code == 503
        loading.wait_for("/ready", 200)
        assert loading.status("/health") == loading.status("/health_generate") == 200
        assert generate(loading.url, max_new_tokens=2).json()["meta_info"]["completion_tokens"] == 2


def test_sigterm_lets_running_requests_finish_and_exits_with_0():
    with worker("--delay", "0.02", "--forever", "5") as draining:
        running = in_background(generate, draining.url, max_new_tokens=50, ignore_eos=True)
        time.sleep(0.3)
        draining.process.send_signal(signal.SIGTERM)
        draining.wait_for("/ready", 503)
        assert draining.status("/health") == 503
        refused = generate(draining.url, max_new_tokens=1)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert wait_for_result(running).json()["meta_info"]["finish_reason"] == {"type": "length", "length": 50}
        code, stderr = draining.end()
        assert code == 0
        assert "Traceback" not in stderr


def test_drain_ends_requests_that_take_too_long():
    with worker("--delay", "0.02", "--forever", "5", flags=("--drain-timeout", "0.3")) as draining:
        running = in_background(generate, draining.url, max_new_tokens=2000, ignore_eos=True)
        time.sleep(0.3)
        draining.process.send_signal(signal.SIGTERM)
        assert draining.end()[0] == 0
        assert wait_for_result(running).json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_second_signal_does_not_wait():
    with worker("--delay", "0.02", "--forever", "5", flags=("--drain-timeout", "60")) as draining:
        in_background(generate, draining.url, max_new_tokens=2000, ignore_eos=True)
        time.sleep(0.3)
        draining.process.send_signal(signal.SIGINT)
        draining.wait_for("/ready", 503)
        draining.process.send_signal(signal.SIGINT)
        assert draining.end()[0] == 0


def test_signals_until_the_very_end_do_not_change_the_exit_code():
    with worker() as ending:
        while ending.process.poll() is None:
            ending.process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        code, stderr = ending.end()
        assert code == 0, stderr
        assert "Traceback" not in stderr


def test_death_of_the_scheduler_fails_running_requests_and_ends_the_worker():
    with worker("--delay", "0.02", "--forever", "5") as dying:
        running = in_background(generate, dying.url, max_new_tokens=2000, ignore_eos=True)
        time.sleep(0.3)
        os.kill(dying.scheduler_pid, signal.SIGKILL)
        failed = wait_for_result(running, 3.0)
        assert failed.status_code == 500 and "error" in failed.json()
        code, stderr = dying.end()
        assert code == 1
        assert "signal 9" in stderr and "Traceback" not in stderr


def test_death_of_the_scheduler_ends_a_stream_with_an_error_event():
    with worker("--delay", "0.02", "--forever", "5") as dying:
        body = {"input_ids": [5], "stream": True, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        with HTTP.stream("POST", dying.url + "/generate", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            os.kill(dying.scheduler_pid, signal.SIGKILL)
            rest = list(lines)
        assert '"error"' in rest[-2] and rest[-1] == "data: [DONE]"
        assert dying.end()[0] == 1


def test_scheduler_that_ends_while_loading_is_reported():
    with worker("--ready-after", "60", wait=False) as loading:
        loading.wait_for("/health", 503)
        os.kill(loading.scheduler_pid, signal.SIGKILL)
        code, stderr = loading.end()
        assert code == 1
        assert stderr.splitlines()[-1] == "error: the scheduler process was killed by signal 9"


def test_config_error_found_by_the_scheduler_is_one_line_and_exit_code_2():
    with worker("--startup-error", "the pool is too small: 3 pages", wait=False) as refused:
        code, stderr = refused.end()
        assert code == 2
        assert stderr.splitlines()[-1] == "error: the pool is too small: 3 pages"
        assert "Traceback" not in stderr


def test_port_in_use_is_one_line_and_exit_code_2():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, stderr, _ = run_serve(str(CHECKPOINT), "--port", str(port))
        assert code == 2
        assert stderr.startswith("error: ") and stderr.count("\n") == 1 and str(port) in stderr


def run_serve(*argv: str, module: tuple[str, ...] = ("sglang.cli.main", "serve")) -> tuple[int, str, float]:
    """Exit code, stderr and seconds of a start that is expected to be refused."""
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", *module, *argv], env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False
    )
    return result.returncode, result.stderr, time.monotonic() - started


@pytest.mark.parametrize("module", [("sglang.cli.main", "serve"), ("sglang.launch_server",)])
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["/nowhere"], "/nowhere"),
        ([], "no model given"),
        ([str(CHECKPOINT), "--page-size", "3"], "page-size"),
        ([str(CHECKPOINT), "--tokenizer-path", "/nowhere"], "tokenizer.json"),
        ([str(CHECKPOINT), "--tokenizer-path", str(TEST / "golden/toy_tokenizer")], "4096"),
        ([str(CHECKPOINT), "--host", "256.0.0.1"], "256.0.0.1"),
    ],
)
def test_wrong_flags_and_checkpoints_are_one_line_and_exit_code_2(argv, says, module):
    code, stderr, _ = run_serve(*argv, module=module)
    assert code == 2
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and says in stderr
