"""The writer of random checkpoints: format, reproducibility, and that its models behave."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch

import random_checkpoint
from harness.checkpoints import nano, read_shard
from harness.direct import GOLDEN, DirectRunner
from random_checkpoint import PRESETS, RandomValues, build_config, main, preset_config, quiet_ids, scaled_matrix, write_checkpoint
from sglang.srt.kernels.torch_backend.linear import dequantised_rows
from sglang.srt.models.deepseek_v41.checkpoint_files import check_checkpoint
from sglang.srt.models.deepseek_v41.config import load_config, parse_config
from sglang.srt.models.deepseek_v41.tensor_spec import SCALE, tensor_specs
from sglang.srt.models.deepseek_v41.weights import load_weights


def digest(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def tensors(path: Path) -> dict[str, bytes]:
    found = {}
    for file in path.glob("*.safetensors"):
        header, data = read_shard(file)
        header.pop("__metadata__")
        found |= {name.removeprefix("model."): data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    return found


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    first, again, other = (nano(tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4)))
    assert digest(first) == digest(again)
    assert digest(first)["model.safetensors"] != digest(other)["model.safetensors"]


def test_sharding_and_prefix_do_not_change_values(tmp_path):
    plain, other = nano(tmp_path / "plain"), nano(tmp_path / "other", shards=5, prefix=True)
    assert len(list(other.glob("*.safetensors"))) == 5
    assert tensors(plain) == tensors(other)


def test_bytes_of_a_known_seed():
    """Results recorded with a seed stay reproducible only as long as this digest stands."""
    config = preset_config("nano")
    values = RandomValues(1, 0.25, quiet_ids(PRESETS["nano"].tokenizer))
    whole = hashlib.sha256()
    for spec in tensor_specs(config).values():
        for chunk in values.chunks(spec, scaled_matrix(spec)):
            whole.update(chunk.tobytes())
    assert whole.hexdigest()[:16] == "0d38bfb03ac5d0fb"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_have_every_mechanism(name):
    config = preset_config(name)
    owned = {part for role in config.layer_roles() for part in role.owns}
    assert owned == {"kv", "index", "candidates", "engram", "draft input"}
    assert {0, 1, 2} == set(config.compress_ratios)
    assert any(config.uses_candidates(layer) for layer in config.index_source_layer_ids)


@pytest.mark.parametrize("name, millions", [("100m", 100), ("300m", 300), ("1b", 1000)])
def test_presets_named_by_size_have_about_that_size_mostly_in_experts(name, millions):
    specs = tensor_specs(preset_config(name)).values()
    total = sum(spec.num_parameters for spec in specs)
    assert 0.9 < total / (millions * 1e6) < 1.2
    assert sum(spec.num_parameters for spec in specs if ".ffn.experts." in spec.name) > 0.7 * total


def test_toys_have_the_architecture_of_the_golden_checkpoints():
    for name in ("nano", "mini", "deep"):
        assert preset_config(name) == load_config(GOLDEN / f"{name}-s1" / "checkpoint")


def test_kernel_preset_has_the_released_geometry():
    config = preset_config("kernel")
    assert (config.head_dim, config.qk_rope_head_dim, config.index_head_dim, config.sliding_window, config.index_topk) == (
        512,
        64,
        128,
        128,
        512,
    )


def test_vision_and_draft_can_be_left_out(tmp_path):
    path = nano(tmp_path / "text", vision=False, draft=False)
    files = check_checkpoint(path, load_config(path))
    assert files.vision == {}
    assert not any(name.startswith("mtp.") for name in files.tensors)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("demo") / "demo", "demo", seed=1)


def test_matrices_have_the_intended_spread(demo):
    weights = load_weights(demo, load_config(demo))
    for name, factor in (("attn.wq_b", 1.0), ("attn.wo_b", 0.25), ("ffn.experts.1.w1", 1.5), ("ffn.experts.1.w2", 0.25), ("ffn.gate", 1.0)):
        weight = weights.linear(f"layers.2.{name}")
        values = dequantised_rows(weight, 0, weight.out_features)
        assert values.std().item() * math.sqrt(weight.in_features) == pytest.approx(factor, rel=0.12)
        assert abs(values.mean().item()) < 0.1 * values.std().item()


def test_neighbouring_scales_differ(demo):
    weights = load_weights(demo, load_config(demo))
    for name in ("layers.0.attn.wq_b", "layers.2.ffn.experts.0.w1"):
        assert len(weights.linear(name).scale.unique()) >= 3


def test_activations_stay_sane_through_forty_layers(tmp_path):
    runner = DirectRunner(write_checkpoint(tmp_path / "deep", "deep", seed=2), tokens=64, num_sequences=1)
    sizes: list[float] = []
    logits = runner.sequence(0).extend(list(range(3, 51)), observe=lambda _, residual: sizes.append(residual.std().item()))
    assert len(sizes) == 40
    assert min(sizes) > 0.5 and max(sizes) < 10
    assert logits.isfinite().all()
    assert len(logits.argmax(dim=-1).unique()) > 10


def test_special_tokens_are_quiet_but_the_end_of_a_sequence_is_not(demo):
    weights = load_weights(demo, load_config(demo))
    size = weights.tensor("head.weight").float().std(dim=1)
    quiet = torch.tensor(quiet_ids(random_checkpoint.TOY_TOKENIZER))
    loud = torch.ones(4096, dtype=torch.bool)
    loud[quiet] = False
    assert loud[1]
    assert size[quiet].max() < 0.2 * size[loud].min()


def test_scales_know_their_matrices():
    config = preset_config("nano")
    specs = tensor_specs(config)
    for spec in specs.values():
        if spec.dtype == SCALE and ".engram.embed." not in spec.name:
            matrix = specs[spec.name.removesuffix("scale") + "weight"]
            assert scaled_matrix(spec).dtype == matrix.dtype
            assert scaled_matrix(spec).shape[1] == matrix.shape[1]


def test_command_line(tmp_path, capsys):
    out = tmp_path / "out"
    assert main([str(out), "--preset", "nano", "--seed", "5", "--set", "index_topk", "16", "--shards", "2", "--no-vision"]) == 0
    assert load_config(out).index_topk == 16
    assert "nano, seed 5" in capsys.readouterr().out
    assert main([str(tmp_path / "bad"), "--preset", "nano", "--set", "o_groups", "3"]) == 2
    assert capsys.readouterr().err.startswith("error: config.json: o_groups expected a divisor")
    assert not (tmp_path / "bad").exists()


def test_a_directory_with_a_configuration_is_complete(tmp_path, monkeypatch):
    """config.json is written last, so an interrupted run is not taken for a checkpoint."""
    out = nano(tmp_path / "out")
    monkeypatch.setattr(random_checkpoint, "_write_shard", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        nano(out)
    assert not (out / "config.json").exists()


def test_the_tokenizer_decides_vocabulary_and_classes():
    toy = parse_config(build_config(PRESETS["mini"].text, random_checkpoint.TOY_TOKENIZER))
    assert (toy.vocab_size, toy.engram_compressed_vocab_size, toy.image_token_id, toy.dspark_noise_token_id) == (4096, 3235, 4045, 4032)
