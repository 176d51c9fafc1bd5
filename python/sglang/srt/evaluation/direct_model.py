"""A model runner driven by hand: sequences that are computed, forked and restored, without scheduler or sampler.

It makes the same batches as a worker does, so what it measures is what a worker serves: a row's bits depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sglang.srt.mem_cache.allocator import PagePool
from sglang.srt.model_executor.forward_batch import NO_TOKEN, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(slots=True, eq=False)
class Track:
    """One sequence: the ids computed so far and where their caches are. Its first `num_shared` pages belong to another."""

    slot: int
    ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0
    window_start: int = 0
    decoder_start: int = 0
    kv_start: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Rows to compute for one track; logits are wanted of the last `num_outputs` of them."""

    track: Track
    ids: Sequence[int]
    num_outputs: int


class DirectModel:
    """Hands out pages and slots of a model runner and runs batches of tracks on it."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.page_size: int = runner.page_size
        self.pages = PagePool(runner.num_pages)
        self.slots = PagePool(runner.num_slots)

    def start(self, decoder_start: int = 0) -> Track:
        """An empty sequence whose rows below `decoder_start` run through the encoder half only."""
        track = Track(slot=_one(self.slots), decoder_start=decoder_start)
        self.runner.reset_slot(track.slot)
        return track

    def fork(self, source: Track) -> Track:
        """A copy that goes its own way. It shares the full pages of `source`, which must outlive it."""
        num_full, num_rest = divmod(len(source.ids), self.page_size)
        track = self._sharing(source, num_full)
        self._grow(track, len(source.ids))
        if num_rest:
            self.runner.copy_page(source.pages[num_full], track.pages[num_full])
        self.runner.copy_slot(source.slot, track.slot)
        track.ids = list(source.ids)
        track.window_start, track.decoder_start, track.kv_start = source.window_start, source.decoder_start, source.kv_start
        return track

    def restore(self, source: Track, limit: int, replay_tokens: int, decoder_start: int = 0) -> Track:
        """A sequence that finds the whole pages of at most `limit` tokens of `source` in the cache, but no state.

        Its `ids` are those before the replay; the rows after them must be computed anew. Up to the end of the shared pages
        (`kv_start`) they read these and write none; their windows know nothing before their first.
        """
        track = self._sharing(source, limit // self.page_size)
        self.runner.reset_slot(track.slot)
        track.kv_start = track.num_shared * self.page_size
        track.window_start = max(0, track.kv_start - replay_tokens)
        track.decoder_start = decoder_start
        track.ids = source.ids[: track.window_start]
        return track

    def free(self, track: Track) -> None:
        """Give back its slot and the pages that are its own."""
        self.slots.free([track.slot])
        self.pages.free(track.pages[track.num_shared :])

    @torch.inference_mode()
    def step(self, work: list[Work]) -> list[torch.Tensor]:
        """Advance several sequences in one batch. Logits float32 [num_outputs, vocab_size] of each."""
        config, runner = self.runner.config, self.runner
        output_rows: list[int] = []
        end = 0
        for item in work:
            self._grow(item.track, len(item.track.ids) + len(item.ids))
            end += len(item.ids)
            output_rows += range(end - item.num_outputs, end)
        batch = ForwardBatch.build(
            tokens=[list(item.ids) for item in work],
            prefix_lens=[len(item.track.ids) for item in work],
            pages=[item.track.pages for item in work],
            state_slots=[item.track.slot for item in work],
            history=[_history(item.track.ids, config.engram_max_ngram_size - 1) for item in work],
            output_rows=output_rows,
            window_start=[item.track.window_start for item in work],
            decoder_start=[item.track.decoder_start for item in work],
            kv_start=[item.track.kv_start for item in work],
            device=runner.device,
        )
        hidden = runner.model.forward(batch, runner.state, runner.kv).hidden
        for item in work:
            item.track.ids += item.ids
        if not output_rows:
            return [torch.empty(0, config.vocab_size)] * len(work)
        return list(runner.model.logits(hidden).split([item.num_outputs for item in work]))

    def extend(self, track: Track, ids: Sequence[int], chunk: int) -> torch.Tensor:
        """Compute `ids` in chunks. Logits float32 [vocab_size] of the last row."""
        logits = torch.empty(0)
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            logits = self.step([Work(track, part, int(start + chunk >= len(ids)))])[0]
        return logits[0]

    def _sharing(self, source: Track, num_pages: int) -> Track:
        return Track(slot=_one(self.slots), pages=source.pages[:num_pages], num_shared=num_pages)

    def _grow(self, track: Track, num_tokens: int) -> None:
        missing = -(-num_tokens // self.page_size) - len(track.pages)
        if missing > 0:
            pages = self.pages.alloc(missing)
            assert pages is not None, "the pool is smaller than what is measured at a time"
            track.pages += pages


def _one(slots: PagePool) -> int:
    taken = slots.alloc(1)
    assert taken is not None, "fewer slots than sequences at a time"
    return taken[0]


def _history(ids: list[int], depth: int) -> list[int]:
    """The last ids, newest first."""
    return [ids[-1 - k] if k < len(ids) else NO_TOKEN for k in range(depth)]
