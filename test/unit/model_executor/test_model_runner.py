"""Steps on a golden checkpoint: pool operations in order, future tokens, prompt logprobs, a NaN that stays alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from harness.direct import GOLDEN
from sglang.srt.errors import ConfigError
from sglang.srt.model_executor.forward_batch import FUTURE_TOKEN, NO_TOKEN, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.step import PoolOp, PromptLogprobSpec, StepInput, StepRequest
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.sampling_state import SamplingState
from sglang.srt.server_args import ServerArgs

ARGS = ServerArgs(
    model_path=str(GOLDEN / "nano-s1" / "checkpoint"),
    max_total_tokens=512,
    max_running_requests=4,
    max_snapshots=4,
    page_size=16,
    device="cpu",
)
PROMPT = [5, 9, 200, 31, 7, 7, 64, 300]


@pytest.fixture(scope="module")
def runner():
    return ModelRunner(ARGS)


def state(**params: object) -> SamplingState:
    return SamplingState(SamplingParams(temperature=0.0, **params), PROMPT, frozenset({1}), 512)


def one(
    runner: ModelRunner,
    ids: list[int],
    prefix: int,
    slot: int,
    page: int,
    known: list[int],
    *,
    sampling=None,
    spec=None,
    before=(),
    rows=None,
):
    """Run one request for one step."""
    history = [known[prefix - 1 - k] if prefix - 1 - k >= 0 else NO_TOKEN for k in range(runner.config.engram_max_ngram_size - 1)]
    batch = ForwardBatch.build(
        tokens=[ids], prefix_lens=[prefix], pages=[[page]], state_slots=[slot], history=[history], output_rows=rows, device="cpu"
    )
    return runner.run(StepInput(batch, [StepRequest(sampling, prefix + len(ids), spec)], list(before)))


def greedy(runner: ModelRunner, slot: int, page: int, count: int) -> list[int]:
    known = list(PROMPT)
    sampling = state()
    out = one(runner, PROMPT, 0, slot, page, known, sampling=sampling)
    while True:
        known.append(out.sampled[0].id)
        if len(known) == len(PROMPT) + count:
            return known[len(PROMPT) :]
        out = one(runner, known[-1:], len(known) - 1, slot, page, known, sampling=sampling)


def test_future_token_is_the_one_sampled_before(runner):
    expected = greedy(runner, 0, 0, 5)
    known, sampling = list(PROMPT), state()
    got = [one(runner, PROMPT, 0, 1, 1, known, sampling=sampling).sampled[0].id]
    for _ in range(4):
        known.append(got[-1])  # the scheduler learns it one step late; here only the history needs it
        got.append(one(runner, [FUTURE_TOKEN], len(known) - 1, 1, 1, known, sampling=sampling).sampled[0].id)
    assert got == expected


def test_copies_happen_before_the_forward_and_in_order(runner):
    expected = greedy(runner, 0, 0, 3)
    known = PROMPT + expected
    ops = [PoolOp("reset_slot", 3, 3), PoolOp("copy_slot", 0, 3), PoolOp("copy_page", 0, 5)]
    out = one(runner, [known[-2]], len(known) - 2, 3, 5, known, sampling=state(), before=ops)
    assert out.sampled[0].id == expected[-1]


def test_prompt_logprobs_are_of_the_following_ids(runner):
    rows = list(range(len(PROMPT)))
    spec = PromptLogprobSpec(first_row=0, targets=PROMPT[1:], top=2, token_ids=[4])
    out = one(runner, PROMPT, 0, 0, 0, PROMPT, sampling=state(), spec=spec, rows=rows)
    logprobs = out.prompt_logprobs[0]
    assert logprobs.ids == PROMPT[1:]
    assert len(logprobs.logprobs) == len(logprobs.top) == len(logprobs.token_ids) == len(PROMPT) - 1
    assert all(value <= top[0][0] for value, top in zip(logprobs.logprobs, logprobs.top))
    assert out.sampled[0].id == greedy(runner, 1, 1, 1)[0]


def test_a_nan_row_fails_alone(runner, monkeypatch):
    original = runner.model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = original(hidden)
        logits[0, 3] = torch.nan
        return logits

    monkeypatch.setattr(runner.model, "logits", poisoned)
    depth = runner.config.engram_max_ngram_size - 1
    batch = ForwardBatch.build(
        tokens=[PROMPT, PROMPT], prefix_lens=[0, 0], pages=[[0], [1]], state_slots=[0, 1], history=[[NO_TOKEN] * depth] * 2, device="cpu"
    )
    out = runner.run(StepInput(batch, [StepRequest(state(), len(PROMPT)) for _ in range(2)]))
    assert "NaN" in out.sampled[0].error
    assert out.sampled[1].error is None


def test_a_step_without_outputs_only_computes(runner):
    out = one(runner, PROMPT, 0, 0, 0, PROMPT, rows=[])
    assert out.sampled == [None]
    assert out.prompt_logprobs == [None]


def test_memory_table_counts_what_is_allocated(runner):
    rows = {row["pool"]: row for row in runner.memory_table()}
    assert rows["global KV"]["units"] == 512 // 16
    assert rows["request state"]["units"] == 8
    assert all(row["bytes"] == row["units"] * row["bytes_per_unit"] for row in rows.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_total_tokens": 20}, "holds 1 pages"),
        ({"max_running_requests": 10**9}, "pools do not fit"),
        ({"device": "cuda:7"}, "no CUDA device"),
        ({"kernel_backend": "fast"}, "expected one of auto"),
        ({"model_path": "missing"}, "not found"),
    ],
)
def test_what_cannot_work_is_refused_with_the_numbers(change, words):
    if change.get("device") and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match=words):
        ModelRunner(dataclasses.replace(ARGS, **change))
