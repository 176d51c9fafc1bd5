"""DeepSeek-V4.1: from token ids to final hidden states and logits, on a ragged batch (model.md §3).

The stack has two halves. Layers below `n_prefill` (the encoder half) run on every row. The decoder half owns one compressed
cache, written from the input of its first layer; with a truncated prefill only rows from `decoder_start` on go through it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.kernels.linear_weight import LinearWeight
from sglang.srt.kernels.table import KernelTable
from sglang.srt.model_executor.forward_batch import NO_TOKEN, ForwardBatch
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.models.deepseek_v41.context import ForwardContext
from sglang.srt.models.deepseek_v41.engram import Engram
from sglang.srt.models.deepseek_v41.engram_hash import EngramHasher
from sglang.srt.models.deepseek_v41.layer import DecoderLayer
from sglang.srt.models.deepseek_v41.numerics import Numerics
from sglang.srt.models.deepseek_v41.plan import ForwardPlan
from sglang.srt.models.deepseek_v41.weights import Weights

if TYPE_CHECKING:
    from sglang.srt.mem_cache.global_kv_pool import GlobalKVPool
    from sglang.srt.mem_cache.state_pool import StatePool


@dataclass
class ModelOutput:
    """`hidden` [n_out, d]: final normed rows, in the order of `ForwardBatch.output_rows`."""

    hidden: torch.Tensor


class DeepseekV41Model:
    """The text backbone. Draft stages and vision are separate models over the same weights."""

    def __init__(self, config: DeepseekV41Config, weights: Weights, ops: KernelTable, numerics: Numerics, hasher: EngramHasher | None):
        self.config = config
        self.ops = ops
        self.numerics = numerics
        self.hasher = hasher
        self.weights = weights
        self.embed = weights.tensor("embed.weight")
        self.head = LinearWeight.dense(weights.tensor("head.weight"))
        self.norm = weights.tensor("norm.weight")
        parts = (config, weights, ops, numerics)
        self.layers = [DecoderLayer(layer, *parts) for layer in range(config.num_hidden_layers)]
        self.engrams = {layer: Engram(layer, *parts) for layer in config.engram_layer_ids}

    def forward(
        self,
        batch: ForwardBatch,
        state: StatePool,
        kv: GlobalKVPool,
        observe: Callable[[int, torch.Tensor], None] | None = None,
    ) -> ModelOutput:
        """Compute all rows of the batch, writing their caches. `observe(layer, residual)` is called after each layer."""
        config = self.config
        context = ForwardContext(self._plan(batch, state, kv, batch.window_start), state, kv)
        residual = self.embed[batch.input_ids].to(self.numerics.dtype)[:, None, :].repeat(1, config.hc_mult, 1)
        pre = torch.zeros(batch.num_rows, config.hc_mult, dtype=torch.float32, device=residual.device)
        pre[:, 0] = 1.0
        engram_rows = self._engram_rows(batch)
        output_rows = batch.output_rows
        for number, layer in enumerate(self.layers):
            if number in self.engrams:
                residual = self.engrams[number].forward(residual, engram_rows[number])
            layer.write_global(residual, pre, context)
            if number == config.n_prefill and any(batch.decoder_start):
                keep, batch = _rows_from(batch, batch.decoder_start)
                low = [max(pair) for pair in zip(batch.window_start, batch.decoder_start)]
                context = ForwardContext(self._plan(batch, state, kv, low), state, kv)
                residual, pre, output_rows = residual[keep], pre[keep], batch.output_rows
                engram_rows = {layer_id: rows[keep.cpu()] for layer_id, rows in engram_rows.items()}
            if residual.shape[0] == 0:
                continue
            residual, pre = layer.forward(residual, pre, context)
            if observe is not None:
                observe(number, residual)
        residual, pre = residual[output_rows], pre[output_rows]
        x = self.ops.hc_collapse(residual, pre, self.numerics.dtype)
        return ModelOutput(self.ops.rms_norm(x, self.norm, config.rms_norm_eps, self.numerics.dtype))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab_size] of final hidden rows [n, d]."""
        return self.ops.linear(hidden, self.head)

    def _plan(self, batch: ForwardBatch, state: StatePool, kv: GlobalKVPool, window_low: list[int]) -> ForwardPlan:
        return ForwardPlan(self.config, batch, kv.page_size, state.window_ring, state.tail_ring, window_low)

    def _engram_rows(self, batch: ForwardBatch) -> dict[int, torch.Tensor]:
        """Table rows int64 [T, columns] by Engram layer: functions of token ids alone (model.md §7.3)."""
        if self.hasher is None:
            return {}
        rows = self.hasher.row_ids(ngram_windows(batch).cpu())
        return dict(zip(self.config.engram_layer_ids, rows))


def ngram_windows(batch: ForwardBatch) -> torch.Tensor:
    """int64 [T, max_ngram]: each row's id and the ids before it, newest first, NO_TOKEN before the sequence."""
    depth = batch.history.shape[1]
    # One line of ids per request: its history, oldest first, then its rows.
    row = torch.arange(batch.num_rows, device=batch.input_ids.device)
    place = row + depth * (batch.row_request + 1)
    line = torch.full((batch.num_rows + depth * batch.num_requests,), NO_TOKEN, dtype=torch.int64, device=row.device)
    line[place] = batch.input_ids
    starts = torch.zeros(batch.num_requests, dtype=torch.int64)
    starts[1:] = torch.tensor(batch.extend_lens[:-1], dtype=torch.int64).cumsum(0)
    offset = torch.arange(depth, device=row.device)
    history_place = (starts + depth * torch.arange(batch.num_requests)).to(row.device)[:, None] + (depth - 1 - offset)
    line[history_place] = batch.history
    return line[place[:, None] - torch.arange(depth + 1, device=row.device)]


def _rows_from(batch: ForwardBatch, first: list[int]) -> tuple[torch.Tensor, ForwardBatch]:
    """Rows at positions >= first[r], as row numbers int64 [T'] and as a batch of their own.

    Every output row must be among them: a truncated prefill has no other outputs (model.md §10.3).
    """
    keep = (batch.positions >= torch.tensor(first, dtype=torch.int64, device=batch.positions.device)[batch.row_request]).nonzero()[:, 0]
    kept_before = torch.full((batch.num_rows,), -1, dtype=torch.int64, device=keep.device)
    kept_before[keep] = torch.arange(keep.shape[0], device=keep.device)
    output_rows = kept_before[batch.output_rows]
    assert bool((output_rows >= 0).all()), "an output row lies before decoder_start"
    prefix = [max(p, min(f, p + n)) for p, n, f in zip(batch.prefix_lens, batch.extend_lens, first)]
    extend = [p + n - q for p, n, q in zip(batch.prefix_lens, batch.extend_lens, prefix)]
    return keep, replace(
        batch,
        input_ids=batch.input_ids[keep],
        positions=batch.positions[keep],
        row_request=batch.row_request[keep],
        prefix_lens=prefix,
        extend_lens=extend,
        output_rows=output_rows,
    )
