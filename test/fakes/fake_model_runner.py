"""A model runner without a model: deterministic, fast, and suspicious.

The next token is a hash of all tokens before it, *as read back from the pages*. Every page cell holds (position, hash of
the whole prefix up to there), every slot a ring of the same for the last positions. Each step checks that what the
scheduler points at is what it should be: a wrong page table, slot, position or history, a page reused too early, a stale or
missing copy raises `WrongInput`. So a scheduler that gets through a test with this runner has moved memory correctly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from sglang.srt.managers.io_struct import TokenLogprobs
from sglang.srt.model_executor.forward_batch import FUTURE_TOKEN, NO_TOKEN
from sglang.srt.model_executor.step import SampledToken, StepInput, StepOutput, StepRequest

MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


class WrongInput(AssertionError):
    """The scheduler handed over a step that reads or writes the wrong memory."""


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, elementwise on uint64."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)) & MASK
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def prefix_hashes(ids: np.ndarray, start: int = 0, before: np.uint64 | int = 0) -> np.ndarray:
    """uint64 hash of the prefix that ends at each token; `before` is the hash of what lies before position `start`."""
    positions = np.arange(start, start + len(ids), dtype=np.uint64)
    with np.errstate(over="ignore"):
        terms = _mix(ids.astype(np.uint64) * np.uint64(1_000_003) + positions * np.uint64(0x1F123BB5))
        return np.cumsum(terms, dtype=np.uint64) + np.uint64(before)


def next_token(prefix_hash: np.uint64, vocab_size: int) -> int:
    """What follows a prefix."""
    return int(_mix(np.array([prefix_hash], dtype=np.uint64))[0] % np.uint64(vocab_size))


def logprob_of(prefix_hash: np.uint64, token_id: int) -> float:
    """An arbitrary but fixed logprob of `token_id` after a prefix."""
    return -float((int(prefix_hash) ^ (token_id * 7919)) % 10007) / 1000


def oracle(prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """The `count` tokens that any correct scheduler must produce after `prompt`."""
    ids = list(prompt)
    total = prefix_hashes(np.array(ids))[-1]
    for _ in range(count):
        ids.append(next_token(total, vocab_size))
        total = prefix_hashes(np.array(ids[-1:]), len(ids) - 1, total)[0]
    return ids[len(prompt) :]


class FakeModelRunner:
    """Has the interface of ModelRunner."""

    def __init__(self, *, num_pages: int = 2048, page_size: int = 4, num_slots: int = 16, window: int = 8, vocab_size: int = 1000,
                 max_positions: int = 1 << 20, backtracking: int = 6, delay_s: float = 0.0):  # fmt: skip
        self.page_size, self.num_pages, self.num_slots = page_size, num_pages, num_slots
        self.max_backtracking = backtracking - 1  # as the real one: one position is kept for a superfluous row
        self.config = SimpleNamespace(
            vocab_size=vocab_size, max_position_embeddings=max_positions, sliding_window=window, engram_max_ngram_size=4
        )
        self.window, self.ring = window, window + backtracking
        self.delay_s = delay_s
        self.before_run: Callable[[StepInput], None] | None = None  # hook of tests
        self.nan_ids: set[int] = set()  # a prompt with one of these ids gives NaN where it samples
        self.num_rows: list[int] = []  # rows of every step
        self.page_position = np.full((num_pages, page_size), -1, dtype=np.int64)
        self.page_hash = np.zeros((num_pages, page_size), dtype=np.uint64)
        self.page_id = np.zeros((num_pages, page_size), dtype=np.int64)
        self.ring_position = np.full((num_slots, self.ring), -1, dtype=np.int64)
        self.ring_hash = np.zeros((num_slots, self.ring), dtype=np.uint64)
        self.last_token = [(-1, -1)] * num_slots  # (position, id) sampled last

    def memory_table(self) -> list[dict]:
        return [{"pool": "pages", "unit": "page", "units": self.num_pages, "bytes_per_unit": 1, "bytes": self.num_pages}]

    def copy_page(self, src: int, dst: int) -> None:
        for cells in (self.page_position, self.page_hash, self.page_id):
            cells[dst] = cells[src]

    def copy_slot(self, src: int, dst: int) -> None:
        self.ring_position[dst], self.ring_hash[dst] = self.ring_position[src], self.ring_hash[src]

    def reset_slot(self, slot: int) -> None:
        self.ring_position[slot] = -1

    def run(self, step: StepInput) -> StepOutput:
        if self.before_run:
            self.before_run(step)
        if self.delay_s:
            time.sleep(self.delay_s)
        for op in step.before:
            self.reset_slot(op.dst) if op.kind == "reset_slot" else getattr(self, op.kind)(op.src, op.dst)
        batch = step.batch
        self.num_rows.append(batch.num_rows)
        slots, tables = batch.state_slots.tolist(), batch.page_tables.numpy()
        _require(len(set(slots)) == len(slots), f"two requests of a step share a slot: {slots}")
        ids, positions, histories = batch.input_ids.numpy(), batch.positions.numpy(), batch.history.tolist()
        hashes, first = [], 0
        for r, (start, count) in enumerate(zip(batch.prefix_lens, batch.extend_lens)):
            rows = slice(first, first + count)
            _require(positions[rows].tolist() == list(range(start, start + count)), f"request {r}: wrong positions")
            known = self._resolve(ids[rows].copy(), slots[r], start + count - 1)
            hashes.append(self._extend(slots[r], tables[r], start, known, histories[r], batch.window_start[r], batch.kv_start[r]))
            first += count
        _require(batch.output_rows.tolist() == _expected_output_rows(step), "wrong output rows")
        sampled = [self._sample(request, hashes[r], slots[r]) for r, request in enumerate(step.requests)]
        logprobs = [_prompt_logprobs(request, hashes[r]) for r, request in enumerate(step.requests)]
        return StepOutput(sampled=sampled, prompt_logprobs=logprobs, forward_seconds=self.delay_s)

    def _resolve(self, ids: np.ndarray, slot: int, last_position: int) -> np.ndarray:
        """Fill in the future token, which must be the one sampled for this slot at this position."""
        if ids[-1] == FUTURE_TOKEN:
            position, token = self.last_token[slot]
            _require(position == last_position, f"slot {slot}: no token was sampled for position {last_position}, but for {position}")
            ids[-1] = token
        _require(bool((ids >= 0).all()), "a token is unknown that is not the last one")
        return ids

    def _extend(
        self, slot: int, table: np.ndarray, start: int, ids: np.ndarray, history: list[int], window_start: int, kv_start: int
    ) -> np.ndarray:
        """Check what lies before `start`, write the new rows; returns their prefix hashes."""
        before = self._read(table, 0, start)
        expected = prefix_hashes(self._read(table, 0, start, self.page_id))
        _require(np.array_equal(before, expected), f"slot {slot}: pages before {start} hold another prefix: {table.tolist()}")
        newest_first = self._read(table, 0, start, self.page_id)[::-1][: len(history)].tolist()
        _require(history == newest_first + [NO_TOKEN] * (len(history) - len(newest_first)), f"slot {slot}: wrong history {history}")
        low = max(window_start, start - self.window, 0)
        window = np.arange(low, start)
        in_ring = self.ring_position[slot, window % self.ring]
        _require(np.array_equal(in_ring, window), f"slot {slot}: window before {start} holds positions {in_ring.tolist()}")
        _require(np.array_equal(self.ring_hash[slot, window % self.ring], before[low:]), f"slot {slot}: window of another prefix")
        hashes = prefix_hashes(ids, start, before[-1] if start else 0)
        where = np.arange(start, start + len(ids))
        new = where >= kv_start
        shared = self._read(table, start, min(kv_start, start + len(ids)))
        _require(np.array_equal(shared, hashes[~new]), f"slot {slot}: replayed rows do not agree with the shared pages")
        pages, cells = table[where[new] // self.page_size], where[new] % self.page_size
        self.page_position[pages, cells], self.page_hash[pages, cells], self.page_id[pages, cells] = where[new], hashes[new], ids[new]
        tail = where[-self.ring :]
        self.ring_position[slot, tail % self.ring], self.ring_hash[slot, tail % self.ring] = tail, hashes[-self.ring :]
        return hashes

    def _read(self, table: np.ndarray, start: int, end: int, cells: np.ndarray | None = None) -> np.ndarray:
        where = np.arange(start, end)
        pages, offsets = table[where // self.page_size], where % self.page_size
        found = self.page_position[pages, offsets]
        _require(np.array_equal(found, where), f"pages hold positions {found.tolist()} where {start}..{end - 1} should be")
        return (self.page_hash if cells is None else cells)[pages, offsets]

    def _sample(self, request: StepRequest, hashes: np.ndarray, slot: int) -> SampledToken | None:
        if request.sampling is None:
            return None
        token = next_token(hashes[-1], self.config.vocab_size)
        self.last_token[slot] = (request.position, token)
        if getattr(request.sampling, "is_poisoned", False):
            return SampledToken(id=0, error="the model produced NaN")
        top = [(logprob_of(hashes[-1], token), token)]
        return SampledToken(id=token, logprob=top[0][0], top=top, token_ids=None)


def _prompt_logprobs(request: StepRequest, hashes: np.ndarray) -> TokenLogprobs | None:
    spec = request.prompt_logprobs
    if spec is None:
        return None
    values = [logprob_of(h, target) for h, target in zip(hashes[spec.first_row :], spec.targets)]
    top = [[(value, target)] for value, target in zip(values, spec.targets)] if spec.top else None
    return TokenLogprobs(ids=list(spec.targets), logprobs=values, top=top)


def _expected_output_rows(step: StepInput) -> list[int]:
    rows, first = [], 0
    for request, count in zip(step.requests, step.batch.extend_lens):
        spec = request.prompt_logprobs
        wanted = set(range(spec.first_row, spec.first_row + len(spec.targets))) if spec else set()
        wanted |= {count - 1} if request.sampling is not None else set()
        _require(all(0 <= row < count for row in wanted), "a wanted row is not in the chunk")
        rows += [first + row for row in sorted(wanted)]
        first += count
    return rows


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise WrongInput(message)
