"""How far start-up has come: a bar on a terminal, a line per tenth in a log."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)

REDRAW_S = 0.1
"""Seconds between two drawings of the bar: loading calls once per tensor, a hundred thousand times."""


class StartupProgress:
    """Callable with (stage, share done from 0 to 1), as load_weights expects. A stage ends at share 1."""

    def __init__(self, stream: TextIO = sys.stderr):
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._stage = ""
        self._tenths = 0
        self._drawn_at = 0.0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, stage: str, share: float) -> None:
        if stage != self._stage:
            self._stage, self._tenths = stage, 0
        if self._is_terminal:
            self._draw(stage, share)
        elif int(share * 10) > self._tenths:
            self._tenths = int(share * 10)
            logger.info("%s: %d %%", stage, 10 * self._tenths)

    def _draw(self, stage: str, share: float) -> None:
        now = time.monotonic()
        if share < 1 and now - self._drawn_at < REDRAW_S:
            return
        self._drawn_at = now
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            # No refreshing thread: it would live on, drawing, if loading failed.
            self._bar = Progress(*columns, console=Console(file=self._stream), auto_refresh=False)
            self._bar.start()
            self._task = self._bar.add_task(stage, total=1.0)
        assert self._task is not None
        self._bar.update(self._task, completed=share, description=stage, refresh=True)
        if share >= 1:
            self.close()

    def close(self) -> None:
        """Leave the terminal as it was; for when loading fails."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
