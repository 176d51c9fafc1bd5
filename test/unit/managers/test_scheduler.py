"""The scheduler against a fake runner that knows the right tokens and checks every page, slot and position it is handed."""

from __future__ import annotations

import random

import pytest

from fakes.fake_model_runner import FakeModelRunner, WrongInput
from harness.scheduler_bench import Bench, generate
from sglang.srt.errors import ConfigError
from sglang.srt.managers.io_struct import (
    AbortReq,
    FlushCacheReply,
    FlushCacheReq,
    GetStateReply,
    GetStateReq,
    ShutdownReq,
)


@pytest.fixture
def make():
    """Benches that end with their test."""
    made = []

    def build(runner: FakeModelRunner | None = None, **flags) -> Bench:
        made.append(Bench(runner, **flags))
        return made[-1]

    yield build
    for bench in made:
        bench.close()


def prompts(seed: int, count: int, low: int, high: int, shared: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(1000) for _ in range(shared)]
    return [head + [rng.randrange(1000) for _ in range(rng.randint(low, high))] for _ in range(count)]


# -- the same tokens, whatever happens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("chunk", [1, 3, 16, 100, -1])
@pytest.mark.parametrize("page_size", [2, 4, 64])
def test_tokens_are_those_of_the_oracle(make, overlap, chunk, page_size):
    runner = FakeModelRunner(num_pages=4096 // page_size, page_size=page_size, num_slots=40)
    bench = make(runner, overlap=overlap, chunked_prefill_size=chunk)
    some = prompts(1, 12, 1, 60, shared=20)
    for round_ in range(3):  # cold, warm, warm with the first rounds' outputs
        rids = [bench.submit(prompt, 10) for prompt in some]
        bench.run()
        for rid, prompt in zip(rids, some):
            result = bench.results[rid]
            assert result.ids == bench.expected(prompt, 10)
            assert (result.finish.type, result.finish.length) == ("length", 10)
            assert (result.last.cached_tokens > 0) or round_ == 0
    bench.check_books()


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("mixed", [False, True], ids=["unmixed", "mixed"])
@pytest.mark.parametrize("snapshots", [0, 3, 24])
@pytest.mark.parametrize("cache", [False, True], ids=["no-cache", "cache"])
def test_retraction_does_not_change_tokens(make, overlap, mixed, snapshots, cache):
    runner = FakeModelRunner(num_pages=40, num_slots=12 + snapshots)
    bench = make(runner, overlap=overlap, max_running_requests=12, enable_mixed_chunk=mixed, disable_radix_cache=not cache)
    some = prompts(2, 12, 10, 20)
    rids = [bench.submit(prompt, 60) for prompt in some]
    bench.run()
    for rid, prompt in zip(rids, some):
        assert bench.results[rid].ids == bench.expected(prompt, 60)
    assert bench.scheduler.current_stats().num_retracted_reqs > 0
    bench.check_books()


def test_a_request_as_large_as_the_pool_allows_runs_beside_others(make):
    bench = make(FakeModelRunner(num_pages=16, num_slots=12))
    assert bench.ready.max_request_tokens == 60
    small = bench.submit([1, 2, 3], 30)
    large = bench.submit(list(range(40)), 20)
    bench.run()
    assert bench.results[large].ids == bench.expected(list(range(40)), 20)
    assert bench.results[small].ids == bench.expected([1, 2, 3], 30)
    again = generate(bench, list(range(40)), 20)
    assert again.ids == bench.results[large].ids
    assert again.last.cached_tokens > 0
    bench.check_books()


def test_stop_ids_end_a_request_one_step_late_without_a_superfluous_token(make):
    for overlap in (False, True):
        bench = make(overlap=overlap)
        ids = bench.expected([5, 6, 7], 20)
        result = generate(bench, [5, 6, 7], 20, params={"stop_token_ids": [ids[4]]})
        assert result.ids == ids[:5]
        assert (result.finish.type, result.finish.matched) == ("stop", ids[4])
        assert result.last.completion_tokens == 5
        follow_up = generate(bench, [5, 6, 7, *ids[:5], 9], 5)
        assert follow_up.ids == bench.expected([5, 6, 7, *ids[:5], 9], 5)
        assert follow_up.last.cached_tokens == 7  # the last token's own KV is not part of what is cached
        bench.check_books()


def test_no_new_tokens_still_computes_the_prompt(make):
    bench = make()
    result = generate(bench, [1, 2, 3], 0, return_logprob=True, logprob_start_len=0)
    assert (result.ids, result.finish.type, len(result.input_logprobs.ids)) == ([], "length", 3)
    bench.check_books()


# -- prefix cache ------------------------------------------------------------------------------------------------------


def test_an_equal_prompt_is_cached_except_for_its_last_token(make):
    bench = make()
    prompt = list(range(30))
    assert generate(bench, prompt).last.cached_tokens == 0
    assert generate(bench, prompt).last.cached_tokens == 29


def test_the_next_turn_of_a_chat_finds_all_of_the_last_one(make):
    bench = make()
    prompt = list(range(30))
    first = generate(bench, prompt, 9)
    assert generate(bench, [*prompt, *first.ids, 7, 8], 3).last.cached_tokens == 38


def test_the_third_user_of_a_shared_head_finds_it_whole(make):
    bench = make(snapshot_interval=0)
    head = list(range(40))
    cached = [generate(bench, [*head, 100 + n, *range(9)]).last.cached_tokens for n in range(3)]
    assert cached == [0, 0, 40]


def test_a_state_in_the_middle_is_kept_though_its_request_ends_in_the_same_step(make):
    bench = make(snapshot_interval=0)
    head = list(range(40))
    cached = [generate(bench, [*head, 100 + n, *range(9)], 1).last.cached_tokens for n in range(3)]
    assert cached == [0, 0, 40]


def test_interval_snapshots_serve_a_branch_that_was_not_seen_before(make):
    bench = make(FakeModelRunner(num_pages=200, num_slots=40))
    head = list(range(40))
    cached = [generate(bench, [*head, 100 + n, *range(9)]).last.cached_tokens for n in range(2)]
    assert cached == [0, 32]


def test_salts_share_nothing(make):
    bench = make()
    prompt = list(range(30))
    generate(bench, prompt, cache_salt="a")
    assert generate(bench, prompt, cache_salt="b").last.cached_tokens == 0
    assert generate(bench, prompt, cache_salt="a").last.cached_tokens == 29


def test_several_long_prompts_that_fit_all_stay_reusable(make):
    """Eight prompts of 7.5 % of the pool each."""
    bench = make(FakeModelRunner(num_pages=400, num_slots=8 + 32), snapshot_interval=16)
    some = prompts(3, 8, 120, 120)
    for prompt in some:
        bench.submit(prompt, 1)
    bench.run()
    for _ in range(2):
        for prompt in some:
            assert generate(bench, prompt, 1).last.cached_tokens >= 108


def test_flush_waits_for_idleness_and_gives_up_in_time(make):
    bench = make()
    bench.submit(list(range(20)), 30)
    bench.send(FlushCacheReq(call_id="refused"))
    bench.send(FlushCacheReq(call_id="late", timeout_s=1.0))
    bench.send(FlushCacheReq(call_id="patient", timeout_s=100.0))
    for _ in range(5):
        bench.turn()
    bench.now = 2.0
    bench.run()
    replies = {reply.call_id: reply for reply in bench.replies if isinstance(reply, FlushCacheReply)}
    assert [replies[name].success for name in ("refused", "late", "patient")] == [False, False, True]
    assert "1 requests are running" in replies["late"].message
    assert bench.scheduler.keeper.pool_table()["pages"]["free"] == bench.runner.num_pages


# -- approximate modes -------------------------------------------------------------------------------------------------


def test_bounded_restore_replays_windows_and_keeps_all_shared_pages(make):
    runner = FakeModelRunner(num_pages=200, num_slots=12)
    bench = make(runner, snapshot_interval=0, prefill_keep_tokens=16)
    head = list(range(60))
    first = generate(bench, [*head, *range(100, 110)], swa_restore="bounded")
    second = generate(bench, [*head, *range(200, 210)], swa_restore="bounded")
    assert (second.last.cached_tokens, second.last.replayed_tokens) == (60, 16)
    assert second.ids == bench.expected([*head, *range(200, 210)], 8)
    assert (first.last.cached_tokens, first.last.replayed_tokens) == (0, 0)
    exact = generate(bench, [*head, *range(100, 110)])
    assert exact.last.cached_tokens == 0  # nothing of an approximate mode is served to an exact request
    bench.check_books()


def test_bounded_restore_prefers_a_state_that_is_there(make):
    bench = make(FakeModelRunner(num_pages=200, num_slots=12), swa_restore="bounded", prefill_keep_tokens=16)
    prompt = list(range(60))
    generate(bench, prompt)
    again = generate(bench, prompt)
    assert (again.last.cached_tokens, again.last.replayed_tokens) == (59, 0)


def test_compact_truncation_keeps_its_cut_and_reports_it(make):
    cuts = []
    runner = FakeModelRunner(num_pages=200, num_slots=12)
    runner.before_run = lambda step: cuts.append(step.batch.decoder_start[0])
    bench = make(runner, prefill_truncation="compact", prefill_keep_tokens=16, chunked_prefill_size=7)
    result = generate(bench, list(range(50)))
    assert result.last.truncated_tokens == 34
    assert set(cuts) == {34}
    assert generate(bench, list(range(10))).last.truncated_tokens == 0


def test_compact_truncation_has_no_prompt_logprobs(make):
    bench = make(prefill_truncation="compact")
    result = generate(bench, list(range(50)), return_logprob=True, logprob_start_len=0)
    assert (result.finish.type, result.finish.status_code) == ("abort", 400)
    assert generate(bench, list(range(50)), return_logprob=True).finish.type == "length"


# -- logprobs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_chunk_size_and_cache_do_not_change_logprob_lists(make, overlap):
    prompt = list(range(100, 150))
    seen = []
    for chunk in (1, 7, 16, -1):
        bench = make(FakeModelRunner(num_pages=200, num_slots=20), overlap=overlap, chunked_prefill_size=chunk)
        for start in (0, 0, 20, 49, 50):
            rids = [bench.submit(prompt, 5, return_logprob=True, logprob_start_len=start, top_logprobs_num=2) for _ in range(2)]
            bench.run()
            for rid in rids:
                result = bench.results[rid]
                lists = result.input_logprobs
                assert lists.ids == prompt[start:]
                assert [value is None for value in lists.logprobs] == [start == 0] * bool(lists.ids) + [False] * (len(lists.ids) - 1)
                assert len(lists.top) == len(lists.ids)
                output = [value for part in result.outputs for value in part.output_logprobs.logprobs]
                assert len(output) == 5
                seen.append((start, lists.logprobs, output))
        bench.check_books()
    for start in (0, 20, 49, 50):
        same = [entry for entry in seen if entry[0] == start]
        assert all(entry == same[0] for entry in same)


def test_prompt_logprobs_survive_a_retraction_in_the_middle_of_the_prompt(make):
    prompt = list(range(300, 340))
    expected = generate(make(), prompt, 4, return_logprob=True, logprob_start_len=0).input_logprobs
    for overlap in (False, True):
        bench = make(FakeModelRunner(num_pages=20, num_slots=12), overlap=overlap, chunked_prefill_size=6, max_prefill_tokens=12)
        first = bench.submit([1, 2], 60, priority=1)
        victim = bench.submit(prompt, 4, return_logprob=True, logprob_start_len=0)
        for _ in range(4):
            bench.turn()
        req = bench.scheduler.by_rid[victim]
        assert 0 < req.num_computed < len(prompt)
        bench.scheduler.retract(req)
        bench.run()
        assert bench.results[victim].input_logprobs == expected
        assert bench.results[victim].ids == bench.expected(prompt, 4)
        assert bench.results[victim].last.num_retractions == 1
        assert len(bench.results[first].ids) == 60
        bench.check_books()


# -- streams -----------------------------------------------------------------------------------------------------------


def test_stream_interval_and_whole_replies(make):
    bench = make(stream_interval=3)
    streamed = generate(bench, [1, 2], 8)
    assert [len(output.new_ids) for output in streamed.outputs] == [1, 3, 3, 1]
    whole = generate(bench, [1, 2], 8, stream=False)
    assert [len(output.new_ids) for output in whole.outputs] == [8]
    assert whole.ids == streamed.ids
    own = generate(bench, [1, 2], 8, params={"stream_interval": 1})
    assert [len(output.new_ids) for output in own.outputs] == [1] * 8


def test_times_are_in_order_and_on_the_last_output_only(make):
    result = generate(make(), [1, 2, 3])
    assert all(output.times is None for output in result.outputs[:-1])
    times = result.last.times
    assert 0 < times.arrived <= times.first_scheduled <= times.prefill_finished <= times.finished


# -- fairness, order, limits -------------------------------------------------------------------------------------------


def test_a_giant_prompt_does_not_starve_short_ones(make):
    runner = FakeModelRunner(num_pages=4000, page_size=64, num_slots=20)
    bench = make(runner, chunked_prefill_size=512, max_prefill_tokens=1024, snapshot_interval=1024)
    giant = bench.submit(list(range(1000)) * 70, 4)
    waits = []
    for n in range(20):
        rid = bench.submit([n] * 20, 3)
        turns = 0
        while not bench.results[rid].outputs:
            bench.turn()
            turns += 1
        waits.append(turns)
    assert max(waits) <= 3  # scheduled at once; in overlap, its token is heard when the step behind it has been launched
    assert not bench.results[giant].outputs
    bench.run()
    assert bench.results[giant].finish.type == "length"
    assert max(runner.num_rows) <= 1024 + 8


def test_several_giants_leave_half_of_the_budget(make):
    runner = FakeModelRunner(num_pages=4000, page_size=64, num_slots=20)
    bench = make(runner, chunked_prefill_size=-1, max_prefill_tokens=256)
    giants = [bench.submit([n] * 5000, 1) for n in range(3)]
    for _ in range(4):
        bench.turn()
    short = bench.submit([7] * 100, 1)
    for _ in range(3):
        bench.turn()
    assert bench.results[short].finish is not None
    assert all(bench.results[rid].finish is None for rid in giants)
    bench.run()


def test_decodes_go_on_beside_chunks_and_take_turns_without_mixing(make):
    for mixed in (True, False):
        runner = FakeModelRunner(num_pages=400, num_slots=20)
        bench = make(runner, overlap=False, enable_mixed_chunk=mixed, chunked_prefill_size=10, max_prefill_tokens=20)
        decoding = bench.submit([1], 50)
        bench.turn()
        bench.submit(list(range(200)), 1)
        for _ in range(10):
            bench.turn()
        assert len(bench.results[decoding].ids) == (11 if mixed else 6)
        bench.run()


def test_priority_decides_who_starts_and_who_is_retracted(make):
    bench = make(FakeModelRunner(num_pages=24, num_slots=12), schedule_policy="priority", max_running_requests=2)
    low = bench.submit([1] * 8, 60, priority=0)
    middle = bench.submit([2] * 8, 60, priority=1)
    high = bench.submit([3] * 8, 60, priority=2)
    bench.run()
    finished = sorted((low, middle, high), key=lambda rid: bench.results[rid].last.times.finished)
    assert finished == [high, middle, low]
    assert bench.results[high].last.num_retractions == 0
    assert bench.results[low].last.num_retractions + bench.results[middle].last.num_retractions > 0


def test_longest_prefix_goes_first_with_lpm(make):
    bench = make(schedule_policy="lpm", max_running_requests=1)
    known = list(range(30))
    generate(bench, known)
    cold = bench.submit([900 + n for n in range(20)], 2)
    warm = bench.submit([*known, 5], 2)
    bench.run()
    assert bench.results[warm].last.times.finished <= bench.results[cold].last.times.first_scheduled


def test_queue_limit_refuses_with_503(make):
    bench = make(max_running_requests=2, max_queued_requests=3)
    rids = [bench.submit([n], 5) for n in range(8)]
    bench.run()
    refused = [rid for rid in rids if bench.results[rid].finish.type == "abort"]
    assert refused == rids[5:]
    assert {bench.results[rid].finish.status_code for rid in refused} == {503}
    assert "--max-queued-requests 3" in bench.results[rids[7]].finish.message
    assert bench.scheduler.current_stats().num_aborted_reqs == 0


def test_time_limits(make):
    bench = make(max_running_requests=1, queue_timeout_s=5.0, request_timeout_s=50.0)
    running = bench.submit([1], 2000)
    waiting = bench.submit([2], 5)
    hasty = bench.submit([3], 5, deadline_s=1.0)
    bench.turn()
    bench.now = 2.0
    bench.turn()
    assert bench.results[hasty].finish.status_code == 504
    assert "1 s" in bench.results[hasty].finish.message
    assert bench.results[waiting].finish is None
    bench.now = 6.0
    bench.turn()
    assert bench.results[waiting].finish.status_code == 504
    assert bench.results[running].finish is None  # it had its first step in time
    bench.now = 51.0
    bench.run()
    assert bench.results[running].finish.status_code == 504
    bench.check_books()


def test_what_can_never_fit_is_refused_with_the_numbers(make):
    bench = make(FakeModelRunner(num_pages=16, num_slots=12), context_length=100)
    too_long = generate(bench, [1] * 50, 20)
    assert too_long.finish.status_code == 400
    assert all(number in too_long.finish.message for number in ("70", "50", "60"))
    assert "100" in generate(bench, [1] * 101, 1).finish.message
    assert generate(bench, [], 1).finish.status_code == 400
    assert len(generate(bench, [1] * 50, 8, params={"max_new_tokens": None}).ids) == 10


def test_sizes_that_cannot_work_are_refused_at_start(make):
    with pytest.raises(ConfigError, match="--prefill-keep-tokens 9 is too small: the window of 8"):
        make(prefill_keep_tokens=9)
    with pytest.raises(ConfigError, match="raise --max-total-tokens to 8"):
        make(FakeModelRunner(num_pages=1))
    with pytest.raises(ConfigError, match="--context-length 2000000"):
        make(context_length=2_000_000)


# -- aborts and faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_an_abort_keeps_the_tokens_so_far_and_is_counted_once(make, overlap):
    bench = make(overlap=overlap)
    for n in range(20):
        bench.submit([n], 3)
    bench.run()
    assert bench.scheduler.current_stats().num_aborted_reqs == 0
    rid = bench.submit([1, 2, 3], 1000)
    for _ in range(10):
        bench.turn()
    bench.send(AbortReq(rid=rid, reason="asked to"))
    bench.send(AbortReq(rid=rid))
    bench.send(AbortReq(rid="r0"))
    bench.run()
    result = bench.results[rid]
    assert (result.finish.type, result.finish.message, result.finish.status_code) == ("abort", "asked to", None)
    assert 5 < len(result.ids) < 12
    assert result.ids == bench.expected([1, 2, 3], len(result.ids))
    assert bench.scheduler.current_stats().num_aborted_reqs == 1
    bench.check_books()


def test_abort_all_reaches_waiting_and_running_requests(make):
    bench = make(max_running_requests=2)
    rids = [bench.submit([n] * 10, 50) for n in range(6)]
    for _ in range(4):
        bench.turn()
    bench.send(AbortReq(abort_all=True))
    bench.run()
    assert all(bench.results[rid].finish.type == "abort" for rid in rids)
    bench.check_books()


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_a_nan_row_ends_its_request_only_and_is_not_cached(make, overlap):
    bench = make(overlap=overlap)
    bad = bench.submit([1, 2, 3, 4, 5], 10)
    good = bench.submit([6, 7, 8], 10)
    bench.turn()
    bench.scheduler.by_rid[bad].sampling.is_poisoned = True
    bench.run()
    assert bench.results[bad].finish.status_code == 500
    assert "NaN" in bench.results[bad].finish.message
    assert bench.results[good].ids == bench.expected([6, 7, 8], 10)
    assert bench.scheduler.current_stats().num_aborted_reqs == 0
    bench.check_books()


def test_a_request_id_in_use_is_refused(make):
    bench = make()
    bench.submit([1], 5, rid="same")
    bench.turn()
    first = bench.results["same"]
    refusals = []
    heard, bench.scheduler.sender.send = bench.scheduler.sender.send, refusals.append
    bench.submit([2], 5, rid="same")
    bench.scheduler.receive()
    bench.scheduler.sender.send = heard
    assert refusals[0].outputs[0].finish.status_code == 400
    bench.results["same"] = first
    bench.run()
    assert first.ids == bench.expected([1], 5)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_an_exception_in_the_model_ends_every_request_and_the_loop(make, overlap):
    runner = FakeModelRunner()
    bench = make(runner, overlap=overlap, max_running_requests=2)
    rids = [bench.submit([n], 50) for n in range(4)]

    def crash(step):
        if len(runner.num_rows) == 5:
            raise RuntimeError("out of luck")

    runner.before_run = crash
    with pytest.raises(RuntimeError, match="out of luck"):
        bench.scheduler.run()
    assert {bench.results[rid].finish.status_code for rid in rids} == {500}
    assert all("out of luck" not in bench.results[rid].finish.message for rid in rids)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda req: req.pages.reverse(),
        lambda req: setattr(req, "slot", (req.slot + 1) % 16),
        lambda req: req.ids.__setitem__(-3, 77),
    ],
    ids=["pages", "slot", "history"],
)
def test_the_fake_notices_wrong_memory(make, spoil):
    """The other tests mean something only if this one passes."""
    bench = make(overlap=False)
    rid = bench.submit(list(range(20)), 50)
    for _ in range(3):
        bench.turn()
    spoil(bench.scheduler.by_rid[rid])
    with pytest.raises(WrongInput):
        bench.run()


# -- life cycle --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_shutdown_drains_and_then_ends_the_rest(make, overlap):
    bench = make(overlap=overlap)
    short, long = bench.submit([1], 5), bench.submit([2], 5000)
    bench.turn()
    bench.send(ShutdownReq(drain_s=10.0))
    for _ in range(20):
        bench.turn()
    late = bench.submit([3], 5)
    bench.turn()
    assert bench.results[short].finish.type == "length"
    assert bench.results[late].finish.status_code == 503
    assert not bench.scheduler.is_done
    bench.now = 11.0
    bench.run()
    assert bench.results[long].finish.status_code == 503
    assert bench.scheduler.is_done


def test_the_loops_end_after_a_shutdown(make):
    for overlap in (False, True):
        bench = make(overlap=overlap)
        rid = bench.submit([1], 5)
        bench.send(ShutdownReq(drain_s=10.0))
        bench.scheduler.run()
        assert bench.results[rid].ids == bench.expected([1], 5)


def test_state_and_statistics(make):
    bench = make(api_key="secret")
    generate(bench, list(range(20)), 5)
    generate(bench, list(range(20)), 5)
    bench.send(GetStateReq(call_id="x"))
    bench.turn()
    (reply,) = [reply for reply in bench.replies if isinstance(reply, GetStateReply)]
    state = reply.state
    assert state["server_args"]["api_key"] == "***"
    assert state["max_request_tokens"] == bench.ready.max_request_tokens
    stats = state["stats"]
    assert (stats["cache_hit_tokens"], stats["cache_miss_tokens"]) == (19, 21)
    assert stats["num_running_reqs"] == stats["num_queue_reqs"] == stats["num_used_tokens"] == 0
    assert stats["books_balanced"] is True


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_churn_of_3000_requests_with_aborts_leaks_nothing(make, overlap):
    seed = 20
    rng = random.Random(seed)
    print("seed", seed)
    runner = FakeModelRunner(num_pages=40, page_size=8, num_slots=8 + 16)
    bench = make(runner, overlap=overlap, chunked_prefill_size=24, max_prefill_tokens=64, snapshot_interval=16)
    heads = [[rng.randrange(1000) for _ in range(rng.randint(5, 90))] for _ in range(5)]
    submitted, count = {}, 1500
    while count or not bench.is_idle:
        while count and len(bench.scheduler.by_rid) + len(bench.pending) < 12:
            prompt = heads[rng.randrange(5)][: rng.randint(1, 90)] + [rng.randrange(1000) for _ in range(rng.randint(0, 8))]
            wanted = rng.randint(1, 60)
            submitted[bench.submit(prompt, wanted)] = (prompt, wanted)
            count -= 1
        if rng.random() < 0.01 * len(bench.scheduler.by_rid):
            bench.abort(rng.choice(list(bench.scheduler.by_rid)))
        bench.turn()
    bench.turn()
    stats = bench.scheduler.current_stats()
    assert stats.num_retracted_reqs > 0 and stats.num_aborted_reqs > 50 and stats.cache_hit_tokens > 0
    for rid, (prompt, wanted) in submitted.items():
        result = bench.results[rid]
        expected = bench.expected(prompt, wanted)
        assert result.ids == expected if result.finish.type == "length" else result.ids == expected[: len(result.ids)]
    bench.check_books()
