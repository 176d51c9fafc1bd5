"""One cache (a window ring, a compressed latent cache, an index key cache) as addressable entries of some format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.srt.kernels import formats


@dataclass(frozen=True)
class EntryFormat:
    """How one vector of `width` numbers is stored: codes, and scales (of zero width in the plain formats).

    model.md §5.6 fixes the three quantised formats. `paged_split` stores all codes of a page before all its scales.
    """

    name: str
    data_width: int  # elements of data_dtype
    scale_bytes: int
    data_dtype: torch.dtype
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
    decode: Callable[..., torch.Tensor]  # of codes and scales (None in the plain formats)
    paged_split: bool = False

    @property
    def data_bytes(self) -> int:
        return self.data_width * self.data_dtype.itemsize

    @property
    def entry_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes


def window_format(width: int, cache_dtype: str) -> EntryFormat:
    """E4M3 with one E8M0 scale per 32 features."""
    if cache_dtype != "auto":
        return plain_format(width, cache_dtype)
    return EntryFormat("e4m3/e8m0/32", width, width // 32, torch.uint8, formats.quantize_e4m3_e8m0, formats.dequant_e4m3_e8m0)


def latent_format(width: int, cache_dtype: str) -> EntryFormat:
    """E2M1 with one E4M3 scale per 16 features."""
    if cache_dtype != "auto":
        return plain_format(width, cache_dtype)
    return EntryFormat("e2m1/e4m3/16", width // 2, width // 16, torch.uint8, formats.quantize_e2m1_e4m3, formats.dequant_e2m1_e4m3)


def index_format(width: int, cache_dtype: str) -> EntryFormat:
    """E2M1 with one E8M0 scale per 32 features; a page holds all codes, then all scales."""
    if cache_dtype != "auto":
        return plain_format(width, cache_dtype)
    return EntryFormat(
        "e2m1/e8m0/32", width // 2, width // 32, torch.uint8, formats.quantize_e2m1_e8m0, formats.dequant_e2m1_e8m0, paged_split=True
    )


def plain_format(width: int, cache_dtype: str) -> EntryFormat:
    """Numbers as they are, for exact runs."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[cache_dtype]
    return EntryFormat(cache_dtype, width, 0, dtype, lambda x: (x.to(dtype), None), lambda data, _: data.float())


@dataclass(frozen=True)
class CacheView:
    """Entries addressed by (block, entry): page and offset of a paged cache, or slot and ring position of a window."""

    data: torch.Tensor  # [blocks, entries, data_width] of the format's data_dtype
    scale: torch.Tensor | None  # uint8 [blocks, entries, scale_bytes]
    format: EntryFormat

    @staticmethod
    def over(memory: torch.Tensor, entries: int, fmt: EntryFormat) -> CacheView:
        """Lay `entries` entries over each row of uint8 memory [blocks, entries * entry_bytes] (rows may be strided)."""
        if fmt.scale_bytes == 0:
            data = memory.view(fmt.data_dtype).unflatten(1, (entries, fmt.data_width))
            return CacheView(data, None, fmt)
        if fmt.paged_split:
            split = entries * fmt.data_bytes
            data = memory[:, :split].unflatten(1, (entries, fmt.data_bytes))
            return CacheView(data, memory[:, split:].unflatten(1, (entries, fmt.scale_bytes)), fmt)
        both = memory.unflatten(1, (entries, fmt.entry_bytes))
        return CacheView(both[..., : fmt.data_bytes], both[..., fmt.data_bytes :], fmt)

    def store(self, block: torch.Tensor, entry: torch.Tensor, values: torch.Tensor) -> None:
        """Encode values [n, width] into entries (block[i], entry[i]); int64 [n] each, no pair twice."""
        self.store_codes(block, entry, *self.format.encode(values.float().contiguous()))

    def store_codes(self, block: torch.Tensor, entry: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        self.data[block, entry] = data
        if self.scale is not None and scale is not None:
            self.scale[block, entry] = scale

    def load_codes(self, block: torch.Tensor, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.data[block, entry], None if self.scale is None else self.scale[block, entry]

    def load(self, block: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        """float32 [..., width] of the entries at index tensors of any equal shape."""
        return self.format.decode(*self.load_codes(block, entry))
