"""What the generating routes share: read and check the body, make sequences, then collect or stream the reply.

A route is two classes. A `Route` turns a request into a `Reply`; the reply knows its sequences and turns their outputs into
chunks. A whole reply is built from what a stream would have sent, so the two cannot disagree.

    body ─parse─► request ─prepare─► Reply ─sequences─► TokenizerManager.run ×n ─take─► chunks ─► SSE, or one JSON object

    Route ── Serving ── CompletionServing, ChatServing        Reply ── ChoicesReply ── CompletionReply, ChatReply
      └───── MessagesServing, ResponsesServing (over ChatServing)  └── MessagesReply, ResponsesReply

Errors before the first output are HTTP errors; later ones are an event that ends the stream.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from sglang.srt.constrained.constraint import Constraint
from sglang.srt.entrypoints.error_replies import Family, error_body
from sglang.srt.entrypoints.generate import MAX_SEQUENCES
from sglang.srt.entrypoints.meta_info import meta_info
from sglang.srt.entrypoints.openai.protocol import CommonRequest, as_list, parse
from sglang.srt.entrypoints.openai.usage import ChoiceUsage, usage_of
from sglang.srt.entrypoints.sse import DONE, data_event, merge
from sglang.srt.errors import BadRequest, ServiceError
from sglang.srt.managers.sequence import SequenceOutput, SequenceRequest
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import MAX_N, SamplingParams, parse_sampling_params
from sglang.srt.sampling.seeds import child_seed
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

MAX_TOP_LOGPROBS = 20  # OpenAI's limit
WEIGHT_VERSION = "default"

# Sampling fields a model may have an opinion about, in generation_config.json.
_MODEL_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# SGLang's sampling names and what the OpenAI routes call them.
_ROUTE_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}

R = TypeVar("R", bound=CommonRequest)
Json = dict[str, Any]


def model_sampling_defaults(args: ServerArgs) -> Json:
    """Sampling fields of the model's generation_config.json; empty with --sampling-defaults openai."""
    path = Path(args.model_path) / "generation_config.json"
    if args.sampling_defaults != "model" or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
        given = {name: config[name] for name in _MODEL_SAMPLING if config.get(name) is not None}
        # transformers writes "no limit" as 0
        given = {name: value for name, value in given.items() if not (name == "top_k" and value == 0)}
        parse_sampling_params(given, vocab_size=1 << 31)
    except (ValueError, AttributeError, BadRequest) as error:
        logger.warning("generation_config.json is ignored: %s", error)
        return {}
    return given


class Reply(ABC):
    """The answer to one request in the making. One per request; not shared between tasks."""

    family: ClassVar[Family] = "openai"

    def __init__(self, request: CommonRequest, *, id: str, model: str, sequences: list[SequenceRequest]):
        """`sequences` are numbered as the choices will be: prompt-major, n of each prompt."""
        self.request = request
        self.id = id
        self.model = model
        self.created = int(time.time())
        self.sequences = sequences
        self.usages = [ChoiceUsage(prompt=index // request.n) for index in range(len(sequences))]
        self._last: list[SequenceOutput | None] = [None] * len(sequences)

    def take(self, index: int, output: SequenceOutput) -> Iterator[Json]:
        """Chunks for what one step added to one choice. Read it to its end: that is what adds the step to the reply."""
        usage = self.usages[index]
        usage.prompt_tokens, usage.cached_tokens = output.prompt_tokens, output.cached_tokens
        usage.completion_tokens = output.completion_tokens
        self._last[index] = output
        yield from self._take(index, output)

    @abstractmethod
    def _take(self, index: int, output: SequenceOutput) -> Iterator[Json]: ...

    @abstractmethod
    def end(self) -> Iterator[Json]:
        """Chunks after all choices have ended."""

    @abstractmethod
    def whole(self) -> Json:
        """The reply in one object, once every output has been taken."""

    @abstractmethod
    def event(self, chunk: Json) -> bytes:
        """A chunk as a server-sent event."""

    @abstractmethod
    def error_event(self, error: ServiceError) -> bytes:
        """What ends a stream that broke after its start."""

    def closing(self) -> bytes:
        """Bytes after the last chunk."""
        return b""


class ChoicesReply(Reply):
    """A reply in the form of completions and chat: a list of numbered choices."""

    object_name: ClassVar[str]  # of a whole reply
    chunk_name: ClassVar[str]

    def __init__(self, request: CommonRequest, *, report_cache: bool, include_usage: bool, **common: Any):
        """`include_usage`: whether a stream ends with a usage chunk."""
        super().__init__(request, **common)
        self._report_cache = report_cache
        self._include_usage = include_usage

    @abstractmethod
    def _choice(self, index: int) -> Json:
        """One entry of `choices` of a whole reply."""

    def end(self) -> Iterator[Json]:
        """Finish chunks, then usage in a chunk of its own, and only when asked for."""
        yield from self._finish_chunks()
        if self._include_usage:
            yield self.usage_chunk()

    def _finish_chunks(self) -> Iterator[Json]:
        yield from ()

    def event(self, chunk: Json) -> bytes:
        return data_event(chunk)

    def error_event(self, error: ServiceError) -> bytes:
        return data_event(error_body(self.family, error)) + DONE

    def closing(self) -> bytes:
        return DONE

    def whole(self) -> Json:
        reply = self._envelope(self.object_name, [self._choice(index) for index in range(len(self.sequences))])
        reply["usage"] = self.usage()
        first = self._last[0]
        # The first choice has the seed of the request: sent again with it, the request gets the same answers.
        reply["metadata"] = {"weight_version": WEIGHT_VERSION} | ({"sampling_seed": first.seed} if first else {})
        extension = self._extension()
        return reply | {"sglext": extension} if extension else reply

    def usage(self, *, streamed: bool = False) -> Json:
        return usage_of(self.usages, report_cache=self._report_cache, streamed=streamed)

    def chunk(self, choices: list[Json]) -> Json:
        """A chunk of the stream; with continuous_usage_stats it carries the usage so far."""
        chunk = self._envelope(self.chunk_name, choices)
        if choices and self.request.continuous_usage:
            chunk["usage"] = self.usage(streamed=True)
        return chunk

    def usage_chunk(self) -> Json:
        chunk = self.chunk([]) | {"usage": self.usage(streamed=True)}
        extension = self._extension()
        return chunk | {"sglext": extension} if extension else chunk

    def meta_info(self, index: int) -> Json:
        """SGLang's own report of a choice, for return_meta_info."""
        output = self._last[index]
        if output is None:
            return {}
        return meta_info(output, is_first=True) | {"reasoning_tokens": self.usages[index].reasoning_tokens}

    def _envelope(self, name: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    def _extension(self) -> Json:
        """What was asked for under `sglext`."""
        extension: Json = {}
        if self.request.return_cached_tokens_details:
            cached = self.usages[0].cached_tokens
            extension["cached_tokens_details"] = {"device": cached, "host": 0}
        last = self._last[0]
        if self.request.return_spec_tokens_details and last is not None and last.raw.spec:
            extension["spec_tokens_details"] = last.raw.spec
        return extension


class Route(ABC, Generic[R]):
    """One route. Built once; `prepare` is called for each request."""

    request_type: type[R]
    id_prefix: ClassVar[str]

    def __init__(self, tm: TokenizerManager):
        self.tm = tm

    def read(self, body: bytes) -> R:
        """The request in a body, checked as far as all routes go. Raises BadRequest."""
        request = parse(body, self.request_type)
        if not 1 <= request.n <= MAX_N:
            raise BadRequest(f"n must be in 1..{MAX_N}, found {request.n}", param="n")
        return request

    @abstractmethod
    async def prepare(self, request: R) -> Reply:
        """Render, tokenize and check; nothing has been sent to the scheduler yet. Raises BadRequest."""

    def new_id(self) -> str:
        return self.id_prefix + uuid.uuid4().hex


class Serving(Route[R]):
    """A route that makes its sequences itself."""

    def __init__(self, tm: TokenizerManager):
        super().__init__(tm)
        self._sampling_defaults = model_sampling_defaults(tm.args)

    def include_usage(self, request: R) -> bool:
        return request.includes_usage(self.tm.args.stream_response_default_include_usage)

    def sampling(self, request: R, max_tokens: int | None) -> SamplingParams:
        """Sampling of a request: what it says, else what the model says, else SGLang's defaults. Raises BadRequest."""
        fields: Json = {name: self._sampling_defaults.get(name) for name in _MODEL_SAMPLING}
        for name in _MODEL_SAMPLING:
            if getattr(request, name) is not None:
                fields[name] = getattr(request, name)
        fields |= {
            "max_new_tokens": max_tokens,
            "min_new_tokens": request.min_tokens,
            "frequency_penalty": request.frequency_penalty,
            "presence_penalty": request.presence_penalty,
            "logit_bias": request.logit_bias,
            "stop": as_list(request.stop),
            "stop_token_ids": request.stop_token_ids,
            "stop_regex": as_list(request.stop_regex),
            "ignore_eos": request.ignore_eos,
            "skip_special_tokens": request.skip_special_tokens,
            "no_stop_trim": request.no_stop_trim,
            "sampling_seed": request.seed,
            "stream_interval": request.stream_interval,
            "custom_params": request.custom_params,
        }
        try:
            return parse_sampling_params(fields, vocab_size=self.tm.model.vocab_size, default_max_new_tokens=None)
        except BadRequest as error:
            raise _in_route_names(error) from None

    def sequences_of(
        self,
        request: R,
        prompts: list[list[int]],
        sampling: SamplingParams,
        *,
        return_logprob: bool,
        top_logprobs: int,
        input_logprobs: bool = False,
        constraint: Constraint | None = None,
    ) -> list[SequenceRequest]:
        """n sequences of each prompt, prompt-major. Every one has noise of its own, also under one seed."""
        count = len(prompts) * request.n
        if count > MAX_SEQUENCES:
            raise BadRequest(f"{len(prompts)} prompts with n = {request.n} ask for {count} answers, the limit is {MAX_SEQUENCES}")
        self.tm.check_count(count)
        if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
            raise BadRequest(f"logprobs for at most {MAX_TOP_LOGPROBS} tokens a position, found {top_logprobs}", param="top_logprobs")
        # One seed gives n different answers, the first of which is that of n = 1.
        seed = self.tm.new_seed() if sampling.sampling_seed is None else sampling.sampling_seed
        return [
            SequenceRequest(
                rid=self._rid(request, index, count),
                input_ids=prompts[index // request.n],
                sampling=msgspec.structs.replace(sampling, sampling_seed=child_seed(seed, index % request.n)),
                stream=request.stream,
                return_logprob=return_logprob,
                logprob_start_len=0 if input_logprobs else -1,
                top_logprobs_num=top_logprobs,
                priority=request.priority or 0,
                cache_salt=_salt(request),
                deadline_s=request.timeout,
                swa_restore=request.swa_restore,
                prefill_truncation=request.prefill_truncation,
                constraint=constraint,
                label=self.id_prefix,
            )
            for index in range(count)
        ]

    def _rid(self, request: R, index: int, count: int) -> str:
        if request.rid is None:
            return self.tm.new_rid()
        return request.rid if count == 1 else f"{request.rid}_{index}"


async def collect(tm: TokenizerManager, reply: Reply) -> Json:
    """The whole reply, when all its sequences have ended."""
    async with aclosing(_outputs(tm, reply)) as steps:
        async for index, output in steps:
            for _ in reply.take(index, output):
                pass
    return reply.whole()


async def stream(tm: TokenizerManager, reply: Reply) -> AsyncGenerator[bytes]:
    """The events of a reply."""
    async with aclosing(_outputs(tm, reply)) as steps:
        async for index, output in steps:
            for chunk in reply.take(index, output):
                yield reply.event(chunk)
    for chunk in reply.end():
        yield reply.event(chunk)
    if closing := reply.closing():
        yield closing


def _outputs(tm: TokenizerManager, reply: Reply) -> AsyncGenerator[tuple[int, SequenceOutput]]:
    """Outputs of all sequences as they come, each with the number of its choice."""
    return merge([tm.run(sequence) for sequence in reply.sequences])


def _salt(request: CommonRequest) -> str:
    """As on the native route: requests share cached pages only if both names agree."""
    salt = request.cache_salt or ""
    return f"{salt}\0{request.extra_key}" if request.extra_key else salt


def _in_route_names(error: BadRequest) -> BadRequest:
    """SGLang's sampling names are not what the client of an OpenAI route wrote."""
    message = error.message
    for theirs, ours in _ROUTE_NAMES.items():
        message = message.replace(theirs, ours)
    return BadRequest(message, param=_ROUTE_NAMES.get(error.param or "", error.param))
