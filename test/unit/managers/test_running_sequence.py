"""The mailbox between the receive loop and a route."""

from __future__ import annotations

import asyncio

import pytest

from sglang.srt.errors import EngineFailed
from sglang.srt.managers.io_struct import FinishReason, RequestOutput, RequestTimes, TokenLogprobs
from sglang.srt.managers.running_sequence import RunningSequence, merge_outputs
from sglang.srt.observability.metrics import FrontMetrics

END = FinishReason(type="length", length=1)


def output(*ids: int, finish: FinishReason | None = None, **fields) -> RequestOutput:
    return RequestOutput(rid="r", new_ids=list(ids), finish=finish, **fields)


def sample(metrics: FrontMetrics, name: str) -> float:
    return sum(s.value for family in metrics.registry.collect() for s in family.samples if s.name == name)


def test_stream_gets_every_output_and_a_whole_reply_is_woken_once():
    async def run() -> None:
        stream = RunningSequence("r", stream=True, metrics=None)
        stream.put(output(1))
        stream.put(output(2, finish=END))
        assert [(await stream.next()).new_ids for _ in range(2)] == [[1], [2]]

        whole = RunningSequence("r", stream=False, metrics=None)
        whole.put(output(1))
        waiting = asyncio.ensure_future(whole.next())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        whole.put(output(2, finish=END))
        assert (await waiting).new_ids == [1, 2]

    asyncio.run(run())


def test_slow_reader_gets_the_backlog_in_one_piece():
    async def run() -> None:
        stream = RunningSequence("r", stream=True, metrics=None)
        for token in range(50):
            stream.put(output(token))
        assert (await stream.next()).new_ids == list(range(50))

    asyncio.run(run())


def test_outputs_before_a_failure_are_delivered_first():
    async def run() -> None:
        stream = RunningSequence("r", stream=True, metrics=None)
        stream.put(output(1))
        stream.fail(EngineFailed("gone"))
        assert (await stream.next()).new_ids == [1]
        with pytest.raises(EngineFailed, match="gone"):
            await stream.next()

    asyncio.run(run())


def test_merged_logprobs_stay_in_step_with_the_ids():
    def logprobs(*ids: int) -> TokenLogprobs:
        return TokenLogprobs(ids=list(ids), logprobs=[-1.0] * len(ids), top=[[(-1.0, i)] for i in ids])

    prompt = logprobs(7, 8)
    merged = merge_outputs(
        [output(1, input_logprobs=prompt, output_logprobs=logprobs(1)), output(2, 3, output_logprobs=logprobs(2, 3), finish=END)]
    )
    assert merged.new_ids == merged.output_logprobs.ids == [1, 2, 3]
    assert merged.output_logprobs.top == [[(-1.0, 1)], [(-1.0, 2)], [(-1.0, 3)]]
    assert merged.input_logprobs == prompt
    assert merged.finish == END


@pytest.mark.parametrize("pieces", [[1] * 20, [20], [5, 5, 10]])
def test_number_of_gaps_is_tokens_less_one_however_they_arrive(pieces):
    metrics = FrontMetrics("m")
    sequence = RunningSequence("r", stream=True, metrics=metrics)
    for index, count in enumerate(pieces):
        is_last = index == len(pieces) - 1
        sequence.put(output(*range(count), finish=END if is_last else None, prompt_tokens=4, cached_tokens=1))
    assert sample(metrics, "sglang:inter_token_latency_seconds_count") == 19
    assert sample(metrics, "sglang:time_to_first_token_seconds_count") == 1
    assert sample(metrics, "sglang:generation_tokens_total") == 20
    assert sample(metrics, "sglang:num_requests_total") == 1
    assert sample(metrics, "sglang:prompt_tokens_total") == 4


def test_first_token_of_a_bundle_has_the_time_the_scheduler_reports():
    metrics = FrontMetrics("m")
    sequence = RunningSequence("r", stream=False, metrics=metrics)
    clock = sequence.clock
    clock.arrived -= 10.0
    clock.arrived_at -= 10.0
    times = RequestTimes(arrived=clock.arrived_at, prefill_finished=clock.arrived_at + 2.0)
    sequence.put(output(1, 2, 3, 4, 5, finish=END, times=times))
    assert clock.first_token - clock.arrived == pytest.approx(2.0)
    assert sample(metrics, "sglang:time_to_first_token_seconds_sum") == pytest.approx(2.0)
    assert sample(metrics, "sglang:inter_token_latency_seconds_count") == 4
