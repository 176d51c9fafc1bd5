"""Scores of compressed positions and the selection of the best ones (model.md §6)."""

from __future__ import annotations

import torch

KEY_TILE = 128
"""Index keys of one product, aligned to the start of the sequence; constant for invariance."""

UNIT_BLOCK = 32
"""(row, key tile) pairs of one batched product; constant for invariance."""


def index_scores(q: torch.Tensor, keys: torch.Tensor, head_weights: torch.Tensor) -> torch.Tensor:
    """`score[t, j] = sum_h relu(q[t, h] · keys[j]) * head_weights[t, h]`, float32 [T, G] (model.md §6.1).

    q float32 [T, Hi, Di], keys float32 [G, Di] in position order, head_weights float32 [T, Hi].
    """
    num_rows, _, dim = q.shape
    num_keys = keys.shape[0]
    tiles = -(-num_keys // KEY_TILE)
    padded = torch.cat((keys, keys.new_zeros(tiles * KEY_TILE - num_keys, dim))).view(tiles, KEY_TILE, dim)
    units = num_rows * tiles
    out = torch.empty(units + (-units % UNIT_BLOCK), KEY_TILE, dtype=torch.float32, device=q.device)
    unit = torch.arange(out.shape[0], device=q.device).clamp(max=units - 1)
    row, tile = unit // tiles, unit % tiles
    for start in range(0, out.shape[0], UNIT_BLOCK):
        r, t = row[start : start + UNIT_BLOCK], tile[start : start + UNIT_BLOCK]
        products = torch.relu(torch.bmm(q[r], padded[t].transpose(1, 2)))
        out[start : start + UNIT_BLOCK] = torch.bmm(head_weights[r][:, None, :], products)[:, 0]
    return out[:units].view(num_rows, tiles * KEY_TILE)[:, :num_keys]


def select_top(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """Per row the k highest of the first `visible[t]` scores, ascending by position, -1 behind the last: int64 [T, k].

    Equal scores: lower position first. Scores of -inf are never selected (they mark what the candidates exclude).
    """
    num_rows, num_keys = scores.shape
    out = torch.full((num_rows, k), -1, dtype=torch.int64, device=scores.device)
    if num_keys == 0:
        return out
    position = torch.arange(num_keys, device=scores.device)
    allowed = (position < visible[:, None]) & (scores > -torch.inf)
    best, index = torch.where(allowed, _rank(scores, position), -1).topk(min(k, num_keys), dim=-1)
    chosen = torch.where(best >= 0, index, num_keys).sort(dim=-1).values
    out[:, : chosen.shape[1]] = torch.where(chosen < num_keys, chosen, -1)
    return out


def candidate_mask(scores: torch.Tensor, visible: torch.Tensor, block_size: int, num_blocks: int) -> torch.Tensor:
    """bool [T, G]: positions inside the `num_blocks` best blocks of each row (model.md §6.3).

    A block scores the maximum of its visible positions; the block with the newest visible position always counts.
    """
    num_rows, num_keys = scores.shape
    blocks = -(-num_keys // block_size)
    if blocks <= num_blocks:
        return torch.ones(num_rows, num_keys, dtype=torch.bool, device=scores.device)
    position = torch.arange(num_keys, device=scores.device)
    seen = torch.where(position < visible[:, None], scores, -torch.inf)
    seen = torch.nn.functional.pad(seen, (0, blocks * block_size - num_keys), value=-torch.inf)
    best = seen.view(num_rows, blocks, block_size).amax(dim=-1)
    newest = ((visible - 1).clamp(min=0) // block_size)[:, None]
    best = best.scatter(1, newest, torch.inf)
    chosen = select_top(best, torch.full_like(visible, blocks), num_blocks)
    mask = torch.zeros(num_rows, blocks + 1, dtype=torch.bool, device=scores.device)
    mask.scatter_(1, torch.where(chosen >= 0, chosen, blocks), True)
    return mask[:, :blocks].repeat_interleave(block_size, dim=1)[:, :num_keys]


def _rank(scores: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Non-negative int64 that orders by (score ascending, position descending): unique keys leave no tie to torch.topk."""
    bits = (scores + 0.0).contiguous().view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    ordered = torch.where(bits < 0, ~bits & 0xFFFFFFFF, bits | 0x80000000)
    # 31 bits of position leave the sign bit free; the lowest score bit is kept because 32 + 31 = 63.
    return (ordered << 31) | (0x7FFFFFFF - position)
