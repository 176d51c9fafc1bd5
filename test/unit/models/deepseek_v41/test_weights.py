"""Weights in memory: the file's bytes, in the file's precision, and no more of them than needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from harness.checkpoints import copy_of, edit_header, nano
from harness.direct import CHECKPOINTS, GOLDEN
from random_checkpoint import PRESETS, write_checkpoint
from sglang.srt.errors import ConfigError
from sglang.srt.models.deepseek_v41.config import load_config
from sglang.srt.models.deepseek_v41.weights import Weights, load_weights

MEMORY_FACTOR = 1.3


def load(path: Path, **options) -> Weights:
    return load_weights(path, load_config(path), **options)


@pytest.fixture(scope="module")
def mini() -> Weights:
    return load(GOLDEN / "mini-s1" / "checkpoint")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_tensor_has_the_bytes_of_the_file(name):
    """Against the safetensors library, which shares no code with the loader."""
    path = GOLDEN / name / "checkpoint"
    weights = load(path)
    with safe_open(path / "model.safetensors", "pt") as file:
        for tensor_name in weights.names():
            expected, found = file.get_tensor(tensor_name), weights.tensor(tensor_name)
            assert found.shape == expected.shape
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), tensor_name
            if expected.dtype in (torch.bfloat16, torch.float32):
                assert found.dtype == expected.dtype
        left_out = set(file.keys()) - set(weights.names())
    assert {name.split(".")[0].split("_")[0] for name in left_out if "engram" not in name} == {"vision", "aligner", "image"}


def test_tensors_that_must_stay_float32_do(mini):
    for name in ("hc_attn_fn", "hc_ffn_base", "hc_ffn_scale", "attn.attn_sink", "ffn.gate.bias", "ffn.gate.bias_vl"):
        assert mini.tensor(f"layers.0.{name}").dtype == torch.float32


def test_linear_pairs_a_matrix_with_its_scales(mini):
    fp8 = mini.linear("layers.2.attn.wq_b")
    assert (fp8.kind, fp8.out_features, fp8.in_features, fp8.data.dtype, fp8.scale.dtype) == ("fp8", 256, 64, torch.uint8, torch.uint8)
    assert fp8.scale.shape == (8, 2)
    fp4 = mini.linear("layers.2.ffn.experts.7.w2")
    assert (fp4.kind, fp4.out_features, fp4.in_features, tuple(fp4.data.shape)) == ("fp4", 128, 64, (128, 32))
    assert fp4.scale.shape == (128, 2)
    dense = mini.linear("layers.2.ffn.gate")
    assert (dense.kind, dense.scale, dense.data.dtype, dense.in_features) == ("dense", None, torch.bfloat16, 128)


def test_engram_rows_are_dequantised_and_rounded_to_bfloat16(mini):
    with safe_open(GOLDEN / "mini-s1" / "checkpoint" / "model.safetensors", "pt") as file:
        codes, scale = (file.get_tensor(f"layers.4.engram.embed.{part}") for part in ("weight", "scale"))
    expected = (codes.float() * scale.float().repeat_interleave(32, dim=1)).bfloat16().float()
    rows = torch.tensor([[0, 1551], [7, 7], [800, 3]])
    found = mini.engram_table(4).lookup(rows)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected[rows])


def test_engram_tables_cannot_be_written(mini):
    with pytest.raises(ValueError, match="read-only"):
        mini.engram_table(1).codes[0] = 0


def test_shards_and_prefix_give_the_same_weights(tmp_path):
    plain = load(nano(tmp_path / "plain"))
    other = load(nano(tmp_path / "other", shards=4, prefix=True))
    assert plain.names() != [] and sorted(plain.names()) == sorted(other.names())
    for name in plain.names():
        assert torch.equal(plain.tensor(name), other.tensor(name))
    rows = torch.arange(100)
    assert torch.equal(plain.engram_table(1).lookup(rows), other.engram_table(1).lookup(rows))


def test_progress_rises_to_one(tmp_path):
    shares: list[float] = []
    load(nano(tmp_path / "nano", shards=2), progress=lambda _, share: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_damaged_checkpoint_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    path = copy_of(nano(tmp_path / "nano"), tmp_path / "damaged")
    edit_header(path / "model.safetensors", lambda header: header.pop("norm.weight"))
    (path / "model.safetensors.index.json").unlink()
    monkeypatch.setattr("sglang.srt.models.deepseek_v41.weights._read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ConfigError, match=r"norm\.weight is missing"):
        load(path)


MEASURE = """
import json, sys
import numpy, tokenizers, torch
from sglang.srt.models.deepseek_v41.config import load_config
from sglang.srt.models.deepseek_v41.weights import load_weights

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def mapped_rss():
    total, inside = 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            inside = line.rstrip().endswith(".safetensors")
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total

before = status("VmHWM")
config = load_config(sys.argv[1])
weights = load_weights(sys.argv[1], config)
figures = {"peak": status("VmHWM") - before, "mapped": mapped_rss()}
weights.engram_table(config.engram_layer_ids[0]).lookup(torch.tensor([5]))
figures["mapped_after_lookup"] = mapped_rss()
print(json.dumps(figures))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="memory is measured through /proc")
def test_loading_needs_little_more_memory_than_the_file_and_no_engram_page(tmp_path):
    changes = {"n_routed_experts": 8, "engram_vocab_size": 50_000}  # 60 MB, of which 20 MB are tables
    path = write_checkpoint(tmp_path / "half", {**PRESETS["100m"].text, **changes}, tokenizer=PRESETS["100m"].tokenizer)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    figures = json.loads(done.stdout)
    assert figures["peak"] <= MEMORY_FACTOR * size
    assert figures["mapped"] == 0
    # One row and its scale. The kernel may map what lies around it in the page cache, at most 2 MiB each.
    assert 0 < figures["mapped_after_lookup"] < 5 * 2**20
