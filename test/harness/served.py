"""A real worker for end-to-end tests: `sglang serve` in processes of its own, on a small random checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


@dataclass
class Served:
    """A running worker."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def running_requests(self) -> int:
        """Requests the scheduler holds, waiting or running."""
        stats = httpx.get(self.url + "/server_info", timeout=10).json()["internal_states"][0]["stats"]
        return int(stats.get("num_running_reqs", 0)) + int(stats.get("num_queue_reqs", 0))


def write_demo_checkpoint(directory: Path) -> Path:
    """A random checkpoint with the toy tokenizer."""
    command = [sys.executable, str(REPOSITORY / "tools/random_checkpoint.py"), str(directory), "--preset", "demo", "--seed", "0"]
    subprocess.run(command, check=True, env=_environment(), stdout=subprocess.DEVNULL, timeout=120)
    return directory


@contextlib.contextmanager
def serve(checkpoint: Path, log: Path, *flags: str) -> Iterator[Served]:
    """Start a worker, wait until it is ready, and end it in order afterwards."""
    port = _free_port()
    command = [sys.executable, "-m", "sglang.cli.main", "serve", str(checkpoint), "--port", str(port), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=_environment(), stdout=output, stderr=subprocess.STDOUT)
    served = Served(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_ready(served)
        yield served
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(served: Served) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert served.process.poll() is None, served.log.read_text()[-2000:]
        assert time.monotonic() < deadline, "the worker did not become ready"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(served.url + "/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY / "python"), "OMP_NUM_THREADS": "1"}
