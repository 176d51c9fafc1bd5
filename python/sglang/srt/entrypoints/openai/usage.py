"""Token counts of a reply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass
class ChoiceUsage:
    """Counts of one choice, in tokens. `prompt` names the prompt it answers: its n choices share one prompt count."""

    prompt: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


def usage_of(choices: Iterable[ChoiceUsage], *, report_cache: bool, streamed: bool = False) -> dict[str, Any]:
    """The `usage` object of all choices together. Streams leave out what whole replies report as null.

    Cached tokens are those of each prompt's first choice: what the cache saved before the request made its own hits.
    """
    choices = list(choices)
    firsts = {choice.prompt: choice for choice in reversed(choices)}.values()
    prompt_tokens = sum(choice.prompt_tokens for choice in firsts)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    reasoning_tokens = sum(choice.reasoning_tokens for choice in choices)
    usage = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts)} if report_cache else None,
        "reasoning_tokens": reasoning_tokens,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens} if reasoning_tokens else None,
    }
    return {key: value for key, value in usage.items() if value is not None} if streamed else usage


class ReasoningCounter:
    """Tokens of the thinking part as SGLang counts them: up to and including `</think>`; all of them if it never comes."""

    def __init__(self, think_end_id: int | None, *, thinking: bool):
        self._think_end_id = think_end_id
        self._thinking = thinking
        self.count = 0

    def take(self, ids: list[int]) -> None:
        for token in ids:
            if not self._thinking:
                return
            self.count += 1
            self._thinking = token != self._think_end_id
