"""Frequency, presence and repetition penalties of one sequence: functions of the tokens it has produced so far.

All three look at produced tokens only, not at the prompt, and additive ones come before the multiplicative one: SGLang's
semantics (other engines let the repetition penalty see the prompt as well).

    z(v) <- z(v) - frequency * count(v) - presence * [count(v) > 0]
    z(v) <- z(v) / repetition  if z(v) > 0 else  z(v) * repetition          where count(v) > 0
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang.srt.sampling.sampling_params import SamplingParams


class Penalties:
    """The produced tokens of one sequence, as a list and as counts, and what they do to a row of logits.

    The list makes it possible to go back: a step that was superfluous, or drafts that were not accepted, are forgotten by
    `rewind`, so that the counts always are those of the tokens before the position being sampled.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device | str = "cpu"):
        self.params = params
        self.ids: list[int] = []
        self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)  # float32 [V]; exact below 2^24

    def extend(self, ids: Iterable[int]) -> None:
        """Count tokens that were produced."""
        for token_id in ids:
            self.ids.append(token_id)
            self.counts[token_id] += 1

    def rewind(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` produced tokens. ValueError if fewer are known."""
        if num_tokens > len(self.ids):
            raise ValueError(f"penalties know {len(self.ids)} produced tokens, but {num_tokens} come before this position")
        while len(self.ids) > num_tokens:
            self.counts[self.ids.pop()] -= 1

    def apply_(self, row: torch.Tensor) -> torch.Tensor:
        """Change float32 [V] logits in place. Elementwise, so the bits of one logit depend on nothing but its own count."""
        p = self.params
        if not self.ids:
            return row
        if p.frequency_penalty != 0.0:
            row -= self.counts * p.frequency_penalty
        produced = self.counts > 0
        if p.presence_penalty != 0.0:
            row -= produced * p.presence_penalty
        if p.repetition_penalty != 1.0:
            row.copy_(torch.where(produced, torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty), row))
        return row
