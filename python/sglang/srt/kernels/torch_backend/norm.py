"""Root-mean-square normalisation."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis, in float32, rounded once (model.md §0)."""
    values = x.float().contiguous()
    return (values * rms_reciprocal(values, eps) * weight.float()).to(out_dtype)


def rms_reciprocal(values: torch.Tensor, eps: float) -> torch.Tensor:
    """`1 / sqrt(mean(values²) + eps)` over the last axis, kept as an axis of length 1; float32."""
    return 1.0 / torch.sqrt((values * values).mean(dim=-1, keepdim=True) + eps)
