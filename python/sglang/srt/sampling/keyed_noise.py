"""Gumbel noise that is a pure function of (seed, absolute position, token id): the only randomness of sampling.

    mix(z):  z = (z ^ z>>30) * 0xBF58476D1CE4E5B9 ; z = (z ^ z>>27) * 0x94D049BB133111EB ; z ^ z>>31     (mod 2^64)
    k = mix(seed + 0x9E3779B97F4A7C15 * (t + 1))
    b = mix(k + 0xD1342543DE82EF95 * (v + 1)) >> 12                    52 bits
    u = (b + 0.5) * 2^-52 ;  G = -ln(-ln u)                            float64

`argmax_v(log p(v) + G(seed, t, v))` is a draw from p. Nothing else enters: not the batch, not the number of draws made
before, not whether a draft or the target asks. So no generator state is stored, moved or rolled back. 52 bits, because
with 53 the largest u rounds to 1 and G is infinite.

torch does the logarithms rather than numpy: numpy's float64 log changes its last bit with the CPU's instruction set,
torch's does not (default, AVX2 and AVX-512 gave equal bits), nor with length, offset or threads.
"""

from __future__ import annotations

import torch

from sglang.srt.sampling.seeds import MIX_A, MIX_B, POSITION_STEP, mix, signed

TOKEN_STEP = 0xD1342543DE82EF95


def _shift_right(z: torch.Tensor, n: int) -> torch.Tensor:
    """Logical shift: int64's own one copies the sign into the upper n bits."""
    return (z >> n).bitwise_and_((1 << (64 - n)) - 1)


def noise_bits(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """The 52 random bits of each id at an absolute position: int64 in, int64 of the same shape out."""
    key = mix(seed + POSITION_STEP * (position + 1))
    z = (ids + 1).mul_(signed(TOKEN_STEP)).add_(signed(key))
    z ^= _shift_right(z, 30)
    z *= signed(MIX_A)
    z ^= _shift_right(z, 27)
    z *= signed(MIX_B)
    z ^= _shift_right(z, 31)
    return _shift_right(z, 12)


def gumbel_noise(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """G of each id, float64, in [-3.61, 36.74]. `seed` is any integer, taken mod 2^64; `ids` is int64."""
    u = noise_bits(seed, position, ids).double().add_(0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_()
