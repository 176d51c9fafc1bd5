"""Elementwise functions that are invariant where torch's own are not, and a way to keep temporaries small."""

from __future__ import annotations

from collections.abc import Callable

import torch

ROW_BLOCK = 128
"""Rows whose float32 temporaries exist at a time. A long chunk has several of them per stream, and they add up."""


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`1 / (1 + exp(-x))`. torch.sigmoid gives other bits at the end of a vector than inside it; exp and division do not."""
    return 1.0 / (1.0 + torch.exp(-x))


def in_row_blocks(operation: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`operation(*tensors)` for an operation on independent rows, computed ROW_BLOCK rows at a time."""
    num_rows = tensors[0].shape[0]
    if num_rows <= ROW_BLOCK:
        return operation(*tensors)
    first = operation(*[x[:ROW_BLOCK] for x in tensors])
    out = first.new_empty(num_rows, *first.shape[1:])
    out[:ROW_BLOCK] = first
    for start in range(ROW_BLOCK, num_rows, ROW_BLOCK):
        out[start : start + ROW_BLOCK] = operation(*[x[start : start + ROW_BLOCK] for x in tensors])
    return out
