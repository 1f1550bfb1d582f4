"""The directory of a dump: its files, and ``dump.json``, which is written last and says which files are the dump.

Without it the dump has not been finished. While one is brought up to date it still tells of the files that there were,
which stay until the new ``dump.json`` has taken its place. So a directory holds the old dump or the new one, never a
mixture, whenever the machine stops.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from kvpage_server.snapshot.errors import BadFile, DumpError
from kvpage_server.snapshot.format.files import FORMAT, VERSION, FileContents, read_contents
from kvpage_server.system.durable import flush_directory, replacing

SUMMARY = "dump.json"
_FILE = re.compile(r"(?:pages|strings)-(\d{6,})\.safetensors\Z")


@dataclass(frozen=True, slots=True)
class Summary:
    """What dump.json says of a finished dump."""

    dumped_ms: int  # when it began, unix milliseconds of the server
    selection: str
    files: dict[str, str]  # names and digests


@contextmanager
def locked(path: Path, *, to_write: bool) -> Iterator[None]:
    """Lock a directory against writers, and with `to_write` also against readers. Raises DumpError, OSError."""
    directory = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, (fcntl.LOCK_EX if to_write else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DumpError(f"another kvpage dump or restore is using {path}") from None
        yield
    finally:
        os.close(directory)


def read_summary(path: Path) -> Summary | None:
    """The content of dump.json; None if there is none. Raises DumpError, OSError."""
    try:
        told = json.loads((path / SUMMARY).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DumpError(f"{path / SUMMARY} is corrupt: {error}") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise DumpError(f"{path / SUMMARY} is not of kvpage dump")
    if told.get("version") != VERSION:
        raise DumpError(f"{path / SUMMARY} is of format version {told.get('version')}, only {VERSION} is understood")
    try:
        summary = Summary(int(told["dumped_ms"]), str(told["selection"]), dict(told["files"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DumpError(f"{path / SUMMARY} is corrupt: {error!r}") from None
    if not all(map(_FILE.match, summary.files)):
        raise DumpError(f"{path / SUMMARY} is corrupt: it names other files than those of a dump")
    return summary


def write_summary(path: Path, summary: Summary) -> None:
    """Declare the dump finished. Raises OSError."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(summary)}, indent=1).encode() + b"\n"
    with replacing(path / SUMMARY) as file:
        file.write(text)


def dump_files(path: Path) -> list[Path]:
    """The files with names of a dump, in the order of writing: pages before strings."""
    return sorted(file for file in path.iterdir() if _FILE.match(file.name))


def new_numbers(path: Path) -> Iterator[int]:
    """Numbers for new files, on from those of the existing ones."""
    return count(1 + max((int(found[1]) for file in path.iterdir() if (found := _FILE.match(file.name))), default=0))


def remove(files: Iterable[Path]) -> None:
    """Raises OSError."""
    parents = set()
    for file in files:
        file.unlink()
        parents.add(file.parent)
    for parent in parents:
        flush_directory(parent)


def read_all(files: Iterable[Path], summary: Summary | None) -> Iterator[tuple[Path, FileContents | BadFile]]:
    """Each file's header, or what is wrong with it. `summary` has its digest. Raises OSError."""
    for file in files:
        try:
            contents = read_contents(file)
            if summary is not None and summary.files.get(file.name, contents.digest) != contents.digest:
                raise BadFile("it is another file than the one that was written")
        except FileNotFoundError:
            yield file, BadFile("it is missing")
        except BadFile as error:
            yield file, error
        else:
            yield file, contents


def files_of(path: Path, summary: Summary | None) -> list[Path]:
    """The files of a dump, pages before strings. Raises DumpError if there is no dump, OSError."""
    if summary is not None:
        return [path / name for name in sorted(summary.files)]
    files = dump_files(path)
    if not files:
        raise DumpError(f"{path} holds no dump")
    return files
