"""Damaged checkpoints: each is refused with one line that names what is wrong, before any tensor is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from harness.checkpoints import copy_of, edit_header, edit_json, nano, read_shard, refusal, rename, write_shard
from sglang.srt.errors import ConfigError
from sglang.srt.models.deepseek_v41.checkpoint_files import INDEX, check_checkpoint
from sglang.srt.models.deepseek_v41.config import load_config

SHARD = "model.safetensors"
WQ_A = "layers.0.attn.wq_a.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return nano(tmp_path_factory.mktemp("whole") / "nano")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    return nano(tmp_path_factory.mktemp("sharded") / "nano", shards=3)


def truncate(file: Path, size: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(size)


def in_header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda path: edit_header(path / SHARD, change)


def in_index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda path: edit_json(path / INDEX, lambda index: change(index["weight_map"]))


def without(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        in_header(lambda header: header.pop(name))(path)
        in_index(lambda names: names.pop(name))(path)

    return damage


def with_dtype(name: str, dtype: str, shape: list[int]) -> Callable[[Path], None]:
    return in_header(lambda header: header[name].update(dtype=dtype, shape=shape))


def with_stranger(name: str) -> Callable[[Path], None]:
    return in_header(lambda header: header.update({name: {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}))


def nothing_left(path: Path) -> None:
    for name in (SHARD, INDEX):
        (path / name).unlink()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated data": (lambda path: truncate(path / SHARD, 400_000), "model.safetensors is truncated: "),
    "truncated by one byte": (lambda path: truncate(path / SHARD, (path / SHARD).stat().st_size - 1), "model.safetensors is truncated: "),
    "truncated header": (lambda path: truncate(path / SHARD, 1000), "model.safetensors is truncated or not safetensors: 1000 bytes"),
    "empty file": (lambda path: truncate(path / SHARD, 0), "model.safetensors is truncated or not safetensors: 0 bytes"),
    "not safetensors": (lambda path: (path / SHARD).write_bytes(b"PK\x03\x04" * 100), "model.safetensors is truncated or not safetensors"),
    "header is not JSON": (lambda path: (path / SHARD).write_bytes((4).to_bytes(8, "little") + b"abcd"), "its header is not JSON"),
    "header is a list": (lambda path: (path / SHARD).write_bytes((2).to_bytes(8, "little") + b"[]"), "its header is not a JSON object"),
    "broken entry": (in_header(lambda header: header[WQ_A].pop("shape")), f"the header entry of {WQ_A} is broken"),
    "entry is no object": (in_header(lambda header: header.update({WQ_A: 3})), f"the header entry of {WQ_A} is broken"),
    "offsets do not fit the shape": (
        in_header(lambda header: header[WQ_A].update(shape=[32, 65])),
        f"{WQ_A} has 2048 bytes, which does not fit",
    ),
    "offsets are no numbers": (
        in_header(lambda header: header[WQ_A].update(data_offsets=["a", 2])),
        f"the header entry of {WQ_A} is broken",
    ),
    "infinite shape": (in_header(lambda header: header[WQ_A].update(shape=[float("inf")])), f"the header entry of {WQ_A} is broken"),
    "negative offset": (in_header(lambda header: header[WQ_A].update(data_offsets=[-4, 2044])), f"{WQ_A} has 2048 bytes"),
    "missing tensor": (without(WQ_A), f"{WQ_A} is missing: expected F8_E4M3 [32, 64]"),
    "missing scale": (without("layers.2.ffn.experts.3.w1.scale"), "layers.2.ffn.experts.3.w1.scale is missing: expected F8_E8M0 [32, 2]"),
    "missing draft tensor": (without("mtp.0.main_norm.weight"), "mtp.0.main_norm.weight is missing: expected BF16 [64]"),
    "wrong dtype": (with_dtype(WQ_A, "I8", [32, 64]), f"{WQ_A} expected F8_E4M3 [32, 64], found I8 [32, 64] in model.safetensors"),
    "hyper-connections as BF16": (
        with_dtype("layers.0.hc_attn_fn", "BF16", [24, 512]),
        "layers.0.hc_attn_fn expected F32 [24, 256], found BF16 [24, 512]",
    ),
    "sink as BF16": (with_dtype("layers.0.attn.attn_sink", "BF16", [4]), "layers.0.attn.attn_sink expected F32 [2], found BF16 [4]"),
    "wrong shape": (with_dtype(WQ_A, "F8_E4M3", [64, 32]), f"{WQ_A} expected F8_E4M3 [32, 64], found F8_E4M3 [64, 32]"),
    "wrong vision shape": (with_dtype("vision.norm.weight", "BF16", [8, 8]), "vision.norm.weight expected BF16 [64], found BF16 [8, 8]"),
    "separate norm of hyper-connections": (
        with_stranger("layers.0.hc_attn_norm.weight"),
        "layers.0.hc_attn_norm.weight is not part of V4.1: expected its gain folded into hc_*_fn",
    ),
    "the collapse of V4": (with_stranger("hc_head_fn"), "hc_head_fn is not part of V4.1"),
    "more layers than the configuration": (
        with_stranger("layers.4.attn_norm.weight"),
        "layers.4.attn_norm.weight: found in model.safetensors",
    ),
    "both spellings in a shard": (
        in_header(lambda header: header.update({f"model.{WQ_A}": header[WQ_A]})),
        f"model.safetensors holds {WQ_A} both with and without the prefix model.",
    ),
    "both spellings in the index": (
        in_index(lambda names: names.update({f"model.{WQ_A}": SHARD})),
        f"{INDEX} lists both {WQ_A} and model.{WQ_A}",
    ),
    "index names an absent file": (
        in_index(lambda names: names.update({WQ_A: "model-00002.safetensors"})),
        f"{INDEX} names model-00002.safetensors, which is not in",
    ),
    "index leads outside": (
        in_index(lambda names: names.update({WQ_A: "../x.safetensors"})),
        f"{INDEX} names ../x.safetensors, which is not in",
    ),
    "index names an absent tensor": (
        in_index(lambda names: names.update({"layers.9.x": SHARD})),
        f"layers.9.x: {INDEX} says it is in model.safetensors, but that file does not hold it",
    ),
    "index is not JSON": (lambda path: (path / INDEX).write_text("{"), f"{INDEX} cannot be read"),
    "index without a map": (lambda path: (path / INDEX).write_text("{}"), f"{INDEX} cannot be read: KeyError: 'weight_map'"),
    "index is a list": (lambda path: (path / INDEX).write_text("[]"), f"{INDEX} cannot be read"),
    "no tensors at all": (nothing_left, "no *.safetensors file in"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_in_one_line(whole, tmp_path, name):
    damage, message = DAMAGE[name]
    path = copy_of(whole, tmp_path / "damaged")
    damage(path)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        check_checkpoint(path, load_config(path))
    assert "\n" not in str(error.value)


def test_a_missing_shard_is_named(sharded, tmp_path):
    path = copy_of(sharded, tmp_path / "damaged")
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names model-00002-of-00003\.safetensors, which is not in"):
        check_checkpoint(path, load_config(path))


def test_a_tensor_in_two_shards_is_named(sharded, tmp_path):
    path = copy_of(sharded, tmp_path / "damaged")
    edit_header(
        path / "model-00003-of-00003.safetensors",
        lambda header: header.update({"embed.weight": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}),
    )
    with pytest.raises(ConfigError, match=r"embed\.weight is in model-00001-of-00003\.safetensors and in model-00003-of-00003"):
        check_checkpoint(path, load_config(path))


def canonical(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    files = check_checkpoint(path, load_config(path))
    return {name: (location.dtype, location.shape) for name, location in files.tensors.items()}


def test_one_file_and_shards_hold_the_same(whole, sharded):
    assert canonical(whole) == canonical(sharded)


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("in_the_index", [False, True])
def test_the_prefix_is_optional_in_index_and_shards_independently(whole, tmp_path, in_files, in_the_index):
    def add_prefix(names: dict) -> None:
        for name in list(names):
            if name != "__metadata__":
                rename(names, name, f"model.{name}")

    path = copy_of(whole, tmp_path / "prefixed")
    if in_files:
        in_header(add_prefix)(path)
    if in_the_index:
        in_index(add_prefix)(path)
    assert canonical(path) == canonical(whole)


def test_an_index_is_not_needed(sharded, tmp_path):
    path = copy_of(sharded, tmp_path / "without")
    (path / INDEX).unlink()
    assert canonical(path) == canonical(sharded)


@pytest.mark.parametrize("with_index", [False, True])
def test_other_files_in_the_directory_do_not_matter(whole, tmp_path, with_index):
    path = copy_of(whole, tmp_path / "crowded")
    for name in ("pytorch_model.bin", ".gitattributes", "._model.safetensors", "model.safetensors.part", "README.md"):
        (path / name).write_bytes(b"\x00garbage")
    (path / "original").mkdir()
    (path / "original" / "x.safetensors").write_bytes(b"garbage")
    if with_index:
        (path / "consolidated.safetensors").write_bytes(b"garbage")
    else:
        (path / INDEX).unlink()
    assert canonical(path) == canonical(whole)


@pytest.mark.parametrize("name", [SHARD, INDEX])
def test_scrambled_headers_are_accepted_or_refused_in_one_line(whole, tmp_path, name):
    path = copy_of(whole, tmp_path / "scrambled")
    config, intact, random = load_config(path), (path / name).read_bytes(), Random(7)
    end = 8 + int.from_bytes(intact[:8], "little") if name == SHARD else len(intact)
    for _ in range(60):
        damaged = bytearray(intact)
        for _ in range(3):
            damaged[random.randrange(end)] = random.choice(b'0123456789-[]{}",:.eN\x00\xff')
        (path / name).write_bytes(damaged)
        assert "\n" not in (refusal(check_checkpoint, path, config) or "")


def test_vision_and_draft_may_be_left_out_or_lie_there_unused(whole, tmp_path):
    def drop_vision(header: dict) -> None:
        for name in [name for name in header if name.startswith(("vision.", "aligner.", "image_"))]:
            header.pop(name)

    path = copy_of(whole, tmp_path / "text")
    (path / INDEX).unlink()
    in_header(drop_vision)(path)
    assert check_checkpoint(path, load_config(path)).vision == {}

    files = check_checkpoint(whole, load_config(whole))
    assert "vision.norm.weight" in files.vision
    assert "vision.norm.weight" not in files.tensors

    unused = copy_of(whole, tmp_path / "unused")
    edit_json(unused / "config.json", lambda raw: raw.pop("vision_config"))
    edit_json(unused / "config.json", lambda raw: raw["text_config"].update(num_nextn_predict_layers=0, compress_ratios=[0, 2, 1, 1]))
    assert not any(name.startswith("mtp.") for name in canonical(unused))


def test_locations_point_at_the_bytes(whole):
    header, data = read_shard(whole / SHARD)
    location = check_checkpoint(whole, load_config(whole)).tensors[WQ_A]
    begin, end = header[WQ_A]["data_offsets"]
    assert (whole / SHARD).read_bytes()[location.start : location.stop] == data[begin:end]


def test_nothing_is_read_but_headers(whole, tmp_path):
    """A file of the right length that was never written (a sparse file) passes: only its header counts."""
    path = copy_of(whole, tmp_path / "sparse")
    header, data = read_shard(path / SHARD)
    write_shard(path / SHARD, header, b"")
    truncate(path / SHARD, 8 + len(json.dumps(header).encode()) + len(data))
    assert canonical(path) == canonical(whole)
