"""What a state derives from its parameters, and that it is a function of positions."""

import pytest
import torch

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.sampling_state import SamplingState


def state(prompt=(1, 2, 3), eos=frozenset({1}), **kwargs):
    kwargs.setdefault("sampling_seed", 7)
    return SamplingState(SamplingParams(**kwargs), prompt, eos, 16)


def test_sampling_needs_a_seed_and_greedy_does_not():
    with pytest.raises(ValueError, match="sampling_seed"):
        state(sampling_seed=None)
    assert state(sampling_seed=None, temperature=0.0).seed == 0


def test_a_negative_seed_is_taken_mod_2_64():
    assert state(sampling_seed=-1).seed == 2**64 - 1


@pytest.mark.parametrize(
    "kwargs", [{"frequency_penalty": 1.0}, {"logit_bias": {"3": 1.0}}, {"min_new_tokens": 1}, {"temperature": 1.0}], ids=str
)
def test_only_bare_greedy_takes_the_plain_argmax(kwargs):
    assert state(temperature=0.0).takes_plain_argmax
    assert not state(**{"temperature": 0.0, **kwargs}).takes_plain_argmax
    masked = state(temperature=0.0)
    masked.vocab_mask = torch.ones(16, dtype=torch.bool)
    assert not masked.takes_plain_argmax


def test_end_ids_are_banned_for_the_first_min_new_tokens_positions():
    s = state(min_new_tokens=2, max_new_tokens=5, stop_token_ids=[4], eos=frozenset({1, 99}))
    assert s.end_ids.tolist() == [1, 4]  # an EOS beyond the vocabulary cannot be banned, nor sampled
    assert [s.bans_end(p) for p in (3, 4, 5, 6)] == [True, True, False, False]


def test_begin_forgets_what_was_sampled_later():
    s = state(presence_penalty=1.0)
    s.commit([5, 6, 7])
    s.begin(4)
    assert s.penalties.ids == [5]
