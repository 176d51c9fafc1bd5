"""One compile at a time, beside everything else; results and refusals are remembered up to a bound."""

from __future__ import annotations

import threading

import pytest

from sglang.srt.constrained.constraint import GrammarText
from sglang.srt.constrained.grammar import CompiledGrammar, GrammarError
from sglang.srt.constrained.manager import ERROR_BYTES, GrammarManager


class Backend:
    """Grammars are compiled when the test says so. A text of `bad` is refused, `bug` fails otherwise; numbers are sizes."""

    def __init__(self):
        self.go = threading.Event()
        self.go.set()
        self.compiled: list[str] = []

    def compile(self, grammar: GrammarText) -> CompiledGrammar:
        assert self.go.wait(10)
        self.compiled.append(grammar.text)
        if grammar.text == "bad":
            raise GrammarError("no good")
        if grammar.text == "bug":
            raise RuntimeError("/secret/path")
        return CompiledGrammar(lambda: None, int(grammar.text))


@pytest.fixture
def backend():
    return Backend()


@pytest.fixture
def manager(backend):
    made = GrammarManager(lambda: backend, cache_bytes=1000 + 3 * 4)
    yield made
    backend.go.set()
    made.close()


def text(value: object, strict: bool = False) -> GrammarText:
    return GrammarText(kind="regex", text=str(value), strict=strict)


def test_equal_grammars_are_compiled_once(manager, backend):
    backend.go.clear()
    first, second, other = manager.submit(text(100)), manager.submit(text(100)), manager.submit(text(100, strict=True))
    assert first is second and first is not other and not first.done()
    backend.go.set()
    assert first.result(10).num_bytes == 100
    other.result(10)
    assert manager.submit(text(100)).done()
    assert backend.compiled == ["100", "100"]


def test_a_refusal_is_remembered(backend):
    manager = GrammarManager(lambda: backend, cache_bytes=2 * ERROR_BYTES)
    for _ in range(2):
        with pytest.raises(GrammarError, match="no good"):
            manager.submit(text("bad")).result(10)
    assert backend.compiled == ["bad"]
    manager.close()


def test_a_fault_of_the_library_is_an_error_without_its_text(manager, backend):
    with pytest.raises(GrammarError, match=r"^the compiler failed with RuntimeError$"):
        manager.submit(text("bug")).result(10)


def test_the_cache_forgets_what_was_used_least_recently(manager, backend):
    for size in (400, 500, 400, 300, 400, 500):
        manager.submit(text(size)).result(10)
        assert manager.num_cached_bytes <= 1012
    assert backend.compiled == ["400", "500", "300", "500"]
    manager.submit(text(5000)).result(10)  # larger than everything: served, not kept
    assert manager.submit(text(400)).done()
