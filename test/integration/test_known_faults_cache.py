"""Faults that others met in prefix caches, chunked prefill, retraction and long prompts, on a real engine (nano checkpoint)."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import sglang
from harness.direct import GOLDEN
from random_checkpoint import PRESETS, write_checkpoint

CHECKPOINT = str(GOLDEN / "nano-s1" / "checkpoint")
VOCAB = 512
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@contextlib.contextmanager
def engine(**flags: Any) -> Iterator[sglang.Engine]:
    with sglang.Engine(**{"model_path": CHECKPOINT, "page_size": 16, "enable_deterministic_inference": True} | flags) as running:
        yield running


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def ids_of(results: list[dict[str, Any]]) -> list[list[int]]:
    return [result["output_ids"] for result in results]


def stats_of(running: sglang.Engine) -> dict[str, Any]:
    return running.get_server_info()["internal_states"][0]["stats"]


def assert_books_balance(running: sglang.Engine) -> None:
    stats = stats_of(running)
    assert stats["books_balanced"]
    for pool in stats["pools"].values():
        assert pool["free"] + pool["evictable"] == pool["total"]
        assert pool["held"] == 0


def test_a_warm_prefix_does_not_change_greedy_output():
    """F01."""
    prompts = [prompt(i, random.Random(i).randint(300, 900)) for i in range(20)]
    params = {**GREEDY, "max_new_tokens": 48}
    with engine(max_total_tokens=32768) as running:
        cold = running.generate(input_ids=prompts, sampling_params=params)
        warm = running.generate(input_ids=prompts, sampling_params=params)
        assert running.flush_cache(timeout_s=10)
        again = running.generate(input_ids=prompts, sampling_params=params)
    assert ids_of(cold) == ids_of(warm) == ids_of(again)
    assert all(result["meta_info"]["cached_tokens"] > 0 for result in warm)
    assert all(result["meta_info"]["cached_tokens"] == 0 for result in [*cold, *again])


def test_long_prefixes_that_fit_all_stay_reusable():
    """F02: eight of them take 60 % of the pool."""
    with engine(max_total_tokens=8192) as running:
        info = running.get_server_info()
        length = int(0.6 * info["max_total_num_tokens"] / 8)
        assert info["snapshot_capacity"] >= 8
        prompts = [prompt(100 + i, length) for i in range(8)]
        params = {**GREEDY, "max_new_tokens": 1}
        running.generate(input_ids=prompts, sampling_params=params)
        for _ in range(2):
            for ids in prompts:
                reply = running.generate(input_ids=ids, sampling_params=params)
                assert reply["meta_info"]["cached_tokens"] >= 0.9 * length
        assert_books_balance(running)


def test_slots_and_pages_survive_a_churning_tree():
    """F03: shared prefixes, random suffixes, one in ten aborted, a pool that is too small to keep everything."""
    rng = random.Random(3)
    heads = [prompt(200 + i, rng.randint(50, 900)) for i in range(5)]
    work = [(rng.choice(heads) + prompt(300 + i, rng.randint(1, 30)), rng.randint(1, 40), rng.random() < 0.1) for i in range(300)]
    failures: list[BaseException] = []

    with engine(max_total_tokens=4096, max_running_requests=8) as running:

        def serve(numbers: range) -> None:
            try:
                for n in numbers:
                    ids, count, is_aborted = work[n]
                    if is_aborted:
                        pieces = running.generate(input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": count}, stream=True)
                        for _ in pieces:
                            break
                        pieces.close()
                    else:
                        result = running.generate(input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": count})
                        assert len(result["output_ids"]) == count
            except BaseException as error:
                failures.append(error)

        clients = [threading.Thread(target=serve, args=(range(c, len(work), 8),)) for c in range(8)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(timeout=400)
        assert not failures, failures[0]
        assert not any(client.is_alive() for client in clients)
        time.sleep(0.5)
        assert_books_balance(running)
        assert running.flush_cache(timeout_s=10)
        running.generate(input_ids=[5], sampling_params={"max_new_tokens": 0})  # the next statistics
        assert running.flush_cache(timeout_s=10)
        pools = stats_of(running)["pools"]
        assert all(pool["free"] == pool["total"] for pool in pools.values())


def test_admission_waits_for_what_can_be_evicted():
    """F04 as far as one worker has it: pools full of evictable states and pages refuse nobody."""
    params = {**GREEDY, "max_new_tokens": 2}
    with engine(max_total_tokens=2048, max_running_requests=8, max_snapshots=8) as running:
        for number in range(60):
            assert len(running.generate(input_ids=prompt(400 + number, 500), sampling_params=params)["output_ids"]) == 2
        together = running.generate(input_ids=[prompt(460 + i, 500) for i in range(8)], sampling_params=params)
        assert all(len(result["output_ids"]) == 2 for result in together)
        assert_books_balance(running)


def test_chunk_size_does_not_change_logprob_lists():
    """F05: alone and four at once."""
    ids, params = prompt(5, 1000), {**GREEDY, "max_new_tokens": 8}
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    seen = []
    for chunk in (128, 192, 256, 1024, -1):
        with engine(chunked_prefill_size=chunk, max_total_tokens=8192) as running:
            alone = running.generate(input_ids=ids, sampling_params=params, **wanted)
            together = running.generate(input_ids=[ids] * 4, sampling_params=params, **wanted)
        for result in [alone, *together]:
            meta = result["meta_info"]
            first, *rest = meta["input_token_logprobs"]
            assert len(rest) == 999
            assert first[0] is None
            assert all(entry[0] <= 0 for entry in rest)
            assert len(meta["output_token_logprobs"]) == 8
            pairs = [[e[:2] for e in meta[name]] for name in ("input_token_logprobs", "output_token_logprobs")]
            tops = [[[e[:2] for e in p] if p else None for p in meta[name]] for name in ("input_top_logprobs", "output_top_logprobs")]
            seen.append((result["output_ids"], pairs, tops))
    assert all(facts == seen[0] for facts in seen)


def test_retraction_under_overlap_finds_memory_and_keeps_tokens():
    """F06."""
    prompts = [prompt(600 + i, 100) for i in range(12)]
    params = {**GREEDY, "max_new_tokens": 300}
    with engine(max_total_tokens=2048, max_running_requests=12) as running:
        together = running.generate(input_ids=prompts, sampling_params=params)
        assert all(len(result["output_ids"]) == 300 for result in together)
        assert all(result["meta_info"]["finish_reason"]["type"] == "length" for result in together)
        assert stats_of(running)["num_retracted_reqs"] > 0
        retracted = sorted(range(12), key=lambda i: -together[i]["meta_info"]["num_retractions"])[:1]
        assert running.flush_cache(timeout_s=10)
        alone = [running.generate(input_ids=prompts[i], sampling_params=params) for i in retracted]
        assert_books_balance(running)
    assert ids_of(alone) == [together[i]["output_ids"] for i in retracted]


def test_company_does_not_change_the_result():
    """F24: in decode, and as a prefill beside running decodes, with logprobs."""
    ids, params = prompt(7, 80), {**GREEDY, "max_new_tokens": 64}
    seen = []
    with engine(max_total_tokens=16384, max_running_requests=20, disable_radix_cache=True) as running:
        for company in (0, 1, 3, 8, 19):
            rng = random.Random(company)
            others = [prompt(700 + i, rng.randint(5, 150)) for i in range(company)]
            sampling = [{"temperature": 1.0, "ignore_eos": True, "max_new_tokens": rng.randint(1, 64)} for _ in others]
            place = rng.randint(0, company)
            results = running.generate(
                input_ids=[*others[:place], ids, *others[place:]],
                sampling_params=[*sampling[:place], params, *sampling[place:]],
                return_logprob=True,
            )
            mine = results[place]
            seen.append((mine["output_ids"], [entry[:2] for entry in mine["meta_info"]["output_token_logprobs"]]))
        decodes = running.generate(input_ids=prompt(8, 30), sampling_params={**GREEDY, "max_new_tokens": 200}, stream=True)
        next(decodes)
        beside = running.generate(input_ids=ids, sampling_params=params, return_logprob=True)
        seen.append((beside["output_ids"], [entry[:2] for entry in beside["meta_info"]["output_token_logprobs"]]))
        decodes.close()
    assert all(facts == seen[0] for facts in seen)


def test_a_prompt_beyond_64k_is_served_and_starves_nobody(tmp_path):
    """F28: 70,000 tokens in chunks; every short request gets its first token within a few chunk times."""
    # One compressed cache: scoring 70,000 positions against all before them is what takes the time.
    text = {**PRESETS["nano"].text, "num_hidden_layers": 2, "compress_ratios": [0, 2, 0], "kv_source_layer_ids": [1]}
    text |= {"index_source_layer_ids": [1], "candidate_source_layer_id": None, "engram_layer_ids": [], "dspark_target_layer_ids": [1]}
    text |= {"index_n_heads": 2, "max_position_embeddings": 131072}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", text, tokenizer=GOLDEN / "nano-s1" / "checkpoint")
    waits: list[float] = []
    chunk = 2048
    with sglang.Engine(model_path=str(checkpoint), max_total_tokens=131072, chunked_prefill_size=chunk) as running:
        done = threading.Event()
        giant: list[dict[str, Any]] = []

        def serve_giant() -> None:
            giant.append(running.generate(input_ids=prompt(1, 70_000), sampling_params={**GREEDY, "max_new_tokens": 2}))
            done.set()

        thread = threading.Thread(target=serve_giant)
        started = time.monotonic()
        thread.start()
        while not done.wait(1.0):
            sent = time.monotonic()
            small = running.generate(input_ids=prompt(len(waits), 20), sampling_params={**GREEDY, "max_new_tokens": 1})
            assert len(small["output_ids"]) == 1
            if not done.is_set():
                waits.append(time.monotonic() - sent)
        thread.join(timeout=10)
        seconds = time.monotonic() - started
    assert len(giant[0]["output_ids"]) == 2
    assert len(waits) >= 3
    # Not a speed test: a chunk's time is taken from this very run, the last chunks being the slowest.
    assert max(waits) < 8 * seconds / (70_000 / chunk)
