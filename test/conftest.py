"""Settings that must be in place before torch is imported."""

from sglang.srt.kernels.cpu_environment import set_cpu_environment

set_cpu_environment()
