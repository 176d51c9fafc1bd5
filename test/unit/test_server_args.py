"""Flags that cannot work are refused by name before anything is started."""

from __future__ import annotations

import pytest

from sglang.srt.errors import ConfigError
from sglang.srt.server_args import ServerArgs, from_cli, validate


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context_length", 0),
        ("max_total_tokens", 127),
        ("max_total_tokens", -5),
        ("max_snapshots", -1),
        ("prefill_keep_tokens", 0),
        ("stream_interval", 0),
        ("decode_log_interval", 0),
        ("request_timeout_s", float("nan")),
        ("request_timeout_s", -1.0),
        ("queue_timeout_s", float("inf")),
        ("drain_timeout_s", -0.5),
        ("startup_timeout_s", 0.0),
        ("watchdog_timeout", -1.0),
        ("random_seed", 2**63),
        ("mem_fraction_static", float("nan")),
        ("page_size", 3),
    ],
)
def test_value_that_cannot_work_is_refused_by_its_flags_name(field, value):
    with pytest.raises(ConfigError) as refused:
        validate(ServerArgs(model_path="x", **{field: value}))
    message = str(refused.value)
    assert f"--{field.replace('_', '-')}" in message and str(value) in message and "\n" not in message


def test_defaults_and_bounds_are_accepted():
    validate(ServerArgs(model_path="x"))
    validate(
        ServerArgs(
            model_path="x", context_length=1, max_total_tokens=128, max_snapshots=0, drain_timeout_s=0.0, random_seed=-(2**63), port=0
        )
    )


def test_model_may_be_given_once():
    assert from_cli(["x"]).model_path == from_cli(["--model", "x"]).model_path == "x"
    with pytest.raises(ConfigError, match="twice"):
        from_cli(["x", "--model-path", "y"])
