"""The grammar of tool calls: an xgrammar structural tag in the V4.1 markup.

    two newlines, <｜DSML｜ calls>, one or more <｜DSML｜ invoke name="..."> with their parameters, </｜DSML｜ calls>

Beside recipe, which renders and parses this markup, this is the only place that spells it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

_MARKER = "｜DSML｜"
_OPEN, _CLOSE = f"<{_MARKER} calls>", f"</{_MARKER} calls>"


def required_calls(tools: Sequence[Json], *, parallel: bool) -> str:
    """The answer is a block of calls of these functions, and nothing else. `parallel`: more than one call is allowed."""
    return _structural_tag(
        {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": f"\n\n{_OPEN}\n"},
                _calls(tools, parallel=parallel),
                {"type": "const_string", "value": _CLOSE},
            ],
        }
    )


def optional_calls(tools: Sequence[Json], *, parallel: bool) -> str:
    """Free text; if the model opens a block of calls, what is in it follows the tools' schemas, and the answer ends behind it."""
    return _structural_tag(
        {
            "type": "triggered_tags",
            "triggers": [_OPEN],
            "tags": [{"type": "tag", "begin": f"{_OPEN}\n", "content": _calls(tools, parallel=parallel), "end": _CLOSE}],
            "stop_after_first": True,
        }
    )


def _calls(tools: Sequence[Json], *, parallel: bool) -> Json:
    return {
        "type": "tags_with_separator",
        "tags": [_call(tool["function"]) for tool in tools],
        "separator": "",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _call(function: Json) -> Json:
    return {
        "type": "tag",
        "begin": f'<{_MARKER} invoke name="{function["name"]}">\n',
        "content": {
            "type": "json_schema",
            "json_schema": function.get("parameters") or {"type": "object", "properties": {}},
            "style": "deepseek_v4_1_xml",
            "excludes": [_MARKER],  # a value that contains the marker would end the parameter for the parser
        },
        "end": f"</{_MARKER} invoke>\n",
    }


def _structural_tag(format_: Json) -> str:
    return json.dumps({"type": "structural_tag", "format": format_}, ensure_ascii=False)
