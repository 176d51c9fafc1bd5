"""Which compressed latents a row attends to: scores, candidate blocks, top-k (model.md §6)."""

from __future__ import annotations

import torch

from sglang.srt.kernels.table import KernelTable
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.models.deepseek_v41.context import ForwardContext, Selection
from sglang.srt.models.deepseek_v41.numerics import Numerics
from sglang.srt.models.deepseek_v41.weights import Weights

MAX_SCORES = 1 << 22
"""Scores held at a time. Long prompts are scored in row blocks; rows are independent, so this does not change bits."""


class Indexer:
    """One index source layer. Keys come from `kv_source`, which may be an earlier layer."""

    def __init__(self, layer: int, config: DeepseekV41Config, weights: Weights, ops: KernelTable, numerics: Numerics):
        prefix = f"layers.{layer}.attn.indexer"
        self.layer = layer
        source = config.kv_source(layer)
        assert source is not None, "index sources have a compression ratio"
        self.source = source
        self.ratio = config.layer_ratio(layer)
        self.publishes_candidates = layer == config.candidate_source_layer_id
        self.uses_candidates = config.uses_candidates(layer)
        self.config = config
        self.ops = ops
        self.numerics = numerics
        self.wq_b = weights.linear(f"{prefix}.wq_b")
        self.weights_proj = weights.linear(f"{prefix}.weights_proj")

    def select(self, x: torch.Tensor, q_latent: torch.Tensor, context: ForwardContext) -> Selection:
        """The choice for rows x [T, d] with normed query latents [T, q_lora_rank]."""
        plan, config = context.plan, self.config
        rotary = plan.rotary(True)
        q = self.ops.linear(q_latent, self.wq_b, quantise_input=self.numerics.quantise_input, out_dtype=self.numerics.dtype)
        q = self.ops.rotate(q.view(-1, config.index_n_heads, config.index_head_dim), rotary.cos, rotary.sin)
        # Queries meet keys in the keys' own format.
        fmt = context.kv.index_format
        queries = fmt.decode(*fmt.encode(q.float().contiguous()))
        head_weights = self.ops.linear(x, self.weights_proj, out_dtype=self.numerics.dtype).float()
        if self.publishes_candidates:
            context.candidates = [[] for _ in plan.batch.extend_lens]
        chosen = [self._select_request(r, queries, head_weights, context) for r in range(plan.batch.num_requests)]
        page, entry = plan.locate(plan.row_request[:, None], torch.cat(chosen), self.ratio)
        return Selection(page, entry)

    def _select_request(self, r: int, queries: torch.Tensor, head_weights: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """int64 [rows of r, index_topk], groups ascending, -1 behind the last."""
        plan, config = context.plan, self.config
        start, stop, total = plan.row_start[r], plan.row_start[r + 1], plan.groups[self.ratio].visible_max[r]
        visible = plan.groups[self.ratio].visible[start:stop]
        if start == stop:
            return queries.new_empty(0, config.index_topk, dtype=torch.int64)
        group = torch.arange(total, device=visible.device)
        if total <= config.index_topk and not self.publishes_candidates:
            # Everything visible is chosen whatever its score: inside the candidates too, which hold at least index_topk.
            padded = torch.nn.functional.pad(group, (0, config.index_topk - total), value=-1)
            return torch.where((padded >= 0) & (padded < visible[:, None]), padded, -1)
        page, entry = plan.locate(torch.full_like(group, r), group, self.ratio)
        keys = context.kv.index_keys[self.source].load(page, entry)
        step = max(1, MAX_SCORES // max(total, 1))
        blocks = []
        for number, row in enumerate(range(start, stop, step)):
            rows, seen = slice(row, min(row + step, stop)), visible[row - start : row - start + step]
            scores = self.ops.index_scores(queries[rows], keys, head_weights[rows]).to(self.numerics.dtype).float()
            if self.uses_candidates:
                scores = torch.where(context.candidates[r][number], scores, -torch.inf)
            if self.publishes_candidates:
                mask = self.ops.candidate_mask(scores, seen, config.candidate_block_size, config.candidate_topk_blocks)
                context.candidates[r].append(mask)
            blocks.append(self.ops.select_top(scores, seen, config.index_topk))
        return torch.cat(blocks)
