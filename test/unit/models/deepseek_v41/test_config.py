"""config.json: both forms, derived roles, and every rule broken once."""

from __future__ import annotations

import copy
import functools
import json
import re
from typing import Any

import pytest

from harness.checkpoints import refusal
from random_checkpoint import PRESETS, RELEASED, build_config
from sglang.srt.errors import ConfigError
from sglang.srt.models.deepseek_v41.config import RopeScaling, load_config, parse_config
from sglang.srt.models.deepseek_v41.config_rules import CONFIG_RULES, RAW_RULES, VISION_POSITIVE, check

MINI = build_config(PRESETS["mini"].text, PRESETS["mini"].tokenizer)
"""8 layers, ratios 0 0 2 2 2 1 1 1, KV sources 2 4 5, index sources 2 4 5 6, candidates from 5."""


def changed(**changes: Any) -> dict[str, Any]:
    """MINI with keys of the top level changed; a value of ... removes a key wherever it is."""
    raw = copy.deepcopy(MINI)
    for key, value in changes.items():
        raw["text_config"].pop(key, None)
        raw.pop(key, None)
        if value is not ...:
            raw[key] = value
    return raw


def with_quantization(**changes: Any) -> dict[str, Any]:
    return changed(quantization_config={**MINI["quantization_config"], **changes})


def with_part(part: str, **changes: Any) -> dict[str, Any]:
    """MINI with keys of rope_scaling or vision_config changed."""
    return changed(**{part: {**(MINI.get(part) or MINI["text_config"][part]), **changes}})


BROKEN: list[tuple[dict[str, Any], str]] = [
    (changed(model_type="deepseek_v4"), "model_type expected 'deepseek_v41', found 'deepseek_v4'"),
    (changed(model_type=...), "model_type expected 'deepseek_v41', found None"),
    (changed(architectures=["LlamaForCausalLM"]), "architectures expected ['DeepseekV41ForCausalLM'], found ['LlamaForCausalLM']"),
    (changed(architectures=MINI["architectures"] * 2), "architectures expected"),
    (changed(dtype="float16"), "dtype expected 'bfloat16', found 'float16'"),
    (changed(quantization_config=...), "quantization_config.quant_method expected 'fp8', found None"),
    (with_quantization(quant_method="awq"), "quantization_config.quant_method expected 'fp8', found 'awq'"),
    (with_quantization(activation_scheme="static"), "activation_scheme expected 'dynamic'"),
    (with_quantization(weight_block_size=[128, 128]), "weight_block_size expected [32, 32], found [128, 128]"),
    (with_quantization(scale_fmt="float"), "scale_fmt expected 'ue8m0'"),
    (with_quantization(expert_dtype="fp8"), "expert_dtype expected 'fp4', found 'fp8'"),
    (changed(scoring_func="sigmoid"), "scoring_func expected 'sqrtsoftplus', found 'sigmoid'"),
    (changed(topk_method="greedy"), "topk_method expected 'noaux_tc'"),
    (changed(norm_topk_prob=False), "norm_topk_prob expected True, found False"),
    (changed(num_key_value_heads=2), "num_key_value_heads expected 1, found 2"),
    (changed(hidden_act="gelu"), "hidden_act expected 'silu'"),
    (changed(attention_bias=True), "attention_bias expected False"),
    (changed(attention_dropout=0.1), "attention_dropout expected 0.0"),
    (changed(tie_word_embeddings=True), "tie_word_embeddings expected False"),
    (changed(dspark_target_attn_input=False), "dspark_target_attn_input expected True"),
    (changed(hc_shifted=False), "hc_shifted expected True"),
    (changed(hc_pre_from_prev_sublayer=False), "hc_pre_from_prev_sublayer expected True"),
    (changed(q_head_norm=True), "q_head_norm expected False"),
    (changed(use_fp4_sparse_kv=False), "use_fp4_sparse_kv expected True"),
    (changed(gate_temp=2.0), "gate_temp expected 1.0"),
    (changed(index_k_source_layer_ids=[2]), "index_k_source_layer_ids expected kv_source_layer_ids [2, 4, 5], found [2]"),
    (changed(bos_token_id=7), "bos_token_id expected 0"),
    (changed(pad_token_id=1), "pad_token_id expected 2"),
    (changed(num_nextn_predict_layers=-1), "num_nextn_predict_layers expected 0 or more"),
    (changed(rms_norm_eps=-1.0), "rms_norm_eps expected 0 or more"),
    (changed(swiglu_limit=-1), "swiglu_limit expected"),
    (changed(hc_eps=-1e-6), "hc_eps expected 0 or more"),
    (with_part("rope_scaling", factor=0), "rope_scaling.factor expected a positive number, found 0.0"),
    (with_part("rope_scaling", original_max_position_embeddings=0), "rope_scaling.original_max_position_embeddings expected a positive"),
    (with_part("rope_scaling", beta_slow=-1), "rope_scaling.beta_slow expected a positive number"),
    (with_part("rope_scaling", beta_fast=1), "rope_scaling.beta_fast expected more than beta_slow, found 1.0"),
    (with_part("vision_config", max_wh_ratio=0), "vision_config.max_wh_ratio expected a positive number, or null"),
    (
        with_part("vision_config", num_attention_heads=5),
        "vision_config.num_attention_heads expected a divisor of vision_config.hidden_size",
    ),
    (changed(engram_vocab_size=2**30), "engram_num_embeddings expected at least engram_vocab_size 1073741824 for each of 6 columns"),
    (changed(compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1]), "compress_ratios expected 8 layers + 3 draft stages = 11 entries"),
    (changed(compress_ratios=[0, 0, 4, 2, 2, 1, 1, 1, 0, 0, 0]), "compress_ratios expected only 0, 1 and 2"),
    (changed(compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 0, 1, 0]), "compress_ratios expected 0 for every draft stage"),
    (changed(compress_ratios=[0, 0, 2, 2, 2, 1, 2, 1, 0, 0, 0]), "compress_ratios expected ratio 1 for every layer after"),
    (changed(kv_source_layer_ids=[2, 5, 4]), "kv_source_layer_ids expected ascending layers"),
    (changed(kv_source_layer_ids=[1, 2, 4, 5]), "kv_source_layer_ids expected ascending layers with a compression ratio"),
    (changed(kv_source_layer_ids=[2, 4, 6]), "kv_source_layer_ids expected the first ratio-1 layer 5 among them"),
    (changed(kv_source_layer_ids=[4, 5]), "kv_source_layer_ids expected for every layer with a ratio a source"),
    (changed(kv_source_layer_ids=[2, 4, 5, 6]), "kv_source_layer_ids expected none after layer 5"),
    (changed(index_source_layer_ids=[2, 4, 5, 9]), "index_source_layer_ids expected ascending layers"),
    (changed(index_source_layer_ids=[2, 5, 6]), "index_source_layer_ids expected every KV source [2, 4, 5] among them"),
    (changed(candidate_source_layer_id=7), "candidate_source_layer_id expected one of index_source_layer_ids [2, 4, 5, 6], or null"),
    (changed(candidate_source_layer_id=4), "candidate_source_layer_id expected a layer whose KV source serves"),
    (changed(candidate_topk_blocks=12), "candidate_topk_blocks expected a positive multiple of 8, found 12"),
    (changed(candidate_block_size=17), "candidate_block_size expected 1 to 16, found 17"),
    (changed(candidate_block_size=1), "candidate_topk_blocks expected blocks of 1 that hold index_topk = 16 positions"),
    (changed(qk_rope_head_dim=33), "qk_rope_head_dim expected even"),
    (changed(qk_rope_head_dim=128), "qk_rope_head_dim expected even and at most head_dim 64"),
    (changed(o_groups=3), "o_groups expected a divisor of num_attention_heads 4"),
    (changed(num_experts_per_tok=9), "num_experts_per_tok expected 1 to n_routed_experts 8"),
    (changed(n_shared_experts=2), "n_shared_experts expected 0 or 1"),
    (changed(eos_token_id=512), "eos_token_ids expected at least one id, all below vocab_size 512"),
    (changed(image_token_id=-1), "image_token_id expected an id, or null, found -1"),
    (changed(eos_token_id=...), "eos_token_ids expected at least one id"),
    (changed(engram_layer_ids=[1, 8]), "engram_layer_ids expected ascending layers below 8"),
    (changed(engram_num_embeddings=[1362]), "engram_num_embeddings expected 2 entries"),
    (changed(engram_max_ngram_size=1), "engram_max_ngram_size expected 2 or more"),
    (changed(engram_n_heads=0), "engram_n_heads expected"),
    (changed(engram_head_dim=48), "engram_head_dim expected a positive multiple of 32"),
    (changed(engram_vocab_size=1), "engram_vocab_size expected"),
    (changed(engram_compressed_vocab_size=513), "engram_compressed_vocab_size expected 1 to vocab_size 512"),
    (changed(engram_pad_token_id=512), "engram_pad_token_id expected an id below vocab_size 512"),
    (changed(dspark_target_layer_ids=[]), "dspark_target_layer_ids expected ascending layers below 8, at least one"),
    (changed(dspark_block_size=0), "dspark_block_size expected a positive number"),
    (changed(dspark_markov_rank=0), "dspark_markov_rank expected a positive number"),
    (changed(dspark_n_routed_experts=0), "dspark_n_routed_experts expected a positive number"),
    (changed(dspark_num_experts_per_tok=5), "dspark_num_experts_per_tok expected 1 to dspark_n_routed_experts 4"),
    (changed(dspark_noise_token_id=512), "dspark_noise_token_id expected an id below vocab_size 512"),
    *(
        (changed(**{rule.key: 0}), f"{rule.key} expected a positive number, found 0")
        for rule in CONFIG_RULES
        if rule.expected == "a positive number" and not rule.key.startswith("dspark") and "." not in rule.key
    ),
    *((with_part("vision_config", **{key: 0}), f"vision_config.{key} expected a positive number, found 0") for key in VISION_POSITIVE),
    *(
        (changed(**{rule.key: 48}), f"{rule.key} expected a multiple of 32, the features per scale, found 48")
        for rule in CONFIG_RULES
        if str(rule.expected).startswith("a multiple of 32")
    ),
]


@pytest.mark.parametrize("raw, message", BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_rule_is_one_line_with_key_expected_and_found(raw, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        parse_config(raw)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("config.json: ")


def test_every_rule_is_broken_by_some_case(monkeypatch):
    broken: set[int] = set()

    def first_broken(subject, rules):
        for rule in rules:
            if not rule.holds(subject):
                broken.add(id(rule))
                break
        check(subject, rules)

    monkeypatch.setattr("sglang.srt.models.deepseek_v41.config.check", first_broken)
    for raw, _ in BROKEN:
        with pytest.raises(ConfigError):
            parse_config(raw)
    assert [rule.key for rule in (*RAW_RULES, *CONFIG_RULES) if id(rule) not in broken] == []


@pytest.mark.parametrize(
    "raw, message",
    [
        (changed(hidden_size=...), "hidden_size is missing, expected an integer"),
        (changed(kv_source_layer_ids=...), "kv_source_layer_ids is missing, expected a list of integers"),
        (changed(hidden_size="wide"), "hidden_size expected an integer, found 'wide'"),
        (changed(hidden_size=True), "hidden_size expected an integer, found True"),
        (changed(hidden_size=64.5), "hidden_size expected an integer, found 64.5"),
        (changed(compress_ratios=2), "compress_ratios expected a list of integers, found 2"),
        (changed(hc_eps="small"), "hc_eps expected a number, found 'small'"),
        (changed(hc_eps=float("nan")), "hc_eps expected a number, found nan"),
        (changed(vocab_size=2**40), "vocab_size expected an integer, found 1099511627776"),
        (changed(eos_token_id=["x"]), "eos_token_id expected an integer, found 'x'"),
        (changed(text_config=3), "text_config expected an object, found 3"),
        (changed(vision_config=3), "vision_config expected an object, found 3"),
        (changed(vision_config={"hidden_size": 3}), "vision_config.num_hidden_layers is missing, expected an integer"),
        (changed(rope_scaling="yarn"), "rope_scaling expected an object, found 'yarn'"),
        (changed(rope_scaling={"type": "linear", "factor": 2}), "rope_scaling.rope_type expected 'yarn', found 'linear'"),
        (changed(rope_scaling={"type": "yarn", "factor": 2}), "rope_scaling.beta_fast is missing, expected a number"),
    ],
)
def test_missing_and_mistyped_values_are_named(raw, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(raw)


def test_flattened_form_gives_the_same_configuration():
    vision = MINI["vision_config"]
    flat = {k: v for k, v in MINI.items() if k not in ("text_config", "vision_config")}
    flat |= {k: v for k, v in MINI["text_config"].items() if k != "model_type"}
    flat |= {f"vision_{k}": v for k, v in vision.items()}
    assert parse_config(flat) == parse_config(MINI)


def test_top_level_wins_over_text_config_and_an_override_over_both():
    raw = changed(index_topk=24)
    raw["text_config"]["index_topk"] = 8
    assert parse_config(raw).index_topk == 24
    assert parse_config(raw, override={"index_topk": 32}).index_topk == 32
    assert parse_config(raw, override={"text_config": {"index_topk": 40}}).index_topk == 40


def test_other_spellings():
    raw = changed(dspark_num_experts_per_tok=..., dspark_n_activated_experts=3, dtype=..., torch_dtype="bfloat16")
    assert parse_config(raw).dspark_num_experts_per_tok == 3
    scaling = {**MINI["text_config"]["rope_scaling"]}
    scaling["type"] = scaling.pop("rope_type")
    assert parse_config(changed(rope_scaling=scaling)).rope_scaling == RopeScaling(16.0, 32.0, 1.0, 256)


def test_values_that_mean_off():
    assert parse_config(changed(swiglu_limit=None)).swiglu_limit == 0.0
    for value in (None, -1):
        assert parse_config(changed(candidate_source_layer_id=value)).candidate_source_layer_id is None
    assert parse_config(changed(rope_scaling=None)).rope_scaling is None
    assert parse_config(changed(vision_config=...)).vision is None
    without = changed(engram_layer_ids=[], engram_num_embeddings=[], num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1])
    assert parse_config(without).engram_layer_ids == ()


def test_end_of_sequence_ids_of_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINI))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert load_config(tmp_path).eos_token_ids == (1, 7)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="checkpoint directory not found"):
        load_config(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"config\.json not found in"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: Expecting"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object, found list"):
        load_config(tmp_path)


def test_released_roles():
    """The table of model.md §1.5."""
    config = parse_config(build_config({**PRESETS["deep"].text, **RELEASED}, PRESETS["deep"].tokenizer))
    assert config.n_prefill == 20
    expected = {0: (0, None, None), 1: (0, None, None)}
    expected |= dict.fromkeys(range(2, 8), (2, 2, 2))
    expected |= dict.fromkeys(range(8, 14), (2, 8, 8))
    expected |= dict.fromkeys(range(14, 20), (2, 14, 14))
    expected |= {layer: (1, 20, layer // 4 * 4) for layer in range(20, 40)}
    roles = config.layer_roles()
    assert {role.layer: (role.ratio, role.kv_source, role.index_source) for role in roles} == expected
    assert [layer for layer in range(40) if config.uses_candidates(layer)] == [24, 28, 32, 36]
    owns = {role.layer: role.owns for role in roles if role.owns}
    assert owns[14] == ("engram", "kv", "index")
    assert owns[20] == ("kv", "index", "candidates")
    assert owns[24] == ("index",)
    assert owns[37] == owns[38] == owns[39] == ("draft input",)
    assert set(owns) == {1, 2, 8, 14, 20, 24, 28, 32, 36, 37, 38, 39}


def test_without_ratio_1_layers_every_layer_is_prefill():
    raw = changed(
        compress_ratios=[0, 0, 2, 2, 2, 2, 2, 2, 0, 0, 0],
        kv_source_layer_ids=[2, 4],
        index_source_layer_ids=[2, 4],
        candidate_source_layer_id=None,
    )
    assert parse_config(raw).n_prefill == 8


NASTY = (None, -1, 0, 2**70, 1.5, float("nan"), float("inf"), "x", [], [1, 2, 3], ["a"], [[1]], {}, {"a": 1}, True)


def test_any_value_of_any_key_is_accepted_or_refused_in_one_line():
    levels = [(), ("text_config",), ("text_config", "rope_scaling"), ("vision_config",), ("quantization_config",)]
    for level in levels:
        for key in functools.reduce(dict.__getitem__, level, MINI):
            for value in NASTY:
                raw = copy.deepcopy(MINI)
                functools.reduce(dict.__getitem__, level, raw)[key] = value
                assert "\n" not in (refusal(parse_config, raw) or "")
