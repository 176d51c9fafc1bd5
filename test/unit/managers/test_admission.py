"""What may be sent to the scheduler, and how long an answer may become."""

from __future__ import annotations

import pytest

from sglang.srt.constrained.constraint import Constraint, GrammarText
from sglang.srt.errors import BadRequest, ContextTooLong
from sglang.srt.managers.admission import MAX_GRAMMAR_BYTES, Limits, check_sequence, constraint_of
from sglang.srt.managers.sequence import SequenceRequest
from sglang.srt.sampling.sampling_params import SamplingParams

LIMITS = Limits(vocab_size=100, context_length=2048, max_request_tokens=4096)


def sequence(prompt_tokens: int, max_new_tokens: int | None, **fields) -> SequenceRequest:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, min_new_tokens=fields.pop("min_new_tokens", 0))
    return SequenceRequest(rid=fields.pop("rid", "r"), input_ids=[1] * prompt_tokens, sampling=sampling, **fields)


@pytest.mark.parametrize(
    ("prompt", "asked", "granted"),
    [(1500, 548, 548), (1500, None, 548), (2047, 1, 1), (2048, 0, 0), (1, 2047, 2047)],
)
def test_what_fits_is_granted(prompt, asked, granted):
    assert check_sequence(sequence(prompt, asked), LIMITS).max_new_tokens == granted


def test_too_much_is_refused_with_context_total_prompt_and_max_tokens():
    with pytest.raises(ContextTooLong) as error:
        check_sequence(sequence(1500, 600), LIMITS)
    assert all(number in error.value.message for number in ("2048", "2100", "1500", "600", "548"))


@pytest.mark.parametrize("asked", [None, 1, 500])
def test_prompt_that_fills_the_context_is_refused(asked):
    with pytest.raises(ContextTooLong, match="2048"):
        check_sequence(sequence(2048, asked), LIMITS)


@pytest.mark.parametrize("asked", [0, None])
@pytest.mark.parametrize("auto_truncate", [False, True])
def test_prompt_longer_than_the_context_is_never_clipped(asked, auto_truncate):
    limits = Limits(vocab_size=100, context_length=2048, max_request_tokens=4096, auto_truncate=auto_truncate)
    with pytest.raises(ContextTooLong, match="2049"):
        check_sequence(sequence(2049, asked), limits)


def test_pool_smaller_than_the_context_is_named_as_the_limit():
    limits = Limits(vocab_size=100, context_length=2048, max_request_tokens=1000)
    with pytest.raises(ContextTooLong, match=r"pool.*1000.*1100.*900.*200.*100"):
        check_sequence(sequence(900, 200), limits)
    assert check_sequence(sequence(900, None), limits).max_new_tokens == 100


def test_auto_truncate_clips_both_bounds():
    limits = Limits(vocab_size=100, context_length=2048, max_request_tokens=4096, auto_truncate=True)
    sampling = check_sequence(sequence(2000, 600, min_new_tokens=100), limits)
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (48, 48)


@pytest.mark.parametrize("ids", [[], [-1], [100], [1, 2, 10**30]])
def test_ids_outside_the_vocabulary_are_refused(ids):
    seq = sequence(1, 1)
    seq.input_ids = ids
    with pytest.raises(BadRequest) as error:
        check_sequence(seq, LIMITS)
    assert error.value.param == "input_ids"


@pytest.mark.parametrize(
    "fields",
    [
        {"rid": ""},
        {"rid": "x" * 300},
        {"rid": "a\nb"},
        {"cache_salt": "x" * 5000},
        {"swa_restore": "maybe"},
        {"prefill_truncation": "maybe"},
        {"deadline_s": 0.0},
        {"deadline_s": float("nan")},
        {"logprob_start_len": 5},
        {"logprob_start_len": -2},
        {"top_logprobs_num": 101},
        {"token_ids_logprob": [100]},
    ],
)
def test_other_fields_are_checked(fields):
    with pytest.raises(BadRequest) as error:
        check_sequence(sequence(5, 1, **fields), LIMITS)
    assert len(error.value.message) < 300


@pytest.mark.parametrize("name", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_a_grammar_field_becomes_the_constraint(name):
    seq = sequence(5, 1)
    assert constraint_of(seq, 100) is None
    seq.sampling = SamplingParams(**{name: "x"})
    assert constraint_of(seq, 100) == Constraint(grammar=GrammarText(kind=name, text="x"))
    seq.constraint = Constraint(grammar=GrammarText(kind="regex", text="x"))
    with pytest.raises(BadRequest, match="only one grammar"):
        constraint_of(seq, 100)


@pytest.mark.parametrize(
    "fields",
    [
        {"bound_token_id": 3},
        {"trigger_token_ids": (100,)},
        {"trigger_token_ids": (3,), "bound_token_id": -1},
        {"trigger_token_ids": (1,) * 65},
    ],
)
def test_impossible_triggers_are_refused(fields):
    constraint = Constraint(grammar=GrammarText(kind="regex", text="x"), **fields)
    with pytest.raises(BadRequest, match="trigger"):
        constraint_of(sequence(5, 1, constraint=constraint), 100)


def test_a_grammar_has_a_largest_size():
    constraint = Constraint(grammar=GrammarText(kind="regex", text="x" * (MAX_GRAMMAR_BYTES + 1)))
    with pytest.raises(BadRequest, match="bytes"):
        constraint_of(sequence(5, 1, constraint=constraint), 100)
