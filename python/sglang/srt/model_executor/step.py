"""One step of the model as data: what the scheduler hands to the model thread, and what comes back.

A step is a ragged `ForwardBatch` plus, per request, what to sample and which logprobs to take. Memory operations that
must happen before the forward (copy on write of a page, restoring or taking a snapshot, clearing a slot) travel in the
step too, so one queue orders everything that touches the pools.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from sglang.srt.layers.sampler import SampledToken

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenLogprobs
    from sglang.srt.model_executor.forward_batch import ForwardBatch
    from sglang.srt.sampling.sampling_state import SamplingState


__all__ = ["PoolOp", "PromptLogprobSpec", "SampledToken", "StepInput", "StepOutput", "StepRequest"]


class PoolOp(NamedTuple):
    """A memory operation of the model runner. `reset_slot` uses `dst` only (`src` equals it)."""

    kind: Literal["copy_page", "copy_slot", "reset_slot"]
    src: int
    dst: int


@dataclass(slots=True)
class PromptLogprobSpec:
    """Logprobs wanted of prompt tokens that follow rows of this chunk.

    Row `first_row + i` of the chunk predicts `targets[i]`; so `targets` has one id per row from `first_row` on, and stops
    one short of the chunk's end where the last row predicts a token that is not part of the prompt.
    """

    first_row: int  # offset in this request's rows of the batch
    targets: list[int]
    top: int  # number of best (logprob, id) pairs per position
    token_ids: list[int] | None  # extra ids whose logprob is wanted at every position


@dataclass(slots=True)
class StepRequest:
    """What one request of the batch wants from its rows."""

    sampling: SamplingState | None  # None: the rows do not reach the last known token, nothing is sampled
    position: int  # absolute position of the token to be sampled: prefix_len + extend_len
    prompt_logprobs: PromptLogprobSpec | None = None


@dataclass(slots=True)
class StepInput:
    """Everything the model thread needs for one step. `requests[r]` belongs to request r of `batch`.

    `batch.output_rows` are exactly the rows whose logits someone wants, ascending: the last row of every request that
    samples, and the rows named by prompt logprob specs (a row can be both). Empty when the step only computes KV.
    """

    batch: ForwardBatch
    requests: list[StepRequest]
    before: list[PoolOp] = field(default_factory=list)  # done in this order, before the forward


@dataclass(slots=True)
class StepOutput:
    """Results of one step, one entry per request of the batch."""

    sampled: list[SampledToken | None]  # None where StepRequest.sampling was None
    prompt_logprobs: list[TokenLogprobs | None]
    forward_seconds: float  # wall time inside the model
