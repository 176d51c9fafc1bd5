"""A service for DeepSeek-V4.1-Flash. `import sglang` is light: nothing heavy is loaded until it is used.

import sglang

with sglang.Engine(model_path="...") as engine:
    print(engine.generate("Once upon a time", {"max_new_tokens": 16})["text"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.version import __version__

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

__all__ = ["Engine", "ServerArgs", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from sglang.srt.entrypoints.engine import Engine

        return Engine
    if name == "ServerArgs":
        from sglang.srt.server_args import ServerArgs

        return ServerArgs
    raise AttributeError(f"module 'sglang' has no attribute {name!r}")
