"""Counters and gauges of the scheduler, and its log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sglang.srt.errors import EngineFailed
from sglang.srt.managers.io_struct import FinishReason, SchedulerStats
from sglang.srt.managers.scheduler_components.page_keeper import PageKeeper

logger = logging.getLogger(__name__)


class StatsKeeper:
    """Counts events; fills in gauges when a snapshot of the statistics is wanted."""

    def __init__(self, keeper: PageKeeper, log_interval: int, clock: Callable[[], float] = time.monotonic):
        self._keeper = keeper
        self._log_interval = log_interval
        self._clock = clock
        self._interval_started = clock()
        self._interval_tokens = 0
        self._interval_steps = 0
        self.num_retracted = 0
        self.num_aborted = 0
        self.num_finished = 0
        self.cache_hit_tokens = 0
        self.cache_miss_tokens = 0
        self.num_steps = 0
        self.forward_seconds = 0.0
        self.generated_tokens = 0
        self.gen_throughput = 0.0
        self.books_balanced = True

    def count_step(self, sampled_tokens: int, forward_seconds: float) -> bool:
        """One step has been processed. True every `log_interval` steps: time for a log line."""
        self.num_steps += 1
        self.forward_seconds += forward_seconds
        self.generated_tokens += sampled_tokens
        self._interval_tokens += sampled_tokens
        self._interval_steps += 1
        if self._interval_steps < self._log_interval:
            return False
        now = self._clock()
        self.gen_throughput = self._interval_tokens / max(now - self._interval_started, 1e-9)
        self._start_interval(now)
        return True

    def count_finish(self, reason: FinishReason) -> None:
        """A request ended. An abort is one that the client, a time limit or a shutdown cut short, not a failure of ours."""
        self.num_finished += 1
        self.num_aborted += reason.type == "abort" and reason.status_code != EngineFailed.status

    def on_idle(self) -> None:
        """Nothing runs: the rate is zero, and idle time will not count."""
        self.gen_throughput = 0.0
        self._start_interval(self._clock())

    def _start_interval(self, now: float) -> None:
        self._interval_started, self._interval_tokens, self._interval_steps = now, 0, 0

    def log(self, num_running: int, num_queued: int) -> None:
        stats = self.snapshot(num_running, num_queued)
        logger.info(
            "running %d, queued %d, KV tokens %d of %d (%.0f %%), %.1f tokens/s, cache hits %d of %d prompt tokens, retractions %d",
            num_running, num_queued, stats.num_used_tokens, stats.max_total_num_tokens, 100 * stats.token_usage, stats.gen_throughput,
            self.cache_hit_tokens, self.cache_hit_tokens + self.cache_miss_tokens, self.num_retracted,
        )  # fmt: skip

    def snapshot(self, num_running: int, num_queued: int) -> SchedulerStats:
        """Everything as of now."""
        keeper = self._keeper
        pools = keeper.pool_table()
        total = pools["pages"]["total"] * keeper.page_size
        used = (pools["pages"]["total"] - pools["pages"]["free"] - pools["pages"]["evictable"]) * keeper.page_size
        return SchedulerStats(
            num_running_reqs=num_running,
            num_queue_reqs=num_queued,
            num_used_tokens=used,
            max_total_num_tokens=total,
            token_usage=used / total,
            num_retracted_reqs=self.num_retracted,
            num_aborted_reqs=self.num_aborted,
            cache_hit_tokens=self.cache_hit_tokens,
            cache_miss_tokens=self.cache_miss_tokens,
            gen_throughput=self.gen_throughput,
            num_steps=self.num_steps,
            forward_seconds=self.forward_seconds,
            books_balanced=self.books_balanced,
            pools=pools,
            extra={
                "snapshot_capacity": float(keeper.tree.max_snapshots),
                "snapshots_held": float(keeper.tree.held_snapshots),
                "evicted_pages": float(keeper.tree.num_evicted_pages),
                "evicted_snapshots": float(keeper.tree.num_evicted_snapshots),
                "num_finished_reqs": float(self.num_finished),
                "generated_tokens": float(self.generated_tokens),
            },
        )
