"""Small checkpoints for tests, whole and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from random_checkpoint import write_checkpoint
from sglang.srt.errors import ConfigError

Header = dict[str, Any]


def nano(path: Path, **options: Any) -> Path:
    """A fresh nano checkpoint; options as of write_checkpoint."""
    return write_checkpoint(path, "nano", **options)


def copy_of(checkpoint: Path, path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(checkpoint, path)
    return path


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file in place."""
    value = json.loads(file.read_text(encoding="utf-8"))
    change(value)
    file.write_text(json.dumps(value), encoding="utf-8")


def read_shard(file: Path) -> tuple[Header, bytes]:
    """Header and data of a safetensors file."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def write_shard(file: Path, header: Header, data: bytes) -> None:
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def edit_header(file: Path, change: Callable[[Header], Any]) -> None:
    """Change a shard's header; its data stays."""
    header, data = read_shard(file)
    change(header)
    write_shard(file, header, data)


def rename(names: dict[str, Any], old: str, new: str) -> None:
    names[new] = names.pop(old)


def refusal(check: Callable[..., Any], *args: Any) -> str | None:
    """The message of the ConfigError that `check` raises, None if it raises none; anything else it raises passes through."""
    try:
        check(*args)
    except ConfigError as error:
        return str(error)
    return None
