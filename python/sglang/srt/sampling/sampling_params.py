"""What a client may ask of sampling: the fields, their defaults, and the one place that checks them.

`SamplingParams` travels to the scheduler as it is. `parse_sampling_params` turns the JSON object of a request into one:
it names the field, the value found and the value allowed, and fills in defaults (an explicit null is a default).
Only JSON-able fields live here; everything derived from them belongs to `SamplingState` and `StopChecker`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import re2

from sglang.srt.errors import BadRequest

GREEDY_BELOW = 1e-6
"""Temperatures below this mean argmax. Dividing by less would only amplify rounding."""

MAX_STOPS = 32
MAX_STOP_BYTES = 4096
"""Per stop string. Our own limit: the scheduler keeps that much text of every request."""
MAX_STOP_REGEX_BYTES = 256
MAX_N = 128
"""Choices per request. Our own limit: each is a sequence with its own state slot."""
MAX_LOGIT_BIAS = 1e30
"""Beyond this a float32 logit plus the bias could overflow. Far more than any use: 100 already decides a token."""
MAX_INT = 2**31 - 1

GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request's sampling. Field names and defaults are SGLang's; units are tokens unless said otherwise."""

    max_new_tokens: int | None = 128
    """Most tokens produced; 0 only fills the prefix cache; None: whatever the context leaves."""
    min_new_tokens: int = 0
    """Before this many tokens EOS and stop ids are banned and stop strings are not honoured."""
    temperature: float = 1.0
    """Logits are divided by it; greedy below 1e-6."""
    top_p: float = 1.0
    """Keep the most probable tokens whose mass first reaches this, in (0, 1]."""
    top_k: int = -1
    """Keep this many most probable tokens; -1: all. 1 is greedy."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable one, in [0, 1]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for every time it was produced, in [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that was produced, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that were produced, in (0, 2]."""
    logit_bias: dict[str, float] | None = None
    """Added to logits; keys are ids as decimal strings."""
    stop: list[str] = []
    """The answer ends where the first of these appears in the text."""
    stop_token_ids: list[int] = []
    """The answer ends with the first of these ids, in addition to EOS, and also with ignore_eos."""
    stop_regex: list[str] = []
    """The answer ends when one of these (RE2 syntax) matches within the last 1,024 characters."""
    ignore_eos: bool = False
    """Do not end at EOS."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text; the ids always contain them."""
    spaces_between_special_tokens: bool = True
    """Accepted for compatibility. A byte-level tokenizer puts no spaces between tokens either way."""
    no_stop_trim: bool = False
    """Keep the matched stop string, or the text of the matched stop id, in the text."""
    n: int = 1
    """Independent choices for one prompt."""
    sampling_seed: int | None = None
    """Signed 64-bit seed; drawn at admission when absent, so that any answer can be reproduced."""
    json_schema: str | None = None
    """JSON schema as text that the output must satisfy. At most one of the four grammar fields may be set."""
    regex: str | None = None
    """Regular expression that the whole output must match."""
    ebnf: str | None = None
    """Grammar that the output must follow."""
    structural_tag: str | None = None
    """Structural tag, as text, that the output must follow."""
    stream_interval: int | None = None
    """Tokens between two events of this request's stream; None: the server's."""
    custom_params: dict[str, Any] | None = None
    """Passed through untouched."""

    @property
    def is_greedy(self) -> bool:
        """True where the token is the argmax and the seed does not matter."""
        return self.top_k == 1 or self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """True where the distribution depends on the tokens produced before."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


def uses_grammar(params: SamplingParams) -> str | None:
    """Name of the grammar field that is set, or None."""
    return next((name for name in GRAMMAR_FIELDS if getattr(params, name) is not None), None)


def parse_sampling_params(obj: dict[str, Any] | None, *, vocab_size: int, default_max_new_tokens: int | None = 128) -> SamplingParams:
    """Checked and normalised parameters from a request's `sampling_params` object.

    `default_max_new_tokens` is used where the request gives none: 128 on the native route, None (what the context leaves)
    for chat. Raises BadRequest, with the field's name as `param`, for the first thing that is wrong.
    """
    if obj is None:
        obj = {}
    if not isinstance(obj, dict):
        raise BadRequest(f"sampling_params must be an object, got {_show(obj)}", param="sampling_params")
    values: dict[str, Any] = {}
    for name, value in obj.items():
        if name not in _PARSERS and name != "beam_width":
            allowed = ", ".join(f"`{field}`" for field in _PARSERS)
            raise BadRequest(f"unknown field `{_clip(str(name))}`, expected one of {allowed}", param="sampling_params")
        if value is None:
            continue
        if name == "beam_width":
            raise BadRequest(f"beam_width is not supported, got {_show(value)}; leave it out", param="beam_width")
        values[name] = _PARSERS[name](name, value)
    values.setdefault("max_new_tokens", default_max_new_tokens)
    params = SamplingParams(**values)
    _check_combinations(params, vocab_size)
    return normalize(params, vocab_size)


def normalize(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """The same sampling in its canonical form: greedy is (top_k 1, temperature 1), a top_k that keeps all is -1."""
    changes: dict[str, Any] = {}
    if params.is_greedy:
        changes = {"top_k": 1, "temperature": 1.0}
    elif params.top_k >= vocab_size:
        changes = {"top_k": -1}
    for name in GRAMMAR_FIELDS:
        if getattr(params, name) == "":
            changes[name] = None
    return msgspec.structs.replace(params, **changes)


def _check_combinations(params: SamplingParams, vocab_size: int) -> None:
    """What one field cannot know alone. Raises BadRequest."""
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        raise BadRequest(
            f"min_new_tokens must be at most max_new_tokens ({params.max_new_tokens}), got {params.min_new_tokens}", param="min_new_tokens"
        )
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise BadRequest(f"stop_token_ids must be in [0, {vocab_size - 1}], got {token_id}", param="stop_token_ids")
    for key in params.logit_bias or {}:
        if int(key) >= vocab_size:
            raise BadRequest(f"logit_bias keys must be ids in [0, {vocab_size - 1}], got {_clip(key)}", param="logit_bias")
    grammars = [name for name in GRAMMAR_FIELDS if getattr(params, name)]
    if len(grammars) > 1:
        raise BadRequest(f"only one of {', '.join(GRAMMAR_FIELDS)} can be set, got {' and '.join(grammars)}", param=grammars[1])


# -- one parser per field: (name, value) -> value, or BadRequest --------------------------------------------------------

Parser = Callable[[str, Any], Any]


def _clip(text: str, limit: int = 64) -> str:
    """A client's text is quoted in an error only up to `limit` characters, and only if it can be encoded."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[:limit] + "..."


def _show(value: Any) -> str:
    return f"{type(value).__name__} {_clip(repr(value))}"


def _integer(low: int, high: int = MAX_INT, *, also: int | None = None) -> Parser:
    def parse(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadRequest(f"{name} must be an integer, got {_show(value)}", param=name)
        if not low <= value <= high and value != also:
            extra = "" if also is None else f"{also} or "
            raise BadRequest(f"{name} must be {extra}in [{low}, {high}], got {_clip(str(value))}", param=name)
        return value

    return parse


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRequest(f"{name} must be a number, got {_show(value)}", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadRequest(f"{name} must be finite, got {_clip(str(value))}", param=name)
    return number


def _number(low: float, high: float = math.inf, *, open_low: bool = False) -> Parser:
    def parse(name: str, value: Any) -> float:
        number = _finite(name, value)
        above = number > low if open_low else number >= low
        if not (above and number <= high):
            bounds = f"at least {low}" if high == math.inf else f"in {'(' if open_low else '['}{low}, {high}]"
            raise BadRequest(f"{name} must be {bounds}, got {number}", param=name)
        return number

    return parse


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, got {_show(value)}", param=name)
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a string, got {_show(value)}", param=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{name} contains a lone surrogate, which no text can contain", param=name) from None
    return value


def _strings(name: str, value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise BadRequest(f"{name} must be a string or a list of strings, got {_show(value)}", param=name)
    if len(items) > MAX_STOPS:
        raise BadRequest(f"{name} allows at most {MAX_STOPS} entries, got {len(items)}", param=name)
    for item in items:
        if not _text(name, item):
            raise BadRequest(f"{name} must not contain an empty string: it would match at once", param=name)
    return list(items)


def _stops(name: str, value: Any) -> list[str]:
    items = _strings(name, value)
    for item in items:
        if len(item.encode()) > MAX_STOP_BYTES:
            raise BadRequest(f"{name} strings may have {MAX_STOP_BYTES} bytes, got {len(item.encode())}", param=name)
    return items


def _regexes(name: str, value: Any) -> list[str]:
    items = _strings(name, value)
    for item in items:
        if len(item.encode()) > MAX_STOP_REGEX_BYTES:
            raise BadRequest(f"{name} patterns may have {MAX_STOP_REGEX_BYTES} bytes, got {len(item.encode())}", param=name)
        try:
            compile_stop_regex(item)
        except ValueError as error:
            raise BadRequest(f"{name} {_clip(repr(item))} cannot be used: {error}", param=name) from None
    return items


def _token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list of ids, got {_show(value)}", param=name)
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int):
            raise BadRequest(f"{name} must contain integers only, got {_show(item)}", param=name)
    return list(dict.fromkeys(value))


def _logit_bias(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object of id: number, got {_show(value)}", param=name)
    bias: dict[str, float] = {}
    for key, number in value.items():
        text = str(key)
        # str(int(...)) == text leaves one spelling per id, so that no two keys mean the same token.
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and str(int(text)) == text):
            raise BadRequest(f"{name} keys must be ids as decimal strings, got {_clip(repr(key))}", param=name)
        bias[text] = _finite(f"{name}[{text}]", number)
        if abs(bias[text]) > MAX_LOGIT_BIAS:
            raise BadRequest(f"{name}[{text}] must be in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], got {bias[text]:g}", param=name)
    return bias


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object, got {_show(value)}", param=name)
    return value


def compile_stop_regex(pattern: str) -> Any:
    """The compiled pattern. RE2, because it runs in the scheduler: its time is linear in the text for every pattern.

    Raises ValueError with the compiler's reason (look-around and back-references do not exist in RE2).
    """
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        raise ValueError(reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)) from None


_PARSERS: dict[str, Parser] = {
    "max_new_tokens": _integer(0),
    "min_new_tokens": _integer(0),
    "temperature": _number(0.0),
    "top_p": _number(0.0, 1.0, open_low=True),
    "top_k": _integer(1, also=-1),
    "min_p": _number(0.0, 1.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "presence_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(0.0, 2.0, open_low=True),
    "logit_bias": _logit_bias,
    "stop": _stops,
    "stop_token_ids": _token_ids,
    "stop_regex": _regexes,
    "ignore_eos": _boolean,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "no_stop_trim": _boolean,
    "n": _integer(1, MAX_N),
    "sampling_seed": _integer(-(2**63), 2**63 - 1),
    **dict.fromkeys(GRAMMAR_FIELDS, _text),
    "stream_interval": _integer(1),
    "custom_params": _object,
}
"""Every field of SamplingParams, in its order."""
