"""Engine figures on this machine: prefill tokens/s, and decode tokens/s at several batch sizes.

    python benchmark/engine.py                       # the 100m and 300m random checkpoints
    python benchmark/engine.py CHECKPOINT --json out.json

The whole engine runs (scheduler process, sampler, tokenizer process), without HTTP. Every figure is taken several times;
the median is the figure and the spread says what it is worth.
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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "checkpoints"
PRESETS = ("100m", "300m")
BATCHES = (1, 4, 16)
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def main() -> int:
    parser = argparse.ArgumentParser(description="Prefill and decode speed of the engine.")
    parser.add_argument("checkpoints", nargs="*", default=list(PRESETS), help="directories, or presets of tools/random_checkpoint.py")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of the prefill prompt")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens per request of the decode runs")
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each figure, after one warm-up")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    results = [measure(name, options) for name in options.checkpoints]
    report = {"machine": machine(), "command": " ".join(sys.argv), "commit": commit(), "results": results}
    print_table(report)
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


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one checkpoint: {figure: [one value per run]} in tokens/s."""
    import sglang

    path = checkpoint(name)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    figures: dict[str, list[float]] = {}
    with sglang.Engine(model_path=str(path), disable_radix_cache=True, max_running_requests=max(BATCHES), max_total_tokens=32768) as engine:
        figures[f"prefill {options.prompt_tokens}"] = repeat(options.runs, lambda: prefill_speed(engine, options.prompt_tokens))
        for batch in BATCHES:
            figures[f"decode batch {batch}"] = repeat(options.runs, lambda b=batch: decode_speed(engine, b, options.new_tokens))
    return {"checkpoint": name, "bytes": size, "tokens_per_s": figures}


def repeat(runs: int, figure: Any) -> list[float]:
    figure()
    return [figure() for _ in range(runs)]


def prefill_speed(engine: Any, tokens: int) -> float:
    """Prompt tokens per second of one prompt, from sending it to its first token."""
    started = time.perf_counter()
    engine.generate(input_ids=prompt(tokens), sampling_params={**GREEDY, "max_new_tokens": 1})
    return tokens / (time.perf_counter() - started)


def decode_speed(engine: Any, batch: int, new_tokens: int) -> float:
    """Output tokens per second over `batch` requests; the time of a run with one token each is subtracted."""
    prompts = [prompt(16) for _ in range(batch)]

    def seconds(count: int) -> float:
        started = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": count})
        return time.perf_counter() - started

    return batch * (new_tokens - 1) / (seconds(new_tokens) - seconds(1))


def prompt(tokens: int) -> list[int]:
    return random.Random(tokens).choices(range(3, 4000), k=tokens)


def machine() -> str:
    model = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    return f"{os.cpu_count()} x {model}, {platform.system()}, Python {platform.python_version()}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def commit() -> str:
    out = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return out.stdout.strip() or "unknown"


def print_table(report: dict[str, Any]) -> None:
    table = Table(title=f"tokens/s, median (least to most) on {report['machine']}, commit {report['commit']}")
    table.add_column("checkpoint")
    names = list(report["results"][0]["tokens_per_s"])
    for name in names:
        table.add_column(name, justify="right")
    for result in report["results"]:
        cells = [f"{statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in (result["tokens_per_s"][name] for name in names)]
        table.add_row(f"{result['checkpoint']} ({result['bytes'] / 1e6:.0f} MB)", *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
