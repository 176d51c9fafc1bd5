"""The architecture as its config.json states it, checked (model.md §1).

Both forms are read: nested (`text_config`, `vision_config`, ...) as released, and flattened; a top-level key wins. Every
rule is one row of a table, so that a refused checkpoint names the key, what was expected and what was found.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.errors import ConfigError


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters (model.md §5.2)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower (model.md §1.3); read so that its tensors can be checked."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    rope_theta: float = 10000.0
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class LayerRole:
    """What a backbone layer reads and owns."""

    layer: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    owns: tuple[str, ...]  # of: kv, index, candidates, engram, draft input


@dataclass(frozen=True)
class DeepseekV41Config:
    """Names are config.json's. Tuples replace lists. See model.md §1.2 for meanings and released values."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # layers, then draft stages
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_vocab_size: int = 0
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int = 0
    image_token_id: int | None = None
    vision: VisionConfig | None = None

    def layer_ratio(self, layer: int) -> int:
        """Compression ratio: 0 (window only), 1 or 2."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed cache this layer reads; None for window-only layers (model.md §1.5)."""
        return _source(layer, self.kv_source_layer_ids) if self.layer_ratio(layer) else None

    def index_source(self, layer: int) -> int | None:
        """The layer that selects for this layer; None for window-only layers."""
        return _source(layer, self.index_source_layer_ids) if self.layer_ratio(layer) else None

    def uses_candidates(self, layer: int) -> bool:
        """Whether this index source selects inside the candidate blocks of an earlier layer."""
        return self.candidate_source_layer_id is not None and layer in self.index_source_layer_ids and layer > self.candidate_source_layer_id

    @property
    def n_prefill(self) -> int:
        """First ratio-1 layer: where the decoder half begins (model.md §10); the number of layers if there is none."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else self.num_hidden_layers

    def layer_roles(self) -> list[LayerRole]:
        """One entry per backbone layer."""

        def owns(layer: int) -> tuple[str, ...]:
            facts = {
                "engram": layer in self.engram_layer_ids,
                "kv": layer in self.kv_source_layer_ids,
                "index": layer in self.index_source_layer_ids,
                "candidates": layer == self.candidate_source_layer_id,
                "draft input": layer in self.dspark_target_layer_ids,
            }
            return tuple(name for name, holds in facts.items() if holds)

        return [
            LayerRole(layer, self.layer_ratio(layer), self.kv_source(layer), self.index_source(layer), owns(layer))
            for layer in range(self.num_hidden_layers)
        ]


def load_config(path: Path | str, override: Mapping[str, Any] | None = None) -> DeepseekV41Config:
    """Read and check `path`/config.json (and generation_config.json for further end-of-sequence ids).

    `override` is laid over the top level. Raises ConfigError with one line that names key, expected and found.
    """
    path = Path(path)
    raw = _read_json(path / "config.json")
    flat = {**raw.get("text_config", {}), **{k: v for k, v in raw.items() if k != "text_config"}, **(override or {})}
    _check(flat, RAW_RULES)
    config = _build(flat, raw, path)
    _check(config, CONFIG_RULES)
    return config


def _read_json(file: Path) -> dict[str, Any]:
    if not file.parent.is_dir():
        raise ConfigError(f"checkpoint directory not found: {file.parent}")
    if not file.is_file():
        raise ConfigError(f"{file.name} not found in {file.parent}; expected a checkpoint in the released format")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, found {type(value).__name__}")
    return value


def _source(layer: int, ids: tuple[int, ...]) -> int | None:
    before = [i for i in ids if i <= layer]
    return max(before) if before else None


ALIASES = {"dspark_n_activated_experts": "dspark_num_experts_per_tok"}


def _build(flat: dict[str, Any], raw: dict[str, Any], path: Path) -> DeepseekV41Config:
    for alias, name in ALIASES.items():
        if alias in flat:
            flat.setdefault(name, flat[alias])
    values: dict[str, Any] = {}
    for f in dataclasses.fields(DeepseekV41Config):
        if f.name in ("rope_scaling", "vision", "eos_token_ids"):
            continue
        if f.name not in flat or (flat[f.name] is None and f.default is dataclasses.MISSING):
            if f.default is dataclasses.MISSING:
                raise ConfigError(f"config.json: key {f.name} is missing; expected {f.type}")
            continue
        values[f.name] = _typed(f.name, str(f.type), flat[f.name])
    if values.get("candidate_source_layer_id") is not None and values["candidate_source_layer_id"] < 0:
        values["candidate_source_layer_id"] = None
    return DeepseekV41Config(
        **values,
        rope_scaling=_rope_scaling(flat.get("rope_scaling")),
        vision=_vision(raw),
        eos_token_ids=_eos_ids(flat, path),
    )


def _typed(name: str, kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind.startswith("tuple"):
        if isinstance(value, list) and all(isinstance(v, int) for v in value):
            return tuple(value)
    elif kind.startswith("int"):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ConfigError(f"config.json: {name} expected {kind}, found {value!r}")


def _rope_scaling(value: Any) -> RopeScaling | None:
    if not value:
        return None
    kind = value.get("rope_type", value.get("type"))
    if kind != "yarn":
        raise ConfigError(f"config.json: rope_scaling type expected yarn, found {kind!r}")
    try:
        return RopeScaling(**{f.name: value[f.name] for f in dataclasses.fields(RopeScaling)})
    except KeyError as error:
        raise ConfigError(f"config.json: rope_scaling.{error.args[0]} is missing") from None


def _vision(raw: dict[str, Any]) -> VisionConfig | None:
    value = raw.get("vision_config")
    if not value:
        return None
    names = {f.name: f for f in dataclasses.fields(VisionConfig)}
    missing = [n for n, f in names.items() if n not in value and f.default is dataclasses.MISSING]
    if missing:
        raise ConfigError(f"config.json: vision_config.{missing[0]} is missing")
    return VisionConfig(**{n: value[n] for n in names if n in value})


def _eos_ids(flat: dict[str, Any], path: Path) -> tuple[int, ...]:
    ids: list[int] = []
    generation = path / "generation_config.json"
    sources = [flat] + ([_read_json(generation)] if generation.is_file() else [])
    for source in sources:
        value = source.get("eos_token_id", [])
        ids += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


@dataclass(frozen=True)
class Rule:
    """`found` reads the value, `holds` judges it; `expected` says in words what would have been right."""

    key: str
    found: Callable[[Any], Any]
    holds: Callable[[Any], bool]
    expected: Callable[[Any], str] | str


def _check(subject: Any, rules: tuple[Rule, ...]) -> None:
    for rule in rules:
        if not rule.holds(subject):
            expected = rule.expected if isinstance(rule.expected, str) else rule.expected(subject)
            raise ConfigError(f"config.json: {rule.key} expected {expected}, found {rule.found(subject)!r}")


def _is(key: str, value: Any, *, optional: bool = False) -> Rule:
    absent_ok = (lambda c: key not in c) if optional else (lambda c: False)
    return Rule(key, lambda c: c.get(key), lambda c: absent_ok(c) or c.get(key) == value, repr(value))


def _quant(key: str, value: Any) -> Rule:
    def found(c: dict[str, Any]) -> Any:
        quant = c.get("quantization_config")
        return quant.get(key) if isinstance(quant, dict) else quant

    return Rule(f"quantization_config.{key}", found, lambda c: found(c) == value, repr(value))


RAW_RULES: tuple[Rule, ...] = (
    _is("model_type", "deepseek_v41"),
    Rule("architectures", lambda c: c.get("architectures"), lambda c: c.get("architectures") == ["DeepseekV41ForCausalLM"], "['DeepseekV41ForCausalLM']"),
    _is("dtype", "bfloat16"),
    _is("num_key_value_heads", 1, optional=True),
    _is("hidden_act", "silu", optional=True),
    _is("attention_bias", False, optional=True),
    _is("attention_dropout", 0.0, optional=True),
    _is("tie_word_embeddings", False, optional=True),
    _is("scoring_func", "sqrtsoftplus"),
    _is("topk_method", "noaux_tc"),
    _is("norm_topk_prob", True),
    _is("dspark_target_attn_input", True, optional=True),
    _is("hc_shifted", True, optional=True),
    _quant("quant_method", "fp8"),
    _quant("activation_scheme", "dynamic"),
    _quant("weight_block_size", [32, 32]),
    _quant("scale_fmt", "ue8m0"),
    _quant("expert_dtype", "fp4"),
)


def _rule(key: str, holds: Callable[[DeepseekV41Config], bool], expected: Callable[[DeepseekV41Config], str] | str) -> Rule:
    return Rule(key, lambda c: getattr(c, key), holds, expected)


def _sources_share_ratio(c: DeepseekV41Config) -> bool:
    return all(c.kv_source(i) is not None and c.layer_ratio(c.kv_source(i)) == c.layer_ratio(i) for i in range(c.num_hidden_layers) if c.layer_ratio(i))


CONFIG_RULES: tuple[Rule, ...] = (
    _rule("num_hidden_layers", lambda c: c.num_hidden_layers >= 1, "at least 1"),
    _rule(
        "compress_ratios",
        lambda c: len(c.compress_ratios) == c.num_hidden_layers + c.num_nextn_predict_layers,
        lambda c: f"{c.num_hidden_layers} layers + {c.num_nextn_predict_layers} draft stages = {c.num_hidden_layers + c.num_nextn_predict_layers} entries",
    ),
    _rule("compress_ratios", lambda c: set(c.compress_ratios) <= {0, 1, 2}, "only 0, 1 and 2"),
    _rule("compress_ratios", lambda c: not any(c.compress_ratios[c.num_hidden_layers :]), "0 for every draft stage"),
    _rule(
        "kv_source_layer_ids",
        lambda c: list(c.kv_source_layer_ids) == sorted(set(c.kv_source_layer_ids)) and all(0 <= i < c.num_hidden_layers and c.layer_ratio(i) for i in c.kv_source_layer_ids),
        "ascending layers with a compression ratio of 1 or 2",
    ),
    _rule("kv_source_layer_ids", _sources_share_ratio, "for every layer with a ratio a source at or before it with the same ratio"),
    _rule(
        "index_source_layer_ids",
        lambda c: list(c.index_source_layer_ids) == sorted(set(c.index_source_layer_ids)) and all(0 <= i < c.num_hidden_layers and c.layer_ratio(i) for i in c.index_source_layer_ids),
        "ascending layers with a compression ratio of 1 or 2",
    ),
    _rule("index_source_layer_ids", lambda c: set(c.kv_source_layer_ids) <= set(c.index_source_layer_ids), lambda c: f"every KV source {list(c.kv_source_layer_ids)} among them"),
    _rule(
        "kv_source_layer_ids",
        lambda c: c.n_prefill == c.num_hidden_layers or c.n_prefill in c.kv_source_layer_ids,
        lambda c: f"the first ratio-1 layer {c.n_prefill} among them",
    ),
    _rule(
        "compress_ratios",
        lambda c: all(r == 1 for r in c.compress_ratios[c.n_prefill : c.num_hidden_layers]),
        "ratio 1 for every layer after the first ratio-1 layer",
    ),
    _rule(
        "candidate_source_layer_id",
        lambda c: c.candidate_source_layer_id is None or c.candidate_source_layer_id in c.index_source_layer_ids,
        lambda c: f"one of index_source_layer_ids {list(c.index_source_layer_ids)}, or null",
    ),
    _rule(
        "candidate_source_layer_id",
        lambda c: c.candidate_source_layer_id is None or all(c.kv_source(i) == c.kv_source(c.candidate_source_layer_id) for i in c.index_source_layer_ids if i > c.candidate_source_layer_id),
        "a layer whose KV source serves every index source after it",
    ),
    _rule("candidate_topk_blocks", lambda c: c.candidate_source_layer_id is None or (c.candidate_topk_blocks > 0 and c.candidate_topk_blocks % 8 == 0), "a positive multiple of 8"),
    _rule("candidate_block_size", lambda c: c.candidate_source_layer_id is None or 0 < c.candidate_block_size <= 16, "1 to 16"),
    _rule(
        "candidate_topk_blocks",
        lambda c: c.candidate_source_layer_id is None or c.candidate_topk_blocks * c.candidate_block_size >= c.index_topk,
        lambda c: f"blocks of {c.candidate_block_size} that hold index_topk = {c.index_topk} positions",
    ),
    _rule("engram_num_embeddings", lambda c: len(c.engram_num_embeddings) == len(c.engram_layer_ids), lambda c: f"{len(c.engram_layer_ids)} entries, one per Engram layer"),
    _rule("engram_layer_ids", lambda c: all(0 <= i < c.num_hidden_layers for i in c.engram_layer_ids), "layers of the backbone"),
    _rule("dspark_target_layer_ids", lambda c: all(0 <= i < c.num_hidden_layers for i in c.dspark_target_layer_ids), "layers of the backbone"),
    _rule("dspark_block_size", lambda c: c.num_nextn_predict_layers == 0 or c.dspark_block_size >= 1, "at least 1, since there are draft stages"),
    _rule("qk_rope_head_dim", lambda c: c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim), lambda c: f"even and at most head_dim {c.head_dim} and index_head_dim {c.index_head_dim}"),
    _rule("head_dim", lambda c: c.head_dim % 32 == 0, "a multiple of 32, the group of the cache formats"),
    _rule("index_head_dim", lambda c: c.index_head_dim % 32 == 0, "a multiple of 32, the group of the cache formats"),
    _rule("o_groups", lambda c: c.o_groups > 0 and c.num_attention_heads % c.o_groups == 0, lambda c: f"a divisor of num_attention_heads {c.num_attention_heads}"),
    _rule("num_experts_per_tok", lambda c: 0 < c.num_experts_per_tok <= c.n_routed_experts, lambda c: f"1 to n_routed_experts {c.n_routed_experts}"),
    _rule("n_shared_experts", lambda c: c.n_shared_experts in (0, 1), "0 or 1"),
    _rule("sliding_window", lambda c: c.sliding_window >= 1, "at least 1"),
    _rule("index_topk", lambda c: c.index_topk >= 1, "at least 1"),
    _rule("eos_token_ids", lambda c: all(0 <= i < c.vocab_size for i in c.eos_token_ids) and bool(c.eos_token_ids), lambda c: f"ids inside the vocabulary of {c.vocab_size}"),
)
