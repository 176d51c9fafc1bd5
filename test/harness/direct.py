"""The model without scheduler or sampler: feed ids, get logits. Pages and slots are handed out by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from sglang.srt.kernels.table import KernelTable
from sglang.srt.mem_cache.global_kv_pool import GlobalKVPool
from sglang.srt.mem_cache.state_pool import StatePool
from sglang.srt.model_executor.forward_batch import NO_TOKEN, ForwardBatch
from sglang.srt.models.deepseek_v41.config import load_config
from sglang.srt.models.deepseek_v41.engram_hash import load_hasher
from sglang.srt.models.deepseek_v41.model import DeepseekV41Model
from sglang.srt.models.deepseek_v41.numerics import Numerics
from sglang.srt.models.deepseek_v41.weights import load_weights

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINTS = ("nano-s1", "mini-s1", "deep-s1")


class Golden:
    """Tensors and cases of one golden checkpoint."""

    def __init__(self, name: str):
        self.path = GOLDEN / name
        self.cases = [case["name"] for case in json.loads((self.path / "golden.json").read_text())["cases"]]
        with safe_open(str(self.path / "golden.safetensors"), "pt") as file:
            self._tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def names(self) -> list[str]:
        return list(self._tensors)


class DirectRunner:
    """A model with small pools. Pages are scattered on purpose: sequence s gets every `stride`-th page in reverse."""

    def __init__(
        self,
        path: Path,
        *,
        cache_dtype: str = "float32",
        dtype: str = "float32",
        activation_quant: str = "off",
        page_size: int = 16,
        num_sequences: int = 4,
        tokens: int = 512,
        ops: KernelTable | None = None,
        config_changes: dict | None = None,
    ):
        self.config = dataclasses.replace(load_config(path), **(config_changes or {}))
        hasher = load_hasher(self.config, path) if self.config.engram_layer_ids else None
        weights = load_weights(path, self.config)
        self.model = DeepseekV41Model(self.config, weights, ops or KernelTable(), Numerics.from_flags(dtype, activation_quant), hasher)
        self.page_size = page_size
        self.num_sequences = num_sequences
        self.pages_each = tokens // page_size
        device = torch.device("cpu")
        self.kv = GlobalKVPool(self.config, num_sequences * self.pages_each, page_size, cache_dtype, device)
        self.state = StatePool(self.config, num_sequences, cache_dtype, device)

    def sequence(self, number: int, decoder_start: int = 0) -> Sequence:
        """A fresh sequence; the memory of an earlier one with this number is overwritten with garbage first."""
        sequence = Sequence(self, number, decoder_start)
        self.kv.memory[sequence.pages] = 0x5A
        self.state.memory[number] = 0x5A
        return sequence

    @torch.inference_mode()
    def step(self, work: list[tuple[Sequence, list[int]]], observe: Callable | None = None) -> list[torch.Tensor]:
        """Advance several sequences in one batch; logits float32 [n, V] of every new row that has outputs."""
        extend = [len(ids) for _, ids in work]
        rows, start = [], 0
        for (sequence, _), n in zip(work, extend):
            rows += [start + i for i in range(n) if len(sequence.ids) + i >= sequence.decoder_start]
            start += n
        batch = ForwardBatch.build(
            tokens=[ids for _, ids in work],
            prefix_lens=[len(sequence.ids) for sequence, _ in work],
            pages=[sequence.pages for sequence, _ in work],
            state_slots=[sequence.number for sequence, _ in work],
            history=[sequence.history(self.config.engram_max_ngram_size - 1) for sequence, _ in work],
            output_rows=rows,
            decoder_start=[sequence.decoder_start for sequence, _ in work],
            window_start=[sequence.window_start for sequence, _ in work],
            kv_start=[sequence.kv_start for sequence, _ in work],
        )
        counts = [sum(len(s.ids) + i >= s.decoder_start for i in range(len(ids))) for s, ids in work]
        hidden = self.model.forward(batch, self.state, self.kv, observe).hidden
        for sequence, ids in work:
            sequence.ids += ids
        return list(self.model.logits(hidden).split(counts))


class Sequence:
    """Ids computed so far and where their caches are."""

    def __init__(self, runner: DirectRunner, number: int, decoder_start: int):
        self.runner = runner
        self.number = number
        self.decoder_start = decoder_start
        self.window_start = 0
        self.kv_start = 0
        self.ids: list[int] = []
        self.pages = [i * runner.num_sequences + number for i in reversed(range(runner.pages_each))]

    def history(self, depth: int) -> list[int]:
        return [self.ids[-1 - k] if k < len(self.ids) else NO_TOKEN for k in range(depth)]

    def forget_windows(self, replay: int) -> list[int]:
        """Keep pages, lose rings: go back `replay` tokens, which are returned for feeding again."""
        self.kv_start, self.window_start = len(self.ids), max(0, len(self.ids) - replay)
        replayed = self.ids[self.window_start :]
        del self.ids[self.window_start :]
        self.runner.state.memory[self.number] = 0x5A
        return replayed

    def extend(self, ids: list[int], chunk: int = 10_000, observe: Callable | None = None) -> torch.Tensor:
        """Logits of all rows of `ids` that have outputs, fed in chunks."""
        return torch.cat([self.runner.step([(self, ids[i : i + chunk])], observe)[0] for i in range(0, len(ids), chunk)])


@functools.lru_cache(maxsize=8)
def direct_runner(name: str, **options: object) -> DirectRunner:
    """A shared runner on a golden checkpoint."""
    return DirectRunner(GOLDEN / name / "checkpoint", **options)
