"""Step "commit": the sampled token becomes a known one, logprobs are collected, and the end is decided."""

from __future__ import annotations

from sglang.srt.constrained.grammar_state import GrammarState
from sglang.srt.managers.io_struct import FinishReason, TokenLogprobs
from sglang.srt.managers.request import Req
from sglang.srt.model_executor.step import SampledToken


def commit(req: Req, token: SampledToken) -> FinishReason | None:
    """Append a sampled token to the known ones. Returns why the request ends here, if it does.

    A row that could not be sampled (NaN, or every token banned) ends its request, no other; its token is not appended.
    """
    if token.error is not None:
        status, kind = (400, "BadRequestError") if token.is_own_doing else (500, "InternalServerError")
        return FinishReason(type="abort", message=f"request {req.rid}: {token.error}", status_code=status, err_type=kind)
    if req.max_new_tokens <= 0:
        return FinishReason(type="length", length=0)
    req.ids.append(token.id)
    if req.msg.return_logprob:
        _collect_output_logprob(req, token)
    reason = req.stop.check(token.id)
    return reason if req.grammar is None else _follow_grammar(req, req.grammar, token.id) or reason


def _follow_grammar(req: Req, grammar: GrammarState, token_id: int) -> FinishReason | None:
    """Advance the grammar. An answer that is complete ends here, also where EOS alone would not end it."""
    refusal = grammar.advance(token_id)
    if refusal is not None:
        return FinishReason(type="abort", message=f"request {req.rid}: {refusal}", status_code=500, err_type="InternalServerError")
    return FinishReason(type="stop", matched=token_id) if grammar.is_terminated else None


def collect_prompt_logprobs(req: Req, part: TokenLogprobs) -> None:
    """Append the prompt logprobs of one chunk; chunks come in order."""
    assert req.input_logprobs is not None, "asked for when the request was accepted"
    _extend(req.input_logprobs, part)


def first_prompt_logprobs(prompt: list[int], start: int, top: int, token_ids: list[int] | None) -> TokenLogprobs | None:
    """What is known before any forward: the first token of a prompt has no predecessor, so its entry is None.

    None if no prompt logprobs are wanted (start -1).
    """
    if start < 0:
        return None
    known = prompt[:1] if start == 0 else []
    return TokenLogprobs(
        ids=list(known),
        logprobs=[None] * len(known),
        top=[None] * len(known) if top else None,
        token_ids=[None] * len(known) if token_ids is not None else None,
    )


def _collect_output_logprob(req: Req, token: SampledToken) -> None:
    if req.output_logprobs is None:
        req.output_logprobs = TokenLogprobs(
            ids=[],
            logprobs=[],
            top=[] if req.msg.top_logprobs_num else None,
            token_ids=[] if req.msg.token_ids_logprob is not None else None,
        )
    one = TokenLogprobs(ids=[token.id], logprobs=[token.logprob], top=[token.top], token_ids=[token.token_ids])
    _extend(req.output_logprobs, one)


def _extend(whole: TokenLogprobs, part: TokenLogprobs) -> None:
    whole.ids += part.ids
    whole.logprobs += part.logprobs
    if whole.top is not None:
        whole.top += part.top or []
    if whole.token_ids is not None:
        whole.token_ids += part.token_ids or []
