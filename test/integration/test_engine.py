"""The offline engine over a scripted scheduler process: results, streams, threads, ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import sglang
from sglang.srt.errors import BadRequest, ConfigError, EngineFailed, Overloaded

TEST = Path(__file__).parents[1]
CHECKPOINT = str(TEST / "golden/mini-s1/checkpoint")
FOREVER = {"max_new_tokens": 2000, "ignore_eos": True}


def command(*options: str) -> list[str]:
    return [sys.executable, str(TEST / "fakes/scripted_scheduler.py"), "{in_addr}", "{out_addr}", CHECKPOINT, *options]


def make(*options: str, **args) -> sglang.Engine:
    return sglang.Engine(model_path=CHECKPOINT, scheduler_command=command(*options), **args)


@pytest.fixture(scope="module")
def engine() -> Iterator[sglang.Engine]:
    with make("--delay", "0.001", "--forever", "7") as engine:
        yield engine


def test_results_have_the_shape_of_the_native_route(engine):
    one = engine.generate("hello", {"max_new_tokens": 3})
    assert one["output_ids"] == [7, 7, 7]
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    many = engine.generate(["a", "b"], [{"max_new_tokens": 1}, {"max_new_tokens": 2}])
    assert [len(result["output_ids"]) for result in many] == [1, 2]
    by_ids = engine.generate(input_ids=[[5, 6], [7]], sampling_params={"max_new_tokens": 1}, return_logprob=True)
    assert [result["meta_info"]["prompt_tokens"] for result in by_ids] == [2, 1]
    assert by_ids[0]["meta_info"]["output_token_logprobs"] == [(-0.25, 7, None)]


def test_stream_is_cumulative_and_leaving_it_aborts(engine):
    pieces = list(engine.generate("hello", {"max_new_tokens": 5}, stream=True))
    assert pieces[-1]["output_ids"] == [7] * 5
    assert [len(piece["output_ids"]) for piece in pieces] == sorted(len(piece["output_ids"]) for piece in pieces)
    stream = engine.generate("hello", FOREVER, stream=True)
    next(stream)
    stream.close()
    deadline = time.monotonic() + 5
    while not engine.flush_cache():
        assert time.monotonic() < deadline, "the left stream still runs"


def test_asynchronous_use_from_two_event_loops(engine):
    async def use() -> None:
        one, two = await asyncio.gather(*(engine.async_generate("hello", {"max_new_tokens": n}) for n in (3, 4)))
        assert (len(one["output_ids"]), len(two["output_ids"])) == (3, 4)
        pieces = [piece async for piece in await engine.async_generate("hello", {"max_new_tokens": 4}, stream=True)]
        assert pieces[-1]["output_ids"] == [7] * 4
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.async_generate("hello", FOREVER), 0.05)

    asyncio.run(use())
    asyncio.run(use())


def test_several_threads_share_one_engine(engine):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: engine.generate("hello", {"max_new_tokens": n}), range(1, 25)))
    assert [len(result["output_ids"]) for result in results] == list(range(1, 25))


def test_mistakes_raise_and_the_engine_goes_on(engine):
    with pytest.raises(BadRequest):
        engine.generate("a", input_ids=[1])
    with pytest.raises(BadRequest, match="top_p"):
        engine.generate("a", {"top_p": 0})
    with pytest.raises(BadRequest, match="foo"):
        list(engine.generate("a", {"foo": 0}, stream=True))
    assert engine.generate("a", {"max_new_tokens": 1})["output_ids"] == [7]


def test_abort_by_rid(engine):
    results = []
    thread = threading.Thread(target=lambda: results.append(engine.generate("hello", FOREVER, rid="me")))
    thread.start()
    time.sleep(0.1)
    engine.abort_request("me")
    thread.join(5)
    assert results[0]["meta_info"]["finish_reason"]["type"] == "abort"


def test_server_info(engine):
    info = engine.get_server_info()
    assert info["model_path"] == CHECKPOINT and info["internal_states"][0]["scripted"] is True


def test_engine_that_cannot_start_raises_and_leaves_no_process():
    with pytest.raises(ConfigError, match="nowhere"):
        sglang.Engine(model_path="/nowhere")
    with pytest.raises(ConfigError, match="too small"):
        make("--startup-error", "the pool is too small")
    with pytest.raises(EngineFailed, match="not loaded"):
        make("--ready-after", "30", startup_timeout_s=0.3)


def test_death_of_the_scheduler_raises_at_once():
    with make("--delay", "0.01", "--forever", "7") as engine:
        errors = []

        def run() -> None:
            try:
                engine.generate("hello", FOREVER)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.2)
        os.kill(engine._core.scheduler_pid, signal.SIGKILL)
        thread.join(5)
        assert isinstance(errors[0], EngineFailed)
        with pytest.raises(Overloaded):
            engine.generate("hello")


def test_shutdown_twice_and_use_afterwards():
    engine = make()
    pid = engine._core.scheduler_pid
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("hello")


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_script_needs_no_main_guard_and_no_shutdown(how, tmp_path):
    script = f"import sglang\nengine = sglang.Engine(model_path={CHECKPOINT!r}, scheduler_command={command()!r})\n"
    script += "print(engine.generate('hi', {'max_new_tokens': 2})['meta_info']['completion_tokens'])\n"
    file = tmp_path / "script.py"
    file.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(TEST.parent / "python")}
    argv = [sys.executable, str(file)] if how == "file" else [sys.executable, "-"]
    result = subprocess.run(argv, input=script, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (result.stdout, result.stderr) == ("2\n", "")
