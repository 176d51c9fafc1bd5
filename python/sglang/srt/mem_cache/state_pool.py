"""Request state: everything of a sequence that does not grow with it (model.md §12.2).

One slot is one contiguous run of bytes: the window rings of all layers and draft stages, then the compressor tails of the
ratio-2 source layers. Rings are keyed by position (position mod ring size), so rolling back or resuming a few positions
earlier needs no copying: what lies beyond the committed length is rewritten before anyone reads it.
"""

from __future__ import annotations

import torch

from sglang.srt.kernels.cache_view import CacheView, EntryFormat, window_format
from sglang.srt.mem_cache.memory import zeroed_memory
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config


def max_backtracking(config: DeepseekV41Config) -> int:
    """Positions a state can be taken back: one draft block and its bonus token (dspark.md §2.6)."""
    return config.dspark_block_size + 1


def tail_ring(config: DeepseekV41Config) -> int:
    """Positions of a ratio-2 compressor's ring: the open pair, and as many before it as a rollback may need."""
    return 2 + max_backtracking(config) - 1


class StatePool:
    """`num_slots` request states. window[layer]: CacheView [slots, window_ring]; tail[layer]: float32 [slots, tail_ring, 2, D]."""

    def __init__(self, config: DeepseekV41Config, num_slots: int, cache_dtype: str, device: torch.device):
        self.num_slots = num_slots
        self.window_ring = config.sliding_window + max_backtracking(config)
        self.tail_ring = tail_ring(config)
        self.window_format: EntryFormat = window_format(config.head_dim, cache_dtype)
        windows, tails, self.slot_bytes = _layout(config, cache_dtype)
        self.memory = zeroed_memory(num_slots, self.slot_bytes, device)
        self.window = [CacheView.over(self.memory[:, start:stop], self.window_ring, self.window_format) for start, stop in windows]
        self.tail = {
            layer: self.memory[:, start:stop].view(torch.float32).unflatten(1, (self.tail_ring, 2, config.head_dim))
            for layer, (start, stop) in tails.items()
        }

    def copy_slot(self, src: int, dst: int) -> None:
        self.memory[dst] = self.memory[src]

    def reset_slot(self, slot: int) -> None:
        """Nothing of an earlier request is ever read (positions before 0 are masked); zeroing makes states comparable."""
        self.memory[slot] = 0

    @staticmethod
    def bytes_per_slot(config: DeepseekV41Config, cache_dtype: str) -> int:
        """Size of one state, before any memory exists."""
        return _layout(config, cache_dtype)[2]


def _layout(config: DeepseekV41Config, cache_dtype: str) -> tuple[list[tuple[int, int]], dict[int, tuple[int, int]], int]:
    """Byte ranges in a slot: windows by layer (then draft stages), tails by ratio-2 source layer; and the slot's size."""
    window_bytes = (config.sliding_window + max_backtracking(config)) * window_format(config.head_dim, cache_dtype).entry_bytes
    tail_bytes = tail_ring(config) * 2 * config.head_dim * 4
    offset, windows, tails = 0, [], {}
    for _ in range(config.num_hidden_layers + config.num_nextn_predict_layers):
        windows.append((offset, offset + window_bytes))
        offset = _aligned(offset + window_bytes)
    for layer in config.kv_source_layer_ids:
        if config.layer_ratio(layer) == 2:
            tails[layer] = (offset, offset + tail_bytes)
            offset = _aligned(offset + tail_bytes)
    return windows, tails, _aligned(offset)


def _aligned(size: int) -> int:
    """Up to a multiple of 16, so that every dtype can be viewed at every offset."""
    return (size + 15) // 16 * 16
