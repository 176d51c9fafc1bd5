"""`sglang inspect`: the report's numbers, the tables, and one line for every error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.checkpoints import copy_of, edit_json, nano
from harness.direct import GOLDEN
from sglang.cli import inspect
from sglang.cli.main import main

MINI = GOLDEN / "mini-s1" / "checkpoint"


def test_json_report(capsys):
    assert main(["inspect", str(MINI), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == {"shards": 1, "tensors": 860, "bytes": (MINI / "model.safetensors").stat().st_size}
    assert found["architecture"]["compress_ratios"] == [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0]
    assert found["prefill_layers"] == 5
    assert found["layers"][5] == {
        "layer": 5,
        "ratio": 1,
        "kv_source": 5,
        "index_source": 5,
        "owns": ["kv", "index", "candidates", "draft input"],
    }
    groups = {row["group"]: row for row in found["sizes"]}
    assert groups["routed experts"]["parameters"] == 8 * 8 * 3 * 128 * 64
    assert groups["Engram tables"]["bytes"] == (1362 + 1552) * (32 + 1)
    assert groups["shared experts"]["bytes"] == 8 * 3 * (128 * 64 + 8)
    assert groups["embeddings and head"]["parameters"] == 2 * 512 * 128
    assert groups["total"]["tensors"] == 860
    assert sum(row["bytes"] for name, row in groups.items() if name != "total") == groups["total"]["bytes"]


def test_released_cache_sizes():
    """model.md §12: 890 bytes per token; 43 windows of 134 entries of 528 bytes and three tails."""
    import dataclasses

    from sglang.srt.models.deepseek_v41.config import load_config

    config = dataclasses.replace(load_config(GOLDEN / "deep-s1" / "checkpoint"), head_dim=512, index_head_dim=128, sliding_window=128)
    found = inspect.cache_sizes(config, "auto")
    assert found["bytes_per_token"] == 890
    assert found["bytes_per_request_state"] == 43 * 134 * 528 + 3 * 28_672


def test_tables_name_everything_once(capsys):
    assert main(["inspect", str(MINI)]) == 0
    text = capsys.readouterr().out
    for word in (
        "hidden_size",
        "layer roles",
        "candidates",
        "routed experts",
        "attention",
        "Engram tables",
        "draft",
        "vision",
        "bytes per token",
    ):
        assert word in text


def missing_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def other_tokenizer(path: Path) -> None:
    edit_json(path / "config.json", lambda raw: raw["text_config"].update(engram_compressed_vocab_size=400))


def unknown_model(path: Path) -> None:
    edit_json(path / "config.json", lambda raw: raw.update(model_type="llama"))


def truncated_shard(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    "damage, message",
    [
        (missing_tokenizer, "tokenizer.json not found in"),
        (other_tokenizer, "the tokenizer has 465 Engram token classes"),
        (unknown_model, "model_type expected 'deepseek_v41', found 'llama'"),
        (truncated_shard, "model.safetensors is truncated"),
    ],
)
def test_a_bad_checkpoint_is_one_line_and_exit_code_2(tmp_path, capsys, damage, message):
    path = copy_of(nano(tmp_path / "nano"), tmp_path / "damaged")
    damage(path)
    assert main(["inspect", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_wrong_checkpoint_is_refused_without_loading_torch(tmp_path):
    code = f"import sys; from sglang.cli.main import main; print(main(['inspect', {str(tmp_path)!r}]), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.startswith("error: config.json not found in")


@pytest.mark.parametrize(
    "size, text", [(0, "0 bytes"), (999, "999 bytes"), (1024, "1 KiB"), (648_000_000, "618 MiB"), (510_286_023_000, "475 GiB")]
)
def test_human_sizes(size, text):
    assert inspect.human(size) == text
