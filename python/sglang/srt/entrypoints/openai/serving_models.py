"""GET /v1/models: the one model of this worker."""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.errors import NotFound
from sglang.srt.managers.tokenizer_manager import TokenizerManager


class ModelServing:
    def __init__(self, tm: TokenizerManager):
        self._tm = tm
        self._created = int(time.time())

    def list(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card()]}

    def get(self, name: str) -> dict[str, Any]:
        """Raises NotFound for any other name."""
        if name != self._tm.args.model_name:
            raise NotFound(f"The model '{name[:200]}' does not exist", param="model")
        return self._card()

    def _card(self) -> dict[str, Any]:
        name = self._tm.args.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": self._tm.context_length,
        }
