"""Bit equality of logits: alone or in company, whole or in pieces, in any cache format and precision."""

from __future__ import annotations

import random

import pytest
import torch

from harness.direct import direct_runner

MODES = {
    "exact": dict(cache_dtype="float32", dtype="float32", activation_quant="off"),
    "release": dict(cache_dtype="auto", dtype="bfloat16", activation_quant="auto"),
}
LENGTH = 90


def ids(seed: int, length: int, vocab: int = 500) -> list[int]:
    return random.Random(seed).choices(range(3, vocab), k=length)


@pytest.fixture(scope="module", params=MODES)
def runner(request):
    return direct_runner("mini-s1", num_sequences=20, tokens=256, **MODES[request.param])


@pytest.fixture(scope="module")
def alone(runner):
    return runner.sequence(0).extend(ids(1, LENGTH))


@pytest.mark.parametrize("chunk", [1, 2, 3, 17, 64])
def test_whole_prompt_equals_pieces(runner, alone, chunk):
    assert torch.equal(runner.sequence(3).extend(ids(1, LENGTH), chunk), alone)


@pytest.mark.parametrize("company", [1, 4, 19])
def test_prefill_among_others(runner, alone, company):
    rng = random.Random(company)
    work = [(runner.sequence(i + 1), ids(100 + i, rng.randint(1, 120))) for i in range(company)]
    place = rng.randint(0, company)
    work.insert(place, (runner.sequence(0), ids(1, LENGTH)))
    assert torch.equal(runner.step(work)[place], alone)


@pytest.mark.parametrize("company", [1, 7, 19])
def test_decode_beside_prefills_and_decodes(runner, alone, company):
    rng = random.Random(company)
    mine = runner.sequence(0)
    mine.extend(ids(1, LENGTH - 12))
    others = [runner.sequence(i + 1) for i in range(company)]
    for i, other in enumerate(others):
        if i % 2:
            other.extend(ids(200 + i, rng.randint(1, 60)))
    rows = []
    for step in range(12):
        work = [(other, ids(300 + i + step, 1 if i % 2 else rng.randint(1, 8))) for i, other in enumerate(others)]
        place = rng.randint(0, company)
        work.insert(place, (mine, [ids(1, LENGTH)[LENGTH - 12 + step]]))
        rows.append(runner.step(work)[place])
    assert torch.equal(torch.cat(rows), alone[-12:])


def test_rolling_back_and_rewriting_changes_nothing(runner, alone):
    """Rejected draft tokens leave garbage in rings and pages; the committed length is the only truth (dspark.md §2.6)."""
    sequence = runner.sequence(5)
    prompt = ids(1, LENGTH)
    sequence.extend(prompt[:40])
    rows, rng, n = [], random.Random(0), 40
    while n < LENGTH:
        accepted = min(rng.randint(1, 6), LENGTH - n)
        run = prompt[n : n + accepted] + ids(rng.random(), 6 - accepted)
        rows.append(sequence.extend(run)[:accepted])
        del sequence.ids[n + accepted :]
        n += accepted
    assert torch.equal(torch.cat(rows), alone[40:])


def test_number_of_threads_does_not_matter(runner, alone):
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(runner.sequence(0).extend(ids(1, LENGTH)), alone)
    finally:
        torch.set_num_threads(threads)
