"""Traces in the format that Mooncake publishes: which blocks of a prompt were asked for, and when.

An object a line: ``timestamp`` in milliseconds, and ``hash_ids``, the chain of the prompt's blocks, where equal ids
mean equal content after an equal prefix. (Qin et al.: Mooncake, FAST '25; the repository kvcache-ai/Mooncake.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpage_server.bounded import json_bounds
from kvpage_server.bounded.files import open_regular

_MOST_BLOCKS = 1_000_000  # of a prompt


class TraceError(ValueError):
    """A line does not have the format; the message says which line, and why."""


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A prompt's blocks, from its beginning on, and its second within the trace."""

    second: int
    blocks: list[bytes]


def read_trace(path: Path) -> list[TracedPrompt]:
    """Every request, in order. Raises TraceError, OSError."""
    names: dict[int, bytes] = {}
    requests = []
    with open_regular(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                requests.append(_request(line, names, f"{path}, line {number}"))
    if not requests:
        raise TraceError(f"{path} has no requests")
    return requests


def _request(line: bytes, names: dict[int, bytes], where: str) -> TracedPrompt:
    try:
        found: Any = json_bounds.parse(line, containers=100, strings=1000, values=_MOST_BLOCKS)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict) or not {"timestamp", "hash_ids"} <= found.keys():
        raise TraceError(f"{where}: must be an object with timestamp and hash_ids")
    milliseconds, ids = found["timestamp"], found["hash_ids"]
    if type(milliseconds) not in (int, float) or not 0 <= milliseconds < 1 << 63:
        raise TraceError(f"{where}: timestamp must be a number of milliseconds, got {milliseconds!r:.40}")
    if not isinstance(ids, list) or not all(type(block) is int for block in ids):
        raise TraceError(f"{where}: hash_ids must be a list of whole numbers")
    if len(set(ids)) < len(ids):
        raise TraceError(f"{where}: hash_ids names a block twice; a chain cannot return to one")
    blocks = [names.get(block) or names.setdefault(block, b"%d" % block) for block in ids]
    return TracedPrompt(int(milliseconds) // 1000, blocks)
