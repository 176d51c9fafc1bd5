"""A weight matrix in the precision it has in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class LinearWeight:
    """`[out, in]` as stored; model.md §2.3 and §2.4 give the formats.

    dense   data bfloat16 or float32 [out, in], no scale
    fp8     data uint8 (E4M3 codes) [out, in], scale uint8 (E8M0) [ceil(out / 32), ceil(in / 32)]
    fp4     data uint8 (two E2M1 codes, low nibble first) [out, in / 2], scale uint8 (E8M0) [out, in / 32]
    """

    kind: Literal["dense", "fp8", "fp4"]
    data: torch.Tensor
    scale: torch.Tensor | None
    out_features: int
    in_features: int

    @property
    def scales(self) -> torch.Tensor:
        """`scale` of a quantised matrix."""
        assert self.scale is not None, "a dense matrix has no scales"
        return self.scale

    @staticmethod
    def dense(data: torch.Tensor) -> LinearWeight:
        """A bfloat16 or float32 matrix."""
        return LinearWeight("dense", data, None, data.shape[0], data.shape[1])
