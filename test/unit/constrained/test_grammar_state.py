"""Phases of a constraint: free text, a forced trigger, the grammar, the end; and all of it taken back."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.constrained.constraint import Constraint, GrammarText
from sglang.srt.constrained.grammar import CompiledGrammar
from sglang.srt.constrained.grammar_state import MAX_ROLLBACK, GrammarState, Phase, prefix_function

VOCAB, EOS = 12, 0
TEXT = GrammarText(kind="regex", text="x")


class Sequence:
    """A matcher that allows the ids of one list, then EOS."""

    def __init__(self, ids: list[int]):
        self.ids, self.at = [*ids, EOS], 0

    def allowed(self) -> torch.Tensor:
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[self.ids[self.at]] = True
        return mask

    def accept(self, token_id: int) -> bool:
        accepted = self.at < len(self.ids) and token_id == self.ids[self.at]
        self.at += accepted
        return accepted

    def rollback(self, count: int) -> None:
        self.at -= count

    @property
    def is_terminated(self) -> bool:
        return self.at == len(self.ids)


def state(*ids: int, **fields) -> GrammarState:
    constraint = Constraint(grammar=TEXT, **fields)
    return GrammarState(constraint, CompiledGrammar(lambda: Sequence(list(ids)), 1), frozenset({EOS}), VOCAB)


def allowed(s: GrammarState) -> list[int] | None:
    mask = s.mask()
    return None if mask is None else mask.nonzero().flatten().tolist()


def test_without_a_trigger_the_grammar_holds_from_the_first_token():
    s = state(5, 6)
    assert (s.phase, allowed(s)) == (Phase.GRAMMAR, [5])
    assert s.advance(5) is None and allowed(s) == [6]
    assert s.advance(6) is None and allowed(s) == [EOS] and not s.is_terminated
    assert s.advance(EOS) is None and s.is_terminated


def test_a_token_the_grammar_does_not_allow_is_a_reason():
    assert "token 7" in state(5).advance(7)


@pytest.mark.parametrize("seed", range(20))
def test_the_trigger_is_found_wherever_it_stands(seed):
    rng = random.Random(seed)
    trigger = tuple(rng.choices([1, 2], k=rng.randint(1, 5)))
    s, text = state(5, trigger_token_ids=trigger), []
    while tuple(text[-len(trigger) :]) != trigger:
        assert s.phase is Phase.FREE and s.mask() is None
        text.append(rng.choice([1, 1, 2, 2, 3]))
        assert s.advance(text[-1]) is None
    assert (s.phase, allowed(s)) == (Phase.GRAMMAR, [5])


def test_the_bound_id_forces_the_trigger():
    s = state(5, trigger_token_ids=(1, 2, 1), bound_token_id=9)
    for token in (3, 1, 2, 9):
        assert s.mask() is None and s.advance(token) is None
    for token in (1, 2, 1):
        assert s.phase is Phase.FORCING and allowed(s) == [token]
        assert s.advance(token) is None
    assert (s.phase, allowed(s)) == (Phase.GRAMMAR, [5])
    other = state(5, trigger_token_ids=(1,), bound_token_id=9)
    other.advance(9)
    assert "needs token 1" in other.advance(4)


def test_eos_is_ruled_out_before_a_trigger_that_must_come():
    assert allowed(state(5, trigger_token_ids=(1,), must_trigger=True)) == list(range(1, VOCAB))
    assert allowed(state(5, trigger_token_ids=(1,))) is None


@pytest.mark.parametrize("seed", range(20))
def test_rollback_restores_every_phase(seed):
    rng = random.Random(seed)
    tokens = [3, 1, 2, 1, 9, 1, 2, 1, 1, 5, 6, EOS]

    def fresh() -> GrammarState:
        return state(5, 6, trigger_token_ids=(1, 2, 1, 1), bound_token_id=9)

    s, at = fresh(), 0
    for _ in range(60):
        if at < len(tokens) and rng.random() < 0.6:
            s.advance(tokens[at])
            at += 1
        else:
            back = rng.randint(0, at)
            s.rollback(back)
            at -= back
        replayed = fresh()
        for token in tokens[:at]:
            replayed.advance(token)
        assert (s.phase, s._progress, s.is_terminated) == (replayed.phase, replayed._progress, replayed.is_terminated)
        if not s.is_terminated:
            assert allowed(s) == allowed(replayed)


def test_no_more_is_taken_back_than_is_remembered():
    s = state(*[5] * 200)
    for _ in range(100):
        s.advance(5)
    with pytest.raises(ValueError, match="remembered"):
        s.rollback(MAX_ROLLBACK + 1)
    s.rollback(MAX_ROLLBACK)
    assert s._matcher.at == 100 - MAX_ROLLBACK


def test_prefix_function():
    assert prefix_function((1, 2, 1, 1, 2, 1)) == [0, 0, 1, 1, 2, 3]
