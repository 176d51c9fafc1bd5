#!/usr/bin/env python3
"""Write a random V4.1 checkpoint in the released format, from 4-layer toys to a billion parameters.

    python tools/random_checkpoint.py OUT --preset demo --seed 0

The same preset, seed and gain give the same tensors, however they are sharded. Every value is a table entry picked by a
random 16-bit number: the table holds the codes of a normal distribution in the tensor's own format, so nothing is computed
in high precision and rounded afterwards, and memory stays at a few megabytes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, BinaryIO

import numpy as np
import torch
from tokenizers import Tokenizer

import sglang
from sglang.srt.errors import ConfigError
from sglang.srt.kernels.formats import decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config, parse_config
from sglang.srt.models.deepseek_v41.engram_hash import layer_primes, token_classes
from sglang.srt.models.deepseek_v41.tensor_spec import BF16, F32, FP4, FP8, SCALE, TensorSpec, tensor_specs, vision_specs

ASSETS = Path(sglang.__file__).parent / "assets"
TOY_TOKENIZER = ASSETS / "toy_tokenizer"  # 4,096 tokens
BYTE_TOKENIZER = ASSETS / "byte_tokenizer"  # 512 tokens

DRAWS = 1 << 16
CHUNK = 1 << 22
"""Values drawn at a time."""

BASE: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 256},
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "compress_rope_theta": 160000,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "index_n_heads": 16,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 8,
    "engram_pad_token_id": 2,
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 211,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "dspark_block_size": 5,
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "use_cache": True,
}
VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 3136,
    "max_wh_ratio": None,
}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def _roles(ratios: Sequence[int], stages: int, kv: list[int], index: list[int], engram: list[int]) -> dict[str, Any]:
    """Layer roles; the first ratio-1 layer publishes candidates, the last `stages` layers feed the draft."""
    return {
        "num_hidden_layers": len(ratios),
        "num_nextn_predict_layers": stages,
        "compress_ratios": [*ratios, *[0] * stages],
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": index,
        "candidate_source_layer_id": list(ratios).index(1),
        "engram_layer_ids": engram,
        "dspark_target_layer_ids": list(range(len(ratios) - stages, len(ratios))),
    }


def _widths(d: int, heads: int, head: int, rope: int, q_rank: int, groups: int, o_rank: int, inner: int, experts: int) -> dict[str, Any]:
    return {
        "hidden_size": d,
        "num_attention_heads": heads,
        "head_dim": head,
        "qk_rope_head_dim": rope,
        "index_head_dim": head,
        "q_lora_rank": q_rank,
        "o_groups": groups,
        "o_lora_rank": o_rank,
        "moe_intermediate_size": inner,
        "n_routed_experts": experts,
    }


EIGHT = _roles([0, 0, 2, 2, 2, 1, 1, 1], 3, [2, 4, 5], [2, 4, 5, 6], [1, 4])
TWELVE = _roles([0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1], 3, [2, 4, 6], [2, 4, 6, 8, 10], [1, 4])
SIXTEEN = _roles([0, 0, *[2] * 6, *[1] * 8], 3, [2, 5, 8], [2, 5, 8, 11, 14], [1, 5])
RELEASED = _roles([0, 0, *[2] * 18, *[1] * 20], 3, [2, 8, 14, 20], [2, 8, 14, 20, 24, 28, 32, 36], [1, 14])
LONG = {
    "max_position_embeddings": 32768,
    "rope_scaling": {**BASE["rope_scaling"], "original_max_position_embeddings": 2048},
    "sliding_window": 128,
    "index_topk": 128,
    "candidate_topk_blocks": 64,
    "num_experts_per_tok": 4,
}


@dataclass(frozen=True)
class Preset:
    """`text` is laid over BASE; the tokenizer decides vocab_size and the special ids."""

    about: str
    text: Mapping[str, Any]
    tokenizer: Path = BYTE_TOKENIZER


PRESETS: dict[str, Preset] = {
    "nano": Preset(
        "4 layers, the least that has a ratio-2 and a ratio-1 cache",
        {
            **_roles([0, 2, 1, 1], 1, [1, 2], [1, 2, 3], [1]),
            **_widths(64, 2, 32, 16, 32, 2, 32, 32, 4),
            "sliding_window": 8,
            "index_topk": 8,
        },
    ),
    "mini": Preset(
        "8 layers, every mechanism", {**EIGHT, **_widths(128, 4, 64, 32, 64, 2, 32, 64, 8), "sliding_window": 16, "index_topk": 16}
    ),
    "deep": Preset(
        "the released pattern of 40 layers and 3 draft stages at toy width",
        {**RELEASED, **_widths(64, 2, 32, 16, 32, 2, 32, 32, 8), "sliding_window": 16, "index_topk": 16},
    ),
    "demo": Preset(
        "mini with a vocabulary of 4,096 and a context of 32,768: quick on any machine, what `make demo` serves",
        {**EIGHT, **LONG, **_widths(128, 4, 64, 32, 64, 2, 32, 64, 8), "sliding_window": 32, "index_topk": 64, "num_experts_per_tok": 2},
        TOY_TOKENIZER,
    ),
    "kernel": Preset(
        "the released geometry per head (512 / 64 / 128), 6 layers",
        {
            **_roles([0, 2, 2, 1, 1, 1], 1, [1, 3], [1, 3, 5], [1]),
            **LONG,
            **_widths(256, 8, 512, 64, 128, 2, 128, 128, 8),
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_topk": 512,
            "engram_head_dim": 256,
            "num_experts_per_tok": 2,
        },
    ),
    "100m": Preset(
        "about 100 M parameters",
        {**TWELVE, **LONG, **_widths(512, 8, 128, 32, 256, 4, 128, 256, 16), "engram_vocab_size": 4001, "dspark_n_routed_experts": 8},
        TOY_TOKENIZER,
    ),
    "300m": Preset(
        "about 300 M parameters",
        {**SIXTEEN, **LONG, **_widths(768, 12, 128, 32, 384, 4, 192, 384, 16), "engram_vocab_size": 8009, "dspark_n_routed_experts": 8},
        TOY_TOKENIZER,
    ),
    "1b": Preset(
        "about 1 B parameters",
        {
            **SIXTEEN,
            **LONG,
            **_widths(1024, 16, 128, 64, 512, 4, 256, 512, 32),
            "engram_vocab_size": 20011,
            "engram_n_heads": 4,
            "engram_head_dim": 64,
            "dspark_n_routed_experts": 16,
        },
        TOY_TOKENIZER,
    ),
}


def write_checkpoint(
    path: Path | str,
    preset: str | Mapping[str, Any] = "demo",
    seed: int = 0,
    *,
    shards: int = 1,
    prefix: bool = False,
    gain: float = 0.25,
    tokenizer: Path | str | None = None,
    vision: bool = True,
    draft: bool = True,
) -> Path:
    """Write a checkpoint directory and return its path.

    `preset` is a name or a mapping laid over BASE as text_config. `prefix` puts `model.` before every name. `gain` scales what
    sublayers add to the residual. `tokenizer` is a directory with tokenizer.json; by default the preset's.
    Raises ConfigError if the configuration contradicts itself.
    """
    path = Path(path)
    chosen = PRESETS[preset] if isinstance(preset, str) else Preset("", preset)
    source = Path(tokenizer) if tokenizer is not None else chosen.tokenizer
    raw = build_config(chosen.text, source, vision=vision, draft=draft)
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 0.95}
    config = parse_config(raw, generation)
    specs = [*tensor_specs(config).values(), *(vision_specs(config).values() if vision else ())]
    values = RandomValues(seed, gain, quiet_ids(source))

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").unlink(missing_ok=True)
    weight_map: dict[str, str] = {}
    parts = _split(specs, shards)
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else "model.safetensors"
        _write_shard(path / name, part, values, "model." if prefix else "")
        weight_map |= {f"{'model.' if prefix else ''}{spec.name}": name for spec in part}
    _write_json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": sum(spec.num_bytes for spec in specs)}, "weight_map": dict(sorted(weight_map.items()))},
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, path / name)
    _write_json(path / "generation_config.json", generation)
    _write_json(path / "config.json", raw)  # last: a directory that has it is complete
    return path


def build_config(text: Mapping[str, Any], tokenizer_path: Path, *, vision: bool = True, draft: bool = True) -> dict[str, Any]:
    """config.json in the nested form. Vocabulary, special ids and Engram sizes follow from the tokenizer."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    merged: dict[str, Any] = copy.deepcopy({**BASE, "vocab_size": vocab_size, "dspark_noise_token_id": _noise_id(tokenizer), **text})
    if not draft:
        stages = merged["num_nextn_predict_layers"]
        merged["compress_ratios"] = merged["compress_ratios"][: len(merged["compress_ratios"]) - stages]
        merged["num_nextn_predict_layers"] = 0
    primes = layer_primes(
        merged["engram_vocab_size"], len(merged["engram_layer_ids"]), merged["engram_max_ngram_size"] - 1, merged["engram_n_heads"]
    )
    merged["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    merged["engram_compressed_vocab_size"] = int(token_classes(tokenizer, vocab_size).max()) + 1
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": _id_of(tokenizer, "<｜deepseek_image｜>", vocab_size - 1),
        "text_config": merged,
        **({"vision_config": VISION} if vision else {}),
        "quantization_config": QUANTIZATION,
    }


def _id_of(tokenizer: Tokenizer, token: str, default: int) -> int:
    found = tokenizer.token_to_id(token)
    return default if found is None else found


def _noise_id(tokenizer: Tokenizer) -> int:
    """Any token that is never generated serves as the draft's noise token; the released one precedes the role markers."""
    return _id_of(tokenizer, "<｜System｜>", tokenizer.get_vocab_size() - 18)


def quiet_ids(tokenizer_path: Path) -> list[int]:
    """Special tokens other than the end of a sequence: their logits are kept small, so that random models speak in text."""
    added = json.loads((tokenizer_path / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
    return [token["id"] for token in added if token["id"] != 1]


@dataclass(frozen=True)
class Spread:
    """Distribution of a tensor's values."""

    mean: float
    std: float


def spread(spec: TensorSpec, gain: float) -> Spread:
    """Chosen so that activations keep a size of about one through all layers, and biases, sinks and gates are felt."""
    name = spec.name
    fan_in = spec.shape[-1] * (2 if spec.dtype == FP4 else 1)
    for pattern, mean, std in (
        (r"markov_head\.head\.weight$", 0.0, 0.3 / math.sqrt(fan_in)),
        (r"(^|\.)embed\.weight$|^image_", 0.0, 1.0),
        (r"^head\.weight$", 0.0, 2.0 / math.sqrt(fan_in)),
        (r"norm\d?\.weight$", 1.0, 0.1),
        (r"engram\.[qk]_weight$", 1.0, 0.3),
        (r"attn_sink$", 0.0, 1.5),
        (r"gate\.bias$", 0.0, 0.1),
        (r"gate\.bias_vl$", 0.0, 0.2),
        (r"hc_\w+_scale$", 0.5, 0.1),
        (r"hc_\w+_base$", 0.0, 0.8),
        (r"\.bias$", 0.0, 0.02),
        (r"\.wgate\.weight$", 0.0, 2.0 / math.sqrt(fan_in)),
        (r"\.(wo_b|w2)\.weight$", 0.0, gain / math.sqrt(fan_in)),
        (r"experts\.\d+\.w[13]\.weight$", 0.0, 1.5 / math.sqrt(fan_in)),
    ):
        if re.search(pattern, name):
            return Spread(mean, std)
    return Spread(0.0, 1.0 / math.sqrt(fan_in))


class RandomValues:
    """The bytes of a tensor: a function of seed, gain and the tensor's name, dtype and shape."""

    def __init__(self, seed: int, gain: float, quiet: Sequence[int]):
        self.seed = seed
        self.gain = gain
        self.quiet = np.asarray(quiet, dtype=np.int64)

    def chunks(self, spec: TensorSpec, weight: TensorSpec | None = None) -> Iterator[np.ndarray]:
        """The tensor in row-major order. `weight`: the matrix that a scale tensor belongs to."""
        key = hashlib.blake2b(f"{self.seed}/{spec.name}".encode(), digest_size=16).digest()
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
        table = self._table(spec, weight)
        if spec.name == "head.weight":
            yield from self._head_chunks(rng, spec, table)
            return
        left = math.prod(spec.shape)
        while left:
            size = min(left, CHUNK)
            yield table[rng.integers(0, DRAWS, size, dtype=np.uint16)]
            left -= size

    def _head_chunks(self, rng: np.random.Generator, spec: TensorSpec, table: np.ndarray) -> Iterator[np.ndarray]:
        rows, columns = spec.shape
        soft = _bfloat16_table(0.0, spread(spec, self.gain).std / 10)
        step = max(1, CHUNK // columns)
        for first in range(0, rows, step):
            draws = rng.integers(0, DRAWS, (min(step, rows - first), columns), dtype=np.uint16)
            values = table[draws]
            quiet = self.quiet[(self.quiet >= first) & (self.quiet < first + len(draws))] - first
            values[quiet] = soft[draws[quiet]]
            yield values

    def _table(self, spec: TensorSpec, weight: TensorSpec | None) -> np.ndarray:
        if spec.dtype == FP8:
            return _e4m3_codes()[0]
        if spec.dtype == FP4:
            return _e2m1_codes()[0]
        if spec.dtype == SCALE:
            assert weight is not None, spec.name
            codes_std = (_e2m1_codes if weight.dtype == FP4 else _e4m3_codes)()[1]
            return _scale_table(spread(weight, self.gain).std / codes_std)
        wanted = spread(spec, self.gain)
        return _bfloat16_table(wanted.mean, wanted.std) if spec.dtype == BF16 else _float32_table(wanted.mean, wanted.std)


@functools.cache
def _normal(points: int) -> torch.Tensor:
    """float32 [points]: quantiles of the standard normal distribution."""
    inverse = NormalDist().inv_cdf
    return torch.tensor([inverse((i + 0.5) / points) for i in range(points)], dtype=torch.float32)


@functools.lru_cache(maxsize=64)
def _float32_table(mean: float, std: float) -> np.ndarray:
    return (_normal(DRAWS) * std + mean).numpy()


@functools.lru_cache(maxsize=64)
def _bfloat16_table(mean: float, std: float) -> np.ndarray:
    """Bit patterns, uint16."""
    return (_normal(DRAWS) * std + mean).bfloat16().view(torch.int16).numpy().view(np.uint16)


@functools.cache
def _e4m3_codes() -> tuple[np.ndarray, float]:
    """Codes by draw, and the standard deviation of their values."""
    codes = encode_e4m3(_normal(DRAWS) * 64)
    return codes.numpy(), float(decode_e4m3(codes).std())


@functools.cache
def _e2m1_codes() -> tuple[np.ndarray, float]:
    """Bytes of two codes by draw (each half of the draw's bits makes one), and the standard deviation of their values."""
    values = _normal(256) * 2
    draw = torch.arange(DRAWS)
    packed = encode_e2m1(torch.stack((values[draw & 255], values[draw >> 8]), dim=-1))[:, 0]
    return packed.numpy(), float(decode_e2m1(packed[:, None]).std())


@functools.lru_cache(maxsize=64)
def _scale_table(ratio: float) -> np.ndarray:
    """E8M0 bytes by draw whose root mean square is `ratio`.

    Neighbouring scales must differ, or a loader that mixes them up would pass: a quarter each lies one power below and above,
    and a share p one further up, which makes the mean square come out right.
    """
    base = math.floor(math.log2(ratio / 1.25))  # (1/4 * 1/4 + 1/2 + 1/4 * 4) = 1.25^2
    share = ((ratio / 1.25 / 2.0**base) ** 2 - 1) / 3
    draw = np.arange(DRAWS)
    step = np.array([-1, 0, 0, 1])[draw & 3] + (draw >> 2 < share * (DRAWS >> 2))
    return np.clip(base + step + 127, 1, 254).astype(np.uint8)


def _split(specs: Sequence[TensorSpec], shards: int) -> list[list[TensorSpec]]:
    """Consecutive parts of about equal bytes; a matrix and its scales may part, as they may in any checkpoint."""
    total, done = sum(spec.num_bytes for spec in specs), 0
    parts: list[list[TensorSpec]] = [[] for _ in range(max(1, shards))]
    for spec in specs:
        parts[min(done * len(parts) // total, len(parts) - 1)].append(spec)
        done += spec.num_bytes
    return [part for part in parts if part]


def _write_shard(file: Path, specs: Sequence[TensorSpec], values: RandomValues, prefix: str) -> None:
    # Wide elements first, so that every tensor is aligned.
    order = sorted(specs, key=lambda spec: (-{F32: 4, BF16: 2}.get(spec.dtype, 1), spec.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in order:
        start, end = end, end + spec.num_bytes
        header[prefix + spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for spec in order:
            _write_tensor(stream, spec, values)


def _write_tensor(stream: BinaryIO, spec: TensorSpec, values: RandomValues) -> None:
    for chunk in values.chunks(spec, scaled_matrix(spec)):
        stream.write(chunk.data)


def scaled_matrix(spec: TensorSpec) -> TensorSpec | None:
    """What a scale tensor scales: name, dtype and the number of inputs, which is all that its values depend on."""
    if spec.dtype != SCALE:
        return None
    name = spec.name.removesuffix("scale") + "weight"
    if re.search(r"\.experts\.\d+\.", name):
        return TensorSpec(name, FP4, (spec.shape[0], spec.shape[1] * 16))
    return TensorSpec(name, FP8, (spec.shape[0], spec.shape[1] * 32))


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def preset_config(name: str) -> DeepseekV41Config:
    """The configuration of a preset, without writing anything."""
    preset = PRESETS[name]
    return parse_config(build_config(preset.text, preset.tokenizer))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit code 2 and one line on stderr if the configuration is refused."""
    about = "\n".join(f"  {name:8} {preset.about}" for name, preset in PRESETS.items())
    parser = argparse.ArgumentParser(
        description="Write a random V4.1 checkpoint.", epilog=f"presets:\n{about}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", help="directory to write")
    parser.add_argument("--preset", choices=PRESETS, default="demo")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "JSON"), help="change a key of text_config")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1, help="number of safetensors files")
    parser.add_argument("--prefix", action="store_true", help="put model. before every tensor name")
    parser.add_argument("--gain", type=float, default=0.25, help="scale of what sublayers add to the residual")
    parser.add_argument("--tokenizer", help="directory with tokenizer.json and tokenizer_config.json; default: the preset's")
    parser.add_argument("--no-vision", action="store_true", help="leave out the vision tower")
    parser.add_argument("--no-draft", action="store_true", help="leave out the draft stages")
    args = parser.parse_args(argv)
    preset = PRESETS[args.preset]
    text = {**preset.text, **{key: json.loads(value) for key, value in args.set}}
    try:
        path = write_checkpoint(
            args.out,
            text,
            args.seed,
            shards=args.shards,
            prefix=args.prefix,
            gain=args.gain,
            tokenizer=args.tokenizer or preset.tokenizer,
            vision=not args.no_vision,
            draft=not args.no_draft,
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    print(f"{path}: {args.preset}, seed {args.seed}, {size:,} bytes of tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
