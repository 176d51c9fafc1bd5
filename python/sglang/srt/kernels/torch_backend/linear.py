"""Matrix products over weights in their stored precision."""

from __future__ import annotations

import torch

from sglang.srt.kernels.formats import dequant_fp4_rows, dequant_fp8_block, fake_quant_e4m3
from sglang.srt.kernels.linear_weight import LinearWeight

ROW_TILE = 16
"""Rows of one product. Constant, so that a row's bits do not depend on how many rows there are."""

BLOCK_ELEMENTS = 1 << 19
"""Weights dequantised at a time: 2 MiB of float32 stay in cache between dequantisation and product."""


def linear(x: torch.Tensor, weight: LinearWeight, *, quantise_input: bool = False, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`x @ weight^T`: [T, in] -> [T, out] of `out_dtype`.

    Sums are wider than the rows: float32 for bfloat16 x, float64 for float32 x. The latter is the exact mode of the goldens,
    where a float32 sum is enough to swap two nearly tied index scores. The result is rounded once. With `quantise_input`
    the rows of x go through E4M3 in groups of 32 first (model.md §13, trap 13).
    """
    num_rows = x.shape[0]
    sums = torch.float64 if x.dtype == torch.float32 else torch.float32
    rows = _padded_rows(x, quantise_input, sums)
    step = _block_rows(weight.in_features)
    if rows.shape[0] == ROW_TILE and weight.out_features <= step:
        return (rows @ dequantised_rows(weight, 0, weight.out_features).to(sums).t())[:num_rows].to(out_dtype)
    out = torch.empty(rows.shape[0], weight.out_features, dtype=sums, device=x.device)
    for n0 in range(0, weight.out_features, step):
        n1 = min(n0 + step, weight.out_features)
        block = dequantised_rows(weight, n0, n1).to(sums).t()
        for r0 in range(0, rows.shape[0], ROW_TILE):
            out[r0 : r0 + ROW_TILE, n0:n1] = rows[r0 : r0 + ROW_TILE] @ block
    return out[:num_rows].to(out_dtype)


def grouped_linear(x: torch.Tensor, weight: LinearWeight, *, out_dtype: torch.dtype) -> torch.Tensor:
    """Block-diagonal product: [T, G, in] with a weight stored as [G * out, in] -> [T, G, out]."""
    groups = x.shape[1]
    per_group = weight.out_features // groups
    outs = [linear(x[:, g], slice_rows(weight, g * per_group, (g + 1) * per_group), out_dtype=out_dtype) for g in range(groups)]
    return torch.stack(outs, dim=1)


def dequantised_rows(weight: LinearWeight, n0: int, n1: int) -> torch.Tensor:
    """Rows n0..n1-1 (output features) as contiguous float32 [n1 - n0, in]. n0 is a multiple of 32 for FP8 weights."""
    data = weight.data[n0:n1]
    if weight.kind == "dense":
        return data.float()
    if weight.kind == "fp8":
        return dequant_fp8_block(data, weight.scales[n0 // 32 : (n1 + 31) // 32])
    return dequant_fp4_rows(data, weight.scales[n0:n1])


def slice_rows(weight: LinearWeight, n0: int, n1: int) -> LinearWeight:
    """A view of output features n0..n1-1. Both bounds must be multiples of 32 for FP8 weights."""
    scale = weight.scale
    if weight.kind == "fp8":
        assert n0 % 32 == 0 and n1 % 32 == 0, "FP8 scales cover 32 rows"
        scale = weight.scales[n0 // 32 : n1 // 32]
    elif weight.kind == "fp4":
        scale = weight.scales[n0:n1]
    return LinearWeight(kind=weight.kind, data=weight.data[n0:n1], scale=scale, out_features=n1 - n0, in_features=weight.in_features)


def _padded_rows(x: torch.Tensor, quantise_input: bool, dtype: torch.dtype) -> torch.Tensor:
    """[ceil(T / ROW_TILE) * ROW_TILE, in] of `dtype`, zero rows at the end."""
    values = (fake_quant_e4m3(x.float()) if quantise_input else x).to(dtype)
    padding = -x.shape[0] % ROW_TILE
    return torch.nn.functional.pad(values, (0, 0, 0, padding)).contiguous() if padding else values.contiguous()


def _block_rows(in_features: int) -> int:
    """Output features per block: a multiple of 32, a function of the weight's shape only."""
    return max(32, BLOCK_ELEMENTS // in_features // 32 * 32)
