"""The native request, from its JSON object to its answer. /generate and the offline engine share it.

accept: `read_job` splits a request into sequences (lists and n > 1, prompt by prompt)
`answer` gives the whole reply; `stream` gives it piece by piece, as dictionaries
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.entrypoints.meta_info import LogprobReport, meta_info
from sglang.srt.entrypoints.so_args import read_so_args
from sglang.srt.entrypoints.sse import merge
from sglang.srt.errors import BadRequest
from sglang.srt.managers.sequence import SequenceOutput, SequenceRequest
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams, parse_sampling_params
from sglang.srt.sampling.seeds import child_seed

DEFAULT_MAX_NEW_TOKENS = 128
MAX_SEQUENCES = 4096
"""Prompts x n of one request."""
_THREAD_ABOVE_CHARS = 20_000  # longer texts are tokenised in a thread, so that streams go on meanwhile
_UNSUPPORTED = ("input_embeds", "image_data", "video_data", "audio_data", "session_params", "lora_path", "return_hidden_states")


@dataclass(frozen=True)
class GenerateJob:
    """A request that passed its checks."""

    sequences: list[SequenceRequest]  # prompt by prompt, the choices of a prompt next to each other
    is_single: bool  # the reply is an object, not a list
    is_stream: bool
    with_logprob_text: bool


async def read_job(body: dict[str, Any], manager: TokenizerManager) -> GenerateJob:
    """Check a request and tokenise its prompts. Raises BadRequest for what can be seen without the context's length."""
    for name in _UNSUPPORTED:
        if body.get(name):
            raise BadRequest(f"{name} is not supported by this server", param=name)
    prompts, is_single = await _prompts(body, manager)
    fields = _PerPrompt(body, len(prompts))
    is_stream = _flag(body, "stream")
    sequences: list[SequenceRequest] = []
    for index, prompt in enumerate(prompts):
        sampling = _sampling(fields.item("sampling_params", index), len(prompt), manager)
        sequences += _choices(prompt, sampling, fields, index, is_stream, manager)
        if len(sequences) > MAX_SEQUENCES:
            raise BadRequest(f"a request may have {MAX_SEQUENCES} prompts x n, got more")
    manager.check_count(len(sequences))
    _name(sequences, body.get("rid"), manager)
    return GenerateJob(sequences, is_single and len(sequences) == 1, is_stream, _flag(body, "return_text_in_logprobs"))


async def answer(job: GenerateJob, manager: TokenizerManager) -> dict[str, Any] | list[dict[str, Any]]:
    """The whole reply. The first sequence that fails stops the others and raises its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_collect(seq, job, manager)) for seq in job.sequences]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    results = [task.result() for task in tasks]
    return results[0] if job.is_single else results


async def stream(job: GenerateJob, manager: TokenizerManager) -> AsyncGenerator[dict[str, Any], None]:
    """Pieces of the reply. Each has the text so far, or with --incremental-streaming-output what is new."""
    replies = [_Reply(seq, job, manager, is_incremental=manager.args.incremental_streaming_output) for seq in job.sequences]
    async with aclosing(merge([manager.run(seq) for seq in job.sequences])) as outputs:
        async for index, output in outputs:
            replies[index].take(output)
            piece = replies[index].as_dict()
            if not job.is_single:
                piece["index"] = index
            yield piece


async def _collect(seq: SequenceRequest, job: GenerateJob, manager: TokenizerManager) -> dict[str, Any]:
    reply = _Reply(seq, job, manager)
    async with aclosing(manager.run(seq)) as outputs:
        async for output in outputs:
            reply.take(output)
    return reply.as_dict()


class _Reply:
    """What has been said of one sequence so far."""

    def __init__(self, seq: SequenceRequest, job: GenerateJob, manager: TokenizerManager, *, is_incremental: bool = False):
        text_of = manager.tokenizer.token_text if job.with_logprob_text else None
        self._logprobs = LogprobReport(seq, text_of) if seq.return_logprob else None
        self._is_incremental = is_incremental
        self._with_times = manager.args.enable_metrics
        self._text = ""
        self._ids: list[int] = []
        self._output: SequenceOutput | None = None
        self._is_first = True

    def take(self, output: SequenceOutput) -> None:
        if self._is_incremental:
            self._text, self._ids = "", []
            if self._logprobs is not None:
                self._logprobs.forget_output()
        self._text += output.new_text
        self._ids += output.new_ids
        if self._logprobs is not None:
            self._logprobs.take(output)
        self._output = output

    def as_dict(self) -> dict[str, Any]:
        assert self._output is not None, "a sequence has at least one output"
        info = meta_info(self._output, self._logprobs, with_times=self._with_times, is_first=self._is_first)
        self._is_first = False
        return {"text": self._text, "output_ids": list(self._ids), "meta_info": info}


# -- reading the request -----------------------------------------------------------------------------------------------


async def _prompts(body: dict[str, Any], manager: TokenizerManager) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether there was one prompt rather than a list."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        found = "neither" if text is None else "both"
        raise BadRequest(f"exactly one of text and input_ids must be given, found {found}")
    if text is not None:
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not texts or not all(isinstance(item, str) for item in texts):
            raise BadRequest("text must be a string or a list of strings", param="text")
        return await encode_all(texts, manager), isinstance(text, str)
    if not isinstance(ids, list) or not ids:
        raise BadRequest("input_ids must be a list of ids or a list of such lists, and not empty", param="input_ids")
    is_single = not isinstance(ids[0], list)
    prompts = [ids] if is_single else ids
    for prompt in prompts:
        if not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
            raise BadRequest("input_ids must contain integers only", param="input_ids")
    return prompts, is_single


async def encode_all(texts: list[str], manager: TokenizerManager) -> list[list[int]]:
    """Ids of several texts. Raises BadRequest for what is not text (a lone surrogate)."""
    try:
        total = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise BadRequest("text contains a lone surrogate, which no text can contain", param="text") from None
    if total > _THREAD_ABOVE_CHARS:
        return await asyncio.to_thread(lambda: [manager.tokenizer.encode(text) for text in texts])
    return [manager.tokenizer.encode(text) for text in texts]


def _sampling(obj: Any, prompt_tokens: int, manager: TokenizerManager) -> SamplingParams:
    """Parsed parameters. Without a limit of the client's, 128 tokens, or fewer where the context leaves fewer."""
    sampling = parse_sampling_params(obj, vocab_size=manager.model.vocab_size, default_max_new_tokens=None)
    if sampling.max_new_tokens is not None:
        return sampling
    # min_new_tokens wins over a default that nobody asked for.
    default = max(DEFAULT_MAX_NEW_TOKENS, sampling.min_new_tokens)
    room = manager.room(prompt_tokens)
    return sampling if room < default else msgspec.structs.replace(sampling, max_new_tokens=default)


def _choices(
    prompt: list[int], sampling: SamplingParams, fields: _PerPrompt, index: int, is_stream: bool, manager: TokenizerManager
) -> list[SequenceRequest]:
    """One sequence per choice; each has a seed of its own, derived from the request's."""
    seed = manager.new_seed() if sampling.sampling_seed is None else sampling.sampling_seed
    salt = fields.text("cache_salt", index)
    extra_key = fields.text("extra_key", index)
    constraint = read_so_args(fields.item("so_args", index))
    return [
        SequenceRequest(
            rid="",
            input_ids=prompt,
            sampling=msgspec.structs.replace(sampling, n=1, sampling_seed=child_seed(seed, choice)),
            stream=is_stream,
            return_logprob=fields.boolean("return_logprob", index),
            logprob_start_len=fields.integer("logprob_start_len", index, -1),
            top_logprobs_num=fields.integer("top_logprobs_num", index, 0),
            token_ids_logprob=fields.ids("token_ids_logprob", index),
            priority=fields.integer("priority", index, 0),
            cache_salt=f"{salt}\0{extra_key}" if extra_key else salt,
            deadline_s=fields.number("timeout", index),
            swa_restore=fields.text("swa_restore", index) or None,
            prefill_truncation=fields.text("prefill_truncation", index) or None,
            constraint=constraint,
            label="generate",
        )
        for choice in range(sampling.n)
    ]


def _name(sequences: list[SequenceRequest], rid: Any, manager: TokenizerManager) -> None:
    """Give every sequence its rid: the client's, numbered if it gave one for several; or a new one."""
    if rid is None:
        rids = [manager.new_rid() for _ in sequences]
    elif isinstance(rid, str):
        rids = [rid] if len(sequences) == 1 else [f"{rid}_{index}" for index in range(len(sequences))]
    elif isinstance(rid, list) and len(rid) == len(sequences) and all(isinstance(item, str) for item in rid):
        rids = rid
    else:
        raise BadRequest(f"rid must be a string, or a list of {len(sequences)} strings", param="rid")
    if len(set(rids)) != len(rids):
        raise BadRequest("rid must not contain the same id twice", param="rid")
    for seq, name in zip(sequences, rids, strict=True):
        seq.rid = name


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, got {type(value).__name__}", param=name)
    return bool(value)


class _PerPrompt:
    """Fields that hold one value for all prompts, or a list with one for each."""

    def __init__(self, body: dict[str, Any], num_prompts: int):
        self._body = body
        self._num_prompts = num_prompts

    def item(self, name: str, index: int) -> Any:
        value = self._body.get(name)
        if not isinstance(value, list):
            return value
        if len(value) != self._num_prompts:
            raise BadRequest(f"{name} has {len(value)} entries for {self._num_prompts} prompts", param=name)
        return value[index]

    def boolean(self, name: str, index: int) -> bool:
        return bool(self._typed(name, index, bool, False))

    def integer(self, name: str, index: int, default: int) -> int:
        value = self._typed(name, index, int, default)
        if not -(2**31) <= value < 2**31:
            raise BadRequest(f"{name} must be a 32-bit integer", param=name)
        return value

    def number(self, name: str, index: int) -> float | None:
        value = self.item(name, index)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise BadRequest(f"{name} must be a number, got {type(value).__name__}", param=name)
        return value

    def text(self, name: str, index: int) -> str:
        return self._typed(name, index, str, "")

    def ids(self, name: str, index: int) -> list[int] | None:
        """A list of ids for all prompts, or a list of such lists."""
        value = self._body.get(name)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            value = self.item(name, index)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or any(type(token) is not int for token in value):
            raise BadRequest(f"{name} must be a list of ids, or one such list for each prompt", param=name)
        return value

    def _typed(self, name: str, index: int, kind: type, default: Any) -> Any:
        value = self.item(name, index)
        if value is None:
            return default
        if type(value) is not kind:
            raise BadRequest(f"{name} must be {_KINDS[kind]}, got {type(value).__name__}", param=name)
        return value


_KINDS = {bool: "true or false", int: "an integer", str: "a string"}
