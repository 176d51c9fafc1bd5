"""The transforms against a plain oracle, and against the distribution they should give."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.sampling.keyed_noise import gumbel_noise
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.sampling_state import SamplingState
from sglang.srt.sampling.transforms import NoCandidate, adjust, choose, descending, first_argmax, kept_ids

PROMPT = [1, 2, 3]


def state(vocab_size, eos=frozenset({1}), **kwargs):
    kwargs.setdefault("sampling_seed", 42)
    return SamplingState(SamplingParams(**kwargs), PROMPT, eos, vocab_size)


def random_row(vocab_size, seed=0, spread=3.0):
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def oracle_kept(row, p):
    """Top-k, then top-p, then min-p on Python floats, sorted with Python's stable sort."""
    order = sorted(range(len(row)), key=lambda v: (-row[v], v))
    if p.top_k > 0:
        order = order[: p.top_k]
    scaled = {v: float(row[v]) / p.temperature for v in order}
    weight = {v: math.exp(scaled[v] - scaled[order[0]]) for v in order}
    if p.top_p < 1.0:
        total, mass, kept = sum(weight[v] for v in sorted(order)), 0.0, []
        for v in order:
            kept.append(v)
            mass += weight[v]
            if mass >= total * p.top_p:
                break
        order = kept
    if p.min_p > 0.0:
        order = [v for v in order if weight[v] >= p.min_p * (1 - 1e-12)]
    return sorted(order)


# -- order and ties -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 7, 64, 4096, 129280])
def test_argmax_takes_the_lowest_index_on_ties(size, dtype):
    for places in ([0, size - 1], [size // 2, size - 1], list(range(size))):
        row = torch.zeros(size, dtype=dtype)
        row[places] = 5.0
        assert first_argmax(row) == places[0]
        assert row.unsqueeze(0).repeat(3, 1).max(dim=1).indices.tolist() == [places[0]] * 3


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=80), st.integers(1, 90))
def test_descending_is_a_prefix_of_the_stable_sort(values, at_least):
    row = torch.tensor(values, dtype=torch.float32)
    ids = descending(row, at_least).tolist()
    assert ids == sorted(range(len(values)), key=lambda v: (-values[v], v))[: len(ids)]
    assert len(ids) >= min(at_least, len(values))


def test_top_k_breaks_ties_towards_lower_ids():
    row = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 1.0])
    assert kept_ids(row, state(6, top_k=4)).tolist() == [0, 1, 2, 3]


def test_top_p_breaks_ties_towards_lower_ids():
    row = torch.zeros(8)
    assert kept_ids(row, state(8, top_p=0.5)).tolist() == [0, 1, 2, 3]
    assert kept_ids(row, state(8, top_p=0.501)).tolist() == [0, 1, 2, 3, 4]


# -- the sets -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    st.integers(2, 60),
    st.integers(0, 10**6),
    st.sampled_from([-1, 1, 2, 5, 40]),
    st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([0.3, 1.0, 2.5]),
)
def test_kept_ids_equal_the_oracle(size, seed, top_k, top_p, min_p, temperature):
    p = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, sampling_seed=1)
    row = random_row(size, seed)
    ids = kept_ids(row, SamplingState(p, PROMPT, frozenset(), size))
    assert (list(range(size)) if ids is None else ids.tolist()) == oracle_kept(row.tolist(), p)


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
def test_sorting_a_part_first_gives_the_same_top_p_set(spread, monkeypatch):
    """Flat rows need more than the part that is sorted first; peaked rows less. Both must not show."""
    from sglang.srt.sampling import transforms

    row = random_row(6000, 3, spread)
    sets = []
    for first in (1, 64, 1024, 6000):
        monkeypatch.setattr(transforms, "FIRST_SORTED", first)
        sets.append(kept_ids(row, state(6000, top_p=0.9)))
    assert all(torch.equal(sets[0], other) for other in sets)


def test_no_filter_costs_nothing():
    assert kept_ids(random_row(64), state(64)) is None
    assert kept_ids(random_row(64), state(64, top_k=64)) is None


def test_top_p_keeps_at_least_the_most_probable():
    assert kept_ids(random_row(64), state(64, top_p=1e-12)).tolist() == [int(random_row(64).argmax())]


def test_forbidden_tokens_are_never_kept_ahead_of_allowed_ones():
    row = torch.full((64,), -math.inf)
    row[[9, 20]] = torch.tensor([0.0, 1.0])
    for kwargs in ({"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.01}, {}):
        assert {choose(row, state(64, **kwargs), t) for t in range(3, 60)} == {9, 20}


# -- adjusting ----------------------------------------------------------------------------------------------------------


def test_adjust_leaves_the_raw_row_alone():
    row = random_row(16)
    before = row.clone()
    s = state(16, frequency_penalty=1.0, logit_bias={"3": 5.0}, min_new_tokens=4)
    s.commit([3, 4])
    adjust(row, s, 5)
    assert torch.equal(row, before)


def test_bias_ban_and_mask_each_do_their_part():
    row = torch.zeros(6)
    s = state(6, logit_bias={"2": 3.0, "5": -1.0}, min_new_tokens=1, stop_token_ids=[4])
    s.vocab_mask = torch.tensor([True, True, True, False, True, True])
    assert adjust(row, s, 3).tolist() == [0.0, -math.inf, 3.0, -math.inf, -math.inf, -1.0]
    assert adjust(row, s, 4).tolist() == [0.0, 0.0, 3.0, -math.inf, 0.0, -1.0]


def test_the_mask_wins_over_a_huge_bias():
    s = state(4, temperature=0.0, logit_bias={"2": 1e30})
    s.vocab_mask = torch.tensor([True, True, False, True])
    assert choose(torch.tensor([0.0, 1.0, 2.0, 0.5]), s, 3) == 1


def test_nothing_left_is_refused_with_the_reason():
    s = state(4)
    s.vocab_mask = torch.zeros(4, dtype=torch.bool)
    with pytest.raises(NoCandidate, match="position 3: the grammar allows none"):
        choose(torch.zeros(4), s, 3)
    with pytest.raises(NoCandidate, match="all logits are -inf"):
        choose(torch.full((4,), -math.inf), state(4), 3)


def test_a_grammar_that_allows_only_the_end_lifts_the_ban_of_min_new_tokens():
    s = state(4, min_new_tokens=2)
    s.vocab_mask = torch.tensor([False, True, False, False])
    assert choose(torch.zeros(4), s, 3) == 1
    s.vocab_mask = torch.tensor([False, True, False, True])
    assert {choose(torch.zeros(4), state_at, 3) for state_at in [s] * 20} == {3}


def test_infinite_logits_share_the_whole_mass():
    row = torch.tensor([0.0, math.inf, 90.0, math.inf])
    drawn = [choose(row, state(4), t) for t in range(3, 203)]
    assert set(drawn) == {1, 3} and 60 < drawn.count(1) < 140
    assert choose(row, state(4, temperature=0.0), 3) == 1


# -- the draw -----------------------------------------------------------------------------------------------------------


def test_the_draw_is_argmax_of_scaled_logit_plus_noise():
    row = random_row(512)
    for position in (3, 4, 1000):
        scores = row.double() / 0.7 + gumbel_noise(42, position, torch.arange(512))
        assert choose(row, state(512, temperature=0.7), position) == int(scores.argmax())


def test_filters_do_not_change_a_token_that_survives_them():
    """Noise is keyed by id, so removing other candidates leaves the winner where it is."""
    row = random_row(512)
    for position in range(3, 60):
        free = choose(row, state(512), position)
        filtered = state(512, top_k=40)
        if free in kept_ids(row, filtered).tolist():
            assert choose(row, filtered, position) == free


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("kwargs", FILTERS, ids=str)
@pytest.mark.parametrize("keyed_by", ["position", "seed"])
def test_frequencies_match_the_distribution(kwargs, keyed_by):
    """Chi-square at the 0.1 % point over 3,000 draws; inputs are fixed, so it passes always or never."""
    size, draws = 12, 3000
    row = random_row(size, 5, 1.5)
    p = SamplingParams(sampling_seed=0, **kwargs)
    kept = oracle_kept(row.tolist(), p)
    weights = torch.tensor([math.exp(float(row[v]) / p.temperature) for v in kept], dtype=torch.float64)
    probabilities = weights / weights.sum()
    if keyed_by == "position":
        one = state(size, **kwargs)
        tokens = [choose(row, one, t) for t in range(3, 3 + draws)]
    else:
        tokens = [choose(row, state(size, sampling_seed=s, **kwargs), 3) for s in range(draws)]
    counts = torch.bincount(torch.tensor(tokens), minlength=size).double()
    assert counts.sum() == counts[kept].sum()
    expected = probabilities * draws
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    point = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 9: 27.88, 10: 29.59, 11: 31.26}
    assert statistic < point[len(kept) - 1], (statistic, len(kept))


def test_prefix_sums_are_sequential():
    """top-p relies on it: a tree-shaped sum would give other bits for another length or number of threads."""
    weights = torch.rand(129280, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert weights.cumsum(0).tolist() == list(itertools.accumulate(weights.tolist()))
