"""What the HTTP process knows of the model: a few numbers from config.json, read without loading anything."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelInfo:
    """Facts for admission and for /model_info."""

    vocab_size: int  # ids the model knows; the tokenizer may have fewer
    context_length: int  # tokens of prompt + output
    model_type: str = "deepseek_v41"
    architectures: list[str] = field(default_factory=list)
    has_vision: bool = False
