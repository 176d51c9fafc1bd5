"""The files of a checkpoint: which tensor lies where, checked against the specification before anything is allocated."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.errors import ConfigError
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.models.deepseek_v41.tensor_spec import TensorSpec, tensor_specs, vision_specs

INDEX = "model.safetensors.index.json"
PREFIX = "model."
MAX_HEADER_BYTES = 1 << 28
ONE_BYTE = ("F8_E4M3", "F8_E8M0", "F8_E5M2", "I8", "U8", "BOOL")
DTYPE_BYTES = (
    dict.fromkeys(ONE_BYTE, 1) | dict.fromkeys(("BF16", "F16", "I16"), 2) | dict.fromkeys(("F32", "I32"), 4) | {"F64": 8, "I64": 8}
)

OPTIONAL_PARTS = ("mtp.", "vision.", "aligner.")
"""A configuration may leave these parts out (no draft stages, no vision) while the files still hold them."""

FOLDED = re.compile(r"hc_\w*_norm|hc_head")
"""Norm gains that V4.1 folds into hc_*_fn, and the collapse of V4 that it does not have (model.md §2.2)."""


class TensorLocation(NamedTuple):
    """Bytes `start`..`stop` of `file` hold the tensor."""

    file: Path
    start: int
    stop: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointFiles:
    """Locations by canonical name (no `model.` prefix): text and draft tensors, all of them; vision tensors, those that exist."""

    tensors: Mapping[str, TensorLocation]
    specs: Mapping[str, TensorSpec]
    vision: Mapping[str, TensorSpec]
    shards: tuple[Path, ...]
    total_bytes: int  # of the shard files


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
    specs, optional = tensor_specs(config), vision_specs(config)
    _refuse_strangers(found, specs.keys() | optional.keys())
    _check_tensors(specs, found, required=True)
    _check_tensors(optional, found, required=False)
    return CheckpointFiles(
        tensors={name: found[name] for name in specs},
        specs=specs,
        vision={name: spec for name, spec in optional.items() if name in found},
        shards=tuple(shards),
        total_bytes=sum(file.stat().st_size for file in shards),
    )


def _shards(path: Path) -> dict[Path, set[str]]:
    """Shard files with the canonical names that the index expects in each (none are expected without an index)."""
    index = path / INDEX
    if not index.is_file():
        files = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("."))
        if not files:
            raise ConfigError(f"no *.safetensors file in {path}")
        return {file: set() for file in files}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        items = list(weight_map.items())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{INDEX} cannot be read: {type(error).__name__}: {error}") from None
    listed: dict[str, set[str]] = {}
    seen: dict[str, str] = {}
    for name, file_name in items:
        canonical = name.removeprefix(PREFIX)
        if canonical in seen:
            raise ConfigError(f"{INDEX} lists both {seen[canonical]} and {name}")
        seen[canonical] = name
        listed.setdefault(str(file_name), set()).add(canonical)
    shards = {path / file_name: names for file_name, names in sorted(listed.items())}
    for file in shards:
        if not file.is_file() or file.parent.resolve() != path.resolve():
            raise ConfigError(f"{INDEX} names {os.path.relpath(file, path)}, which is not in {path}")
    return shards


def _read_header(file: Path) -> dict[str, TensorLocation]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ConfigError(f"{file.name} is truncated or not safetensors: {size} bytes, header of {length} announced")
        try:
            header: Any = json.loads(stream.read(length))
        except ValueError:
            raise ConfigError(f"{file.name} is not safetensors: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{file.name} is not safetensors: its header is not a JSON object")
    header.pop("__metadata__", None)
    locations: dict[str, TensorLocation] = {}
    base = 8 + length
    for name, entry in header.items():
        canonical = name.removeprefix(PREFIX)
        if canonical in locations:
            raise ConfigError(f"{file.name} holds {canonical} both with and without the prefix {PREFIX}")
        try:
            begin, end = map(int, entry["data_offsets"])
            location = TensorLocation(file, base + begin, base + end, str(entry["dtype"]), tuple(map(int, entry["shape"])))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ConfigError(f"{file.name}: the header entry of {name} is broken") from None
        if location.stop > size:
            raise ConfigError(f"{file.name} is truncated: {name} ends at byte {location.stop}, the file has {size}")
        if begin < 0 or end - begin != DTYPE_BYTES.get(location.dtype, -1) * math.prod(location.shape):
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


def _refuse_strangers(found: Mapping[str, TensorLocation], known: Collection[str]) -> None:
    """A tensor that the configuration does not explain means that one of the two is wrong, and the model would run wrongly."""
    strangers = [name for name in found if name not in known and not name.startswith(OPTIONAL_PARTS)]
    if not strangers:
        return
    name = min(strangers, key=lambda name: (FOLDED.search(name) is None, name))
    if FOLDED.search(name):
        raise ConfigError(f"{name} is not part of V4.1: expected its gain folded into hc_*_fn, found it in {found[name].file.name}")
    others = f" (and {len(strangers) - 1} more)" if len(strangers) > 1 else ""
    raise ConfigError(f"{name}{others}: found in {found[name].file.name}, expected no such tensor for this config.json")
