"""What /metrics serves: SGLang's names, prefix `sglang:`, labels model_name and engine_type.

Two sources. Latencies and token counts of requests are observed here, in the HTTP process, as outputs arrive, for streamed
and unstreamed requests alike. Everything about batches and memory is the scheduler's own view (`SchedulerStats`), read at
the moment of a scrape, so that nothing is updated per step.

Inter-token latency counts gaps between tokens, not between messages: a message with k tokens adds k gaps of 1/k of the time
since the message before. So its count is (tokens - 1) per request, with speculation as well as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sglang.srt.managers.io_struct import SchedulerStats

PREFIX = "sglang:"
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_GAP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
_LABELS = ("model_name", "engine_type")

ENGINE_TYPES = {"null": "unified", "prefill": "prefill", "decode": "decode"}
"""Label engine_type by --disaggregation-mode."""


class FrontMetrics:
    """Counters and histograms of the HTTP process, in a registry of its own (several engines may share a process)."""

    def __init__(self, model_name: str, engine_type: str = "unified"):
        prometheus_client.disable_created_metrics()
        self.registry = prometheus_client.CollectorRegistry()
        self._labels = (model_name, engine_type)
        self._prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of finished requests")
        self._generation_tokens = self._counter("generation_tokens_total", "Tokens produced")
        self._cached_tokens = self._counter("cached_tokens_total", "Prompt tokens found in the prefix cache")
        self._requests = self._counter("num_requests_total", "Sequences that ended, aborted ones included")
        self._aborted = self._counter("num_aborted_requests_total", "Sequences ended by a client's abort or disappearance")
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", _SECONDS)
        self._gaps = self._histogram("inter_token_latency_seconds", "Between two tokens of a sequence", _GAP_SECONDS)
        self._per_token = self._histogram("request_time_per_output_token_seconds", "Mean gap of a sequence", _GAP_SECONDS)
        self._prompt_sizes = self._histogram("prompt_tokens_histogram", "Prompt tokens per sequence", _TOKENS)
        self._uncached_sizes = self._histogram("uncached_prompt_tokens_histogram", "Prompt tokens per sequence that were computed", _TOKENS)
        self._output_sizes = self._histogram("generation_tokens_histogram", "Tokens produced per sequence", _TOKENS)
        self._first_token = prometheus_client.Histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "From arrival to the first token",
            (*_LABELS, "is_streaming"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._http_requests = self._http_counter("http_requests_total", "HTTP requests by route", ("endpoint", "method"))
        self._http_responses = self._http_counter(
            "http_responses_total", "HTTP responses by route and status", ("endpoint", "method", "status_code")
        )
        self._http_active = prometheus_client.Gauge(
            f"{PREFIX}http_requests_active", "HTTP requests being answered", (*_LABELS, "endpoint", "method"), registry=self.registry
        )

    def prompt_computed(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A sequence's first output arrived: its prompt is in the cache now."""
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._prompt_sizes.observe(prompt_tokens)
        self._uncached_sizes.observe(max(0, prompt_tokens - cached_tokens))

    def first_token(self, seconds: float, *, is_streaming: bool) -> None:
        self._first_token.labels(*self._labels, str(is_streaming)).observe(seconds)

    def token_gaps(self, seconds: float, count: int) -> None:
        """`count` tokens came `seconds` after the one before them."""
        for _ in range(count):
            self._gaps.observe(seconds / count)

    def tokens(self, count: int) -> None:
        self._generation_tokens.inc(count)

    def finished(self, *, seconds: float, decode_seconds: float, completion_tokens: int, aborted: bool) -> None:
        """A sequence ended, `seconds` after it arrived and `decode_seconds` after its first token."""
        self._requests.inc()
        if aborted:
            self._aborted.inc()
        self._e2e.observe(seconds)
        self._output_sizes.observe(completion_tokens)
        if completion_tokens > 1:
            self._per_token.observe(decode_seconds / (completion_tokens - 1))

    def http_started(self, endpoint: str, method: str) -> None:
        self._http_requests.labels(*self._labels, endpoint, method).inc()
        self._http_active.labels(*self._labels, endpoint, method).inc()

    def http_ended(self, endpoint: str, method: str, status: int) -> None:
        self._http_active.labels(*self._labels, endpoint, method).dec()
        self._http_responses.labels(*self._labels, endpoint, method, str(status)).inc()

    def watch_scheduler(self, read: Callable[[], SchedulerStats]) -> None:
        """Serve what `read` returns at each scrape."""
        self.registry.register(_SchedulerCollector(read, self._labels))

    def expose(self) -> bytes:
        """The text of /metrics."""
        return prometheus_client.generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(PREFIX + name, text, _LABELS, registry=self.registry).labels(*self._labels)

    def _http_counter(self, name: str, text: str, labels: tuple[str, ...]) -> prometheus_client.Counter:
        return prometheus_client.Counter(PREFIX + name, text, (*_LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(PREFIX + name, text, _LABELS, buckets=buckets, registry=self.registry).labels(*self._labels)


class _SchedulerCollector:
    """Turns the latest SchedulerStats into metric families."""

    def __init__(self, read: Callable[[], SchedulerStats], labels: tuple[str, str]):
        self._read = read
        self._labels = labels

    def describe(self) -> list[Metric]:
        """Nothing to declare in advance: names in `extra` are the scheduler's choice."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        for name, text, value in _gauges(stats):
            family = GaugeMetricFamily(PREFIX + name, text, labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family
        for name, text, value in _counters(stats):
            counter = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        pools = GaugeMetricFamily(
            f"{PREFIX}pool_units", "Pages or slots of a pool by what they are used for", labels=(*_LABELS, "pool", "use")
        )
        for pool, uses in stats.pools.items():
            for use, count in uses.items():
                pools.add_metric((*self._labels, pool, use), count)
        yield pools


def cache_hit_rate(stats: SchedulerStats) -> float:
    """Share of all prompt tokens so far that were found in the prefix cache."""
    asked = stats.cache_hit_tokens + stats.cache_miss_tokens
    return stats.cache_hit_tokens / asked if asked else 0.0


def _gauges(stats: SchedulerStats) -> Iterator[tuple[str, str, float]]:
    yield "num_running_reqs", "Sequences with a state slot", stats.num_running_reqs
    yield "num_queue_reqs", "Sequences waiting for their first step", stats.num_queue_reqs
    yield "num_used_tokens", "Tokens in pages that are neither free nor evictable", stats.num_used_tokens
    yield "max_total_num_tokens", "Tokens the global KV pool holds", stats.max_total_num_tokens
    yield "token_usage", "num_used_tokens / max_total_num_tokens", stats.token_usage
    yield "full_token_usage", "The same as token_usage: there is one paged pool", stats.token_usage
    yield "cache_hit_rate", "Share of prompt tokens found in the prefix cache since start", cache_hit_rate(stats)
    yield "gen_throughput", "Tokens per second over the last report interval", stats.gen_throughput
    yield "num_retracted_reqs", "Retractions since start", stats.num_retracted_reqs
    yield "books_balanced", "1 if free + evictable + held was the total in every pool at the last idle check", float(stats.books_balanced)
    for name, value in stats.extra.items():
        yield name, "See the scheduler's documentation", value


def _counters(stats: SchedulerStats) -> Iterator[tuple[str, str, float]]:
    yield "forward_execution_seconds_total", "Seconds inside the model", stats.forward_seconds
    yield "num_steps_total", "Forward steps", stats.num_steps
    yield "cache_hit_tokens_total", "Prompt tokens found in the prefix cache", stats.cache_hit_tokens
    yield "cache_miss_tokens_total", "Prompt tokens computed", stats.cache_miss_tokens
    yield "scheduler_aborted_reqs_total", "Sequences aborted while running or queued", stats.num_aborted_reqs
