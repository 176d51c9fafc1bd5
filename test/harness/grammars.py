"""The toy tokenizer and one xgrammar backend for all tests of a process: loading the library takes seconds."""

from __future__ import annotations

import functools
from pathlib import Path

from sglang.srt.constrained.manager import GrammarManager
from sglang.srt.constrained.xgrammar_backend import XGrammarBackend
from sglang.srt.managers.tokenizer import Tokenizer

TOY = Path(__file__).parents[1] / "golden" / "toy_tokenizer"
VOCAB = 4096 + 40
"""The model's vocabulary is larger than the tokenizer's, as it may be in checkpoints."""


@functools.lru_cache(maxsize=1)
def toy() -> Tokenizer:
    return Tokenizer.load(TOY)


@functools.lru_cache(maxsize=1)
def backend() -> XGrammarBackend:
    return XGrammarBackend(toy(), VOCAB, max_length_bounds=10_000)


def manager() -> GrammarManager:
    """A compile thread of its own over the shared backend; close it."""
    return GrammarManager(backend, cache_bytes=1 << 24)
