"""What the sampler must remember about one request, besides the logits it is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.sampling.penalties import Penalties
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sampling.seeds import MASK64


class SamplingState:
    """Lives as long as the request, survives retraction, and is changed only by the Sampler, in the model thread.

    Everything is a function of absolute positions, never of how often the sampler was called: sampling position p again
    gives the same token again, also after later positions had been sampled and thrown away.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        eos_ids: frozenset[int],
        vocab_size: int,
        *,
        return_logprob: bool = False,
        top_logprobs: int = 0,
        token_ids_logprob: list[int] | None = None,
        device: torch.device | str = "cpu",
    ):
        """`params` normalised and, unless greedy, with a seed (else ValueError); `device` is where logits will be."""
        if params.sampling_seed is None and not params.is_greedy:
            raise ValueError("a request that samples needs a sampling_seed; draw one at admission")
        self.params = params
        self.prompt_len = len(prompt_ids)
        self.vocab_size = vocab_size
        self.return_logprob = return_logprob
        self.top_logprobs = top_logprobs
        self.token_ids_logprob = token_ids_logprob
        self.seed = (params.sampling_seed or 0) & MASK64
        self.vocab_mask: torch.Tensor | None = None
        """bool [V], True where the next token is allowed. Set for each step by whoever owns a grammar; None: all."""

        self.penalties = Penalties(params, vocab_size, device) if params.has_penalties else None
        self.bias_ids: torch.Tensor | None = None  # int64 [number of biases]
        self.bias_values: torch.Tensor | None = None  # float32, same shape
        if params.logit_bias:
            self.bias_ids = torch.tensor([int(key) for key in params.logit_bias], dtype=torch.int64, device=device)
            self.bias_values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        self.end_ids: torch.Tensor | None = None  # int64: what min_new_tokens bans
        if params.min_new_tokens > 0:
            ends = sorted(i for i in eos_ids.union(params.stop_token_ids) if 0 <= i < vocab_size)
            self.end_ids = torch.tensor(ends, dtype=torch.int64, device=device)

    @property
    def takes_plain_argmax(self) -> bool:
        """True where the raw logits' argmax is the answer, at every position so far as is known now."""
        return (
            self.params.is_greedy and self.penalties is None and self.bias_ids is None and self.end_ids is None and self.vocab_mask is None
        )

    def bans_end(self, position: int) -> bool:
        """True while the token at `position` is one of the first min_new_tokens."""
        return self.end_ids is not None and position - self.prompt_len < self.params.min_new_tokens

    def begin(self, position: int) -> None:
        """Go to the state just before the token at `position`: forget tokens that were sampled at or after it."""
        if self.penalties is not None:
            self.penalties.rewind(position - self.prompt_len)

    def commit(self, ids: Sequence[int]) -> None:
        """Tokens that follow those known so far: sampled here, or handed over by another worker."""
        if self.penalties is not None:
            self.penalties.extend(ids)
