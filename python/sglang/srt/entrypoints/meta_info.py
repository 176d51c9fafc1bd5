"""The `meta_info` object of the native route and of `return_meta_info`: what happened to one sequence."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers.io_struct import FinishReason, TokenLogprobs
from sglang.srt.managers.sequence import SequenceOutput, SequenceRequest

Entry = tuple[float | None, int, str | None]  # logprob, id, text or null
TextOf = Callable[[int], str]

_ALWAYS = ("e2e_latency",)  # times that are reported without --enable-metrics too


@dataclass
class LogprobReport:
    """Logprobs of one sequence in the native shape, collected over its outputs. `text_of` is None unless texts are wanted."""

    seq: SequenceRequest
    text_of: TextOf | None = None
    input: TokenLogprobs = field(default_factory=TokenLogprobs)
    output: TokenLogprobs = field(default_factory=lambda: TokenLogprobs(top=[], token_ids=[]))

    def take(self, output: SequenceOutput) -> None:
        """Add what one output brought."""
        if output.input_logprobs is not None:
            self.input = output.input_logprobs
        new = output.output_logprobs
        if new is not None:
            self.output.ids += new.ids
            self.output.logprobs += new.logprobs
            self.output.top += new.top or []  # type: ignore[operator]
            self.output.token_ids += new.token_ids or []  # type: ignore[operator]

    def forget_output(self) -> None:
        """For streams of differences: what was reported is not reported again."""
        self.input = TokenLogprobs()
        self.output = TokenLogprobs(top=[], token_ids=[])

    def fields(self) -> dict[str, Any]:
        """The entries of meta_info, in SGLang's order."""
        result: dict[str, Any] = {
            "input_token_logprobs": self._chosen(self.input),
            "output_token_logprobs": self._chosen(self.output),
            "output_token_logprobs_length": len(self.output.ids),
        }
        if self.seq.top_logprobs_num > 0:
            result["input_top_logprobs"] = self._lists(self.input.top)
            result["output_top_logprobs"] = self._lists(self.output.top)
        if self.seq.token_ids_logprob:
            result["input_token_ids_logprobs"] = self._lists(self.input.token_ids)
            result["output_token_ids_logprobs"] = self._lists(self.output.token_ids)
        return result

    def _chosen(self, logprobs: TokenLogprobs) -> list[Entry]:
        return [self._entry(value, token) for value, token in zip(logprobs.logprobs, logprobs.ids, strict=True)]

    def _lists(self, lists: list[list[tuple[float, int]] | None] | None) -> list[list[Entry] | None]:
        return [None if entries is None else [self._entry(value, token) for value, token in entries] for entries in lists or []]

    def _entry(self, value: float | None, token: int) -> Entry:
        return value, token, self.text_of(token) if self.text_of is not None else None


def finish_reason_dict(finish: FinishReason | None) -> dict[str, Any] | None:
    """SGLang's finish_reason object."""
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": finish.length}
    return {"type": finish.type, "message": finish.message, "status_code": finish.status_code, "err_type": finish.err_type}


def meta_info(
    output: SequenceOutput, logprobs: LogprobReport | None = None, *, with_times: bool = True, is_first: bool = False
) -> dict[str, Any]:
    """`output` is the sequence's latest output; counts are totals so far. `is_first`: nothing was reported before it.

    `with_times` adds the times of the life of a request to its last output, besides e2e_latency.
    """
    raw = output.raw
    info: dict[str, Any] = {
        "id": output.rid,
        "finish_reason": finish_reason_dict(output.finish),
        "prompt_tokens": output.prompt_tokens,
        "weight_version": "default",
        "num_retractions": raw.num_retractions,
    }
    if logprobs is not None:
        info |= logprobs.fields()
    info |= {
        "reasoning_tokens": 0,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
        "cached_tokens_details": {"device": output.cached_tokens, "host": 0},
        "dp_rank": None,
        "sampling_seed": output.seed,
    }
    if raw.replayed_tokens:
        info["replayed_tokens"] = raw.replayed_tokens
    if raw.truncated_tokens:
        info["truncated_tokens"] = raw.truncated_tokens
    info |= {name: value for name, value in output.timing.items() if with_times or name in _ALWAYS}
    info |= raw.spec or {}
    if raw.ignored_keywords:
        info["grammar_warnings"] = [f"not enforced: {name}" for name in raw.ignored_keywords]
    if is_first:
        info["response_sent_to_client_ts"] = time.time()
    return info
