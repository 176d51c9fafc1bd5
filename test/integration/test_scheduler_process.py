"""The scheduler process by itself: a real model, real sockets, no HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import zmq

from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchOutput,
    FlushCacheReply,
    FlushCacheReq,
    GenerateReq,
    GetStateReply,
    GetStateReq,
    RequestOutput,
    SchedulerFailed,
    SchedulerReady,
    ShutdownReq,
)
from sglang.srt.sampling.sampling_params import SamplingParams

CHECKPOINT = Path(__file__).parents[1] / "golden" / "mini-s1" / "checkpoint"
FLAGS = {"model_path": str(CHECKPOINT), "dtype": "float32", "max_total_tokens": 1024, "page_size": 16, "max_running_requests": 4}
TIMEOUT_MS = 60_000


class Process:
    """A scheduler process and the HTTP side's ends of its sockets."""

    def __init__(self, directory: Path, **flags):
        self.context = zmq.Context()
        addresses = [f"ipc://{directory}/{name}" for name in ("in", "out")]
        self.push, self.pull = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.push.bind(addresses[0])
        self.pull.bind(addresses[1])
        self.child = subprocess.Popen(
            [sys.executable, "-m", "sglang.srt.entrypoints.scheduler_child"], stdin=subprocess.PIPE, env=environment()
        )
        order = {"args": FLAGS | flags, "in_addr": addresses[0], "out_addr": addresses[1], "parent_pid": os.getpid()}
        with self.child.stdin as stdin:
            stdin.write(json.dumps(order).encode())

    def send(self, message) -> None:
        self.push.send(io_struct.encode(message))

    def receive(self, kind: type):
        """The next message of this kind; others are dropped."""
        while True:
            assert self.pull.poll(TIMEOUT_MS), f"no {kind.__name__}"
            message = io_struct.decode_from_scheduler(self.pull.recv())
            if isinstance(message, kind):
                return message

    def generate(self, prompt: list[int], count: int, rid: str = "r", **fields) -> list[RequestOutput]:
        self.send(request(prompt, count, rid, **fields))
        outputs: list[RequestOutput] = []
        while not outputs or outputs[-1].finish is None:
            outputs += [output for output in self.receive(BatchOutput).outputs if output.rid == rid]
        return outputs

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        self.context.destroy(linger=0)


def environment() -> dict[str, str]:
    source = Path(__file__).parents[2] / "python"
    return os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}


def request(prompt: list[int], count: int, rid: str, **fields) -> GenerateReq:
    return GenerateReq(
        rid=rid,
        input_ids=prompt,
        stream=True,
        sampling=SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True, sampling_seed=0),
        **fields,
    )


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    running = Process(tmp_path_factory.mktemp("sockets"))
    running.ready = running.receive(SchedulerReady)
    yield running
    running.send(ShutdownReq())
    assert running.child.wait(timeout=20) == 0
    running.close()


def test_it_says_what_it_can_hold(process):
    ready = process.ready
    assert (ready.max_total_num_tokens, ready.max_running_requests, ready.max_request_tokens) == (1024, 4, 1008)
    assert ready.state["memory"]


def test_warm_tokens_are_the_cold_ones(process):
    prompt = list(range(10, 70))
    runs = [process.generate(prompt, 12) for _ in range(2)]
    ids = [[i for output in run for i in output.new_ids] for run in runs]
    assert ids[0] == ids[1] and len(ids[0]) == 12
    assert [run[-1].cached_tokens for run in runs] == [0, 59]
    process.send(FlushCacheReq(call_id="f"))
    assert process.receive(FlushCacheReply).success
    assert process.generate(prompt, 12)[-1].cached_tokens == 0


def test_state_is_plain_data_without_secrets(process):
    process.send(GetStateReq(call_id="s"))
    reply = process.receive(GetStateReply)
    assert reply.call_id == "s"
    assert reply.state["server_args"]["page_size"] == 16
    assert json.dumps(reply.state)


def test_an_abort_ends_a_stream_early(process):
    process.send(request(list(range(5)), 900, "long"))
    process.receive(BatchOutput)
    process.send(AbortReq(rid="long"))
    outputs = []
    while not outputs or outputs[-1].finish is None:
        outputs += process.receive(BatchOutput).outputs
    assert outputs[-1].finish.type == "abort"
    assert outputs[-1].completion_tokens < 900


def test_it_sleeps_when_idle(process):
    process.generate([1, 2, 3], 2)
    meter = psutil.Process(process.child.pid)
    before = sum(meter.cpu_times()[:2])
    time.sleep(2.0)
    assert sum(meter.cpu_times()[:2]) - before < 0.1  # seconds of CPU in two seconds


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model_path": "/nowhere"}, "/nowhere"),
        ({"max_total_tokens": 16}, "--max-total-tokens"),
        ({"prefill_keep_tokens": 3}, "--prefill-keep-tokens 3 is too small"),
    ],
    ids=["no-checkpoint", "pool-too-small", "keep-too-small"],
)
def test_wrong_flags_are_told_in_one_line_and_exit_2(tmp_path, flags, words):
    failed = Process(tmp_path, **flags)
    message = failed.receive(SchedulerFailed)
    assert message.is_config_error and words in message.message and "\n" not in message.message
    assert failed.child.wait(timeout=20) == 2
    failed.close()


def test_it_ends_soon_after_its_parent(tmp_path):
    """The parent here is a process that starts a scheduler and is then killed."""
    code = (
        "import json, os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'sglang.srt.entrypoints.scheduler_child'], stdin=subprocess.PIPE)\n"
        "order = {**json.loads(sys.argv[1]), 'parent_pid': os.getpid()}\n"
        "child.stdin.write(json.dumps(order).encode()); child.stdin.close()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    pull.bind(f"ipc://{tmp_path}/out")
    order = json.dumps({"args": FLAGS, "in_addr": f"ipc://{tmp_path}/in", "out_addr": f"ipc://{tmp_path}/out"})
    parent = subprocess.Popen([sys.executable, "-c", code, order], stdout=subprocess.PIPE, env=environment())
    with parent.stdout as stdout:
        scheduler = psutil.Process(int(stdout.readline()))
    try:
        assert pull.poll(TIMEOUT_MS)
        assert isinstance(io_struct.decode_from_scheduler(pull.recv()), SchedulerReady)
        parent.kill()
        parent.wait()
        psutil.wait_procs([scheduler], timeout=5)
        assert not scheduler.is_running() or scheduler.status() == psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        context.destroy(linger=0)


def test_a_process_whose_parent_ended_before_it_could_look_ends_too(tmp_path):
    """The launcher can die while this process is still importing; it is then left to init, and nobody would ever end it."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    order = {
        "args": FLAGS,
        "in_addr": f"ipc://{tmp_path}/in",
        "out_addr": f"ipc://{tmp_path}/out",
        "parent_pid": gone.pid,
    }
    child = subprocess.run(
        [sys.executable, "-m", "sglang.srt.entrypoints.scheduler_child"],
        input=json.dumps(order).encode(),
        env=environment(),
        timeout=60,
        check=False,
    )
    assert child.returncode == 1
