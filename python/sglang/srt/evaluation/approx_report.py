"""The report of `sglang eval-approx` as a table and as a plot."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sglang.srt.errors import ConfigError

COLUMNS = ("mode", "R", "K", "perplexity", "loss", "±", "KL mean", "top-1 %", "greedy")


def print_report(report: dict[str, Any], console: Console) -> None:
    """One line per variant, and what the columns mean."""
    settings, exact = report["settings"], report["exact"]
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)  # fits 80 columns
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    table.add_row("exact", "", "", f"{exact['perplexity']:.4f}", *[""] * 4, f"{settings['greedy_tokens']}")
    table.add_section()
    for row in report["modes"]:
        table.add_row(*_cells(row))
    console.print(table)
    console.print(
        f"{report['num_windows']} window(s): {settings['continuation_tokens']} tokens scored after a prefix of {settings['prefix_tokens']}; "
        f"sliding window {report['model']['sliding_window']}. A worker's own R and K: {report['model']['worker_replay_tokens']}.\n"
        "loss: nats per token above exact, ± its standard error over windows. KL(exact || mode) in nats. greedy: tokens until the "
        f"greedy text differs, at most {settings['greedy_tokens']}.",
        soft_wrap=True,
        highlight=False,
    )


def _cells(row: dict[str, Any]) -> Iterable[str]:
    error = row["nll_difference_stderr"]
    return (
        row["mode"],
        _or_dash(row["replay_tokens"]),
        _or_dash(row["keep_tokens"]),
        f"{row['perplexity']:.4f}",
        _small(row["nll_difference"], "+"),
        "-" if error is None else _small(error),
        _small(row["kl_mean"]),
        f"{100 * row['top1_agreement']:.1f}",
        f"{row['greedy_agreement_mean']:.1f}",
    )


def _small(value: float, sign: str = "") -> str:
    """Zero is said plainly: it means equal bits."""
    return f"{value:{sign}.1e}" if value else "0"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def require_matplotlib() -> None:
    """Raises ConfigError if no plot can be drawn: said before the model runs, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install matplotlib, or leave --plot out")


def plot_report(report: dict[str, Any], file: Path) -> None:
    """KL by position of the continuation, and mean KL by rows replayed or kept. The ending of `file` names the format.

    Raises ConfigError if it cannot be written, or in no such format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    by_position, by_rows = figure.subplots(1, 2)
    for row in report["modes"]:
        by_position.plot(
            range(len(row["kl_by_position"])), row["kl_by_position"], label=_label(row), linewidth=1, linestyle=_style(row["mode"])
        )
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in report["modes"]:
        curves.setdefault(row["mode"], []).append((row["replay_tokens"] or row["keep_tokens"], row["kl_mean"]))
    for name, points in curves.items():
        by_rows.plot(*zip(*sorted(points)), marker="o", label=name, linestyle=_style(name))
    by_position.set_xlabel("position in the continuation")
    by_position.set_ylabel("KL(exact || mode), nats, mean over windows")
    by_rows.set_xlabel("rows replayed (R) or kept (K); both: R")
    by_rows.set_ylabel("KL, mean over positions")
    for axes in (by_position, by_rows):
        axes.set_yscale("symlog", linthresh=1e-6)  # equal distributions have zero, which a logarithm does not
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="x-small")
    figure.suptitle(f"{report['model']['name']}, {report['num_windows']} windows, prefix {report['settings']['prefix_tokens']}")
    try:
        figure.savefig(file)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {file} cannot be written: {' '.join(str(error).split())}") from None


def _style(mode: str) -> str:
    """`both` often lies on `bounded`, which must stay visible."""
    return "--" if mode == "both" else "-"


def _label(row: dict[str, Any]) -> str:
    parts = [f"{letter} {row[key]}" for letter, key in (("R", "replay_tokens"), ("K", "keep_tokens")) if row[key] is not None]
    return " ".join([row["mode"], *parts])
