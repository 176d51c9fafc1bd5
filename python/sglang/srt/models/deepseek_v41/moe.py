"""Mixture of experts of one layer (model.md §8)."""

from __future__ import annotations

import torch

from sglang.srt.kernels.table import KernelTable
from sglang.srt.kernels.torch_backend.moe import ExpertWeights
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.models.deepseek_v41.numerics import Numerics
from sglang.srt.models.deepseek_v41.weights import Weights


class MixtureOfExperts:
    """Router, routed experts, shared expert. `prefix` is `layers.L.ffn` or `mtp.i.ffn`."""

    def __init__(
        self, prefix: str, num_experts: int, top_k: int, config: DeepseekV41Config, weights: Weights, ops: KernelTable, numerics: Numerics
    ):
        self.top_k = top_k
        self.config = config
        self.ops = ops
        self.numerics = numerics
        self.gate = weights.linear(f"{prefix}.gate")
        self.bias = weights.tensor(f"{prefix}.gate.bias")
        self.bias_image = weights.tensor(f"{prefix}.gate.bias_vl")
        self.experts = [_expert(weights, f"{prefix}.experts.{e}") for e in range(num_experts)]
        self.shared = _expert(weights, f"{prefix}.shared_experts") if config.n_shared_experts else None

    def forward(self, x: torch.Tensor, is_text: torch.Tensor | None = None) -> torch.Tensor:
        """[T, d] of normed rows x [T, d]. `is_text` bool [T]: rows of images choose with their own bias; None: all text."""
        bias = self.bias if is_text is None else torch.where(is_text[:, None], self.bias, self.bias_image)
        experts, weights = self.ops.route(x, self.gate, bias, self.top_k, self.config.routed_scaling_factor)
        return self.ops.mixture(
            x,
            experts,
            weights,
            self.experts,
            self.shared,
            limit=self.config.swiglu_limit,
            quantise_input=self.numerics.quantise_input,
            out_dtype=self.numerics.dtype,
        )


def _expert(weights: Weights, prefix: str) -> ExpertWeights:
    return ExpertWeights(weights.linear(f"{prefix}.w1"), weights.linear(f"{prefix}.w3"), weights.linear(f"{prefix}.w2"))
