"""Routing, routed experts and the shared expert (model.md §8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang.srt.kernels.formats import fake_quant_e4m3
from sglang.srt.kernels.linear_weight import LinearWeight
from sglang.srt.kernels.torch_backend.elementwise import sigmoid
from sglang.srt.kernels.torch_backend.linear import linear


class ExpertWeights(NamedTuple):
    """SwiGLU expert: w1 (gate) and w3 (up) [inner, d], w2 (down) [d, inner]."""

    w1: LinearWeight
    w3: LinearWeight
    w2: LinearWeight


def route(
    x: torch.Tensor, gate: LinearWeight, bias: torch.Tensor, top_k: int, scaling: float, gate_temp: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 [T, k] in ascending id and their weights float32 [T, k].

    x [T, d]; gate [E, d]; bias float32 [E] or [T, E], steers the choice only. Equal scores: lower expert first.
    """
    logits = linear(x, gate) / gate_temp
    softplus = torch.where(logits > 20.0, logits, torch.log1p(torch.exp(logits.clamp(max=20.0))))
    scores = torch.sqrt(softplus)
    best = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    experts = best.sort(dim=-1).values
    chosen = scores.gather(1, experts)
    total = chosen[:, 0:1]
    for slot in range(1, top_k):
        total = total + chosen[:, slot : slot + 1]
    return experts, chosen / (total + 1e-20) * scaling


def mixture(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    experts: Sequence[ExpertWeights],
    shared: ExpertWeights | None,
    *,
    limit: float,
    quantise_input: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Weighted sum of each row's experts plus the shared one: [T, d].

    Sums run in ascending expert id, the shared expert last, in float32; one rounding at the end.
    """
    num_rows, top_k = expert_ids.shape
    # Once for all experts of a row; four significant bits are exact in bfloat16 too.
    values = fake_quant_e4m3(x.float()).to(x.dtype) if quantise_input else x
    parts = torch.empty(num_rows, top_k, x.shape[1], dtype=torch.float32, device=x.device)
    for expert in expert_ids.unique().tolist():
        row, slot = (expert_ids == expert).nonzero(as_tuple=True)
        weight = expert_weights[row, slot][:, None]
        parts[row, slot] = _expert(values[row], experts[expert], weight, limit, quantise_input, x.dtype)
    total = parts[:, 0]
    for slot in range(1, top_k):
        total = total + parts[:, slot]
    if shared is not None:
        total = total + _expert(values, shared, None, limit, quantise_input, x.dtype)
    return total.to(out_dtype)


def _expert(
    x: torch.Tensor, expert: ExpertWeights, weight: torch.Tensor | None, limit: float, quantise_input: bool, dtype: torch.dtype
) -> torch.Tensor:
    """float32 [n, d]. The gate is clamped from above only, the up part both ways; the weight comes before w2."""
    gate = linear(x, expert.w1, out_dtype=dtype).float()
    up = linear(x, expert.w3, out_dtype=dtype).float()
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    inner = gate * sigmoid(gate) * up
    if weight is not None:
        inner = inner * weight
    return linear(inner.to(dtype), expert.w2, quantise_input=quantise_input)
