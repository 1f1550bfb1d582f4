"""Configuration: `name value` lines as redis.conf has them, `--name value` on the command line, CONFIG GET and SET.

Each parameter is declared once, as a field of `Config` with its kind, default, one line of documentation and whether it
may change while the server runs. A line that cannot be understood is refused with its number and what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvpage_server.resp.parser import split_words
from kvpage_server.store.eviction import POLICIES


class ConfigError(ValueError):
    """A parameter is unknown or its value is not allowed; the message says which, where, and what is."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a parameter's value is read from words, and written back as one string."""

    read: Callable[[list[str]], Any]
    write: Callable[[Any], str] = str


def _one(words: list[str]) -> str:
    if len(words) != 1:
        raise ValueError(f"takes one value, got {len(words)}")
    return words[0]


def integer(low: int, high: int) -> Kind:
    """A whole number in a range."""

    def read(words: list[str]) -> int:
        word = _one(words)
        if not re.fullmatch(r"-?\d+", word) or not low <= int(word) <= high:
            raise ValueError(f"must be a whole number between {low} and {high}, got '{word}'")
        return int(word)

    return Kind(read)


_UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1024, "m": 1000**2, "mb": 1024**2, "g": 1000**3, "gb": 1024**3}


def _read_memory(words: list[str]) -> int:
    word = _one(words)
    found = re.fullmatch(r"(\d+)([a-z]*)", word.lower())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"must be a number of bytes such as 0, 512mb or 4gb, got '{word}'")
    return int(found[1]) * _UNITS[found[2]]


def _read_yes_no(words: list[str]) -> bool:
    word = _one(words).lower()
    if word not in ("yes", "no"):
        raise ValueError(f"must be yes or no, got '{word}'")
    return word == "yes"


def choice(*allowed: str) -> Kind:
    """One of a few words."""

    def read(words: list[str]) -> str:
        word = _one(words).lower()
        if word not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}, got '{word}'")
        return word

    return Kind(read)


memory = Kind(_read_memory)
yes_no = Kind(_read_yes_no, lambda value: "yes" if value else "no")
text = Kind(_one)
words = Kind(lambda found: found, lambda value: " ".join(value))


def option(kind: Kind, default: Any, doc: str, *, mutable: bool = False) -> Any:
    """Declare a parameter. Its name is the field's, with dashes."""
    metadata = {"kind": kind, "doc": doc, "mutable": mutable}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Config:
    """Every parameter, with its default."""

    port: int = option(integer(0, 65535), 9221, "TCP port; 0 takes a free one")
    bind: list[str] = option(words, ["127.0.0.1", "-::1"], "addresses to listen on; one after '-' may be missing")
    dir: str = option(text, ".", "the directory the server works in")
    maxmemory: int = option(memory, 0, "bytes of values kept in memory; 0 is no limit", mutable=True)
    maxmemory_policy: str = option(choice(*POLICIES), "allkeys-lru", "what goes when memory is full", mutable=True)
    page_checksums: bool = option(yes_no, True, "hash the bodies of pages when they are written", mutable=True)
    strict_page_shape: bool = option(
        yes_no, False, "refuse a body that is not page_size x head_dim x itemsize bytes", mutable=True
    )
    proto_max_bulk_len: int = option(memory, 512 * 1024**2, "bytes of the longest string a client may send")
    loglevel: str = option(choice("debug", "verbose", "notice", "warning"), "notice", "how much the log says")
    databases: int = option(integer(1, 1), 1, "the number of databases: one")
    save: str = option(Kind(" ".join), "", "snapshots by time: none, the store has no disk yet")
    appendonly: bool = option(choice("no"), "no", "no append-only file is kept")

    @classmethod
    def parameters(cls) -> dict[str, Field[Any]]:
        """Every parameter's declaration by its name in the file."""
        return {f.name.replace("_", "-"): f for f in fields(cls)}

    def set(self, name: str, values: Sequence[str]) -> None:
        """Give a parameter a value. Raises ConfigError."""
        declared = self.parameters().get(name.lower())
        if declared is None:
            raise ConfigError(f"unknown parameter '{name}'")
        try:
            value = declared.metadata["kind"].read(list(values))
        except ValueError as error:
            raise ConfigError(f"{name} {error}") from None
        setattr(self, declared.name, value)

    def get(self, name: str) -> str:
        """A parameter's value as the file would spell it."""
        declared = self.parameters()[name]
        return str(declared.metadata["kind"].write(getattr(self, declared.name)))

    @classmethod
    def is_mutable(cls, name: str) -> bool:
        """Whether CONFIG SET may change it."""
        return bool(cls.parameters()[name].metadata["mutable"])

    def load(self, path: Path) -> None:
        """Take every line of a file. Raises ConfigError naming file and line, OSError when it cannot be read."""
        for number, name, values in read_lines(path):
            try:
                self.set(name, values)
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None


def read_lines(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """The lines of a configuration file that say something: number, name, values."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        found = split_words(line)
        if found is None:
            raise ConfigError(f"{path}, line {number}: unbalanced quotes")
        name, *values = (word.decode("utf-8", "surrogateescape") for word in found)
        yield number, name, values


def from_arguments(arguments: Sequence[str]) -> Config:
    """The configuration of a command line as redis-server takes it: an optional file, then `--name value ...`."""
    config = Config()
    rest = list(arguments)
    if rest and not rest[0].startswith("--"):
        config.load(Path(rest.pop(0)))
    while rest:
        name = rest.pop(0)
        if not name.startswith("--"):
            raise ConfigError(f"expected --name, got '{name}'")
        values = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        config.set(name[2:], values)
    return config
