"""From one row of raw logits to one token: the transforms of a request, in the one order that every path uses.

    penalties, logit bias, ban of EOS before min_new_tokens, grammar mask | temperature, top-k, top-p, min-p | noise

The first group changes logits (`adjust`), the second only removes candidates (`kept_ids`), then the noise decides
(`draw`). Everything works on one row of its own, shape [V]: no operation sees another row, so none can depend on one.

top-p is taken over the renormalised top-k set, min-p over the renormalised top-p set. Where an order matters it is
"logit descending, id ascending"; sums over it are sequential (cumsum), in float64.
"""

from __future__ import annotations

import math

import torch

from sglang.srt.sampling.keyed_noise import gumbel_noise
from sglang.srt.sampling.sampling_state import SamplingState

FIRST_SORTED = 1024
"""Candidates sorted at first for top-p. Enough for nearly every row; the whole vocabulary is sorted where it is not."""

NO_CANDIDATE = "no token is left to sample at position {position}: {why}"


class NoCandidate(ValueError):
    """A row has nothing to sample from; ends its request alone."""


def adjust(row: torch.Tensor, state: SamplingState, position: int) -> torch.Tensor:
    """A new float32 [V] row: penalties, bias, bans and mask applied. Raises NoCandidate if every token is ruled out."""
    state.begin(position)
    row = row.clone()
    if state.penalties is not None:
        state.penalties.apply_(row)
    if state.bias_ids is not None and state.bias_values is not None:
        row[state.bias_ids] += state.bias_values
    if state.end_ids is not None and state.bans_end(position) and not _only_ends(state.vocab_mask, state.end_ids):
        row[state.end_ids] = -math.inf
    if state.vocab_mask is not None:
        if not bool(state.vocab_mask.any()):
            raise NoCandidate(NO_CANDIDATE.format(position=position, why="the grammar allows none"))
        row.masked_fill_(~state.vocab_mask, -math.inf)
    maximum = float(row.max())
    if maximum == -math.inf:
        raise NoCandidate(NO_CANDIDATE.format(position=position, why="all logits are -inf after bans and masks"))
    if math.isnan(maximum):
        raise NoCandidate(NO_CANDIDATE.format(position=position, why="a transform made a logit NaN"))
    if maximum == math.inf:  # infinitely more probable than the rest, and equally so among each other
        row = torch.where(row == math.inf, 0.0, -math.inf)
    return row


def _only_ends(mask: torch.Tensor | None, end_ids: torch.Tensor) -> bool:
    """True where the grammar is complete and allows nothing but the end: then min_new_tokens cannot be had."""
    return mask is not None and int(mask.sum()) == int(mask[end_ids].sum())


def first_argmax(row: torch.Tensor) -> int:
    """Index of the largest value of a 1-D row, the lowest one on ties (what torch promises for argmax; tested)."""
    return int(row.argmax())


def descending(row: torch.Tensor, at_least: int) -> torch.Tensor:
    """The first ids of a row in the order (value descending, id ascending): int64, at least `at_least`, exact prefix.

    torch.topk leaves ties to chance. So it only finds the value of the last place; all ids that reach this value are
    then sorted stably, which is the beginning of a stable sort of the whole row.
    """
    if at_least >= row.shape[0]:
        return torch.argsort(row, descending=True, stable=True)
    last = torch.topk(row, at_least).values[-1]
    ids = (row >= last).nonzero().squeeze(1)
    return ids[torch.argsort(row[ids], descending=True, stable=True)]


def kept_ids(row: torch.Tensor, state: SamplingState) -> torch.Tensor | None:
    """Ids that top-k, top-p and min-p leave of an adjusted float32 [V] row: int64, ascending; None: all of them."""
    p = state.params
    top_k = p.top_k if 0 < p.top_k < row.shape[0] else 0
    if not top_k and p.top_p >= 1.0 and p.min_p <= 0.0:
        return None
    ids = descending(row, top_k)[:top_k].sort().values if top_k else None
    if p.top_p < 1.0:
        ids = _top_p(row, ids, p.temperature, p.top_p)
    if p.min_p > 0.0:
        logits = row if ids is None else row[ids]
        scaled = logits.double() / p.temperature
        kept = scaled >= scaled.max() + math.log(p.min_p)
        ids = kept.nonzero().squeeze(1) if ids is None else ids[kept]
    return ids


def _top_p(row: torch.Tensor, ids: torch.Tensor | None, temperature: float, top_p: float) -> torch.Tensor:
    """Keep a token while the mass before it is below top_p; the most probable one always stays."""
    logits = row if ids is None else row[ids]
    scaled = logits.double() / temperature
    maximum = scaled.max()
    wanted = (scaled - maximum).exp_().cumsum(0)[-1] * top_p
    for size in (FIRST_SORTED, logits.shape[0]):
        order = descending(logits, size)
        mass = (scaled[order] - maximum).exp_().cumsum(0)
        if bool(mass[-1] >= wanted) or order.shape[0] == logits.shape[0]:
            break
    # The first place whose mass reaches `wanted` is the last one kept.
    num_kept = int((mass < wanted).sum()) + 1
    kept = order[:num_kept]
    return (kept if ids is None else ids[kept]).sort().values


def draw(row: torch.Tensor, ids: torch.Tensor | None, state: SamplingState, position: int) -> int:
    """argmax over the kept ids of logit / temperature + G(seed, position, id), in float64; ties go to the lower id."""
    if ids is None:
        ids = torch.arange(row.shape[0], device=row.device)
        logits = row
    else:
        logits = row[ids]
    scores = logits.double() / state.params.temperature + gumbel_noise(state.seed, position, ids)
    return int(ids[first_argmax(scores)])


def choose(row: torch.Tensor, state: SamplingState, position: int) -> int:
    """The token of one raw float32 [V] row: the whole order above. Raises NoCandidate. Does not commit the token."""
    row = adjust(row, state, position)
    if state.params.is_greedy:
        return first_argmax(row)
    return draw(row, kept_ids(row, state), state, position)
