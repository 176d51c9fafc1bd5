"""One backbone layer: attention, then experts, both inside hyper-connections with a lag (model.md §4.3)."""

from __future__ import annotations

import torch

from sglang.srt.kernels.table import KernelTable
from sglang.srt.models.deepseek_v41.attention import Attention
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.models.deepseek_v41.context import ForwardContext
from sglang.srt.models.deepseek_v41.hyper_connections import HyperConnection
from sglang.srt.models.deepseek_v41.moe import MixtureOfExperts
from sglang.srt.models.deepseek_v41.numerics import Numerics
from sglang.srt.models.deepseek_v41.weights import Weights


class DecoderLayer:
    """The mix that a sublayer computes (`pre`) collapses the residual for the *next* sublayer, never for itself."""

    def __init__(self, layer: int, config: DeepseekV41Config, weights: Weights, ops: KernelTable, numerics: Numerics):
        prefix = f"layers.{layer}"
        self.eps = config.rms_norm_eps
        self.ops = ops
        self.dtype = numerics.dtype
        self.attn_norm = weights.tensor(f"{prefix}.attn_norm.weight")
        self.ffn_norm = weights.tensor(f"{prefix}.ffn_norm.weight")
        self.hc_attn = HyperConnection(f"{prefix}.hc_attn", config, weights, ops)
        self.hc_ffn = HyperConnection(f"{prefix}.hc_ffn", config, weights, ops)
        self.attention = Attention(layer, config, weights, ops, numerics)
        self.moe = MixtureOfExperts(f"{prefix}.ffn", config.n_routed_experts, config.num_experts_per_tok, config, weights, ops, numerics)

    def attention_input(self, residual: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """The normed collapse [T, d] that queries, window latents and compressed latents are projected from."""
        return self.ops.rms_norm(self.ops.hc_collapse(residual, pre, self.dtype), self.attn_norm, self.eps, self.dtype)

    def write_global(self, residual: torch.Tensor, pre: torch.Tensor, context: ForwardContext) -> None:
        """Store compressed latents and index keys of all rows, if this layer is a KV source."""
        if self.attention.compressor is not None:
            self.attention.write_global(self.attention_input(residual, pre), context)

    def forward(self, residual: torch.Tensor, pre: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """residual [T, h, d] and the incoming mix [T, h] -> the same after this layer. `write_global` comes before."""
        pre_attn, post, mix = self.hc_attn.coefficients(residual)
        y = self.attention.attend(self.attention_input(residual, pre), context)
        residual = self.ops.hc_expand(y, residual, post, mix)
        pre_ffn, post, mix = self.hc_ffn.coefficients(residual)
        x = self.ops.rms_norm(self.ops.hc_collapse(residual, pre_attn, self.dtype), self.ffn_norm, self.eps, self.dtype)
        residual = self.ops.hc_expand(self.moe.forward(x), residual, post, mix)
        return residual, pre_ffn
