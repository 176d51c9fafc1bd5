"""Log lines of all processes: time, process, level, message; on stderr, so that stdout stays for data."""

from __future__ import annotations

import logging
import sys


def setup_logging(level: str, process: str) -> None:
    """Configure the root logger once per process. `process` is shown in every line, e.g. "http" or "scheduler"."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"[%(asctime)s {process}] %(levelname)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    for chatty in ("uvicorn", "uvicorn.error", "asyncio", "httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
