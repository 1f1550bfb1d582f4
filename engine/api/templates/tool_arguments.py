"""The arguments of tool calls, as a template takes them.

OpenAI's API has them as a text, which is JSON. Most templates take an object, and write it as JSON or item by item.
Others, such as DeepSeek's, join the text to other texts. A short conversation with a call shows which kind one is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_OBJECT = {"kvpage": "probe"}
_NAME = "probe"
_ID = "probe0000"  # Mistral's have nine characters


def takes_text(render: Callable[[list[dict[str, Any]]], str], refusals: type[Exception]) -> bool:
    """Whether a template takes the arguments of calls as a text. `render` renders messages with it, and raises
    `refusals` if that fails."""
    try:
        return repr(_OBJECT) in render(_conversation(_OBJECT))  # it would write Python, not JSON
    except refusals:
        pass
    try:
        render(_conversation(json.dumps(_OBJECT)))
    except refusals:
        return False
    return True


def _conversation(arguments: object) -> list[dict[str, Any]]:
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": _NAME, "tool_call_id": _ID, "content": "b"},
    ]
