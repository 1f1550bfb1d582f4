"""The shape of a reply: in words, as in the row of the table, and as a JSON schema, as in Redis's tables.

``bulk | null`` is one of the two. ``array of bulk or null`` has items of both kinds. The words are those of RESP: `OK`,
`simple`, `bulk`, `text`, `integer`, `null`, `map`, `array`, `set`, `push`. `nothing` means no reply at all.
"""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, dict[str, Any]] = {
    "OK": {"const": "OK"},
    "simple": {"type": "string"},
    "bulk": {"type": "string"},
    "text": {"type": "string"},
    "integer": {"type": "integer"},
    "null": {"type": "null"},
    "map": {"type": "object"},
    "array": {"type": "array"},
    "push": {"type": "array"},
    "set": {"type": "array", "uniqueItems": True},
    "nothing": {"const": None},
}


def schema(shape: str) -> dict[str, Any]:
    """The JSON schema of a shape. Raises KeyError for an unknown word."""
    return _one_of([_alternative(part) for part in shape.split(" | ")])


def _alternative(shape: str) -> dict[str, Any]:
    whole, _, items = shape.partition(" of ")
    if not items:
        return _TYPES[whole]
    return _TYPES[whole] | {"items": _one_of([_TYPES[item] for item in items.split(" or ")])}


def _one_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
