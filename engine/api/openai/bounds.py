"""Limits of what a request body may hold."""

from __future__ import annotations

from engine.api.openai.errors import invalid
from engine.formats import json_bounds

MAX_CONTAINERS = 8_192  # lists and objects
MAX_STRINGS = 16_384  # names of fields included; a conversation of 4,096 messages has as many
MAX_VALUES = 131_072  # enough for a prompt of token ids


def check(raw: bytes) -> None:
    """Raise ApiError for JSON that holds too much. What is no JSON passes."""
    try:
        json_bounds.check(raw, containers=MAX_CONTAINERS, strings=MAX_STRINGS, values=MAX_VALUES)
    except json_bounds.TooMuchError as error:
        raise invalid(f"the body holds {error}", code="body_too_large") from error
