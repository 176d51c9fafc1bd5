"""Approximate against exact on the nano golden checkpoint: zero where nothing is lost, more than zero where something is."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch

from harness.direct import GOLDEN
from sglang.srt.errors import ConfigError
from sglang.srt.evaluation import approx
from sglang.srt.evaluation.approx import Settings, Variant
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.models.deepseek_v41.config import load_config
from sglang.srt.server_args import ServerArgs

NANO = GOLDEN / "nano-s1" / "checkpoint"
ARGS = ServerArgs(model_path=str(NANO), page_size=4, device="cpu")
CONFIG = load_config(NANO)
LEAST = 8 + 5
"""What a worker accepts at least: the window, a draft block and a bonus token, less the row of the overlap."""

SMALL = Settings(
    prefix_tokens=41,
    continuation_tokens=12,
    greedy_tokens=4,
    max_windows=2,
    seed=0,
    replay_tokens=(LEAST,),
    keep_tokens=(LEAST,),
)
TEXT = "The quick brown fox jumps over the lazy dog while seven wizards mix a potion of juniper and quartz. " * 6


def report(settings: Settings, text: str = TEXT, args: ServerArgs = ARGS) -> dict:
    return approx.evaluate(args, CONFIG, Tokenizer.load(NANO), text, settings)


@pytest.fixture(scope="module")
def small() -> dict:
    return report(SMALL)


def test_replaying_or_keeping_the_whole_prefix_changes_no_bit():
    whole = (SMALL.prefix_tokens, 10 * SMALL.prefix_tokens)
    for row in report(dataclasses.replace(SMALL, replay_tokens=whole, keep_tokens=whole))["modes"]:
        assert row["nll_difference"] == row["perplexity_difference"] == row["kl_mean"] == row["kl_max"] == 0.0, row["mode"]
        assert row["nll_difference_stderr"] == 0.0
        assert row["top1_agreement"] == 1.0
        assert row["greedy_agreement"] == [SMALL.greedy_tokens] * 2
        assert row["truncated_tokens"] == 0


def test_forgetting_costs_something_and_more_rows_cost_less():
    """bounded reaches exactness at 4 layers * (window - 1) rows, compact at 2 decoder layers' worth (model.md §10.3)."""
    rows = report(dataclasses.replace(SMALL, replay_tokens=(LEAST, 28), keep_tokens=(LEAST, 15)))["modes"]
    kl = {(row["mode"], row["replay_tokens"], row["keep_tokens"]): row["kl_mean"] for row in rows}
    assert kl["bounded", LEAST, None] > kl["bounded", 28, None]
    assert kl["compact", None, LEAST] > 0.0
    assert kl["compact", None, 15] == 0.0
    assert kl["both", LEAST, LEAST] > 0.0


def test_the_exact_sequence_agrees_with_one_forward_per_token():
    """The loss, computed another way: teacher forcing without batches, chunks or forks."""
    settings = dataclasses.replace(SMALL, max_windows=1)
    starts, windows = approx.cut_windows(Tokenizer.load(NANO).encode(TEXT), 0, settings)
    model = approx.load_model(ARGS, settings)
    losses = []
    for window in windows:
        track = model.start()
        for position, token in enumerate(window[:-1]):
            row = model.extend(track, [token], 1)
            if position >= SMALL.prefix_tokens - 1:
                losses.append(-row.double().log_softmax(dim=-1)[window[position + 1]])
        model.free(track)
    found = report(settings)
    assert found["exact"]["nll"] == torch.stack(losses).mean().item()
    assert found["text"]["window_starts"] == starts


def test_the_report_is_plain_json_with_these_fields(small):
    assert json.loads(json.dumps(small)) == {**small, "settings": {**small["settings"], "replay_tokens": [LEAST], "keep_tokens": [LEAST]}}
    assert set(small) == {"schema", "model", "text", "settings", "num_windows", "exact", "modes"}
    assert small["schema"] == 1 and small["num_windows"] == 2
    assert small["model"]["worker_replay_tokens"] == small["model"]["worker_keep_tokens"] == 8 + 12
    assert [row["mode"] for row in small["modes"]] == ["bounded", "compact", "both"]
    for row in small["modes"]:
        assert set(row) == {
            "mode", "replay_tokens", "keep_tokens", "replayed_tokens", "truncated_tokens",
            "nll", "nll_difference", "nll_difference_stderr", "perplexity", "perplexity_difference",
            "kl_mean", "kl_max", "kl_by_position", "top1_agreement", "greedy_agreement_mean", "greedy_agreement",
        }  # fmt: skip
        assert len(row["kl_by_position"]) == SMALL.continuation_tokens and len(row["greedy_agreement"]) == 2
        assert row["kl_mean"] == pytest.approx(sum(row["kl_by_position"]) / SMALL.continuation_tokens)
        assert 0 <= row["greedy_agreement_mean"] <= SMALL.greedy_tokens
    bounded, compact, both = small["modes"]
    assert (bounded["replayed_tokens"], bounded["truncated_tokens"]) == (LEAST, 0)
    assert (compact["replayed_tokens"], compact["truncated_tokens"]) == (0, SMALL.prefix_tokens - LEAST)
    assert (both["replayed_tokens"], both["truncated_tokens"]) == (LEAST, SMALL.prefix_tokens - LEAST)


def test_the_same_seed_gives_the_same_report_whatever_the_chunk_and_page(small):
    # 40 tokens are matched with pages of 4 and of 20.
    other = report(SMALL, args=dataclasses.replace(ARGS, page_size=20, chunked_prefill_size=7))
    assert {**other, "model": small["model"]} == small
    assert report(dataclasses.replace(SMALL, seed=1))["text"]["window_starts"] != small["text"]["window_starts"]


def test_pools_are_empty_again_after_a_window():
    model = approx.load_model(ARGS, SMALL)
    free = model.pages.free_count, model.slots.free_count
    ids = [random.Random(3).randrange(3, 400) for _ in range(SMALL.prefix_tokens + SMALL.continuation_tokens)]
    approx.score_window(model, ids, SMALL, chunk=16)
    assert (model.pages.free_count, model.slots.free_count) == free


def test_windows_do_not_overlap_and_begin_as_prompts_do():
    settings = dataclasses.replace(SMALL, prefix_tokens=6, continuation_tokens=4, max_windows=2)
    starts, windows = approx.cut_windows([0, *range(10, 50)], 0, settings)
    assert all(window[0] == 0 and window[1:] == list(range(10 + start, 19 + start)) for start, window in zip(starts, windows))
    assert all(start % 9 == 0 for start in starts) and starts == sorted(set(starts))
    assert approx.cut_windows(range(10, 50), None, settings)[1][0][0] % 10 == 0
    chosen = {tuple(approx.cut_windows(range(1000), None, dataclasses.replace(settings, seed=seed))[0]) for seed in range(5)}
    assert len(chosen) > 1


def test_a_text_too_short_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="the text has 30 tokens, but one window needs 52"):
        approx.cut_windows(list(range(10, 40)), 0, SMALL)


def test_variants_pair_replay_and_keep():
    settings = dataclasses.replace(SMALL, replay_tokens=(20, 40, 80), keep_tokens=(30, 60))
    assert settings.variants[5:] == [Variant(20, 30), Variant(40, 60), Variant(80, 60)]
    assert [variant.mode for variant in settings.variants] == ["bounded"] * 3 + ["compact"] * 2 + ["both"] * 3


def test_defaults_scale_with_window_and_context():
    settings = approx.resolve_settings(ARGS, CONFIG)
    assert (settings.prefix_tokens, settings.continuation_tokens, settings.greedy_tokens) == (32 * 8 + 1, 64, 64)
    assert settings.replay_tokens == settings.keep_tokens == (20, 40, 80)
    released = approx.resolve_settings(ARGS, dataclasses.replace(CONFIG, sliding_window=128, max_position_embeddings=1 << 20))
    assert (released.prefix_tokens, released.continuation_tokens, released.replay_tokens) == (4097, 128, (140, 280, 560))
    tight = approx.resolve_settings(dataclasses.replace(ARGS, context_length=100), CONFIG)
    assert tight.prefix_tokens == 33 and tight.replay_tokens == (20,)
    own = approx.resolve_settings(ARGS, CONFIG, replay_tokens=[64, 32, 64])
    assert own.replay_tokens == (32, 64)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"prefix_tokens": 4}, "--prefix-tokens must be at least 5, found 4"),
        (
            {"prefix_tokens": 4050},
            "--prefix-tokens 4050 and 64 tokens after them exceed the context of 4096; lower --prefix-tokens to 4032",
        ),
        ({"continuation_tokens": 0}, "--continuation-tokens must be at least 1, found 0"),
        ({"greedy_tokens": -1}, "--greedy-tokens must be at least 0, found -1"),
        ({"max_windows": 0}, "--max-windows must be at least 1, found 0"),
        ({"seed": -1}, "--seed must be at least 0, found -1"),
        ({"replay_tokens": [12]}, "--swa-replay-tokens must be at least 13, found 12 .the window of 8"),
        ({"keep_tokens": [20, 12]}, "--prefill-keep-tokens must be at least 13, found 12 .the window of 8"),
    ],
)
def test_values_that_cannot_work_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        approx.resolve_settings(ARGS, CONFIG, **values)


def test_a_tokenizer_of_another_model_is_refused():
    small_vocabulary = dataclasses.replace(CONFIG, vocab_size=100)
    with pytest.raises(ConfigError, match="but the model has 100"):
        approx.evaluate(ARGS, small_vocabulary, Tokenizer.load(Path(NANO)), TEXT, SMALL)
