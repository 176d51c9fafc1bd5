"""Owns the model and its memory, and runs steps (docs/life-of-a-request.md, steps "forward" and "sample").

Everything here happens on one thread, the model thread: loading, pool operations, forwards. So nothing needs a lock, and
the order of `run` calls is the order of writes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sglang.srt.errors import ConfigError
from sglang.srt.kernels.table import load_kernels
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.io_struct import TokenLogprobs
from sglang.srt.mem_cache.global_kv_pool import GlobalKVPool
from sglang.srt.mem_cache.state_pool import StatePool, max_backtracking
from sglang.srt.model_executor.forward_batch import FUTURE_TOKEN
from sglang.srt.model_executor.memory_plan import MemoryPlan, plan_memory
from sglang.srt.model_executor.step import PromptLogprobSpec, SampledToken, StepInput, StepOutput
from sglang.srt.models.deepseek_v41.config import load_config
from sglang.srt.models.deepseek_v41.engram_hash import load_hasher
from sglang.srt.models.deepseek_v41.model import DeepseekV41Model
from sglang.srt.models.deepseek_v41.numerics import Numerics
from sglang.srt.models.deepseek_v41.weights import load_weights
from sglang.srt.server_args import ServerArgs

LOGPROB_ROWS = 64
"""Prompt rows whose logits exist at a time: a long prompt's logits would not fit otherwise."""

SMALL_HIDDEN_SIZE = 512
"""Below this, waking a second thread costs more than the products it would share (spec: kernels, OpenMP)."""

OVERLAP_MARGIN = 1
"""Rows that an overlapped step may write behind the end of a request that turns out to be finished."""


class ModelRunner:
    """Loads a checkpoint and runs steps on it. Raises ConfigError if flags or checkpoint do not work."""

    def __init__(self, args: ServerArgs, progress: Callable[[str, float], None] | None = None):
        self.args = args
        self.device = resolve_device(args.device)
        path = Path(args.model_path)
        self.config = load_config(path, args.model_override)
        numerics = Numerics.from_flags(args.dtype, args.activation_quant)
        # The hasher first: a tokenizer that does not belong to the checkpoint is refused before anything is read.
        hasher = load_hasher(self.config, Path(args.resolved_tokenizer_path)) if self.config.engram_layer_ids else None
        weights = load_weights(path, self.config, device=self.device, progress=progress)
        self.model = DeepseekV41Model(self.config, weights, load_kernels(args.kernel_backend), numerics, hasher)
        self.plan: MemoryPlan = plan_memory(args, self.config, self.device)
        self.kv = GlobalKVPool(self.config, self.plan.num_pages, args.page_size, args.kv_cache_dtype, self.device)
        self.state = StatePool(self.config, self.plan.num_slots, args.kv_cache_dtype, self.device)
        self.sampler = Sampler()
        self._thread: int | None = None
        self.last_token = torch.zeros(self.plan.num_slots, dtype=torch.int64, device=self.device)

    page_size = property(lambda self: self.args.page_size)
    num_pages = property(lambda self: self.plan.num_pages)
    num_slots = property(lambda self: self.plan.num_slots)

    @property
    def max_backtracking(self) -> int:
        """A slot written up to position n can resume at any m with n - max_backtracking <= m <= n.

        One position of the rings' room is kept for the superfluous row that an overlapped step writes behind n.
        """
        return max_backtracking(self.config) - OVERLAP_MARGIN

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        """Pool operations, forward, sampling; blocks until the results are on the host."""
        started = time.perf_counter()
        self._settle_in_thread()
        for op in step.before:
            self.pool_op(op.kind, op.src, op.dst)
        batch = step.batch = step.batch.to(self.device)
        future = batch.input_ids == FUTURE_TOKEN
        if bool(future.any()):
            batch.input_ids = torch.where(future, self.last_token[batch.state_slots[batch.row_request]], batch.input_ids)
        output = self.model.forward(batch, self.state, self.kv)
        sampled = self._sample(step, output.hidden)
        logprobs = [self._prompt_logprobs(step, r, output.hidden) for r in range(len(step.requests))]
        return StepOutput(sampled=sampled, prompt_logprobs=logprobs, forward_seconds=time.perf_counter() - started)

    def _settle_in_thread(self) -> None:
        """torch's thread count belongs to the calling thread, so it is set where the forwards run, once."""
        if self._thread == threading.get_ident():
            return
        self._thread = threading.get_ident()
        if self.config.hidden_size < SMALL_HIDDEN_SIZE and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)

    def pool_op(self, kind: str, src: int, dst: int) -> None:
        """copy_page, copy_slot or reset_slot."""
        if kind == "copy_page":
            self.copy_page(src, dst)
        elif kind == "copy_slot":
            self.copy_slot(src, dst)
        else:
            self.reset_slot(dst)

    def copy_page(self, src: int, dst: int) -> None:
        self.kv.copy_page(src, dst)

    def copy_slot(self, src: int, dst: int) -> None:
        self.state.copy_slot(src, dst)

    def reset_slot(self, slot: int) -> None:
        self.state.reset_slot(slot)

    def memory_table(self) -> list[dict[str, int | str]]:
        """Rows for the start-up table and the server-info reply: pool, units, bytes per unit, bytes."""
        return [
            {
                "pool": "global KV",
                "unit": "page",
                "units": self.num_pages,
                "bytes_per_unit": self.kv.page_bytes,
                "bytes": self.kv.memory.numel(),
            },
            {
                "pool": "request state",
                "unit": "slot",
                "units": self.num_slots,
                "bytes_per_unit": self.state.slot_bytes,
                "bytes": self.state.memory.numel(),
            },
        ]

    def _sample(self, step: StepInput, hidden: torch.Tensor) -> list[SampledToken | None]:
        """One token for every request whose rows reach its last known token."""
        wanted = [r for r, request in enumerate(step.requests) if request.sampling is not None]
        states = [request.sampling for request in step.requests if request.sampling is not None]
        results: list[SampledToken | None] = [None] * len(step.requests)
        if not wanted:
            return results
        last_row = torch.tensor(step.batch.extend_lens).cumsum(0) - 1
        place = {row: i for i, row in enumerate(step.batch.output_rows.tolist())}
        logits = self.model.logits(hidden[[place[int(last_row[r])] for r in wanted]])
        tokens = self.sampler.sample(logits.cpu(), states, [step.requests[r].position for r in wanted])
        for r, token in zip(wanted, tokens):
            results[r] = token
        self.last_token[step.batch.state_slots[wanted]] = torch.tensor([token.id for token in tokens], device=self.device)
        return results

    def _prompt_logprobs(self, step: StepInput, r: int, hidden: torch.Tensor) -> TokenLogprobs | None:
        spec: PromptLogprobSpec | None = step.requests[r].prompt_logprobs
        if spec is None:
            return None
        first = sum(step.batch.extend_lens[:r]) + spec.first_row
        place = int((step.batch.output_rows == first).nonzero()[0, 0]) if spec.targets else 0
        parts = []
        for start in range(0, len(spec.targets), LOGPROB_ROWS):
            targets = spec.targets[start : start + LOGPROB_ROWS]
            logits = self.model.logits(hidden[place + start : place + start + len(targets)]).cpu()
            parts.append(self.sampler.prompt_logprobs(logits, targets, spec.top, spec.token_ids))
        return _joined(parts)


def _joined(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """One TokenLogprobs of consecutive parts."""
    whole = TokenLogprobs(ids=[], logprobs=[])
    for part in parts:
        whole.ids = whole.ids + part.ids
        whole.logprobs = whole.logprobs + part.logprobs
        whole.top = part.top if whole.top is None else whole.top + (part.top or [])
        whole.token_ids = part.token_ids if whole.token_ids is None else whole.token_ids + (part.token_ids or [])
    return whole


def resolve_device(name: str) -> torch.device:
    """From --device. Raises ConfigError if CUDA is asked for and absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: no CUDA device is visible; use --device cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name}: expected auto, cpu or cuda") from None
