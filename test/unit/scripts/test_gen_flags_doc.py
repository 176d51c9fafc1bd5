"""docs/flags.md is what the flags are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "gen_flags_doc.py"


def test_the_page_is_current():
    spec = importlib.util.spec_from_file_location("gen_flags_doc", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.page(), "run scripts/gen_flags_doc.py"
