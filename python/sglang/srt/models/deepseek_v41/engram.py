"""Engram of one layer: n-gram rows looked up and gated into the residual (model.md §7)."""

from __future__ import annotations

import torch

from sglang.srt.kernels.table import KernelTable
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.models.deepseek_v41.numerics import Numerics
from sglang.srt.models.deepseek_v41.weights import Weights


class Engram:
    """`forward` takes row ids that the model computed once for all Engram layers (engram_hash.EngramHasher)."""

    def __init__(self, layer: int, config: DeepseekV41Config, weights: Weights, ops: KernelTable, numerics: Numerics):
        prefix = f"layers.{layer}.engram"
        self.eps = config.rms_norm_eps
        self.ops = ops
        self.numerics = numerics
        self.table = weights.engram_table(layer)
        self.wkv = weights.linear(f"{prefix}.wkv")
        self.q_weight = weights.tensor(f"{prefix}.q_weight")
        self.k_weight = weights.tensor(f"{prefix}.k_weight")

    def forward(self, residual: torch.Tensor, row_ids: torch.Tensor, is_text: torch.Tensor | None = None) -> torch.Tensor:
        """residual [T, h, d] with the gated values added; row_ids int64 [T, columns] on the CPU, where the table is."""
        embedded = self.table.lookup(row_ids).flatten(1).to(residual.device)
        return self.ops.engram_gate(
            residual,
            embedded,
            self.wkv,
            self.q_weight,
            self.k_weight,
            is_text,
            eps=self.eps,
            quantise_input=self.numerics.quantise_input,
        )
