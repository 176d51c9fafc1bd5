"""Entry of the scheduler process: load the model, say so, serve, and end without leaving anyone waiting."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import zmq

from sglang.srt.constrained.grammar import GrammarBackend
from sglang.srt.constrained.manager import GrammarManager
from sglang.srt.errors import ConfigError
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import GenerateReq, Message, SchedulerFailed, SchedulerReady
from sglang.srt.managers.scheduler import MessageSource, Scheduler
from sglang.srt.managers.scheduler_components.grammar_queue import GrammarQueue
from sglang.srt.managers.scheduler_components.idle_sleeper import Inbox, end_with_parent
from sglang.srt.managers.scheduler_components.model_thread import ForwardTimeout, ModelThread
from sglang.srt.managers.scheduler_components.output_sender import OutputSender
from sglang.srt.managers.scheduler_components.page_keeper import PageKeeper
from sglang.srt.managers.scheduler_components.request_builder import Limits, RequestBuilder
from sglang.srt.managers.scheduler_components.snapshot_planner import SnapshotPlanner
from sglang.srt.managers.scheduler_components.stats import StatsKeeper
from sglang.srt.managers.stop_checker import StopChecker
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.mem_cache.allocator import PagePool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.observability.progress import StartupProgress
from sglang.srt.sampling.sampling_state import SamplingState
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

LAST_WORDS_MS = 1000
"""How long the process waits at its end for its last messages to be read."""


def run_scheduler_process(args: ServerArgs, in_addr: str, out_addr: str, parent_pid: int) -> None:
    """Serve one model until told to stop. `in_addr` and `out_addr` are bound by the HTTP process, this end connects.
    `parent_pid` is that process, in its own words: it may have ended before this one could look, and left it to init.

    Exit codes: 0 after a ShutdownReq, 2 for wrong flags or checkpoint, 1 for everything else; before the last two the HTTP
    process gets a SchedulerFailed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the HTTP process decides what it means
    end_with_parent(parent_pid)
    context = zmq.Context(io_threads=1)
    inbox, outbox = _connect(context, zmq.PULL, in_addr), _connect(context, zmq.PUSH, out_addr)

    def send(message: Message) -> None:
        outbox.send(io_struct.encode(message))

    exit_code = serve(args, Inbox(inbox), send)
    context.destroy(linger=LAST_WORDS_MS)
    logging.shutdown()
    os._exit(exit_code)  # a model thread that hangs must not keep the process


def serve(args: ServerArgs, inbox: MessageSource, send: Callable[[Message], None]) -> int:
    """Build everything and run the loop; the exit code."""
    try:
        scheduler, ready = load(args, inbox, send)
    except ConfigError as error:
        send(SchedulerFailed(message=str(error), is_config_error=True))
        return 2
    except Exception as error:
        logger.exception("start-up failed")
        send(SchedulerFailed(message=f"start-up failed: {_one_line(error)}"))
        return 1
    send(ready)
    try:
        scheduler.run()
    except ForwardTimeout as error:
        logger.critical("%s; ending", error)
        send(SchedulerFailed(message=str(error)))
        return 1
    except Exception as error:
        logger.exception("the scheduler failed; ending")
        send(SchedulerFailed(message=f"the scheduler failed: {_one_line(error)}"))
        return 1
    return 0


def load(args: ServerArgs, inbox: MessageSource, send: Callable[[Message], None]) -> tuple[Scheduler, SchedulerReady]:
    """Load model and tokenizer. Raises ConfigError if flags or checkpoint do not work."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    tokenizer = Tokenizer.load(args.resolved_tokenizer_path, args.model_path)
    started = time.perf_counter()
    progress = StartupProgress()
    try:
        runner = ModelRunner(args, progress=progress)
    finally:
        progress.close()
    logger.info("model loaded in %.1f s", time.perf_counter() - started)
    logger.info("memory\n%s", as_table(runner.memory_table()))
    grammars = make_grammars(args, tokenizer, runner.config.vocab_size)
    return assemble(args, runner, tokenizer.eos_ids, tokenizer, inbox, send, grammars)


def make_grammars(args: ServerArgs, tokenizer: Tokenizer, vocab_size: int) -> GrammarManager | None:
    """The compile thread, which begins to load the grammar library; None with --grammar-backend none."""
    if args.grammar_backend == "none":
        return None

    def make_backend() -> GrammarBackend:
        from sglang.srt.constrained.xgrammar_backend import XGrammarBackend

        return XGrammarBackend(tokenizer, vocab_size, args.grammar_max_length_bounds)

    manager = GrammarManager(make_backend, args.grammar_cache_bytes)
    manager.warm_up()
    return manager


def as_table(rows: list[dict[str, Any]]) -> str:
    """Rows with equal keys as aligned lines under a heading, for the log."""
    cells = [list(rows[0]), *[[f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells)


def assemble(
    args: ServerArgs,
    runner: Any,
    eos_ids: frozenset[int],
    tokenizer: Tokenizer | None,
    inbox: MessageSource,
    send: Callable[[Message], None],
    grammars: GrammarManager | None = None,
) -> tuple[Scheduler, SchedulerReady]:
    """Put the scheduler's parts together around a model runner (or a fake of one)."""
    config = runner.config
    limits = Limits.resolve(
        args,
        num_pages=runner.num_pages,
        max_positions=config.max_position_embeddings,
        window=config.sliding_window,
        max_backtracking=runner.max_backtracking,
    )
    max_snapshots = max(0, runner.num_slots - args.max_running_requests)
    pages, slots = PagePool(runner.num_pages), PagePool(runner.num_slots)
    tree = RadixCache(runner.page_size, pages, slots, max_snapshots, runner.max_backtracking, disabled=args.disable_radix_cache)
    keeper = PageKeeper(runner.page_size, pages, slots, tree, limits.keep_tokens)

    def make_sampling(msg: GenerateReq) -> SamplingState:
        return SamplingState(
            msg.sampling,
            msg.input_ids,
            eos_ids,
            config.vocab_size,
            return_logprob=msg.return_logprob,
            top_logprobs=msg.top_logprobs_num,
            token_ids_logprob=msg.token_ids_logprob,
        )

    def make_stop(msg: GenerateReq, context_room: int) -> StopChecker:
        return StopChecker(msg.sampling, eos_ids, tokenizer, context_room=context_room)

    def describe() -> dict[str, object]:
        return {
            "max_total_num_tokens": runner.num_pages * runner.page_size,
            "max_running_requests": args.max_running_requests,
            "context_length": limits.context_length,
            "max_request_tokens": limits.max_request_tokens,
            "snapshot_capacity": max_snapshots,
            "swa_replay_tokens": limits.keep_tokens,
            "memory": runner.memory_table(),
        }

    scheduler = Scheduler(
        args,
        inbox=inbox,
        sender=OutputSender(send, args.stream_interval),
        model=ModelThread(runner.run, args.watchdog_timeout),
        builder=RequestBuilder(args, limits, make_sampling, make_stop),
        keeper=keeper,
        snapshots=SnapshotPlanner(
            args.snapshot_interval, 0 if args.disable_radix_cache else max_snapshots, args.max_running_requests, runner.page_size
        ),
        grammars=GrammarQueue(grammars, eos_ids, config.vocab_size, args.grammar_timeout_s),
        stats=StatsKeeper(keeper, args.decode_log_interval),
        num_history=config.engram_max_ngram_size - 1,
        describe=describe,
    )
    ready = SchedulerReady(
        max_total_num_tokens=runner.num_pages * runner.page_size,
        max_running_requests=args.max_running_requests,
        context_length=limits.context_length,
        max_request_tokens=limits.max_request_tokens,
        state=scheduler.state(),
    )
    return scheduler, ready


def _connect(context: zmq.Context, kind: int, address: str) -> zmq.Socket:
    """No high-water mark: a send never blocks the loop; a reader that is gone is noticed by other means."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    return socket


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
