"""Manifold-constrained hyper-connections: coefficients, collapse, expand (model.md §4)."""

from __future__ import annotations

import torch

from sglang.srt.kernels.linear_weight import LinearWeight
from sglang.srt.kernels.torch_backend.elementwise import in_row_blocks, sigmoid
from sglang.srt.kernels.torch_backend.linear import linear
from sglang.srt.kernels.torch_backend.norm import rms_reciprocal


def coefficients(
    residual: torch.Tensor, fn: LinearWeight, scale: torch.Tensor, base: torch.Tensor, *, rms_eps: float, hc_eps: float, iterations: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From residual [T, h, d]: pre [T, h], post [T, h], and the mixing matrix C [T, h, h]; all float32 (model.md §4.1).

    `fn` is [2h + h², h·d] float32; `scale` [3] and `base` [2h + h²] float32. C is close to doubly stochastic after
    `iterations` Sinkhorn steps, of which the first is the softmax.
    """
    tokens, h, _ = residual.shape

    def normed_product(streams: torch.Tensor) -> torch.Tensor:
        v = streams.reshape(streams.shape[0], -1).contiguous()
        return linear(v, fn) * rms_reciprocal(v.float(), rms_eps)

    m = in_row_blocks(normed_product, residual)
    pre = sigmoid(m[:, :h] * scale[0] + base[:h]) + hc_eps
    post = sigmoid(m[:, h : 2 * h] * scale[1] + base[h : 2 * h]) * 2.0
    mix = (m[:, 2 * h :] * scale[2] + base[2 * h :]).view(tokens, h, h)
    return pre, post, sinkhorn(mix, hc_eps, iterations)


def sinkhorn(logits: torch.Tensor, hc_eps: float, iterations: int) -> torch.Tensor:
    """Alternate row and column normalisation of [T, h, h], ending with columns."""
    c = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    c = c / c.sum(dim=-1, keepdim=True) + hc_eps
    c = c / (c.sum(dim=-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(dim=-1, keepdim=True) + hc_eps)
        c = c / (c.sum(dim=-2, keepdim=True) + hc_eps)
    return c


def collapse(residual: torch.Tensor, weights: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """`sum_s weights[s] * residual[s]`: [T, h, d], [T, h] -> [T, d], float32 inside, rounded once (model.md §4.2)."""
    total = weights[:, 0, None] * residual[:, 0].float()
    for s in range(1, residual.shape[1]):
        total = total + weights[:, s, None] * residual[:, s].float()
    return total.to(out_dtype)


def expand(y: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """`out[j] = post[j] * y + sum_i mix[i, j] * residual[i]`: the old stream i feeds the new stream j (model.md §4.2)."""

    def rows(y: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        streams = residual.float()
        out = post[:, :, None] * y.float()[:, None, :]
        for i in range(residual.shape[1]):
            out = out + mix[:, i, :, None] * streams[:, i, None, :]
        return out.to(residual.dtype)

    return in_row_blocks(rows, y, residual, post, mix)
