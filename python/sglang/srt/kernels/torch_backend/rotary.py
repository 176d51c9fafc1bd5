"""Interleaved rotary embedding of the last features of a vector (model.md §5.2)."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Rotate pairs (2i, 2i+1) of the last 2·P features of x by the angles of its row; the rest is untouched.

    x [T, D] or [T, H, D] any float dtype; cos, sin float32 [T, P]. Computed in float32, rounded to x's dtype.
    `inverse` rotates by the negative angle.
    """
    if x.dim() == 3:
        cos, sin = cos[:, None, :], sin[:, None, :]
    if inverse:
        sin = -sin
    width = 2 * cos.shape[-1]
    kept, turned = x[..., :-width], x[..., -width:].float()
    a, b = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((kept, pairs.flatten(-2).to(x.dtype)), dim=-1)
