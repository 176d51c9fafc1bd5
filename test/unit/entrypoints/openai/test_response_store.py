from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.openai.response_store import ResponseStore


def response(id: str, size: int = 10) -> dict[str, Any]:
    return {"id": id, "text": "x" * size}


def test_the_least_recently_used_go_first() -> None:
    store = ResponseStore(max_bytes=120)
    for name in "abc":
        store.put(response(name), [])
    assert store.get("a") is not None  # used: now b is the oldest
    store.put(response("d"), [])
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]
    assert store.num_bytes <= store.max_bytes


def test_the_books_balance() -> None:
    store = ResponseStore(max_bytes=1000)
    store.put(response("a", 10), [{"role": "user", "content": "x"}])
    store.put(response("a", 100), [])
    store.put(response("b", 5), [])
    assert store.num_bytes == sum(entry.num_bytes for entry in map(store.get, "ab") if entry)
    assert store.remove("a") and store.remove("b") and not store.remove("b")
    assert (len(store), store.num_bytes) == (0, 0)


def test_one_that_is_too_large_is_not_kept_and_evicts_nothing() -> None:
    store = ResponseStore(max_bytes=100)
    store.put(response("a"), [])
    store.put(response("big", 200), [])
    assert store.get("a") is not None and store.get("big") is None
