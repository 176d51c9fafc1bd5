"""Compressed latents and index keys of a KV source layer, written to the paged cache (model.md §5.5, §6.1)."""

from __future__ import annotations

import torch

from sglang.srt.kernels.table import KernelTable
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.models.deepseek_v41.context import ForwardContext
from sglang.srt.models.deepseek_v41.numerics import Numerics
from sglang.srt.models.deepseek_v41.weights import Weights


class Compressor:
    """Turns `ratio` consecutive tokens into one latent and one index key."""

    def __init__(self, layer: int, config: DeepseekV41Config, weights: Weights, ops: KernelTable, numerics: Numerics):
        prefix = f"layers.{layer}.attn"
        self.layer = layer
        self.ratio = config.layer_ratio(layer)
        self.eps = config.rms_norm_eps
        self.ops = ops
        self.numerics = numerics
        self.wkv = weights.linear(f"{prefix}.compressor.wkv")
        self.wgate = weights.linear(f"{prefix}.compressor.wgate") if self.ratio > 1 else None
        self.norm = weights.tensor(f"{prefix}.compressor.norm.weight")
        self.index_wk = weights.linear(f"{prefix}.indexer.wk")
        self.index_norm = weights.tensor(f"{prefix}.indexer.k_norm.weight")

    def write(self, x: torch.Tensor, context: ForwardContext) -> None:
        """Store what the groups completed by rows x [T, d] leave behind; keep the tail of an open pair."""
        groups = context.plan.groups[self.ratio]
        latent = self._pairs(x, context) if self.ratio > 1 else self._singles(x[groups.second_row])
        if latent.shape[0] == 0:
            return
        rotary = context.plan.rotary(True, groups.position)
        key = self.ops.rms_norm(
            self.ops.linear(latent, self.index_wk, out_dtype=self.numerics.dtype), self.index_norm, self.eps, self.numerics.dtype
        )
        context.kv.index_keys[self.layer].store(groups.page, groups.entry, self.ops.rotate(key, rotary.cos, rotary.sin))
        context.kv.latents[self.layer].store(groups.page, groups.entry, self.ops.rotate(latent, rotary.cos, rotary.sin))

    def _singles(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(self.ops.linear(x, self.wkv, out_dtype=self.numerics.dtype), self.norm, self.eps, self.numerics.dtype)

    def _pairs(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Latents [n_groups, D] of completed pairs; both projections stay float32 until pooled (trap 22)."""
        groups = context.plan.groups[self.ratio]
        tail = context.state.tail[self.layer]
        both = torch.stack((self.ops.linear(x, self.wgate), self.ops.linear(x, self.wkv)), dim=1)  # float32 [T, 2, D]
        kept = tail[groups.slot, groups.position % context.state.tail_ring]
        first = torch.where((groups.first_row >= 0)[:, None, None], both[groups.first_row.clamp(min=0)], kept)
        second = both[groups.second_row]
        self._keep_tail(both, context)
        top = torch.maximum(first[:, 0], second[:, 0])
        e0, e1 = torch.exp(first[:, 0] - top), torch.exp(second[:, 0] - top)
        pooled = (e0 / (e0 + e1)) * first[:, 1] + (e1 / (e0 + e1)) * second[:, 1]
        return self.ops.rms_norm(pooled.to(self.numerics.dtype), self.norm, self.eps, self.numerics.dtype)

    def _keep_tail(self, both: torch.Tensor, context: ForwardContext) -> None:
        """The last rows of each request, keyed by position, for a pair that the next batch completes or a rollback reopens."""
        plan, ring = context.plan, context.state.tail_ring
        rows = torch.tensor(
            [
                row
                for r, n in enumerate(plan.batch.extend_lens)
                for row in range(plan.row_start[r] + max(0, n - ring), plan.row_start[r] + n)
            ],
            dtype=torch.int64,
            device=both.device,
        )
        slots = plan.batch.state_slots[plan.row_request[rows]]
        context.state.tail[self.layer][slots, plan.positions[rows] % ring] = both[rows]
