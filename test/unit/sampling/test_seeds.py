"""Seeds of choices and of requests that bring none."""

import random
from collections import Counter

from sglang.srt.sampling.seeds import child_seed, draw_seed, mix


def test_child_zero_is_the_parent_and_all_fit_in_int64():
    assert child_seed(12345, 0) == 12345 and child_seed(2**64 - 1, 0) == -1
    assert all(-(2**63) <= child_seed(s, i) < 2**63 for s in (0, 1, -1, 2**63 - 1) for i in range(8))


def test_neighbouring_seeds_have_different_children():
    counts = Counter(child_seed(seed, index) for seed in range(100) for index in range(16))
    assert max(counts.values()) == 1


def test_drawn_seeds_are_signed_64_bit_and_reproducible():
    drawn = [draw_seed(random.Random(3)) for _ in range(2)]
    assert drawn[0] == drawn[1] and -(2**63) <= drawn[0] < 2**63


def test_mix_agrees_with_the_oracle_on_unreduced_input():
    assert mix(2**70 + 5) == mix(5)
