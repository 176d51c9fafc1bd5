"""`import sglang` and the HTTP process stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sglang
from sglang.cli.main import COMMANDS, main

HEAVY = ("torch", "numpy", "transformers")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("sglang", (*HEAVY, "fastapi", "zmq", "tokenizers")),
        ("sglang.cli.main", (*HEAVY, "fastapi", "zmq", "tokenizers")),
        ("sglang.srt.server_args", (*HEAVY, "fastapi", "zmq", "tokenizers")),
        ("sglang.srt.entrypoints.http_server", ("torch", "transformers")),
        ("sglang.srt.entrypoints.engine", ("torch", "transformers")),
    ],
)
def test_importing_does_not_load(module, absent):
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, check=True
    ).stdout
    assert not set(absent) & set(loaded.split())


def test_lazy_names_exist_and_others_do_not():
    assert sglang.ServerArgs.__name__ == "ServerArgs"
    assert sglang.Engine.__name__ == "Engine"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        sglang.nothing_like_it  # noqa: B018


def test_version_help_and_unknown_command(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == sglang.__version__
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert main(["srve"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "serve" in error
