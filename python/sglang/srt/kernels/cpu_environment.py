"""Environment variables that CPU libraries read when torch is first imported. This module imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

DEFAULTS = {
    # A waiting OpenMP worker must not spin: with two processes on two cores it costs a factor of 20 (spec: kernels, OpenMP).
    "OMP_WAIT_POLICY": "passive",
    # MKL's strict mode: the same bits for every thread count; AVX2: the same bits on every x86-64 machine of the last decade.
    "MKL_CBWR": "AVX2,STRICT",
}


def set_cpu_environment(environment: MutableMapping[str, str] = os.environ, *, num_threads: int | None = None) -> None:
    """Set what the operator has not set. Call before torch is imported, in this process or for a child to be spawned."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
    if num_threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(num_threads))
