"""Zeroed memory for pools."""

from __future__ import annotations

import numpy as np
import torch


def zeroed_memory(rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [rows, row_bytes]. On a CPU untouched rows cost no memory: numpy takes zeroed pages from the system as they are, while
    torch.zeros writes every one of them."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((rows, row_bytes), dtype=np.uint8))
    return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device)
