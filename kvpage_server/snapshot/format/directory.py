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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from kvpage_server.bounded import json_bounds
from kvpage_server.bounded.files import read_regular
from kvpage_server.snapshot.errors import BadFile, DumpError
from kvpage_server.snapshot.format.files import FORMAT, LAST_MOMENT, VERSION, FileContents, read_contents
from kvpage_server.system.durable import flush_directory, replacing

SUMMARY = "dump.json"
_FILE = re.compile(r"(?:pages|strings)-([0-9]{6,})\.safetensors\Z")
_MAX_SUMMARY = 64 << 20  # bytes
_MAX_FILES = 400_000
_MEMBERS = 8  # lists and objects: more than dump.json has


@dataclass(frozen=True, slots=True)
class Summary:
    """What dump.json says of a finished dump."""

    dumped_ms: int  # when it began, unix milliseconds of the server
    selection: str
    files: dict[str, str]  # names and digests


@contextmanager
def locked(path: Path, *, to_write: bool) -> Iterator[None]:
    """Lock a directory against writers, and with `to_write` also against readers. Raises DumpError, OSError."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(directory, (fcntl.LOCK_EX if to_write else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DumpError(f"another kvpage dump or restore is using {path}") from None
        yield
    finally:
        os.close(directory)


def read_summary(path: Path) -> Summary | None:
    """The content of dump.json; None if there is none. Raises BadFile, which names dump.json."""
    try:
        raw = read_regular(path / SUMMARY, _MAX_SUMMARY)
        told = json_bounds.parse(raw, containers=_MEMBERS, strings=2 * _MAX_FILES, values=_MAX_FILES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadFile(f"{SUMMARY} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadFile(f"{SUMMARY} is corrupt: {error}") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise BadFile(f"{SUMMARY} is not of kvpage dump")
    if told.get("version") != VERSION:
        raise BadFile(f"{SUMMARY} is of format version {told.get('version')!r:.20}, only {VERSION} is understood")
    dumped_ms, selection, files = (told.get(name) for name in ("dumped_ms", "selection", "files"))
    if type(dumped_ms) is not int or not 0 <= dumped_ms <= LAST_MOMENT:
        raise BadFile(f"{SUMMARY} is corrupt: dumped_ms must be between 0 and {LAST_MOMENT}, got {dumped_ms!r:.40}")
    if not isinstance(selection, str) or not isinstance(files, dict):
        raise BadFile(f"{SUMMARY} is corrupt: selection must be a string and files an object")
    if not all(_FILE.match(name) and isinstance(digest, str) for name, digest in files.items()):
        raise BadFile(f"{SUMMARY} is corrupt: files must be names of files of a dump with their digests")
    return Summary(dumped_ms, selection, files)


def write_summary(path: Path, summary: Summary) -> None:
    """Declare the dump finished. Raises OSError."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(summary)}, indent=1).encode() + b"\n"
    with replacing(path / SUMMARY) as file:
        file.write(text)


def dump_files(path: Path) -> list[Path]:
    """The files with names of a dump, in the order of writing: pages before strings."""
    return sorted(file for file in path.iterdir() if _FILE.match(file.name))


def size_of(path: Path) -> int:
    """The bytes of the files with names of a dump, as far as they can be read. Raises OSError."""
    nbytes = 0
    for file in dump_files(path):
        with suppress(OSError):
            nbytes += file.stat().st_size
    return nbytes


def new_numbers(path: Path) -> Iterator[int]:
    """Numbers for new files, on from those of the existing ones."""
    return count(1 + max((int(found[1]) for file in path.iterdir() if (found := _FILE.match(file.name))), default=0))


def remove(files: Iterable[Path]) -> None:
    """Remove files; directories with such names stay. Raises OSError."""
    parents = set()
    for file in files:
        if file.is_dir() and not file.is_symlink():
            continue
        file.unlink()
        parents.add(file.parent)
    for parent in parents:
        flush_directory(parent)


def read_all(files: Iterable[Path], summary: Summary | None) -> Iterator[tuple[Path, FileContents | BadFile]]:
    """Each file's header, or the error in it. `summary` has its digest."""
    for file in files:
        try:
            contents = read_contents(file)
            if summary is not None and summary.files.get(file.name, contents.digest) != contents.digest:
                raise BadFile("it is another file than the one that was written")
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
