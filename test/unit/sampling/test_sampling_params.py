"""Every rule of the request's sampling object, row by row."""

import json

import msgspec
import pytest

from sglang.srt.errors import BadRequest
from sglang.srt.sampling.sampling_params import _PARSERS, SamplingParams, compile_stop_regex, normalize, parse_sampling_params, uses_grammar

V = 4096


def parse(obj=None, **kwargs):
    return parse_sampling_params(obj, vocab_size=V, **kwargs)


def test_every_field_has_a_parser_and_nothing_else_does():
    assert list(_PARSERS) and set(_PARSERS) == {f.name for f in msgspec.structs.fields(SamplingParams)}


@pytest.mark.parametrize("obj", [None, {}, dict.fromkeys(_PARSERS), {"beam_width": None}])
def test_absent_and_null_fields_are_defaults(obj):
    assert parse(obj) == SamplingParams()


def test_the_routes_own_default_length_counts_only_when_none_is_given():
    assert parse({}, default_max_new_tokens=None).max_new_tokens is None
    assert parse({"max_new_tokens": None}, default_max_new_tokens=16).max_new_tokens == 16
    assert parse({"max_new_tokens": 0}, default_max_new_tokens=None).max_new_tokens == 0


GOOD = [
    ({"temperature": 0}, {"temperature": 1.0, "top_k": 1}),
    ({"temperature": 9.9e-7, "top_k": 40}, {"temperature": 1.0, "top_k": 1}),
    ({"temperature": 1e-6}, {"temperature": 1e-6, "top_k": -1}),
    ({"temperature": 2}, {"temperature": 2.0}),
    ({"top_p": 1}, {"top_p": 1.0}),
    ({"top_p": 1e-9}, {"top_p": 1e-9}),
    ({"top_k": -1}, {"top_k": -1}),
    ({"top_k": V}, {"top_k": -1}),
    ({"top_k": V - 1}, {"top_k": V - 1}),
    ({"min_p": 0}, {"min_p": 0.0}),
    ({"min_p": 1}, {"min_p": 1.0}),
    ({"frequency_penalty": -2, "presence_penalty": 2}, {"frequency_penalty": -2.0, "presence_penalty": 2.0}),
    ({"repetition_penalty": 2}, {"repetition_penalty": 2.0}),
    ({"max_new_tokens": 5, "min_new_tokens": 5}, {"max_new_tokens": 5, "min_new_tokens": 5}),
    ({"stop": "END"}, {"stop": ["END"]}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"stop": ["x"] * 32}, {"stop": ["x"] * 32}),
    ({"stop_regex": r"\d+$"}, {"stop_regex": [r"\d+$"]}),
    ({"stop_regex": ["a" * 256]}, {"stop_regex": ["a" * 256]}),
    ({"stop_token_ids": [5, 0, 5, V - 1]}, {"stop_token_ids": [5, 0, V - 1]}),
    ({"logit_bias": {"0": -100, "4095": 2.5, 7: 1}}, {"logit_bias": {"0": -100.0, "4095": 2.5, "7": 1.0}}),
    ({"sampling_seed": -(2**63)}, {"sampling_seed": -(2**63)}),
    ({"sampling_seed": 2**63 - 1}, {"sampling_seed": 2**63 - 1}),
    ({"json_schema": "", "regex": "a+"}, {"json_schema": None, "regex": "a+"}),
    ({"n": 128, "stream_interval": 4, "custom_params": {"a": [1]}}, {"n": 128, "stream_interval": 4, "custom_params": {"a": [1]}}),
    ({"ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True}, {"ignore_eos": True, "skip_special_tokens": False}),
]


@pytest.mark.parametrize("obj, expected", GOOD, ids=[json.dumps(g[0])[:40] for g in GOOD])
def test_good_values(obj, expected):
    params = parse(obj)
    assert {name: getattr(params, name) for name in expected} == expected
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


BAD = [
    ({"temperature": -1}, "temperature", "at least 0.0, got -1"),
    ({"temperature": float("nan")}, "temperature", "finite, got nan"),
    ({"temperature": float("inf")}, "temperature", "finite"),
    ({"temperature": 10**400}, "temperature", "finite"),
    ({"temperature": "hot"}, "temperature", "number, got str 'hot'"),
    ({"temperature": True}, "temperature", "number, got bool"),
    ({"top_p": 0}, "top_p", "(0.0, 1.0], got 0"),
    ({"top_p": 1.01}, "top_p", "got 1.01"),
    ({"top_k": 0}, "top_k", "-1 or in [1,"),
    ({"top_k": -2}, "top_k", "got -2"),
    ({"top_k": 1.5}, "top_k", "integer"),
    ({"min_p": 1.1}, "min_p", "[0.0, 1.0]"),
    ({"min_p": -0.1}, "min_p", "[0.0, 1.0]"),
    ({"frequency_penalty": 2.1}, "frequency_penalty", "[-2.0, 2.0], got 2.1"),
    ({"presence_penalty": -3}, "presence_penalty", "got -3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "(0.0, 2.0], got 0"),
    ({"max_new_tokens": -1}, "max_new_tokens", "got -1"),
    ({"max_new_tokens": "ten"}, "max_new_tokens", "integer, got str 'ten'"),
    ({"max_new_tokens": 2**40}, "max_new_tokens", str(2**40)),
    ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens", "max_new_tokens (4), got 5"),
    ({"stop": 5}, "stop", "string or a list"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": ["a", None]}, "stop", "must be a string, got NoneType"),
    ({"stop": ["x"] * 33}, "stop", "at most 32 entries, got 33"),
    ({"stop": "x" * 4097}, "stop", "4096 bytes, got 4097"),
    ({"stop": "\ud800"}, "stop", "surrogate"),
    ({"stop_regex": ["x"] * 33}, "stop_regex", "at most 32 entries, got 33"),
    ({"stop_regex": "é" * 129}, "stop_regex", "256 bytes, got 258"),
    ({"stop_regex": "(a"}, "stop_regex", "missing )"),
    ({"stop_regex": "(?=a)b"}, "stop_regex", "(?="),
    ({"stop_regex": "((a{100}){100}){100}"}, "stop_regex", "repetition"),
    ({"stop_token_ids": [V]}, "stop_token_ids", f"[0, {V - 1}], got {V}"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "got -1"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids", "integers only"),
    ({"stop_token_ids": 1}, "stop_token_ids", "list of ids"),
    ({"ignore_eos": 1}, "ignore_eos", "true or false"),
    ({"no_stop_trim": "yes"}, "no_stop_trim", "true or false"),
    ({"n": 0}, "n", "[1, 128], got 0"),
    ({"n": 129}, "n", "got 129"),
    ({"logit_bias": {str(V): 1}}, "logit_bias", f"[0, {V - 1}], got {V}"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
    ({"logit_bias": {"07": 1}}, "logit_bias", "'07'"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "decimal"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "decimal"),
    ({"logit_bias": {"5": float("inf")}}, "logit_bias[5]", "finite"),
    ({"logit_bias": {"5": 1e31}}, "logit_bias", "1e+30"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"sampling_seed": 2**63}, "sampling_seed", str(2**63)),
    ({"sampling_seed": 1.0}, "sampling_seed", "integer"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "only one of json_schema, regex, ebnf, structural_tag"),
    ({"json_schema": {"type": "object"}}, "json_schema", "string"),
    ({"stream_interval": 0}, "stream_interval", "got 0"),
    ({"custom_params": 3}, "custom_params", "object"),
    ({"beam_width": 2}, "beam_width", "not supported"),
    ([], "sampling_params", "object, got list"),
    ("x" * 10000, "sampling_params", "object, got str"),
]


@pytest.mark.parametrize("obj, param, words", BAD, ids=[f"{b[1]}-{n}" for n, b in enumerate(BAD)])
def test_bad_values_are_named_with_what_was_found(obj, param, words):
    with pytest.raises(BadRequest) as caught:
        parse(obj)
    assert words in caught.value.message
    assert caught.value.param == param
    assert len(caught.value.message) < 500
    caught.value.message.encode()


def test_an_unknown_field_lists_the_allowed_ones():
    with pytest.raises(BadRequest, match=r"unknown field `foo`, expected one of `max_new_tokens`, .*`sampling_seed`"):
        parse({"foo": 1})


def test_uses_grammar_names_the_field():
    assert uses_grammar(parse({})) is None
    assert uses_grammar(parse({"ebnf": "root ::= 'a'"})) == "ebnf"


def test_normalize_is_idempotent():
    for obj, _ in GOOD:
        params = parse(obj)
        assert normalize(params, V) == params


def test_a_bad_regex_is_a_value_error_outside_the_parser():
    with pytest.raises(ValueError, match="missing"):
        compile_stop_regex("[a")
