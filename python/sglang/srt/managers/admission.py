"""Step "accept", in the HTTP process: may this sequence be sent to the scheduler at all, and how long may it become?

One rule on every route. The prompt and what was asked for must fit the context. Where the client gave no limit, the answer
may use the room that is left. `--allow-auto-truncate` clips instead of refusing; a prompt is never clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sglang.srt.constrained.constraint import Constraint, GrammarText
from sglang.srt.errors import BadRequest, ContextTooLong
from sglang.srt.managers.sequence import SequenceRequest
from sglang.srt.sampling.sampling_params import SamplingParams, uses_grammar

MAX_TOP_LOGPROBS = 256
"""Our own limit per position: a reply's size is positions x alternatives."""
MAX_RID_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_GRAMMAR_BYTES = 256 << 10
"""Text of one grammar; compiling takes time and memory in proportion."""
MAX_TRIGGER_TOKENS = 64


@dataclass(frozen=True)
class Limits:
    """What one sequence may use, in tokens."""

    vocab_size: int  # prompt ids must be below
    context_length: int  # prompt + output
    max_request_tokens: int  # prompt + output, by the size of the KV pool
    auto_truncate: bool = False  # clip the output instead of refusing

    def room(self, prompt_tokens: int) -> int:
        """Tokens an answer to such a prompt may have; not negative."""
        return max(0, min(self.context_length, self.max_request_tokens) - prompt_tokens)


def check_sequence(seq: SequenceRequest, limits: Limits) -> SamplingParams:
    """The sampling to use, with max_new_tokens filled in. Raises BadRequest or ContextTooLong with the numbers."""
    _check_text_fields(seq)
    _check_ids(seq.input_ids, limits.vocab_size, "input_ids")
    _check_logprobs(seq, limits.vocab_size)
    return msgspec.structs.replace(seq.sampling, **_fitted(len(seq.input_ids), seq.sampling, limits))


def _fitted(prompt_tokens: int, sampling: SamplingParams, limits: Limits) -> dict[str, int]:
    """max_new_tokens, and min_new_tokens where clipping would leave it above."""
    room = limits.room(prompt_tokens)
    asked = sampling.max_new_tokens
    if prompt_tokens > limits.context_length or (room == 0 and asked != 0):
        limit, what = _narrower(limits)
        raise ContextTooLong(f"{what} is {limit} tokens, but the prompt alone has {prompt_tokens}; shorten the prompt")
    if asked is None or (asked > room and limits.auto_truncate):
        return {"max_new_tokens": room, "min_new_tokens": min(sampling.min_new_tokens, room)}
    if asked > room:
        limit, what = _narrower(limits)
        raise ContextTooLong(
            f"{what} is {limit} tokens, but {prompt_tokens + asked} were requested: {prompt_tokens} in the prompt and {asked} "
            f"for the answer; shorten the prompt or lower max_tokens to {room}"
        )
    return {}


def _narrower(limits: Limits) -> tuple[int, str]:
    if limits.max_request_tokens < limits.context_length:
        return limits.max_request_tokens, "the most this server's KV pool holds for one request"
    return limits.context_length, "this model's maximum context length"


def _check_ids(ids: list[int], vocab_size: int, name: str) -> None:
    if not ids:
        raise BadRequest("the prompt is empty; it must have at least one token", param=name)
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise BadRequest(f"{name} must be in [0, {vocab_size - 1}], got {low if low < 0 else high}", param=name)


def _check_logprobs(seq: SequenceRequest, vocab_size: int) -> None:
    if not -1 <= seq.logprob_start_len < len(seq.input_ids):
        raise BadRequest(
            f"logprob_start_len must be -1 or a position of the prompt, in [0, {len(seq.input_ids) - 1}], got {seq.logprob_start_len}",
            param="logprob_start_len",
        )
    if not 0 <= seq.top_logprobs_num <= min(MAX_TOP_LOGPROBS, vocab_size):
        raise BadRequest(
            f"top_logprobs_num must be in [0, {min(MAX_TOP_LOGPROBS, vocab_size)}], got {seq.top_logprobs_num}", param="top_logprobs_num"
        )
    if seq.token_ids_logprob:
        _check_ids(seq.token_ids_logprob, vocab_size, "token_ids_logprob")
        if len(seq.token_ids_logprob) > MAX_TOP_LOGPROBS:
            raise BadRequest(
                f"token_ids_logprob allows {MAX_TOP_LOGPROBS} ids, got {len(seq.token_ids_logprob)}", param="token_ids_logprob"
            )


def constraint_of(seq: SequenceRequest, vocab_size: int) -> Constraint | None:
    """The one grammar a sequence asks for, in its sampling parameters or beside them. Raises BadRequest."""
    name, constraint = uses_grammar(seq.sampling), seq.constraint
    if name is not None and constraint is not None:
        raise BadRequest(f"only one grammar can be set, got {name} and another of kind {constraint.grammar.kind}", param=name)
    if name is not None:
        constraint = Constraint(grammar=GrammarText(kind=name, text=getattr(seq.sampling, name)))
    if constraint is None:
        return None
    size = len(constraint.grammar.text.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"a grammar may have {MAX_GRAMMAR_BYTES} bytes, got {size}", param=name)
    trigger, bound = constraint.trigger_token_ids, constraint.bound_token_id
    if len(trigger) > MAX_TRIGGER_TOKENS:
        raise BadRequest(f"trigger_token_ids may have {MAX_TRIGGER_TOKENS} ids, got {len(trigger)}", param="trigger_token_ids")
    if bound is not None and not trigger:
        raise BadRequest("bound_token_id needs trigger_token_ids: it is they that are forced", param="bound_token_id")
    if trigger:
        _check_ids([*trigger, *([] if bound is None else [bound])], vocab_size, "trigger_token_ids and bound_token_id")
    return constraint


def _check_text_fields(seq: SequenceRequest) -> None:
    if not 0 < len(seq.rid) <= MAX_RID_CHARS:
        raise BadRequest(f"rid must have 1 to {MAX_RID_CHARS} characters, got {len(seq.rid)}", param="rid")
    if not seq.rid.isprintable():
        raise BadRequest("rid must not contain control characters: it is written to logs", param="rid")
    if len(seq.cache_salt) > MAX_SALT_CHARS:
        raise BadRequest(f"cache_salt may have {MAX_SALT_CHARS} characters, got {len(seq.cache_salt)}", param="cache_salt")
    for name, allowed in (("swa_restore", ("exact", "bounded")), ("prefill_truncation", ("off", "compact"))):
        value = getattr(seq, name)
        if value is not None and value not in allowed:
            raise BadRequest(f"{name} must be one of {', '.join(allowed)}, got {str(value)[:64]!r}", param=name)
    if seq.deadline_s is not None and not 0 < seq.deadline_s < float("inf"):
        raise BadRequest(f"timeout must be a positive number of seconds, got {seq.deadline_s}", param="timeout")
