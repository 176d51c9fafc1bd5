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

import random

import torch

MASK64 = (1 << 64) - 1
POSITION_STEP = 0x9E3779B97F4A7C15
TOKEN_STEP = 0xD1342543DE82EF95
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB


def _signed(z: int) -> int:
    """The int64 with the same 64 bits; torch has no complete uint64."""
    z &= MASK64
    return z - (1 << 64) if z >> 63 else z


def mix(z: int) -> int:
    """The 64-bit finaliser above, on a Python integer."""
    z &= MASK64
    z = ((z ^ (z >> 30)) * MIX_A) & MASK64
    z = ((z ^ (z >> 27)) * MIX_B) & MASK64
    return z ^ (z >> 31)


def _shift_right(z: torch.Tensor, n: int) -> torch.Tensor:
    """Logical shift: int64's own one copies the sign into the upper n bits."""
    return (z >> n).bitwise_and_((1 << (64 - n)) - 1)


def noise_bits(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """The 52 random bits of each id at an absolute position: int64 in, int64 of the same shape out."""
    key = mix(seed + POSITION_STEP * (position + 1))
    z = (ids + 1).mul_(_signed(TOKEN_STEP)).add_(_signed(key))
    z ^= _shift_right(z, 30)
    z *= _signed(MIX_A)
    z ^= _shift_right(z, 27)
    z *= _signed(MIX_B)
    z ^= _shift_right(z, 31)
    return _shift_right(z, 12)


def gumbel_noise(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    """G of each id, float64, in [-3.61, 36.74]. `seed` is any integer, taken mod 2^64; `ids` is int64."""
    u = noise_bits(seed, position, ids).double().add_(0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_()


def child_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request with n > 1, as a signed 64-bit integer a client can send back.

    Choice 0 keeps the request's own seed, so n = 1 and n = 4 begin with the same answer. The others mix the index in with
    a large odd step: with a plain seed + index, the choices of seeds 7 and 8 would coincide, shifted by one.
    """
    return _signed(seed if index == 0 else mix(seed + POSITION_STEP * index))


def draw_seed(rng: random.Random) -> int:
    """A seed for a request that brought none."""
    return _signed(rng.getrandbits(64))
