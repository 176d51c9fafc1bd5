"""Every tensor of a checkpoint: name, dtype, shape (model.md §2.2). The loader checks against this list, the writer follows it."""

from __future__ import annotations

import math
from typing import NamedTuple

from sglang.srt.models.deepseek_v41.config import DeepseekV41Config

FP8, FP4, SCALE, BF16, F32 = "F8_E4M3", "I8", "F8_E8M0", "BF16", "F32"
TILE = 32
"""Side of the square tiles that share an FP8 scale, and length of the groups that share an FP4 scale."""


class TensorSpec(NamedTuple):
    """`dtype` as safetensors spells it; `part` says who uses it: text, draft or vision."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: str = "text"

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * {FP8: 1, FP4: 1, SCALE: 1, BF16: 2, F32: 4}[self.dtype]

    @property
    def num_parameters(self) -> int:
        """Values it holds: two per byte of FP4, none in a scale."""
        return math.prod(self.shape) * {FP4: 2, SCALE: 0}.get(self.dtype, 1)


def tensor_specs(config: DeepseekV41Config) -> dict[str, TensorSpec]:
    """Text and draft tensors that must be there, by name. Vision tensors are listed by `vision_specs`."""
    builder = _Builder(config)
    builder.globals()
    for layer in range(config.num_hidden_layers):
        builder.layer(layer)
    for stage in range(config.num_nextn_predict_layers):
        builder.stage(stage)
    return builder.specs


def vision_specs(config: DeepseekV41Config) -> dict[str, TensorSpec]:
    """Tensors of the vision tower, aligner and image markers: optional, all BF16."""
    specs: dict[str, TensorSpec] = {}

    def add(name: str, *shape: int) -> None:
        specs[name] = TensorSpec(name, BF16, shape, "vision")

    d = config.hidden_size
    for name in ("image_start", "image_end", "image_newline"):
        add(name, d)
    v = config.vision
    if v is None:
        return specs
    w, inner = v.hidden_size, v.intermediate_size
    add("vision.patch_embed.proj.weight", w, 3 * v.patch_size**2)
    add("vision.patch_embed.proj.bias", w)
    for k in range(v.num_hidden_layers):
        block = f"vision.blocks.{k}"
        add(f"{block}.norm1.weight", w)
        add(f"{block}.norm2.weight", w)
        add(f"{block}.attn.wqkv.weight", 3 * w, w)
        add(f"{block}.attn.wqkv.bias", 3 * w)
        add(f"{block}.attn.wo.weight", w, w)
        add(f"{block}.attn.wo.bias", w)
        add(f"{block}.mlp.w1.weight", 2 * inner, w)
        add(f"{block}.mlp.w2.weight", w, inner)
    add("vision.norm.weight", w)
    add("aligner.w1.weight", d, w * v.downsample_ratio**2)
    add("aligner.w1.bias", d)
    add("aligner.w2.weight", d, d)
    add("aligner.w2.bias", d)
    return specs


class _Builder:
    """Collects specs; one method per kind of matrix, one per part of the model."""

    def __init__(self, config: DeepseekV41Config):
        self.c = config
        self.specs: dict[str, TensorSpec] = {}
        self.part = "text"

    def add(self, name: str, dtype: str, *shape: int) -> None:
        self.specs[name] = TensorSpec(name, dtype, shape, self.part)

    def fp8(self, name: str, rows: int, columns: int) -> None:
        self.add(f"{name}.weight", FP8, rows, columns)
        self.add(f"{name}.scale", SCALE, -(-rows // TILE), -(-columns // TILE))

    def fp4(self, name: str, rows: int, columns: int) -> None:
        self.add(f"{name}.weight", FP4, rows, columns // 2)
        self.add(f"{name}.scale", SCALE, rows, columns // TILE)

    def globals(self) -> None:
        c = self.c
        self.add("embed.weight", BF16, c.vocab_size, c.hidden_size)
        self.add("head.weight", BF16, c.vocab_size, c.hidden_size)
        self.add("norm.weight", BF16, c.hidden_size)

    def layer(self, layer: int) -> None:
        c, p = self.c, f"layers.{layer}"
        self.block(p, c.n_routed_experts)
        if layer in c.kv_source_layer_ids:
            self.add(f"{p}.attn.compressor.wkv.weight", BF16, c.head_dim, c.hidden_size)
            if c.layer_ratio(layer) > 1:
                self.add(f"{p}.attn.compressor.wgate.weight", BF16, c.head_dim, c.hidden_size)
            self.add(f"{p}.attn.compressor.norm.weight", BF16, c.head_dim)
            self.add(f"{p}.attn.indexer.wk.weight", BF16, c.index_head_dim, c.head_dim)
            self.add(f"{p}.attn.indexer.k_norm.weight", BF16, c.index_head_dim)
        if layer in c.index_source_layer_ids:
            self.fp8(f"{p}.attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            self.add(f"{p}.attn.indexer.weights_proj.weight", BF16, c.index_n_heads, c.hidden_size)
        if layer in c.engram_layer_ids:
            rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
            columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
            self.add(f"{p}.engram.embed.weight", FP8, rows, c.engram_head_dim)
            self.add(f"{p}.engram.embed.scale", SCALE, rows, -(-c.engram_head_dim // TILE))
            self.fp8(f"{p}.engram.wkv", (c.hc_mult + 1) * c.hidden_size, columns * c.engram_head_dim)
            self.add(f"{p}.engram.q_weight", BF16, c.hc_mult, c.hidden_size)
            self.add(f"{p}.engram.k_weight", BF16, c.hc_mult, c.hidden_size)

    def stage(self, stage: int) -> None:
        c, p = self.c, f"mtp.{stage}"
        self.part = "draft"
        self.block(p, c.dspark_n_routed_experts)
        if stage == 0:
            self.fp8(f"{p}.main_proj", c.hidden_size, len(c.dspark_target_layer_ids) * c.hidden_size)
            self.add(f"{p}.main_norm.weight", BF16, c.hidden_size)
        if stage == c.num_nextn_predict_layers - 1:
            self.add(f"{p}.norm.weight", BF16, c.hidden_size)
            self.add(f"{p}.markov_head.embed.weight", BF16, c.vocab_size, c.dspark_markov_rank)
            self.add(f"{p}.markov_head.head.weight", BF16, c.vocab_size, c.dspark_markov_rank)
            self.add(f"{p}.confidence_head.proj.weight", BF16, 1, c.hidden_size + c.dspark_markov_rank)

    def block(self, p: str, num_experts: int) -> None:
        """What a backbone layer and a draft stage have in common."""
        c = self.c
        d, inner = c.hidden_size, c.moe_intermediate_size
        self.add(f"{p}.attn_norm.weight", BF16, d)
        self.add(f"{p}.ffn_norm.weight", BF16, d)
        self.add(f"{p}.attn.attn_sink", F32, c.num_attention_heads)
        self.fp8(f"{p}.attn.wq_a", c.q_lora_rank, d)
        self.add(f"{p}.attn.q_norm.weight", BF16, c.q_lora_rank)
        self.fp8(f"{p}.attn.wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank)
        self.fp8(f"{p}.attn.wkv", c.head_dim, d)
        self.add(f"{p}.attn.kv_norm.weight", BF16, c.head_dim)
        self.fp8(f"{p}.attn.wo_a", c.o_groups * c.o_lora_rank, c.num_attention_heads // c.o_groups * c.head_dim)
        self.fp8(f"{p}.attn.wo_b", d, c.o_groups * c.o_lora_rank)
        mixes = 2 * c.hc_mult + c.hc_mult**2
        for sublayer in ("attn", "ffn"):
            self.add(f"{p}.hc_{sublayer}_fn", F32, mixes, c.hc_mult * d)
            self.add(f"{p}.hc_{sublayer}_base", F32, mixes)
            self.add(f"{p}.hc_{sublayer}_scale", F32, 3)
        self.add(f"{p}.ffn.gate.weight", BF16, num_experts, d)
        self.add(f"{p}.ffn.gate.bias", F32, num_experts)
        self.add(f"{p}.ffn.gate.bias_vl", F32, num_experts)
        for e in range(num_experts):
            self.fp4(f"{p}.ffn.experts.{e}.w1", inner, d)
            self.fp4(f"{p}.ffn.experts.{e}.w3", inner, d)
            self.fp4(f"{p}.ffn.experts.{e}.w2", d, inner)
        if c.n_shared_experts:
            self.fp8(f"{p}.ffn.shared_experts.w1", inner, d)
            self.fp8(f"{p}.ffn.shared_experts.w3", inner, d)
            self.fp8(f"{p}.ffn.shared_experts.w2", d, inner)
