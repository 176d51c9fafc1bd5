"""The toy tokenizer, once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.entrypoints.openai.recipe import Recipe
from sglang.srt.managers.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[3] / "golden"
TOY = GOLDEN / "toy_tokenizer"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOY)


@pytest.fixture(scope="session")
def recipe(tokenizer: Tokenizer) -> Recipe:
    return Recipe((TOY / "tokenizer.json").read_text(), model_names=("toy",))
