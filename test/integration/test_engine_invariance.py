"""Same tokens, whatever happens, through real processes: engines against one oracle, bit for bit.

test_invariance.py crosses every axis in one process; here a few of its corners run as users run them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

import sglang
from harness.direct import GOLDEN

CHECKPOINT = str(GOLDEN / "nano-s1" / "checkpoint")
VOCAB = 512
NEW_TOKENS = 28
SOME = (1, 2, 3, 6)
"""Requests that also run alone: greedy and seeded, with penalties, with prompt logprobs, short and chunked."""
LENGTHS = (37, 52, 33, 48, 41, 57, 200, 330)
ROOMY, TIGHT = 1536, 384
"""Tokens in the pool: all eight requests at once, or so few that some must be retracted."""

BASE = {"model_path": CHECKPOINT, "page_size": 8, "max_running_requests": 8, "max_snapshots": 24, "snapshot_interval": 32}
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "top_p": 0.9}

AXES = [
    pytest.param({"chunked_prefill_size": chunk, "disable_overlap_schedule": not overlap, "max_total_tokens": pool}, id=name)
    for chunk in (16,)
    for overlap in (True,)
    for pool in (ROOMY, TIGHT)
    for name in [f"chunk{'-off' if chunk < 0 else chunk}-{'overlap' if overlap else 'plain'}-{'tight' if pool == TIGHT else 'roomy'}"]
]


def requests() -> list[dict[str, Any]]:
    """Eight requests: greedy and seeded by turns, some with penalties, all with logprobs, two with prompt logprobs."""
    rng = random.Random(7)
    shared = rng.choices(range(3, VOCAB), k=20)
    wanted = []
    for i, length in enumerate(LENGTHS):
        ids = (shared if i % 2 else rng.choices(range(3, VOCAB), k=20)) + rng.choices(range(3, VOCAB), k=length - 20)
        sampling = {**(SEEDED if i % 3 else GREEDY), "sampling_seed": i, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        if i % 4 == 1:
            sampling |= {"frequency_penalty": 0.5, "presence_penalty": 0.2}
        wanted.append({"input_ids": ids, "sampling_params": sampling, "logprob_start_len": 0 if i in (2, 6) else -1})
    return wanted


def facts(result: dict[str, Any]) -> tuple[Any, ...]:
    """What must be identical."""
    meta = result["meta_info"]
    pairs = [entry[:2] for entry in meta["output_token_logprobs"]]
    top = [[entry[:2] for entry in position] for position in meta["output_top_logprobs"]]
    prompt = [entry[:2] for entry in meta.get("input_token_logprobs") or []]
    return result["output_ids"], pairs, top, prompt


def alone(engine: sglang.Engine, numbers: tuple[int, ...] = tuple(range(len(LENGTHS)))) -> dict[int, dict[str, Any]]:
    """Results by request number, one request at a time."""
    wanted = requests()
    return {i: engine.generate(**wanted[i], return_logprob=True, top_logprobs_num=2) for i in numbers}


def together(engine: sglang.Engine) -> dict[int, dict[str, Any]]:
    """All eight in one call, so that they run at once."""
    wanted = requests()
    results = engine.generate(
        input_ids=[request["input_ids"] for request in wanted],
        sampling_params=[request["sampling_params"] for request in wanted],
        logprob_start_len=[request["logprob_start_len"] for request in wanted],
        return_logprob=True,
        top_logprobs_num=2,
    )
    return dict(enumerate(results))


def evict(engine: sglang.Engine) -> None:
    """Other prompts, enough of them to push everything older out of the pool."""
    rng = random.Random(99)
    for _ in range(ROOMY // 340 + 1):
        engine.generate(input_ids=rng.choices(range(3, VOCAB), k=340), sampling_params={"max_new_tokens": 1})


@pytest.fixture(scope="module")
def oracle() -> dict[int, tuple[Any, ...]]:
    with sglang.Engine(
        **BASE, chunked_prefill_size=-1, disable_overlap_schedule=True, disable_radix_cache=True, max_total_tokens=ROOMY
    ) as engine:
        results = alone(engine)
    assert all(result["meta_info"]["cached_tokens"] == 0 for result in results.values())
    assert len({tuple(result["output_ids"]) for result in results.values()}) == len(results)
    return {number: facts(result) for number, result in results.items()}


@pytest.mark.parametrize("axis", AXES)
def test_ids_and_logprobs_are_the_oracles(oracle, axis):
    with sglang.Engine(**BASE, **axis) as engine:
        runs = {"alone, cold": alone(engine, SOME)}
        runs["together, warm"] = together(engine)
        runs["alone, warm"] = alone(engine, SOME)
        evict(engine)
        runs["together, after eviction"] = together(engine)
        assert engine.flush_cache(timeout_s=10.0)
        runs["together, cold"] = together(engine)
        stats = engine.get_server_info()["internal_states"][0]["stats"]
    for name, results in runs.items():
        for number, result in results.items():
            assert facts(result) == oracle[number], (name, number)
    # Otherwise the runs above prove nothing.
    assert any(result["meta_info"]["cached_tokens"] for result in runs["alone, warm"].values())
    if axis["max_total_tokens"] == TIGHT:
        assert stats["num_retracted_reqs"] > 0
    assert stats["books_balanced"]


RELEASE = {"dtype": "bfloat16", "kv_cache_dtype": "auto", "activation_quant": "auto"}
EXACT = {"dtype": "float32", "kv_cache_dtype": "float32", "activation_quant": "off"}


@pytest.mark.parametrize(("checkpoint", "numerics"), [("mini-s1", RELEASE), ("deep-s1", EXACT)], ids=["mini-release", "deep-exact"])
def test_every_architecture_and_precision(checkpoint, numerics):
    """One cold lonely run and one warm crowded one, on the checkpoints with all mechanisms."""
    base = {**BASE, **numerics, "model_path": str(GOLDEN / checkpoint / "checkpoint"), "max_total_tokens": ROOMY}
    with sglang.Engine(**base, chunked_prefill_size=-1, disable_overlap_schedule=True, disable_radix_cache=True) as engine:
        wanted = {number: facts(result) for number, result in alone(engine, SOME).items()}
    with sglang.Engine(**base, chunked_prefill_size=24) as engine:
        together(engine)
        results = together(engine)
    assert {number: facts(results[number]) for number in SOME} == wanted
