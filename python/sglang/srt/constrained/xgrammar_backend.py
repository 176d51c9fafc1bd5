"""Grammars by xgrammar.

The library is told a vocabulary in which special tokens cannot be spelled: their bytes begin with 0xFF, which occurs in no
UTF-8, so no text of a grammar contains them, not even a JSON string that allows any character. The one exception is the
marker of tool-call markup: in a grammar whose text has the marker, its token has the marker's bytes, and then the pieces
that would spell it letter by letter are ruled out (`_MarkerRule`), because a parser of the output obeys only the token.

xgrammar is imported where this is built: it takes seconds, and a worker without grammars does not need it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch

from sglang.srt.constrained.constraint import GrammarText
from sglang.srt.constrained.grammar import CompiledGrammar, GrammarError
from sglang.srt.constrained.schema_check import check_nesting, ignored_keywords, sum_of_length_bounds
from sglang.srt.managers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MARKER = "｜DSML｜"
_SOURCE_POSITION = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time and source line that the library puts before its reason
_MAX_REASON_CHARS = 500


class XGrammarBackend:
    """Compiles for one tokenizer and one model vocabulary. Used by one thread; its matchers by another."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_length_bounds: int):
        """`vocab_size` is the model's (logits), which may exceed the tokenizer's: ids without a token are never allowed.
        `max_length_bounds` limits the sum of a schema's minLength and maxLength."""
        import xgrammar

        self._xgrammar = xgrammar
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_length_bounds = max_length_bounds
        self._marker_id = tokenizer.backend.token_to_id(MARKER)
        self._plain = self._compiler(frozenset())
        self._with_marker: Any = None  # made when first needed
        self._marker_rule: _MarkerRule | None = None

    def compile(self, grammar: GrammarText) -> CompiledGrammar:
        """Raises GrammarError with the reason: xgrammar's, or what of a strict schema it would ignore."""
        check_nesting(grammar.text)
        ignored = self._check_schemas(grammar)
        rule = None
        compiler = self._plain
        if self._marker_id is not None and _has_marker(grammar):
            compiler, rule = self._marker_compiler(self._marker_id)
        try:
            compiled = _compile(compiler, grammar)
        except Exception as error:  # the library raises RuntimeError, ValueError, TypeError and its own, all for wrong grammars
            raise GrammarError(f"{grammar.kind} cannot be used: {reason_of(error)}") from None

        def new_matcher() -> XGrammarMatcher:
            return XGrammarMatcher(self._xgrammar.GrammarMatcher(compiled), self._vocab_size, rule)

        return CompiledGrammar(new_matcher, compiled.memory_size_bytes, ignored)

    def _check_schemas(self, grammar: GrammarText) -> tuple[str, ...]:
        """What is not enforced of the schemas in a grammar. Raises GrammarError for a strict one, or excessive bounds."""
        ignored: list[str] = []
        for pointer, schema, is_markup in _schemas_of(grammar):
            bounds = sum_of_length_bounds(schema)
            if bounds > self._max_length_bounds:
                raise GrammarError(
                    f"the string length bounds of the schema sum to {bounds}, but this server allows {self._max_length_bounds} "
                    "(--grammar-max-length-bounds); lower maxLength or leave it out"
                )
            ignored += ignored_keywords(schema, pointer, is_markup=is_markup)
        if ignored and grammar.strict:
            raise GrammarError(
                "the schema is strict, but this server cannot enforce " + ", ".join(ignored[:8]) + "; rewrite it, or leave strict out"
            )
        return tuple(ignored)

    def _compiler(self, spelled: frozenset[int]) -> Any:
        """A compiler over the vocabulary; added tokens cannot be spelled, except those in `spelled`."""
        x, tokenizer = self._xgrammar, self._tokenizer
        hidden = set(tokenizer.backend.get_added_tokens_decoder()) - spelled
        vocabulary = [
            _unspellable(i) if i in hidden else tokenizer.token_bytes(i) for i in range(min(tokenizer.vocab_size, self._vocab_size))
        ]
        info = x.TokenizerInfo(
            vocabulary,
            x.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=sorted(i for i in tokenizer.eos_ids if i < self._vocab_size),
        )
        # Results are kept by the manager, which bounds and shares them over all kinds.
        return x.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _marker_compiler(self, marker_id: int) -> tuple[Any, _MarkerRule]:
        if self._with_marker is None or self._marker_rule is None:
            self._with_marker = self._compiler(frozenset({marker_id}))
            self._marker_rule = _MarkerRule(self._tokenizer, marker_id, self._vocab_size)
        return self._with_marker, self._marker_rule


class XGrammarMatcher:
    """One request's position in a grammar. The cost of a token does not depend on how many came before."""

    def __init__(self, matcher: Any, vocab_size: int, rule: _MarkerRule | None):
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._rule = rule
        self._ids: list[int] = []  # accepted; only kept for the rule
        self._packed = torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32)  # 32 ids to a word, lowest bit first

    def allowed(self) -> torch.Tensor:
        """bool [V]. All False once terminated: nothing follows EOS."""
        if self._matcher.is_terminated():
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        self._packed.fill_(-1)  # where nothing is ruled out the library writes nothing
        self._matcher.fill_next_token_bitmask(self._packed)
        mask = unpack(self._packed[0], self._vocab_size)
        return mask if self._rule is None else self._rule.applied(mask, self._ids[-2:])

    def accept(self, token_id: int) -> bool:
        accepted = bool(self._matcher.accept_token(token_id))
        if accepted and self._rule is not None:
            self._ids.append(token_id)
        return accepted

    def rollback(self, count: int) -> None:
        if count > 0:  # the library takes 0 and negative counts in silence
            self._matcher.rollback(count)
            del self._ids[max(0, len(self._ids) - count) :]

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())


class _MarkerRule:
    """The marker comes as its own token, never letter by letter.

    The marker begins with a character of three bytes that ordinary pieces can spell: as one, or split in two places. Pieces
    that complete it are ruled out, and where the grammar leaves nothing but the marker's beginning, so is the beginning.
    """

    def __init__(self, tokenizer: Tokenizer, marker_id: int, vocab_size: int):
        self._tokenizer = tokenizer
        self._marker_id = marker_id
        marker = MARKER.encode()
        head = MARKER[0].encode()
        added = tokenizer.backend.get_added_tokens_decoder()  # EOS among them: they spell nothing
        pieces = {i: tokenizer.token_bytes(i) for i in range(min(tokenizer.vocab_size, vocab_size)) if i not in added}

        def ids(condition: Any) -> torch.Tensor:
            return torch.tensor([i for i, piece in pieces.items() if piece and condition(piece)], dtype=torch.int64)

        self._head = head
        self._spelling = ids(lambda piece: head in piece)
        self._completing = {split: ids(lambda piece, rest=head[split:]: piece.startswith(rest)) for split in (1, 2)}
        self._beginning = ids(marker.startswith)

    def applied(self, mask: torch.Tensor, last_ids: list[int]) -> torch.Tensor:
        """The mask without ways to spell the marker; changes it in place."""
        mask[self._spelling] = False
        text = b"".join(self._tokenizer.token_bytes(i) for i in last_ids)
        for split, completing in self._completing.items():
            if text.endswith(self._head[:split]):
                mask[completing] = False
        if mask[self._marker_id]:
            without = mask.clone()
            without[self._beginning] = False
            without[self._marker_id] = False
            if not bool(without.any()):
                mask[self._beginning] = False
        return mask


_SHIFTS = torch.arange(32, dtype=torch.int32)


def unpack(words: torch.Tensor, count: int) -> torch.Tensor:
    """bool [count] from int32 words of 32 bits each, lowest bit first."""
    return ((words.unsqueeze(1) >> _SHIFTS) & 1).flatten()[:count].bool()


def reason_of(error: Exception) -> str:
    """The library's reason in one line, without its time and source positions."""
    text = " ".join(_SOURCE_POSITION.sub("", str(error)).split())
    return text[:_MAX_REASON_CHARS] or type(error).__name__


def _unspellable(token_id: int) -> bytes:
    """Bytes that no UTF-8 text contains, different for each id."""
    return b"\xff" + str(token_id).encode()


def _compile(compiler: Any, grammar: GrammarText) -> Any:
    match grammar.kind:
        case "json_schema":
            return compiler.compile_json_schema(grammar.text, strict_mode=grammar.strict)
        case "regex":
            return compiler.compile_regex(grammar.text)
        case "ebnf":
            return compiler.compile_grammar(grammar.text)
        case "structural_tag":
            return compiler.compile_structural_tag(grammar.text)
    raise ValueError(f"unknown kind of grammar {grammar.kind!r}")


def _has_marker(grammar: GrammarText) -> bool:
    if grammar.kind == "structural_tag":
        return MARKER in json.dumps(_parsed(grammar), ensure_ascii=False)
    return grammar.kind == "ebnf" and MARKER in grammar.text


def _parsed(grammar: GrammarText) -> Any:
    try:
        return json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{grammar.kind} cannot be used: it is not valid JSON: {error}") from None


def _schemas_of(grammar: GrammarText) -> Iterator[tuple[str, Any, bool]]:
    """(pointer, schema, whether it is written as markup) of the schemas that a grammar contains."""
    if grammar.kind == "json_schema":
        yield "", _parsed(grammar), False
    elif grammar.kind == "structural_tag":
        yield from _embedded(_parsed(grammar), "")


def _embedded(value: Any, pointer: str) -> Iterator[tuple[str, Any, bool]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("json_schema", "schema") and isinstance(item, (dict, bool)):
                yield f"{pointer}/{key}", item, value.get("style", "json") != "json"
            else:
                yield from _embedded(item, f"{pointer}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _embedded(item, f"{pointer}/{index}")
