"""Hyper-connections of one sublayer: its weights, applied with the kernel table (model.md §4)."""

from __future__ import annotations

import torch

from sglang.srt.kernels.linear_weight import LinearWeight
from sglang.srt.kernels.table import KernelTable
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.models.deepseek_v41.weights import Weights


class HyperConnection:
    """`prefix` is `layers.L.hc_attn` or `layers.L.hc_ffn` (or of a draft stage)."""

    def __init__(self, prefix: str, config: DeepseekV41Config, weights: Weights, ops: KernelTable):
        self.config = config
        self.ops = ops
        self.fn = LinearWeight.dense(weights.tensor(f"{prefix}_fn"))
        self.scale = weights.tensor(f"{prefix}_scale")
        self.base = weights.tensor(f"{prefix}_base")

    def coefficients(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """pre [T, h], post [T, h], mix [T, h, h] of residual [T, h, d]; `pre` is for the *next* sublayer (the lag, §4.3)."""
        return self.ops.hc_coefficients(
            residual,
            self.fn,
            self.scale,
            self.base,
            rms_eps=self.config.rms_norm_eps,
            hc_eps=self.config.hc_eps,
            iterations=self.config.hc_sinkhorn_iters,
        )
