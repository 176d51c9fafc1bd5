"""Logits against the golden checkpoints, exact arithmetic: in one go, token by token, and with a truncated prefill."""

from __future__ import annotations

import pytest
import torch

from harness.direct import CHECKPOINTS, GOLDEN, DirectRunner, Golden, direct_runner

TOLERANCE = 2e-3


@pytest.fixture(scope="module", params=CHECKPOINTS)
def runner(request):
    return request.param, direct_runner(request.param)


@pytest.mark.parametrize("chunk", [10_000, pytest.param(1, marks=pytest.mark.slow), 7], ids=["whole", "token-by-token", "chunks-of-7"])
def test_every_row_agrees_with_the_golden_logits(runner, chunk):
    name, model = runner
    golden = Golden(name)
    for case in golden.cases:
        sequence = model.sequence(0)
        logits = sequence.extend(golden[f"{case}.prompt"].tolist(), chunk)
        error = (logits - golden[f"{case}.logits"]).abs().max().item()
        assert error < TOLERANCE, (name, case, error)


def test_greedy_continuation_agrees_where_the_margin_decides(runner):
    name, model = runner
    golden = Golden(name)
    for case in golden.cases:
        sequence = model.sequence(0)
        logits = sequence.extend(golden[f"{case}.prompt"].tolist())
        error = (logits - golden[f"{case}.logits"]).abs().max().item()
        row = logits[-1]
        for wanted, margin in zip(golden[f"{case}.greedy"].tolist(), golden[f"{case}.margins"].tolist()):
            got = int(row.argmax())
            if margin > 2 * error:
                assert got == wanted, (name, case)
            row = sequence.extend([wanted])[-1]


def test_truncated_prefill_agrees_with_the_golden_replay(runner):
    name, model = runner
    golden = Golden(name)
    checked = 0
    for case in golden.cases:
        for key in golden.names():
            if not key.startswith(f"{case}.replay"):
                continue
            keep = int(key.split(".")[1].removeprefix("replay"))
            prompt = golden[f"{case}.prompt"].tolist()
            for chunk in (10_000, 16):
                sequence = model.sequence(0, decoder_start=max(0, len(prompt) - keep))
                logits = sequence.extend(prompt, chunk)[-keep:]
                assert (logits - golden[key]).abs().max().item() < TOLERANCE, (name, case, chunk)
                checked += 1
    assert checked


def test_residual_streams_after_every_layer_agree():
    golden, model = Golden("nano-s1"), direct_runner("nano-s1")
    case = golden.cases[0]
    seen: dict[int, torch.Tensor] = {}
    model.sequence(0).extend(golden[f"{case}.prompt"].tolist(), observe=lambda layer, residual: seen.update({layer: residual}))
    for layer, residual in seen.items():
        assert (residual - golden[f"{case}.layer{layer}"]).abs().max().item() < TOLERANCE, layer
    assert len(seen) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantised_caches_agree_statistically(name):
    """The golden run is float64, stored as float16; in float32 a cache code may flip and move a few rows (trap 11).

    So most rows must agree to the rounding of the golden file (half an ulp of float16 below 8 is 2e-3), and nearly every
    argmax. Exact caches are far from that on the same data, which shows that the formats are really in use.
    """
    golden, runner = Golden(name), DirectRunner(GOLDEN / name / "checkpoint", cache_dtype="auto", num_sequences=1)
    for case in [case for case in golden.cases if f"{case}.logits_cache" in golden.names()]:
        wanted = golden[f"{case}.logits_cache"].float()
        logits = runner.sequence(0).extend(golden[f"{case}.prompt"].tolist())
        error = (logits - wanted).abs().amax(dim=1)
        exact_error = (golden[f"{case}.logits"] - wanted).abs().amax(dim=1)
        assert error.median().item() < 1e-2, (name, case)
        assert exact_error.median().item() > 0.3, (name, case)
        assert (logits.argmax(dim=1) == wanted.argmax(dim=1)).float().mean().item() > 0.9, (name, case)


@pytest.mark.parametrize("name", ["nano-s1", "mini-s1"])
def test_bounded_replay_of_the_encoder_gives_the_golden_replay(name):
    """A prefix of which only pages survive: replay rebuilds the windows. The golden run has exact encoder windows, so the
    replay reaches back one window per encoder layer before the rows that the decoder half keeps."""
    golden, model = Golden(name), direct_runner(name)
    config = model.config
    checked = 0
    for case in golden.cases:
        for key in [key for key in golden.names() if key.startswith(f"{case}.replay")]:
            keep = int(key.split(".")[1].removeprefix("replay"))
            prompt = golden[f"{case}.prompt"].tolist()
            sequence = model.sequence(0)
            sequence.extend(prompt[:-1])
            replay = keep + config.n_prefill * (config.sliding_window - 1)
            ids = sequence.forget_windows(replay)
            sequence.decoder_start = max(0, len(prompt) - keep)
            logits = sequence.extend(ids + prompt[-1:], 16)[-keep:]
            assert (logits - golden[key]).abs().max().item() < TOLERANCE, (name, case)
            checked += 1
    assert checked
