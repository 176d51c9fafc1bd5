"""Elementwise functions whose torch version is not invariant."""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`1 / (1 + exp(-x))`. torch.sigmoid gives other bits at the end of a vector than inside it; exp and division do not."""
    return 1.0 / (1.0 + torch.exp(-x))
