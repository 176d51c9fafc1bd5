"""What a config.json must satisfy (model.md §1): two tables, one loop.

RAW_RULES judge the flattened JSON, before it is turned into a DeepseekV41Config; CONFIG_RULES judge the result. A broken rule
is one line: the key, what was expected, what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.errors import ConfigError

if TYPE_CHECKING:
    from sglang.srt.models.deepseek_v41.config import DeepseekV41Config, RopeScaling, VisionConfig

GROUP = 32
"""Features that share a scale in every quantised matrix and in the inputs of those matrices."""

MAX_CANDIDATE_BLOCK = 16

POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
    "rope_theta",
    "compress_rope_theta",
    "hc_mult",
    "hc_sinkhorn_iters",
    "routed_scaling_factor",
)
VISION_POSITIVE = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "patch_size",
    "downsample_ratio",
    "max_image_tokens",
    "min_pixels",
    "rope_theta",
)
GROUPED = ("hidden_size", "head_dim", "index_head_dim", "q_lora_rank", "o_lora_rank", "moe_intermediate_size")


@dataclass(frozen=True)
class Rule:
    """`found` reads the value, `holds` judges it; `expected` says in words what would have been right."""

    key: str
    found: Callable[[Any], Any]
    holds: Callable[[Any], bool]
    expected: Callable[[Any], str] | str


def check(subject: Any, rules: Sequence[Rule]) -> None:
    """Raise ConfigError for the first rule that does not hold."""
    for rule in rules:
        if not rule.holds(subject):
            expected = rule.expected if isinstance(rule.expected, str) else rule.expected(subject)
            found = rule.found(subject)
            as_written = list(found) if isinstance(found, tuple) else found
            raise ConfigError(f"config.json: {rule.key} expected {expected}, found {as_written!r}")


def _is(key: str, value: Any) -> Rule:
    return Rule(key, lambda c: c.get(key), lambda c: c.get(key) == value, repr(value))


def _is_if_given(key: str, *values: Any) -> Rule:
    expected = " or ".join(repr(value) for value in values)
    return Rule(key, lambda c: c.get(key), lambda c: c.get(key) is None or c[key] in values, expected)


def _quantization(key: str, value: Any) -> Rule:
    def found(c: dict[str, Any]) -> Any:
        quantization = c.get("quantization_config")
        return quantization.get(key) if isinstance(quantization, dict) else quantization

    return Rule(f"quantization_config.{key}", found, lambda c: found(c) == value, repr(value))


RAW_RULES: tuple[Rule, ...] = (
    _is("model_type", "deepseek_v41"),
    _is("architectures", ["DeepseekV41ForCausalLM"]),
    _is("dtype", "bfloat16"),
    _quantization("quant_method", "fp8"),
    _quantization("activation_scheme", "dynamic"),
    _quantization("weight_block_size", [32, 32]),
    _quantization("scale_fmt", "ue8m0"),
    _quantization("expert_dtype", "fp4"),
    _is("scoring_func", "sqrtsoftplus"),
    _is("topk_method", "noaux_tc"),
    _is("norm_topk_prob", True),
    _is_if_given("num_key_value_heads", 1),
    _is_if_given("hidden_act", "silu"),
    _is_if_given("attention_bias", False),
    _is_if_given("attention_dropout", 0.0),
    _is_if_given("tie_word_embeddings", False),
    # Variants that exist in other engines' configurations and that this one does not have.
    _is_if_given("dspark_target_attn_input", True),
    _is_if_given("hc_shifted", True),
    _is_if_given("hc_pre_from_prev_sublayer", True),
    _is_if_given("q_head_norm", False),
    _is_if_given("use_fp4_sparse_kv", True),
    _is_if_given("gate_temp", 1.0),
    Rule(
        "index_k_source_layer_ids",
        lambda c: c.get("index_k_source_layer_ids"),
        lambda c: c.get("index_k_source_layer_ids") in (None, c.get("kv_source_layer_ids")),
        lambda c: f"kv_source_layer_ids {c.get('kv_source_layer_ids')}",
    ),
    # The special ids are part of the prompt format, not a choice.
    _is_if_given("bos_token_id", 0),
    _is_if_given("pad_token_id", 2),
)


def _rule(key: str, holds: Callable[[DeepseekV41Config], bool], expected: Callable[[DeepseekV41Config], str] | str) -> Rule:
    return Rule(key, lambda c: getattr(c, key), holds, expected)


def _positive(key: str) -> Rule:
    return _rule(key, lambda c: getattr(c, key) > 0, "a positive number")


def _grouped(key: str) -> Rule:
    return _rule(key, lambda c: getattr(c, key) % GROUP == 0, f"a multiple of {GROUP}, the features per scale")


def _if_engram(key: str, holds: Callable[[DeepseekV41Config], bool], expected: Callable[[DeepseekV41Config], str] | str) -> Rule:
    return _rule(key, lambda c: not c.engram_layer_ids or holds(c), expected)


def _if_draft(key: str, holds: Callable[[DeepseekV41Config], bool], expected: Callable[[DeepseekV41Config], str] | str) -> Rule:
    return _rule(key, lambda c: not c.num_nextn_predict_layers or holds(c), expected)


def _if_candidates(key: str, holds: Callable[[DeepseekV41Config], bool], expected: Callable[[DeepseekV41Config], str] | str) -> Rule:
    return _rule(key, lambda c: c.candidate_source_layer_id is None or holds(c), expected)


def _yarn(key: str, holds: Callable[[RopeScaling], bool], expected: str) -> Rule:
    return Rule(
        f"rope_scaling.{key}", lambda c: getattr(c.rope_scaling, key), lambda c: c.rope_scaling is None or holds(c.rope_scaling), expected
    )


def _vision(key: str, holds: Callable[[VisionConfig], bool], expected: str) -> Rule:
    return Rule(f"vision_config.{key}", lambda c: getattr(c.vision, key), lambda c: c.vision is None or holds(c.vision), expected)


def _vision_positive(key: str) -> Rule:
    return _vision(key, lambda v: getattr(v, key) > 0, "a positive number")


def _are_compressed_layers(c: DeepseekV41Config, ids: tuple[int, ...]) -> bool:
    ascending = list(ids) == sorted(set(ids))
    return ascending and all(0 <= i < c.num_hidden_layers and c.layer_ratio(i) > 0 for i in ids)


def _are_layers(c: DeepseekV41Config, ids: tuple[int, ...]) -> bool:
    return list(ids) == sorted(set(ids)) and all(0 <= i < c.num_hidden_layers for i in ids)


def _sources_share_ratio(c: DeepseekV41Config) -> bool:
    for layer in range(c.num_hidden_layers):
        source = c.kv_source(layer)
        if c.layer_ratio(layer) and (source is None or c.layer_ratio(source) != c.layer_ratio(layer)):
            return False
    return True


def _candidates_serve_their_followers(c: DeepseekV41Config) -> bool:
    publisher = c.candidate_source_layer_id
    return publisher is None or all(c.kv_source(i) == c.kv_source(publisher) for i in c.index_source_layer_ids if i > publisher)


CONFIG_RULES: tuple[Rule, ...] = (
    *map(_positive, POSITIVE),
    _rule("num_nextn_predict_layers", lambda c: c.num_nextn_predict_layers >= 0, "0 or more"),
    _rule("rms_norm_eps", lambda c: c.rms_norm_eps >= 0, "0 or more"),
    _rule("swiglu_limit", lambda c: c.swiglu_limit >= 0, "a clamp above 0, or 0 for none"),
    _rule("hc_eps", lambda c: c.hc_eps >= 0, "0 or more"),
    *map(_grouped, GROUPED),
    _yarn("factor", lambda r: r.factor > 0, "a positive number"),
    _yarn("original_max_position_embeddings", lambda r: r.original_max_position_embeddings > 0, "a positive number"),
    _yarn("beta_slow", lambda r: r.beta_slow > 0, "a positive number"),
    _yarn("beta_fast", lambda r: r.beta_fast > r.beta_slow, "more than beta_slow"),
    # Roles (model.md §1.5)
    _rule(
        "compress_ratios",
        lambda c: len(c.compress_ratios) == c.num_hidden_layers + c.num_nextn_predict_layers,
        lambda c: (
            f"{c.num_hidden_layers} layers + {c.num_nextn_predict_layers} draft stages = "
            f"{c.num_hidden_layers + c.num_nextn_predict_layers} entries"
        ),
    ),
    _rule("compress_ratios", lambda c: set(c.compress_ratios) <= {0, 1, 2}, "only 0, 1 and 2"),
    _rule("compress_ratios", lambda c: not any(c.compress_ratios[c.num_hidden_layers :]), "0 for every draft stage"),
    _rule(
        "compress_ratios",
        lambda c: all(ratio == 1 for ratio in c.compress_ratios[c.n_prefill : c.num_hidden_layers]),
        "ratio 1 for every layer after the first ratio-1 layer",
    ),
    _rule(
        "kv_source_layer_ids",
        lambda c: _are_compressed_layers(c, c.kv_source_layer_ids),
        "ascending layers with a compression ratio of 1 or 2",
    ),
    _rule(
        "kv_source_layer_ids",
        lambda c: c.n_prefill == c.num_hidden_layers or c.n_prefill in c.kv_source_layer_ids,
        lambda c: f"the first ratio-1 layer {c.n_prefill} among them",
    ),
    _rule("kv_source_layer_ids", _sources_share_ratio, "for every layer with a ratio a source at or before it with the same ratio"),
    _rule(
        "kv_source_layer_ids",
        lambda c: not any(i > c.n_prefill for i in c.kv_source_layer_ids),
        lambda c: f"none after layer {c.n_prefill}: the decoder half reads one compressed cache",
    ),
    _rule(
        "index_source_layer_ids",
        lambda c: _are_compressed_layers(c, c.index_source_layer_ids),
        "ascending layers with a compression ratio of 1 or 2",
    ),
    _rule(
        "index_source_layer_ids",
        lambda c: set(c.kv_source_layer_ids) <= set(c.index_source_layer_ids),
        lambda c: f"every KV source {list(c.kv_source_layer_ids)} among them",
    ),
    _if_candidates(
        "candidate_source_layer_id",
        lambda c: c.candidate_source_layer_id in c.index_source_layer_ids,
        lambda c: f"one of index_source_layer_ids {list(c.index_source_layer_ids)}, or null",
    ),
    _if_candidates(
        "candidate_source_layer_id", _candidates_serve_their_followers, "a layer whose KV source serves every index source after it"
    ),
    _if_candidates(
        "candidate_topk_blocks", lambda c: c.candidate_topk_blocks > 0 and c.candidate_topk_blocks % 8 == 0, "a positive multiple of 8"
    ),
    _if_candidates("candidate_block_size", lambda c: 0 < c.candidate_block_size <= MAX_CANDIDATE_BLOCK, f"1 to {MAX_CANDIDATE_BLOCK}"),
    _if_candidates(
        "candidate_topk_blocks",
        lambda c: c.candidate_topk_blocks * c.candidate_block_size >= c.index_topk,
        lambda c: f"blocks of {c.candidate_block_size} that hold index_topk = {c.index_topk} positions",
    ),
    # Attention and experts
    _rule(
        "qk_rope_head_dim",
        lambda c: c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim),
        lambda c: f"even and at most head_dim {c.head_dim} and index_head_dim {c.index_head_dim}",
    ),
    _rule(
        "o_groups", lambda c: c.num_attention_heads % c.o_groups == 0, lambda c: f"a divisor of num_attention_heads {c.num_attention_heads}"
    ),
    _rule(
        "num_experts_per_tok",
        lambda c: c.num_experts_per_tok <= c.n_routed_experts,
        lambda c: f"1 to n_routed_experts {c.n_routed_experts}",
    ),
    _rule("n_shared_experts", lambda c: c.n_shared_experts in (0, 1), "0 or 1"),
    _rule(
        "eos_token_ids",
        lambda c: bool(c.eos_token_ids) and all(0 <= i < c.vocab_size for i in c.eos_token_ids),
        lambda c: f"at least one id, all below vocab_size {c.vocab_size} (eos_token_id here or in generation_config.json)",
    ),
    _rule("image_token_id", lambda c: c.image_token_id is None or c.image_token_id >= 0, "an id, or null"),
    # Engram (model.md §7); a checkpoint without it lists no layers
    _rule("engram_layer_ids", lambda c: _are_layers(c, c.engram_layer_ids), lambda c: f"ascending layers below {c.num_hidden_layers}"),
    _rule(
        "engram_num_embeddings",
        lambda c: len(c.engram_num_embeddings) == len(c.engram_layer_ids),
        lambda c: f"{len(c.engram_layer_ids)} entries, one per Engram layer",
    ),
    _if_engram("engram_max_ngram_size", lambda c: c.engram_max_ngram_size >= 2, "2 or more"),
    _if_engram("engram_n_heads", lambda c: c.engram_n_heads > 0, "a positive number"),
    _if_engram("engram_head_dim", lambda c: c.engram_head_dim > 0 and c.engram_head_dim % GROUP == 0, f"a positive multiple of {GROUP}"),
    _if_engram("engram_vocab_size", lambda c: c.engram_vocab_size > 1, "where the search for primes starts, above 1"),
    # Each column has a prime of at least that many rows. Checked here because the search for primes above a huge start takes hours.
    _if_engram(
        "engram_num_embeddings",
        lambda c: min(c.engram_num_embeddings) >= c.engram_vocab_size * c.engram_n_heads * (c.engram_max_ngram_size - 1),
        lambda c: (
            f"at least engram_vocab_size {c.engram_vocab_size} for each of {c.engram_n_heads * (c.engram_max_ngram_size - 1)} columns"
        ),
    ),
    _if_engram(
        "engram_compressed_vocab_size",
        lambda c: 0 < c.engram_compressed_vocab_size <= c.vocab_size,
        lambda c: f"1 to vocab_size {c.vocab_size}",
    ),
    _if_engram(
        "engram_pad_token_id", lambda c: 0 <= c.engram_pad_token_id < c.vocab_size, lambda c: f"an id below vocab_size {c.vocab_size}"
    ),
    # Draft (dspark.md §1); a checkpoint without it has 0 stages
    _if_draft(
        "dspark_target_layer_ids",
        lambda c: bool(c.dspark_target_layer_ids) and _are_layers(c, c.dspark_target_layer_ids),
        lambda c: f"ascending layers below {c.num_hidden_layers}, at least one",
    ),
    _if_draft("dspark_block_size", lambda c: c.dspark_block_size > 0, "a positive number"),
    _if_draft("dspark_markov_rank", lambda c: c.dspark_markov_rank > 0, "a positive number"),
    _if_draft("dspark_n_routed_experts", lambda c: c.dspark_n_routed_experts > 0, "a positive number"),
    _if_draft(
        "dspark_num_experts_per_tok",
        lambda c: 0 < c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts,
        lambda c: f"1 to dspark_n_routed_experts {c.dspark_n_routed_experts}",
    ),
    _if_draft(
        "dspark_noise_token_id", lambda c: 0 <= c.dspark_noise_token_id < c.vocab_size, lambda c: f"an id below vocab_size {c.vocab_size}"
    ),
    # Vision (model.md §1.3); a checkpoint without it has no vision_config
    *map(_vision_positive, VISION_POSITIVE),
    _vision("max_wh_ratio", lambda v: v.max_wh_ratio is None or v.max_wh_ratio > 0, "a positive number, or null for no limit"),
    _vision("num_attention_heads", lambda v: v.hidden_size % v.num_attention_heads == 0, "a divisor of vision_config.hidden_size"),
)
