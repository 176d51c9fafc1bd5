"""POST /v1/completions: text or ids in, text out; no template, no parsing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.entrypoints.generate import encode_all
from sglang.srt.entrypoints.openai.constraints import constraint_of
from sglang.srt.entrypoints.openai.logprobs import CompletionLogprobs
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.entrypoints.openai.serving_base import ChoicesReply, Json, Serving
from sglang.srt.errors import BadRequest
from sglang.srt.managers.io_struct import TokenLogprobs
from sglang.srt.managers.running_sequence import merge_logprobs
from sglang.srt.managers.sequence import SequenceOutput
from sglang.srt.managers.tokenizer import Tokenizer


class CompletionServing(Serving[CompletionRequest]):
    request_type = CompletionRequest
    id_prefix = "cmpl-"

    async def prepare(self, request: CompletionRequest) -> CompletionReply:
        constraint = constraint_of(request)
        if request.suffix:
            raise BadRequest("suffix is not supported: this model has no template for filling in the middle", param="suffix")
        if request.logprobs is not None and request.logprobs < 0:
            raise BadRequest(f"logprobs must not be negative, found {request.logprobs}", param="logprobs")
        texts = _prompts_of(request.prompt)
        prompts = texts if isinstance(texts[0], list) else await encode_all(texts, self.tm)
        wanted = request.logprobs is not None
        sequences = self.sequences_of(
            request,
            prompts,
            self.sampling(request, request.max_tokens),
            return_logprob=wanted,
            top_logprobs=request.logprobs or 0,
            input_logprobs=wanted and request.echo,
            constraint=constraint,
        )
        echoes = [self._text_of(prompt, request) for prompt in texts] if request.echo else []
        return CompletionReply(
            request,
            id=self.new_id(),
            model=request.model or self.tm.args.model_name,
            sequences=sequences,
            report_cache=self.tm.args.enable_cache_report,
            include_usage=self.include_usage(request),
            tokenizer=self.tm.tokenizer,
            echoes=echoes,
        )

    def _text_of(self, prompt: str | list[int], request: CompletionRequest) -> str:
        return prompt if isinstance(prompt, str) else self.tm.tokenizer.decode(prompt, request.skip_special_tokens)


class CompletionReply(ChoicesReply):
    object_name = chunk_name = "text_completion"

    def __init__(self, request: CompletionRequest, *, tokenizer: Tokenizer, echoes: list[str], **common: Any):
        """`echoes` are the prompts as text, or nothing if they are not to be repeated."""
        super().__init__(request, **common)
        self._choices = [_Choice(request, tokenizer, echoes[usage.prompt] if echoes else "") for usage in self.usages]

    def _take(self, index: int, output: SequenceOutput) -> Iterator[Json]:
        piece = self._choices[index].take(output)
        if piece is not None:
            yield self.chunk([{"index": index, **piece}])

    def chunk(self, choices: list[Json]) -> Json:
        return {**super().chunk(choices), "usage": None} if choices and not self.request.continuous_usage else super().chunk(choices)

    def _choice(self, index: int) -> Json:
        choice: Json = {"index": index, **self._choices[index].whole()}
        if self.request.return_meta_info:
            choice["meta_info"] = self.meta_info(index)
        return choice


class _Choice:
    """One answer: its text and logprobs so far."""

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, echo: str):
        self._request = request
        self._echo = echo
        self._wants_logprobs = request.logprobs is not None
        self._logprobs = CompletionLogprobs(tokenizer, len(echo), skip_special_tokens=request.skip_special_tokens)
        self._tokenizer = tokenizer
        self._pending: list[TokenLogprobs] = []  # of tokens whose text is still held back
        self._pending_ids: list[int] = []
        self._pieces: list[Json] = []
        self._started = False

    def take(self, output: SequenceOutput) -> Json | None:
        """What a stream shows for this output; None where nothing can be shown yet."""
        text = output.new_text
        if not self._started:
            self._started = True
            text = self._echo + text
            if self._echo and output.input_logprobs is not None:
                self._logprobs = CompletionLogprobs(self._tokenizer, skip_special_tokens=self._request.skip_special_tokens)
                self._pending.append(output.input_logprobs)
        if output.output_logprobs is not None:
            self._pending.append(output.output_logprobs)
        self._pending_ids += output.new_ids
        if not text and output.finish is None:
            return None
        piece = self._piece(text, output)
        if not self._request.stream:
            self._pieces.append(piece)
        return piece

    def _piece(self, text: str, output: SequenceOutput) -> Json:
        pending = merge_logprobs(self._pending)
        logprobs = self._logprobs.take(pending) if self._wants_logprobs and pending is not None else None
        finish = output.finish
        piece: Json = {
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish.type if finish else None,
            "matched_stop": finish.matched if finish else None,
        }
        if self._request.return_token_ids:
            piece["token_ids"] = self._pending_ids
        self._pending, self._pending_ids = [], []
        return piece

    def whole(self) -> Json:
        """All pieces as one."""
        whole: Json = {"text": "".join(piece["text"] for piece in self._pieces), "logprobs": None}
        parts = [piece["logprobs"] for piece in self._pieces if piece["logprobs"] is not None]
        if parts:
            whole["logprobs"] = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        last = self._pieces[-1]
        whole |= {"finish_reason": last["finish_reason"], "matched_stop": last["matched_stop"]}
        if self._request.return_token_ids:
            whole["token_ids"] = [token for piece in self._pieces for token in piece["token_ids"]]
        return whole


def _prompts_of(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """One entry per prompt: all texts, or all ids. Raises BadRequest for mixtures and for nothing."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise BadRequest("prompt cannot be empty", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        for item in prompt:
            if not item:
                raise BadRequest("prompt cannot be empty", param="prompt")
        return prompt
    raise BadRequest("prompt must be a string, a list of strings, a list of ids or a list of lists of ids", param="prompt")
