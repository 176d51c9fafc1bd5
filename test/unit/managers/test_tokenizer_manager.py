"""Promises of the tokenizer manager to its routes, over a scripted scheduler in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes.scripted_scheduler import ScriptedScheduler, forever_script, ids_script
from sglang.srt.errors import BadRequest, DeadlineExceeded, EngineFailed, Overloaded, ServiceError
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.model_info import ModelInfo
from sglang.srt.managers.scheduler_link import SchedulerLink
from sglang.srt.managers.sequence import SequenceOutput, SequenceRequest
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

TOY = Path(__file__).parents[2] / "golden/toy_tokenizer"
TOKENIZER = Tokenizer.load(TOY)


@asynccontextmanager
async def managed(
    script: Any = None, *, args: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[TokenizerManager, ScriptedScheduler]]:
    manager = TokenizerManager(ServerArgs(model_path=str(TOY), **(args or {})), TOKENIZER, ModelInfo(4096, 8192), SchedulerLink())
    manager.start()
    link = manager.link
    scheduler = ScriptedScheduler(link.to_scheduler, link.from_scheduler, TOKENIZER, script or forever_script(5), **options).start()
    try:
        await manager.wait_ready(10)
        yield manager, scheduler
    finally:
        scheduler.stop()
        await manager.close()


def request(rid: str = "r", *, ids: list[int] | None = None, stream: bool = True, **sampling: Any) -> SequenceRequest:
    sampling = {"max_new_tokens": 3, "ignore_eos": True, **sampling}
    return SequenceRequest(rid=rid, input_ids=ids or [5, 6], sampling=SamplingParams(**sampling), stream=stream)


async def outputs_of(manager: TokenizerManager, seq: SequenceRequest) -> list[SequenceOutput]:
    return [output async for output in manager.run(seq)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())


def test_outputs_join_to_the_ids_and_the_text():
    ids = TOKENIZER.encode("The answer is 4 😀.")

    async def test() -> None:
        async with managed(ids_script(ids)) as (manager, _):
            for stream in (True, False):
                outputs = await outputs_of(manager, request(stream=stream, max_new_tokens=100))
                assert [token for output in outputs for token in output.new_ids] == ids
                assert "".join(output.new_text for output in outputs) == "The answer is 4 😀."
                assert [output.finish is None for output in outputs] == [True] * (len(outputs) - 1) + [False]
                assert outputs[-1].timing["e2e_latency"] > 0
            assert len(outputs) == 1  # a whole reply is one output

    run(test)


def test_reading_to_the_end_sends_no_abort_and_leaving_early_sends_one():
    async def test() -> None:
        async with managed(delay_s=0.002) as (manager, scheduler):
            await outputs_of(manager, request())
            assert scheduler.aborts() == []
            async with aclosing(manager.run(request("left", max_new_tokens=5000))) as outputs:
                await anext(outputs)
            await until(lambda: manager.num_sequences == 0)
            task = asyncio.create_task(outputs_of(manager, request("cancelled", max_new_tokens=5000)))
            await until(lambda: scheduler.num_running == 1)
            task.cancel()
            await until(lambda: manager.num_sequences == 0)
            assert [abort.rid for abort in scheduler.aborts()] == ["left", "cancelled"]

    run(test)


def test_leaving_after_the_end_was_received_sends_no_abort():
    async def test() -> None:
        async with managed() as (manager, scheduler):
            async with aclosing(manager.run(request())) as outputs:
                await anext(outputs)
                await until(lambda: manager.num_sequences == 0)
            await outputs_of(manager, request("next"))
            assert scheduler.aborts() == []

    run(test)


def test_running_rid_is_refused_but_an_abandoned_one_is_free_in_a_moment():
    async def test() -> None:
        async with managed(delay_s=0.002) as (manager, _):
            async with aclosing(manager.run(request("same", max_new_tokens=5000))) as outputs:
                await anext(outputs)
                with pytest.raises(BadRequest, match="same"):
                    await outputs_of(manager, request("same"))
            again = await outputs_of(manager, request("same"))
            assert [token for output in again for token in output.new_ids] == [5] * 3

    run(test)


def test_seed_given_is_used_and_seed_drawn_is_told():
    async def test() -> None:
        async with managed(args={"random_seed": 1}) as (manager, scheduler):
            given = await outputs_of(manager, request("given", sampling_seed=-(2**63)))
            drawn = await outputs_of(manager, request("drawn"))
            assert given[-1].seed == -(2**63)
            assert [sent.sampling.sampling_seed for sent in scheduler.generate_requests()] == [given[-1].seed, drawn[-1].seed]

    run(test)


@pytest.mark.parametrize(
    ("finish", "raises"),
    [
        (FinishReason(type="abort", message="full", status_code=503), Overloaded),
        (FinishReason(type="abort", message="late", status_code=504), DeadlineExceeded),
        (FinishReason(type="abort", message="odd", status_code=400), BadRequest),
        (FinishReason(type="abort", message="broken", status_code=500), EngineFailed),
    ],
)
def test_abort_with_a_status_is_an_error_and_without_one_an_answer(finish, raises):
    async def test() -> None:
        async with managed() as (manager, scheduler):
            scheduler.refuse_with = finish
            with pytest.raises(raises, match=finish.message):
                await outputs_of(manager, request())
            scheduler.refuse_with = FinishReason(type="abort", message="stopped")
            (answer,) = await outputs_of(manager, request())
            assert answer.finish.type == "abort"
            assert scheduler.aborts() == []

    run(test)


def test_failure_reaches_everyone_who_waits_and_everyone_who_comes():
    async def test() -> None:
        async with managed(delay_s=0.01) as (manager, scheduler):
            running = [asyncio.create_task(outputs_of(manager, request(str(n), max_new_tokens=5000, stream=n % 2 == 0))) for n in range(4)]
            await until(lambda: scheduler.num_running == 4)
            scheduler.hold = True
            flush = asyncio.create_task(manager.flush_cache(5))
            scheduler.stop()
            manager.fail("gone")
            results = await asyncio.gather(*running, flush, return_exceptions=True)
            assert all(isinstance(result, ServiceError) for result in results)
            with pytest.raises(Overloaded):
                await outputs_of(manager, request("new"))
            assert not manager.is_alive and manager.num_sequences == 0

    run(test)


def test_more_sequences_than_places_are_refused_at_once():
    async def test() -> None:
        async with managed(args={"max_running_requests": 1, "max_queued_requests": 1}, delay_s=0.01) as (manager, _):
            running = [asyncio.create_task(outputs_of(manager, request(str(n), max_new_tokens=5000))) for n in range(2)]
            await until(lambda: manager.num_sequences == 2)
            with pytest.raises(Overloaded, match="2 requests"):
                await outputs_of(manager, request("third"))
            manager.abort(abort_all=True)
            ended = await asyncio.gather(*running)
            assert [outputs[-1].finish.type for outputs in ended] == ["abort"] * 2

    run(test)


def test_drain_refuses_new_sequences_and_waits_for_running_ones():
    async def test() -> None:
        async with managed(delay_s=0.002) as (manager, _):
            running = asyncio.create_task(outputs_of(manager, request(max_new_tokens=50)))
            await until(lambda: manager.num_sequences == 1)
            manager.begin_drain()
            with pytest.raises(Overloaded, match="shutting down"):
                await outputs_of(manager, request("new"))
            assert await manager.wait_idle(5)
            assert (await running)[-1].completion_tokens == 50

    run(test)


@pytest.mark.parametrize("value", [10**30, "\ud800", object()])
def test_value_that_cannot_travel_is_refused_and_leaves_nothing_behind(value):
    async def test() -> None:
        async with managed() as (manager, scheduler):
            with pytest.raises(BadRequest, match="cannot be passed on"):
                await outputs_of(manager, request(custom_params={"x": value}))
            assert manager.num_sequences == 0 and scheduler.generate_requests() == []

    run(test)


def test_garbage_from_the_scheduler_is_a_failure_and_not_a_hang():
    async def test() -> None:
        async with managed(delay_s=0.01) as (manager, scheduler):
            running = asyncio.create_task(outputs_of(manager, request(max_new_tokens=5000)))
            await until(lambda: scheduler.num_running == 1)
            scheduler._push.send(b"not a message")
            with pytest.raises(EngineFailed):
                await running
            assert "not a message" in manager.failure

    run(test)


def test_sockets_lie_in_a_private_directory_that_is_removed():
    async def test() -> None:
        async with managed() as (manager, _):
            directory = Path(manager.link.to_scheduler.removeprefix("ipc://")).parent
            assert directory.stat().st_mode & 0o777 == 0o700
        assert not directory.exists()

    run(test)
