"""From a message to a request: everything that is decided once, when it arrives, or a refusal with the numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.errors import BadRequest, ConfigError, ContextTooLong
from sglang.srt.managers.io_struct import GenerateReq, RequestTimes, TokenLogprobs
from sglang.srt.managers.request import Req
from sglang.srt.managers.scheduler_components.result_processor import first_prompt_logprobs
from sglang.srt.managers.stop_checker import StopChecker
from sglang.srt.sampling.sampling_state import SamplingState
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True)
class Limits:
    """What the model and the pools allow. Built once at start-up."""

    context_length: int  # tokens of prompt + output
    max_request_tokens: int  # what one request can hold when it has the pool to itself
    keep_tokens: int  # rows kept by compact prefill truncation, and replayed by a bounded restore

    @staticmethod
    def resolve(args: ServerArgs, *, num_pages: int, max_positions: int, window: int, max_backtracking: int) -> Limits:
        """From flags, pools and model. Raises ConfigError for sizes that cannot work.

        One page of the pool is spare: while a request runs, the tree may keep a page alive that it was copied from.
        """
        keep = args.prefill_keep_tokens or window + 12
        if keep < window + max_backtracking:
            raise ConfigError(
                f"--prefill-keep-tokens {keep} is too small: the window of {window} and {max_backtracking} positions of "
                f"backtracking need at least {window + max_backtracking}"
            )
        if num_pages < 2:
            raise ConfigError(
                f"the KV pool has {num_pages} page(s) of {args.page_size} tokens, but one request needs at least 2; "
                f"raise --max-total-tokens to {2 * args.page_size} or more"
            )
        context = args.context_length or max_positions
        if context > max_positions:
            raise ConfigError(f"--context-length {context} exceeds the model's max_position_embeddings {max_positions}")
        return Limits(context, (num_pages - 1) * args.page_size, keep)


class RequestBuilder:
    """Makes `Req`s; numbers them in order of arrival."""

    def __init__(
        self,
        args: ServerArgs,
        limits: Limits,
        make_sampling: Callable[[GenerateReq], SamplingState],
        make_stop: Callable[[GenerateReq, int], StopChecker],
    ):
        self._args = args
        self._limits = limits
        self._make_sampling = make_sampling
        self._make_stop = make_stop
        self._arrivals = itertools.count()

    def build(self, msg: GenerateReq, now: float, wall_time: float) -> Req:
        """`now` on the deadline clock. Raises BadRequest (or ContextTooLong) if the request can never be served."""
        stop = self._make_stop(msg, self._room(msg))
        return Req(
            msg=msg,
            arrival=next(self._arrivals),
            max_new_tokens=stop.max_tokens if stop.max_tokens is not None else self._room(msg),
            sampling=self._make_sampling(msg),
            stop=stop,
            restore=self._choice("swa_restore", msg.swa_restore, ("exact", "bounded")),
            decoder_start=self._decoder_start(msg),
            accepted=now,
            time_limit_s=_shortest(msg.deadline_s, self._args.request_timeout_s),
            queue_limit_s=_shortest(self._args.queue_timeout_s),
            times=RequestTimes(arrived=wall_time),
            input_logprobs=self._first_logprobs(msg),
        )

    def _room(self, msg: GenerateReq) -> int:
        """Tokens that may follow the prompt."""
        num_prompt, wanted = len(msg.input_ids), msg.sampling.max_new_tokens
        if not num_prompt:
            raise BadRequest("the prompt has no tokens", param="input_ids")
        context, pool = self._limits.context_length, self._limits.max_request_tokens
        least = num_prompt + (min(1, wanted) if wanted is not None else 1)
        if least > context:
            raise ContextTooLong(f"the prompt has {num_prompt} tokens, but the context holds {context}; shorten the prompt")
        needed = num_prompt + (wanted if wanted is not None else 1)
        if min(needed, context) > pool:
            raise ContextTooLong(
                f"the request needs up to {needed} tokens of KV cache ({num_prompt} of prompt), but the whole pool gives one "
                f"request {pool}; shorten the prompt, lower max_new_tokens, or start the server with a larger --max-total-tokens"
            )
        return min(context, pool) - num_prompt

    def _choice(self, name: str, asked: str | None, choices: tuple[str, str]) -> str:
        """The server's setting, or the request's own. The second choice is approximate."""
        if asked is None:
            return getattr(self._args, name)
        if asked not in choices:
            raise BadRequest(f"{name} must be {choices[0]} or {choices[1]}, found {asked!r:.40}", param=name)
        if asked == choices[1] and self._args.enable_deterministic_inference:
            raise BadRequest(f"{name} {asked} is approximate, but the server runs with --enable-deterministic-inference", param=name)
        return asked

    def _decoder_start(self, msg: GenerateReq) -> int:
        if self._choice("prefill_truncation", msg.prefill_truncation, ("off", "compact")) == "off":
            return 0
        if msg.return_logprob and msg.logprob_start_len >= 0:
            raise BadRequest(
                "prompt logprobs need every row of the prompt, but prefill truncation is compact; "
                "ask for prefill_truncation off, or for output logprobs only",
                param="logprob_start_len",
            )
        return max(0, len(msg.input_ids) - self._limits.keep_tokens)

    def _first_logprobs(self, msg: GenerateReq) -> TokenLogprobs | None:
        start = msg.logprob_start_len if msg.return_logprob else -1
        return first_prompt_logprobs(msg.input_ids, start, msg.top_logprobs_num, msg.token_ids_logprob)


def _shortest(*timeouts_s: float | None) -> float | None:
    """The shortest of several time limits; None and 0 mean no limit."""
    return min((timeout for timeout in timeouts_s if timeout), default=None)
