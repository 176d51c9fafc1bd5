"""One sequence between the scheduler's messages and the route that reads it: a mailbox with a clock.

The receive loop puts outputs in, the route's task takes them out. A route that wants the whole reply is woken once, at the
end; a route that streams is woken for every message, and gets what piled up in one piece when it was slow.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from sglang.srt.errors import ServiceError
from sglang.srt.managers.io_struct import RequestOutput, TokenLogprobs
from sglang.srt.observability.metrics import FrontMetrics

_MERGE_ABOVE = 8  # waiting outputs; a reader this far behind gains nothing from separate pieces


@dataclass
class Clock:
    """Moments of one sequence: monotonic seconds, except `arrived_at`. 0.0 means not reached."""

    arrived_at: float = field(default_factory=time.time)
    arrived: float = field(default_factory=time.monotonic)
    dispatched: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0


class RunningSequence:
    """State of one rid from its GenerateReq to the output with a finish reason, also when nobody reads any more."""

    def __init__(self, rid: str, *, stream: bool, metrics: FrontMetrics | None):
        """`metrics` is None for requests that are not a user's, such as health checks."""
        self.rid = rid
        self.clock = Clock()
        self.abandoned = False  # the reader went away; only the scheduler's last word is awaited
        self.ended = asyncio.Event()  # the scheduler's last word came, or will never come
        self._stream = stream
        self._metrics = metrics
        self._waiting: list[RequestOutput] = []
        self._wake = asyncio.Event()
        self._error: ServiceError | None = None
        self._num_tokens = 0

    def put(self, output: RequestOutput) -> None:
        """Called by the receive loop."""
        self._measure(output)
        if output.finish is not None:
            self.ended.set()
        if not self.abandoned:
            self._waiting.append(output)
            if self._stream or output.finish is not None:
                self._wake.set()

    def fail(self, error: ServiceError) -> None:
        """No output will come any more."""
        self._error = error
        self.ended.set()
        self._wake.set()

    async def next(self) -> RequestOutput:
        """The next output. Raises what `fail` was given, after the outputs that came before it."""
        await self._wake.wait()
        if not self._waiting and self._error is not None:
            raise self._error
        if not self._stream or len(self._waiting) > _MERGE_ABOVE:
            output, self._waiting = merge_outputs(self._waiting), []
        else:
            output = self._waiting.pop(0)
        if not self._waiting and self._error is None:
            self._wake.clear()
        return output

    def abandon(self) -> None:
        """The reader leaves before the end."""
        self.abandoned = True
        self._waiting.clear()

    def _measure(self, output: RequestOutput) -> None:
        now = time.monotonic()
        clock, metrics, new = self.clock, self._metrics, len(output.new_ids)
        is_first = self._num_tokens == 0
        if new:
            before = clock.last_token
            clock.last_token = now
            if is_first:
                clock.first_token = before = self._first_token_time(output, now)
            if metrics:
                metrics.tokens(new)
                if is_first:
                    metrics.first_token(clock.first_token - clock.arrived, is_streaming=self._stream)
                gaps = new - 1 if is_first else new
                metrics.token_gaps(now - before, gaps)
            self._num_tokens += new
        if output.finish is None:
            return
        clock.finished = now
        if metrics:
            metrics.prompt_computed(output.prompt_tokens, output.cached_tokens)
            metrics.finished(
                seconds=now - clock.arrived,
                decode_seconds=clock.last_token - clock.first_token,
                completion_tokens=self._num_tokens,
                aborted=output.finish.type == "abort",
            )

    def _first_token_time(self, output: RequestOutput, now: float) -> float:
        """Now, unless the scheduler bundled several tokens and says when the first one was ready."""
        if len(output.new_ids) > 1 and output.times is not None and output.times.prefill_finished:
            return min(now, self.clock.arrived + max(0.0, output.times.prefill_finished - self.clock.arrived_at))
        return now


def merge_outputs(outputs: list[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one sequence as one. The list must not be empty."""
    if len(outputs) == 1:
        return outputs[0]
    return msgspec.structs.replace(
        outputs[-1],
        new_ids=[token for output in outputs for token in output.new_ids],
        input_logprobs=next((output.input_logprobs for output in outputs if output.input_logprobs is not None), None),
        output_logprobs=merge_logprobs([output.output_logprobs for output in outputs if output.output_logprobs is not None]),
    )


def merge_logprobs(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    """Logprobs of consecutive positions as one; None for no parts."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return TokenLogprobs(
        ids=[token for part in parts for token in part.ids],
        logprobs=[logprob for part in parts for logprob in part.logprobs],
        top=None if parts[0].top is None else [entry for part in parts for entry in part.top or []],
        token_ids=None if parts[0].token_ids is None else [entry for part in parts for entry in part.token_ids or []],
    )
