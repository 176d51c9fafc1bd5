"""The list of tensors: the released inventory, and the golden checkpoints' own."""

from __future__ import annotations

import math

import pytest

from harness.checkpoints import read_shard
from harness.direct import CHECKPOINTS, GOLDEN
from random_checkpoint import BASE, PRESETS, RELEASED, VISION, build_config
from sglang.srt.models.deepseek_v41.config import load_config, parse_config
from sglang.srt.models.deepseek_v41.tensor_spec import TensorSpec, tensor_specs, vision_specs

RELEASED_TEXT = {
    **BASE,
    **RELEASED,
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "sliding_window": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "engram_num_embeddings": [384006168, 384016682],
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99092,
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
    "dspark_noise_token_id": 128799,
}
RELEASED_VISION = {**VISION, "num_hidden_layers": 32, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816}


@pytest.fixture(scope="module")
def released() -> dict[str, TensorSpec]:
    raw = build_config(PRESETS["deep"].text, PRESETS["deep"].tokenizer)
    config = parse_config({**raw, "text_config": RELEASED_TEXT, "vision_config": RELEASED_VISION})
    return {**tensor_specs(config), **vision_specs(config)}


def test_the_released_checkpoint_has_96085_tensors_of_510_gigabytes(released):
    specs = list(released.values())
    assert len(specs) == 96_085
    assert sum(spec.num_bytes for spec in specs) == 510_286_023_000


def test_released_parameter_counts(released):
    """model.md §1.6, in units of 0.1 G."""
    specs = list(released.values())
    groups = {
        "all": specs,
        "experts": [spec for spec in specs if spec.part == "text" and ".experts." in spec.name],
        "engram": [spec for spec in specs if ".engram.embed." in spec.name],
        "draft": [spec for spec in specs if spec.part == "draft"],
    }
    counts = {name: round(sum(spec.num_parameters for spec in members) / 1e8) for name, members in groups.items()}
    assert counts == {"all": 7632, "experts": 5436, "engram": 1966, "draft": 142}


@pytest.mark.parametrize(
    "name, dtype, shape",
    [
        ("layers.39.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("layers.20.attn.compressor.wkv.weight", "BF16", (512, 5120)),
        ("layers.36.attn.indexer.wq_b.scale", "F8_E8M0", (128, 40)),
        ("layers.0.hc_ffn_fn", "F32", (24, 20480)),
        ("layers.0.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.0.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.1.ffn.gate.bias_vl", "F32", (128,)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
    ],
)
def test_some_released_tensors(released, name, dtype, shape):
    spec = released[name]
    assert (spec.dtype, spec.shape) == (dtype, shape)


@pytest.mark.parametrize(
    "absent",
    [
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.1.main_proj.weight",
        "mtp.0.norm.weight",
        "mtp.0.embed.weight",
    ],
)
def test_some_tensors_the_release_does_not_have(released, absent):
    assert absent not in released


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_golden_checkpoints_hold_exactly_the_list(name):
    directory = GOLDEN / name / "checkpoint"
    config = load_config(directory)
    header, data = read_shard(directory / "model.safetensors")
    header.pop("__metadata__")
    specs = {**tensor_specs(config), **vision_specs(config)}
    assert {n: (entry["dtype"], tuple(entry["shape"])) for n, entry in header.items()} == {n: (s.dtype, s.shape) for n, s in specs.items()}
    assert sum(spec.num_bytes for spec in specs.values()) == len(data)
    assert all(math.prod(spec.shape) > 0 for spec in specs.values())
