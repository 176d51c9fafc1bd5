"""Seeds as integers, without torch: what the HTTP process needs to know about randomness.

    mix(z):  z = (z ^ z>>30) * 0xBF58476D1CE4E5B9 ; z = (z ^ z>>27) * 0x94D049BB133111EB ; z ^ z>>31     (mod 2^64)

the finaliser that keyed_noise uses as well. Seeds are signed 64-bit, so that a client can send any of them back.
"""

from __future__ import annotations

import random

MASK64 = (1 << 64) - 1
POSITION_STEP = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB


def signed(z: int) -> int:
    """The int64 with the same 64 bits."""
    z &= MASK64
    return z - (1 << 64) if z >> 63 else z


def mix(z: int) -> int:
    """The 64-bit finaliser above."""
    z &= MASK64
    z = ((z ^ (z >> 30)) * MIX_A) & MASK64
    z = ((z ^ (z >> 27)) * MIX_B) & MASK64
    return z ^ (z >> 31)


def child_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request with n > 1.

    Choice 0 keeps the request's own seed, so n = 1 and n = 4 begin with the same answer. The others mix the index in with
    a large odd step: with a plain seed + index, the choices of seeds 7 and 8 would coincide, shifted by one.
    """
    return signed(seed if index == 0 else mix(seed + POSITION_STEP * index))


def draw_seed(rng: random.Random) -> int:
    """A seed for a request that brought none."""
    return signed(rng.getrandbits(64))
