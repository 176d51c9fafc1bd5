"""Engine figures on this machine: prefill tokens/s, and decode tokens/s at several batch sizes.

    python benchmark/engine.py                       # the 100m and 300m random checkpoints
    python benchmark/engine.py CHECKPOINT --json out.json

The whole engine runs (scheduler process, sampler, detokenizer), without HTTP. Every figure is taken several times; the
median is the figure and the spread says what it is worth.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "checkpoints"
PRESETS = ("100m", "300m")
BATCHES = (1, 4, 16)
DECODE_PROMPT_TOKENS = 32
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def main() -> int:
    parser = argparse.ArgumentParser(description="Prefill and decode speed of the engine.")
    parser.add_argument("checkpoints", nargs="*", default=list(PRESETS), help="directories, or presets of tools/random_checkpoint.py")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of the prefill prompt")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens per request of the decode runs")
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each figure, after one warm-up")
    parser.add_argument("--limit-s", type=float, default=40.0, help="seconds after which no further run of one figure is begun")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    console = Console()
    results = [measure(name, options, console) for name in options.checkpoints]
    report = {"machine": machine(), "command": " ".join(sys.argv), "commit": commit(), "results": results}
    print_table(report, console)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def checkpoint(name: str) -> Path:
    """A directory as it is; a preset from the cache, written on first use."""
    if name not in PRESETS and Path(name).is_dir():
        return Path(name)
    target = CACHE / name
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, str(ROOT / "tools" / "random_checkpoint.py"), str(target), "--preset", name], check=True)
    return target


def measure(name: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All figures of one checkpoint; `tokens_per_s` is {figure: [one value per counted run]}."""
    import sglang

    path = checkpoint(name)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    started = time.perf_counter()
    # No prefix cache: every run must compute its prompt. Pools no larger than the runs need.
    with sglang.Engine(model_path=str(path), disable_radix_cache=True, max_running_requests=max(BATCHES), max_total_tokens=32768) as engine:
        load_s = time.perf_counter() - started
        figures = {f"prefill {options.prompt_tokens}": lambda: prefill_speed(engine, options.prompt_tokens)}
        figures |= {f"decode batch {b}": lambda b=b: decode_speed(engine, b, options.new_tokens) for b in BATCHES}
        taken = {}
        for figure, run in figures.items():
            with console.status(f"{name}: {figure}"):
                taken[figure] = repeat(run, options.runs, options.limit_s)
    return {"checkpoint": name, "bytes": size, "load_s": round(load_s, 2), "tokens_per_s": taken}


def repeat(run: Callable[[], float], runs: int, limit_s: float) -> list[float]:
    """One warm-up that does not count, then `runs` values; fewer, but at least one, when time runs out."""
    deadline = time.monotonic() + limit_s
    run()
    values = [run()]
    while len(values) < runs and time.monotonic() < deadline:
        values.append(run())
    return values


def prefill_speed(engine: Any, tokens: int) -> float:
    """Prompt tokens per second of one prompt, from sending it to its first token."""
    started = time.perf_counter()
    engine.generate(input_ids=prompt(tokens, 0), sampling_params={**GREEDY, "max_new_tokens": 1})
    return tokens / (time.perf_counter() - started)


def decode_speed(engine: Any, batch: int, new_tokens: int) -> float:
    """Output tokens per second over `batch` requests; the time of a run with one token each is subtracted."""
    prompts = [prompt(DECODE_PROMPT_TOKENS, i) for i in range(batch)]

    def seconds(count: int) -> float:
        started = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": count})
        return time.perf_counter() - started

    return batch * (new_tokens - 1) / (seconds(new_tokens) - seconds(1))


def prompt(tokens: int, number: int) -> list[int]:
    """Different prompts take different experts, as requests of different people do."""
    return random.Random(number).choices(range(300, 4000), k=tokens)


def machine() -> str:
    """Processor, cores, memory, system and the versions that decide speed."""
    model = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} x {model}, {memory:.0f} GiB, {platform.system()}, Python {platform.python_version()}, torch {version('torch')}"
    )


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def commit() -> str:
    """The checked-out commit, marked if files differ from it."""
    out = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return out.stdout.strip() or "unknown"


def print_table(report: dict[str, Any], console: Console) -> None:
    """One row per figure: median, least and most of its runs."""
    table = Table(title="tokens per second", title_justify="left")
    for heading in ("checkpoint", "figure"):
        table.add_column(heading)
    for heading in ("median", "least", "most", "runs"):
        table.add_column(heading, justify="right")
    for result in report["results"]:
        name = f"{result['checkpoint']}, {result['bytes'] / 1e6:.0f} MB"
        for figure, values in result["tokens_per_s"].items():
            speeds = [f"{value:.1f}" for value in (statistics.median(values), min(values), max(values))]
            table.add_row(name, figure, *speeds, str(len(values)))
        table.add_section()
    console.print(table)
    for key in ("machine", "command", "commit"):
        console.print(f"{key}: {report[key]}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
