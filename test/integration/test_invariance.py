"""Same tokens, same logprobs, bit for bit, whatever the scheduler does with a request.

The oracle is one request alone in a cold server with whole prompts and the plain loop. Every other way of serving it must
give equal ids and equal logprobs. To extend the suite by an axis, add a field to `Way` and a value to `WAYS`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from harness.scheduler_bench import Bench
from sglang.srt.managers.request import ReqState
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

CHECKPOINT = Path(__file__).parents[1] / "golden" / "nano-s1" / "checkpoint"
NUM_PAGES, PAGE = 96, 16
COUNT = 8  # tokens per request


@dataclass(frozen=True)
class Way:
    """One way to serve the requests."""

    overlap: bool
    together: bool
    retracted: bool
    cache: str  # cold, warm (the prompts were served before), evicted (and then other prompts took their pages)
    chunk: int

    def __str__(self) -> str:
        return "-".join(
            [
                f"chunk{self.chunk}",
                self.cache,
                "overlap" if self.overlap else "plain",
                "eight" if self.together else "alone",
                "retracted" if self.retracted else "kept",
            ]
        )


WAYS = [
    pytest.param(way, id=str(way), marks=() if number % 4 == 0 else pytest.mark.slow)  # a quarter has every pair of values
    for number, way in enumerate(
        Way(*values)
        for values in itertools.product((True, False), (True, False), (True, False), ("cold", "warm", "evicted"), (16, 64, 128, 1000, -1))
    )
]


def prompts() -> list[list[int]]:
    """Eight of 5 to 96 ids, six with a common head of 40."""
    generator = torch.Generator().manual_seed(7)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 200, (count,), generator=generator).tolist()

    head = ids(40)
    return [ids(5), ids(96), *([*head, *ids(n)] for n in (1, 9, 17, 30, 45, 56))]


PROMPTS = prompts()
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    args = ServerArgs(
        model_path=str(CHECKPOINT), max_total_tokens=NUM_PAGES * PAGE, page_size=PAGE, max_running_requests=8, max_snapshots=24
    )
    return ModelRunner(args)


def serve(runner: ModelRunner, way: Way, numbers: list[int]) -> list[tuple]:
    """The outcomes of the numbered prompts, served one after another or together."""
    bench = Bench(runner, overlap=way.overlap, chunked_prefill_size=way.chunk, snapshot_interval=32)
    try:
        if way.cache != "cold":
            submit_all(bench, numbers)
            bench.run()
        if way.cache == "evicted":
            for first in range(8):  # together they need the whole pool
                bench.submit([first + 3] * 190, 1)
            bench.run()
        rids = []
        for group in [numbers] if way.together else [[number] for number in numbers]:
            rids += submit_all(bench, group)
            if way.retracted:
                retract_all(bench, after_turns=3)
                retract_all(bench, after_turns=4)
            bench.run()
        stats = bench.scheduler.current_stats()
        assert (stats.num_retracted_reqs > 0) == way.retracted
        assert stats.books_balanced
        bench.check_books()
        return [outcome(bench, rid) for rid in rids]
    finally:
        bench.close()


def submit_all(bench: Bench, numbers: list[int]) -> list[str]:
    rids = []
    for number in numbers:
        params = {"max_new_tokens": COUNT, "sampling_seed": number, "ignore_eos": True, **SAMPLINGS[number % 2]}
        start = len(PROMPTS[number]) - 4
        rids.append(bench.submit(PROMPTS[number], params=params, return_logprob=True, top_logprobs_num=2, logprob_start_len=start))
    return rids


def retract_all(bench: Bench, after_turns: int) -> None:
    """Take all memory away in the middle of the work, and from the tree too: nothing is left to resume from."""
    for _ in range(after_turns):
        bench.turn()
    for req in list(bench.scheduler.resident):
        if req.state is ReqState.RUNNING:
            bench.scheduler.retract(req)
    bench.scheduler.keeper.tree.evict_pages(NUM_PAGES)


def outcome(bench: Bench, rid: str) -> tuple:
    """(ids, output logprobs, best ids, prompt logprobs)."""
    result = bench.results[rid]
    assert result.finish.type == "length"
    parts = [output.output_logprobs for output in result.outputs]
    return (
        result.ids,
        [value for part in parts for value in part.logprobs],
        [value for part in parts for value in part.top],
        result.input_logprobs.logprobs,
    )


@pytest.fixture(scope="module")
def oracle(runner) -> list[tuple]:
    way = Way(overlap=False, together=False, retracted=False, cache="cold", chunk=-1)
    return [serve(runner, way, [number])[0] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("way", WAYS)
def test_the_way_a_request_is_served_does_not_change_a_bit(runner, oracle, way):
    numbers = list(range(len(PROMPTS))) if way.together else [1, 6]
    assert serve(runner, way, numbers) == [oracle[number] for number in numbers]


def test_the_oracle_is_worth_comparing_with(oracle):
    """Different prompts give different tokens, and not the same token over and over."""
    assert len({tuple(ids) for ids, *_ in oracle}) == len(PROMPTS)
    assert max(len(set(ids)) for ids, *_ in oracle) > COUNT // 2
