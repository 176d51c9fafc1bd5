"""Attention of one layer: its window, and the compressed latents of its KV source (model.md §5)."""

from __future__ import annotations

import torch

from sglang.srt.kernels.linear_weight import LinearWeight
from sglang.srt.kernels.table import KernelTable
from sglang.srt.models.deepseek_v41.compressor import Compressor
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.models.deepseek_v41.context import ForwardContext, Selection
from sglang.srt.models.deepseek_v41.indexer import Indexer
from sglang.srt.models.deepseek_v41.numerics import Numerics
from sglang.srt.models.deepseek_v41.weights import Weights


class Attention:
    """`write_global` stores what later tokens and layers need; `attend` computes the rows' own outputs.

    They are two calls because a truncated prefill (model.md §10.2) writes for all rows and attends for the last few.
    """

    def __init__(self, layer: int, config: DeepseekV41Config, weights: Weights, ops: KernelTable, numerics: Numerics):
        prefix = f"layers.{layer}.attn"
        self.layer = layer
        self.config = config
        self.ops = ops
        self.numerics = numerics
        self.source = config.kv_source(layer)
        self.wq_a = weights.linear(f"{prefix}.wq_a")
        self.q_norm = weights.tensor(f"{prefix}.q_norm.weight")
        self.wq_b = weights.linear(f"{prefix}.wq_b")
        self.wkv = weights.linear(f"{prefix}.wkv")
        self.kv_norm = weights.tensor(f"{prefix}.kv_norm.weight")
        self.wo_a = weights.linear(f"{prefix}.wo_a")
        self.wo_b = weights.linear(f"{prefix}.wo_b")
        self.sink = weights.tensor(f"{prefix}.attn_sink")
        parts = (layer, config, weights, ops, numerics)
        self.compressor = Compressor(*parts) if layer in config.kv_source_layer_ids else None
        self.indexer = Indexer(*parts) if layer in config.index_source_layer_ids else None

    def write_global(self, x: torch.Tensor, context: ForwardContext) -> None:
        """Compressed latents and index keys of normed rows x [T, d], if this layer is a KV source."""
        if self.compressor is not None:
            self.compressor.write(x, context)

    def attend(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, d] outputs of normed rows x [T, d]; their window latents enter the rings."""
        ops, config, dtype = self.ops, self.config, self.numerics.dtype
        rotary = context.plan.rotary(self.source is not None)
        q_latent = ops.rms_norm(self._linear(x, self.wq_a), self.q_norm, config.rms_norm_eps, dtype)
        q = self._linear(q_latent, self.wq_b).view(-1, config.num_attention_heads, config.head_dim)
        q = ops.rotate(q, rotary.cos, rotary.sin)
        kv = ops.rms_norm(self._linear(x, self.wkv), self.kv_norm, config.rms_norm_eps, dtype)
        window = self._extend_window(ops.rotate(kv, rotary.cos, rotary.sin), context)
        if self.indexer is not None:
            context.selection = self.indexer.select(x, q_latent, context)
        latents = None if self.source is None else context.kv.latents[self.source]
        chosen = Selection.nothing(x) if self.source is None else context.selection
        o = ops.sparse_attention(q, window, context.plan.window.index, latents, chosen.page, chosen.entry, self.sink)
        o = ops.rotate(o.to(dtype), rotary.cos, rotary.sin, inverse=True)
        # The released code keeps wo_a's input unquantised (model.md §5.4).
        low_rank = ops.grouped_linear(o.reshape(o.shape[0], config.o_groups, -1), self.wo_a, out_dtype=dtype)
        return self._linear(low_rank.flatten(1), self.wo_b)

    def _extend_window(self, kv: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """float32 [N, D]: latents kept in the rings, then those of this batch, both as the cache format has them."""
        window, ring = context.plan.window, context.state.window[self.layer]
        codes, scales = ring.format.encode(kv.float().contiguous())
        old_codes, old_scales = ring.load_codes(window.old_slot, window.old_ring)
        values = torch.empty(window.size, kv.shape[1], dtype=torch.float32, device=kv.device)
        values[window.new_entry] = ring.format.decode(codes, scales)
        values[window.old_entry] = ring.format.decode(old_codes, old_scales)
        kept_scales = None if scales is None else scales[window.write_row]
        ring.store_codes(window.write_slot, window.write_ring, codes[window.write_row], kept_scales)
        return values

    def _linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return self.ops.linear(x, weight, quantise_input=self.numerics.quantise_input, out_dtype=self.numerics.dtype)
