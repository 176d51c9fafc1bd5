"""One sequence as the HTTP side sees it: what a route asks for, and what it gets back step by step.

A route with several prompts or n > 1 makes one `SequenceRequest` per answer (`child_seed` gives each its own noise).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang.srt.constrained.constraint import Constraint
from sglang.srt.managers.io_struct import FinishReason, RequestOutput, TokenLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass
class SequenceRequest:
    """One prompt to continue. `rid` must be unique among running requests; `TokenizerManager.new_rid()` makes one."""

    rid: str
    input_ids: list[int]  # prompt, every id in [0, vocab_size)
    sampling: SamplingParams  # parsed and normalised; a missing seed is drawn by TokenizerManager.run
    stream: bool = True  # outputs as they come; False: the reply is wanted whole, outputs may come bundled
    return_logprob: bool = False
    logprob_start_len: int = -1  # first prompt position whose logprob is wanted; -1: output tokens only
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None  # extra ids whose logprob is wanted at every position
    priority: int = 0  # larger runs earlier, with --schedule-policy priority
    cache_salt: str = ""  # requests with different salts share no cached page
    deadline_s: float | None = None  # seconds this request may take in all; None: --request-timeout
    swa_restore: str | None = None  # override of --swa-restore
    prefill_truncation: str | None = None  # override of --prefill-truncation
    constraint: Constraint | None = None  # a grammar for the output, beside or instead of the grammar fields of `sampling`
    label: str = ""  # route or caller, for the log


@dataclass
class SequenceOutput:
    """What one step (or several, when the reader was slower) added to one sequence."""

    rid: str
    new_ids: list[int]  # a matched stop string's tokens and EOS included
    new_text: str  # whole characters only, never a part of a stop string; a matched stop is trimmed unless no_stop_trim
    finish: FinishReason | None
    prompt_tokens: int
    completion_tokens: int  # total so far, new_ids included
    cached_tokens: int
    input_logprobs: TokenLogprobs | None  # complete, on the first output only
    output_logprobs: TokenLogprobs | None  # for new_ids
    raw: RequestOutput  # the scheduler's own report: retractions, replayed and truncated tokens, times, speculation
    seed: int = 0  # the seed in effect, drawn or given
    timing: dict[str, float] = field(default_factory=dict)  # seconds and timestamps by meta_info name, on the last output
