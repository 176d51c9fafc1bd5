"""Where every row of a batch reads and writes: index tensors computed once per forward and shared by all layers.

Three questions are answered here and nowhere else: which latents a row's window consists of, which compressed groups a
batch completes and where their entries live, and how many groups a row may see. Everything derives from positions, page
tables and slots; no kernel keeps a counter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang.srt.model_executor.forward_batch import ForwardBatch
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config


@dataclass(frozen=True)
class RotaryTables:
    """cos and sin per row, float32 [T, qk_rope_head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class WindowPlan:
    """Windows over an extended list: per request the latents kept in its ring, then those of its new rows.

    The list has N entries. `old_*` fill the ring part, `new_entry` the rows of this batch; `index[t]` are row t's window by
    position (-1 where there is none).
    """

    size: int  # N
    old_entry: torch.Tensor  # int64 [n_old], place in the list
    old_slot: torch.Tensor  # int64 [n_old]
    old_ring: torch.Tensor  # int64 [n_old]
    new_entry: torch.Tensor  # int64 [T]
    index: torch.Tensor  # int64 [T, W]
    write_row: torch.Tensor  # int64 [n_write], rows whose latents stay in the rings
    write_slot: torch.Tensor  # int64 [n_write]
    write_ring: torch.Tensor  # int64 [n_write]


@dataclass(frozen=True)
class GroupPlan:
    """Groups of `ratio` tokens that this batch completes, and what each row may see of all groups."""

    ratio: int
    first_row: torch.Tensor  # int64 [n_groups], row of the group's first token; -1: it is in the tail ring
    second_row: torch.Tensor  # int64 [n_groups], row of its last token (the same row for ratio 1)
    slot: torch.Tensor  # int64 [n_groups], request state that holds the first token if first_row is -1
    position: torch.Tensor  # int64 [n_groups], position of the first token
    page: torch.Tensor  # int64 [n_groups]
    entry: torch.Tensor  # int64 [n_groups], place in the page
    visible: torch.Tensor  # int64 [T], groups complete at the row's own position
    visible_max: list[int]  # [R], groups complete after this batch


class ForwardPlan:
    """Index tensors of one batch (or of its rows from `decoder_start` on, see `for_decoder`)."""

    def __init__(
        self, config: DeepseekV41Config, batch: ForwardBatch, page_size: int, window_ring: int, tail_ring: int, window_low: list[int]
    ):
        self.config = config
        self.batch = batch
        self.page_size = page_size
        self.window_ring = window_ring
        self.tail_ring = tail_ring
        self.window_low = window_low  # [R], no window reaches below this position
        self.positions = batch.positions
        self.row_request = batch.row_request
        self.device = batch.positions.device
        self.row_start = [0]
        for n in batch.extend_lens:
            self.row_start.append(self.row_start[-1] + n)

    def rotary(self, scaled: bool, positions: torch.Tensor | None = None) -> RotaryTables:
        """Tables at `positions` (default: the rows'); `scaled`: layers with a compression ratio (model.md §5.2)."""
        if positions is None:
            return self._scaled_rotary if scaled else self._plain_rotary
        return rotary_tables(rotary_frequencies(self.config, scaled).to(self.device), positions)

    @cached_property
    def _scaled_rotary(self) -> RotaryTables:
        return self.rotary(True, self.positions)

    @cached_property
    def _plain_rotary(self) -> RotaryTables:
        return self.rotary(False, self.positions)

    @cached_property
    def window(self) -> WindowPlan:
        width, ring = self.config.sliding_window, self.window_ring
        old_entry: list[int] = []
        old_pos: list[int] = []
        old_slot: list[int] = []
        new_entry: list[int] = []
        first: list[int] = []
        low_entry: list[int] = []
        write_row: list[int] = []
        size = 0
        slots = self.batch.state_slots.tolist()
        for r, (prefix, extend) in enumerate(zip(self.batch.prefix_lens, self.batch.extend_lens)):
            keep = max(0, min(width - 1, prefix - self.window_low[r]))
            old_entry += range(size, size + keep)
            old_pos += range(prefix - keep, prefix)
            old_slot += [slots[r]] * keep
            new_entry += range(size + keep, size + keep + extend)
            first += range(size + keep - width + 1, size + keep - width + 1 + extend)
            # Rows below window_low exist only in the encoder half of a truncated prefill and see nothing older.
            low_entry += [size + max(0, self.window_low[r] - prefix)] * extend
            write_row += range(self.row_start[r] + max(0, extend - ring), self.row_start[r] + extend)
            size += keep + extend
        index = self._ids(first)[:, None] + torch.arange(width, device=self.device)
        rows = self._ids(write_row)
        return WindowPlan(
            size=size,
            old_entry=self._ids(old_entry),
            old_slot=self._ids(old_slot),
            old_ring=self._ids(old_pos) % ring,
            new_entry=self._ids(new_entry),
            index=torch.where(index >= self._ids(low_entry)[:, None], index, -1),
            write_row=rows,
            write_slot=self.batch.state_slots[self.row_request[rows]],
            write_ring=self.positions[rows] % ring,
        )

    @cached_property
    def groups(self) -> dict[int, GroupPlan]:
        """By ratio, for the ratios the model has."""
        return {ratio: self._groups(ratio) for ratio in sorted({r for r in self.config.compress_ratios if r})}

    def _groups(self, ratio: int) -> GroupPlan:
        first_row, second_row, request, position = [], [], [], []
        for r, (prefix, extend) in enumerate(zip(self.batch.prefix_lens, self.batch.extend_lens)):
            start = self.row_start[r]
            # A replayed row rebuilds windows only: the pages below kv_start are shared, and hold the exact values.
            missing = max(prefix, self.batch.kv_start[r])
            for group in range(missing // ratio, (prefix + extend) // ratio):
                first = group * ratio - prefix
                first_row.append(start + first if first >= 0 else -1)
                second_row.append(start + first + ratio - 1)
                request.append(r)
                position.append(group * ratio)
        requests, positions = self._ids(request), self._ids(position)
        page, entry = self.locate(requests, positions // ratio, ratio)
        return GroupPlan(
            ratio=ratio,
            first_row=self._ids(first_row),
            second_row=self._ids(second_row),
            slot=self.batch.state_slots[requests],
            position=positions,
            page=page,
            entry=entry,
            visible=(self.positions + 1) // ratio,
            visible_max=[(p + n) // ratio for p, n in zip(self.batch.prefix_lens, self.batch.extend_lens)],
        )

    def locate(self, request: torch.Tensor, group: torch.Tensor, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and entry of a group of a request; shapes as given. Groups below 0 give page -1."""
        per_page = self.page_size // ratio
        safe = group.clamp(min=0)
        page = self.batch.page_tables[request, safe // per_page]
        return torch.where(group >= 0, page, -1), safe % per_page

    def _ids(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def rotary_frequencies(config: DeepseekV41Config, scaled: bool) -> torch.Tensor:
    """float32 [qk_rope_head_dim / 2], radians per position (model.md §5.2; computed in float64, rounded once)."""
    width = config.qk_rope_head_dim
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    if not scaled:
        return (config.rope_theta**-exponent).float()
    frequency = config.compress_rope_theta**-exponent
    yarn = config.rope_scaling
    if yarn is None:
        return frequency.float()

    def correction(rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(config.compress_rope_theta))

    low = min(max(math.floor(correction(yarn.beta_fast)), 0), width - 1)
    high = min(max(math.ceil(correction(yarn.beta_slow)), 0), width - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
    return (frequency / yarn.factor * ramp + frequency * (1 - ramp)).float()


def rotary_tables(frequencies: torch.Tensor, positions: torch.Tensor) -> RotaryTables:
    """The angle is rounded to float32 before cos and sin, as every implementation of this model does (trap 8)."""
    angle = positions.float()[:, None] * frequencies
    return RotaryTables(torch.cos(angle), torch.sin(angle))
