"""`sglang inspect CHECKPOINT`: architecture, layer roles, sizes and memory per token, from the headers alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang.srt.errors import ConfigError
from sglang.srt.models.deepseek_v41.checkpoint_files import CheckpointFiles, check_checkpoint
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config, load_config
from sglang.srt.models.deepseek_v41.tensor_spec import TensorSpec

PAGE_SIZE = 64
"""Tokens per page for the figures below; other page sizes differ by rounding only."""

CACHE_DTYPES = ("auto", "bfloat16", "float32")

GROUPS = {
    "routed experts": "FP4, two values per byte",
    "shared experts": "FP8",
    "attention": "FP8; compressors and index keys BF16",
    "other": "routers, hyper-connections, Engram projections, norms",
    "embeddings and head": "BF16",
    "Engram tables": "stay on disk until a row is looked up",
    "draft": "DSpark stages",
    "vision": "tower and aligner",
}

GROUP_BY_PART = {
    ".ffn.experts.": "routed experts",
    ".ffn.shared_experts.": "shared experts",
    ".attn.": "attention",
    ".engram.embed.": "Engram tables",
}


def main(argv: list[str]) -> int:
    """Print the report. Raises ConfigError for a checkpoint that cannot be served."""
    parser = argparse.ArgumentParser(prog="sglang inspect", description="Check a checkpoint and print what it holds; reads headers only.")
    parser.add_argument("checkpoint", help="checkpoint directory in the released format")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = parser.parse_args(argv)
    found = report(Path(args.checkpoint))
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print_report(found, Console())
    return 0


def report(path: Path) -> dict[str, Any]:
    """Everything the command prints, as JSON data. Sizes are bytes."""
    config = load_config(path)
    files = check_checkpoint(path, config)
    _check_tokenizer(path, config)
    return {
        "checkpoint": str(path),
        "files": {"shards": len(files.shards), "tensors": len(files.tensors) + len(files.vision), "bytes": files.total_bytes},
        "architecture": {k: v for k, v in dataclasses.asdict(config).items() if k != "vision"},
        "vision": dataclasses.asdict(config.vision) if config.vision else None,
        "layers": [dataclasses.asdict(role) for role in config.layer_roles()],
        "prefill_layers": config.n_prefill,
        "sizes": sizes(files),
        "cache": [cache_sizes(config, dtype) for dtype in CACHE_DTYPES],
    }


def _check_tokenizer(path: Path, config: DeepseekV41Config) -> None:
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"tokenizer.json not found in {path}; expected it beside the weights")
    if config.engram_layer_ids:
        # Imported only now: a wrong checkpoint is refused before torch has been loaded.
        from sglang.srt.models.deepseek_v41.engram_hash import load_hasher

        load_hasher(config, path)  # refuses a tokenizer that is not this checkpoint's


def sizes(files: CheckpointFiles) -> list[dict[str, Any]]:
    """Parameters and bytes by group, the total last."""
    members: dict[str, list[TensorSpec]] = {group: [] for group in GROUPS}
    for spec in files.specs.values():
        members[group_of(spec)].append(spec)
    members["vision"] += files.vision.values()
    rows = [_size_row(group, specs) for group, specs in members.items() if specs]
    return [*rows, _size_row("total", [spec for specs in members.values() for spec in specs])]


def group_of(spec: TensorSpec) -> str:
    """One of GROUPS."""
    if spec.part == "draft":
        return "draft"
    if spec.name in ("embed.weight", "head.weight"):
        return "embeddings and head"
    return next((group for part, group in GROUP_BY_PART.items() if part in spec.name), "other")


def _size_row(group: str, specs: Iterable[TensorSpec]) -> dict[str, Any]:
    specs = list(specs)
    return {
        "group": group,
        "tensors": len(specs),
        "parameters": sum(spec.num_parameters for spec in specs),
        "bytes": sum(spec.num_bytes for spec in specs),
    }


def cache_sizes(config: DeepseekV41Config, dtype: str) -> dict[str, Any]:
    """What serving adds to the weights, for one --kv-cache-dtype."""
    from sglang.srt.mem_cache.global_kv_pool import GlobalKVPool
    from sglang.srt.mem_cache.state_pool import StatePool

    return {
        "kv_cache_dtype": dtype,
        "bytes_per_token": GlobalKVPool.bytes_per_page(config, PAGE_SIZE, dtype) / PAGE_SIZE,
        "bytes_per_request_state": StatePool.bytes_per_slot(config, dtype),
        "bytes_per_full_context": GlobalKVPool.bytes_per_page(config, PAGE_SIZE, dtype) * -(-config.max_position_embeddings // PAGE_SIZE),
    }


def print_report(found: dict[str, Any], console: Console) -> None:
    """The report as tables."""
    files = found["files"]
    console.print(
        f"{found['checkpoint']}: {files['tensors']:,} tensors in {files['shards']} file(s), {human(files['bytes'])}; "
        "all shapes and formats are as the configuration says",
        soft_wrap=True,
        highlight=False,
    )
    for table in (_architecture_table(found), _layer_table(found), _size_table(found), _cache_table(found)):
        console.print(table)


def _architecture_table(found: dict[str, Any]) -> Table:
    table = Table("key", "value", title="architecture", title_justify="left")
    for key, value in found["architecture"].items():
        table.add_row(key, _short(value))
    if found["vision"]:
        table.add_row("vision", _short(found["vision"]))
    return table


def _layer_table(found: dict[str, Any]) -> Table:
    table = Table("layers", "ratio", "compressed KV from", "selection from", "owns", title="layer roles", title_justify="left")
    for first, last, row in _runs(found["layers"]):
        name = str(first) if first == last else f"{first}-{last}"
        table.add_row(name, str(row["ratio"]), _layer_name(row["kv_source"]), _layer_name(row["index_source"]), ", ".join(row["owns"]))
    table.caption = f"every prompt row runs layers 0-{found['prefill_layers'] - 1}; the rest may be truncated"
    return table


def _size_table(found: dict[str, Any]) -> Table:
    table = Table("group", title="sizes", title_justify="left")
    for heading in ("tensors", "parameters", "bytes"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in found["sizes"]:
        if row["group"] == "total":
            table.add_section()
        table.add_row(row["group"], f"{row['tensors']:,}", f"{row['parameters']:,}", human(row["bytes"]), GROUPS.get(row["group"], ""))
    return table


def _cache_table(found: dict[str, Any]) -> Table:
    context = found["architecture"]["max_position_embeddings"]
    table = Table("--kv-cache-dtype", title="cache", title_justify="left")
    for heading in ("bytes per token", "per request state", f"per context of {context:,}"):
        table.add_column(heading, justify="right")
    for row in found["cache"]:
        table.add_row(
            row["kv_cache_dtype"],
            f"{row['bytes_per_token']:,.1f}".removesuffix(".0"),
            human(row["bytes_per_request_state"]),
            human(row["bytes_per_full_context"]),
        )
    return table


def _runs(layers: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Neighbouring layers with the same role, as (first, last, role)."""
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for row in layers:
        if runs and {**row, "layer": None} == {**runs[-1][2], "layer": None}:
            runs[-1] = (runs[-1][0], row["layer"], runs[-1][2])
        else:
            runs.append((row["layer"], row["layer"], row))
    return runs


def _layer_name(layer: int | None) -> str:
    return "-" if layer is None else str(layer)


def _short(value: Any) -> str:
    """A value on one line; runs of equal list elements as `n x value`."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        parts: list[tuple[Any, int]] = []
        for item in value:
            if parts and parts[-1][0] == item:
                parts[-1] = (item, parts[-1][1] + 1)
            else:
                parts.append((item, 1))
        return ", ".join(str(item) if count == 1 else f"{count} x {item}" for item, count in parts) or "-"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def human(size: int) -> str:
    """Bytes with a binary unit and three digits."""
    amount, units = float(size), ("bytes", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if amount < 1000 or unit == units[-1]:
            break
        amount /= 1024
    return f"{size} bytes" if unit == "bytes" else f"{amount:.3g} {unit}"
