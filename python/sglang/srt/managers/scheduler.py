"""The scheduler: decides what every step computes, and what its results mean.

There is no prefill phase and no decode phase. Each request has tokens *known* (prompt, then sampled) and tokens *computed*;
every step lets the second catch up with the first, by a chunk where they are far apart, by one row where a token was just
sampled. A prefix hit starts with some tokens computed, a retracted request starts over with its output among the known
ones, and both are the same case as a new prompt.

Two loops drive the same five methods. The plain one (`--disable-overlap-schedule`) does one after the other:

    receive → schedule (admits from the queue) → run → process

The overlapped one keeps one step in flight: while it runs, the step before it is processed and the next one is prepared.
Tokens of the step in flight are not known yet, so the next step feeds them by name (FUTURE_TOKEN); a request that turns out
to have ended gets one superfluous row, whose token is dropped. Memory that a step in flight may touch is not reused: a
finished or retracted request keeps its pages and slot until no step in flight has rows of it (`Req.num_in_flight`), and
pages replaced while running are freed by the step that may still read them (`Step.free_pages`).

A request with a grammar waits beside the queue until the grammar is compiled (`GrammarQueue`). Which tokens its next step may
sample depends on the token before, so a step in flight that samples for such a request is processed before the next one is
planned: while grammars run, the overlapped loop goes like the plain one, and every request keeps its pace.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable
from typing import Protocol

import msgspec

from sglang.srt.errors import BadRequest, EngineFailed, Overloaded, ServiceError
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchOutput,
    FinishReason,
    FlushCacheReply,
    FlushCacheReq,
    GenerateReq,
    GetStateReply,
    GetStateReq,
    Message,
    RequestOutput,
    SchedulerStats,
    ShutdownReq,
)
from sglang.srt.managers.request import Req, ReqState
from sglang.srt.managers.schedule_policy import PrefillBudget, order_waiting, rank
from sglang.srt.managers.scheduler_components.grammar_queue import POLL_S, GrammarQueue
from sglang.srt.managers.scheduler_components.model_thread import ModelThread
from sglang.srt.managers.scheduler_components.output_sender import OutputSender
from sglang.srt.managers.scheduler_components.page_keeper import PageKeeper
from sglang.srt.managers.scheduler_components.request_builder import RequestBuilder
from sglang.srt.managers.scheduler_components.result_processor import collect_prompt_logprobs, commit
from sglang.srt.managers.scheduler_components.snapshot_planner import SnapshotPlanner
from sglang.srt.managers.scheduler_components.stats import StatsKeeper
from sglang.srt.managers.scheduler_components.step_plan import Step
from sglang.srt.managers.scheduler_components.waiting_queue import WaitingQueue
from sglang.srt.model_executor.step import SampledToken, StepOutput
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

IDLE_POLL_S = 60.0


class MessageSource(Protocol):
    def receive(self, timeout_s: float) -> list[Message]: ...


class Scheduler:
    """Owns the requests of one model runner. Single-threaded, except for the model thread behind `model`."""

    def __init__(
        self,
        args: ServerArgs,
        *,
        inbox: MessageSource,
        sender: OutputSender,
        model: ModelThread,
        builder: RequestBuilder,
        keeper: PageKeeper,
        snapshots: SnapshotPlanner,
        grammars: GrammarQueue,
        stats: StatsKeeper,
        num_history: int,
        describe: Callable[[], dict[str, object]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.args = args
        self.inbox = inbox
        self.sender = sender
        self.model = model
        self.builder = builder
        self.keeper = keeper
        self.snapshots = snapshots
        self.grammars = grammars
        self.stats = stats
        self.num_history = num_history
        self.describe = describe
        self.clock = clock
        self.policy = "priority" if args.enable_priority_scheduling else args.schedule_policy
        self.queue = WaitingQueue(args.max_queued_requests)
        self.resident: list[Req] = []  # requests that hold memory, by rank
        self.by_rid: dict[str, Req] = {}  # requests whose end the client has not heard of
        self.flushes: list[tuple[FlushCacheReq, float]] = []  # waiting for idleness, with their deadlines
        self.drain_deadline: float | None = None
        self.was_idle = True
        self.last_was_prefill = False

    # -- the two loops ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until a ShutdownReq has been carried out. An exception has ended all requests before it leaves here."""
        try:
            self.run_plain() if self.args.disable_overlap_schedule else self.run_overlapped()
        except Exception:
            self.fail_all("the model worker failed")
            raise
        self.model.close()
        self.grammars.close()

    def run_plain(self) -> None:
        """One step at a time; the oracle of the other loop."""
        while not self.is_done:
            self.receive()
            step = self.schedule()
            if step:
                self.process(step, self.model.run(step.build_input(self.num_history)), in_flight=None)

    def run_overlapped(self) -> None:
        """The same, with one step in flight while its predecessor is processed and its successor is prepared."""
        in_flight = None
        while in_flight or not self.is_done:
            self.receive()
            in_flight = self.overlap(in_flight)

    def overlap(self, in_flight: Step | None) -> Step | None:
        """Launch the next step behind the one in flight, then process that one. Returns the new step in flight."""
        if in_flight and in_flight.samples_in_grammar:
            self.process(in_flight, self.model.wait(), in_flight=None)
            in_flight = None
        step = self.schedule()
        if step:
            self.model.submit(step.build_input(self.num_history))
        if in_flight:
            self.process(in_flight, self.model.wait(), in_flight=step)
        return step

    @property
    def is_idle(self) -> bool:
        return not self.resident and not self.queue and not self.grammars

    @property
    def is_done(self) -> bool:
        return self.drain_deadline is not None and self.is_idle

    # -- receive ------------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Handle what has arrived; without work, sleep until something does. Then end what is overdue."""
        if self.is_idle:
            self.on_idle()
        self.was_idle = self.is_idle
        for message in self.inbox.receive(self.poll_s):
            self.handle(message)
        self.take_compiled()
        self.end_overdue()

    @property
    def poll_s(self) -> float:
        """How long to wait for a message: not at all while there is work."""
        if self.resident or self.queue or self.is_done:
            return 0.0
        return POLL_S if self.grammars else IDLE_POLL_S

    def handle(self, message: Message) -> None:
        match message:
            case GenerateReq():
                self.accept(message)
            case AbortReq():
                self.abort(message)
            case FlushCacheReq():
                self.flushes.append((message, self.clock() + message.timeout_s))
                self.answer_flushes()
            case GetStateReq():
                self.sender.send(GetStateReply(call_id=message.call_id, state=self.state()))
            case ShutdownReq():
                self.drain_deadline = self.clock() + message.drain_s

    def accept(self, msg: GenerateReq) -> None:
        """Enqueue a request, or answer at once why not."""
        try:
            if self.drain_deadline is not None:
                raise Overloaded("the server is shutting down")
            if msg.rid in self.by_rid:
                raise BadRequest(f"request id {msg.rid} is in use by a request that has not ended")
            req = self.builder.build(msg, self.clock(), time.time())
            self.queue.refuse_if_full(len(self.grammars), free_places=max(0, self.args.max_running_requests - len(self.resident)))
            if msg.constraint is None:
                self.queue.add(req)
            else:
                self.grammars.add(req, self.clock())
        except ServiceError as error:
            refused = RequestOutput(rid=msg.rid, finish=abort_reason(error), prompt_tokens=len(msg.input_ids))
            self.sender.send(BatchOutput(outputs=[refused], stats=self.current_stats()))
            return
        self.by_rid[msg.rid] = req

    def take_compiled(self) -> None:
        """Requests whose grammar is ready go to the queue; those whose grammar is wrong end, alone."""
        for req, error in self.grammars.take_finished(self.clock()):
            if error is not None:
                self.end_all([req], abort_reason(error))
            else:
                self.grammars.remove(req)
                self.queue.add(req)

    def abort(self, msg: AbortReq) -> None:
        """Stop one request or all. Unknown ids have ended already, and are not counted."""
        chosen = [req for rid, req in self.by_rid.items() if msg.abort_all or rid == msg.rid]
        self.end_all(chosen, FinishReason(type="abort", message=msg.reason))

    def end_overdue(self) -> None:
        """End requests whose time is up, flushes that waited too long, and everything at the end of a drain."""
        now = self.clock()
        for req in list(self.by_rid.values()):
            if (error := req.overdue(now)) is not None:
                self.end_all([req], abort_reason(error))
        if self.drain_deadline is not None and now >= self.drain_deadline:
            self.end_all(list(self.by_rid.values()), abort_reason(Overloaded("the server is shutting down")))
        self.answer_flushes()

    def answer_flushes(self) -> None:
        """Flush when nothing runs; refuse when the wait for that is over."""
        if self.flushes and self.is_idle:
            self.keeper.tree.flush()
        for msg, deadline in list(self.flushes):
            if self.is_idle:
                self.sender.send(FlushCacheReply(call_id=msg.call_id, success=True, message="cache flushed"))
            elif self.clock() >= deadline:
                busy = f"cache not flushed: {self.num_running} requests are running and {len(self.queue) + len(self.grammars)} are waiting"
                self.sender.send(FlushCacheReply(call_id=msg.call_id, success=False, message=busy))
            else:
                continue
            self.flushes.remove((msg, deadline))

    # -- schedule -----------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step: running requests in order of rank, then admissions, within the budget of prompt rows.

        Without mixed steps, prompt steps and decode steps take turns as long as there is work of both kinds.
        """
        if self.args.enable_mixed_chunk:
            step = self.plan_step(prompts=True, decodes=True)
        elif self.last_was_prefill:
            step = self.plan_step(prompts=False, decodes=True) or self.plan_step(prompts=True, decodes=False)
        else:
            step = self.plan_step(prompts=True, decodes=False) or self.plan_step(prompts=False, decodes=True)
        if step:
            self.last_was_prefill = step.num_prompt_rows > 0
        elif self.queue and not self.resident:
            self.refuse_stuck_request()
        return step

    def plan_step(self, *, prompts: bool, decodes: bool) -> Step | None:
        step = Step()
        budget = PrefillBudget(self.args.max_prefill_tokens, self.args.chunked_prefill_size, others_wait=bool(self.queue))
        for req in list(self.resident):
            if req.state is ReqState.RUNNING and (decodes if req.num_to_compute == 1 else prompts):
                self.add_rows(step, req, budget, is_continuing=True)
        if prompts:
            self.admit(step, budget)
        assert step.rows or not step.ops, "operations without a step to carry them"
        return step if step.rows else None

    def add_rows(self, step: Step, req: Req, budget: PrefillBudget, *, is_continuing: bool) -> None:
        """Let `req` catch up as far as budget, snapshot points and pages allow."""
        wanted = budget.grant(req.num_to_compute, is_continuing=is_continuing)
        if not wanted:
            return
        end = self.make_room(req, self.snapshots.chunk_end(req, req.num_computed + wanted))
        if end <= req.num_computed:
            return
        if self.snapshots.is_due(req) and (taken := self.keeper.take_snapshot(req)):
            step.snapshots.append(taken[0])
            step.ops += taken[1]
        budget.spend(end - req.num_computed, is_continuing=is_continuing)
        step.add_rows(req, end)
        if req.grammar is not None and req.num_pending:
            req.sampling.vocab_mask = req.grammar.mask()

    def make_room(self, req: Req, end: int) -> int:
        """Pages up to position `end`, or as far as they go. With none at all, retract from the lowest rank upwards.

        Requests are planned by descending rank, so a victim never has rows in the step being planned. Returns the position
        reached; no more than computed if `req` must wait for pages on their way, or was the victim itself.
        """
        while True:
            reached = self.keeper.grow(req, end)
            if reached > req.num_computed or any(other.state is not ReqState.RUNNING for other in self.resident):
                return reached
            victim = self.resident[-1]
            self.retract(victim)
            if victim is req:
                return 0

    def retract(self, req: Req) -> None:
        """Take the memory of a running request away; it continues later, with the same tokens."""
        self.stats.num_retracted += 1
        req.num_retractions += 1
        req.state = ReqState.RETRACTING
        self.settle(req)

    def admit(self, step: Step, budget: PrefillBudget) -> None:
        """Move waiting requests in, first by policy, until budget, slots or pages end. The order is strict: a request that
        does not fit holds back those behind it, so it cannot starve."""
        if not self.queue or any(req.state is ReqState.RETRACTING for req in self.resident):
            return
        if len(self.resident) >= self.args.max_running_requests or budget.is_spent:
            return
        for req in order_waiting(self.queue, self.policy, self.keeper.matched_tokens):
            if len(self.resident) >= self.args.max_running_requests or budget.is_spent or not self.attach(step, req):
                return
            self.add_rows(step, req, budget, is_continuing=False)

    def attach(self, step: Step, req: Req) -> bool:
        """Match the prefix and make `req` resident. False if slot or pages are missing.

        Room is asked for all its known tokens, beside what running requests have yet to compute and one more page for each:
        prompts that are admitted can be finished without retracting, and a retracted request does not come back to a place
        it would lose again at once.
        """
        headroom = sum(max(0, other.page_count(self.keeper.page_size) - len(other.pages)) + 1 for other in self.resident)
        attached = self.keeper.attach(req, headroom=headroom)
        if attached is None and not self.resident:
            # Alone, and still no room: what the prefix match itself keeps from eviction is in the way.
            attached = self.keeper.attach(req, headroom=0, use_cache=False)
        if attached is None:
            return False
        step.ops += attached.ops
        self.queue.remove(req)
        insort(self.resident, req, key=rank)
        req.state = ReqState.RUNNING
        req.snapshot_points = self.snapshots.plan(req, attached.branch)
        if req.is_first_admission:
            req.times.first_scheduled = time.time()
            req.num_cached = min(max(req.num_computed, req.kv_start), req.num_prompt)
            self.stats.cache_hit_tokens += req.num_cached
            self.stats.cache_miss_tokens += req.num_prompt - req.num_cached
        return True

    def refuse_stuck_request(self) -> None:
        """Nothing runs and the first waiting request still does not fit: a fault of ours, answered instead of waiting for ever."""
        req = order_waiting(self.queue, self.policy, lambda _: 0)[0]
        message = f"request {req.rid}: no room for {req.num_known} tokens although nothing runs, pools {self.keeper.pool_table()}"
        logger.error(message)
        self.end_all([req], abort_reason(EngineFailed(message)))

    # -- process ------------------------------------------------------------------------------------------------------

    def process(self, step: Step, output: StepOutput, in_flight: Step | None) -> None:
        """Commit the results of a step; clients first, then memory. `in_flight` is the step launched behind it, if any."""
        for row, token, logprobs in zip(step.rows, output.sampled, output.prompt_logprobs, strict=True):
            req = row.req
            req.num_in_flight -= 1
            req.num_pending -= row.samples
            if req.is_finished:
                continue  # it ended one step ago, or was aborted meanwhile
            if logprobs is not None:
                collect_prompt_logprobs(req, logprobs)
            if token is not None:
                self.commit(req, token)
        should_log = self.stats.count_step(sum(token is not None for token in output.sampled), output.forward_seconds)
        self.sender.flush(self.current_stats)
        for snapshot in step.snapshots:
            # A request that ended with this very step still has its memory, and a state in the middle of it is worth keeping.
            if snapshot.req.is_resident and not has_failed(snapshot.req):
                self.keeper.keep_snapshot(snapshot, in_flight)
            else:
                self.keeper.drop_snapshot(snapshot)
        for row in step.rows:
            self.settle(row.req)
        self.keeper.pages.free(step.free_pages)
        if should_log:
            self.stats.log(self.num_running, len(self.queue))

    def commit(self, req: Req, token: SampledToken) -> None:
        if not req.times.prefill_finished:
            req.times.prefill_finished = time.time()
        reason = commit(req, token)
        if reason is not None:
            self.finish(req, reason)
        else:
            self.sender.add(req)

    def finish(self, req: Req, reason: FinishReason) -> None:
        """The last output of a request. Its memory goes in `settle`."""
        if req.state is ReqState.WAITING:
            self.queue.remove(req)
        elif req.state is ReqState.COMPILING:
            self.grammars.remove(req)
        req.state, req.finish, req.times.finished = ReqState.FINISHED, reason, time.time()
        del self.by_rid[req.rid]
        self.stats.count_finish(reason)
        self.sender.add(req)

    def settle(self, req: Req) -> None:
        """Step "cache": a request that ended or was retracted leaves, once no step in flight has rows of it.

        The tree gets what is computed, the pools get the rest, a retracted request goes back to the queue.
        """
        if req.state not in (ReqState.FINISHED, ReqState.RETRACTING) or req.num_in_flight or not req.is_resident:
            return
        self.keeper.release(req, cache=not has_failed(req))
        self.resident.remove(req)
        if req.state is ReqState.RETRACTING:
            req.state = ReqState.WAITING
            self.queue.add(req)

    def end_all(self, requests: list[Req], reason: FinishReason) -> None:
        """Finish several requests between two steps."""
        for req in requests:
            self.finish(req, reason)
            self.settle(req)
        self.sender.flush(self.current_stats)

    def fail_all(self, message: str) -> None:
        """The loop is about to end: nobody may wait for an answer. Memory is not touched, a step may still run."""
        for req in list(self.by_rid.values()):
            self.finish(req, abort_reason(EngineFailed(f"request {req.rid}: {message}")))
        self.sender.flush(self.current_stats)

    # -- idle, statistics, state --------------------------------------------------------------------------------------

    def on_idle(self) -> None:
        """Once per idle spell: check the books, and tell the HTTP process that nothing runs."""
        if self.was_idle:
            return
        self.stats.on_idle()
        problem = self.keeper.books_problem()
        self.stats.books_balanced = problem is None
        if problem is not None:
            logger.error("the books do not balance while idle: %s", problem)
        self.sender.send(BatchOutput(outputs=[], stats=self.current_stats()))

    @property
    def num_running(self) -> int:
        return sum(req.state is not ReqState.FINISHED for req in self.resident)

    def current_stats(self) -> SchedulerStats:
        return self.stats.snapshot(self.num_running, len(self.queue) + len(self.grammars))

    def state(self) -> dict[str, object]:
        """Resolved arguments, pools and counters, JSON-able."""
        return {**self.describe(), "server_args": self.args.public_dict(), "stats": msgspec.to_builtins(self.current_stats())}


def abort_reason(error: ServiceError) -> FinishReason:
    """An error as the end of a request; the HTTP process turns it back."""
    return FinishReason(type="abort", message=error.message, status_code=error.status, err_type=error.kind)


def has_failed(req: Req) -> bool:
    """True if the request ended by a fault of ours: what it computed is not to be trusted."""
    return req.finish is not None and req.finish.status_code == EngineFailed.status
