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
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvpage_server.page import DType, checksum
from kvpage_server.snapshot.errors import BadFile
from kvpage_server.snapshot.format.entries import Entry, entry_of
from kvpage_server.system.durable import replacing

FORMAT = "kvpage-dump"
VERSION = "1"
MAX_HEADER = 100_000_000  # bytes: what safetensors' own readers take
_ALIGNMENT = 64
_NO_DIGEST = "0" * 16
_ITEMSIZE = {dtype.safetensors: dtype.itemsize for dtype in DType}
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
    return FileContents(path, data + start, data, digest, of, spans)


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
    """The header of a file; its data is not read. Raises BadFile, OSError."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise BadFile("it is torn, or no safetensors file")
        text = file.read(length)
    header = _header(text)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise BadFile("it is not of kvpage dump")
    if metadata.get("version") != VERSION:
        raise BadFile(f"its format is version {metadata.get('version')}, only {VERSION} is understood")
    digest = str(metadata.get("digest"))
    if _digest(text.replace(_digest_field(digest), _digest_field(_NO_DIGEST), 1)) != digest:
        raise BadFile("its header is corrupt")
    try:
        spans = list(_spans(header, metadata))
        of = DumpOf(int(metadata["dumped_ms"]), metadata["selection"])
        contents = FileContents(path, size, 8 + length, digest, of, spans)
    except (KeyError, TypeError, ValueError) as error:
        raise BadFile(f"its header makes no sense: {error}") from error
    end = contents.data + (spans[-1].stop if spans else 0)
    if size != end:
        raise BadFile(f"it is torn: it has {size} bytes, its header tells of {end}")
    return contents


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise BadFile("it is torn, or no safetensors file")
    return header


def _spans(header: dict[str, Any], metadata: dict[str, str]) -> Iterator[EntrySpan]:
    """The tensors, as they lie one after the other."""
    end = 0
    for name, told in header.items():
        start, stop = told["data_offsets"]
        if start != end or stop - start != prod(told["shape"]) * _ITEMSIZE[told["dtype"]]:
            raise ValueError(f"{name} does not lie where it should")
        entry = entry_of(name, metadata[name], stop - start)
        if (entry.element, entry.shape) != (told["dtype"], told["shape"]):
            raise ValueError(f"{name} is not of the type and shape that it is told to be")
        yield EntrySpan(entry, start, stop)
        end = stop


def read_data(contents: FileContents) -> memoryview:
    """A file's data. Raises BadFile if the file has become shorter, OSError."""
    data = np.empty(contents.size - contents.data, np.uint8).data
    with open(contents.path, "rb", buffering=0) as file:
        file.seek(contents.data)
        filled = 0
        while filled < len(data):
            count = file.readinto(data[filled:])
            if not count:
                raise BadFile("it has become shorter while it was read")
            filled += count
    return data


def intact(span: EntrySpan, data: memoryview) -> list[bool]:
    """Whether each page of a tensor, or the string, matches its checksum."""
    start = span.start
    found = []
    for size, digest in zip(span.entry.sizes, span.entry.checksums, strict=True):
        found.append(checksum(data[start : start + size]) == digest)
        start += size
    return found
