"""`make demo` and `make stop`: a server on a generated tiny checkpoint, one streamed chat, and the endpoint left up."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.markup import escape

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".demo"
CHECKPOINT = STATE / "checkpoint"
GENERATOR = ROOT / "tools" / "random_checkpoint.py"
PROCESS = STATE / "process.json"  # pid, creation time and port of the server
LOG = STATE / "server.log"
LOG_LINES = 20  # shown when something fails
PORT = 30000
READY_S = 180.0
STOP_S = 20.0
QUESTION = "What is the capital of Norway?"
console = Console(highlight=False)


def start() -> int:
    """Generate, serve, ask. Exit code 0 if an answer was streamed; otherwise no server is left behind."""
    stop(quiet=True)
    STATE.mkdir(exist_ok=True)
    try:
        make_checkpoint()
        port = free_port(PORT)
        server = launch(port)
        base = f"http://127.0.0.1:{port}"
        wait_ready(server, base)
        console.print(f"[bold]user[/bold]       {QUESTION}")
        count, seconds = ask(base)
    except (DemoFailed, OSError, subprocess.CalledProcessError, httpx.HTTPError) as failure:
        stop(quiet=True)
        report(failure)
        return 1
    except KeyboardInterrupt:
        stop(quiet=True)
        return 130
    console.print(f"\n\n{count} tokens in {seconds:.2f} s. The weights are random, so the text is too; everything around it is real.\n")
    console.print(what_to_try(base), markup=False, soft_wrap=True)
    return 0


class DemoFailed(Exception):
    """The demonstration cannot go on; the message says why."""


def report(failure: Exception) -> None:
    """One line, and the end of the log if the server wrote one."""
    lines = LOG.read_text(errors="replace").splitlines()[-LOG_LINES:] if LOG.is_file() else []
    if lines:
        console.print(f"the end of {LOG.relative_to(ROOT)}:")
        console.print("\n".join(lines), markup=False, soft_wrap=True)
    console.print(f"[red]error:[/red] {escape(str(failure))}", soft_wrap=True)


def make_checkpoint() -> None:
    """A random checkpoint in the released format; kept until its generator changes."""
    key = STATE / "checkpoint.sha256"
    wanted = hashlib.sha256(GENERATOR.read_bytes()).hexdigest()
    if (CHECKPOINT / "config.json").is_file() and key.is_file() and key.read_text() == wanted:
        return
    shutil.rmtree(CHECKPOINT, ignore_errors=True)
    console.print("writing a tiny random checkpoint ...")
    subprocess.run([sys.executable, str(GENERATOR), str(CHECKPOINT), "--preset", "demo"], check=True, stdout=subprocess.DEVNULL)
    key.write_text(wanted)


def free_port(wanted: int) -> int:
    """`wanted`, or any free port if somebody else has it."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise DemoFailed("no free port on 127.0.0.1")


def launch(port: int) -> subprocess.Popen[bytes]:
    """The server in a session of its own, so that it outlives this script."""
    command = [sys.executable, "-m", "sglang.cli.main", "serve", str(CHECKPOINT), "--served-model-name", "demo", "--port", str(port)]
    with LOG.open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT)
    PROCESS.write_text(json.dumps({"pid": server.pid, "created": psutil.Process(server.pid).create_time(), "port": port}))
    return server


def wait_ready(server: subprocess.Popen[bytes], base: str) -> None:
    """Return when the server answers; meanwhile show the last line of its log. Raises DemoFailed if it ends or takes too long."""
    deadline = time.monotonic() + READY_S
    with console.status("starting the server ...") as status:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise DemoFailed(f"the server ended with exit code {server.returncode}")
            # Not listening yet is no failure. The proxy of the environment is not for a local server.
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{base}/ready", timeout=2.0, trust_env=False).status_code == 200:
                    return
            last = (LOG.read_text(errors="replace").splitlines() or [""])[-1]
            status.update(f"starting the server ... [dim]{escape(last[:100])}[/dim]")
            time.sleep(0.2)
    raise DemoFailed(f"the server was not ready within {READY_S:.0f} s")


def ask(base: str) -> tuple[int, float]:
    """Stream one chat to the terminal; tokens and seconds."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 48,
        "temperature": 0.7,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    console.print("[bold]assistant[/bold]  ", end="")
    started, tokens = time.monotonic(), 0
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=60.0, trust_env=False) as reply:
        if reply.status_code != 200:
            raise DemoFailed(f"HTTP {reply.status_code}: {reply.read().decode(errors='replace')[:500]}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise DemoFailed(f"the stream ended with an error: {chunk['error']}")
            for choice in chunk["choices"]:
                console.print(choice["delta"].get("content") or "", end="", markup=False, soft_wrap=True)
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return tokens, time.monotonic() - started


def what_to_try(base: str) -> str:
    """The commands printed at the end."""
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32, "stream": True})
    python = Path(sys.executable)
    shown = python.relative_to(ROOT) if python.is_relative_to(ROOT) else python
    sdk = (
        f"from openai import OpenAI; c = OpenAI(base_url='{base}/v1', api_key='unused'); "
        "print(c.chat.completions.create(model='demo', messages=[{'role': 'user', 'content': 'Hello!'}], max_tokens=32).choices[0].message.content)"
    )
    return f"""The endpoint stays up at {base}. Try:

  curl -N {base}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'

  {shown} -c "{sdk}"

and end it with: make stop"""


def stop(quiet: bool = False) -> int:
    """End the server that `start` left up: politely, then not. Never touches a process it did not start."""
    family = running_family()
    for process in family[:1]:  # the server ends its own children; a second signal to them would only add noise
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=STOP_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)
    PROCESS.unlink(missing_ok=True)
    if not quiet:
        killed = f"; {len(alive)} of {len(family)} processes had to be killed" if alive else ""
        console.print(f"stopped{killed}" if family else "nothing to stop")
    return 0


def running_family() -> list[psutil.Process]:
    """The processes of the session that `start` began, its leader first if it lives. Empty if the pid now belongs to somebody else.

    While a session has members the system does not give its id to a new process, so a leader with another creation time
    means that the session is gone.
    """
    try:
        known = json.loads(PROCESS.read_text())
        pid, created = int(known["pid"]), float(known["created"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) != pid or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid == pid and abs(process.create_time() - created) >= 1.0:
                return []
            members.append(process)
    return sorted(members, key=lambda process: process.pid != pid)


if __name__ == "__main__":
    if sys.argv[1:] not in (["start"], ["stop"]):
        raise SystemExit("usage: demo.py start|stop")
    os.chdir(ROOT)
    raise SystemExit(start() if sys.argv[1] == "start" else stop())
