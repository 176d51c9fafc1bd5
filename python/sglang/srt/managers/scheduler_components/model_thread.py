"""The thread that runs the model, so that the scheduler can work meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from sglang.srt.model_executor.step import StepInput, StepOutput


class ForwardTimeout(Exception):
    """A step took longer than --watchdog-timeout. The thread cannot be stopped; the process must end."""


class ModelThread:
    """Runs steps in the order submitted. At most one waits behind the one that runs.

    Steps carry their memory operations, so this order is the order of all reads and writes of the pools.
    """

    def __init__(self, run: Callable[[StepInput], StepOutput], watchdog_timeout_s: float):
        self._run = run
        self._timeout_s = watchdog_timeout_s
        self._steps: queue.Queue[StepInput | None] = queue.Queue(maxsize=1)
        self._results: queue.SimpleQueue[StepOutput | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    def submit(self, step: StepInput) -> None:
        """Queue a step behind the one that runs. Raises ForwardTimeout if the queue does not move."""
        try:
            self._steps.put(step, timeout=self._timeout_s)
        except queue.Full:
            raise self._too_slow() from None

    def wait(self) -> StepOutput:
        """The result of the oldest step whose result was not taken yet. Raises what the step raised, or ForwardTimeout."""
        try:
            result = self._results.get(timeout=self._timeout_s)
        except queue.Empty:
            raise self._too_slow() from None
        if isinstance(result, BaseException):
            raise result
        return result

    def run(self, step: StepInput) -> StepOutput:
        """Submit and wait: the plain loop."""
        self.submit(step)
        return self.wait()

    def close(self) -> None:
        """Let the thread end after the steps it has."""
        self._steps.put(None, timeout=self._timeout_s)
        self._thread.join(timeout=self._timeout_s)

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._results.put(self._run(step))
            except BaseException as error:  # handed to the scheduler thread, which ends the process
                self._results.put(error)

    def _too_slow(self) -> ForwardTimeout:
        return ForwardTimeout(f"a forward took longer than --watchdog-timeout {self._timeout_s:g} s")
