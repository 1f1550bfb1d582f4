"""CONFIG REWRITE: writes the current configuration to the file.

Comments, order and unchanged lines are kept. A line with a changed value is replaced in its place. Parameters that
differ from their default and have no line yet come last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvpage_server.configuration.config import Config
from kvpage_server.core.inline import split_words

_HEADING = b"# Written by CONFIG REWRITE"
_PLAIN = re.compile(rb"[!#-&(-\[\]-~]+\Z")  # printable, without quotes, backslashes and spaces


def rewritten(old: bytes, config: Config, users: Sequence[bytes]) -> bytes:
    """The file `old` with the values of `config`, and these `user` lines, as ACL LIST has them, in place of its own."""
    known = config.parameters()
    lines: list[bytes] = []
    seen = {"user"}
    for line in old.splitlines():
        name = _name(line)
        if name not in known:
            lines.append(line)
        elif name not in seen:
            seen.add(name)
            lines.append(_line(name, config))
    default = Config()
    added = [_line(name, config) for name in known if name not in seen and config.words(name) != default.words(name)]
    added += [b" ".join(map(_quote, user.split(b" "))) for user in users]
    if added and _HEADING not in lines:
        lines += [b"", _HEADING]
    return b"".join(line + b"\n" for line in lines + added)


def _name(line: bytes) -> str:
    """The parameter that a line sets; empty for a comment."""
    words = split_words(line) if not line.lstrip().startswith(b"#") else None
    return words[0].decode("utf-8", "replace").lower() if words else ""


def _line(name: str, config: Config) -> bytes:
    return b" ".join([name.encode(), *(_quote(word.encode("utf-8", "surrogateescape")) for word in config.words(name))])


def _quote(raw: bytes) -> bytes:
    if _PLAIN.match(raw) and not raw.startswith(b"#"):
        return raw
    return b'"%b"' % b"".join(b"%c" % byte if _may_stand(byte) else b"\\x%02x" % byte for byte in raw)


def _may_stand(byte: int) -> bool:
    """Whether it can stand between quotes unchanged."""
    return 0x20 <= byte < 0x7F and byte not in b'"\\'
