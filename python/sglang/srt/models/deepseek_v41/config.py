"""The architecture as its config.json states it, checked (model.md §1, config_rules.py).

Both forms are read: nested (`text_config`, `vision_config`) as released, and flattened (`vision_*`); a top-level key wins.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.errors import ConfigError
from sglang.srt.models.deepseek_v41.config_rules import CONFIG_RULES, RAW_RULES, check


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
        source = self.candidate_source_layer_id
        return source is not None and layer in self.index_source_layer_ids and layer > source

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
    if not path.is_dir():
        raise ConfigError(f"checkpoint directory not found: {path}")
    generation = path / "generation_config.json"
    return parse_config(read_json(path / "config.json"), read_json(generation) if generation.is_file() else None, override)


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, override: Mapping[str, Any] | None = None
) -> DeepseekV41Config:
    """The same from the contents of config.json and generation_config.json."""
    flat = _flattened(raw, override or {})
    check(flat, RAW_RULES)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(DeepseekV41Config):
        if field.name in ("rope_scaling", "vision", "eos_token_ids"):
            continue
        value = flat.get(field.name)
        if value is not None:
            values[field.name] = _typed(field.name, str(field.type), value)
        elif field.name in OFF_IF_NULL and field.name in flat:
            values[field.name] = OFF_IF_NULL[field.name]
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"config.json: {field.name} is missing, expected {_kind(str(field.type))}")
    if values.get("candidate_source_layer_id", -1) < 0:
        values["candidate_source_layer_id"] = None
    config = DeepseekV41Config(
        **values,
        rope_scaling=_rope_scaling(flat.get("rope_scaling")),
        vision=_vision(flat),
        eos_token_ids=_eos_ids(flat, generation or {}),
    )
    check(config, CONFIG_RULES)
    return config


ALIASES = {"dspark_n_activated_experts": "dspark_num_experts_per_tok", "torch_dtype": "dtype"}
OFF_IF_NULL: dict[str, float] = {"swiglu_limit": 0.0}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint. Raises ConfigError if the file is absent or holds something else."""
    if not file.is_file():
        raise ConfigError(f"{file.name} not found in {file.parent}; expected a checkpoint in the released format")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, found {type(value).__name__}")
    return value


def _flattened(raw: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """One level of keys: the text part, then the top level, then `override`, each over the one before."""
    flat: dict[str, Any] = {}
    for level in (raw, override):
        text = level.get("text_config") or {}
        if not isinstance(text, dict):
            raise ConfigError(f"config.json: text_config expected an object, found {text!r}")
        flat |= {**text, **{key: value for key, value in level.items() if key != "text_config"}}
    if "model_type" not in raw and "model_type" not in override:
        flat.pop("model_type", None)  # text_config has its own, which says nothing about the whole
    for alias, name in ALIASES.items():
        if alias in flat:
            flat.setdefault(name, flat[alias])
    return flat


def _source(layer: int, ids: tuple[int, ...]) -> int | None:
    return max((i for i in ids if i <= layer), default=None)


def _kind(declared: str) -> str:
    if declared.startswith("tuple"):
        return "a list of integers"
    return "an integer" if declared.startswith("int") else "a number"


def _typed(name: str, declared: str, value: Any) -> Any:
    def is_int(v: Any) -> bool:
        return isinstance(v, int) and not isinstance(v, bool) and abs(v) < 2**31

    if declared.startswith("tuple"):
        if isinstance(value, list) and all(is_int(v) for v in value):
            return tuple(value)
    elif is_int(value):
        return value if declared.startswith("int") else float(value)
    elif declared.startswith("float") and isinstance(value, float) and math.isfinite(value):
        return value
    raise ConfigError(f"config.json: {name} expected {_kind(declared)}, found {value!r}")


def _rope_scaling(value: Any) -> RopeScaling | None:
    if not value:
        return None
    if not isinstance(value, dict):
        raise ConfigError(f"config.json: rope_scaling expected an object, found {value!r}")
    kind = value.get("rope_type", value.get("type"))
    if kind != "yarn":
        raise ConfigError(f"config.json: rope_scaling.rope_type expected 'yarn', found {kind!r}")
    return RopeScaling(**_fields(RopeScaling, value, "rope_scaling"))


def _vision(flat: Mapping[str, Any]) -> VisionConfig | None:
    nested = flat.get("vision_config") or {}
    if not isinstance(nested, dict):
        raise ConfigError(f"config.json: vision_config expected an object, found {nested!r}")
    names = [field.name for field in dataclasses.fields(VisionConfig)]
    values = {**nested, **{name: flat[f"vision_{name}"] for name in names if f"vision_{name}" in flat}}
    return VisionConfig(**_fields(VisionConfig, values, "vision_config")) if values else None


def _fields(kind: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Arguments of a small dataclass of numbers. Raises ConfigError for a missing one or another type."""
    result = {}
    for field in dataclasses.fields(kind):
        value = values.get(field.name)
        if value is not None:
            result[field.name] = _typed(f"{where}.{field.name}", str(field.type), value)
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"config.json: {where}.{field.name} is missing, expected {_kind(str(field.type))}")
    return result


def _eos_ids(flat: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that ends a sequence, config.json's first. An overridden id replaces neither file's others."""
    ids: list[Any] = []
    for value in (flat.get("eos_token_id"), generation.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(_typed("eos_token_id", "int", i) for i in ids))
