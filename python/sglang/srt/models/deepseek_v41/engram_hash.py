"""From token ids to Engram table rows: token classes, primes, multipliers, hashes (model.md §7.1-7.3).

Everything depends on token ids alone. The class count enters every multiplier, so a tokenizer that gives another count than
the checkpoint states is refused.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers

from sglang.srt.errors import ConfigError
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config

REPLACEMENT = "\ufffd"
LONE_SPACE = "\ue000"
"""Private use: stands for a text that is one space while the others are stripped."""

LOOK = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex("^ $"), LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(LONE_SPACE, " "),
    ]
)
"""Two tokens with the same LOOK share a class. The library's steps, not Python's: its marks and lower case differ from Python's
for Indic, Thai and Greek, and with them the class count of the released tokenizer."""

SEED_STEP = 10007


def load_hasher(config: DeepseekV41Config, tokenizer_path: Path) -> EngramHasher:
    """The hasher of a checkpoint. Raises ConfigError if the tokenizer does not belong to it."""
    file = tokenizer_path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"tokenizer.json not found in {tokenizer_path}; Engram needs it")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    return EngramHasher(config, token_classes(tokenizer, config.vocab_size))


def token_classes(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """int64 [vocab_size]: tokens that look alike share a class, numbered by first appearance (model.md §7.1)."""
    ids = [[i] for i in range(vocab_size)]
    texts = tokenizer.decode_batch(ids, skip_special_tokens=False)
    numbers: dict[str, int] = {}
    classes = np.empty(vocab_size, dtype=np.int64)
    for i, text in enumerate(texts):
        key = (tokenizer.id_to_token(i) or "") if REPLACEMENT in text else LOOK.normalize_str(text) or text
        classes[i] = numbers.setdefault(key, len(numbers))
    return classes


class EngramHasher:
    """Row ids of every Engram layer."""

    def __init__(self, config: DeepseekV41Config, classes: np.ndarray):
        count = int(classes.max()) + 1
        if count != config.engram_compressed_vocab_size:
            raise ConfigError(
                f"the tokenizer has {count} Engram token classes, but engram_compressed_vocab_size is "
                f"{config.engram_compressed_vocab_size}: it is not this checkpoint's tokenizer"
            )
        self.classes = torch.from_numpy(classes)
        self.pad_class = int(classes[config.engram_pad_token_id])
        self.orders = config.engram_max_ngram_size - 1  # n-gram sizes 2 .. max
        self.primes = torch.tensor(
            layer_primes(config.engram_vocab_size, len(config.engram_layer_ids), self.orders, config.engram_n_heads)
        )  # [layers, orders, heads]
        self.multipliers = torch.stack([layer_multipliers(layer, count, config.engram_max_ngram_size) for layer in config.engram_layer_ids])
        flat = self.primes.flatten(1)
        sums = flat.sum(dim=1).tolist()
        if tuple(sums) != config.engram_num_embeddings:
            raise ConfigError(
                f"config.json: engram_num_embeddings expected {sums} (sums of the primes), found {list(config.engram_num_embeddings)}"
            )
        self.offsets = (flat.cumsum(dim=1) - flat).view_as(self.primes)

    def row_ids(self, windows: torch.Tensor) -> torch.Tensor:
        """int64 [layers, n, columns] of windows int64 [n, max_ngram_size]: ids newest first.

        An id outside the vocabulary (before the start, or of an image) turns itself and everything older into padding.
        """
        known = (windows >= 0) & (windows < self.classes.shape[0])
        known = known.cummin(dim=1).values
        classes = torch.where(known, self.classes[windows.clamp(0, self.classes.shape[0] - 1)], self.pad_class)
        products = classes[None] * self.multipliers[:, None, :]  # [layers, n, size]
        hashed, rows = products[..., 0], []
        for order in range(self.orders):
            hashed = hashed ^ products[..., order + 1]
            rows.append(hashed[..., None] % self.primes[:, None, order] + self.offsets[:, None, order])
        return torch.cat(rows, dim=-1)


def layer_primes(first: int, num_layers: int, num_orders: int, num_heads: int) -> list[list[list[int]]]:
    """Moduli [layer][order][head]: the primes from `first` upward, none used twice (model.md §7.2)."""
    primes = (n for n in itertools.count(first) if _is_prime(n))
    return [[[next(primes) for _ in range(num_heads)] for _ in range(num_orders)] for _ in range(num_layers)]


def layer_multipliers(layer: int, num_classes: int, size: int) -> torch.Tensor:
    """int64 [size], odd; products with a class stay below 2^63."""
    bound = max(1, (2**63 - 1) // num_classes // 2)
    values = np.random.default_rng(SEED_STEP * layer).integers(0, bound, size=size, dtype=np.int64)
    return torch.from_numpy(2 * values + 1)


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    return all(n % d for d in range(3, int(n**0.5) + 1, 2))
