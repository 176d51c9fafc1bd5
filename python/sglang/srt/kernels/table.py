"""The table of operations: what the model calls, and per backend who does it.

Contract of every entry, on every backend:
- A row's result is a function of that row's inputs and the weights, bit for bit: not of the number of rows, their order,
  the number of threads, or what the neighbours are.
- Inputs may be bfloat16 or float32; sums are at least float32; a result is rounded once, to the dtype asked for.
- Orders of summation that a contract names (experts ascending, streams ascending, keys in list order) are part of it;
  others are the backend's own, but fixed.

Shapes, dtypes and formulas stand in the docstrings of the reference, `kernels/torch_backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from sglang.srt.errors import ConfigError
from sglang.srt.kernels import torch_backend as reference


@dataclass(frozen=True)
class KernelTable:
    """One implementation per operation."""

    linear: Callable = reference.linear.linear
    grouped_linear: Callable = reference.linear.grouped_linear
    rms_norm: Callable = reference.norm.rms_norm
    hc_coefficients: Callable = reference.hyper_connections.coefficients
    hc_collapse: Callable = reference.hyper_connections.collapse
    hc_expand: Callable = reference.hyper_connections.expand
    rotate: Callable = reference.rotary.rotate
    sparse_attention: Callable = reference.attention.sparse_attention
    index_scores: Callable = reference.indexer.index_scores
    select_top: Callable = reference.indexer.select_top
    candidate_mask: Callable = reference.indexer.candidate_mask
    route: Callable = reference.moe.route
    mixture: Callable = reference.moe.mixture
    engram_gate: Callable = reference.engram.engram_gate


OPERATIONS = tuple(f.name for f in fields(KernelTable))

BACKENDS: dict[str, Callable[[], KernelTable]] = {"torch": KernelTable}
"""Complete tables by name. `torch` is the reference: always there, on every device."""


def load_kernels(backend: str) -> KernelTable:
    """The table of a backend; `auto` takes the fastest that is available. Raises ConfigError for an unknown name."""
    name = "torch" if backend == "auto" else backend
    if name not in BACKENDS:
        raise ConfigError(f"--kernel-backend {backend}: expected one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]()
