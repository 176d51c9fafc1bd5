"""A scheduler with a fake model runner, driven step by step in one process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fakes.fake_model_runner import FakeModelRunner, oracle
from sglang.srt.constrained.manager import GrammarManager
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchOutput,
    FinishReason,
    GenerateReq,
    Message,
    RequestOutput,
    TokenLogprobs,
)
from sglang.srt.managers.scheduler_process import assemble
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


@dataclass
class Result:
    """What the client of one request has heard."""

    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def input_logprobs(self) -> TokenLogprobs | None:
        return self.outputs[0].input_logprobs


class Bench:
    """Feeds messages, turns the loop by hand, collects outputs."""

    def __init__(
        self,
        runner: Any = None,
        *,
        overlap: bool = True,
        eos_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
        grammars: GrammarManager | None = None,
        **flags,
    ):
        self.runner = runner or FakeModelRunner()
        flags = {"model_path": "fake", "max_running_requests": 8, "page_size": self.runner.page_size, "snapshot_interval": 16} | flags
        self.args = ServerArgs(**flags, disable_overlap_schedule=not overlap)
        self.now = 0.0
        self.pending: list[Message] = []
        self.replies: list[Message] = []
        self.results: dict[str, Result] = {}
        self.in_flight = None
        self.scheduler, self.ready = assemble(self.args, self.runner, eos_ids, tokenizer, self, self.heard, grammars)
        self.scheduler.clock = lambda: self.now

    def receive(self, timeout_s: float) -> list[Message]:
        messages, self.pending = self.pending, []
        if not messages and timeout_s < 1.0:
            time.sleep(timeout_s)  # a grammar is being compiled; when idle there is nothing to wait for
        return messages

    def heard(self, message: Message) -> None:
        if not isinstance(message, BatchOutput):
            self.replies.append(message)
            return
        for output in message.outputs:
            result = self.results[output.rid]
            assert result.finish is None, f"{output.rid} heard something after its end"
            result.outputs.append(output)
            result.ids += output.new_ids
            result.finish = output.finish

    def submit(self, prompt: list[int], count: int = 8, *, rid: str | None = None, params: dict | None = None, **fields) -> str:
        rid = rid or f"r{len(self.results)}"
        sampling = SamplingParams(**({"max_new_tokens": count, "sampling_seed": 1} | (params or {})))
        self.results[rid] = Result()
        self.pending.append(GenerateReq(rid=rid, input_ids=prompt, sampling=sampling, **({"stream": True} | fields)))
        return rid

    def abort(self, rid: str) -> None:
        self.pending.append(AbortReq(rid=rid))

    def send(self, message: Message) -> None:
        self.pending.append(message)

    def turn(self) -> None:
        """One round of the loop."""
        scheduler = self.scheduler
        scheduler.receive()
        if not self.args.disable_overlap_schedule:
            self.in_flight = scheduler.overlap(self.in_flight)
        elif step := scheduler.schedule():
            scheduler.process(step, scheduler.model.run(step.build_input(scheduler.num_history)), in_flight=None)

    @property
    def is_idle(self) -> bool:
        return not self.pending and self.in_flight is None and self.scheduler.is_idle

    def run(self, max_turns: int = 100_000) -> None:
        """Until idle, then one more round, in which the books are checked."""
        for _ in range(max_turns):
            if self.is_idle:
                self.turn()
                return
            self.turn()
        raise AssertionError(f"not idle after {max_turns} turns: {self.scheduler.current_stats()}")

    def check_books(self) -> None:
        """Idle: everything is free or evictable, and after a flush free."""
        assert self.is_idle
        keeper = self.scheduler.keeper
        assert keeper.books_problem() is None
        for name, row in keeper.pool_table().items():
            assert row["free"] + row["evictable"] == row["total"], (name, row)
        keeper.tree.flush()
        for name in ("pages", "slots"):
            row = keeper.pool_table()[name]
            assert row["free"] == row["total"], (name, row)

    def expected(self, prompt: list[int], count: int) -> list[int]:
        return oracle(prompt, count, self.runner.config.vocab_size)

    def close(self) -> None:
        self.scheduler.model.close()


def generate(bench: Bench, prompt: list[int], count: int = 8, **fields) -> Result:
    """One request, to its end."""
    rid = bench.submit(prompt, count, **fields)
    bench.run()
    return bench.results[rid]
