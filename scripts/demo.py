"""`make demo` and `make stop`: a server on a generated tiny checkpoint, one streamed chat, and the endpoint left up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".demo"
CHECKPOINT = STATE / "checkpoint"
PROCESS = STATE / "process.json"  # pid, creation time and port of the server
LOG = STATE / "server.log"
PORT = 30000
READY_S = 180.0
STOP_S = 20.0
QUESTION = "What is the capital of Norway?"
console = Console(highlight=False)


def start() -> int:
    """Generate, serve, ask. Exit code 0 if an answer was streamed."""
    stop(quiet=True)
    STATE.mkdir(exist_ok=True)
    make_checkpoint()
    port = free_port(PORT)
    server = launch(port)
    base = f"http://127.0.0.1:{port}"
    if not wait_ready(server, base):
        console.print(f"[red]error:[/red] the server did not become ready; the end of {LOG.relative_to(ROOT)}:")
        console.print("".join(LOG.read_text(errors="replace").splitlines(keepends=True)[-20:]), markup=False)
        stop(quiet=True)
        return 1
    console.print(f"[bold]user[/bold]       {QUESTION}")
    count, seconds = ask(base)
    console.print(f"\n\n{count} tokens in {seconds:.2f} s. The weights are random, so the text is too; everything around it is real.\n")
    console.print("The endpoint stays up. Try:\n")
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32, "stream": True})
    console.print(f"  curl -N {base}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n", soft_wrap=True, markup=False)
    console.print("and end it with: make stop")
    return 0


def make_checkpoint() -> None:
    """A random checkpoint in the released format; kept for the next time."""
    if (CHECKPOINT / "config.json").is_file():
        return
    shutil.rmtree(CHECKPOINT, ignore_errors=True)
    unfinished = CHECKPOINT.with_name("checkpoint.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    console.print("writing a tiny random checkpoint ...")
    subprocess.run([sys.executable, str(ROOT / "tools" / "random_checkpoint.py"), str(unfinished), "--preset", "demo"], check=True)
    unfinished.rename(CHECKPOINT)


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
    raise SystemExit("error: no free port on 127.0.0.1")


def launch(port: int) -> subprocess.Popen[bytes]:
    """The server in a session of its own, so that it outlives this script."""
    command = [sys.executable, "-m", "sglang.cli.main", "serve", str(CHECKPOINT), "--served-model-name", "demo", "--port", str(port)]
    with LOG.open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT)
    PROCESS.write_text(json.dumps({"pid": server.pid, "created": psutil.Process(server.pid).create_time(), "port": port}))
    return server


def wait_ready(server: subprocess.Popen[bytes], base: str) -> bool:
    deadline = time.monotonic() + READY_S
    with console.status("starting the server ..."):
        while time.monotonic() < deadline and server.poll() is None:
            try:
                if httpx.get(f"{base}/health", timeout=2.0).status_code == 200:
                    return True
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.2)
    return False


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
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=60.0) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"error: HTTP {reply.status_code}: {reply.read().decode(errors='replace')[:500]}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                console.print(choice["delta"].get("content") or "", end="", markup=False, soft_wrap=True)
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return tokens, time.monotonic() - started


def stop(quiet: bool = False) -> int:
    """End the server that `start` left up: politely, then not. Never touches a process it did not start."""
    server = running_server()
    if server is None:
        PROCESS.unlink(missing_ok=True)
        if not quiet:
            console.print("nothing to stop")
        return 0
    family = [server, *server.children(recursive=True)]
    server.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=STOP_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=5.0)
    PROCESS.unlink(missing_ok=True)
    if not quiet:
        console.print("stopped" if not alive else f"stopped; {len(alive)} processes had to be killed")
    return 0


def running_server() -> psutil.Process | None:
    """The process in the pid file, if it is still the same one."""
    try:
        known = json.loads(PROCESS.read_text())
        process = psutil.Process(known["pid"])
        same = abs(process.create_time() - known["created"]) < 1.0
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None
    return process if same and process.status() != psutil.STATUS_ZOMBIE else None


if __name__ == "__main__":
    if sys.argv[1:] not in (["start"], ["stop"]):
        raise SystemExit("usage: demo.py start|stop")
    os.chdir(ROOT)
    raise SystemExit(start() if sys.argv[1] == "start" else stop())
