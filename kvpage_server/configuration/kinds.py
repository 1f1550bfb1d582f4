"""Kinds of parameters: each parses a value from words, and converts it back to words.

A parser raises ValueError with a message that names the allowed values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpage_server.address import ZMQ_ADDRESS, is_zmq_address
from kvpage_server.glob import glob


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of parameter: `read` parses a value from the words of a line, `write` converts it back to words.

    If a parameter may have several lines, `add` merges a line's value into the value of the lines before. CONFIG SET
    merges in the same way, but replaces the whole value if the kind is `whole`.
    """

    read: Callable[[list[str]], Any]
    write: Callable[[Any], list[str]] = lambda value: [str(value)]
    add: Callable[[Any, Any], Any] | None = None
    whole: bool = False


def _one(words: list[str]) -> str:
    if len(words) != 1:
        raise ValueError(f"takes one value, got {len(words)}")
    return words[0]


def _read_path(words: list[str]) -> str:
    path = _one(words)
    if "\0" in path:
        raise ValueError("must be a path, which has no null byte")
    return path


def split_at_spaces(value: str) -> list[str]:
    """Return the words of a value. As in a file, only ASCII white space separates words: a pattern may have others."""
    return re.findall(r"[^ \t\n\v\f\r]+", value)


def _parts(words: list[str]) -> list[str]:
    """Return the words of a value that may have several.

    A single word is split at spaces, because CONFIG SET passes one.
    """
    return split_at_spaces(words[0]) if len(words) == 1 else words


def integer(low: int, high: int) -> Kind:
    """Return the kind of whole numbers from `low` to `high`."""

    def read(words: list[str]) -> int:
        word = _one(words)
        if not re.fullmatch(r"-?[0-9]{1,18}", word) or not low <= int(word) <= high:
            raise ValueError(f"must be a whole number between {low} and {high}, got '{word}'")
        return int(word)

    return Kind(read)


_UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1024, "m": 1000**2, "mb": 1024**2, "g": 1000**3, "gb": 1024**3}


def _bytes(word: str, instead: str = "", low: int = 0) -> int:
    """Parse a number of bytes, with or without a unit such as mb.

    Raises ValueError. Its message names the allowed values: at least `low`, and `instead`, if that is not empty.
    """
    found = re.fullmatch(r"([0-9]{1,18})([A-Za-z]*)", word)
    if not found or found[2].lower() not in _UNITS:
        other = f"{instead}, or " if instead else ""
        least = f" from {low} on, such as" if low else " such as 0,"
        raise ValueError(f"must be {other}a number of bytes{least} 512mb or 4gb, got '{word}'")
    return int(found[1]) * _UNITS[found[2].lower()]


def memory(low: int = 0) -> Kind:
    """Return the kind of sizes: numbers of bytes, at least `low`, with or without a unit such as mb."""

    def read(words: list[str]) -> int:
        size = _bytes(_one(words), low=low)
        if size < low:
            raise ValueError(f"must be at least {low} bytes, got {size}")
        return size

    return Kind(read)


AUTO = "auto"


def _read_memory_or_auto(words: list[str]) -> int | str:
    word = _one(words)
    if word.lower() == AUTO:
        return AUTO
    return _bytes(word, instead=AUTO)


def _read_yes_no(words: list[str]) -> bool:
    word = _one(words).lower()
    if word not in ("yes", "no"):
        raise ValueError(f"must be yes or no, got '{word}'")
    return word == "yes"


def choice(*allowed: str) -> Kind:
    """Return the kind of words that must be one of `allowed`, in upper or lower case."""

    def read(words: list[str]) -> str:
        word = _one(words).lower()
        if word not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}, got '{word}'")
        return word

    return Kind(read)


_SHORTEST_TOKEN = 16


def _read_token(words: list[str]) -> str:
    word = _one(words)
    if not re.fullmatch(rf"([A-Za-z0-9._~+/=-]{{{_SHORTEST_TOKEN},512}})?", word):
        raise ValueError(f"must be empty, or {_SHORTEST_TOKEN} to 512 of A-Z a-z 0-9 . _ ~ + / = -")
    return word


def zmq_address(*, may_connect: bool = False) -> Kind:
    """Return the kind of addresses of ZMQ; with `may_connect` also after ">", for a socket that connects to it."""

    def read(words: list[str]) -> str:
        word = _one(words)
        if word and not is_zmq_address(word.removeprefix(">") if may_connect else word):
            raise ValueError(f"must be {ZMQ_ADDRESS}, got '{word}'")
        return word

    return Kind(read)


def _read_origins(words: list[str]) -> list[str]:
    found = [word.lower() for word in _parts(words)]
    for word in found:
        if not re.fullmatch(r"https?://[a-z0-9._-]+(:[0-9]{1,5})?", word):
            raise ValueError(f"takes sites such as https://store.example, with spaces between them, got '{word}'")
    return found


def letters(allowed: str) -> Kind:
    """Return the kind of words that consist of allowed letters."""

    def read(words: list[str]) -> str:
        word = _one(words)
        if not set(word) <= set(allowed):
            raise ValueError(f"must be made of the letters {allowed}, got '{word}'")
        return word

    return Kind(read)


def _read_octal(words: list[str]) -> int:
    word = _one(words)
    if not re.fullmatch(r"[0-7]{1,4}", word) or int(word, 8) > 0o777:
        raise ValueError(f"must be permissions in octal between 0 and 777, got '{word}'")
    return int(word, 8)


_LEAST_SHARE = 64 << 10  # bytes: a command with a small page is longer


def _read_memory_or_share(words: list[str]) -> int | str:
    word = _one(words)
    if re.fullmatch(r"[0-9]{1,2}%|100%", word):
        return word
    size = _bytes(word, instead="a share such as 25%")
    if 0 < size < _LEAST_SHARE:
        raise ValueError(f"must be 0, a share, or at least {_LEAST_SHARE} bytes, got {size}")
    return size


class OutputLimit(NamedTuple):
    """Limit of unread output in bytes: never above `hard`, and above `soft` for at most `seconds`; 0 for no limit."""

    hard: int
    soft: int
    seconds: int


_CLIENT_CLASSES = ("normal", "replica", "pubsub")  # the classes of Redis; this server has no replicas


def _read_output_limits(words: list[str]) -> dict[str, OutputLimit]:
    words = _parts(words)
    if not words or len(words) % 4:
        raise ValueError(f"takes 4 values a class of clients: class, hard limit, soft limit, seconds; got {len(words)}")
    limits = {}
    for start in range(0, len(words), 4):
        name, hard, soft, seconds = words[start : start + 4]
        name = {"slave": "replica"}.get(name.lower(), name.lower())
        if name not in _CLIENT_CLASSES:
            raise ValueError(f"classes of clients are {', '.join(_CLIENT_CLASSES)}, got '{name}'")
        if not re.fullmatch(r"[0-9]{1,9}", seconds):
            raise ValueError(f"seconds must be a whole number, got '{seconds}'")
        limits[name] = OutputLimit(_bytes(hard), _bytes(soft), int(seconds))
    return limits


def _write_output_limits(limits: dict[str, OutputLimit]) -> list[str]:
    return [word for name, limit in limits.items() for word in (name, *map(str, limit))]


_MOST_QUOTAS = 1024  # some commands pass over all


def _read_quotas(words: list[str]) -> dict[str, int]:
    if words == [""]:
        return {}
    words = _parts(words)
    if not words or len(words) % 2:
        raise ValueError(f"takes 2 values a quota: a pattern of keys, bytes (0 for no limit); got {len(words)}")
    if len(words) > 2 * _MOST_QUOTAS:  # before any pattern is compiled
        raise ValueError(f"has at most {_MOST_QUOTAS} quotas, got {len(words) // 2}")
    quotas: dict[str, int] = {}
    for pattern, limit in zip(words[::2], words[1::2], strict=True):
        if split_at_spaces(pattern) != [pattern]:
            raise ValueError(f"pattern must not be empty or have spaces (use ? instead), got '{pattern}'")
        if pattern.startswith("~"):
            raise ValueError(f"a quota's pattern has no ~ in front (\\~ for a key that has one), got '{pattern}'")
        if pattern in quotas:
            raise ValueError(f"pattern '{pattern}' is given twice")
        glob(pattern.encode("utf-8", "surrogateescape"))
        quotas[pattern] = _bytes(limit)
    return _add_quotas({}, quotas)


def _add_quotas(old: dict[str, int], new: dict[str, int]) -> dict[str, int]:
    """Return all quotas: each line of a file adds some. Raises ValueError for too many."""
    quotas = {**old, **new}
    if len(quotas) > _MOST_QUOTAS:
        raise ValueError(f"has at most {_MOST_QUOTAS} quotas, got {len(quotas)}")
    return quotas


def _write_quotas(quotas: dict[str, int]) -> list[str]:
    return [word for pattern, limit in quotas.items() for word in (pattern, str(limit))] or [""]


yes_no = Kind(_read_yes_no, lambda value: ["yes" if value else "no"])
text = Kind(_one)
token = Kind(_read_token)
origins = Kind(_read_origins, list)
path = Kind(_read_path)
words = Kind(_parts, lambda value: value)
octal = Kind(_read_octal, lambda value: [f"{value:o}"])
memory_or_share = Kind(_read_memory_or_share)
memory_or_auto = Kind(_read_memory_or_auto)
output_limits = Kind(_read_output_limits, _write_output_limits, lambda old, new: {**old, **new})
quotas = Kind(_read_quotas, _write_quotas, _add_quotas, whole=True)
lines = Kind(lambda found: [found], lambda value: [word for line in value for word in line], lambda old, new: old + new)
