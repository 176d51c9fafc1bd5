"""How precisely a model runs; one value, passed to every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Numerics:
    """`dtype`: activations between operations. `quantise_input`: inputs of FP8 and FP4 matrices go through E4M3, as in the release."""

    dtype: torch.dtype
    quantise_input: bool

    @staticmethod
    def from_flags(dtype: str, activation_quant: str) -> Numerics:
        """From --dtype and --activation-quant; `auto` is the release's bfloat16 with quantised inputs."""
        return Numerics(torch.float32 if dtype == "float32" else torch.bfloat16, activation_quant == "auto")
