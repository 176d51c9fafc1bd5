"""The files of a checkpoint: which tensor lies where, checked against the specification before anything is allocated."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.errors import ConfigError
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.models.deepseek_v41.tensor_spec import TensorSpec, tensor_specs, vision_specs

INDEX = "model.safetensors.index.json"
PREFIX = "model."
MAX_HEADER_BYTES = 1 << 28
DTYPE_BYTES = {"F8_E4M3": 1, "I8": 1, "U8": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "BOOL": 1, "F8_E5M2": 1}


@dataclass(frozen=True)
class TensorLocation:
    """Bytes `start`..`stop` of `file` hold the tensor."""

    file: Path
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointFiles:
    """Locations of all wanted tensors by canonical name (no `model.` prefix), and what else lies in the shards."""

    tensors: Mapping[str, TensorLocation]
    specs: Mapping[str, TensorSpec]
    total_bytes: int


def check_checkpoint(path: Path | str, config: DeepseekV41Config) -> CheckpointFiles:
    """Locate and check every tensor. Reads headers only; raises ConfigError naming tensor, expected and found."""
    path = Path(path)
    found: dict[str, TensorLocation] = {}
    shards = _shards(path)
    for file, listed in shards.items():
        header = _read_header(file)
        for name, location in header.items():
            if name in found:
                raise ConfigError(f"{name} is in {found[name].file.name} and in {file.name}")
            found[name] = location
        for name in listed:
            if name not in header:
                raise ConfigError(f"{name}: {INDEX} says it is in {file.name}, but that file does not hold it")
    specs = tensor_specs(config)
    _check_tensors(specs, found, required=True)
    _check_tensors(vision_specs(config), found, required=False)
    _refuse_strangers(found)
    return CheckpointFiles({name: found[name] for name in specs}, specs, sum(file.stat().st_size for file in shards))


def _shards(path: Path) -> dict[Path, set[str]]:
    """Shard files with the canonical names that the index expects in each (none are expected without an index)."""
    index = path / INDEX
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"no *.safetensors file in {path}")
        return {file: set() for file in files}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        items = list(weight_map.items())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{INDEX} cannot be read: {type(error).__name__}: {error}") from None
    shards: dict[Path, set[str]] = {}
    seen: dict[str, str] = {}
    for name, file_name in items:
        canonical = name.removeprefix(PREFIX)
        if canonical in seen:
            raise ConfigError(f"{INDEX} lists both {seen[canonical]} and {name}")
        seen[canonical] = name
        shards.setdefault(path / str(file_name), set()).add(canonical)
    for file in shards:
        if not file.is_file() or file.parent.resolve() != path.resolve():
            raise ConfigError(f"{INDEX} names {file.name}, which is not in {path}")
    return shards


def _read_header(file: Path) -> dict[str, TensorLocation]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ConfigError(f"{file.name} is truncated or not safetensors: {size} bytes, header of {length} announced")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError:
            raise ConfigError(f"{file.name} is not safetensors: its header is not JSON") from None
    header.pop("__metadata__", None)
    locations: dict[str, TensorLocation] = {}
    base = 8 + length
    for name, entry in header.items():
        canonical = name.removeprefix(PREFIX)
        if canonical in locations:
            raise ConfigError(f"{file.name} holds {canonical} both with and without the prefix {PREFIX}")
        try:
            begin, end = entry["data_offsets"]
            location = TensorLocation(file, base + int(begin), base + int(end), str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{file.name}: the header entry of {name} is broken") from None
        if location.stop > size:
            raise ConfigError(f"{file.name} is truncated: {name} ends at byte {location.stop}, the file has {size}")
        if begin < 0 or end - begin != DTYPE_BYTES.get(location.dtype, -1) * _product(location.shape):
            raise ConfigError(f"{file.name}: {name} has {end - begin} bytes, which does not fit {location.dtype} {list(location.shape)}")
        locations[canonical] = location
    return locations


def _check_tensors(specs: Mapping[str, TensorSpec], found: Mapping[str, TensorLocation], *, required: bool) -> None:
    for name, spec in specs.items():
        location = found.get(name)
        if location is None:
            if required:
                raise ConfigError(f"{name} is missing: expected {spec.dtype} {list(spec.shape)} in the checkpoint")
            continue
        if (location.dtype, location.shape) != (spec.dtype, spec.shape):
            raise ConfigError(
                f"{name} expected {spec.dtype} {list(spec.shape)}, found {location.dtype} {list(location.shape)} in {location.file.name}"
            )


def _refuse_strangers(found: Mapping[str, TensorLocation]) -> None:
    """Norms that V4.1 folds into hc_*_fn: a checkpoint that still has them would be run wrongly (model.md §2.2)."""
    for name in found:
        last = name.rsplit(".", 1)[-1] if not name.endswith(".weight") else name.rsplit(".", 2)[-2]
        if (last.startswith("hc_") and last.endswith("_norm")) or last.startswith("hc_head"):
            raise ConfigError(f"{name} is not part of V4.1: expected its gain folded into hc_*_fn")


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for n in shape:
        result *= n
    return result


def drop_from_page_cache(file: Path) -> None:
    """Tell the kernel that a file's pages will not be read again; a hint, only where it exists."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
