"""Step "sample": logits rows to tokens and logprobs.

The contract, which is also the test: the bits of a result depend on (row, state, position) only, never on the other
rows, their number, or their order. Two things make it so: rows that need arithmetic are processed one by one, each on
tensors of its own, and what runs over all rows at once (maximum, NaN test) only compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.managers.io_struct import TokenLogprobs
from sglang.srt.sampling.sampling_state import SamplingState
from sglang.srt.sampling.transforms import NoCandidate, choose, descending

LOGPROB_FLOOR = -9999.0
"""Reported instead of minus infinity, which JSON cannot say."""


@dataclass(slots=True)
class SampledToken:
    """One sampled token. With `error` set the request ends alone and `id` means nothing (it is 0, a valid id)."""

    id: int
    logprob: float | None = None  # of `id`, if asked
    top: list[tuple[float, int]] | None = None  # (logprob, id), best first, lower id first on equal logits
    token_ids: list[tuple[float, int]] | None = None  # (logprob, id) of the ids asked, in their order
    error: str | None = None
    is_own_doing: bool = False  # the error is what the request asked for: its bans leave no token


class Sampler:
    """Stateless: everything a request brings along is in its SamplingState."""

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> list[SampledToken]:
        """One token per row of float32 [n, V] raw logits; `positions[i]` is the absolute position of the token to come.

        Tokens are committed to their states. Consecutive positions of one request may be in one call, in order.
        """
        if not len(states) == len(positions) == logits.shape[0]:
            raise ValueError(f"{logits.shape[0]} rows, {len(states)} states and {len(positions)} positions do not belong together")
        if not states:
            return []
        logits = logits.float()
        maxima, argmaxima = logits.max(dim=1)  # a NaN anywhere in a row becomes its maximum; ties give the lowest index
        results = []
        for row, state, position, maximum, argmax in zip(logits, states, positions, maxima.tolist(), argmaxima.tolist(), strict=True):
            if math.isnan(maximum):
                results.append(SampledToken(id=0, error=f"the model produced NaN at position {position}"))
                continue
            if state.takes_plain_argmax and maximum != -math.inf:
                token = SampledToken(id=argmax)
            else:
                try:
                    token = SampledToken(id=choose(row, state, position))
                except NoCandidate as error:
                    results.append(SampledToken(id=0, error=str(error), is_own_doing=maximum != -math.inf))
                    continue
            state.commit([token.id])
            if state.return_logprob:
                logprobs = row_logprobs(row)
                token.logprob = float(logprobs[token.id])
                token.top = top_logprobs(row, logprobs, state.top_logprobs) if state.top_logprobs else None
                token.token_ids = selected_logprobs(logprobs, state.token_ids_logprob)
            results.append(token)
        return results

    def prompt_logprobs(self, logits: torch.Tensor, targets: Sequence[int], top: int, token_ids: Sequence[int] | None) -> TokenLogprobs:
        """Logprobs of known tokens: `targets[i]` is the id that follows row i of float32 [n, V] raw logits.

        The result has n entries. `top` > 0 adds that many most probable ids, `token_ids` the logprobs of those ids.
        """
        if len(targets) != logits.shape[0]:
            raise ValueError(f"{logits.shape[0]} rows and {len(targets)} target ids do not belong together")
        result = TokenLogprobs(ids=list(targets), logprobs=[], top=[] if top else None, token_ids=[] if token_ids is not None else None)
        for row, target in zip(logits.float(), targets, strict=True):
            logprobs = row_logprobs(row)
            result.logprobs.append(float(logprobs[target]))
            if result.top is not None:
                result.top.append(top_logprobs(row, logprobs, top))
            if result.token_ids is not None:
                result.token_ids.append(selected_logprobs(logprobs, token_ids))
        return result


def row_logprobs(row: torch.Tensor) -> torch.Tensor:
    """log-softmax of one float32 [V] row of raw logits ("original" logprobs: before every transform), all finite."""
    logprobs = torch.log_softmax(row, dim=0)
    infinite = row == math.inf
    if bool(infinite.any()):  # the limit: all mass on the infinite logits, in equal parts
        logprobs = torch.where(infinite, -math.log(int(infinite.sum())), -math.inf)
    return torch.nan_to_num(logprobs, nan=LOGPROB_FLOOR, neginf=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)


def top_logprobs(row: torch.Tensor, logprobs: torch.Tensor, k: int) -> list[tuple[float, int]]:
    """The k most probable ids of a row, as (logprob, id).

    Ordered by raw logit, not by logprob: two logits may round to one logprob, and the argmax should still come first.
    """
    ids = descending(row, k)[:k]
    return list(zip(logprobs[ids].tolist(), ids.tolist(), strict=True))


def selected_logprobs(logprobs: torch.Tensor, ids: Sequence[int] | None) -> list[tuple[float, int]] | None:
    """(logprob, id) of the ids asked for, in the order asked; None if none were asked for."""
    if ids is None:
        return None
    return list(zip(logprobs[torch.tensor(ids, dtype=torch.int64, device=logprobs.device)].tolist(), ids, strict=True))
