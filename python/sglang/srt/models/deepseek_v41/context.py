"""What the layers of one forward share (model.md §12.3), and the memory they work on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang.srt.models.deepseek_v41.plan import ForwardPlan

if TYPE_CHECKING:  # the pools know the model's shapes; the model only uses what it is handed
    from sglang.srt.mem_cache.global_kv_pool import GlobalKVPool
    from sglang.srt.mem_cache.state_pool import StatePool


@dataclass
class Selection:
    """Compressed latents chosen by the last index source, per row: where they are in the pages of their KV source."""

    page: torch.Tensor  # int64 [T, index_topk], -1 behind the last
    entry: torch.Tensor  # int64 [T, index_topk]

    @staticmethod
    def nothing(rows: torch.Tensor) -> Selection:
        """For layers that see their window only: no columns, on the device of `rows` [T, ...]."""
        none = torch.empty(rows.shape[0], 0, dtype=torch.int64, device=rows.device)
        return Selection(none, none)


@dataclass
class ForwardContext:
    """Lives for one forward. `selection` and `candidates` are written by index source layers and read by those after."""

    plan: ForwardPlan
    state: StatePool
    kv: GlobalKVPool
    selection: Selection = field(default_factory=lambda: Selection.nothing(torch.empty(0)))
    candidates: list[list[torch.Tensor]] = field(default_factory=list)  # per request, per row block: bool [rows, groups]
