"""`sglang eval-approx`: table, JSON and plot, and one line for every error."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from harness.direct import GOLDEN
from sglang.cli.main import main

NANO = str(GOLDEN / "nano-s1" / "checkpoint")
QUICK = [
    "--device", "cpu", "--page-size", "4", "--prefix-tokens", "41", "--continuation-tokens", "12", "--greedy-tokens", "4",
    "--max-windows", "2", "--swa-replay-tokens", "13", "--swa-replay-tokens", "41", "--prefill-keep-tokens", "13",
]  # fmt: skip


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Pack my box with five dozen liquor jugs, said the grüner Käfer. " * 8, encoding="utf-8")
    return str(file)


def test_table_json_and_plot(text, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report, plot = tmp_path / "report.json", tmp_path / "report.svg"
    assert main(["eval-approx", NANO, "--text", text, *QUICK, "--json", str(report), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("exact", "bounded", "compact", "both", "perplexity", "KL mean", "greedy"))
    assert "…" not in out and max(map(len, out.split("2 window(s)")[0].splitlines())) <= 80
    found = json.loads(report.read_text(encoding="utf-8"))
    modes = [(row["mode"], row["replay_tokens"], row["keep_tokens"]) for row in found["modes"]]
    assert modes == [("bounded", 13, None), ("bounded", 41, None), ("compact", None, 13), ("both", 13, 13), ("both", 41, 13)]
    assert found["modes"][1]["kl_max"] == 0.0
    assert "<svg" in plot.read_text(encoding="utf-8")


def refused(capsys, argv: list[str]) -> str:
    assert main(["eval-approx", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--max-windows", "0"], "--max-windows must be at least 1, found 0"),
        (["--max-windows", "many"], "invalid int value: 'many'"),
        (["--swa-replay-tokens", "5"], "--swa-replay-tokens must be at least 13, found 5"),
        (["--prefill-keep-tokens", "5"], "--prefill-keep-tokens must be at least 13, found 5"),
        (["--page-size", "3"], "--page-size must be even"),
        (["--prefix-tokens", "5000"], "exceed the context of 4096"),
        (["--prefix-tokens", "3000", "--continuation-tokens", "500"], "but one window needs 3499"),
        (["--json", "no/such/place.json"], "its directory does not exist"),
        (["--model-path", "other"], "model given twice"),
        (["--port", "1"], "unrecognized arguments: --port 1"),
    ],
)
def test_bad_values_are_one_line_and_exit_code_2(text, capsys, flags, message):
    assert message in refused(capsys, [NANO, "--text", text, *flags])


def test_a_missing_text_or_checkpoint_is_named(text, tmp_path, capsys):
    assert "nothing.txt cannot be read: No such file" in refused(capsys, [NANO, "--text", str(tmp_path / "nothing.txt")])
    assert "config.json not found" in refused(capsys, [str(tmp_path), "--text", text])
    assert "the following arguments are required: --text" in refused(capsys, [NANO])
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff\xfe")
    assert "is not UTF-8: byte 2" in refused(capsys, [NANO, "--text", str(binary)])


def test_a_plot_without_matplotlib_is_refused_before_the_model_runs(text, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    assert "--plot needs matplotlib, which is not installed" in refused(capsys, [NANO, "--text", text, "--plot", "x.png"])


def test_an_unknown_plot_format_is_refused(text, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["eval-approx", NANO, "--text", text, *QUICK, "--plot", str(tmp_path / "plot.xyz")]) == 2
    assert "cannot be written: Format 'xyz' is not supported" in capsys.readouterr().err


def test_a_missing_text_is_refused_without_loading_torch():
    code = f"import sys; from sglang.cli.main import main; print(main(['eval-approx', {NANO!r}, '--text', 'none']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.stdout.split() == ["2", "False"]
