"""`python -m sglang.srt.entrypoints.scheduler_child`: the scheduler process, started by launcher.py.

What it shall do comes as one JSON object on stdin: not on the command line, where other users would see the API key. A
fresh interpreter rather than multiprocessing's spawn, so that an offline engine also works in a script without a
`__main__` guard, in a notebook, and on stdin.
"""

from __future__ import annotations

import json
import sys

from sglang.srt.observability.logging import setup_logging
from sglang.srt.server_args import ServerArgs


def main() -> None:
    """Read the order and run; the environment was prepared by the parent, torch is imported only now."""
    order = json.load(sys.stdin)
    args = ServerArgs(**order["args"])
    setup_logging(args.log_level, "scheduler")
    from sglang.srt.managers.scheduler_process import run_scheduler_process

    run_scheduler_process(args, order["in_addr"], order["out_addr"], order["parent_pid"])


if __name__ == "__main__":
    main()
