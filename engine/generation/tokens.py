"""Prompts as token ids, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

MAX_TOKEN_IDS = 2**32  # a chain hash covers four bytes of each id


class PromptError(ValueError):
    """A prompt that the model cannot process."""


class EmptyPromptError(PromptError):
    """A prompt without a token."""


class PromptTooLongError(PromptError):
    """A prompt that leaves no room for an answer in the model's context."""


class UnknownTokenError(PromptError):
    """A prompt with an id that is not in the model's vocabulary."""


def token_ids(tokens: Any, vocabulary: int = MAX_TOKEN_IDS) -> list[int]:
    """Return `tokens` as a list of ids below `vocabulary`. Raises UnknownTokenError for any other value."""
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # elements of an array are not of the type int
    if not isinstance(tokens, Iterable) or isinstance(tokens, str | bytes | bytearray | memoryview | Mapping):
        raise UnknownTokenError(f"a prompt in tokens is a sequence of their ids, got {type(tokens).__name__}")
    found = list(tokens)
    if not all(type(token) is int for token in found):
        found = [_token_id(token) for token in found]
    if found and not (min(found) >= 0 and max(found) < vocabulary):
        wrong = next(token for token in found if not 0 <= token < vocabulary)
        raise UnknownTokenError(f"token ids are 0 to {vocabulary - 1}, got {wrong}")
    return found


def _token_id(token: Any) -> int:
    """Convert a scalar of an array to an int. Raises UnknownTokenError for a bool or another type of value."""
    try:
        if isinstance(token, bool):
            raise TypeError
        return index(token)
    except TypeError:
        raise UnknownTokenError(f"token ids are whole numbers, got {token!r:.80}") from None


def check_prompt(tokens: Sequence[int], vocabulary: int, context: int | None) -> None:
    """Raise EmptyPromptError, PromptTooLongError or UnknownTokenError for a prompt that the model cannot process."""
    if not tokens:
        raise EmptyPromptError("a prompt has at least one token")
    if context and len(tokens) >= context:
        raise PromptTooLongError(f"a prompt of {len(tokens)} tokens leaves no room in a context of {context}")
    token_ids(tokens, vocabulary)


def check_answer(max_tokens: int, stop: Sequence[str], logprobs: int, vocabulary: int) -> None:
    """Raise ValueError for limits that an answer cannot have."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if not all(stop):
        raise ValueError("a stop string must not be empty")
    if not 0 <= logprobs <= vocabulary:
        raise ValueError(f"logprobs must be 0 to {vocabulary}, got {logprobs}")


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of `text`, encoded as by mlx_lm.generate. Raises UnknownTokenError if UTF-8 cannot encode
    it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can contain
        raise UnknownTokenError(f"a prompt is text that UTF-8 can spell, got {text[error.start]!a}") from None
    bos = tokenizer.bos_token
    return list(tokenizer.encode(text, add_special_tokens=bos is None or not text.startswith(bos), verbose=False))
