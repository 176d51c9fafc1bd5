"""The HTTP process's centre: sequences in, outputs back, one dictionary from rid to running sequence.

Nothing here blocks and nothing here knows HTTP. Three promises to the routes:

* Whoever stops reading `run` before the end, by closing the iterator or by cancellation, aborts the sequence. Whoever reads
  to the end does not (so an abort in the log or the metrics always means one).
* When the scheduler dies, every running sequence raises EngineFailed at once, and new ones are refused.
* The seed in effect is known: `SequenceOutput.seed` reproduces the answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncGenerator

import msgspec

from sglang.srt.errors import BadRequest, ConfigError, EngineFailed, Overloaded, ServiceError, from_status
from sglang.srt.managers import io_struct
from sglang.srt.managers.admission import Limits, check_sequence, constraint_of
from sglang.srt.managers.detokenizer import IncrementalDetokenizer
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchOutput,
    FlushCacheReply,
    FlushCacheReq,
    GenerateReq,
    GetStateReply,
    GetStateReq,
    RequestOutput,
    SchedulerFailed,
    SchedulerReady,
    SchedulerStats,
    ShutdownReq,
)
from sglang.srt.managers.model_info import ModelInfo
from sglang.srt.managers.running_sequence import RunningSequence
from sglang.srt.managers.scheduler_link import SchedulerLink, pack
from sglang.srt.managers.sequence import SequenceOutput, SequenceRequest
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.observability.metrics import ENGINE_TYPES, FrontMetrics
from sglang.srt.sampling.seeds import draw_seed
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
"""Longest wait for the scheduler's answer to a question; it answers between two steps."""
SAME_RID_WAIT_S = 2.0
"""A rid whose reader just left may be used again at once: the new request waits this long for the old one to end."""


class TokenizerManager:
    """One per HTTP process or offline engine. Everything except the constructor belongs to one event loop."""

    def __init__(self, args: ServerArgs, tokenizer: Tokenizer, model: ModelInfo, link: SchedulerLink):
        self.args = args
        self.tokenizer = tokenizer
        self.model = model
        self.context_length = model.context_length
        self.stats = SchedulerStats()
        self.metrics = FrontMetrics(args.model_name, ENGINE_TYPES.get(args.disaggregation_mode, "unified"))
        self.metrics.watch_scheduler(lambda: self.stats)
        self.last_output_at = 0.0  # monotonic; when the scheduler last produced anything
        self.is_draining = False
        self.failure: str | None = None  # why the scheduler is gone
        self.scheduler_state: dict[str, object] = {}  # what the scheduler said of itself when it became ready
        self._limits = Limits(model.vocab_size, model.context_length, model.context_length, args.allow_auto_truncate)
        self._max_sequences = args.max_running_requests + args.max_queued_requests
        self._random = random.SystemRandom() if args.random_seed is None else random.Random(args.random_seed)
        self.link = link
        self._sequences: dict[str, RunningSequence] = {}
        self._calls: dict[str, asyncio.Future[FlushCacheReply | GetStateReply]] = {}
        self._became_ready: asyncio.Future[SchedulerReady] | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._is_warm = False

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the sockets and begin to receive; call it in the loop that will own this object, before the scheduler starts."""
        self.link.open()
        self._became_ready = asyncio.get_running_loop().create_future()
        self._receiver = asyncio.create_task(self._receive(), name="receive from scheduler")

    async def wait_ready(self, timeout_s: float) -> SchedulerReady:
        """Wait until the scheduler has loaded. Raises ConfigError or EngineFailed with its reason, or TimeoutError."""
        assert self._became_ready is not None, "start() comes first"
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._became_ready)

    def mark_warm(self) -> None:
        """Start-up is over: /ready may say so."""
        self._is_warm = True

    @property
    def is_alive(self) -> bool:
        """The scheduler has loaded and has not died."""
        return self.failure is None and self._became_ready is not None and self._became_ready.done()

    @property
    def is_ready(self) -> bool:
        """New requests are welcome."""
        return self.is_alive and self._is_warm and not self.is_draining

    @property
    def num_sequences(self) -> int:
        """Sequences the scheduler still has, abandoned ones included."""
        return len(self._sequences)

    def begin_drain(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self.is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs; False if that did not happen in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._sequences:
                    await next(iter(self._sequences.values())).ended.wait()
        except TimeoutError:
            return False
        return True

    def shut_down_scheduler(self, drain_s: float = 0.0) -> None:
        """Ask the scheduler to exit."""
        self.link.send(ShutdownReq(drain_s=drain_s))

    def fail(self, reason: str, *, is_config_error: bool = False) -> None:
        """The scheduler is gone: fail everything that waits for it. Only the first reason counts."""
        if self.failure is not None:
            return
        self.failure = reason
        if self._became_ready is not None and self._became_ready.done():
            logger.error("the engine stopped: %s", reason)
        for rid, sequence in list(self._sequences.items()):
            sequence.fail(EngineFailed(f"the engine stopped while request {rid} was running"))
        self._sequences.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineFailed("the engine stopped"))
        if self._became_ready is not None and not self._became_ready.done():
            self._became_ready.set_exception(ConfigError(reason) if is_config_error else EngineFailed(reason))
            self._became_ready.exception()  # it may be that nobody waits

    async def close(self) -> None:
        """Stop receiving and close the sockets."""
        if self._sequences or self._calls:
            self.fail("the engine was shut down")
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
            self._receiver = None
        self.link.close()

    # -- sequences ---------------------------------------------------------------------------------------------------

    def new_rid(self) -> str:
        """An id no other request has."""
        return uuid.uuid4().hex

    def new_seed(self) -> int:
        """A seed for a request that brought none; a function of --random-seed and the order of requests if that is set."""
        return draw_seed(self._random)

    def room(self, prompt_tokens: int) -> int:
        """Tokens an answer to a prompt of this length may have."""
        return self._limits.room(prompt_tokens)

    def check_count(self, count: int) -> None:
        """Refuse a request whose sequences can never be here all at once; a 503 would invite it to come again. Raises BadRequest."""
        if count > self._max_sequences:
            raise BadRequest(
                f"the request asks for {count} answers (prompts x n), but this worker takes {self._max_sequences} at a time: "
                f"{self.args.max_running_requests} running and {self.args.max_queued_requests} waiting; ask for fewer at once"
            )

    async def run(self, seq: SequenceRequest, *, is_internal: bool = False) -> AsyncGenerator[SequenceOutput, None]:
        """Outputs of one sequence until the one with a finish reason.

        Raises a ServiceError at the first step if the sequence is refused, or later if it fails. Close the iterator
        (contextlib.aclosing) when leaving early. `is_internal` keeps a sequence out of the metrics.
        """
        request = self._prepare(seq)
        frame = _packed(request)
        await self._wait_for_rid(seq.rid)
        self._refuse_unless_alive(is_internal)
        running = RunningSequence(seq.rid, stream=seq.stream, metrics=None if is_internal else self.metrics)
        self._sequences[seq.rid] = running
        detokenizer = self._detokenizer(request)
        self.link.send_packed(frame)
        running.clock.dispatched = time.monotonic()
        is_over = False
        try:
            while not is_over:
                try:
                    output = await running.next()
                except ServiceError:
                    is_over = True
                    raise
                is_over = output.finish is not None
                if output.finish is not None and output.finish.status_code is not None:
                    raise from_status(output.finish.status_code, output.finish.message or "the request failed")
                yield _to_sequence_output(output, request, detokenizer, running)
        finally:
            if not is_over:
                self._abandon(running)

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Stop one sequence, or all. Unknown rids are ignored. The sequence ends with a finish reason of type abort."""
        if abort_all or rid in self._sequences:
            self.link.send(AbortReq(rid="" if abort_all else rid, abort_all=abort_all, reason="aborted by request"))

    def _refuse_unless_alive(self, is_internal: bool) -> None:
        if self.failure is not None:
            raise Overloaded("the engine has stopped; this worker is shutting down", retry_after_s=5)
        if not self.is_alive:
            raise Overloaded("the model is still loading", retry_after_s=5)
        if self.is_draining and not is_internal:
            raise Overloaded("this worker is shutting down", retry_after_s=5)
        if len(self._sequences) >= self._max_sequences:
            raise Overloaded(f"{len(self._sequences)} requests are running or waiting, the most this worker takes; try again later")

    def _prepare(self, seq: SequenceRequest) -> GenerateReq:
        sampling = check_sequence(seq, self._limits)
        if sampling.sampling_seed is None:
            sampling = msgspec.structs.replace(sampling, sampling_seed=self.new_seed())
        return GenerateReq(
            rid=seq.rid,
            input_ids=seq.input_ids,
            sampling=sampling,
            stream=seq.stream,
            return_logprob=seq.return_logprob,
            logprob_start_len=seq.logprob_start_len,
            top_logprobs_num=seq.top_logprobs_num,
            token_ids_logprob=seq.token_ids_logprob,
            priority=seq.priority,
            cache_salt=seq.cache_salt,
            deadline_s=seq.deadline_s or self.args.request_timeout_s or None,
            swa_restore=seq.swa_restore,
            prefill_truncation=seq.prefill_truncation,
            constraint=constraint_of(seq, self._limits.vocab_size),
        )

    async def _wait_for_rid(self, rid: str) -> None:
        """Two running requests may not share a rid, but one whose client just left ends by itself in a moment."""
        old = self._sequences.get(rid)
        if old is not None and old.abandoned:
            try:
                async with asyncio.timeout(SAME_RID_WAIT_S):
                    await old.ended.wait()
            except TimeoutError:
                pass  # still there: reported below
        if rid in self._sequences:
            raise BadRequest(f"rid {rid!r} is already in use by a running request", param="rid")

    def _detokenizer(self, request: GenerateReq) -> IncrementalDetokenizer:
        sampling = request.sampling
        return IncrementalDetokenizer(
            self.tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            stop=sampling.stop,
            no_stop_trim=sampling.no_stop_trim,
        )

    def _abandon(self, running: RunningSequence) -> None:
        running.abandon()
        if not running.ended.is_set():
            self.link.send(AbortReq(rid=running.rid, reason="the client went away"))

    # -- questions to the scheduler ----------------------------------------------------------------------------------

    async def flush_cache(self, timeout_s: float = 0.0) -> tuple[bool, str]:
        """Drop the prefix cache, waiting up to timeout_s for idleness. (False, why) while requests run."""
        call_id = self.new_rid()
        reply = await self._ask(FlushCacheReq(call_id=call_id, timeout_s=timeout_s), call_id, CALL_TIMEOUT_S + timeout_s)
        assert isinstance(reply, FlushCacheReply)
        return reply.success, reply.message

    async def get_state(self) -> dict[str, object]:
        """The scheduler's own account of its arguments, pools and counters. JSON-able."""
        call_id = self.new_rid()
        reply = await self._ask(GetStateReq(call_id=call_id), call_id, CALL_TIMEOUT_S)
        assert isinstance(reply, GetStateReply)
        return reply.state

    async def _ask(self, message: FlushCacheReq | GetStateReq, call_id: str, timeout_s: float) -> FlushCacheReply | GetStateReply:
        if not self.is_alive:
            raise Overloaded("the engine is not running", retry_after_s=5)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self.link.send(message)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Overloaded(f"the scheduler did not answer within {timeout_s:g} s", retry_after_s=5) from None
        finally:
            del self._calls[call_id]

    # -- what the scheduler says -------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            try:
                message = await self.link.receive()
            except msgspec.DecodeError as error:
                self.fail(f"the scheduler sent something that is not a message: {error}")
                return
            self._handle(message)

    def _handle(self, message: io_struct.FromScheduler) -> None:
        match message:
            case BatchOutput():
                self._deliver(message)
            case FlushCacheReply() | GetStateReply():
                call = self._calls.get(message.call_id)
                if call is not None and not call.done():
                    call.set_result(message)
            case SchedulerReady():
                self._take_ready(message)
            case SchedulerFailed():
                self.fail(message.message, is_config_error=message.is_config_error)

    def _deliver(self, batch: BatchOutput) -> None:
        if batch.stats is not None:
            self.stats = batch.stats
        if batch.outputs:
            self.last_output_at = time.monotonic()
        for output in batch.outputs:
            running = self._sequences.get(output.rid)
            if running is None:
                continue  # it failed, or its abort crossed this message
            if output.finish is not None:
                del self._sequences[output.rid]
            running.put(output)

    def _take_ready(self, ready: SchedulerReady) -> None:
        self.context_length = min(self.model.context_length, ready.context_length)
        self.scheduler_state = ready.state
        self._limits = Limits(self.model.vocab_size, self.context_length, ready.max_request_tokens, self.args.allow_auto_truncate)
        if self._became_ready is not None and not self._became_ready.done():
            self._became_ready.set_result(ready)


def _packed(request: GenerateReq) -> bytes:
    try:
        return pack(request)
    except ValueError as error:
        raise BadRequest(f"the request holds a value that cannot be passed on: {error}") from None


def _to_sequence_output(
    output: RequestOutput, request: GenerateReq, detokenizer: IncrementalDetokenizer, running: RunningSequence
) -> SequenceOutput:
    seed = request.sampling.sampling_seed
    assert seed is not None, "_prepare draws a seed"
    return SequenceOutput(
        rid=output.rid,
        new_ids=output.new_ids,
        new_text=detokenizer.push(output.new_ids, output.finish),
        finish=output.finish,
        prompt_tokens=output.prompt_tokens,
        completion_tokens=output.completion_tokens,
        cached_tokens=output.cached_tokens,
        input_logprobs=output.input_logprobs,
        output_logprobs=output.output_logprobs,
        raw=output,
        seed=seed,
        timing={} if output.finish is None else timing_of(running, output),
    )


def timing_of(running: RunningSequence, output: RequestOutput) -> dict[str, float]:
    """meta_info's times of a finished sequence: durations in seconds, names in _ts and _time are Unix time."""
    clock = running.clock
    offset = clock.arrived_at - clock.arrived
    timing = {
        "e2e_latency": clock.finished - clock.arrived,
        "request_received_ts": clock.arrived_at,
        "api_server_dispatch_finish_ts": clock.dispatched + offset,
        "request_finished_ts": clock.finished + offset,
    }
    if clock.first_token:
        timing["first_token_latency"] = clock.first_token - clock.arrived
        decoding = clock.last_token - clock.first_token
        if decoding > 0 and output.completion_tokens > 1:
            timing["decode_throughput"] = (output.completion_tokens - 1) / decoding
    times = output.times
    if times is not None and times.first_scheduled:
        timing["queue_time"] = times.first_scheduled - times.arrived
        timing["forward_entry_time"] = times.first_scheduled
        if times.prefill_finished:
            timing["prefill_finished_time"] = times.prefill_finished
    return timing
