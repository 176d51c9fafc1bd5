"""Writes docs/flags.md from ServerArgs; a test checks that it is current."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sglang.srt.server_args import ServerArgs

TARGET = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
HEAD = """# Flags of `sglang serve`

Written by `scripts/gen_flags_doc.py` from `srt/server_args.py`. A switch also has a `--no-` form. Names are SGLang's where it has one.

| flag | default | what it does |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(row(field) for field in dataclasses.fields(ServerArgs))


def row(field: dataclasses.Field) -> str:
    """One line of the table."""
    names = ", ".join(f"`{name}`" for name in (f"--{field.name.replace('_', '-')}", *field.metadata["alias"]))
    choices = field.metadata["choices"]
    text = field.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")
    return f"| {names} | `{field.default}` | {text.replace('|', '/')} |\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
