"""Start-up progress: ten lines in a log, one bar on a terminal."""

from __future__ import annotations

import io
import logging

from sglang.srt.observability.progress import StartupProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_per_tenth(caplog):
    caplog.set_level(logging.INFO)
    progress = StartupProgress(io.StringIO())
    for i in range(1, 1001):
        progress("loading weights", i / 1000)
    assert [record.getMessage() for record in caplog.records] == [f"loading weights: {tenth}0 %" for tenth in range(1, 11)]


def test_steps_larger_than_a_tenth_are_one_line_each_and_stages_start_anew(caplog):
    caplog.set_level(logging.INFO)
    progress = StartupProgress(io.StringIO())
    for stage, share in (("a", 0.35), ("a", 1.0), ("b", 0.5), ("b", 1.0)):
        progress(stage, share)
    assert [record.getMessage() for record in caplog.records] == ["a: 30 %", "a: 100 %", "b: 50 %", "b: 100 %"]


def test_a_terminal_gets_a_bar_and_no_lines(caplog):
    caplog.set_level(logging.INFO)
    stream = Terminal()
    progress = StartupProgress(stream)
    for i in range(1, 101):
        progress("loading weights", i / 100)
    assert "loading weights" in stream.getvalue()
    assert "100%" in stream.getvalue()
    assert caplog.records == []


def test_closing_twice_or_unused_is_harmless():
    progress = StartupProgress(Terminal())
    progress.close()
    progress("x", 0.5)
    progress.close()
    progress.close()
