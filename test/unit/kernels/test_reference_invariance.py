"""Every operation of the reference: a row's bits do not depend on how many rows there are, or where it stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang.srt.kernels import formats
from sglang.srt.kernels.cache_view import CacheView, latent_format
from sglang.srt.kernels.linear_weight import LinearWeight
from sglang.srt.kernels.table import KernelTable
from sglang.srt.kernels.torch_backend.moe import ExpertWeights

OPS = KernelTable()
ROWS = 37
COUNTS = (1, 2, 3, 5, 8, 15, 16, 17, 36)
D, H, HEADS, DIM, WINDOW, TOPK = 128, 4, 4, 64, 16, 16


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fp8(rows: int, columns: int) -> LinearWeight:
    codes = formats.encode_e4m3(randn(rows, columns, seed=1) * 8)
    scale = torch.randint(118, 124, (-(-rows // 32), -(-columns // 32)), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    return LinearWeight("fp8", codes, scale, rows, columns)


def fp4(rows: int, columns: int, seed: int = 3) -> LinearWeight:
    packed, scale = formats.quantize_e2m1_e8m0(randn(rows, columns, seed=seed) * 0.1)
    return LinearWeight("fp4", packed, scale, rows, columns)


EXPERTS = [ExpertWeights(fp4(64, D, 10 + e), fp4(64, D, 30 + e), fp4(D, 64, 50 + e)) for e in range(6)]
SHARED = ExpertWeights(fp8(64, D), fp8(64, D), fp8(D, 64))
GATE = LinearWeight.dense(randn(6, D, seed=5).bfloat16())
LATENT = latent_format(DIM, "auto")
MEMORY = torch.zeros(8, 16 * LATENT.entry_bytes, dtype=torch.uint8)
LATENTS = CacheView.over(MEMORY, 16, LATENT)
LATENTS.store(torch.arange(128) // 16, torch.arange(128) % 16, randn(128, DIM, seed=6))
WINDOW_INDEX = torch.randint(-1, 60, (ROWS, WINDOW), generator=torch.Generator().manual_seed(7))
SELECTED = torch.randint(-1, 8, (ROWS, TOPK), generator=torch.Generator().manual_seed(8))
KEYS = randn(300, 32, seed=9)
ANGLE = randn(ROWS, 8, seed=10)


def cases(dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]:
    """Operation by name, as a function of row numbers."""
    x = randn(ROWS, D, seed=20, dtype=dtype)
    residual = randn(ROWS, H, D, seed=21, dtype=dtype)
    q = randn(ROWS, HEADS, DIM, seed=22, dtype=dtype)
    mix = torch.rand(ROWS, H, H, generator=torch.Generator().manual_seed(23))
    post = torch.rand(ROWS, H, generator=torch.Generator().manual_seed(24))
    index_q, index_w = randn(ROWS, 16, 32, seed=25), randn(ROWS, 16, seed=26)
    visible = torch.arange(ROWS) * 8 + 1
    scores = OPS.index_scores(index_q, KEYS, index_w).bfloat16().float()
    experts, weights = OPS.route(x, GATE, randn(6, seed=27), 3, 1.5)
    embedded = randn(ROWS, 192, seed=28).bfloat16().float()
    hc = (LinearWeight.dense(randn(24, H * D, seed=29)), randn(3, seed=30), randn(24, seed=31))

    def attention(rows: torch.Tensor) -> torch.Tensor:
        page, entry = SELECTED[rows], SELECTED[rows] % 16
        return OPS.sparse_attention(q[rows], randn(60, DIM, seed=32), WINDOW_INDEX[rows], LATENTS, page, entry, randn(HEADS, seed=33))

    gate_args = (fp8((H + 1) * D, 192), randn(H, D, seed=34).bfloat16(), randn(H, D, seed=35).bfloat16(), None)
    return {
        "linear dense": lambda r: (OPS.linear(x[r], GATE),),
        "linear fp8": lambda r: (OPS.linear(x[r], fp8(1024, D), quantise_input=True, out_dtype=dtype),),
        "linear fp4": lambda r: (OPS.linear(x[r], fp4(512, D)),),
        "linear many blocks": lambda r: (OPS.linear(x[r], LinearWeight.dense(randn(9000, D, seed=36))),),
        "grouped linear": lambda r: (OPS.grouped_linear(x[r].view(-1, 2, D // 2), fp8(128, D // 2), out_dtype=dtype),),
        "rms norm": lambda r: (OPS.rms_norm(x[r], randn(D, seed=37), 1e-20, dtype),),
        "hc coefficients": lambda r: OPS.hc_coefficients(residual[r], *hc, rms_eps=1e-20, hc_eps=1e-6, iterations=20),
        "hc collapse": lambda r: (OPS.hc_collapse(residual[r], post[r], dtype),),
        "hc expand": lambda r: (OPS.hc_expand(x[r], residual[r], post[r], mix[r]),),
        "rotate": lambda r: (OPS.rotate(q[r], torch.cos(ANGLE[r]), torch.sin(ANGLE[r])),),
        "sparse attention": lambda r: (attention(r),),
        "index scores": lambda r: (OPS.index_scores(index_q[r], KEYS, index_w[r]),),
        "select top": lambda r: (OPS.select_top(scores[r], visible[r], TOPK),),
        "candidate mask": lambda r: (OPS.candidate_mask(scores[r], visible[r], 8, 8),),
        "route": lambda r: OPS.route(x[r], GATE, randn(6, seed=27), 3, 1.5),
        "mixture": lambda r: (
            OPS.mixture(x[r], experts[r], weights[r], EXPERTS, SHARED, limit=10.0, quantise_input=True, out_dtype=dtype),
        ),
        "engram gate": lambda r: (OPS.engram_gate(residual[r], embedded[r], *gate_args, eps=1e-20, quantise_input=True),),
    }


NAMES = list(cases(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_know_each_other(name, dtype):
    run = cases(dtype)[name]
    whole = run(torch.arange(ROWS))
    for count in COUNTS:
        for start in {0, 1, ROWS // 2, ROWS - count}:
            rows = torch.arange(start, min(start + count, ROWS))
            for part, all_rows in zip(run(rows), whole):
                assert torch.equal(part, all_rows[rows]), (count, start)
    shuffled = torch.randperm(ROWS, generator=torch.Generator().manual_seed(40))
    for part, all_rows in zip(run(shuffled), whole):
        assert torch.equal(part, all_rows[shuffled]), "order of rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_number_of_threads_does_not_matter(name, dtype):
    run, threads = cases(dtype)[name], torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(torch.arange(ROWS))
        torch.set_num_threads(2)
        two = run(torch.arange(ROWS))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, two))


def test_hyper_connections_of_many_rows():
    """Sums over the short axes of a long tensor take other code paths in torch; they must give the same bits."""
    residual = randn(1500, H, D, seed=50)
    hc = (LinearWeight.dense(randn(24, H * D, seed=29)), randn(3, seed=30), randn(24, seed=31))
    whole = OPS.hc_coefficients(residual, *hc, rms_eps=1e-20, hc_eps=1e-6, iterations=20)
    for rows in (slice(0, 1), slice(3, 8), slice(700, 1499)):
        part = OPS.hc_coefficients(residual[rows], *hc, rms_eps=1e-20, hc_eps=1e-6, iterations=20)
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole))
