"""`sglang eval-approx --text FILE CHECKPOINT`: what approximate serving costs on the user's own text."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from sglang.srt.errors import ConfigError
from sglang.srt.kernels.cpu_environment import set_cpu_environment
from sglang.srt.observability.progress import StartupProgress
from sglang.srt.server_args import ServerArgs, add_cli_args, validate

MODEL_FLAGS = (
    "model_path",
    "tokenizer_path",
    "context_length",
    "json_model_override_args",
    "device",
    "dtype",
    "kv_cache_dtype",
    "activation_quant",
    "kernel_backend",
    "mem_fraction_static",
    "page_size",
    "chunked_prefill_size",
)
"""Flags that mean what they mean to `sglang serve`."""


class OneLineParser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> argparse.ArgumentParser:
    """All flags of the command."""
    flags = OneLineParser(
        prog="sglang eval-approx",
        description="Measure on a text what --swa-restore bounded and --prefill-truncation compact cost against exact serving: perplexity, "
        "KL divergence by position, top-1 agreement and the length of greedy agreement.",
    )
    flags.add_argument("--text", required=True, help="file with UTF-8 text, the more like your traffic the better")
    flags.add_argument("--prefix-tokens", type=int, help="tokens before what is scored; default: 32 sliding windows, if the context allows")
    flags.add_argument("--continuation-tokens", type=int, help="tokens scored per window; default: the sliding window, at least 64")
    flags.add_argument("--greedy-tokens", type=int, help="most greedy tokens compared per window; default: as many as are scored")
    flags.add_argument("--max-windows", type=int, default=8, help="windows of the text that are used; bounds the run time (default: 8)")
    flags.add_argument(
        "--swa-replay-tokens",
        type=int,
        action="append",
        default=[],
        help="R, rows replayed by a bounded restore; repeat for a curve; default: the worker's number, 2 and 4 times it",
    )
    flags.add_argument(
        "--prefill-keep-tokens",
        type=int,
        action="append",
        default=[],
        help="K, rows kept by a compact prefill; repeat for a curve; default: the worker's number, 2 and 4 times it",
    )
    flags.add_argument("--seed", type=int, default=0, help="chooses the windows if the text has more (default: 0)")
    flags.add_argument("--json", metavar="FILE", help="write the report as JSON")
    flags.add_argument("--plot", metavar="FILE", help="draw the curves, e.g. report.png or report.svg; needs matplotlib")
    add_cli_args(flags, only=MODEL_FLAGS)
    return flags


def main(argv: list[str]) -> int:
    """Measure and report. Raises ConfigError, one line, for wrong flags, text or checkpoint."""
    asked = parser().parse_args(argv)
    args = model_args(asked)
    text = read_text(Path(asked.text))
    for name in ("json", "plot"):
        check_output(f"--{name}", getattr(asked, name))
    from sglang.srt.evaluation import approx_report

    if asked.plot:
        approx_report.require_matplotlib()
    set_cpu_environment()  # before torch is imported
    from sglang.srt.evaluation import approx
    from sglang.srt.managers.tokenizer import Tokenizer
    from sglang.srt.models.deepseek_v41.config import load_config

    config = load_config(Path(args.model_path), args.model_override)
    settings = approx.resolve_settings(
        args,
        config,
        prefix_tokens=asked.prefix_tokens,
        continuation_tokens=asked.continuation_tokens,
        greedy_tokens=asked.greedy_tokens,
        max_windows=asked.max_windows,
        seed=asked.seed,
        replay_tokens=asked.swa_replay_tokens,
        keep_tokens=asked.prefill_keep_tokens,
    )
    tokenizer = Tokenizer.load(args.resolved_tokenizer_path, args.model_path)
    progress = StartupProgress(sys.stderr)
    try:
        report = approx.evaluate(args, config, tokenizer, text, settings, progress)
    finally:
        progress.close()
    approx_report.print_report(report, Console())
    if asked.json:
        write_json(report, Path(asked.json))
    if asked.plot:
        approx_report.plot_report(report, Path(asked.plot))
    return 0


def model_args(asked: argparse.Namespace) -> ServerArgs:
    """The flags that a worker has too, checked as a worker checks them."""
    values = {name: getattr(asked, name) for name in MODEL_FLAGS}
    if asked.model and values["model_path"]:
        raise ConfigError(f"model given twice: {asked.model} and --model-path {values['model_path']}")
    values["model_path"] = asked.model or values["model_path"]
    return validate(ServerArgs(**values))


def read_text(file: Path) -> str:
    """Raises ConfigError if the file cannot be read or is no UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {file} is not UTF-8: byte {error.start} cannot be decoded") from None
    except OSError as error:
        raise ConfigError(f"--text {file} cannot be read: {error.strerror}") from None


def write_json(report: dict[str, Any], file: Path) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {file} cannot be written: {error.strerror}") from None


def check_output(flag: str, name: str | None) -> None:
    """Raises ConfigError if the report could not be written: said before the model runs, not after."""
    if name is None:
        return
    if Path(name).is_dir():
        raise ConfigError(f"{flag} {name} is a directory; name a file")
    if not Path(name).absolute().parent.is_dir():
        raise ConfigError(f"{flag} {name}: its directory does not exist")
