"""Generator of docs/configuration.md from `Config`: ``python -m conf.parameters`` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvpage_server.configuration.config import Config
from kvpage_server.configuration.kinds import Kind

_OPENING = """\
# Configuration

<!-- Made from `Config` by `python -m conf.parameters`; do not edit. -->

The syntax is that of redis.conf. A line has a parameter's name and its values. `#` begins a comment line. A value with
spaces is written `"..."` or `'...'`. Sizes can have the units `kb`, `mb` and `gb` (1024) or `k`, `m` and `g` (1000). If
a parameter is unknown or its value is not of the kind below, the server does not start, and the error has the line's
number and says what is allowed. Other errors name the parameter, or the address that cannot be used. This checks a file
without starting the server:

```console
$ kvpage-server --check-config conf/kvpage.conf
the configuration is valid
```

Every parameter can also be given on the command line, where it overrides the file. If one is given twice, the last
value counts, as in redis-server; `user`, `quota` and `client-output-buffer-limit` add to a list. The file can be left
out:

```console
$ kvpage-server conf/kvpage.conf --port 9222 --maxmemory 8gb
$ kvpage-server --port 0 --loglevel warning
```

Relative file names refer to `dir`. The file, and that of `aclfile`, must be a regular file of at most 64 MB. Numbers
have ASCII digits.

The table has the defaults. Without a file, two of them differ. `maxmemory` is a quarter of the machine's memory, or of
its control group's. `dir` is the platform's directory for data, `~/.local/share/kvpage` on Linux and
`~/Library/Application Support/kvpage` on macOS; relative file names on the command line then refer to the directory in
which the server was started.

Parameters marked *running* can be changed while the server runs, and written back to the file:

```console
$ redis-cli -p 9221 CONFIG SET maxmemory 2gb
OK
$ redis-cli -p 9221 CONFIG GET maxmemory
1) "maxmemory"
2) "2147483648"
```

`CONFIG REWRITE` keeps the file's comments and order, and the lines that have not changed. It writes users with hashes
instead of passwords, and, as Redis does, `dir` as an absolute path, the `maxclients` that the limit of file descriptors
(`ulimit -n`) has left at the start, and a file in place of a symbolic link.

| parameter | default | meaning | allowed | change |
|---|---|---|---|---|
"""


def reference() -> str:
    """Return the text of docs/configuration.md."""
    return _OPENING + "".join(_rows())


def _rows() -> Iterator[str]:
    default = Config()
    for name, declared in Config.parameters().items():
        value = " ".join(map(_with_unit, default.words(name)))
        allowed = _allowed(declared.metadata["kind"])
        when = "running" if Config.is_mutable(name) else "start"
        yield f"| `{name}` | {f'`{value}`' if value else ''} | {declared.metadata['doc']} | {allowed} | {when} |\n"


def _with_unit(word: str) -> str:
    """Return a word; if it is a number of whole mebibytes or gibibytes, with its unit."""
    size = int(word) if word.isdigit() else 0
    for unit, shift in (("gb", 30), ("mb", 20)):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return word


def _allowed(kind: Kind) -> str:
    """Return the allowed values of a kind, from its error for the value "?"; empty if it accepts any text."""
    try:
        kind.read(["?"])
    except ValueError as error:
        allowed = re.split("[,;] got ", str(error))[0].removeprefix("must be ")
        return re.sub(r"a whole number between (\S+) and (\S+)", r"\1 to \2", allowed)
    return ""


if __name__ == "__main__":
    print(reference(), end="")
