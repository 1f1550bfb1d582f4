"""CONFIG REWRITE: writes the current configuration to the file.

Comments, the order of lines, and lines with unchanged values stay. A line with a changed value is replaced in its
place. If a parameter has several lines, each line keeps its user, its quotas or its classes of clients. Lines of
deleted users and quotas are deleted. Parameters without a line are appended if they differ from their default.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from kvpage_server.configuration.config import Config, ConfigError
from kvpage_server.configuration.kinds import split_at_spaces
from kvpage_server.core.protocol import split_words

_HEADING = b"# Written by CONFIG REWRITE"
_PLAIN = re.compile(rb"[!#-&(-\[\]-~]+\Z")  # printable, without quotes, backslashes and spaces


def rewritten(old: bytes, config: Config, users: Sequence[bytes]) -> bytes:
    """Return the content of a configuration file with the values of `config`.

    `old` is its content before. `users` are lines in the form of ACL LIST, which replace its `user` lines.
    """
    default, lines = Config(), old.splitlines()
    new: dict[int, list[bytes]] = {}  # replacements of lines, by their index in `lines`
    added: list[bytes] = []
    places = defaultdict[str, list[int]](list)
    for number, line in enumerate(lines):
        places[_name(line)].append(number)
    for name in config.parameters():
        at = places[name]
        if name == "user":
            found, others = _users(lines, at, users)
        elif isinstance(default.value(name), dict):
            found, others = _parts(name, [_parsed(lines[number]) for number in at], config)
        else:
            found, others = _whole(name, [_parsed(lines[number]) for number in at], config)
        new |= {
            number: [lines[number]] if replacement is None else replacement
            for number, replacement in zip(at, found, strict=True)
        }
        added += others
    if added and _HEADING not in lines:
        added = [b"", _HEADING, *added]
    kept = chain.from_iterable(new.get(number, [line]) for number, line in enumerate(lines))
    return b"".join(line + b"\n" for line in (*kept, *added))


Found = list[list[bytes] | None]  # for each old line the lines that replace it, or None if it stays


def _whole(name: str, old: Sequence[Config | None], config: Config) -> tuple[Found, list[bytes]]:
    """Return the lines of a parameter with one value: (replacements of its old lines, lines to append).

    The first old line gets the value, and the others are deleted. `old` has the parsed old lines, None for invalid
    ones.
    """
    if not old:
        return [], [] if config.words(name) == Config().words(name) else [_line(name, config)]
    first, *others = old
    stays = first is not None and first.words(name) == config.words(name)
    return [None if stays else [_line(name, config)], *([] for _ in others)], []


def _parts(name: str, old: Sequence[Config | None], config: Config) -> tuple[Found, list[bytes]]:
    """Return the lines of a parameter with named parts, such as quotas: (replacements of its old lines, lines to
    append).

    Each old line keeps its parts. `old` has the parsed old lines, None for invalid ones.
    """
    value: Mapping[str, object] = config.value(name)
    default: Mapping[str, object] = Config().value(name)
    left = dict(value)
    kept: list[dict[str, object]] = []
    for parsed in old:
        named = parsed.given if parsed is not None else ()
        kept.append({part: left.pop(part) for part in [*left] if part in named})
    new = [_line(name, config, {part: one}) for part, one in left.items() if default.get(part) != one]
    if [*chain.from_iterable(kept), *left] != [*value] and not default:  # the order of quotas matters
        every = [_line(name, config, {part: one}) for part, one in value.items()]
        return [every, *([] for _ in old[1:])], []
    found: Found = [
        None if parsed is not None and parsed.value(name) == {**default, **parts} else _lines(name, config, parts)
        for parsed, parts in zip(old, kept, strict=True)
    ]
    return found, new


def _lines(name: str, config: Config, parts: Mapping[str, object]) -> list[bytes]:
    return [_line(name, config, parts)] if parts else []


def _users(lines: Sequence[bytes], at: Iterable[int], users: Sequence[bytes]) -> tuple[Found, list[bytes]]:
    """Return the lines of users: (replacements of the old `user` lines, lines to append).

    The old lines are at the indexes `at`.
    """
    left = {line.split(b" ")[1]: b" ".join(map(_quote, line.split(b" "))) for line in users}
    found: Found = []
    for number in at:
        name = _words(lines[number])[1:2]
        line = left.pop(name[0], None) if name else None
        found.append([line] if line is not None else [])
    return found, [*left.values()]


def _parsed(line: bytes) -> Config | None:
    """Return a Config with the value of a line, or None if the line is invalid.

    Its `given` has the names of the parts in the line, for example the patterns of quotas.
    """
    name, *values = (word.decode("utf-8", "surrogateescape") for word in _words(line))
    config = Config()
    try:
        config.set(name, values)
    except ConfigError:
        return None
    if isinstance(config.value(name.lower()), dict):
        config.given = {part for part in config.value(name.lower()) if part in split_at_spaces(" ".join(values))}
    return config


def _words(line: bytes) -> list[bytes]:
    return split_words(line) or []


def _name(line: bytes) -> str:
    """Return the name of the parameter that a line sets, in lower case; empty for a comment."""
    words = _words(line) if not line.lstrip().startswith(b"#") else []
    return words[0].decode("utf-8", "replace").lower() if words else ""


def _line(name: str, config: Config, parts: Mapping[str, object] | None = None) -> bytes:
    words = config.words(name) if parts is None else config.words_of(name, parts)
    return b" ".join([name.encode(), *(_quote(word.encode("utf-8", "surrogateescape")) for word in words)])


def _quote(raw: bytes) -> bytes:
    if _PLAIN.match(raw) and not raw.startswith(b"#"):
        return raw
    return b'"%b"' % b"".join(b"%c" % byte if _needs_no_escape(byte) else b"\\x%02x" % byte for byte in raw)


def _needs_no_escape(byte: int) -> bool:
    """Return whether a byte needs no escape between quotes."""
    return 0x20 <= byte < 0x7F and byte not in b'"\\'
