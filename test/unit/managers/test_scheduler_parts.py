"""The parts of the scheduler that can be seen alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from sglang.srt.errors import BadRequest, Overloaded
from sglang.srt.managers.io_struct import FinishReason, GenerateReq, RequestTimes
from sglang.srt.managers.request import Req
from sglang.srt.managers.schedule_policy import PrefillBudget, order_waiting
from sglang.srt.managers.scheduler_components.model_thread import ForwardTimeout, ModelThread
from sglang.srt.managers.scheduler_components.request_builder import Limits, RequestBuilder
from sglang.srt.managers.scheduler_components.snapshot_planner import SnapshotPlanner
from sglang.srt.managers.scheduler_components.stats import StatsKeeper
from sglang.srt.managers.scheduler_components.step_plan import Step, prompt_logprob_spec
from sglang.srt.managers.scheduler_components.waiting_queue import WaitingQueue
from sglang.srt.managers.stop_checker import StopChecker
from sglang.srt.model_executor.forward_batch import FUTURE_TOKEN, NO_TOKEN
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


def make_req(prompt: list[int], arrival: int = 0, max_new_tokens: int = 8, **fields) -> Req:
    restore = fields.pop("restore", "exact")
    msg = GenerateReq(rid=f"r{arrival}", input_ids=prompt, sampling=SamplingParams(max_new_tokens=max_new_tokens), **fields)
    stop = StopChecker(msg.sampling, frozenset())
    return Req(msg=msg, arrival=arrival, max_new_tokens=max_new_tokens, sampling=object(), stop=stop, restore=restore, times=RequestTimes())


# -- policy ------------------------------------------------------------------------------------------------------------


def test_orders():
    requests = [make_req([1], 0), make_req([1], 1, priority=5), make_req([1], 2), make_req([1], 3, priority=5)]
    matched = {0: 10, 1: 0, 2: 30, 3: 20}

    def order(policy: str) -> list[int]:
        return [req.arrival for req in order_waiting(reversed(requests), policy, lambda req: matched[req.arrival])]

    assert order("fcfs") == [0, 1, 2, 3]
    assert order("priority") == [1, 3, 0, 2]
    assert order("lpm") == [2, 3, 0, 1]
    requests[1].num_retractions = 1
    assert order("lpm") == [1, 2, 3, 0]


def test_budget_leaves_half_for_those_who_wait():
    budget = PrefillBudget(100, 40, others_wait=True)
    for expected in (40, 10, 0):
        rows = budget.grant(1000, is_continuing=True)
        assert rows == expected
        budget.spend(rows, is_continuing=True)
    assert budget.grant(1, is_continuing=True) == 1  # a decode is never refused
    assert budget.grant(1000, is_continuing=False) == 40
    budget.spend(40, is_continuing=False)
    assert budget.grant(1000, is_continuing=False) == 10
    budget.spend(10, is_continuing=False)
    assert budget.is_spent


def test_budget_is_all_for_running_prompts_when_nobody_waits():
    assert PrefillBudget(100, -1, others_wait=False).grant(1000, is_continuing=True) == 100


# -- snapshots ---------------------------------------------------------------------------------------------------------


def points(prompt_tokens: int, *, interval: int = 100, snapshots: int = 32, branch: int = 0, computed: int = 0, **fields) -> list[int]:
    req = make_req([1] * prompt_tokens, **fields)
    req.num_computed = computed
    return SnapshotPlanner(interval, snapshots, 8, 4).plan(req, branch)


def test_snapshot_points():
    assert points(50) == [50]
    assert points(250) == [100, 200, 250]
    assert points(1000) == [400, 800, 1000]  # two in the middle at most, on multiples of the interval
    assert points(1000, snapshots=64) == [200, 400, 600, 800, 1000]
    assert points(1000, snapshots=8) == [1000]
    assert points(1000, snapshots=0) == []
    assert points(250, interval=0) == [250]
    assert points(250, branch=43) == [40, 100, 200, 250]
    assert points(250, computed=150) == [200, 250]
    assert points(250, restore="bounded") == [250]


def test_chunks_end_at_snapshot_points():
    planner = SnapshotPlanner(100, 32, 8, 4)
    req = make_req([1] * 250)
    req.snapshot_points = [100, 200, 250]
    assert planner.chunk_end(req, 70) == 70
    assert planner.chunk_end(req, 170) == 100
    req.num_computed = 100
    assert planner.chunk_end(req, 250) == 200
    assert planner.is_due(req)
    assert not planner.is_due(req)
    req.num_computed = 251
    assert not planner.is_due(req)
    assert req.snapshot_points == []


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_step_feeds_the_token_in_flight_by_name():
    req = make_req([10, 11, 12])
    req.pages, req.slot = [5], 2
    first = Step()
    first.add_rows(req, 3)
    assert (req.num_known, req.num_to_compute) == (4, 1)
    second = Step()
    second.add_rows(req, 4)
    batch = second.build_input(3).batch
    assert batch.input_ids.tolist() == [FUTURE_TOKEN]
    assert batch.history.tolist() == [[12, 11, 10]]
    assert first.build_input(3).batch.history.tolist() == [[NO_TOKEN] * 3]
    assert [row.samples for row in (*first.rows, *second.rows)] == [True, True]


def test_no_row_is_planned_behind_the_last_token():
    req = make_req([10, 11, 12], max_new_tokens=1)
    Step().add_rows(req, 3)
    assert req.num_to_compute == 0


@pytest.mark.parametrize("start", [0, 1, 4, 9, 10])
@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_prompt_logprob_rows_cover_every_wanted_position_once(start, chunk):
    prompt = list(range(100, 110))
    req = make_req(prompt, return_logprob=True, logprob_start_len=start)
    req.input_logprobs = SimpleNamespace(ids=prompt[:1] if start == 0 else [])
    targets, rows = [], []
    for low in range(0, 10, chunk):
        spec = prompt_logprob_spec(req, low, min(10, low + chunk))
        if spec:
            targets += spec.targets
            rows += range(low + spec.first_row, low + spec.first_row + len(spec.targets))
    assert targets == prompt[max(start, 1) :]
    assert rows == list(range(max(start, 1) - 1, 9 if targets else max(start, 1) - 1))


# -- limits and refusals -----------------------------------------------------------------------------------------------


def build(args: ServerArgs, **fields) -> Req:
    limits = Limits(context_length=100, max_request_tokens=200, keep_tokens=20)
    builder = RequestBuilder(args, limits, lambda msg: None, lambda msg, room: StopChecker(msg.sampling, frozenset(), context_room=room))
    return builder.build(GenerateReq(rid="r", sampling=SamplingParams(), **({"input_ids": [1] * 30} | fields)), 0.0, 0.0)


def test_room_is_what_the_context_leaves():
    req = build(ServerArgs())
    assert req.max_new_tokens == 70


def test_per_request_modes():
    assert build(ServerArgs(), swa_restore="bounded").restore == "bounded"
    assert build(ServerArgs(swa_restore="bounded"), swa_restore="exact").restore == "exact"
    assert build(ServerArgs(), prefill_truncation="compact").decoder_start == 10
    with pytest.raises(BadRequest, match="must be exact or bounded, found 'sideways'"):
        build(ServerArgs(), swa_restore="sideways")
    for mode in ({"swa_restore": "bounded"}, {"prefill_truncation": "compact"}):
        with pytest.raises(BadRequest, match="--enable-deterministic-inference"):
            build(ServerArgs(enable_deterministic_inference=True), **mode)


def test_salts_of_approximate_modes_differ_from_exact_ones():
    salts = {
        build(ServerArgs(), **fields).salt
        for fields in ({}, {"swa_restore": "bounded"}, {"prefill_truncation": "compact"}, {"cache_salt": "a"}, {"cache_salt": "bounded:0:"})
    }
    assert len(salts) == 5
    short = build(ServerArgs(), prefill_truncation="compact", input_ids=[1] * 5)
    assert short.salt == build(ServerArgs()).salt  # nothing of a short prompt is truncated: it is exact


def test_the_queue_holds_its_limit_beyond_free_places():
    queue = WaitingQueue(2)
    for n in range(5):
        queue.refuse_if_full(0, free_places=3)
        queue.add(make_req([1], n))
    with pytest.raises(Overloaded, match="--max-queued-requests 2"):
        queue.refuse_if_full(0, free_places=3)
    with pytest.raises(Overloaded, match="6 requests are waiting"):
        queue.refuse_if_full(1, free_places=3)  # one more whose grammar is being compiled
    queue.add(make_req([1], 10))  # a retracted request always finds its place
    assert len(queue) == 6


# -- model thread ------------------------------------------------------------------------------------------------------


def test_steps_run_in_order_and_errors_come_back():
    def run(step):
        if step == "bad":
            raise ValueError("no")
        return step

    thread = ModelThread(run, 10.0)
    thread.submit("a")
    thread.submit("b")
    assert [thread.wait(), thread.wait()] == ["a", "b"]
    thread.submit("bad")
    with pytest.raises(ValueError, match="no"):
        thread.wait()
    assert thread.run("c") == "c"
    thread.close()


def test_a_forward_that_hangs_is_noticed():
    release = threading.Event()
    thread = ModelThread(lambda step: release.wait(10), 0.05)
    with pytest.raises(ForwardTimeout, match=r"--watchdog-timeout 0.05 s"):
        thread.run("x")
    release.set()


# -- statistics --------------------------------------------------------------------------------------------------------


def test_throughput_is_that_of_the_last_interval_and_zero_when_idle():
    now = [0.0]
    stats = StatsKeeper(keeper=None, log_interval=2, clock=lambda: now[0])
    assert not stats.count_step(4, 0.5)
    now[0] = 2.0
    assert stats.count_step(6, 0.5)
    assert (stats.gen_throughput, stats.forward_seconds, stats.num_steps) == (5.0, 1.0, 2)
    stats.on_idle()
    assert stats.gen_throughput == 0.0


def test_only_real_aborts_are_counted():
    stats = StatsKeeper(keeper=None, log_interval=2)
    stats.count_finish(FinishReason(type="length", length=1))
    stats.count_finish(FinishReason(type="abort", status_code=500))
    assert stats.num_aborted == 0
    stats.count_finish(FinishReason(type="abort"))
    stats.count_finish(FinishReason(type="abort", status_code=504))
    assert (stats.num_aborted, stats.num_finished) == (2, 4)
