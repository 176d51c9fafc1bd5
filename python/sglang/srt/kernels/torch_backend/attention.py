"""Attention of each row over its window and its selected compressed latents, as one list of keys (model.md §5.3)."""

from __future__ import annotations

import torch

from sglang.srt.kernels.cache_view import CacheView

ROW_BLOCK = 8
"""Rows of one batched product; constant for invariance (the last block is padded with rows that see nothing)."""


def sparse_attention(
    q: torch.Tensor,
    window_values: torch.Tensor,
    window_index: torch.Tensor,
    latents: CacheView | None,
    selected_page: torch.Tensor,
    selected_entry: torch.Tensor,
    sink: torch.Tensor,
) -> torch.Tensor:
    """[T, H, D] float32 outputs; a key is also its value.

    q               [T, H, D] any float dtype, rotated
    window_values   [N, D] float32, all window latents that some row of this batch may see
    window_index    int64 [T, W], rows of window_values by position, -1 where there is none
    latents         compressed cache of the source layer, or None (window only)
    selected_page, selected_entry   int64 [T, K], where the selected latents are; -1 in selected_page where there is none (K = 0: window only)
    sink            float32 [H], joins the denominator only, unscaled

    Reduction order: keys in the order window then selection, over the fixed length W + K; absent keys weigh exactly 0.
    """
    num_rows, heads, dim = q.shape
    scale = dim**-0.5
    out = torch.empty(num_rows, heads, dim, dtype=torch.float32, device=q.device)
    for start in range(0, num_rows, ROW_BLOCK):
        stop = min(start + ROW_BLOCK, num_rows)
        queries = _block(q, start, stop, 0).float()
        index = _block(window_index, start, stop, -1)
        keys, seen = window_values[index.clamp(min=0)], index >= 0
        if latents is not None:
            page, entry = _block(selected_page, start, stop, -1), _block(selected_entry, start, stop, 0)
            keys = torch.cat((keys, latents.load(page.clamp(min=0), entry)), dim=1)
            seen = torch.cat((seen, page >= 0), dim=1)
        # An unseen key may be stale memory; zero it, since 0 * NaN is not 0.
        keys = torch.where(seen[:, :, None], keys, 0.0)
        scores = torch.bmm(queries, keys.transpose(1, 2)) * scale
        scores = torch.where(seen[:, None, :], scores, -torch.inf)
        top = torch.maximum(scores.amax(dim=-1, keepdim=True), sink[None, :, None])
        weights = torch.exp(scores - top)
        total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink[None, :, None] - top)
        out[start:stop] = torch.bmm(weights / total, keys)[: stop - start]
    return out


def _block(x: torch.Tensor, start: int, stop: int, fill: float) -> torch.Tensor:
    """Rows start..stop-1 padded to ROW_BLOCK rows with `fill`."""
    rows = x[start:stop]
    missing = ROW_BLOCK - rows.shape[0]
    if missing:
        rows = torch.cat((rows, rows.new_full((missing, *rows.shape[1:]), fill)))
    return rows.contiguous()
