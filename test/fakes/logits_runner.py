"""The suspicious fake runner with real sampling: logits are a function of the prefix, the sampler and its masks are ours."""

from __future__ import annotations

import numpy as np
import torch

from fakes.fake_model_runner import FakeModelRunner
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.step import SampledToken, StepRequest


class LogitsRunner(FakeModelRunner):
    """A random model: standard normal logits, the same for the same prefix."""

    def __init__(self, **options):
        super().__init__(**options)
        self.sampler = Sampler()

    def _sample(self, request: StepRequest, hashes: np.ndarray, slot: int) -> SampledToken | None:
        if request.sampling is None:
            return None
        generator = torch.Generator().manual_seed(int(hashes[-1]) & (2**63 - 1))
        logits = torch.randn((1, self.config.vocab_size), generator=generator)
        token = self.sampler.sample(logits, [request.sampling], [request.position])[0]
        self.last_token[slot] = (request.position, token.id)
        return token
