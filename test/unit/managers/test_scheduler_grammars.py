"""Requests with a grammar in the scheduler: real grammars and sampling over the suspicious fake runner."""

from __future__ import annotations

import json
import re
import threading

import jsonschema
import pytest

from fakes.logits_runner import LogitsRunner
from harness.grammars import VOCAB, backend, manager, toy
from harness.scheduler_bench import Bench, Result, generate
from sglang.srt.constrained.constraint import Constraint, GrammarText
from sglang.srt.constrained.manager import GrammarManager

EOS = 1
CLOSERS = {str(toy().encode(text)[0]): 6.0 for text in ('"', "}", "]", ",", '",', '"}')} | {str(EOS): 8.0}
"""A random model rarely ends what it began; these ids are made likelier."""
TIGHT = {"num_pages": 40, "num_slots": 16}
"""So few pages that some of eight requests are retracted."""

BAD = [
    ("json_schema", '{"type":"objectt"}'), ("json_schema", '{"type":'), ("json_schema", '{"$ref":"#/definitions/x"}'),
    ("json_schema", '{"type":"array","items":[{"type":"string"}]}'), ("json_schema", '{"type":"integer","minimum":5,"maximum":2}'),
    ("regex", "(ab"), ("regex", "(?=a)b"), ("ebnf", 'a ::= "x"'), ("ebnf", 'root ::= "a'),
]  # fmt: skip


def obj(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


INT, STR, BOOL, NUM = {"type": "integer"}, {"type": "string", "maxLength": 12}, {"type": "boolean"}, {"type": "number"}
SCHEMAS = [
    INT, STR, BOOL, NUM, {"type": "null"}, {"enum": ["red", "green", "blue"]}, {"const": "yes"}, {"enum": [1, 2.5, None, True]},
    {"type": "integer", "minimum": -5, "maximum": 17}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "integer", "multipleOf": 7}, {"type": "string", "minLength": 3, "maxLength": 5}, {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "format": "date"}, {"type": "string", "format": "uuid"}, {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "date-time"}, {"type": "array", "items": INT, "maxItems": 4},
    {"type": "array", "items": BOOL, "minItems": 2, "maxItems": 3}, {"type": "array", "prefixItems": [INT, BOOL], "items": False},
    {"type": "array", "items": {"type": "array", "items": INT, "maxItems": 2}, "maxItems": 2}, obj(a=INT), obj(a=STR, b=BOOL),
    obj(a=obj(b=obj(c=INT))), obj(kind={"enum": ["x", "y"]}, size={"type": "integer", "minimum": 0}),
    obj(list={"type": "array", "items": obj(n=INT), "maxItems": 2}), {"anyOf": [INT, STR]}, {"oneOf": [BOOL, {"type": "null"}]},
    obj(v={"anyOf": [INT, {"type": "null"}]}), {"type": ["integer", "null"]}, obj(v={"type": ["string", "boolean"], "maxLength": 4}),
    {"$ref": "#/$defs/n", "$defs": {"n": INT}}, obj(left={"$ref": "#/$defs/n"}, right={"$ref": "#/$defs/n"}) | {"$defs": {"n": BOOL}},
    {"$defs": {"t": {"anyOf": [INT, obj(x={"$ref": "#/$defs/t"})]}}, "$ref": "#/$defs/t"},
    {"oneOf": [obj(k={"const": "a"}, n=INT), obj(k={"const": "b"}, s=BOOL)]}, {"allOf": [obj(a=BOOL)]},
    {"type": "object", "properties": {"a": INT, "b": BOOL}, "additionalProperties": False},
    {"type": "object", "properties": {"a": BOOL}, "required": ["a"], "additionalProperties": INT, "maxProperties": 2},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}, "maxProperties": 2}, {"type": "object", "patternProperties": {"^x[0-9]$": INT}, "maxProperties": 2},
    obj(city=STR, days={"type": "integer", "minimum": 1, "maximum": 9}), obj(ü={"const": "ß"}), {"const": {"a": [1, {"b": None}]}},
]  # fmt: skip
TEXTS = [
    ("regex", "🙂{3}", "🙂{3}"), ("regex", "삼겹살 👩‍👩‍👧 𝒳", None), ("regex", "[0-9]{4}-[0-9]{2}", None), ("regex", "(yes|no), (a|b)+c", None),
    ("ebnf", 'root ::= "yes" | "no"', "yes|no"), ("ebnf", 'root ::= item ("," item){0,3}\nitem ::= [a-f]+', "[a-f]+(,[a-f]+){0,3}"),
]  # fmt: skip


@pytest.fixture
def make():
    made = []

    def build(grammars: GrammarManager | None = None, *, pool: dict | None = None, **flags) -> Bench:
        runner = LogitsRunner(vocab_size=VOCAB, **(pool or {}))
        made.append(Bench(runner, eos_ids=toy().eos_ids, tokenizer=toy(), grammars=grammars or manager(), **flags))
        return made[-1]

    yield build
    for bench in made:
        bench.close()
        bench.scheduler.grammars.close()


def grammar(kind: str, text: str, strict: bool = False, **phases) -> Constraint:
    return Constraint(grammar=GrammarText(kind=kind, text=text, strict=strict), **phases)


def schema(value: object, **phases) -> Constraint:
    return grammar("json_schema", json.dumps(value), **phases)


def text_of(result: Result) -> str:
    return toy().decode([token for token in result.ids if token != EOS])


def test_every_finished_output_follows_its_schema(make):
    bench = make()
    wanted = [(value, seed) for value in SCHEMAS for seed in (1, 2)]
    rids = [
        bench.submit([seed, n], 120, constraint=schema(value), params={"sampling_seed": seed, "logit_bias": CLOSERS})
        for n, (value, seed) in enumerate(wanted)
    ]
    bench.run()
    num_finished = 0
    for rid, (value, _) in zip(rids, wanted):
        result = bench.results[rid]
        assert result.finish.type in ("stop", "length") and result.last.ignored_keywords == [], (value, result.finish)
        if result.finish.type == "stop":
            jsonschema.validate(json.loads(text_of(result)), value)
            num_finished += 1
    assert len(SCHEMAS) >= 40 and num_finished >= 0.8 * len(wanted), num_finished
    bench.check_books()


@pytest.mark.parametrize("kind, text, pattern", TEXTS)
def test_every_finished_output_follows_its_regex_or_ebnf(make, kind, text, pattern):
    bench = make()
    rids = [
        bench.submit([seed], 100, constraint=grammar(kind, text), params={"sampling_seed": seed, "logit_bias": CLOSERS})
        for seed in range(4)
    ]
    bench.run()
    for result in map(bench.results.__getitem__, rids):
        assert (result.finish.type, result.finish.matched) == ("stop", EOS)
        assert re.fullmatch(pattern or text, text_of(result))


MIXED = [
    schema(obj(a=STR, b={"type": "array", "items": INT, "maxItems": 6}, c=STR)), None, grammar("regex", "(a|b){60}"), None,
    schema({"type": "string", "minLength": 40, "maxLength": 60}), grammar("regex", "[a-z ]{60}"), None,
    grammar("regex", "[0-9]{20}", trigger_token_ids=(4036,), bound_token_id=17),
]  # fmt: skip


def mixed(bench: Bench) -> list[list[int]]:
    rids = [
        bench.submit([n, 3, 4] * 5, 50, constraint=c, params={"sampling_seed": n, "temperature": 0.0 if n % 3 == 0 else 1.0})
        for n, c in enumerate(MIXED)
    ]
    bench.run()
    bench.check_books()
    return [bench.results[rid].ids for rid in rids]


def test_tokens_do_not_depend_on_company_overlap_chunks_or_retraction(make):
    alone = []
    for n, constraint in enumerate(MIXED):
        bench = make()
        params = {"sampling_seed": n, "temperature": 0.0 if n % 3 == 0 else 1.0}
        alone.append(generate(bench, [n, 3, 4] * 5, 50, constraint=constraint, params=params).ids)
    for flags in ({}, {"overlap": False}, {"chunked_prefill_size": 4}, {"pool": TIGHT}, {"pool": TIGHT, "overlap": False}):
        bench = make(**flags)
        assert mixed(bench) == alone, flags
        if "pool" in flags:
            assert bench.scheduler.current_stats().num_retracted_reqs > 0


def test_nine_bad_grammars_end_alone_with_the_reason(make):
    bench = make()
    normal = [bench.submit([n, 8], 20, params={"sampling_seed": n}) for n in range(4)]
    bad = [bench.submit([9], 20, constraint=grammar(kind, text)) for kind, text in BAD]
    good = bench.submit([9], 20, constraint=grammar("json_schema", '{"type":"object"}'))
    bench.run()
    for rid, (kind, _) in zip(bad, BAD):
        finish = bench.results[rid].finish
        assert (finish.type, finish.status_code, bench.results[rid].ids) == ("abort", 400, [])
        assert finish.message.startswith(f"{kind} cannot be used: ")
    assert text_of(bench.results[good]).startswith("{")
    assert [len(bench.results[rid].ids) for rid in normal] == [20] * 4
    bench.check_books()


class Slow:
    """A backend that compiles when told to."""

    def __init__(self):
        self.go = threading.Event()

    def compile(self, text: GrammarText):
        assert self.go.wait(30)
        return backend().compile(text)


@pytest.fixture
def slow():
    compiler = Slow()
    yield compiler
    compiler.go.set()


def test_others_run_while_a_grammar_is_compiled(make, slow):
    bench = make(GrammarManager(lambda: slow, 1 << 20))
    waiting = bench.submit([1], 5, constraint=grammar("regex", "[a-c]{9}"))
    other = bench.submit([2], 5)
    while bench.results[other].finish is None:
        bench.turn()
    stats = bench.scheduler.current_stats()
    assert bench.results[waiting].finish is None and (stats.num_running_reqs, stats.num_queue_reqs) == (0, 1)
    slow.go.set()
    bench.run()
    assert re.fullmatch("[a-c]+", text_of(bench.results[waiting]))
    bench.check_books()


def test_a_compile_has_a_time_limit_and_its_result_is_kept(make, slow):
    bench = make(GrammarManager(lambda: slow, 1 << 20))
    first = bench.submit([1], 5, constraint=grammar("regex", "[a-c]{9}"))
    behind = bench.submit([1], 5, constraint=grammar("regex", "[d-f]{9}"))
    gone = bench.submit([1], 5, constraint=grammar("regex", "[g-i]{9}"))
    bench.turn()
    bench.abort(gone)
    bench.now = 20.0
    bench.run()
    assert (bench.results[first].finish.status_code, bench.results[behind].finish.status_code) == (400, 503)
    assert bench.results[gone].finish.type == "abort"
    slow.go.set()
    again = generate(bench, [1], 5, constraint=grammar("regex", "[a-c]{9}"))
    assert re.fullmatch("[a-c]+", text_of(again))
    bench.check_books()


def test_compiling_requests_count_as_waiting(make, slow):
    bench = make(GrammarManager(lambda: slow, 1 << 20), max_running_requests=1, max_queued_requests=1)
    rids = [bench.submit([1], 2, constraint=grammar("regex", f"a{{{n + 1}}}")) for n in range(3)]
    bench.turn()
    assert [bench.results[rid].finish and bench.results[rid].finish.status_code for rid in rids] == [None, None, 503]
    slow.go.set()
    bench.run()


def test_the_answer_ends_when_the_grammar_is_complete_whatever_else_was_asked(make):
    bench = make()
    for params in ({"ignore_eos": True}, {"min_new_tokens": 20}, {"ignore_eos": True, "min_new_tokens": 20, "temperature": 0.0}):
        result = generate(bench, [4], 30, constraint=grammar("regex", "abc"), params=params)
        assert text_of(result) == "abc" and (result.finish.type, result.finish.matched) == ("stop", EOS)


def test_a_trigger_that_must_come_keeps_the_answer_from_ending(make):
    bench = make()
    think_end = 4036
    bias = {"logit_bias": {str(EOS): 30.0, str(think_end): 4.0}}
    result = generate(bench, [4], 400, constraint=grammar("regex", "ab", trigger_token_ids=(think_end,), must_trigger=True), params=bias)
    assert result.finish.type == "stop" and result.ids.count(think_end) == 1
    at = result.ids.index(think_end)
    assert EOS not in result.ids[:at] and toy().decode(result.ids[at + 1 : -1]) == "ab"
    free = generate(bench, [4], 400, constraint=grammar("regex", "ab", trigger_token_ids=(think_end,)), params=bias)
    assert free.ids == [EOS]


def test_what_is_not_enforced_is_said_with_the_last_output(make):
    bench = make()
    value = {"type": "array", "items": BOOL, "maxItems": 2, "uniqueItems": True}
    result = generate(bench, [4], 60, constraint=schema(value), params={"logit_bias": CLOSERS})
    assert result.last.ignored_keywords == ["/ uniqueItems"]
    refused = generate(bench, [4], 60, constraint=grammar("json_schema", json.dumps(value), strict=True))
    assert refused.finish.status_code == 400 and "/ uniqueItems" in refused.finish.message


def test_a_matcher_that_fails_ends_only_its_request(make):
    bench = make()
    rids = [bench.submit([n], 30, constraint=grammar("regex", "[a-z]{100}")) for n in range(3)]
    while len(bench.results[rids[1]].ids) < 5:
        bench.turn()
    victim = next(req for req in bench.scheduler.resident if req.rid == rids[1])
    victim.grammar._matcher.accept = lambda token_id: False
    bench.run()
    assert (bench.results[rids[1]].finish.type, bench.results[rids[1]].finish.status_code) == ("abort", 500)
    assert [bench.results[rid].finish.type for rid in (rids[0], rids[2])] == ["stop", "stop"]
    bench.check_books()


def test_without_a_backend_the_wish_is_refused():
    bench = Bench()
    refused = generate(bench, [1], 3, constraint=grammar("regex", "a"))
    assert refused.finish.status_code == 400 and "--grammar-backend" in refused.finish.message
    bench.close()
