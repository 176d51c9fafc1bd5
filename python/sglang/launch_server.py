"""`python -m sglang.launch_server --model-path MODEL [flags]`: the older spelling of `sglang serve`."""

from __future__ import annotations

import sys

from sglang.cli import serve
from sglang.cli.main import run_reporting_errors


def main(argv: list[str]) -> int:
    """The same flags, the same server."""
    return run_reporting_errors(lambda rest: serve.main(rest, "python -m sglang.launch_server"), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
