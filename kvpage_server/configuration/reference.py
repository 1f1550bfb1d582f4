"""docs/configuration.md, made from `Config`: ``python -m kvpage_server.configuration.reference`` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvpage_server.configuration.config import Config, Kind

_OPENING = """\
# Configuration

<!-- Made from `Config` by `python -m kvpage_server.configuration.reference`; do not edit. -->

The syntax is redis.conf's: a line has a parameter's name and its values, `#` begins a comment line, and `"..."` and
`'...'` hold spaces together. Sizes take `kb`, `mb` and `gb` (1024) or `k`, `m` and `g` (1000). A line that cannot be
understood is refused with its number and what is allowed, and the server does not start:

```console
$ kvpage-server --check-config conf/kvpage.conf
the configuration is valid
```

Every parameter can be given on the command line too, and then wins over the file; the file may be left out:

```console
$ kvpage-server conf/kvpage.conf --port 9222 --maxmemory 8gb
$ kvpage-server --port 0 --loglevel warning
```

Without a file, `maxmemory` is a quarter of the machine's memory (or of what its control group may have), and `dir` the
directory that the platform has for data, `~/.local/share/kvpage` on Linux and `~/Library/Application Support/kvpage` on
macOS, unless they are given. Names of files on such a command line mean those where it was typed. With a file, what it
does not say is as in the table.

What is marked *running* can be changed while the server runs, and written back into the file:

```console
$ redis-cli -p 9221 CONFIG SET maxmemory 2gb
OK
$ redis-cli -p 9221 CONFIG GET maxmemory
1) "maxmemory"
2) "2147483648"
```

`CONFIG REWRITE` keeps the file's comments and order.

| parameter | default | meaning | allowed | change |
|---|---|---|---|---|
"""


def reference() -> str:
    """The whole document."""
    return _OPENING + "".join(_rows())


def _rows() -> Iterator[str]:
    default = Config()
    for name, declared in Config.parameters().items():
        value = " ".join(map(_spelled, default.words(name)))
        allowed = _allowed(declared.metadata["kind"])
        when = "running" if Config.is_mutable(name) else "start"
        yield f"| `{name}` | {f'`{value}`' if value else ''} | {declared.metadata['doc']} | {allowed} | {when} |\n"


def _spelled(word: str) -> str:
    """Whole mebibytes and gibibytes with their unit."""
    size = int(word) if word.isdigit() else 0
    for unit, shift in (("gb", 30), ("mb", 20)):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return word


def _allowed(kind: Kind) -> str:
    """What a parameter says to a value that hardly one allows; empty for one that takes any text."""
    try:
        kind.read(["?"])
    except ValueError as error:
        allowed = re.split("[,;] got ", str(error))[0].removeprefix("must be ")
        return re.sub(r"a whole number between (\S+) and (\S+)", r"\1 to \2", allowed)
    return ""


if __name__ == "__main__":
    print(reference(), end="")
