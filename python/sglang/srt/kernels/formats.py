"""Conversions of the number formats in checkpoints and caches (model.md §2.3-2.5, §5.6, §5.7).

Everything is elementwise or per group of a row, so a row's codes never depend on its neighbours. Codes and scales are
uint8. Names: E4M3 (fn variant, largest 448), E8M0 (a power of two, bias 127), E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and sign;
two per byte, the even feature in the low nibble).
"""

from __future__ import annotations

import functools

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E4M3_AMAX_FLOOR = 1e-4
E2M1_AMAX_FLOOR = 6.0 * 2.0**-126
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway points between neighbours of E2M1_VALUES.
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@functools.lru_cache(maxsize=8)
def _e4m3_table(device: torch.device) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return codes.view(torch.float8_e4m3fn).float().to(device)


@functools.lru_cache(maxsize=8)
def _e8m0_table(device: torch.device) -> torch.Tensor:
    exponents = torch.arange(256, dtype=torch.float64) - 127
    values = (2.0**exponents).float()
    values[255] = torch.nan
    return values.to(device)


@functools.lru_cache(maxsize=8)
def _e2m1_pair_table(device: torch.device) -> torch.Tensor:
    """float32 [256, 2]: both values of a byte."""
    values = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES))
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1).to(device)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """uint8 -> float32 of the same shape. A table look-up is the fastest way torch has on a CPU."""
    return _e4m3_table(codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float32 -> uint8, round to nearest even, saturating at 448."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """uint8 -> float32 power of two; 255 is NaN."""
    return _e8m0_table(codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def encode_e8m0_ceil(values: torch.Tensor) -> torch.Tensor:
    """Positive float32 -> uint8, the smallest power of two that is not below; from the bits, so powers stay (trap 19)."""
    bits = values.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return exponent.clamp(0, 254).to(torch.uint8)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n / 2] -> float32 [..., n]."""
    pairs = _e2m1_pair_table(packed.device).index_select(0, packed.reshape(-1).int())
    return pairs.view(*packed.shape[:-1], packed.shape[-1] * 2)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] -> packed uint8 [..., n / 2], ties to the even code, saturating at 6."""
    code = torch.bucketize(values.abs(), _e2m1_bounds(values.device), out_int32=True).to(torch.uint8)
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


@functools.lru_cache(maxsize=8)
def _e2m1_bounds(device: torch.device) -> torch.Tensor:
    """A value's code is the number of bounds strictly below it. A tie goes to the even code: every other midpoint itself rounds
    up, so its bound is the float32 just below."""
    midpoints = torch.tensor(E2M1_MIDPOINTS)
    below = torch.nextafter(midpoints, torch.zeros(()))
    return torch.where(torch.arange(len(E2M1_MIDPOINTS)) % 2 == 1, below, midpoints).to(device)


def quantize_e4m3_e8m0(values: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] -> codes uint8 [..., n] and scales uint8 [..., n / group]."""
    groups = values.unflatten(-1, (-1, group))
    scale = encode_e8m0_ceil(groups.abs().amax(dim=-1).clamp(min=E4M3_AMAX_FLOOR) / E4M3_MAX)
    return encode_e4m3(groups / decode_e8m0(scale)[..., None]).flatten(-2), scale


def dequant_e4m3_e8m0(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Inverse of quantize_e4m3_e8m0; the group size follows from the shapes."""
    return _scaled(decode_e4m3(codes), decode_e8m0(scale))


def quantize_e2m1_e8m0(values: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] -> packed uint8 [..., n / 2] and scales uint8 [..., n / group]."""
    groups = values.unflatten(-1, (-1, group))
    scale = encode_e8m0_ceil(groups.abs().amax(dim=-1).clamp(min=E2M1_AMAX_FLOOR) / E2M1_MAX)
    return encode_e2m1((groups / decode_e8m0(scale)[..., None]).flatten(-2)), scale


def dequant_e2m1_e8m0(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Inverse of quantize_e2m1_e8m0."""
    return _scaled(decode_e2m1(packed), decode_e8m0(scale))


def quantize_e2m1_e4m3(values: torch.Tensor, group: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] -> packed uint8 [..., n / 2] and E4M3 scales uint8 [..., n / group]."""
    groups = values.unflatten(-1, (-1, group))
    scale = encode_e4m3((groups.abs().amax(dim=-1) / E2M1_MAX).clamp(2.0**-9, E4M3_MAX))
    return encode_e2m1((groups / decode_e4m3(scale)[..., None]).flatten(-2)), scale


def dequant_e2m1_e4m3(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Inverse of quantize_e2m1_e4m3."""
    return _scaled(decode_e2m1(packed), decode_e4m3(scale))


def fake_quant_e4m3(values: torch.Tensor, group: int = 32) -> torch.Tensor:
    """float32 [..., n] through E4M3 with E8M0 scales and back: what an FP8 matrix sees of its input (trap 13)."""
    groups = values.unflatten(-1, (-1, group))
    # The scale straight as a float: adding a full mantissa carries into the exponent unless the mantissa is zero.
    least = groups.abs().amax(dim=-1, keepdim=True).clamp(min=E4M3_AMAX_FLOOR) / E4M3_MAX
    scale = ((least.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return (decode_e4m3(encode_e4m3(groups / scale)) * scale).flatten(-2)


def dequant_fp8_block(codes: torch.Tensor, scale: torch.Tensor, block: int = 32) -> torch.Tensor:
    """FP8 matrix: codes uint8 [out, in], one E8M0 scale per block x block tile -> float32 [out, in]."""
    rows, columns = codes.shape
    values = decode_e4m3(codes)
    if rows % block == 0 and columns % block == 0:
        tiles = values.view(rows // block, block, columns // block, block)
        return (tiles * decode_e8m0(scale)[:, None, :, None]).view(rows, columns)
    wide = decode_e8m0(scale).repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return values * wide


def dequant_fp4_rows(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP4 matrix: packed uint8 [out, in / 2], one E8M0 scale per row and 32 inputs -> float32 [out, in]."""
    return dequant_e2m1_e8m0(packed, scale)


def _scaled(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Each group of the last axis times its scale."""
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)
