"""One sequence inside the scheduler.

Everything follows from two numbers: tokens *known* (prompt, then sampled) and tokens *computed* (their KV exists, or a step
in flight is writing it). A long prompt, a decode and a request that lost its memory and starts over are the same case:
computed lags behind known, and the next step lets it catch up.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.errors import DeadlineExceeded
from sglang.srt.managers.io_struct import FinishReason, GenerateReq, RequestTimes, TokenLogprobs
from sglang.srt.mem_cache.radix_cache import CacheKey, PrefixMatch

if TYPE_CHECKING:
    from sglang.srt.constrained.grammar_state import GrammarState
    from sglang.srt.managers.stop_checker import StopChecker
    from sglang.srt.sampling.sampling_state import SamplingState


class ReqState(enum.Enum):
    COMPILING = "compiling"  # its grammar is not ready; holds no memory
    WAITING = "waiting"  # in the queue, holds no memory
    RUNNING = "running"  # has a slot and pages
    RETRACTING = "retracting"  # chosen to give its memory back; a step in flight still uses it
    FINISHED = "finished"  # the client has its last output; memory goes when no step in flight uses it


@dataclass(eq=False)
class Req:
    """A request and its memory. `ids` are the tokens known; `num_pending` more are being sampled by steps in flight."""

    msg: GenerateReq
    arrival: int  # sequence number, unique: earlier ones are retracted later
    max_new_tokens: int  # resolved: never None, fits context and pool
    sampling: SamplingState
    stop: StopChecker
    restore: str  # "exact" or "bounded", see PageKeeper.attach
    decoder_start: int = 0  # first position of the decoder half; fixed by the prompt's length, so also after a retraction
    accepted: float = 0.0  # on the clock of the deadlines
    time_limit_s: float | None = None  # the request ends with 504 so long after it was accepted
    queue_limit_s: float | None = None  # the same, unless it has been scheduled by then
    times: RequestTimes = field(default_factory=RequestTimes)

    ids: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    state: ReqState = ReqState.WAITING
    grammar: GrammarState | None = None  # follows `ids`, so it survives a retraction as it is
    finish: FinishReason | None = None

    # progress
    num_computed: int = 0  # tokens whose KV exists once the steps in flight are done
    num_pending: int = 0  # tokens a step in flight samples for this request
    num_in_flight: int = 0  # steps submitted and not processed that have rows of this request

    # memory, valid while RUNNING, RETRACTING, or FINISHED with steps in flight
    slot: int = -1
    pages: list[int] = field(default_factory=list)  # page i holds tokens [i * page_size, (i + 1) * page_size)
    num_shared_pages: int = 0  # the first so many belong to the radix tree
    lock: PrefixMatch | None = None  # keeps the shared pages from eviction
    window_start: int = 0  # first position whose window latents exist (bounded restore)
    kv_start: int = 0  # first position whose global KV the rows must write; replayed rows below only rebuild windows
    state_from: int = 0  # from this position on the slot is fit to be kept as a snapshot
    snapshot_points: list[int] = field(default_factory=list)  # positions still to be kept as snapshots, ascending

    # output
    has_output: bool = False  # something has been sent
    num_emitted: int = 0  # output tokens sent
    output_logprobs: TokenLogprobs | None = None  # of tokens not yet sent
    input_logprobs: TokenLogprobs | None = None  # collected while the prompt is computed
    num_cached: int = 0  # prompt tokens found in the cache at first admission
    num_retractions: int = 0
    num_replayed: int = 0

    def __post_init__(self) -> None:
        self.ids = list(self.msg.input_ids)
        self.num_prompt = len(self.ids)

    @property
    def rid(self) -> str:
        return self.msg.rid

    @property
    def num_output(self) -> int:
        """Tokens sampled and known."""
        return len(self.ids) - self.num_prompt

    @property
    def num_known(self) -> int:
        """Tokens known when the steps in flight are done."""
        return len(self.ids) + self.num_pending

    @property
    def num_to_compute(self) -> int:
        """Rows the next step could compute. 0 when the token in flight will be the last one by length."""
        if self.num_computed >= self.num_prompt and self.num_output + self.num_pending >= self.max_new_tokens:
            return 0
        return self.num_known - self.num_computed

    @property
    def num_valid(self) -> int:
        """Computed tokens worth caching. A step that ran on after the last token may have written one more."""
        return min(self.num_computed, len(self.ids) - 1)

    @property
    def is_finished(self) -> bool:
        return self.state is ReqState.FINISHED

    @property
    def is_resident(self) -> bool:
        """True while it holds memory."""
        return self.slot >= 0

    def overdue(self, now: float) -> DeadlineExceeded | None:
        """Why the request must end at `now`, if its time is up."""
        waited = now - self.accepted
        if self.time_limit_s is not None and waited >= self.time_limit_s:
            return DeadlineExceeded(f"the request took longer than its {self.time_limit_s:g} s")
        if self.queue_limit_s is not None and waited >= self.queue_limit_s and self.is_first_admission:
            return DeadlineExceeded(f"the request waited longer than {self.queue_limit_s:g} s for its first step; try again later")
        return None

    @property
    def is_first_admission(self) -> bool:
        return self.times.first_scheduled == 0.0

    @property
    def salt(self) -> str:
        """Everything besides the ids that changes KV or windows. Approximate modes never mix with exact ones."""
        return f"{self.restore}:{self.decoder_start}:{self.msg.cache_salt}"

    def cache_key(self, num_tokens: int | None = None) -> CacheKey:
        """Key of the first `num_tokens` known ids (all by default)."""
        return CacheKey(ids=self.ids if num_tokens is None else self.ids[:num_tokens], salt=self.salt)

    # -- prompt logprobs ----------------------------------------------------------------------------------------------

    @property
    def next_logprob_position(self) -> int | None:
        """First prompt position whose logprob is wanted and missing; None when there is none."""
        if not self.msg.return_logprob or self.msg.logprob_start_len < 0:
            return None
        collected = len(self.input_logprobs.ids) if self.input_logprobs else 0
        position = self.msg.logprob_start_len + collected
        return position if position < self.num_prompt else None

    @property
    def match_limit(self) -> int:
        """Most tokens a prefix match may cover: the last one must be computed, and rows that feed prompt logprobs too."""
        position = self.next_logprob_position
        limit = len(self.ids) - 1
        return limit if position is None else max(0, min(limit, position - 1))

    def page_count(self, page_size: int) -> int:
        """Pages that all known tokens take."""
        return -(-self.num_known // page_size)
