"""A scheduler without a model: it speaks io_struct over ZeroMQ and plays token ids that a script chooses.

It runs in a thread of the test (`ScriptedScheduler(...).start()`) or as a process of its own:

    python scripted_scheduler.py TO_SCHEDULER FROM_SCHEDULER CHECKPOINT [--delay S] [--ready-after S] ...

A script maps a request to the ids it will produce. Stop strings, EOS and lengths are decided by the product's StopChecker,
so finish reasons are real. `delay_s` is the time of one "step"; in a step every running request gets one token. With
`hold` set, requests are accepted but nothing is produced until `release()`.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchOutput,
    FinishReason,
    FlushCacheReply,
    FlushCacheReq,
    GenerateReq,
    GetStateReply,
    GetStateReq,
    RequestOutput,
    SchedulerFailed,
    SchedulerReady,
    SchedulerStats,
    ShutdownReq,
    TokenLogprobs,
)
from sglang.srt.managers.stop_checker import StopChecker
from sglang.srt.managers.tokenizer import Tokenizer

Script = Callable[[GenerateReq], list[int]]

SCRIPTS = {
    "default": "Hello world. This is a test.",
    "think": "I think so.</think>The answer is 4 😀.",
    "tool": (
        'Need it.</think>Let me look.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="days" string="false">2</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    ),
    "json": '</think>{"a": 1}',
    "long": "one two three four five six seven eight nine ten eleven twelve",
}
"""The texts of the recorded wire file: a prompt that contains [[think]] gets that one, and so on."""


def text_script(tokenizer: Tokenizer, texts: dict[str, str] | None = None) -> Script:
    """A script that answers by marker in the prompt's text, then EOS."""
    texts = texts or SCRIPTS
    eos = min(tokenizer.eos_ids)

    def script(request: GenerateReq) -> list[int]:
        prompt = tokenizer.decode(request.input_ids, skip_special_tokens=False)
        name = next((name for name in texts if f"[[{name}]]" in prompt), "default")
        return [*tokenizer.encode(texts[name]), eos]

    return script


def ids_script(ids: list[int]) -> Script:
    """A script that always gives these ids."""
    return lambda request: list(ids)


def forever_script(token: int) -> Script:
    """A script that repeats one id up to the length limit."""
    return lambda request: [token] * (request.sampling.max_new_tokens or 0)


@dataclass
class _Running:
    request: GenerateReq
    ids: Iterator[int]
    stop: StopChecker
    produced: list[int] = field(default_factory=list)
    arrived: float = field(default_factory=time.time)
    started: float = 0.0


class ScriptedScheduler:
    """See the module's docstring. Everything it was sent is kept in `received` for assertions."""

    def __init__(
        self,
        in_addr: str,
        out_addr: str,
        tokenizer: Tokenizer,
        script: Script | None = None,
        *,
        context_length: int = 8192,
        max_request_tokens: int | None = None,
        max_running: int = 64,
        delay_s: float = 0.0,
        ready_after_s: float = 0.0,
        cached_tokens: int = 0,
        startup_error: str | None = None,
        crash_after_tokens: int | None = None,
    ):
        """`startup_error`: report a config error instead of becoming ready. `crash_after_tokens`: end without a word then."""
        self.received: list[io_struct.Message] = []
        self.hold = False
        self.refuse_with: FinishReason | None = None  # every new request ends with this
        self._in_addr, self._out_addr = in_addr, out_addr
        self._tokenizer = tokenizer
        self._script = script or text_script(tokenizer)
        self._context_length = context_length
        self._max_request_tokens = max_request_tokens or context_length
        self._max_running = max_running
        self._delay_s = delay_s
        self._ready_after_s = ready_after_s
        self._cached_tokens = cached_tokens
        self._startup_error = startup_error
        self._crash_after_tokens = crash_after_tokens
        self._running: dict[str, _Running] = {}
        self._queue: list[_Running] = []
        self._num_aborted = 0
        self._num_tokens = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- a test's side ---------------------------------------------------------------------------------------------

    def start(self) -> ScriptedScheduler:
        """Run in a thread."""
        self._thread = threading.Thread(target=self.run, name="scripted scheduler", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread as a crash would: no message is sent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)

    def release(self) -> None:
        """End `hold`."""
        self.hold = False

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._queue)

    def generate_requests(self) -> list[GenerateReq]:
        return [message for message in self.received if isinstance(message, GenerateReq)]

    def aborts(self) -> list[AbortReq]:
        return [message for message in self.received if isinstance(message, AbortReq)]

    # -- the scheduler's side ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """The loop; returns when told to shut down."""
        context = zmq.Context()
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.connect(self._in_addr)
        push.connect(self._out_addr)
        self._push = push
        try:
            time.sleep(self._ready_after_s)
            if self._startup_error is not None:
                self._send(SchedulerFailed(message=self._startup_error, is_config_error=True))
                return
            self._send(
                SchedulerReady(
                    max_total_num_tokens=self._max_request_tokens,
                    max_running_requests=self._max_running,
                    context_length=self._context_length,
                    max_request_tokens=self._max_request_tokens,
                )
            )
            self._loop(pull)
        finally:
            pull.close(0)
            push.close(1000)  # ms for the last messages to leave
            context.term()

    def _loop(self, pull: zmq.Socket) -> None:
        while not self._stop.is_set():
            idle = self.hold or not (self._running or self._queue)
            if not pull.poll(10 if idle else self._delay_s * 1000):
                if not idle:
                    self._step()
                continue
            while pull.poll(0):
                message = io_struct.decode_to_scheduler(pull.recv())
                self.received.append(message)
                if isinstance(message, ShutdownReq):
                    return
                self._take(message)
            if not self.hold and self._delay_s == 0:
                self._step()
            if self._crash_after_tokens is not None and self._num_tokens >= self._crash_after_tokens:
                return

    def _take(self, message: io_struct.ToScheduler) -> None:
        match message:
            case GenerateReq():
                self._accept(message)
            case AbortReq():
                for rid in [r for r in (*self._running, *(q.request.rid for q in self._queue)) if message.abort_all or r == message.rid]:
                    self._abort(rid, message.reason)
            case FlushCacheReq():
                busy = bool(self.num_running)
                text = f"{self.num_running} requests are running" if busy else ""
                self._send(FlushCacheReply(call_id=message.call_id, success=not busy, message=text))
            case GetStateReq():
                self._send(GetStateReply(call_id=message.call_id, state={"scripted": True, "num_running_reqs": len(self._running)}))

    def _accept(self, request: GenerateReq) -> None:
        stop = StopChecker(request.sampling, self._tokenizer.eos_ids, self._tokenizer)
        running = _Running(request, iter(self._script(request)), stop)
        finish = self.refuse_with or stop.before_first()
        if finish is not None:
            self._send(BatchOutput(outputs=[self._output(running, [], finish)], stats=self._stats()))
            return
        self._queue.append(running)

    def _abort(self, rid: str, reason: str) -> None:
        running = self._running.pop(rid, None) or next(q for q in self._queue if q.request.rid == rid)
        self._queue = [q for q in self._queue if q.request.rid != rid]
        self._num_aborted += 1
        self._send(BatchOutput(outputs=[self._output(running, [], FinishReason(type="abort", message=reason))], stats=self._stats()))

    def _step(self) -> None:
        while self._queue and len(self._running) < self._max_running:
            running = self._queue.pop(0)
            running.started = time.time()
            self._running[running.request.rid] = running
        outputs = []
        for rid, running in list(self._running.items()):
            token = next(running.ids, None)
            if token is None:
                finish: FinishReason | None = FinishReason(type="length", length=len(running.produced))
                new = []
            else:
                new = [token]
                finish = running.stop.check(token)
                self._num_tokens += 1
            if finish is not None:
                del self._running[rid]
            outputs.append(self._output(running, new, finish))
        if outputs:
            self._send(BatchOutput(outputs=outputs, stats=self._stats()))

    def _output(self, running: _Running, new: list[int], finish: FinishReason | None) -> RequestOutput:
        request = running.request
        is_first = not running.produced
        running.produced += new
        return RequestOutput(
            rid=request.rid,
            new_ids=new,
            finish=finish,
            prompt_tokens=len(request.input_ids),
            completion_tokens=len(running.produced),
            cached_tokens=min(self._cached_tokens, len(request.input_ids) - 1),
            input_logprobs=self._input_logprobs(request) if request.return_logprob and is_first else None,
            output_logprobs=_logprobs(new, request) if request.return_logprob else None,
        )

    def _input_logprobs(self, request: GenerateReq) -> TokenLogprobs | None:
        if request.logprob_start_len < 0:
            return None
        logprobs = _logprobs(request.input_ids[request.logprob_start_len :], request)
        if request.logprob_start_len == 0:
            logprobs.logprobs[0] = None
            if logprobs.top is not None:
                logprobs.top[0] = None
        return logprobs

    def _stats(self) -> SchedulerStats:
        return SchedulerStats(num_running_reqs=len(self._running), num_queue_reqs=len(self._queue), num_aborted_reqs=self._num_aborted)

    def _send(self, message: io_struct.FromScheduler) -> None:
        self._push.send(io_struct.encode(message))


def _logprobs(ids: list[int], request: GenerateReq) -> TokenLogprobs:
    """Made-up values: -0.25 for every id, -1.25 for the runner-up."""
    top = request.top_logprobs_num
    extra = request.token_ids_logprob
    return TokenLogprobs(
        ids=list(ids),
        logprobs=[-0.25] * len(ids),
        top=[[(-0.25 - rank, token if rank == 0 else 4 + rank) for rank in range(top)] for token in ids] if top else None,
        token_ids=[[(-2.0, wanted) for wanted in extra] for _ in ids] if extra else None,
    )


def main(argv: list[str]) -> int:
    """Run as a process; ends when told to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("in_addr")
    parser.add_argument("out_addr")
    parser.add_argument("checkpoint")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--ready-after", type=float, default=0.0)
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--forever", type=int, default=None, help="repeat this id")
    parser.add_argument("--startup-error", default=None)
    parser.add_argument("--crash-after-tokens", type=int, default=None)
    values = parser.parse_args(argv)
    tokenizer = Tokenizer.load(values.checkpoint)
    ScriptedScheduler(
        values.in_addr,
        values.out_addr,
        tokenizer,
        None if values.forever is None else forever_script(values.forever),
        context_length=values.context_length,
        delay_s=values.delay,
        ready_after_s=values.ready_after,
        startup_error=values.startup_error,
        crash_after_tokens=values.crash_after_tokens,
    ).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
