"""Each mistake of model.md §14's list must move the logits of `mini` beyond the tolerance of the golden test.

This is the check of the checks: if a mutation passed, the golden test would not notice that constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from harness.direct import GOLDEN, DirectRunner, Golden
from sglang.srt.kernels.linear_weight import LinearWeight
from sglang.srt.kernels.table import KernelTable
from sglang.srt.models.deepseek_v41.layer import DecoderLayer
from sglang.srt.models.deepseek_v41.plan import ForwardPlan

TOLERANCE = 2e-3
OPS = KernelTable()


def config_change(**values: object) -> Callable[[DirectRunner], None]:
    def mutate(runner: DirectRunner) -> None:
        raise AssertionError("applied when the runner is built")

    mutate.values = values
    return mutate


def op_change(name: str, make: Callable) -> Callable[[DirectRunner], None]:
    def mutate(runner: DirectRunner) -> None:
        raise AssertionError("applied when the runner is built")

    mutate.op = (name, make(getattr(OPS, name)))
    return mutate


def no_sink(op: Callable) -> Callable:
    return lambda q, values, index, latents, page, entry, sink: op(
        q, values, index, latents, page, entry, torch.full_like(sink, -torch.inf)
    )


def no_inverse(op: Callable) -> Callable:
    return lambda x, cos, sin, inverse=False: x if inverse else op(x, cos, sin)


def no_bias(op: Callable) -> Callable:
    return lambda x, gate, bias, k, scaling: op(x, gate, torch.zeros_like(bias), k, scaling)


def transposed_mix(op: Callable) -> Callable:
    return lambda y, residual, post, mix: op(y, residual, post, mix.transpose(1, 2))


def uniform_pooling(runner: DirectRunner) -> None:
    for layer in runner.model.layers:
        compressor = layer.attention.compressor
        if compressor is not None and compressor.wgate is not None:
            compressor.wgate = LinearWeight.dense(torch.zeros(compressor.wgate.out_features, compressor.wgate.in_features))


def no_engram(runner: DirectRunner) -> None:
    runner.model.engrams.clear()


class SecondTokenPlan(ForwardPlan):
    """Rotates a pair at its second token."""

    def rotary(self, scaled, positions=None):
        if positions is not None and positions is self.groups[2].position:
            positions = positions + 1
        return super().rotary(scaled, positions)


def second_token(runner: DirectRunner) -> None:
    runner.model._plan = lambda batch, state, kv, low: SecondTokenPlan(
        runner.config, batch, kv.page_size, state.window_ring, state.tail_ring, low
    )


def no_lag(runner: DirectRunner) -> None:
    def forward(self: DecoderLayer, residual, pre, context):
        own, post, mix = self.hc_attn.coefficients(residual)
        residual = self.ops.hc_expand(self.attention.attend(self.attention_input(residual, own), context), residual, post, mix)
        own, post, mix = self.hc_ffn.coefficients(residual)
        x = self.ops.rms_norm(self.ops.hc_collapse(residual, own, self.dtype), self.ffn_norm, self.eps, self.dtype)
        return self.ops.hc_expand(self.moe.forward(x), residual, post, mix), own

    for layer in runner.model.layers:
        layer.forward = forward.__get__(layer)


MUTATIONS: dict[str, Callable[[DirectRunner], None]] = {
    "no candidate restriction": config_change(candidate_source_layer_id=None),
    "top-k one more": config_change(index_topk=17),
    "top-k one less": config_change(index_topk=15),
    "window one more": config_change(sliding_window=17),
    "window one less": config_change(sliding_window=15),
    "2 Sinkhorn iterations": config_change(hc_sinkhorn_iters=2),
    "no sink": op_change("sparse_attention", no_sink),
    "no router bias": op_change("route", no_bias),
    "uniform pooling gate": uniform_pooling,
    "Engram ignored": no_engram,
    "no output un-rotation": op_change("rotate", no_inverse),
    "group rotated at its second token": second_token,
    "wrong base": config_change(compress_rope_theta=10000),
    "no YaRN": config_change(rope_scaling=None),
    "no routing scale": config_change(routed_scaling_factor=1.0),
    "clamp 1 instead of 10": config_change(swiglu_limit=1.0),
    "hyper-connections without lag": no_lag,
    "transposed mixing matrix": op_change("hc_expand", transposed_mix),
}


def mutated(mutation: Callable[[DirectRunner], None] | None) -> DirectRunner:
    values = getattr(mutation, "values", {})
    name, op = getattr(mutation, "op", (None, None))
    ops = dataclasses.replace(OPS, **{name: op}) if name else OPS
    runner = DirectRunner(GOLDEN / "mini-s1" / "checkpoint", tokens=160, num_sequences=1, ops=ops, config_changes=values)
    if mutation is not None and not values and not name:
        mutation(runner)
    return runner


def error_of(runner: DirectRunner) -> float:
    golden = Golden("mini-s1")
    logits = runner.sequence(0).extend(golden["p133.prompt"].tolist())
    return (logits - golden["p133.logits"]).abs().max().item()


def test_without_a_mutation_the_golden_logits_are_met():
    assert error_of(mutated(None)) < TOLERANCE


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_golden_test_notices(name):
    assert error_of(mutated(MUTATIONS[name])) > 100 * TOLERANCE
