"""What the README tells a newcomer to type works as it stands, against what `make demo` serves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.served import Served, serve, write_demo_checkpoint

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEMO_URL = "http://127.0.0.1:30000"
DEMO_CHECKPOINT = ".demo/checkpoint"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


CURLS = [command for block in blocks("sh") for command in re.split(r"\n(?=curl )", block) if command.startswith("curl ")]
SDK, OFFLINE = (next(block for block in blocks("python") if word in block) for word in ("OpenAI(", "sglang.Engine("))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_checkpoint(tmp_path_factory.mktemp("readme") / "demo")


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Served]:
    with serve(checkpoint, checkpoint.parent / "log", "--served-model-name", "demo") as worker:
        yield worker


def run(command: list[str]) -> str:
    done = subprocess.run(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", CURLS, ids=lambda command: re.search(r"30000(\S+)", command)[1])
def test_curl(command: str, served: Served):
    assert DEMO_URL in command
    run(["bash", "-c", command.strip().replace("curl ", "curl -sS --fail-with-body --max-time 60 ", 1).replace(DEMO_URL, served.url)])


def test_openai_sdk(served: Served):
    assert DEMO_URL in SDK
    assert run([sys.executable, "-c", SDK.replace(DEMO_URL, served.url)])


def test_offline_engine(checkpoint: Path, tmp_path: Path):
    assert DEMO_CHECKPOINT in OFFLINE
    script = tmp_path / "offline.py"  # a file: the engine's process is spawned, which imports the main module anew
    script.write_text(OFFLINE.replace(DEMO_CHECKPOINT, str(checkpoint)))
    assert run([sys.executable, str(script)])


def test_every_kind_of_example_was_found():
    assert len(CURLS) >= 5
