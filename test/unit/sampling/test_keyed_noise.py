"""The noise is exactly the published function, and the same bits however it is asked for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.sampling.keyed_noise import gumbel_noise, noise_bits

VECTORS = [
    (42, 0, 0, 3737123630097172, 1.678998293829547),
    (42, 0, 1, 4249397141571604, 2.845591846217163),
    (42, 100, 3, 3005623329457589, 0.905370532480294),
    (0, 0, 0, 2761186134177008, 0.714949844600429),
    (2**64 - 1, 1048575, 129279, 1479246867561467, -0.107368017574485),
]
V = 129280


def by_definition(seed: int, t: int, v: int) -> int:
    """The formula in Python integers, written out once more as the oracle."""
    m = 2**64

    def mixed(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % m
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % m
        return z ^ (z >> 31)

    k = mixed((seed + 0x9E3779B97F4A7C15 * (t + 1)) % m)
    return mixed((k + 0xD1342543DE82EF95 * (v + 1)) % m) >> 12


@pytest.mark.parametrize("seed, t, v, bits, gumbel", VECTORS)
def test_published_vectors(seed, t, v, bits, gumbel):
    assert noise_bits(seed, t, torch.tensor([v])).tolist() == [bits]
    assert gumbel_noise(seed, t, torch.tensor([v])).item() == pytest.approx(gumbel, abs=5e-15)
    assert noise_bits(seed, t, torch.arange(V))[v].item() == bits


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(0, V))
def test_bits_equal_the_definition(seed, t, v):
    assert noise_bits(seed, t, torch.tensor([v])).item() == by_definition(seed, t, v) < 2**52


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 0])
def test_a_signed_seed_means_its_value_mod_2_64(seed):
    ids = torch.arange(50)
    assert torch.equal(noise_bits(seed, 3, ids), noise_bits(seed % 2**64, 3, ids))


def test_a_subset_has_the_bits_of_the_whole_vocabulary():
    full = gumbel_noise(7, 11, torch.arange(V))
    generator = torch.Generator().manual_seed(1)
    subsets = [torch.arange(start, start + n) for n in [*range(1, 40), 1023, 4097] for start in (0, 1, 3, 8, 1001)]
    subsets += [torch.arange(0, V, 3), torch.arange(V).flip(0), torch.randperm(V, generator=generator)[:777]]
    subsets += [torch.arange(V).view(-1, 2)[:, 1]]  # a strided view
    for ids in subsets:
        assert torch.equal(gumbel_noise(7, 11, ids), full[ids])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_does_not_change_a_bit(threads):
    before = torch.get_num_threads()
    full = gumbel_noise(5, 9, torch.arange(V))
    try:
        torch.set_num_threads(threads)
        assert torch.equal(gumbel_noise(5, 9, torch.arange(V)), full)
    finally:
        torch.set_num_threads(before)


def test_the_ids_asked_for_are_left_alone():
    ids = torch.arange(10)
    gumbel_noise(1, 2, ids)
    assert torch.equal(ids, torch.arange(10))


def test_the_extreme_bits_stay_finite():
    for bits in (0, 2**52 - 1):
        u = (torch.tensor([bits], dtype=torch.int64).double() + 0.5) * 2.0**-52
        gumbel = -torch.log(-torch.log(u))
        assert math.isfinite(gumbel.item()) and -3.61 <= gumbel.item() <= 36.75


def test_uniform_over_positions_ids_and_seeds():
    """Chi-square with 15 degrees of freedom of the top four bits; 37.7 is the 0.1 % point. Inputs are fixed."""
    many = 40_000
    samples = {
        "ids": noise_bits(3, 5, torch.arange(many)),
        "positions": torch.cat([noise_bits(3, t, torch.tensor([17])) for t in range(many // 10)]),
        "seeds": torch.cat([noise_bits(s, 5, torch.tensor([17])) for s in range(many // 10)]),
    }
    for name, bits in samples.items():
        counts = torch.bincount(bits >> 48, minlength=16).double()
        expected = len(bits) / 16
        assert ((counts - expected) ** 2 / expected).sum() < 37.7, name
