"""What lies in a dump, without a server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvpage_server.snapshot.errors import NOT_WRITTEN, BadFile, Failures
from kvpage_server.snapshot.format import directory
from kvpage_server.snapshot.format.directory import Summary
from kvpage_server.snapshot.format.entries import FOREVER, Entry, PageTensor
from kvpage_server.snapshot.format.files import FileContents, intact, opened
from kvpage_server.snapshot.format.names import text_of


@dataclass(slots=True)
class Holding:
    """The pages of a request in a dump, or the plain strings."""

    blocks: set[int] = field(default_factory=set)
    count: int = 0  # pages or strings
    nbytes: int = 0
    kinds: set[str] = field(default_factory=set)  # of elements
    soonest_ms: int = FOREVER  # the least time that one of them had to live

    def add(self, entry: Entry, nbytes: int) -> None:
        self.count += len(entry.checksums)
        self.nbytes += nbytes
        if isinstance(entry, PageTensor):
            self.blocks.add(entry.first.page)
            self.kinds.add(entry.geometry.dtype.name.lower())
        left = [ms for ms in (*entry.ttl_left_ms, self.soonest_ms) if ms != FOREVER]
        self.soonest_ms = min(left, default=FOREVER)


@dataclass(slots=True)
class Inspected:
    """What was found."""

    summary: Summary | None
    sizes: list[int] = field(default_factory=list)  # of the files, in bytes
    requests: dict[bytes, Holding] = field(default_factory=lambda: defaultdict(Holding))
    strings: Holding = field(default_factory=Holding)
    planes: list[PageTensor] = field(default_factory=list)  # of the requests that were asked for
    corrupt: Failures = field(default_factory=Failures)


Done = Callable[[int], None]  # told how many bytes more are done


def inspect(
    path: Path, requests: Collection[bytes] = (), *, verify: bool = False, done: Done = lambda count: None
) -> Inspected:
    """What the files of a directory, or one file, say; with `verify` their data is hashed too.

    Raises DumpError for a directory that holds no dump, OSError.
    """
    found, files = Inspected(None), [path]
    if path.is_dir():
        try:
            found.summary = directory.read_summary(path)
        except BadFile as error:
            found.corrupt.add(str(error))
        files = directory.files_of(path, found.summary)
    else:
        path.stat()
    for file, contents in directory.read_all(files, found.summary):
        try:
            if isinstance(contents, BadFile):
                raise contents
            for bad in contents.bad:
                found.corrupt.add(f"{bad}, in {file.name}")
            _add(found, contents, frozenset(requests))
            if verify:
                for key in _corrupt(contents):
                    found.corrupt.add(f"{key} in {file.name}: {NOT_WRITTEN}")
        except BadFile as error:
            found.corrupt.add(f"{file.name}: {error}")
        else:
            done(contents.size)
    return found


def _add(found: Inspected, contents: FileContents, requests: frozenset[bytes]) -> None:
    found.sizes.append(contents.size)
    for entry, start, stop in contents.spans:
        if not isinstance(entry, PageTensor):
            found.strings.add(entry, stop - start)
        elif not requests or entry.first.req_id in requests:
            found.requests[entry.first.req_id].add(entry, stop - start)
            if requests:
                found.planes.append(entry)


def _corrupt(contents: FileContents) -> Iterator[str]:
    """The keys of pages and strings that do not match their checksum."""
    with opened(contents) as file:
        for span in contents.spans:
            entry = span.entry
            for number, is_intact in enumerate(intact(file, contents, span)):
                if not is_intact:
                    yield text_of(bytes(entry.key(number)) if isinstance(entry, PageTensor) else entry.key)
