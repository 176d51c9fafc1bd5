"""The demonstration's processes: exactly its own are ended, and failures leave nothing behind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from scripts import demo

SLEEP = "import time; time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); print('up', flush=True); {SLEEP}"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ROOT": tmp_path,
        "STATE": tmp_path,
        "CHECKPOINT": tmp_path / "checkpoint",
        "PROCESS": tmp_path / "process.json",
        "LOG": tmp_path / "server.log",
    }.items():
        monkeypatch.setattr(demo, name, value)


def start_family() -> subprocess.Popen[str]:
    """A process in a session of its own, with one child."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    parent.stdout.close()
    demo.PROCESS.write_text(json.dumps({"pid": parent.pid, "created": psutil.Process(parent.pid).create_time(), "port": 1}))
    return parent


def test_stop_ends_the_server_and_its_children(monkeypatch):
    monkeypatch.setattr(demo, "STOP_S", 0.5)  # the child knows nothing of its parent's end, so it has to be killed
    parent = start_family()
    child = psutil.Process(parent.pid).children()[0]
    assert demo.stop(quiet=True) == 0
    parent.wait(5)
    assert not child.is_running()
    assert not demo.PROCESS.exists()


def test_children_of_a_dead_server_are_ended_too(monkeypatch):
    monkeypatch.setattr(demo, "STOP_S", 0.1)
    parent = start_family()
    child = psutil.Process(parent.pid).children()[0]
    parent.kill()
    parent.wait(5)
    demo.stop(quiet=True)
    assert not child.is_running()


def test_a_stranger_with_the_same_pid_is_left_alone():
    stranger = start_family()
    try:
        known = json.loads(demo.PROCESS.read_text())
        demo.PROCESS.write_text(json.dumps({**known, "created": known["created"] - 3600}))
        assert demo.running_family() == []
        assert demo.stop(quiet=True) == 0
        time.sleep(0.05)
        assert stranger.poll() is None
    finally:
        for process in [*psutil.Process(stranger.pid).children(), stranger]:
            process.kill()
        stranger.wait(5)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', '{"pid": null, "created": 0}'])
def test_a_damaged_pid_file_means_nothing_to_stop(content, capsys):
    demo.PROCESS.write_text(content)
    assert demo.stop() == 0
    assert "nothing to stop" in capsys.readouterr().out


def test_a_taken_port_is_avoided():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert demo.free_port(taken.getsockname()[1]) != taken.getsockname()[1]


def test_a_server_that_dies_is_reported_with_its_log_and_exit_code_1(monkeypatch, capsys):
    def launch(_port: int) -> subprocess.Popen[bytes]:
        demo.LOG.write_text("one\n[two] is no markup\n")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True)

    monkeypatch.setattr(demo, "launch", launch)
    monkeypatch.setattr(demo, "make_checkpoint", lambda: None)
    assert demo.start() == 1
    out = capsys.readouterr().out
    assert "[two] is no markup" in out
    assert "exit code 3" in out


def test_the_checkpoint_is_written_once_per_generator(monkeypatch, tmp_path):
    generator = tmp_path / "generator.py"
    body = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.mkdir(); (p / 'config.json').write_text({!r})"
    monkeypatch.setattr(demo, "GENERATOR", generator)
    generator.write_text(body.format("first"))
    demo.make_checkpoint()
    (demo.CHECKPOINT / "kept").touch()
    demo.make_checkpoint()
    assert (demo.CHECKPOINT / "kept").exists()
    generator.write_text(body.format("second"))
    demo.make_checkpoint()
    assert (demo.CHECKPOINT / "config.json").read_text() == "second"
    assert not (demo.CHECKPOINT / "kept").exists()
