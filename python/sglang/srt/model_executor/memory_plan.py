"""How many pages and slots a worker has, decided before any of that memory is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from sglang.srt.errors import ConfigError
from sglang.srt.mem_cache.global_kv_pool import GlobalKVPool
from sglang.srt.mem_cache.state_pool import StatePool
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.server_args import ServerArgs

MAX_CONTEXTS = 64
"""Full contexts the global pool holds at most by default: more would only be memory that a laptop misses."""


@dataclass(frozen=True)
class MemoryPlan:
    num_pages: int
    num_slots: int


def plan_memory(args: ServerArgs, config: DeepseekV41Config, device: torch.device) -> MemoryPlan:
    """From the flags, or from the memory that is free once weights are loaded.

    Raises ConfigError, with the numbers, if the pools cannot hold one page per running request or do not fit.
    """
    page_bytes = GlobalKVPool.bytes_per_page(config, args.page_size, args.kv_cache_dtype)
    slot_bytes = StatePool.bytes_per_slot(config, args.kv_cache_dtype)
    snapshots = 4 * args.max_running_requests if args.max_snapshots is None else args.max_snapshots
    num_slots = args.max_running_requests + (0 if args.disable_radix_cache else snapshots)
    budget = int(free_bytes(device) * args.mem_fraction_static)
    left = budget - num_slots * slot_bytes
    if args.max_total_tokens is not None:
        num_pages = args.max_total_tokens // args.page_size
        if num_pages < 2:
            raise ConfigError(
                f"--max-total-tokens {args.max_total_tokens} holds {num_pages} pages of {args.page_size} tokens; at least 2 are needed"
            )
    else:
        context = args.context_length or config.max_position_embeddings
        num_pages = min(left // page_bytes, MAX_CONTEXTS * -(-context // args.page_size))
    if num_pages < 2 or num_pages * page_bytes > left:
        raise ConfigError(
            f"pools do not fit: {num_slots} request states of {slot_bytes:,} bytes and {max(num_pages, 2)} pages of {page_bytes:,} bytes, "
            f"but --mem-fraction-static {args.mem_fraction_static} of the free memory is {budget:,} bytes; "
            "lower --max-running-requests, --max-snapshots or --max-total-tokens"
        )
    return MemoryPlan(int(num_pages), num_slots)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated where the pools will live."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
