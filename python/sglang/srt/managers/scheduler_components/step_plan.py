"""A step as the scheduler sees it: which request computes which positions, and the memory operations before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang.srt.managers.request import Req
from sglang.srt.model_executor.forward_batch import FUTURE_TOKEN, NO_TOKEN, ForwardBatch
from sglang.srt.model_executor.step import PoolOp, PromptLogprobSpec, StepInput, StepRequest


@dataclass(frozen=True, slots=True)
class Row:
    """Rows of one request: positions [start, end) are computed. `samples` if they reach the last known token."""

    req: Req
    start: int
    end: int
    samples: bool
    prompt_logprobs: PromptLogprobSpec | None


@dataclass(slots=True)
class Snapshot:
    """A copy of a running request's state at `num_tokens`, taken by this step; the tree gets it once the step has run."""

    req: Req
    num_tokens: int
    slot: int
    tail_page: int | None  # copy of the request's last, partly filled page


@dataclass(slots=True)
class Step:
    """A step being planned, then in flight."""

    rows: list[Row] = field(default_factory=list)
    ops: list[PoolOp] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    free_pages: list[int] = field(default_factory=list)  # nobody's once this step has run: it may still touch them

    @property
    def num_prompt_rows(self) -> int:
        return sum(row.end - row.start for row in self.rows if row.end - row.start > 1)

    @property
    def samples_in_grammar(self) -> bool:
        """True where the next step's masks depend on tokens of this one."""
        return any(row.samples and row.req.grammar is not None and not row.req.is_finished for row in self.rows)

    def add_rows(self, req: Req, end: int) -> None:
        """Let `req` compute up to `end` in this step and advance its counters."""
        samples = end == req.num_known
        spec = prompt_logprob_spec(req, req.num_computed, end)
        self.rows.append(Row(req, req.num_computed, end, samples, spec))
        req.num_computed = end
        req.num_in_flight += 1
        req.num_pending += samples

    def build_input(self, num_history: int, device: str = "cpu") -> StepInput:
        """The ragged batch. `num_history` is engram_max_ngram_size - 1."""
        return StepInput(
            batch=ForwardBatch.build(
                tokens=[_row_ids(row) for row in self.rows],
                prefix_lens=[row.start for row in self.rows],
                pages=[row.req.pages for row in self.rows],
                state_slots=[row.req.slot for row in self.rows],
                history=[_history(row, num_history) for row in self.rows],
                output_rows=_output_rows(self.rows),
                window_start=[row.req.window_start for row in self.rows],
                decoder_start=[row.req.decoder_start for row in self.rows],
                kv_start=[row.req.kv_start for row in self.rows],
                device=device,
            ),
            requests=[StepRequest(row.req.sampling if row.samples else None, row.end, row.prompt_logprobs) for row in self.rows],
            before=self.ops,
        )


def prompt_logprob_spec(req: Req, start: int, end: int) -> PromptLogprobSpec | None:
    """Which rows of the chunk [start, end) give prompt logprobs that are wanted and not yet collected or in flight."""
    wanted = req.next_logprob_position
    if wanted is None:
        return None
    # The row of position p predicts the token at p + 1. Chunks come in order, so whatever lies before `start` is collected
    # or in flight.
    first, last = max(start, wanted - 1), min(end, req.num_prompt - 1)
    if first >= last:
        return None
    return PromptLogprobSpec(first - start, req.ids[first + 1 : last + 1], req.msg.top_logprobs_num, req.msg.token_ids_logprob)


def _row_ids(row: Row) -> list[int]:
    """Input ids; at most the last one is still being sampled by the step in flight."""
    ids = row.req.ids[row.start : row.end]
    return ids + [FUTURE_TOKEN] * (row.end - row.start - len(ids))


def _history(row: Row, count: int) -> list[int]:
    """Ids before the first row, newest first. All of them are known: only the row itself can be a future token."""
    return [row.req.ids[p] if p >= 0 else NO_TOKEN for p in range(row.start - 1, row.start - 1 - count, -1)]


def _output_rows(rows: list[Row]) -> list[int]:
    wanted, offset = [], 0
    for row in rows:
        count = row.end - row.start
        chosen: set[int] = set()
        if row.prompt_logprobs:
            first = offset + row.prompt_logprobs.first_row
            chosen.update(range(first, first + len(row.prompt_logprobs.targets)))
        if row.samples:
            chosen.add(offset + count - 1)
        wanted += sorted(chosen)
        offset += count
    return wanted
