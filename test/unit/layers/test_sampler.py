"""The sampler's contract: bits depend on (row, state, position) only. And what it reports."""

import math

import pytest
import torch

from sglang.srt.layers.sampler import LOGPROB_FLOOR, SampledToken, Sampler
from sglang.srt.sampling.sampling_params import parse_sampling_params
from sglang.srt.sampling.sampling_state import SamplingState

V = 1031  # odd, so that rows of a matrix begin at every alignment
KINDS = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.05},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 0, "logit_bias": {"5": 2.0, "1000": 3.5}, "repetition_penalty": 1.5},
    {"top_p": 0.95, "min_new_tokens": 3, "stop_token_ids": [7]},
    {"top_k": 5, "temperature": 1.7},
]
PROMPT = [4, 5, 6, 7]


def logits(n, seed=0):
    return torch.randn(n, V, generator=torch.Generator().manual_seed(seed)) * 3


def make(kind=None, seed=1, logprobs=True, prompt=PROMPT, vocab_size=V, **kwargs):
    params = parse_sampling_params({"sampling_seed": seed, **(kind or {}), **kwargs}, vocab_size=vocab_size)
    return SamplingState(params, prompt, frozenset({1}), vocab_size, return_logprob=logprobs, top_logprobs=4, token_ids_logprob=[3, 900])


def alone(rows, kind, seed, positions):
    """One request by itself, one row per call."""
    state = make(kind, seed)
    return [Sampler().sample(rows[t : t + 1], [state], [p])[0] for t, p in enumerate(positions)]


# -- row independence ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("company", [1, 2, 7, 19])
def test_tokens_and_logprobs_are_the_same_alone_and_in_company(company):
    steps, n = 6, company + 1
    rows = [logits(steps, seed=100 + r) for r in range(n)]
    positions = list(range(4, 4 + steps))
    expected = [alone(rows[r], KINDS[r % len(KINDS)], r, positions) for r in range(n)]
    states = [make(KINDS[r % len(KINDS)], r) for r in range(n)]
    for t in range(steps):
        order = list(range(n)) if t % 2 else list(range(n))[::-1]
        batch = torch.stack([rows[r][t] for r in order])
        got = Sampler().sample(batch, [states[r] for r in order], [positions[t]] * n)
        assert got == [expected[r][t] for r in order]


def test_where_a_row_lies_in_memory_does_not_matter():
    row = logits(1)[0]
    expected = Sampler().sample(row.unsqueeze(0), [make({"top_p": 0.9})], [9])
    for offset in (1, 2, 3, 5, 8, 13):
        store = torch.full((offset + V + 20,), 77.0)
        store[offset : offset + V] = row
        assert Sampler().sample(store[offset : offset + V].unsqueeze(0), [make({"top_p": 0.9})], [9]) == expected
    wide = torch.full((3, 2 * V), math.inf)
    wide[1, ::2] = row
    assert Sampler().sample(wide[1:2, ::2], [make({"top_p": 0.9})], [9]) == expected


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_does_not_matter(threads):
    size = 129280
    row = torch.randn(1, size, generator=torch.Generator().manual_seed(2)) * 3

    def run():
        return [Sampler().sample(row, [make(k, vocab_size=size)], [9]) for k in ({"temperature": 0}, {"top_p": 0.9}, {})]

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = run()
    try:
        torch.set_num_threads(threads)
        assert run() == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_several_positions_of_one_request_in_one_call_equal_step_by_step(kind):
    rows = logits(5)
    state = make(kind)
    assert Sampler().sample(rows, [state] * 5, [4, 5, 6, 7, 8]) == alone(rows, kind, 1, [4, 5, 6, 7, 8])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_sampled_too_far_leave_no_trace(kind):
    """A superfluous overlapped step, or rejected drafts: later positions were sampled, then the request went back."""
    rows = logits(6)
    expected = alone(rows, kind, 1, range(4, 10))
    state = make(kind)
    Sampler().sample(rows[:2], [state] * 2, [4, 5])
    Sampler().sample(logits(3, seed=9), [state] * 3, [6, 7, 8])
    assert Sampler().sample(rows[2:], [state] * 4, [6, 7, 8, 9]) == expected[2:]


def test_penalties_of_tokens_sampled_too_far_are_taken_back():
    """Every token is as probable as the others, so a single wrong count would choose another one."""
    rows, kind = torch.zeros(4, V), {"temperature": 0, "presence_penalty": 1.0}
    state = make(kind)
    assert [t.id for t in Sampler().sample(rows, [state] * 4, [4, 5, 6, 7])] == [0, 1, 2, 3]
    assert [t.id for t in Sampler().sample(rows, [state] * 4, [6, 7, 8, 9])] == [2, 3, 4, 5]


def test_another_prompt_changes_nothing_but_the_positions():
    rows = logits(3)
    kind = {"repetition_penalty": 1.5, "presence_penalty": 1.0}
    one = Sampler().sample(rows, [make(kind, prompt=[4, 5, 6, 7])] * 3, [4, 5, 6])
    two = Sampler().sample(rows, [make(kind, prompt=[900, 901, 902, 903])] * 3, [4, 5, 6])
    assert one == two


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    rows = logits(16)
    runs = [[t.id for t in alone(rows, {}, seed, range(4, 20))] for seed in (0, 0, 1, 2)]
    assert runs[0] == runs[1] and len({tuple(r) for r in runs}) == 3


# -- greedy, ends, biases -----------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_on_ties_on_both_paths():
    rows = torch.zeros(2, V)
    rows[:, [40, 700, 1030]] = 5.0
    slow = make({"temperature": 0, "logit_bias": {"3": 0.5}})
    assert [t.id for t in Sampler().sample(rows, [make({"temperature": 0}), slow], [4, 4])] == [40, 40]


def test_penalties_accepted_are_penalties_applied():
    """Two ids compete; only the penalty lets the second one in."""

    def run(**kwargs):
        state = make({"temperature": 0, "ignore_eos": True, **kwargs}, logprobs=False)
        return [Sampler().sample(torch.zeros(1, V), [state], [4 + t])[0].id for t in range(16)]

    bias = {"100": 100, "200": 96}
    assert run(logit_bias=bias) == [100] * 16
    assert run(logit_bias=bias, frequency_penalty=2)[:4] == [100, 100, 100, 200]
    close = {"100": 100, "200": 99.5}
    assert run(logit_bias=close, presence_penalty=0) == [100] * 16
    assert run(logit_bias=close, presence_penalty=2)[:2] == [100, 200]


def test_eos_and_stop_ids_cannot_come_before_min_new_tokens():
    rows = torch.zeros(1, V)
    rows[0, 1], rows[0, 7] = 50.0, 49.0
    state = make({"temperature": 0, "min_new_tokens": 3, "stop_token_ids": [7]})
    assert [Sampler().sample(rows, [state], [4 + t])[0].id for t in range(5)] == [0, 0, 0, 1, 1]


# -- one bad row --------------------------------------------------------------------------------------------------------


def test_a_row_with_nan_ends_alone():
    rows = logits(4)
    expected = Sampler().sample(rows, [make(KINDS[r], r) for r in range(4)], [4] * 4)
    for column in (0, 500, V - 1):
        broken = rows.clone()
        broken[2, column] = math.nan
        got = Sampler().sample(broken, [make(KINDS[r], r) for r in range(4)], [4] * 4)
        assert got[2] == SampledToken(id=0, error="the model produced NaN at position 4")
        assert [got[r] for r in (0, 1, 3)] == [expected[r] for r in (0, 1, 3)]


def test_a_row_without_candidates_ends_alone_and_commits_nothing():
    rows = logits(3)
    rows[1] = -math.inf
    states = [make(KINDS[3], r) for r in range(3)]
    states[2].vocab_mask = torch.zeros(V, dtype=torch.bool)
    got = Sampler().sample(rows, states, [4] * 3)
    assert got[0] == Sampler().sample(rows[:1], [make(KINDS[3], 0)], [4])[0]
    assert "-inf" in got[1].error and "grammar" in got[2].error
    assert states[1].penalties.ids == states[2].penalties.ids == []
    assert "-inf" in Sampler().sample(rows[1:2], [make({"temperature": 0})], [4])[0].error


def test_bans_that_leave_no_token_are_the_requests_own_doing_and_a_broken_row_is_not():
    rows = logits(2)
    rows[1] = -math.inf
    states = [make({"temperature": temperature, "min_new_tokens": 1, "stop_token_ids": list(range(V))}, 0) for temperature in (0, 1)]
    assert [Sampler().sample(rows[:1], [state], [state.prompt_len])[0].is_own_doing for state in states] == [True, True]
    assert not Sampler().sample(rows[1:], [make({"temperature": 0})], [4])[0].is_own_doing


def test_mismatched_lengths_are_refused():
    with pytest.raises(ValueError, match="2 rows, 1 states and 2 positions"):
        Sampler().sample(logits(2), [make()], [4, 5])
    with pytest.raises(ValueError, match="2 rows and 1 target"):
        Sampler().prompt_logprobs(logits(2), [1], 0, None)


def test_an_empty_batch_is_fine():
    assert Sampler().sample(torch.empty(0, V), [], []) == []


# -- logprobs -----------------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits_whatever_the_transforms():
    row = logits(1)
    reference = torch.log_softmax(row[0].double(), 0)
    for kind in KINDS:
        token = Sampler().sample(row, [make(kind)], [4])[0]
        assert token.logprob == pytest.approx(reference[token.id].item(), abs=1e-5)
        assert [i for _, i in token.top] == torch.argsort(row[0], descending=True, stable=True)[:4].tolist()
        assert all(lp == pytest.approx(reference[i].item(), abs=1e-5) for lp, i in token.top + token.token_ids)
        assert [i for _, i in token.token_ids] == [3, 900]


def test_nothing_is_reported_unless_asked():
    token = Sampler().sample(logits(1), [make(logprobs=False)], [4])[0]
    assert token.logprob is None and token.top is None and token.token_ids is None


def test_top_logprobs_break_ties_towards_lower_ids_and_start_with_the_argmax():
    row = torch.zeros(1, V)
    row[0, [50, 20, 999]] = 3.0
    token = Sampler().sample(row, [make({"temperature": 0})], [4])[0]
    assert [i for _, i in token.top] == [20, 50, 999, 0] and token.id == 20
    # Two logits that differ, but whose logprobs round to the same float: the larger logit still comes first.
    row = torch.full((1, V), -200.0)
    row[0, 5], row[0, 10] = 101.0, 1.0
    row[0, 600] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    top = Sampler().sample(row, [make({"temperature": 0})], [4])[0].top
    assert [i for _, i in top[:3]] == [5, 600, 10] and top[1][0] == top[2][0]


def test_asking_for_more_than_the_vocabulary_gives_the_vocabulary():
    state = SamplingState(make().params, PROMPT, frozenset(), V, return_logprob=True, top_logprobs=5000)
    assert len(Sampler().sample(logits(1), [state], [4])[0].top) == V


def test_infinite_logits_give_finite_logprobs():
    row = torch.zeros(1, V)
    row[0, [3, 8]] = math.inf
    row[0, 900] = -math.inf
    token = Sampler().sample(row, [make({"temperature": 0})], [4])[0]
    assert token.id == 3 and token.logprob == pytest.approx(-math.log(2))
    assert token.token_ids[1] == (LOGPROB_FLOOR, 900)


# -- prompt logprobs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 7, 20])
def test_prompt_logprobs_do_not_depend_on_the_chunking(chunk):
    rows, targets = logits(20), list(range(100, 120))
    whole = Sampler().prompt_logprobs(rows, targets, 2, [3, 900])
    parts = [Sampler().prompt_logprobs(rows[i : i + chunk], targets[i : i + chunk], 2, [3, 900]) for i in range(0, 20, chunk)]
    for name in ("ids", "logprobs", "top", "token_ids"):
        assert [entry for part in parts for entry in getattr(part, name)] == getattr(whole, name)
    assert whole.ids == targets and all(lp <= 0 for lp in whole.logprobs)


def test_prompt_and_output_logprobs_of_one_row_are_the_same_bits():
    rows = logits(1)
    token = Sampler().sample(rows, [make()], [4])[0]
    prompt = Sampler().prompt_logprobs(rows, [token.id], 4, [3, 900])
    assert (prompt.logprobs, prompt.top, prompt.token_ids) == ([token.logprob], [token.top], [token.token_ids])


def test_prompt_logprobs_without_extras():
    result = Sampler().prompt_logprobs(logits(2), [1, 2], 0, None)
    assert result.top is None and result.token_ids is None and len(result.logprobs) == 2
