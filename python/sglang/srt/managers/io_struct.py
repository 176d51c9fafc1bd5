"""Messages between the HTTP process (tokenizer manager) and a scheduler process.

Encoded with msgpack over ZeroMQ, one message per frame. All are tagged structs of plain data: nothing that arrives can
name a class or run code. Two unions list what may travel in each direction; the decoders refuse everything else.
"""

from __future__ import annotations

from typing import Union

import msgspec

from sglang.srt.constrained.constraint import Constraint
from sglang.srt.sampling.sampling_params import SamplingParams


class Message(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Base of all messages; the class name is the tag on the wire."""


# -- towards the scheduler ---------------------------------------------------------------------------------------------


class GenerateReq(Message):
    """One sequence to continue. A list prompt or n > 1 is split into several of these by the tokenizer manager."""

    rid: str  # unique among running requests of this scheduler
    input_ids: list[int]  # prompt, every id in [0, vocab_size)
    sampling: SamplingParams  # normalised; sampling_seed is always set
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1  # first prompt position whose logprob is wanted; -1: output tokens only
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None  # extra ids whose logprob is wanted at every position
    priority: int = 0  # larger runs earlier, with --schedule-policy priority
    cache_salt: str = ""  # requests with different salts share no cached page
    deadline_s: float | None = None  # seconds this request may take in all, from its arrival at the scheduler
    swa_restore: str | None = None  # override of --swa-restore for this request
    prefill_truncation: str | None = None  # override of --prefill-truncation
    constraint: Constraint | None = None  # a grammar for the output; the grammar fields of `sampling` are its sources


class AbortReq(Message):
    """Stop one request, or all. Unknown ids are ignored: the request may just have ended."""

    rid: str = ""
    abort_all: bool = False
    reason: str = "aborted"


class FlushCacheReq(Message):
    """Drop every cached page and snapshot. Refused while requests run, after waiting up to timeout_s for idleness."""

    call_id: str
    timeout_s: float = 0.0


class GetStateReq(Message):
    """Ask for the scheduler's resolved arguments, pool table and counters."""

    call_id: str


class ShutdownReq(Message):
    """Finish running requests for at most drain_s seconds, abort the rest, exit."""

    drain_s: float = 0.0


# -- towards the HTTP process ------------------------------------------------------------------------------------------


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why a request ended; `type` is SGLang's: stop, length or abort."""

    type: str
    matched: int | str | None = None  # stop: the id or string that matched (None: several ids of a grammar end)
    length: int | None = None  # length: tokens produced
    message: str | None = None  # abort
    status_code: int | None = None  # abort: HTTP status; None means an ordinary answer with partial text
    err_type: str | None = None


class TokenLogprobs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Logprobs of consecutive positions. `logprobs[i]` belongs to `ids[i]`; None only for the first prompt token."""

    ids: list[int] = []
    logprobs: list[float | None] = []
    top: list[list[tuple[float, int]] | None] | None = None  # per position: (logprob, id), best first
    token_ids: list[list[tuple[float, int]] | None] | None = None  # per position, in the order asked


class RequestTimes(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Seconds on the scheduler's time.time() clock; 0.0 means not reached."""

    arrived: float = 0.0
    first_scheduled: float = 0.0
    prefill_finished: float = 0.0
    finished: float = 0.0


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step produced for one request. The stream of these is complete: ids concatenated are the output."""

    rid: str
    new_ids: list[int] = []
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0  # total so far, including new_ids
    cached_tokens: int = 0
    num_retractions: int = 0
    replayed_tokens: int = 0  # tokens recomputed by a bounded window restore (0 in exact mode)
    truncated_tokens: int = 0  # prompt rows whose decoder half was skipped (0 unless prefill truncation is on)
    input_logprobs: TokenLogprobs | None = None  # complete, on the first output of the request only
    output_logprobs: TokenLogprobs | None = None  # for new_ids
    times: RequestTimes | None = None  # on the last output
    ignored_keywords: list[str] = []  # "/pointer keyword" of a schema that were not enforced; on the last output
    spec: dict[str, float | list[int]] | None = None  # speculation counters, on the last output


class SchedulerStats(msgspec.Struct, kw_only=True):
    """Gauges and counters as the scheduler sees them; travels with every output batch and on every idle transition."""

    num_running_reqs: int = 0
    num_queue_reqs: int = 0
    num_used_tokens: int = 0  # tokens in pages that are neither free nor evictable
    max_total_num_tokens: int = 0
    token_usage: float = 0.0  # num_used_tokens / max_total_num_tokens
    num_retracted_reqs: int = 0  # counter
    num_aborted_reqs: int = 0  # counter: aborts of requests that were still running or queued
    cache_hit_tokens: int = 0  # counter
    cache_miss_tokens: int = 0  # counter
    gen_throughput: float = 0.0  # tokens/s over the last report interval
    num_steps: int = 0  # counter
    forward_seconds: float = 0.0  # counter: time inside the model
    books_balanced: bool = True  # result of the last idle check
    pools: dict[str, dict[str, int]] = {}  # pool name -> {total, free, evictable, held}
    extra: dict[str, float] = {}  # anything else worth a gauge, by metric name without prefix


class BatchOutput(Message):
    outputs: list[RequestOutput]
    stats: SchedulerStats | None = None


class FlushCacheReply(Message):
    call_id: str
    success: bool
    message: str = ""


class GetStateReply(Message):
    call_id: str
    state: dict[str, object]  # JSON-able


class SchedulerReady(Message):
    """Sent once, when the model is loaded and requests are welcome."""

    max_total_num_tokens: int
    max_running_requests: int
    context_length: int
    max_request_tokens: int  # prompt + output of one request may not exceed this (pool size less one page)
    state: dict[str, object] = {}


class SchedulerFailed(Message):
    """Start-up or the loop failed; the process exits after sending this."""

    message: str
    is_config_error: bool = False


ToScheduler = Union[GenerateReq, AbortReq, FlushCacheReq, GetStateReq, ShutdownReq]
FromScheduler = Union[BatchOutput, FlushCacheReply, GetStateReply, SchedulerReady, SchedulerFailed]

encode = msgspec.msgpack.Encoder().encode
decode_to_scheduler = msgspec.msgpack.Decoder(ToScheduler).decode
decode_from_scheduler = msgspec.msgpack.Decoder(FromScheduler).decode
