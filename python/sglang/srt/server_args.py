"""Every flag of a worker: its name, default and help in one place (SGLang's names where it has one).

`ServerArgs` is built once at start-up and passed down. The command line, the offline `Engine(**kwargs)` and the
server-info reply are all derived from its fields, so a new flag is one new field.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.errors import ConfigError


def flag(default: Any, help: str, *, choices: tuple[str, ...] | None = None, alias: tuple[str, ...] = (), secret: bool = False) -> Any:
    """A field of ServerArgs: `help` says what it does, its unit and the reason for the default."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "alias": alias, "secret": secret})


@dataclass(frozen=True)
class ServerArgs:
    # model
    model_path: str = flag("", "checkpoint directory in the released format", alias=("--model",))
    tokenizer_path: str | None = flag(None, "directory with tokenizer.json; default: the checkpoint directory")
    served_model_name: str | None = flag(None, "name shown to clients; default: last part of the model path")
    context_length: int | None = flag(None, "tokens of prompt + output per request; default: the checkpoint's max_position_embeddings")
    json_model_override_args: str = flag("{}", "JSON object laid over config.json, for experiments")
    device: str = flag("auto", "where the model runs: cpu, cuda, or auto (cuda when there is one)")
    dtype: str = flag("bfloat16", "precision of activations; float32 is for tests against goldens", choices=("auto", "bfloat16", "float32"))
    kv_cache_dtype: str = flag(
        "auto", "cache precision; auto: the release's FP8 windows, FP4 latents and FP4 index keys", choices=("auto", "bfloat16", "float32")
    )
    activation_quant: str = flag("auto", "quantise inputs of FP8 and FP4 matrices as the release does, or not", choices=("auto", "off"))
    kernel_backend: str = flag(
        "auto", "implementation of the operations; auto takes the fastest that is available", choices=("auto", "torch")
    )
    random_seed: int | None = flag(None, "seed of everything that has no seed of its own (requests draw theirs from it)")
    trust_remote_code: bool = flag(False, "accepted for compatibility; no code is ever loaded from a checkpoint")

    # server
    host: str = flag("127.0.0.1", "address to listen on; loopback unless the operator says otherwise")
    port: int = flag(30000, "HTTP port")
    api_key: str | None = flag(None, "clients must send it as a bearer token", secret=True)
    admin_api_key: str | None = flag(None, "key of the operator endpoints; default: the API key", secret=True)
    max_body_bytes: int = flag(32 << 20, "bytes of one HTTP request's body; larger ones are answered 413")
    log_level: str = flag("info", "log level of all processes", choices=("debug", "info", "warning", "error"))
    log_requests: bool = flag(False, "log one line per request (never its content)")
    skip_server_warmup: bool = flag(False, "report ready without generating a token first")
    startup_timeout_s: float = flag(600.0, "seconds the scheduler may take to load before start-up fails")
    request_timeout_s: float = flag(0.0, "seconds one request may take in all; 0: no limit", alias=("--request-timeout",))
    queue_timeout_s: float = flag(0.0, "seconds one request may wait before its first step; 0: no limit", alias=("--queue-timeout",))
    drain_timeout_s: float = flag(30.0, "seconds running requests may take to finish after SIGTERM", alias=("--drain-timeout",))
    watchdog_timeout: float = flag(300.0, "seconds one forward may take before the scheduler gives up and exits")

    # memory and scheduling
    mem_fraction_static: float = flag(0.5, "share of the memory left after loading that pools may take, when max_total_tokens is not given")
    max_total_tokens: int | None = flag(None, "tokens in the global KV pool; default: from mem_fraction_static, at most 64 contexts")
    max_running_requests: int = flag(32, "requests with a state slot of their own")
    max_queued_requests: int = flag(2048, "waiting requests beyond which new ones are answered 503")
    page_size: int = flag(64, "tokens per page; even, so that a page never splits a compressed pair")
    chunked_prefill_size: int = flag(512, "most prompt tokens of one request in one step; -1: whole prompts")
    max_prefill_tokens: int = flag(
        1024, "most prompt tokens in one step over all requests; a GPU wants more, a laptop pays memory for each row"
    )
    schedule_policy: str = flag("fcfs", "order of the waiting queue", choices=("fcfs", "lpm", "priority"))
    enable_priority_scheduling: bool = flag(False, "the same as --schedule-policy priority")
    enable_mixed_chunk: bool = flag(True, "run prompt chunks and decodes in one step")
    disable_overlap_schedule: bool = flag(False, "plain loop: prepare, run, process; the oracle of the overlapped one")
    disable_radix_cache: bool = flag(False, "forget every prefix when its request ends")
    max_snapshots: int | None = flag(None, "state snapshots the prefix cache may hold; default: 4 per running request")
    snapshot_interval: int = flag(1024, "tokens between the state snapshots of a long prompt; 0: only at prompt and request ends")
    swa_restore: str = flag(
        "exact",
        "after a prefix hit without a snapshot: recompute (exact) or replay the last window (bounded)",
        choices=("exact", "bounded"),
    )
    prefill_truncation: str = flag(
        "off", "run decoder layers on the last prefill_keep_tokens of a prompt only (compact), or on all (off)", choices=("off", "compact")
    )
    prefill_keep_tokens: int | None = flag(
        None, "rows kept by compact truncation; default: window + 12, the release's 140 for its window of 128"
    )
    stream_interval: int = flag(1, "tokens between two events of a stream")
    decode_log_interval: int = flag(40, "decode steps between two lines of the log")

    # output
    incremental_streaming_output: bool = flag(False, "native streams carry only the new text, not all text so far")
    enable_cache_report: bool = flag(False, "report cached tokens in OpenAI usage")
    stream_response_default_include_usage: bool = flag(False, "usage chunk in streams even if not asked for")
    sampling_defaults: str = flag(
        "model", "defaults of the OpenAI routes: the model's generation_config.json, or OpenAI's", choices=("model", "openai")
    )
    allow_auto_truncate: bool = flag(False, "clip max_tokens to the context instead of refusing")
    enable_response_store: bool = flag(False, "keep responses of /v1/responses in memory, so that requests can refer to them")
    response_store_bytes: int = flag(256 << 20, "bytes of JSON the response store may hold; the least recently used go first")
    reasoning_parser: str | None = flag("deepseek-v41", "accepted for compatibility; output is always parsed by deepseek-recipe")
    tool_call_parser: str | None = flag("deepseekv41", "accepted for compatibility")
    default_chat_template_kwargs: str = flag("{}", "JSON object: defaults of chat_template_kwargs")

    # structured output
    grammar_backend: str = flag("auto", "engine of structured output; none refuses it", choices=("auto", "xgrammar", "none"))
    grammar_timeout_s: float = flag(20.0, "seconds a request waits for its grammar to be compiled")
    grammar_cache_bytes: int = flag(256 << 20, "bytes of compiled grammars that are kept for the next request with the same one")
    grammar_max_length_bounds: int = flag(65536, "largest sum of a JSON schema's minLength and maxLength; larger ones are refused")

    # speculation, correctness, metrics
    enable_deterministic_inference: bool = flag(
        False, "bit-identical outputs under any batch, chunking and cache state; forces exact window restore"
    )
    enable_metrics: bool = flag(True, "serve /metrics")
    disaggregation_mode: str = flag("null", "role of this worker", choices=("null",))

    @property
    def model_name(self) -> str:
        """Name shown to clients."""
        return self.served_model_name or Path(self.model_path).name or self.model_path

    @property
    def resolved_tokenizer_path(self) -> str:
        return self.tokenizer_path or self.model_path

    @property
    def model_override(self) -> dict[str, Any]:
        """--json-model-override-args, parsed."""
        return json.loads(self.json_model_override_args)

    def public_dict(self) -> dict[str, Any]:
        """All fields, secrets replaced; served by /server_info."""
        secret = {f.name for f in dataclasses.fields(self) if f.metadata.get("secret")}
        return {k: ("***" if k in secret and v else v) for k, v in dataclasses.asdict(self).items()}


@dataclass(frozen=True)
class Rule:
    """A combination that does not work. `broken` is True where the arguments must be refused."""

    broken: Callable[[ServerArgs], bool]
    why: Callable[[ServerArgs], str]


_LEAST: dict[str, float] = {
    "context_length": 1,
    "max_snapshots": 0,
    "prefill_keep_tokens": 1,
    "stream_interval": 1,
    "decode_log_interval": 1,
    "startup_timeout_s": 0.1,
    "request_timeout_s": 0,
    "queue_timeout_s": 0,
    "drain_timeout_s": 0,
    "watchdog_timeout": 0.1,
}
"""Smallest value of flags that have no other bound; None always means the default."""


def _in_range(name: str, least: float) -> Rule:
    """A bound from below that NaN and infinity do not pass either."""
    return Rule(
        lambda a: (value := getattr(a, name)) is not None and not least <= value < math.inf,
        lambda a: f"--{name.replace('_', '-')} must be at least {least:g}, found {getattr(a, name)}",
    )


RULES: tuple[Rule, ...] = (
    Rule(lambda a: not a.model_path, lambda a: "no model given: pass a checkpoint directory, e.g. sglang serve PATH"),
    Rule(
        lambda a: a.page_size < 2 or a.page_size % 2 == 1,
        lambda a: f"--page-size must be even and at least 2, found {a.page_size}",
    ),
    Rule(lambda a: not 0 < a.mem_fraction_static <= 1, lambda a: f"--mem-fraction-static must be in (0, 1], found {a.mem_fraction_static}"),
    Rule(lambda a: a.max_running_requests < 1, lambda a: f"--max-running-requests must be at least 1, found {a.max_running_requests}"),
    Rule(lambda a: a.max_queued_requests < 0, lambda a: f"--max-queued-requests must not be negative, found {a.max_queued_requests}"),
    Rule(
        lambda a: a.chunked_prefill_size != -1 and a.chunked_prefill_size < 1,
        lambda a: f"--chunked-prefill-size must be -1 (off) or positive, found {a.chunked_prefill_size}",
    ),
    Rule(lambda a: a.max_prefill_tokens < 1, lambda a: f"--max-prefill-tokens must be positive, found {a.max_prefill_tokens}"),
    Rule(lambda a: not 0 <= a.port <= 65535, lambda a: f"--port must be in 0..65535, found {a.port}"),
    Rule(
        lambda a: "" in (a.api_key, a.admin_api_key),
        lambda a: "--api-key and --admin-api-key must not be empty: an empty key would protect nothing",
    ),
    Rule(lambda a: a.response_store_bytes < 1, lambda a: f"--response-store-bytes must be positive, found {a.response_store_bytes}"),
    Rule(lambda a: a.max_body_bytes < 1, lambda a: f"--max-body-bytes must be positive, found {a.max_body_bytes}"),
    Rule(lambda a: a.grammar_timeout_s <= 0, lambda a: f"--grammar-timeout-s must be positive, found {a.grammar_timeout_s}"),
    Rule(lambda a: a.grammar_cache_bytes < 0, lambda a: f"--grammar-cache-bytes must not be negative, found {a.grammar_cache_bytes}"),
    Rule(lambda a: a.snapshot_interval < 0, lambda a: f"--snapshot-interval must not be negative, found {a.snapshot_interval}"),
    *(_in_range(name, least) for name, least in _LEAST.items()),
    Rule(
        lambda a: a.max_total_tokens is not None and a.max_total_tokens < 2 * a.page_size,
        lambda a: f"--max-total-tokens must be at least two pages, {2 * a.page_size} tokens, found {a.max_total_tokens}",
    ),
    Rule(
        lambda a: a.random_seed is not None and not -(2**63) <= a.random_seed < 2**63,
        lambda a: f"--random-seed must fit in 64 bits, found {a.random_seed}",
    ),
    Rule(
        lambda a: a.enable_deterministic_inference and (a.swa_restore != "exact" or a.prefill_truncation != "off"),
        lambda a: "--enable-deterministic-inference needs --swa-restore exact and --prefill-truncation off",
    ),
)


def validate(args: ServerArgs) -> ServerArgs:
    """Raise ConfigError for the first rule that is broken."""
    for rule in RULES:
        if rule.broken(args):
            raise ConfigError(rule.why(args))
    for name in ("json_model_override_args", "default_chat_template_kwargs"):
        try:
            is_object = isinstance(json.loads(getattr(args, name)), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise ConfigError(f"--{name.replace('_', '-')} must be a JSON object, found {getattr(args, name)!r}")
    return args


def add_cli_args(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """One option per field (of `only`, for commands that are no worker); booleans become switches with a --no- form."""
    parser.add_argument("model", nargs="?", default=None, help="checkpoint directory (the same as --model-path)")
    for f in dataclasses.fields(ServerArgs):
        if only is not None and f.name not in only:
            continue
        names = [f"--{f.name.replace('_', '-')}", *f.metadata["alias"]]
        common: dict[str, Any] = {
            "dest": f.name,
            "default": f.default,
            "help": f"{f.metadata['help']} (default: {f.default})".replace("%", "%%"),
        }
        kind = str(f.type).split(" | ")[0]
        if kind == "bool":
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        else:
            parser.add_argument(*names, type={"int": int, "float": float, "str": str}[kind], choices=f.metadata["choices"], **common)


def from_cli(argv: list[str], prog: str = "sglang serve") -> ServerArgs:
    """Parse a command line. Raises ConfigError for combinations that do not work; argparse exits for unknown flags."""
    parser = argparse.ArgumentParser(prog=prog, description="Serve one model.")
    add_cli_args(parser)
    values = vars(parser.parse_args(argv))
    positional = values.pop("model")
    if positional and values["model_path"]:
        raise ConfigError(f"model given twice: {positional} and --model-path {values['model_path']}")
    values["model_path"] = positional or values["model_path"]
    return validate(ServerArgs(**values))
