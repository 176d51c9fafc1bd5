"""The tokenizer of a checkpoint: a thin wrapper of the `tokenizers` library that also knows each token's bytes.

V4.1's vocabulary is byte-level: text is the UTF-8 reading of the tokens' bytes put one after another. So streaming,
stop strings and logprob texts work on bytes, where a token never changes with its neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from sglang.srt.errors import ConfigError


class Tokenizer:
    """Encode, decode, and the ids that mean something. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: frozenset[int],
        bos_id: int | None = None,
        pad_id: int | None = None,
        special_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
    ):
        self.backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)  # ids with a text; the model's may be larger
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self.pad_id = pad_id
        self.special_ids = special_ids  # left out of text by skip_special_tokens
        self.chat_template = chat_template
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: str | Path, model_path: str | Path | None = None) -> Tokenizer:
        """From a directory with tokenizer.json. EOS ids are the union of those of tokenizer_config.json,
        generation_config.json and config.json, the last two from `model_path` (default: the same directory).

        Raises ConfigError, one line, if a file is missing or broken, the vocabulary is not byte-level, or nothing ends a text.
        """
        directory = Path(path)
        file = directory / "tokenizer.json"
        raw = _read_json(file, required="pass --tokenizer-path, a directory that has one")
        _require_byte_level(raw, file)
        try:
            backend = tokenizers.Tokenizer.from_str(json.dumps(raw))
        except Exception as error:  # the library raises bare Exception for every defect
            raise ConfigError(f"{file} is not a usable tokenizer: {_one_line(error)}") from None
        backend.no_truncation()
        backend.no_padding()

        own = _read_json(directory / "tokenizer_config.json")
        model_directory = directory if model_path is None else Path(model_path)
        generation, model = _read_json(model_directory / "generation_config.json"), _read_json(model_directory / "config.json")
        nested = model.get("text_config")
        places = (generation, model, nested if isinstance(nested, dict) else {})
        eos_ids = {i for place in places for i in _id_list(place.get("eos_token_id"))}
        named = _named_id(backend, own, "eos_token")
        eos_ids |= set() if named is None else {named}
        if not eos_ids:
            raise ConfigError(f"no EOS: neither eos_token in {directory}/tokenizer_config.json nor eos_token_id in the model's configs")
        template = own.get("chat_template")
        return cls(
            backend,
            eos_ids=frozenset(eos_ids),
            bos_id=_first_id(_named_id(backend, own, "bos_token"), places, "bos_token_id"),
            pad_id=_first_id(_named_id(backend, own, "pad_token"), places, "pad_token_id"),
            special_ids=frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special),
            chat_template=template if isinstance(template, str) else None,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, with whatever the tokenizer's own post-processor adds. Spelt-out markers become marker ids:
        never build a chat prompt from user text with it."""
        return self.backend.encode(text).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD, ids without a token nothing. Ids must not be negative."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one id contributes to the text; empty for ids without a token (a model's vocabulary may be padded)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = _bytes_of(self.backend.id_to_token(token_id) if token_id >= 0 else None)
        return known

    def visible_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """token_bytes, or nothing for a special token that is to be skipped."""
        return b"" if skip_special_tokens and token_id in self.special_ids else self.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Text of one id alone, as shown beside a logprob; parts of a character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 upwards in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if chr(b) not in table)
    return table | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


def _bytes_of(token: str | None) -> bytes:
    """A piece of the byte alphabet is spelt in it; any other piece (a marker with other characters) stands for itself."""
    if token is None:
        return b""
    if all(char in BYTE_OF_CHAR for char in token):
        return bytes(BYTE_OF_CHAR[char] for char in token)
    return token.encode()


def _read_json(file: Path, *, required: str | None = None) -> dict[str, Any]:
    """The object in a file; {} for an absent optional one. ConfigError for anything else."""
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        if required is None:
            return {}
        raise ConfigError(f"no {file.name} in {file.parent}; {required}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, found {type(value).__name__}")
    return value


def _require_byte_level(raw: dict[str, Any], file: Path) -> None:
    decoder = raw.get("decoder") or {}
    kind = decoder.get("type") if isinstance(decoder, dict) else type(decoder).__name__
    if kind != "ByteLevel":
        raise ConfigError(f"{file} has decoder {kind}, but only ByteLevel vocabularies (V4.1's kind) are supported")


def _named_id(backend: tokenizers.Tokenizer, config: dict[str, Any], name: str) -> int | None:
    """Id of a token that tokenizer_config.json names, as a string or as an object with `content`."""
    token = config.get(name)
    content = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(content) if isinstance(content, str) else None


def _id_list(value: Any) -> list[int]:
    """eos_token_id is a number in some configs, a list in others."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _first_id(named: int | None, places: Sequence[dict[str, Any]], key: str) -> int | None:
    found = [i for place in places for i in _id_list(place.get(key))]
    return named if named is not None else next(iter(found), None)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
