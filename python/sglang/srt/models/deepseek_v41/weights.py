"""Weights of a checkpoint in memory, in the precision they are stored in (model.md §2).

Ordinary tensors are read into private memory, one by one. Engram tables are mapped: a page of theirs reaches memory when a
row in it is first looked up, and the kernel may drop it again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sglang.srt.kernels.formats import dequant_e4m3_e8m0
from sglang.srt.kernels.linear_weight import LinearWeight
from sglang.srt.models.deepseek_v41.checkpoint_files import CheckpointFiles, TensorLocation, check_checkpoint
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.models.deepseek_v41.tensor_spec import BF16, F32, FP4, FP8, SCALE

TORCH_DTYPES = {FP8: torch.uint8, FP4: torch.uint8, SCALE: torch.uint8, BF16: torch.bfloat16, F32: torch.float32}
Progress = Callable[[str, float], None]
"""Called with a short text and the share done, 0 to 1."""


class EngramTable:
    """Rows of E4M3 codes with one E8M0 scale per 32 features of the row (model.md §2.5), on disk until looked up."""

    def __init__(self, codes: np.ndarray, scale: np.ndarray):
        self.codes = codes  # uint8 [rows, width], read-only map
        self.scale = scale  # uint8 [rows, ceil(width / 32)], read-only map

    def lookup(self, row_ids: torch.Tensor) -> torch.Tensor:
        """float32 [..., width] of int64 rows [...]; values are rounded to bfloat16, as the release does."""
        index = row_ids.numpy()
        codes, scale = torch.from_numpy(self.codes[index]), torch.from_numpy(self.scale[index])
        return dequant_e4m3_e8m0(codes, scale).bfloat16().float()


class Weights:
    """Tensors by name. `linear` pairs a matrix with its scales."""

    def __init__(self, tensors: dict[str, torch.Tensor], kinds: dict[str, str], tables: dict[int, EngramTable]):
        self._tensors = tensors
        self._kinds = kinds  # safetensors dtype by name
        self._tables = tables

    def tensor(self, name: str) -> torch.Tensor:
        """As stored: bfloat16 or float32 (or uint8 codes)."""
        return self._tensors[name]

    def linear(self, name: str) -> LinearWeight:
        """The matrix `name`.weight with its scales, if it has any."""
        data = self._tensors[f"{name}.weight"]
        kind = self._kinds[f"{name}.weight"]
        if kind in (FP8, FP4):
            columns = data.shape[1] * (2 if kind == FP4 else 1)
            return LinearWeight("fp8" if kind == FP8 else "fp4", data, self._tensors[f"{name}.scale"], data.shape[0], columns)
        return LinearWeight.dense(data)

    def engram_table(self, layer: int) -> EngramTable:
        return self._tables[layer]

    def names(self) -> list[str]:
        return list(self._tensors)


def load_weights(
    path: Path | str, config: DeepseekV41Config, device: torch.device | str = "cpu", progress: Progress | None = None
) -> Weights:
    """Check everything, then read text and draft tensors. Raises ConfigError before any tensor is allocated."""
    files = check_checkpoint(path, config)
    tables = {layer: _map_table(files, layer) for layer in config.engram_layer_ids}
    mapped = {f"layers.{layer}.engram.embed.{part}" for layer in config.engram_layer_ids for part in ("weight", "scale")}
    wanted = {name: location for name, location in files.tensors.items() if name not in mapped}
    total, done = sum(location.stop - location.start for location in wanted.values()) or 1, 0
    tensors: dict[str, torch.Tensor] = {}
    # In file order: a disk reads forward, and only one shard is open at a time.
    in_order = sorted(wanted.items(), key=lambda item: (item[1].file, item[1].start))
    stream, opened = None, None
    try:
        for name, location in in_order:
            if opened != location.file:
                if stream is not None:
                    stream.close()
                stream, opened = location.file.open("rb", buffering=0), location.file
            tensors[name] = _read(stream, location).to(device)
            done += location.stop - location.start
            if progress is not None:
                progress("loading weights", done / total)
    finally:
        if stream is not None:
            stream.close()
    return Weights(tensors, {name: spec.dtype for name, spec in files.specs.items()}, tables)


def _read(stream, location: TensorLocation) -> torch.Tensor:
    """Straight into the tensor's own memory, without a mapping or a second copy."""
    buffer = torch.empty(location.stop - location.start, dtype=torch.uint8)
    view = buffer.numpy().data
    stream.seek(location.start)
    filled = 0
    while filled < len(view):
        count = stream.readinto(view[filled:])
        if not count:
            raise OSError(f"{location.file.name} ended while it was being read")
        filled += count
    dtype = TORCH_DTYPES[location.dtype]
    return buffer.view(dtype).view(location.shape)


def _map_table(files: CheckpointFiles, layer: int) -> EngramTable:
    def mapped(part: str) -> np.ndarray:
        location = files.tensors[f"layers.{layer}.engram.embed.{part}"]
        with location.file.open("rb") as stream:
            region = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            # Rows are hashed, so what lies behind a row is not read next: without the hint every look-up would read ahead.
            region.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(region, np.uint8, location.stop - location.start, location.start).reshape(location.shape)

    return EngramTable(mapped("weight"), mapped("scale"))
