"""Names, labels and sources of /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from sglang.srt.managers.io_struct import SchedulerStats
from sglang.srt.observability.metrics import FrontMetrics, cache_hit_rate

FRONT = [
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "num_requests_total",
    "num_aborted_requests_total",
    "e2e_request_latency_seconds_count",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count",
    "prompt_tokens_histogram_count",
    "uncached_prompt_tokens_histogram_count",
    "generation_tokens_histogram_count",
]
SCHEDULER = [
    "num_running_reqs",
    "num_queue_reqs",
    "num_used_tokens",
    "token_usage",
    "full_token_usage",
    "cache_hit_rate",
    "gen_throughput",
    "num_retracted_reqs",
    "max_total_num_tokens",
    "forward_execution_seconds_total",
    "books_balanced",
]


def samples(metrics: FrontMetrics) -> dict[str, list]:
    result: dict[str, list] = {}
    for family in text_string_to_metric_families(metrics.expose().decode()):
        for sample in family.samples:
            result.setdefault(sample.name, []).append(sample)
    return result


def stats(**fields) -> SchedulerStats:
    return SchedulerStats(**fields)


def test_names_are_sglangs_and_every_sample_has_both_labels():
    metrics = FrontMetrics("toy", "decode")
    metrics.watch_scheduler(stats)
    found = samples(metrics)
    assert {f"sglang:{name}" for name in FRONT + SCHEDULER} <= set(found)
    for entries in found.values():
        for sample in entries:
            assert (sample.labels["model_name"], sample.labels["engine_type"]) == ("toy", "decode")
    assert not any(name.endswith("_created") for name in found)


def test_scheduler_values_are_read_at_every_scrape():
    current = stats(num_running_reqs=1)
    metrics = FrontMetrics("toy")
    metrics.watch_scheduler(lambda: current)
    assert samples(metrics)["sglang:num_running_reqs"][0].value == 1
    current = stats(num_running_reqs=5, pools={"state": {"total": 8, "free": 3}}, extra={"snapshot_usage": 0.5})
    found = samples(metrics)
    assert found["sglang:num_running_reqs"][0].value == 5
    assert found["sglang:snapshot_usage"][0].value == 0.5
    assert {(s.labels["pool"], s.labels["use"]): s.value for s in found["sglang:pool_units"]} == {
        ("state", "total"): 8,
        ("state", "free"): 3,
    }


def test_hit_rate_is_the_share_of_prompt_tokens_found():
    assert cache_hit_rate(stats()) == 0.0
    assert cache_hit_rate(stats(cache_hit_tokens=30, cache_miss_tokens=10)) == 0.75


def test_two_engines_in_one_process_do_not_share_counters():
    one, two = FrontMetrics("a"), FrontMetrics("b")
    one.tokens(3)
    assert samples(one)["sglang:generation_tokens_total"][0].value == 3
    assert samples(two)["sglang:generation_tokens_total"][0].value == 0
