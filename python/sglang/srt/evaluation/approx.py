"""What bounded window restore and truncated prefill cost on a text, against the exact model (docs/approximation.md).

The text is cut into windows of a prefix and a continuation. For each window the prefix is computed exactly and once per
variant; then all of them read the same continuation, and their next-token distributions are compared position by
position. A copy of each also continues greedily, as long as it says what the exact one says.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from sglang.srt.errors import ConfigError
from sglang.srt.evaluation.direct_model import DirectModel, Track, Work
from sglang.srt.managers.scheduler_components.request_builder import Limits
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.srt.mem_cache.state_pool import max_backtracking
from sglang.srt.model_executor.model_runner import OVERLAP_MARGIN, ModelRunner
from sglang.srt.models.deepseek_v41.config import DeepseekV41Config
from sglang.srt.server_args import ServerArgs

SCHEMA = 1
"""Version of the report's form; raised when a field changes its meaning."""

PREFIX_WINDOWS = 32
"""Default prefix in sliding windows: enough that a rebuilt window has a past which it does not know."""

MIN_CONTINUATION = 64
"""Least default continuation in tokens, for models with a tiny window."""

SCORED_ROWS = 16
"""Continuation rows of each sequence per step: their logits and float64 distributions exist at a time."""


@dataclass(frozen=True)
class Variant:
    """One approximation. None: not in use."""

    replay_tokens: int | None = None  # R of a bounded restore: rows replayed
    keep_tokens: int | None = None  # K of a compact prefill: rows that run through the decoder half

    @property
    def mode(self) -> str:
        if self.replay_tokens is None:
            return "compact"
        return "bounded" if self.keep_tokens is None else "both"


@dataclass(frozen=True)
class Settings:
    """What is measured. Lengths are tokens."""

    prefix_tokens: int  # with the BOS token
    continuation_tokens: int
    greedy_tokens: int  # cap of the greedy comparison
    max_windows: int
    seed: int  # chooses the windows if the text has more
    replay_tokens: tuple[int, ...]
    keep_tokens: tuple[int, ...]

    @property
    def variants(self) -> list[Variant]:
        """bounded for every R, compact for every K, and both for (first R, first K) and so on; the last value of a shorter list
        goes with the rest of the longer one."""
        fill_replay, fill_keep = self.replay_tokens[-1], self.keep_tokens[-1]
        pairs = [(r or fill_replay, k or fill_keep) for r, k in zip_longest(self.replay_tokens, self.keep_tokens)]
        return [
            *(Variant(r, None) for r in self.replay_tokens),
            *(Variant(None, k) for k in self.keep_tokens),
            *(Variant(r, k) for r, k in pairs),
        ]


@dataclass(frozen=True)
class WindowScore:
    """One sequence on one window. Tensors are float64 [continuation]; the exact sequence has zeros, ones and the cap."""

    nll: torch.Tensor  # nats per token of the continuation
    kl: torch.Tensor  # KL(exact || this), nats
    is_top1_equal: torch.Tensor  # 1 where the most likely token is the exact one's
    greedy_agreement: int  # greedy tokens before the first that differs
    num_replayed: int
    num_truncated: int


def worker_keep_tokens(args: ServerArgs, config: DeepseekV41Config) -> tuple[int, int]:
    """(the rows a worker keeps or replays with these flags, the least it accepts)."""
    backtracking = max_backtracking(config) - OVERLAP_MARGIN
    limits = Limits.resolve(
        args,
        num_pages=2,
        max_positions=config.max_position_embeddings,
        window=config.sliding_window,
        max_backtracking=backtracking,
    )
    return limits.keep_tokens, config.sliding_window + backtracking


def resolve_settings(
    args: ServerArgs,
    config: DeepseekV41Config,
    *,
    prefix_tokens: int | None = None,
    continuation_tokens: int | None = None,
    greedy_tokens: int | None = None,
    max_windows: int = 8,
    seed: int = 0,
    replay_tokens: Sequence[int] = (),
    keep_tokens: Sequence[int] = (),
) -> Settings:
    """Fill in what was not given, from the model's window and context. Raises ConfigError for values that cannot work."""
    default, least = worker_keep_tokens(args, config)
    context = args.context_length or config.max_position_embeddings
    continuation = max(MIN_CONTINUATION, config.sliding_window) if continuation_tokens is None else continuation_tokens
    greedy = continuation if greedy_tokens is None else greedy_tokens
    room = context - max(continuation, greedy)
    prefix = _default_prefix(args, config, room) if prefix_tokens is None else prefix_tokens
    window = f"the window of {config.sliding_window} and its backtracking, as in a worker"
    for name, value, low, why in (
        ("--continuation-tokens", continuation, 1, "something must be scored"),
        ("--greedy-tokens", greedy, 0, "0 leaves that comparison out"),
        ("--max-windows", max_windows, 1, "something must be scored"),
        ("--seed", seed, 0, "any such number will do"),
        ("--prefix-tokens", prefix, args.page_size + 1, "a cache hit is a whole page, and one token is always computed"),
        *(("--swa-replay-tokens", value, least, window) for value in replay_tokens),
        *(("--prefill-keep-tokens", value, least, window) for value in keep_tokens),
    ):
        if value < low:
            raise ConfigError(f"{name} must be at least {low}, found {value} ({why})")
    if prefix > room:
        raise ConfigError(
            f"--prefix-tokens {prefix} and {max(continuation, greedy)} tokens after them exceed the context of {context}; "
            f"lower --prefix-tokens to {max(room, 0)} or less"
        )
    # Powers of two of a worker's own number show how fast the cost falls; from the prefix on there is none.
    usual = [default * factor for factor in (1, 2, 4) if factor == 1 or default * factor < prefix]
    return Settings(
        prefix_tokens=prefix,
        continuation_tokens=continuation,
        greedy_tokens=greedy,
        max_windows=max_windows,
        seed=seed,
        replay_tokens=_distinct(replay_tokens) or tuple(usual),
        keep_tokens=_distinct(keep_tokens) or tuple(usual),
    )


def _default_prefix(args: ServerArgs, config: DeepseekV41Config, room: int) -> int:
    """One more than whole pages: the cache hit then ends right before the first scored row, where a rebuilt window is worst."""
    num_pages = min(PREFIX_WINDOWS * config.sliding_window, room - 1) // args.page_size
    return num_pages * args.page_size + 1


def cut_windows(ids: Sequence[int], bos_id: int | None, settings: Settings) -> tuple[list[int], list[list[int]]]:
    """(first text token of each window, its ids: prefix + continuation), in text order.

    Windows do not overlap. Each begins with BOS, if the tokenizer has one, as a prompt does. Raises ConfigError if the text
    is too short for one.
    """
    head = [] if bos_id is None else [bos_id]
    if head and ids[:1] == head:
        ids = ids[1:]
    length = settings.prefix_tokens + settings.continuation_tokens - len(head)
    available = len(ids) // length
    if not available:
        raise ConfigError(
            f"the text has {len(ids)} tokens, but one window needs {length} "
            f"(--prefix-tokens {settings.prefix_tokens} + --continuation-tokens {settings.continuation_tokens}"
            f"{' - BOS' if head else ''}); give more text, or lower them"
        )
    chosen = sorted(random.Random(settings.seed).sample(range(available), min(available, settings.max_windows)))
    starts = [number * length for number in chosen]
    return starts, [[*head, *ids[start : start + length]] for start in starts]


def load_model(args: ServerArgs, settings: Settings, progress: Callable[[str, float], None] | None = None) -> DirectModel:
    """Load the checkpoint with pools that hold one window in every variant. Raises ConfigError as ModelRunner does."""
    num_sequences = 1 + len(settings.variants)
    longest = settings.prefix_tokens + settings.continuation_tokens
    pages_each = -(-longest // args.page_size) + settings.greedy_tokens // args.page_size + 3
    sized = dataclasses.replace(
        args,
        max_total_tokens=num_sequences * pages_each * args.page_size,
        max_running_requests=2 * num_sequences,  # each has a copy that continues greedily
        disable_radix_cache=True,
    )
    return DirectModel(ModelRunner(sized, progress))


def evaluate(
    args: ServerArgs,
    config: DeepseekV41Config,
    tokenizer: Tokenizer,
    text: str,
    settings: Settings,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """The whole report, as JSON data. The same inputs give the same report."""
    ids = tokenizer.encode(text)
    if ids and max(ids) >= config.vocab_size:
        raise ConfigError(f"the tokenizer gives id {max(ids)}, but the model has {config.vocab_size}; check --tokenizer-path")
    starts, windows = cut_windows(ids, tokenizer.bos_id, settings)
    model = load_model(args, settings, progress)
    chunk = args.chunked_prefill_size if args.chunked_prefill_size > 0 else settings.prefix_tokens
    scores = []
    for number, window in enumerate(windows, start=1):
        scores.append(score_window(model, window, settings, chunk))
        if progress is not None:
            progress("windows", number / len(windows))
    default, _ = worker_keep_tokens(args, config)
    return {
        "schema": SCHEMA,
        "model": {
            "name": args.model_name,
            "layers": config.num_hidden_layers,
            "encoder_layers": config.n_prefill,
            "sliding_window": config.sliding_window,
            "worker_replay_tokens": default,
            "worker_keep_tokens": default,
            **{name: getattr(args, name) for name in ("dtype", "kv_cache_dtype", "activation_quant", "page_size")},
        },
        "text": {"characters": len(text), "tokens": len(ids), "window_starts": starts},
        "settings": dataclasses.asdict(settings),
        **summarize(scores, settings.variants),
    }


def score_window(model: DirectModel, window: Sequence[int], settings: Settings, chunk: int) -> list[WindowScore]:
    """The exact sequence first, then one score per variant."""
    prefix, continuation = list(window[: settings.prefix_tokens]), list(window[settings.prefix_tokens :])
    exact = model.start()
    tracks, rows, replayed = [exact], [model.extend(exact, prefix, chunk)], [0]
    for variant in settings.variants:
        track = begin(model, exact, variant)
        replayed.append(track.kv_start - track.window_start)
        rows.append(model.extend(track, prefix[len(track.ids) :], chunk))
        tracks.append(track)
    agreement = greedy_agreement(model, tracks, torch.stack(rows), settings.greedy_tokens)
    parts = [_compare(torch.stack(rows)[:, None], continuation[:1])]
    for start in range(0, len(continuation) - 1, SCORED_ROWS):
        part = continuation[start : min(start + SCORED_ROWS, len(continuation) - 1)]
        logits = model.step([Work(track, part, len(part)) for track in tracks])
        parts.append(_compare(torch.stack(logits), continuation[start + 1 : start + 1 + len(part)]))
    nll, kl, top1 = (torch.cat(columns, dim=1) for columns in zip(*parts))
    truncated = [track.decoder_start for track in tracks]
    for track in reversed(tracks):
        model.free(track)
    return [WindowScore(nll[i], kl[i], top1[i], agreement[i], replayed[i], truncated[i]) for i in range(len(tracks))]


def begin(model: DirectModel, exact: Track, variant: Variant) -> Track:
    """A sequence that has yet to compute what follows its ids of the prefix, which `exact` has computed.

    A worker matches the whole pages of all but the last token, whose row must give logits.
    """
    num_prefix = len(exact.ids)
    decoder_start = 0 if variant.keep_tokens is None else max(0, num_prefix - variant.keep_tokens)
    if variant.replay_tokens is None:
        return model.start(decoder_start)
    return model.restore(exact, num_prefix - 1, variant.replay_tokens, decoder_start)


def greedy_agreement(model: DirectModel, tracks: Sequence[Track], logits: torch.Tensor, cap: int) -> list[int]:
    """Greedy tokens of each sequence before the first that is not tracks[0]'s; `cap` if there is none. EOS does not end it.

    `logits` [sequences, vocab_size] give the first token. A sequence that has differed is not continued.
    """
    agreement = [0] * len(tracks)
    agreement[0] = cap
    alive = list(range(len(tracks)))
    forks = {i: model.fork(track) for i, track in enumerate(tracks)}
    for step in range(cap):
        best = logits.argmax(dim=-1).tolist()
        alive = [i for i, token in zip(alive, best) if token == best[0]]
        for i in alive[1:]:
            agreement[i] = step + 1
        if len(alive) == 1 or step + 1 == cap:
            break
        logits = torch.cat(model.step([Work(forks[i], best[:1], 1) for i in alive]))
    for fork in forks.values():
        model.free(fork)
    return agreement


def _compare(logits: torch.Tensor, targets: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """nll, KL(first || each) and equality of the best token, float64 [sequences, rows], from logits [sequences, rows, vocab_size].

    One sequence at a time: a large vocabulary in float64 is megabytes per row.
    """
    exact = logits[0].double().log_softmax(dim=-1)
    weight, best = exact.exp(), exact.argmax(dim=-1)
    target = torch.tensor(targets, device=logits.device)[:, None]
    columns = []
    for row in logits:
        other = row.double().log_softmax(dim=-1)
        kl = (weight * (exact - other)).sum(dim=-1).clamp(min=0.0)  # rounding may leave -1e-17
        columns.append((-other.gather(1, target)[:, 0], kl, (other.argmax(dim=-1) == best).double()))
    nll, kl, top1 = (torch.stack(column).cpu() for column in zip(*columns))
    return nll, kl, top1


def summarize(scores: Sequence[Sequence[WindowScore]], variants: Sequence[Variant]) -> dict[str, Any]:
    """Means over windows: `exact` and one row of `modes` per variant."""
    by_variant = list(zip(*scores))
    exact = torch.stack([score.nll for score in by_variant[0]])
    reference = {"nll": exact.mean().item(), "perplexity": math.exp(exact.mean().item())}
    return {
        "num_windows": len(scores),
        "exact": reference,
        "modes": [_summary(variant, by_variant[i], exact) for i, variant in enumerate(variants, start=1)],
    }


def _summary(variant: Variant, scores: Sequence[WindowScore], exact: torch.Tensor) -> dict[str, Any]:
    nll = torch.stack([score.nll for score in scores])  # [windows, continuation]
    kl = torch.stack([score.kl for score in scores])
    difference = (nll - exact).mean(dim=1)
    lengths = [score.greedy_agreement for score in scores]
    perplexity = math.exp(nll.mean().item())
    return {
        "mode": variant.mode,
        **dataclasses.asdict(variant),
        "replayed_tokens": _mean([score.num_replayed for score in scores]),
        "truncated_tokens": _mean([score.num_truncated for score in scores]),
        "nll": nll.mean().item(),
        "nll_difference": difference.mean().item(),
        # Windows are the independent samples, not tokens. None: one window tells nothing about the spread.
        "nll_difference_stderr": difference.std().item() / math.sqrt(len(scores)) if len(scores) > 1 else None,
        "perplexity": perplexity,
        "perplexity_difference": perplexity - math.exp(exact.mean().item()),
        "kl_mean": kl.mean().item(),
        "kl_max": kl.max().item(),
        "kl_by_position": kl.mean(dim=0).tolist(),
        "top1_agreement": torch.stack([score.is_top1_equal for score in scores]).mean().item(),
        "greedy_agreement_mean": _mean(lengths),
        "greedy_agreement": lengths,
    }


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _distinct(values: Sequence[Any]) -> tuple[Any, ...]:
    """Sorted, each once."""
    return tuple(sorted(set(values)))
