"""Responses that clients may come back to, in memory: the newest and most used, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

Json = dict[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    response: Json
    messages: list[Json]  # the whole chat, this response included: what a response after it continues
    num_bytes: int


class ResponseStore:
    """Least recently used entries go first. Belongs to one event loop."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response: Json, messages: list[Json]) -> None:
        """Keep a response under its id, in place of what was there. One that is larger than the whole store is not kept."""
        self.remove(response["id"])
        # A chat's messages are shared by all its responses; counting them for each keeps the bound true when only some go.
        entry = StoredResponse(response, messages, len(msgspec.json.encode((response, messages))))
        if entry.num_bytes > self.max_bytes:
            return
        self._entries[response["id"]] = entry
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._entries.popitem(last=False)[1].num_bytes

    def get(self, id: str) -> StoredResponse | None:
        """A response, which is thereby the most recently used."""
        if id in self._entries:
            self._entries.move_to_end(id)
        return self._entries.get(id)

    def remove(self, id: str) -> bool:
        """Forget a response; False if there was none."""
        entry = self._entries.pop(id, None)
        self.num_bytes -= entry.num_bytes if entry else 0
        return entry is not None
