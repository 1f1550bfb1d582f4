"""A dump back into a running server.

A part of a file is read, hashed and planned while the one before is sent. Values that do not match their checksum are
not sent. A bad file, a bad entry of a file and a refused value are left out and named, and the rest is restored.
Whole blocks are sent with KVBLOCKSET, everything else with SET. Strings come last, so that the pages are there when a
string refers to them (a seal, a manifest).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvpage_server.client.errors import Refused
from kvpage_server.page import HEADER_SIZE
from kvpage_server.snapshot.ahead import ahead
from kvpage_server.snapshot.amount import Amount
from kvpage_server.snapshot.errors import NOT_WRITTEN, BadFile, Failures
from kvpage_server.snapshot.format import directory
from kvpage_server.snapshot.format.directory import Summary
from kvpage_server.snapshot.format.entries import FOREVER, PageTensor
from kvpage_server.snapshot.format.files import EntrySpan, opened
from kvpage_server.snapshot.format.names import text_of
from kvpage_server.snapshot.parts import parts, read_part
from kvpage_server.snapshot.plan import Item, Plan, PlannedBlock, plan
from kvpage_server.snapshot.store import BATCH_BYTES, RunningStore, Writes, Written

_SHARE = 2  # a block that takes more than one part in so many of what all clients may hold goes page by page
_AROUND_BYTES = 1 << 10  # bytes of a SET besides its value
_KEYS_AT_ONCE = 1000  # keys written or asked about in one go
_BLOCKS_AT_ONCE = 100  # blocks asked about in one go

Done = Callable[[int], None]  # told how many bytes more are done


@dataclass(slots=True)
class Restored:
    """What a restore did."""

    amount: Amount = field(default_factory=Amount)
    there: int = 0  # keys that existed and were left
    expired: int = 0  # keys whose time was over when the dump was finished
    corrupt: Failures = field(default_factory=Failures)  # files, pages and strings that are not as they were written
    no_room: Failures = field(default_factory=Failures)  # pages and strings that the server has no room for
    refused: Failures = field(default_factory=Failures)  # pages and strings that the server refuses
    finished: bool = True  # whether the dump was


def restore(
    store: RunningStore,
    path: Path,
    requests: Collection[bytes] = (),
    *,
    replace: bool = False,
    done: Done = lambda count: None,
) -> Restored:
    """Send a dump, or the pages of some requests of it, to a server. Keys that exist there stay or, with `replace`, are
    replaced.

    Raises DumpError for a directory that holds no dump, OSError, and the errors of `kvpage_server.client.errors`.
    """
    with directory.locked(path, to_write=False):
        return _Restore(store, path, frozenset(requests), replace).run(done)


class _Write(NamedTuple):
    """What is being written: a block, a page or a string."""

    keys: list[bytes]
    are_pages: bool
    nbytes: int


class _Restore:
    def __init__(self, store: RunningStore, path: Path, requests: frozenset[bytes], replace: bool) -> None:
        self._store = store
        self._path = path
        self._requests = requests
        self._replace = replace
        self._restored = Restored()
        self._largest = store.largest_command()
        self._writes = Writes()
        self._waiting: list[_Write] = []

    def run(self, done: Done) -> Restored:
        for nbytes, part in ahead(self._plans()):
            for start in range(0, len(part.blocks), _BLOCKS_AT_ONCE):
                self._send_blocks(part.blocks[start : start + _BLOCKS_AT_ONCE])
            self._send_items(part.items)
            self._flush()
            done(nbytes)
        return self._restored

    def _plans(self) -> Iterator[tuple[int, Plan]]:
        """The commands for each part of each file, and the bytes of the part."""
        summary, corrupt = self._read_summary(), self._restored.corrupt
        for file, contents in directory.read_all(directory.files_of(self._path, summary), summary):
            if isinstance(contents, BadFile):
                corrupt.add(f"{file.name}: {contents}")
                continue
            for bad in contents.bad:
                corrupt.add(f"{bad}, in {file.name}")
            age_ms = max(summary.dumped_ms - contents.of.dumped_ms, 0) if summary else 0
            wanted = (span for span in contents.spans if self._is_wanted(span) and self._fits(span))
            try:
                with opened(contents) as data:
                    for part in parts(wanted, self._largest // _SHARE):
                        made = plan(part, read_part(data, contents, part), age_ms)
                        self._restored.expired += made.expired
                        for key in made.corrupt:
                            corrupt.add(f"{key} in {file.name}: {NOT_WRITTEN}")
                        yield sum(piece.nbytes for piece in part), made
            except BadFile as error:
                corrupt.add(f"{file.name}: {error}")

    def _read_summary(self) -> Summary | None:
        """Without a usable dump.json, the files of the directory are restored as those of an unfinished dump."""
        try:
            summary = directory.read_summary(self._path)
        except BadFile as error:
            self._restored.corrupt.add(str(error))
            summary = None
        self._restored.finished = summary is not None
        return summary

    def _is_wanted(self, span: EntrySpan) -> bool:
        return not self._requests or (isinstance(span.entry, PageTensor) and span.entry.first.req_id in self._requests)

    def _fits(self, span: EntrySpan) -> bool:
        """Whether the server takes a page of the tensor, or the string, in one command."""
        entry = span.entry
        nbytes = entry.body_size + (HEADER_SIZE if isinstance(entry, PageTensor) else len(entry.key))
        if nbytes <= self._largest - _AROUND_BYTES:
            return True
        size = entry.body_size
        self._restored.no_room.add(
            f"{entry.name:.300}, {size} bytes: the server takes {self._largest} at once (maxmemory-clients)"
        )
        return False

    def _send_blocks(self, blocks: list[PlannedBlock]) -> None:
        there: list[set[bytes]] = [set() for _ in blocks]
        has_strings = [False for _ in blocks]  # under keys of its pages
        if not self._replace:
            there = self._store.keys_of_blocks([(block.req_id, block.page) for block in blocks])
            has_strings = self._store.are_any_there(
                [() if had else [page.key for page in block.pages] for block, had in zip(blocks, there, strict=True)]
            )
        pages: list[Item] = []
        for block, had, has_string in zip(blocks, there, has_strings, strict=True):
            if had:  # it may have pages that are not in the dump: they stay
                pages += [page for page in block.pages if page.key not in had]
                self._restored.there += sum(page.key in had for page in block.pages)
                continue
            if has_string or block.shape.nbytes > self._largest // _SHARE:  # a block takes the place of strings, too
                pages += block.pages
                continue
            ttl = 0 if block.ttl_left_ms == FOREVER else -(-block.ttl_left_ms // 1000)
            self._writes.set_block(block.req_id, block.page, block.shape, ttl, block.body)
            self._wrote(_Write([page.key for page in block.pages], True, block.shape.nbytes))
        self._set(pages)

    def _send_items(self, items: list[Item]) -> None:
        for start in range(0, len(items), _KEYS_AT_ONCE):
            some = items[start : start + _KEYS_AT_ONCE]
            if not self._replace:
                there = self._store.are_there([item.key for item in some])
                self._restored.there += sum(there)
                some = [item for item, is_there in zip(some, there, strict=True) if not is_there]
            self._set(some)

    def _set(self, items: list[Item]) -> None:
        for key, value, left, is_page in items:
            self._writes.set(key, value, left, only_new=not self._replace)
            self._wrote(_Write([key], is_page, sum(map(len, value))))

    def _wrote(self, write: _Write) -> None:
        self._waiting.append(write)
        if self._writes.nbytes >= BATCH_BYTES or self._writes.count >= _KEYS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        for written, write in zip(self._store.write(self._writes), self._waiting, strict=True):
            if written is Written.THERE:
                self._restored.there += 1
            elif written is Written.NO_ROOM:
                for key in write.keys:
                    self._restored.no_room.add(text_of(key))
            elif isinstance(written, Refused):
                for key in write.keys:
                    self._restored.refused.add(f"{text_of(key)}: {written}")
            else:
                self._restored.amount.add(write.nbytes, len(write.keys), are_pages=write.are_pages)
        self._writes, self._waiting = Writes(), []
