"""What the HTTP process hears: outputs of requests, when they are due, and everything else as it is."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.managers.io_struct import BatchOutput, Message, RequestOutput, RequestTimes, SchedulerStats
from sglang.srt.managers.request import Req


class OutputSender:
    """Collects the outputs of a step and sends them in one message."""

    def __init__(self, send: Callable[[Message], None], stream_interval: int):
        self.send = send
        self._stream_interval = stream_interval
        self._due: list[RequestOutput] = []

    def add(self, req: Req) -> None:
        """Queue what `req` has not told yet, if it is time: at its end, and in a stream every interval tokens from the first."""
        unsent = req.num_output - req.num_emitted
        interval = req.msg.sampling.stream_interval or self._stream_interval
        is_due = req.msg.stream and unsent > 0 and (req.num_emitted == 0 or unsent >= interval)
        if req.finish is not None or is_due:
            self._due.append(self._output(req))

    def flush(self, stats: Callable[[], SchedulerStats]) -> None:
        """Send what is due, with the current statistics."""
        if self._due:
            self.send(BatchOutput(outputs=self._due, stats=stats()))
            self._due = []

    def _output(self, req: Req) -> RequestOutput:
        is_first, is_last = not req.has_output, req.finish is not None
        output = RequestOutput(
            rid=req.rid,
            new_ids=req.ids[req.num_prompt + req.num_emitted :],
            finish=req.finish,
            prompt_tokens=req.num_prompt,
            completion_tokens=req.num_output,
            cached_tokens=req.num_cached,
            num_retractions=req.num_retractions,
            replayed_tokens=req.num_replayed,
            truncated_tokens=req.decoder_start,
            input_logprobs=req.input_logprobs if is_first else None,
            output_logprobs=req.output_logprobs,
            times=_copy(req.times) if is_last else None,
            ignored_keywords=list(req.grammar.ignored) if is_last and req.grammar is not None else [],
        )
        req.has_output = True
        req.num_emitted = req.num_output
        req.output_logprobs = None
        return output


def _copy(times: RequestTimes) -> RequestTimes:
    return RequestTimes(
        arrived=times.arrived, first_scheduled=times.first_scheduled, prefill_finished=times.prefill_finished, finished=times.finished
    )
