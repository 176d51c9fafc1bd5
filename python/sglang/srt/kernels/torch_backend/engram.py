"""The Engram gate: looked-up n-gram vectors enter the residual streams (model.md §7.4)."""

from __future__ import annotations

import torch

from sglang.srt.kernels.linear_weight import LinearWeight
from sglang.srt.kernels.torch_backend.elementwise import in_row_blocks, sigmoid
from sglang.srt.kernels.torch_backend.linear import linear
from sglang.srt.kernels.torch_backend.norm import rms_reciprocal


def engram_gate(
    residual: torch.Tensor,
    embedded: torch.Tensor,
    wkv: LinearWeight,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    is_text: torch.Tensor | None,
    *,
    eps: float,
    quantise_input: bool,
) -> torch.Tensor:
    """`R_s + gate_s * v` for every stream s.

    residual [T, h, d]; embedded float32 [T, columns * width] (values representable in bfloat16); wkv [(h + 1) * d, ...],
    keys of the streams first, the value last; q_weight, k_weight [h, d]; rows where is_text is False stay unchanged.
    """

    def rows(residual: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        tokens, h, d = residual.shape
        kv = (
            linear(embedded.to(residual.dtype), wkv, quantise_input=quantise_input, out_dtype=residual.dtype).float().view(tokens, h + 1, d)
        )
        keys, value = kv[:, :h].contiguous(), kv[:, h]
        streams = residual.float()
        product = streams * q_weight.float() * k_weight.float() * keys
        dot = product.sum(dim=-1, keepdim=True) * rms_reciprocal(streams, eps) * rms_reciprocal(keys, eps) / d**0.5
        gate = sigmoid(torch.copysign(torch.sqrt(dot.abs().clamp(min=1e-6)), dot))
        return (streams + gate * value[:, None, :]).to(residual.dtype)

    out = in_row_blocks(rows, residual, embedded)
    return out if is_text is None else torch.where(is_text[:, None, None], out, residual)
