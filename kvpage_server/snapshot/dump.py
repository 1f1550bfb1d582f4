"""The dump of a running server's keys into a directory.

Strings are read before pages, because clients write a string that refers to pages (a seal, a manifest) after the pages.
So if clients write during the dump, it may have a page without its seal, but no seal without its pages. The tensors of
a file are collected in memory, and written while the tensors of the next file are collected.

An existing dump in the directory is updated: a file stays if the server still has all its values, unchanged, and all
other values are written to new files.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import add, gt
from pathlib import Path

from kvpage_server.bounded import batches
from kvpage_server.client.errors import Refused
from kvpage_server.page import PageError, PageKey, checksum, decode_page
from kvpage_server.snapshot import format
from kvpage_server.snapshot.format import (
    FOREVER,
    BadFile,
    DumpError,
    DumpOf,
    Entry,
    Failures,
    FileContents,
    FoundPage,
    OtherVersion,
    PageTensor,
    String,
    Tensor,
    plane_name,
    string_name,
    tensors_of,
    text_of,
    write_file,
)
from kvpage_server.snapshot.store import BATCH_BYTES, KEY_COSTS, Amount, Listed, RunningStore, Value, read_ahead
from kvpage_server.system.durable import private_directory, remove_unfinished
from kvpage_server.system.text import name_shown

# -- Comparison of a file with a server: pages by their headers, without their bodies; strings by their values ---------

_PAGES_PER_QUERY = 1000  # pages that are compared in one round trip
_TOLERANCE = 2000  # milliseconds by which equal expiries may differ: the TTL of a restored block is in whole seconds


def is_unchanged(store: RunningStore, contents: FileContents) -> bool:
    """Return whether the server has all values of a file, unchanged, with the same expiry.

    Pages are compared by their headers; a page without a checksum counts as changed.
    """
    entries = [span.entry for span in contents.spans]
    pages = [entry for entry in entries if isinstance(entry, PageTensor)]
    strings = [entry for entry in entries if isinstance(entry, String)]
    expected = zip(
        chain.from_iterable(map(PageTensor.keys, pages)),
        chain.from_iterable(map(PageTensor.headers, pages)),
        chain.from_iterable(entry.ttl_left_ms for entry in pages),
        strict=True,
    )
    while some := list(islice(expected, _PAGES_PER_QUERY)):
        found = store.headers([bytes(key) for key, _, _ in some])
        if len(found) != len(some):
            return False
        for (_, header, left), (_, head, expires) in zip(some, found, strict=True):
            if not header.checksum or head != bytes(header) or not _is_same_expiry(contents, left, expires):
                return False
    for batch in batches(((entry, entry.size + KEY_COSTS) for entry in strings), BATCH_BYTES):
        found = store.values([entry.key for entry in batch])
        if len(found) != len(batch):
            return False
        for entry, (_, data, expires) in zip(batch, found, strict=True):
            if checksum(data) != entry.checksum or not _is_same_expiry(contents, entry.left_ms, expires):
                return False
    return True


def _is_same_expiry(contents: FileContents, left_ms: int, expires_ms: int) -> bool:
    """Return whether an expiry in a file is that of the server's key, with a difference of at most _TOLERANCE.

    `left_ms` counts in milliseconds from the start of the file's dump, `expires_ms` is in unix milliseconds of the
    server. Both are FOREVER without an expiry.
    """
    if FOREVER in (left_ms, expires_ms):
        return left_ms == expires_ms
    return abs(contents.of.dumped_ms + left_ms - expires_ms) <= _TOLERANCE


FILE_BYTES = 128 << 20  # bytes of tensors in a file; the tensors of two files are in memory
_MOST_OF_FILE = 20_000, 200_000, 8 << 20  # tensors, pages, bytes of names; a reader accepts five times as many

Done = Callable[[int], None]  # called with the number of newly processed keys


@dataclass(frozen=True, slots=True)
class Selection:
    """The keys to dump: the pages of some request ids, or the keys that match a glob pattern; by default all keys."""

    requests: tuple[bytes, ...] = ()
    match: bytes = b"*"

    def __str__(self) -> str:
        if self.requests:
            return shlex.join(chain.from_iterable(("--request", name_shown(name)) for name in sorted(self.requests)))
        return "everything" if self.match == b"*" else shlex.join(("--match", text_of(self.match)))


@dataclass(slots=True)
class Dumped:
    """Result of a dump."""

    amount: Amount = field(default_factory=Amount)
    files: int = 0
    kept: int = 0  # files that stayed unchanged
    stored: int = 0  # bytes of values in the files, fewer than those of `amount` if some are coded
    corrupt: Failures = field(default_factory=Failures)  # damaged pages, and too long keys

    def count(self, contents: FileContents) -> None:
        """Add a file of the dump, and its pages or strings, to the counts."""
        self.files += 1
        for entry, start, stop in contents.spans:
            pages = len(entry.checksums)
            self.amount.add(pages * entry.body_size, pages, are_pages=isinstance(entry, PageTensor))
            self.stored += stop - start


def dump(
    store: RunningStore,
    path: Path,
    selection: Selection,
    *,
    update: bool = False,
    code: bool = False,
    server: str = "",
    file_bytes: int = FILE_BYTES,
    done: Done = lambda count: None,
) -> Dumped:
    """Write the server's keys into a directory, which is created if necessary. Return the counts.

    With `update`, a finished dump in the directory is updated; an unfinished one is continued in any case. A file has
    about `file_bytes` bytes of tensors. With `code`, new files have pages in the lossless code. `server` is the URL to
    record. `done` is called with numbers of processed keys. Raises DumpError if the directory has a dump of another
    selection or server, or a finished one and `update` is not set; OSError; and the errors of
    `kvpage_server.client.errors`.
    """
    private_directory(path)
    with format.locked(path, to_write=True):
        remove_unfinished(path)
        return _Dump(store, path, selection, server, file_bytes, done, code).run(update)


def _size(group: list[Tensor]) -> tuple[int, ...]:
    """Return the size of a list of tensors: bytes of data, and the three numbers that _MOST_OF_FILE limits."""
    entries = [tensor.entry for tensor in group]
    pages, names = sum(len(entry.checksums) for entry in entries), sum(len(entry.name) for entry in entries)
    return sum(tensor.nbytes for tensor in group), len(group), pages, names


def _split_if_large(group: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors of a block in one list, or each in a list of its own if they exceed _MOST_OF_FILE."""
    if any(map(gt, _size(group)[1:], _MOST_OF_FILE)):
        return ([tensor] for tensor in group)
    return iter([group])


def _keys_of(entry: Entry) -> Iterable[PageKey | bytes]:
    return entry.keys() if isinstance(entry, PageTensor) else [entry.key]


class _Dump:
    def __init__(
        self,
        store: RunningStore,
        path: Path,
        selection: Selection,
        server: str,
        file_bytes: int,
        done: Done,
        code: bool,
    ) -> None:
        self._store = store
        self._server = server
        self._path = path
        self._selection = selection
        self._file_bytes = file_bytes
        self._done = done
        self._code = code
        self._dumped = Dumped()
        self._run_id = store.run_id()
        self._began_ms = store.now_ms()  # by the server's clock; TTLs count from then
        self._kept: dict[str, tuple[int, int]] = {}  # layers and heads, by tensor of files that stay

    def run(self, update: bool) -> Dumped:
        try:
            summary = format.read_summary(self._path)
        except BadFile as error:
            raise DumpError(f"{self._path}: {error}; name another directory") from None
        if summary is not None:
            self._check_selection(summary.selection)
            if not update:
                raise DumpError(
                    f"{self._path} holds a finished dump; continue with --update, which brings it up to date"
                )
            same_process = bool(self._run_id) and summary.run_id == self._run_id  # at another URL
            if summary.server and self._server and summary.server != self._server and not same_process:
                raise DumpError(
                    f"{self._path} holds a dump of {summary.server:.200}, not of {self._server}: "
                    "name another directory, or the old URL of a server that was restarted"
                )
        old = format.dump_files(self._path)
        files = dict(self._unchanged(old))
        self._dumped.kept = len(files)
        # Stale files that dump.json lists stay until the new dump.json is written. Others are left from a crash.
        stale = [file for file in old if file.name not in files]
        finished = summary.files if summary is not None else {}
        format.remove(file for file in stale if file.name not in finished)
        numbers = format.new_numbers(self._path)
        for kind, tensors in read_ahead(
            chain(self._files("strings", self._strings()), self._files("pages", self._pages()))
        ):
            file = self._path / f"{kind}-{next(numbers):06}.safetensors"
            contents = write_file(file, tensors, DumpOf(self._began_ms, str(self._selection)))
            self._dumped.count(contents)
            files[file.name] = contents.digest
        summary = format.Summary(self._began_ms, str(self._selection), files, self._server, self._run_id)
        format.write_summary(self._path, summary)
        format.remove(file for file in stale if file.name in finished)
        return self._dumped

    def _check_selection(self, other: str) -> None:
        if other != str(self._selection):
            raise DumpError(f"{self._path} holds a dump of {other}, not of {self._selection}: name another directory")

    # -- existing files ------------------------------------------------------------------------------------------------

    def _unchanged(self, files: list[Path]) -> Iterator[tuple[str, str]]:
        """Yield the name and digest of each file whose values the server still has, unchanged.

        Note the tensors of these files in `_kept`. Raises DumpError for a file of another version of the format: a
        newer one may have values that this server lacks.
        """
        for file, contents in format.read_all(files, None):
            if isinstance(contents, OtherVersion):
                raise DumpError(f"{file}: {contents}")
            if isinstance(contents, BadFile) or contents.bad:
                continue
            self._check_selection(contents.of.selection)
            entries = [span.entry for span in contents.spans]
            if self._is_unchanged(contents):
                self._dumped.count(contents)
                for entry in entries:
                    self._kept[entry.name] = entry.grid if isinstance(entry, PageTensor) else (0, 0)
                yield file.name, contents.digest
            else:
                self._report_lost([key for entry in entries for key in _keys_of(entry)])

    def _is_unchanged(self, contents: FileContents) -> bool:
        try:
            return is_unchanged(self._store, contents)
        except Refused:  # such as a string under the key of an index
            return False

    def _is_kept(self, key: PageKey) -> bool:
        layers, heads = self._kept.get(plane_name(key.req_id, key.page, key.kv_type), (0, 0))
        return (key.layer < layers and key.head < heads) or text_of(bytes(key)) in self._kept

    # -- new files -----------------------------------------------------------------------------------------------------

    def _files(self, kind: str, groups: Iterator[list[Tensor]]) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield (kind, tensors) for each new file. `groups` yields the tensors of each block or string.

        The tensors of a block are in one file, unless they exceed _MOST_OF_FILE.
        """
        tensors: dict[str, Tensor] = {}  # by name, because a scan may return a key twice
        used, most = _size([]), (self._file_bytes, *_MOST_OF_FILE)
        for group in chain.from_iterable(map(_split_if_large, groups)):
            more = _size(group)
            if tensors and any(map(gt, map(add, used, more), most)):
                yield kind, list(tensors.values())
                tensors, used = {}, _size([])
            tensors |= {tensor.entry.name: tensor for tensor in group}
            used = (*map(add, used, more),)
        if tensors:
            yield kind, list(tensors.values())

    def _strings(self) -> Iterator[list[Tensor]]:
        """Yield the tensor of each selected string that no kept file has; none if requests are selected."""
        if self._selection.requests:
            return
        for found in self._store.strings(self._selection.match):
            missing = [(key, size) for key, size in found if string_name(key) not in self._kept]
            self._done(len(found) - len(missing))
            for keys in batches(((key, size + KEY_COSTS) for key, size in missing), BATCH_BYTES):
                values = self._store.values(keys)
                self._report_lost([*set(keys).difference(value.key for value in values)])
                for value in values:
                    if len(name := string_name(value.key)) > _MOST_OF_FILE[-1]:
                        self._dumped.corrupt.add(
                            f"{name:.100}...: a key of {len(value.key)} bytes is too long for a dump"
                        )
                    else:
                        yield [self._string(value)]
                self._done(len(keys))

    def _pages(self) -> Iterator[list[Tensor]]:
        """Yield the tensors of each selected block, except pages that a kept file has."""
        requests: Iterable[bytes] = self._selection.requests or chain.from_iterable(self._store.requests())
        for blocks in batches(self._without_kept(self._store.blocks(requests, self._selection.match)), BATCH_BYTES):
            keys = list(chain.from_iterable(blocks))
            values = {value.key: value for value in self._store.values([bytes(key) for key in keys])}
            self._report_lost([key for key in keys if bytes(key) not in values])
            for block in blocks:
                found = [(key, values[bytes(key)]) for key in block if bytes(key) in values]
                yield self._tensors(found)
            self._done(len(keys))

    def _without_kept(self, blocks: Iterable[Listed]) -> Iterator[tuple[list[PageKey], int]]:
        """Yield for each block its page keys that no kept file has, and the cost of their transfer in bytes."""
        for keys, nbytes in blocks:
            missing = [key for key in keys if not self._is_kept(key)] if self._kept else keys
            self._done(len(keys) - len(missing))
            if missing:
                yield missing, nbytes + len(missing) * KEY_COSTS

    def _tensors(self, block: list[tuple[PageKey, Value]]) -> list[Tensor]:
        """Return the tensors of a block's undamaged pages, and of strings that have replaced listed pages."""
        pages, strings = [], []
        for key, value in block:
            try:
                pages.append(self._page(key, value))
            except PageError:  # it is damaged, or was a string when it was read
                is_page, now = self._store.look(key)
                if now is None:
                    self._report_lost([key])
                elif not is_page:
                    strings.append(self._string(now))
                else:
                    try:
                        pages.append(self._page(key, now))
                    except PageError as error:
                        self._dumped.corrupt.add(f"{text_of(bytes(key))}: {error}")
        return [*tensors_of(pages, code=self._code), *strings]

    def _report_lost(self, keys: Sequence[PageKey | bytes]) -> None:
        """Report those of these missing keys whose values were damaged on the server's disk."""
        for key in self._store.lost_by_damage(keys):
            self._dumped.corrupt.add(f"{text_of(key)}: it was damaged on the server's disk, and is lost")

    def _page(self, key: PageKey, value: Value) -> FoundPage:
        header, body = decode_page(value.data)
        if not header.names(key):
            raise PageError("its header names another page")
        return FoundPage(key, header, self._left(value.expires_ms), body)

    def _string(self, value: Value) -> Tensor:
        key, data, expires_ms = value
        return Tensor(String(key, len(data), self._left(expires_ms), checksum(data)), [data])

    def _left(self, expires_ms: int) -> int:
        """Return the TTL in milliseconds that a key had when the dump began, from its expiry in unix milliseconds.

        Return 0 if the key had expired, and FOREVER for FOREVER.
        """
        return expires_ms if expires_ms == FOREVER else max(expires_ms - self._began_ms, 0)
