"""Global KV: compressed latents and index keys of the source layers, in pages of tokens (model.md §12.1).

One page is one contiguous run of bytes over all source layers, so that copying, checksumming or sending a page is one
operation. Inside a page each source layer has its latents, then its index keys.
"""

from __future__ import annotations

import torch

from sglang.srt.kernels.cache_view import CacheView, EntryFormat, index_format, latent_format
from sglang.srt.mem_cache.memory import zeroed_memory
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config


class GlobalKVPool:
    """`num_pages` pages of `page_size` tokens; a source of ratio r has page_size / r entries in each."""

    def __init__(self, config: DeepseekV41Config, num_pages: int, page_size: int, cache_dtype: str, device: torch.device):
        self.num_pages = num_pages
        self.page_size = page_size
        self.latent_format: EntryFormat = latent_format(config.head_dim, cache_dtype)
        self.index_format: EntryFormat = index_format(config.index_head_dim, cache_dtype)
        entries = {layer: page_size // config.layer_ratio(layer) for layer in config.kv_source_layer_ids}
        self.page_bytes = _aligned(sum(n * (self.latent_format.entry_bytes + self.index_format.entry_bytes) for n in entries.values()))
        self.memory = zeroed_memory(num_pages, self.page_bytes, device)
        self.latents: dict[int, CacheView] = {}
        self.index_keys: dict[int, CacheView] = {}
        offset = 0
        for layer, count in entries.items():
            for views, fmt in ((self.latents, self.latent_format), (self.index_keys, self.index_format)):
                size = count * fmt.entry_bytes
                views[layer] = CacheView.over(self.memory[:, offset : offset + size], count, fmt)
                offset += size

    def copy_page(self, src: int, dst: int) -> None:
        self.memory[dst] = self.memory[src]

    @staticmethod
    def bytes_per_page(config: DeepseekV41Config, page_size: int, cache_dtype: str) -> int:
        """Size of one page, before any memory exists."""
        entry = latent_format(config.head_dim, cache_dtype).entry_bytes + index_format(config.index_head_dim, cache_dtype).entry_bytes
        return _aligned(sum(page_size // config.layer_ratio(layer) * entry for layer in config.kv_source_layer_ids))


def _aligned(size: int) -> int:
    """Up to a multiple of 16, so that every dtype can be viewed in every page."""
    return (size + 15) // 16 * 16
