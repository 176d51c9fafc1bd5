"""Penalties against their formula, going back, and order."""

import pytest
import torch

from sglang.srt.sampling.penalties import Penalties
from sglang.srt.sampling.sampling_params import SamplingParams


def penalised(ids, row, **kwargs):
    penalties = Penalties(SamplingParams(**kwargs), len(row))
    penalties.extend(ids)
    return penalties.apply_(torch.tensor(row)).tolist()


def test_nothing_produced_changes_nothing():
    row = [1.0, -2.0, 0.5]
    assert penalised([], row, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=2.0) == row


def test_frequency_counts_and_presence_does_not():
    assert penalised([1, 1, 2], [0.0, 0.0, 0.0], frequency_penalty=0.5) == [0.0, -1.0, -0.5]
    assert penalised([1, 1, 2], [0.0, 0.0, 0.0], presence_penalty=0.5) == [0.0, -0.5, -0.5]
    assert penalised([1], [0.0, 0.0], presence_penalty=-2.0) == [0.0, 2.0]


def test_repetition_moves_both_signs_towards_improbable():
    assert penalised([0, 1], [3.0, -3.0, 3.0], repetition_penalty=2.0) == [1.5, -6.0, 3.0]


def test_additive_penalties_come_before_the_multiplicative_one():
    # 1 - 2 = -1, negative, so it is multiplied; the other order would give 0.5 - 2
    assert penalised([0], [1.0], presence_penalty=2.0, repetition_penalty=2.0) == [-2.0]


def test_rewind_gives_the_same_row_as_never_having_gone_further():
    params = SamplingParams(frequency_penalty=0.3, presence_penalty=0.1, repetition_penalty=1.3)
    row = torch.randn(64, generator=torch.Generator().manual_seed(0))
    one, two = Penalties(params, 64), Penalties(params, 64)
    one.extend([5, 9, 5])
    two.extend([5, 9, 5, 5, 7, 9])
    two.rewind(3)
    assert two.ids == [5, 9, 5]
    assert torch.equal(one.apply_(row.clone()), two.apply_(row.clone()))


def test_a_gap_in_the_known_tokens_is_refused():
    penalties = Penalties(SamplingParams(frequency_penalty=1.0), 4)
    penalties.extend([1])
    with pytest.raises(ValueError, match="know 1 produced tokens, but 2"):
        penalties.rewind(2)
