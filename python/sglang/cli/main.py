"""The command `sglang`: one sub-command per file of this package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from sglang.srt.errors import ConfigError
from sglang.version import __version__

COMMANDS = {
    "serve": "start a worker that serves one model over HTTP",
    "inspect": "print what a checkpoint directory holds",
    "eval-approx": "measure what approximate restore and prefill cost on a text",
    "version": "print the version",
}
"""Each is a module of this package with `main(argv) -> exit code` (a dash is an underscore there), except version."""


def main(argv: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 success, 1 failure, 2 wrong use."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("version", "--version", "-V"):
        print(__version__)
        return 0
    if name not in COMMANDS:
        print(f"error: unknown command {name!r}; one of {', '.join(COMMANDS)} was expected", file=sys.stderr)
        return 2
    # Imported only now: `sglang version` shall not wait for a web framework.
    command = importlib.import_module(f"sglang.cli.{name.replace('-', '_')}")
    return run_reporting_errors(command.main, argv[1:])


def usage() -> str:
    """The text of `sglang --help`."""
    lines = [f"  {name:<12} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: sglang COMMAND [arguments]; sglang COMMAND --help says more", "", *lines])


def run_reporting_errors(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """A ConfigError becomes one line on stderr and exit code 2; a Ctrl-C becomes 130."""
    try:
        return command(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
