"""One file of a dump: safetensors, written and read at the level of bytes.

A file is 8 bytes, the little-endian length of the header; the header, JSON, padded with spaces so that the data is
aligned to 64 bytes; and the data of its tensors without gaps (https://github.com/huggingface/safetensors#format). Those
of wider elements come first: readers that map a file want each tensor aligned to its elements.

Every byte is vouched for: the tensors' by the checksums of the pages and strings in them, the header's by `digest` in
its metadata, XXH3-64 of the header with 16 zeros in place of the digest.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvpage_server.bounded import json_bounds
from kvpage_server.bounded.files import open_regular
from kvpage_server.page import MAX_BLOCK_PAGES, DType
from kvpage_server.snapshot.errors import BadFile
from kvpage_server.snapshot.format.entries import Entry, entry_of
from kvpage_server.system.durable import replacing

FORMAT = "kvpage-dump"
VERSION = "1"
MAX_HEADER = 64 << 20  # bytes
MAX_TENSORS = 100_000  # of a file that is read; a dump writes fewer
MAX_PAGES = 1_000_000  # of a file that is read; a dump writes fewer
LAST_MOMENT = 253_370_764_800_000  # unix milliseconds: the year 9999, the last that Python's clock can show
_ALIGNMENT = 64
_NO_DIGEST = "0" * 16
_ITEMSIZE = {dtype.safetensors: dtype.itemsize for dtype in DType}
_MAX_DIMENSIONS = 8
_READ_BYTES = 8 << 20
_MOMENT = re.compile("[0-9]{1,15}")
_GATHER = 512  # pieces in one writev; IOV_MAX is 1024


class Tensor(NamedTuple):
    """An entry and its bytes, in pieces."""

    entry: Entry
    pieces: list[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.pieces))


class EntrySpan(NamedTuple):
    """An entry, and the place of its tensor in the data."""

    entry: Entry
    start: int
    stop: int


class DumpOf(NamedTuple):
    """What a file is a part of: the dump that began then, unix milliseconds of the server, of those keys.

    The times to live in the file are those of then.
    """

    dumped_ms: int
    selection: str


@dataclass(frozen=True, slots=True)
class FileContents:
    """What the header of a file says."""

    path: Path
    size: int  # bytes of the whole file
    data: int  # where the data begins
    digest: str
    of: DumpOf
    spans: list[EntrySpan]
    bad: list[str]  # tensors whose notes make no sense: their names, and why


# -- writing -----------------------------------------------------------------------------------------------------------


def write_file(path: Path, tensors: list[Tensor], of: DumpOf) -> FileContents:
    """Write a file. It appears complete or not at all. Raises OSError."""
    tensors = sorted(tensors, key=lambda tensor: -_ITEMSIZE[tensor.entry.element])
    facts = {"format": FORMAT, "version": VERSION, "dumped_ms": str(of.dumped_ms), "selection": of.selection}
    metadata = {"digest": _NO_DIGEST, **facts}
    header: dict[str, Any] = {"__metadata__": metadata}
    spans = []
    start = 0
    for entry, pieces in tensors:
        stop = start + sum(map(len, pieces))
        metadata[entry.name] = json.dumps(entry.note())
        header[entry.name] = {"dtype": entry.element, "shape": entry.shape, "data_offsets": [start, stop]}
        spans.append(EntrySpan(entry, start, stop))
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    digest = _digest(text)
    text = text.replace(_digest_field(_NO_DIGEST), _digest_field(digest), 1)
    length = len(text).to_bytes(8, "little")
    pieces = [memoryview(length), memoryview(text), *(piece for _, pieces in tensors for piece in pieces)]
    with replacing(path) as file:
        _write(file.fileno(), [piece for piece in pieces if len(piece)])
    data = 8 + len(text)
    return FileContents(path, data + start, data, digest, of, spans, [])


def _write(file: int, pieces: list[memoryview]) -> None:
    at = 0
    while at < len(pieces):
        written = os.writev(file, pieces[at : at + _GATHER])
        while at < len(pieces) and written >= len(pieces[at]):
            written -= len(pieces[at])
            at += 1
        if written:
            pieces[at] = pieces[at][written:]


def _digest_field(digest: str) -> bytes:
    return b'"digest":"%b"' % digest.encode()


def _digest(header: bytes) -> str:
    """The digest of a header that has zeros in its place."""
    return xxhash.xxh3_64_hexdigest(header)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_contents(path: Path) -> FileContents:
    """The header of a file; its data is not read. Raises BadFile."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise BadFile("it is torn, or no safetensors file")
            if length > MAX_HEADER:
                raise BadFile(f"its header has {length} bytes, and at most {MAX_HEADER} are read")
            text = file.read(length)
    except FileNotFoundError:
        raise BadFile("it is missing") from None
    except OSError as error:
        raise BadFile(f"it cannot be read: {error.strerror}") from None
    try:
        return _contents(path, size, text)
    except BadFile:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadFile(f"its header makes no sense: {_reason(error)}") from error


def _contents(path: Path, size: int, text: bytes) -> FileContents:
    """Raises BadFile, and KeyError, TypeError, ValueError or AttributeError for a malformed header."""
    header, metadata = _header(text)
    digest = str(metadata.get("digest"))
    if not _is_intact(text, digest):
        raise BadFile("its header is corrupt")
    dumped_ms = metadata["dumped_ms"]
    if not _MOMENT.fullmatch(dumped_ms) or int(dumped_ms) > LAST_MOMENT:
        raise ValueError(f"dumped_ms must be between 0 and {LAST_MOMENT}, got {dumped_ms!r:.40}")
    of = DumpOf(int(dumped_ms), metadata["selection"])
    contents = FileContents(path, size, 8 + len(text), digest, of, [], [])
    end = pages = 0
    for name, told in header.items():
        start, end = end, _end_of(told, end)
        try:
            entry = entry_of(name, metadata[name], end - start, min(MAX_BLOCK_PAGES, MAX_PAGES - pages))
            if (entry.element, entry.shape) != (told["dtype"], told["shape"]):
                raise ValueError("its type or shape is not that of its note")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            contents.bad.append(f"{name:.300}: {_reason(error)}")
        else:
            pages += len(entry.checksums)
            contents.spans.append(EntrySpan(entry, start, end))
    if size != contents.data + end:
        raise BadFile(f"it is torn: it has {size} bytes, its header tells of {contents.data + end}")
    return contents


def _header(text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors and the metadata. Raises BadFile."""
    try:
        header = json_bounds.parse(text, containers=3 * MAX_TENSORS, strings=8 * MAX_TENSORS, values=12 * MAX_TENSORS)
    except json_bounds.TooMuchError as error:
        raise BadFile(f"its header has {error}") from None
    except ValueError as error:
        raise BadFile(f"it is torn, or no safetensors file: {error}") from None
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise BadFile("it is not of kvpage dump")
    if metadata.get("version") != VERSION:
        raise BadFile(f"its format is version {metadata.get('version')!r:.20}, only {VERSION} is understood")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not text")
    return header, metadata


def _is_intact(header: bytes, digest: str) -> bool:
    before, field, after = header.partition(_digest_field(digest))
    found = xxhash.xxh3_64(before)
    found.update(_digest_field(_NO_DIGEST) if field else b"")
    found.update(after)
    return found.hexdigest() == digest


def _end_of(told: dict[str, Any], begin: int) -> int:
    """The end of a tensor's data, if it begins there and is as long as its shape. Raises ValueError, KeyError."""
    numbers, shape = told["data_offsets"], told["shape"]
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in [*numbers, *shape[:_MAX_DIMENSIONS]]):
        raise ValueError("sizes and offsets are whole numbers of 0 or more")
    start, end = numbers
    if len(shape) > _MAX_DIMENSIONS or start != begin or end - start != prod(shape) * _ITEMSIZE[told["dtype"]]:
        raise ValueError("the tensors do not lie one after the other, each as long as its shape")
    return int(end)


def _reason(error: Exception) -> str:
    return f"{error}"[:200] if isinstance(error, ValueError) else f"{error!r:.200}"


@contextmanager
def opened(contents: FileContents) -> Iterator[BufferedReader]:
    """The file, to read its data. Raises BadFile."""
    try:
        file = open_regular(contents.path)
    except OSError as error:
        raise BadFile(f"it cannot be read: {error.strerror}") from None
    with file:
        yield file


def read_data(file: BufferedReader, contents: FileContents, start: int, stop: int) -> memoryview:
    """The bytes of a file's data from `start` to before `stop`. Raises BadFile."""
    data = np.empty(stop - start, np.uint8).data
    filled = 0
    while filled < len(data):
        try:
            count = os.preadv(file.fileno(), [data[filled:]], contents.data + start + filled)
        except OSError as error:
            raise BadFile(f"it cannot be read: {error.strerror}") from None
        if not count:
            raise BadFile("it has become shorter while it was read")
        filled += count
    return data


def intact(file: BufferedReader, contents: FileContents, span: EntrySpan) -> Iterator[bool]:
    """Whether each page of a tensor, or the string, matches its checksum. Reads some megabytes at a time."""
    size = span.entry.body_size
    for number, digest in enumerate(span.entry.checksums):
        found, start = xxhash.xxh3_64(), span.start + number * size
        for at in range(start, start + size, _READ_BYTES):
            found.update(read_data(file, contents, at, min(at + _READ_BYTES, start + size)))
        yield found.intdigest() == digest
