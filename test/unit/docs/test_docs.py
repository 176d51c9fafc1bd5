"""The documentation names things that exist: files, functions, commands, targets."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from sglang.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]
SRT = ROOT / "python" / "sglang" / "srt"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmark/*.md")])
LIFE = (ROOT / "docs" / "life-of-a-request.md").read_text(encoding="utf-8")
STEPS = [
    "accept",
    "render and tokenize",
    "admit",
    "match the prefix",
    "schedule",
    "forward",
    "verify",
    "sample",
    "commit",
    "detokenize",
    "stream",
    "finish",
    "cache",
]
LIFE_FILE = re.compile(r"`((?:\w+/)*\w+\.py)(?::\s*([\w.]+))?`")
ANY_FILE = re.compile(r"`((?:python|test|tools|scripts|docs|benchmark)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path):
    text = page.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    missing += [path for path in ANY_FILE.findall(text) if not (ROOT / path).exists()]
    assert not missing


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [page.name for page in ROOT.glob("docs/*.md") if page.name != "index.md" and f"({page.name})" not in index]
    assert not missing


def test_the_life_of_a_request_has_every_step_in_order():
    told = re.findall(r"^\d+\. \*\*([^*]+)\*\*", LIFE, flags=re.MULTILINE)
    assert [step for step in told if step in STEPS] == STEPS


def test_the_life_of_a_request_names_what_exists():
    missing = []
    for path, name in LIFE_FILE.findall(LIFE):
        file = next((folder / path for folder in (SRT, SRT / "managers") if (folder / path).is_file()), None)
        if file is None:
            missing.append(path)
        elif name and name not in defined_in(file):
            missing.append(f"{path}: {name}")
    everything = {name for file in SRT.rglob("*.py") for name in defined_in(file)}
    missing += [name for name in re.findall(r"`([A-Z]\w+\.\w+)`", LIFE) if name not in everything]
    assert not missing


@cache
def defined_in(file: Path) -> frozenset[str]:
    """Functions, classes, and `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(names)


def test_every_command_and_target_is_described():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f"`sglang {name}" not in page]
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert phony is not None
    assert not [target for target in phony[1].split() if target != "help" and f"`make {target}`" not in page]
