"""The format of a dump: its directory, its safetensors files, the tensors in them, and the encoding of their names.

This module does not access a server.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from io import BufferedReader
from itertools import count, groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

import numpy as np
import xxhash

from kvpage_server import bounded
from kvpage_server.bounded import open_regular, read_regular
from kvpage_server.lossless import decode_body, encode_block_body
from kvpage_server.page import (
    MAX_BLOCK_PAGES,
    MAX_I64,
    MAX_LAYER,
    MAX_TTL,
    BlockShape,
    DType,
    PageError,
    PageHeader,
    PageKey,
    Plane,
    checksum,
)
from kvpage_server.system.durable import flush_directory, replacing

# -- Errors of a dump --------------------------------------------------------------------------------------------------

_MOST_TEXTS = 10_000  # failures of which the texts are kept
NOT_WRITTEN = "its bytes are not those that were written"


class DumpError(ValueError):
    """Error: a directory cannot be dumped into or restored from. The message has the reason and a remedy."""


class BadFile(DumpError):
    """Error: a file is incomplete, damaged, or not from `kvpage dump`. The message does not name the file."""


class OtherVersion(BadFile):
    """Error: a file is of another version of the format."""


def _check_version(version: object, known: tuple[str, ...]) -> None:
    """Raise OtherVersion for a version that is not in `known`, BadFile for a value that is no version."""
    if version in known:
        return
    if isinstance(version, str) and version.isascii() and version.isdigit():
        raise OtherVersion(f"it is of version {version:.20} of the format; this kvpage reads {' and '.join(known)}")
    raise BadFile(f"it is corrupt: version must be digits, got {json.dumps(version)[:40]}")


@dataclass(slots=True)
class Failures:
    """Omitted files, pages or strings: their number, and a text with name and reason for the first _MOST_TEXTS."""

    count: int = 0
    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.count += 1
        if self.count <= _MOST_TEXTS:
            self.texts.append(text)


# -- Names of tensors --------------------------------------------------------------------------------------------------
#
# ``kv:{req_id}:{layer}:{head}:{page}:{kv_type}``  a page: its key
# ``kv:{req_id}:*:*:{page}:{kv_type}``             a plane of a block: the pattern that its keys match
# ``string:{key}``                                 a string
#
# ``:coded`` after the name of a page or a plane: the tensor has its code (docs/page-code.md), in bytes.
#
# Keys are bytes and names are text: a byte that is not part of UTF-8, and ``%`` itself, is encoded as ``%XX``.

_CODED = ":coded"
_FOREIGN = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as surrogateescape decodes them


def text_of(raw: bytes) -> str:
    """Return bytes as text: UTF-8 stays readable, other bytes and `%` become `%XX`. `bytes_of` is the inverse."""
    text = raw.replace(b"%", b"%25").decode("utf-8", "surrogateescape")
    return _FOREIGN.sub(lambda found: f"%{ord(found[0]) - 0xDC00:02X}", text)


def bytes_of(text: str) -> bytes:
    """Return the bytes of a text from `text_of`."""
    return unquote_to_bytes(text)


def plane_name(req_id: bytes, page: int, kv_type: int) -> str:
    """Return the name of a plane's tensor."""
    return f"kv:{text_of(req_id)}:*:*:{page}:{kv_type}"


def string_name(key: bytes) -> str:
    """Return the name of a string's tensor."""
    return f"string:{text_of(key)}"


# -- Entries: the tensors of a dump, and their notes in the file's metadata --------------------------------------------
#
# A note is a JSON object under the tensor's name, with these fields for a page or a plane:
#
#     request, page, kv_type, dtype, page_size, head_dim
#     layer, head           of a page; or layers, heads, the numbers of a plane's layers and heads
#     created_ms, ttl       unix milliseconds of the write, and the seconds that were given with it
#     ttl_left_ms           TTL at the start of the dump; -1 for no expiry
#     checksum              XXH3-64 of the body, hexadecimal
#     unchecked             true for a page that was stored without a checksum: the dump has computed `checksum`
#     code                  "lossless" if the tensor has a code instead of the pages
#
# Each field from created_ms to unchecked is one value or, if the pages of a plane differ, a list by layer and head. The
# note of a string has ttl_left_ms and checksum.

T = TypeVar("T")

FOREVER = -1  # the PTTL of a key without an expiry
_MEMBERS = 32  # most lists and objects in a note that is read; a valid one has fewer
_DIGEST = re.compile("[0-9a-f]{16}")
_CODE = "lossless"
_MOST_CODED = 128 << 20  # bytes of the pages of a coded tensor, which is decoded as a whole
_MOST_RATIO = 4  # of the pages to their code; a page's largest ratio is 2.9


class InFile(NamedTuple):
    """Description of a tensor in the header of a safetensors file."""

    name: str
    element: str  # the type
    shape: list[int]


class Geometry(NamedTuple):
    """Fields that all pages of a tensor have in common."""

    dtype: DType
    page_size: int
    head_dim: int
    body_size: int  # bytes of each body


class WrittenPages(NamedTuple):
    """Header fields of pages that are set by the write of a page.

    Each list has an item for each page, by layer and head.
    """

    created_ms: list[int]
    ttl: list[int]  # seconds given at the write
    unchecked: list[bool]  # whether it was stored without a checksum


@dataclass(frozen=True, slots=True)
class PageTensor:
    """Description of one tensor: a single page, or a plane of a block, that is, all its pages of one kv_type.

    Each list has an item for each page, by layer and head.
    """

    first: PageKey  # key of the first page
    grid: tuple[int, int]  # numbers of layers and heads
    geometry: Geometry
    written: WrittenPages
    ttl_left_ms: list[int]
    checksums: list[int]  # XXH3-64 of each body
    code_size: int = 0  # bytes of the code of all bodies, if the tensor has it instead of the bodies

    @property
    def is_plane(self) -> bool:
        """Whether the tensor is a plane of a block. Otherwise it is a single page."""
        return len(self.checksums) > 1

    @property
    def fits(self) -> bool:
        """Whether each body has the length of its shape. Otherwise the tensor consists of bytes."""
        dtype, page_size, head_dim, body_size = self.geometry
        return body_size == page_size * head_dim * dtype.itemsize

    @property
    def name(self) -> str:
        """Name of the tensor, without `:coded`."""
        first = self.first
        return plane_name(first.req_id, first.page, first.kv_type) if self.is_plane else text_of(bytes(first))

    @property
    def in_file(self) -> InFile:
        if self.code_size:
            return InFile(self.name + _CODED, "U8", [self.code_size])
        return InFile(self.name, self.geometry.dtype.safetensors if self.fits else "U8", self.shape)

    @property
    def shape(self) -> list[int]:
        """``[layers, heads, page_size, head_dim]`` of a plane, ``[page_size, head_dim]`` of a page, or ``[bytes]`` if a
        body does not have the length of its shape.
        """
        _, page_size, head_dim, body_size = self.geometry
        if not self.fits:
            return [body_size]
        return [*self.grid, page_size, head_dim] if self.is_plane else [page_size, head_dim]

    @property
    def body_size(self) -> int:
        """Bytes of each body."""
        return self.geometry.body_size

    def key(self, number: int) -> PageKey:
        """Return the key of page `number`, counted in the order of the bodies in the tensor."""
        layer, head = divmod(number, self.grid[1])
        first = self.first
        return PageKey(first.req_id, first.layer + layer, first.head + head, first.page, first.kv_type)

    def keys(self) -> Iterator[PageKey]:
        """Yield the pages' keys, in the order of their bodies in the tensor."""
        return map(self.key, range(len(self.checksums)))

    def header(self, number: int) -> PageHeader:
        """Return the header of page `number` as the server has stored it."""
        dtype, page_size, head_dim, body_size = self.geometry
        key, written = self.key(number), self.written
        checksum = 0 if written.unchecked[number] else self.checksums[number]
        about = key.layer, key.head, key.page, written.created_ms[number], written.ttl[number], body_size, checksum
        return PageHeader(dtype, key.kv_type, page_size, head_dim, *about)

    def headers(self) -> Iterator[PageHeader]:
        """Yield the pages' headers, in the order of `keys`."""
        return map(self.header, range(len(self.checksums)))

    def note(self) -> dict[str, Any]:
        """Return the note that describes the tensor in the file's metadata, for `entry_of`."""
        first, geometry, written = self.first, self.geometry, self.written
        grid = {"layers": self.grid[0], "heads": self.grid[1]}
        return {
            "request": text_of(first.req_id),
            "page": first.page,
            "kv_type": first.kv_type,
            **(grid if self.is_plane else {"layer": first.layer, "head": first.head}),
            "dtype": geometry.dtype.name.lower(),
            "page_size": geometry.page_size,
            "head_dim": geometry.head_dim,
            "created_ms": _folded(written.created_ms),
            "ttl": _folded(written.ttl),
            "ttl_left_ms": _folded(self.ttl_left_ms),
            "checksum": _folded([f"{checksum:016x}" for checksum in self.checksums]),
            "unchecked": _folded(written.unchecked),
            **({"code": _CODE} if self.code_size else {}),
        }

    def encoded(self, bodies: list[memoryview]) -> Tensor:
        """Return the tensor with the code of the bodies, or with the bodies if the code saves less than a tenth."""
        shape = self._block_shape()
        if shape is None or shape.nbytes > _MOST_CODED:
            return Tensor(self, bodies)
        code = encode_block_body(bodies[0] if len(bodies) == 1 else b"".join(bodies), shape)
        return Tensor(self, bodies) if code is None else Tensor(replace(self, code_size=len(code)), [code])

    def decoded(self, code: memoryview) -> memoryview | None:
        """Return the bodies, from the bytes of the tensor, which has their code. None if these are damaged, or the code
        of another shape.
        """
        bodies = np.empty(len(self.checksums) * self.body_size, np.uint8).data
        try:
            if (shape := self._block_shape()) is None:
                return None
            decode_body(code, bodies, shape)
        except PageError:
            return None
        return bodies

    def _block_shape(self) -> BlockShape | None:
        """Return the shape of a block of this tensor, or None if a body does not have the length of its shape."""
        dtype, page_size, head_dim, _ = self.geometry
        return BlockShape(*self.grid, page_size, (Plane(self.first.kv_type, dtype, head_dim),)) if self.fits else None


@dataclass(frozen=True, slots=True)
class String:
    """Description of a string's tensor."""

    key: bytes
    size: int
    left_ms: int  # TTL at the start of the dump in milliseconds, -1 for no expiry
    checksum: int

    @property
    def name(self) -> str:
        return string_name(self.key)

    @property
    def in_file(self) -> InFile:
        return InFile(self.name, "U8", [self.size])

    @property
    def body_size(self) -> int:
        return self.size

    @property
    def checksums(self) -> list[int]:
        return [self.checksum]

    @property
    def ttl_left_ms(self) -> list[int]:
        return [self.left_ms]

    def note(self) -> dict[str, Any]:
        """Return the note that describes the tensor in the file's metadata, for `entry_of`."""
        return {"ttl_left_ms": self.left_ms, "checksum": f"{self.checksum:016x}"}


Entry = PageTensor | String


def _folded(values: list[Any]) -> Any:
    """Return the value if all values are equal, otherwise the list. So most notes are short."""
    return values[0] if len(set(values)) == 1 else values


def _unfolded(value: Any, count: int, kind: type[T]) -> list[T]:
    """Return the `count` values of a field: one for all, or a list. Raises ValueError, also for a list of one value."""
    values = value if isinstance(value, list) and count > 1 else [value] * count
    if len(values) != count or not all(type(value) is kind for value in values):
        or_list = f", or a list of {count}" if count > 1 else ""
        raise ValueError(f"one value of type {kind.__name__} is allowed{or_list}")
    return values


def entry_of(name: str, note: str, nbytes: int, most_pages: int = MAX_BLOCK_PAGES) -> Entry:
    """Return the description of a tensor of `nbytes` bytes, from `note`, its JSON text in the file's metadata.

    Raises ValueError, KeyError, TypeError or AttributeError for a malformed note, a note of another tensor, or more
    than `most_pages` pages.
    """
    most = _MEMBERS * MAX_BLOCK_PAGES
    fields = bounded.parse(note.encode(), containers=_MEMBERS, strings=most, values=most)
    if not isinstance(fields, dict):
        raise ValueError("its note is not a JSON object")
    entry = _pages_of(fields, nbytes, most_pages) if "request" in fields else _string_of(name, fields, nbytes)
    if entry.in_file.name != name:
        raise ValueError(f"its note is that of {entry.in_file.name:.300}")
    return entry


def _string_of(name: str, fields: dict[str, Any], nbytes: int) -> String:
    (left_ms,) = _numbers(fields["ttl_left_ms"], 1, FOREVER, MAX_I64)
    return String(bytes_of(name.removeprefix("string:")), nbytes, left_ms, _checksum(fields["checksum"]))


def _pages_of(fields: dict[str, Any], nbytes: int, most_pages: int) -> PageTensor:
    (layers,), (heads,) = (_numbers(fields.get(name, 1), 1, 1, MAX_LAYER + 1) for name in ("layers", "heads"))
    count = layers * heads
    if count > most_pages:
        raise ValueError(f"it has {count} pages, and at most {most_pages} are read")
    if count > 1 and fields.keys() & {"layer", "head"}:
        raise ValueError("a plane has all layers and heads from 0")
    page_size, head_dim = _unfolded([fields["page_size"], fields["head_dim"]], 2, int)
    dtype = _dtype(fields["dtype"])
    code_size = 0
    if "code" in fields:
        code_size, nbytes = nbytes, count * page_size * head_dim * dtype.itemsize
        if fields["code"] != _CODE or not code_size:
            raise ValueError(f"its code must be {_CODE} with at least one byte")
        if not 0 < nbytes <= min(_MOST_CODED, _MOST_RATIO * code_size):
            raise ValueError(f"{nbytes} bytes do not have a code of {code_size}")
    if count > max(nbytes, 1) or nbytes % count:
        raise ValueError(f"{nbytes} bytes are not {layers} layers of {heads} heads")
    numbers = (fields.get("layer", 0), fields.get("head", 0), fields["page"], fields["kv_type"])
    layer, head, page, kv_type = _unfolded([*numbers], 4, int)
    req_id = bytes_of(fields["request"])
    PageKey(req_id, layer + layers - 1, head + heads - 1, page, kv_type)  # raises if the last page has no valid key
    pages = PageTensor(
        PageKey(req_id, layer, head, page, kv_type),
        (layers, heads),
        Geometry(dtype, page_size, head_dim, nbytes // count),
        WrittenPages(
            _numbers(fields["created_ms"], count, 0, MAX_I64),
            _numbers(fields["ttl"], count, 0, MAX_TTL),
            _unfolded(fields["unchecked"], count, bool),
        ),
        _numbers(fields["ttl_left_ms"], count, FOREVER, MAX_I64),
        [_checksum(digest) for digest in _unfolded(fields["checksum"], count, str)],
        code_size,
    )
    pages.header(0)  # raises for values out of range that all pages have in common
    return pages


def _dtype(name: Any) -> DType:
    if not isinstance(name, str) or name.upper() not in DType.__members__:
        raise ValueError(f"dtype must be one of {', '.join(DType.__members__).lower()}, got {name!r:.40}")
    return DType[name.upper()]


def _numbers(value: Any, count: int, low: int, high: int) -> list[int]:
    numbers = _unfolded(value, count, int)
    if min(numbers) < low or max(numbers) > high:
        raise ValueError(f"{low} to {high} are allowed")
    return numbers


def _checksum(digest: Any) -> int:
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("a checksum has 16 hexadecimal digits")
    return int(digest, 16)


# -- Tensors of a block's pages: one for a complete plane of one geometry, otherwise one for each page -----------------


class FoundPage(NamedTuple):
    """A page that was read from the server."""

    key: PageKey
    header: PageHeader
    ttl_left_ms: int  # -1 for no expiry
    body: memoryview


def tensors_of(block: Iterable[FoundPage], *, code: bool = False) -> Iterator[Tensor]:
    """Yield the tensors of a block's pages: one for each complete plane, and one for each page of another plane.

    With `code`, tensors have the code of their pages where it saves a tenth.
    """
    pages = sorted(block, key=lambda page: (page.key.kv_type, page.key.layer, page.key.head))
    for _, plane in groupby(pages, lambda page: page.key.kv_type):
        some = list(plane)
        for part in [some] if _is_whole(some) else [[page] for page in some]:
            entry, bodies = _entry(part), [page.body for page in part]
            yield entry.encoded(bodies) if code else Tensor(entry, bodies)


def _is_whole(plane: list[FoundPage]) -> bool:
    """Return whether these are all pages of a plane, from layer 0 and head 0 on, with the same geometry."""
    last, first = plane[-1].key, plane[0].header
    geometry = (first.dtype, first.page_size, first.head_dim, first.tensor_size)
    return MAX_BLOCK_PAGES >= len(plane) == (last.layer + 1) * (last.head + 1) and all(
        (header.dtype, header.page_size, header.head_dim, header.body_size) == geometry and key.head <= last.head
        for key, header, _, _ in plane
    )


def _entry(pages: list[FoundPage]) -> PageTensor:
    first, last, header = pages[0].key, pages[-1].key, pages[0].header
    return PageTensor(
        first,
        (last.layer - first.layer + 1, last.head - first.head + 1),
        Geometry(header.dtype, header.page_size, header.head_dim, header.body_size),
        WrittenPages(
            [header.created_ms for _, header, _, _ in pages],
            [header.ttl for _, header, _, _ in pages],
            [not header.checksum for _, header, _, _ in pages],
        ),
        [left for _, _, left, _ in pages],
        [header.checksum or checksum(body) for _, header, _, body in pages],
    )


# -- Files in the format of safetensors --------------------------------------------------------------------------------
#
# A file consists of 8 bytes with the little-endian length of the header; the header, which is JSON, padded with spaces
# so that the data is aligned to 64 bytes; and the data of its tensors without gaps
# (https://github.com/huggingface/safetensors#format). Tensors of wider elements are first, because readers that map a
# file need each tensor aligned to its elements.
#
# Checksums cover all bytes: those of pages and strings cover the data, and `digest` in the metadata covers the header.
# It is the XXH3-64 of the header with 16 zeros in place of the digest.

FORMAT = "kvpage-dump"
VERSION = "1"
CODED_VERSION = "2"  # of a file with coded tensors, so that an older kvpage refuses it
MAX_HEADER = 64 << 20  # bytes
MAX_TENSORS = 100_000  # tensors in a file that is read; a dump writes fewer
MAX_PAGES = 1_000_000  # pages in a file that is read; a dump writes fewer
LAST_MOMENT = 253_370_764_800_000  # unix milliseconds: the year 9999, the last one of Python's datetime
_ALIGNMENT = 64
_NO_DIGEST = "0" * 16
_ITEMSIZE = {dtype.safetensors: dtype.itemsize for dtype in DType}
_MAX_DIMENSIONS = 8
_READ_BYTES = 8 << 20  # bytes that are hashed at a time
_MOMENT = re.compile("[0-9]{1,15}")
_GATHER = 512  # pieces of one writev; IOV_MAX is 1024


class Tensor(NamedTuple):
    """The description of a tensor, and its data in pieces."""

    entry: Entry
    pieces: list[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.pieces))


class EntrySpan(NamedTuple):
    """The description of a tensor, and its byte range in the data of a file."""

    entry: Entry
    start: int
    stop: int


class DumpOf(NamedTuple):
    """The dump that a file belongs to: its start, in unix milliseconds of the server, and its selection of keys.

    The TTLs in the file count from the start.
    """

    dumped_ms: int
    selection: str


@dataclass(frozen=True, slots=True)
class FileContents:
    """The contents of a file's header, which describe the file."""

    path: Path
    size: int  # bytes of the whole file
    data: int  # offset of the data
    digest: str
    of: DumpOf
    spans: list[EntrySpan]
    bad: list[str]  # tensors with malformed notes: names and reasons


# -- writing -----------------------------------------------------------------------------------------------------------


def write_file(path: Path, tensors: list[Tensor], of: DumpOf) -> FileContents:
    """Write a file of a dump atomically: it is complete or does not exist. Return its contents. Raises OSError."""
    tensors = sorted(tensors, key=lambda tensor: -_ITEMSIZE[tensor.entry.in_file.element])
    has_codes = any(isinstance(entry, PageTensor) and entry.code_size for entry, _ in tensors)
    version = CODED_VERSION if has_codes else VERSION
    facts = {"format": FORMAT, "version": version, "dumped_ms": str(of.dumped_ms), "selection": of.selection}
    metadata = {"digest": _NO_DIGEST, **facts}
    header: dict[str, Any] = {"__metadata__": metadata}
    spans = []
    start = 0
    for entry, pieces in tensors:
        stop = start + sum(map(len, pieces))
        name, element, shape = entry.in_file
        metadata[name] = json.dumps(entry.note())
        header[name] = {"dtype": element, "shape": shape, "data_offsets": [start, stop]}
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
    """Return the XXH3-64 of a header, which must have zeros in place of its digest, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(header)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_contents(path: Path) -> FileContents:
    """Read and check the header of a file. Its data is not read. Raises BadFile if the file is unusable.

    A tensor with a malformed note is listed in `bad`.
    """
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
    """Return the contents of a file of `size` bytes from the text of its header.

    Raises BadFile, KeyError, TypeError, ValueError or AttributeError.
    """
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
    for name, fields in header.items():
        start, end = end, _end_of(fields, end)
        try:
            entry = entry_of(name, metadata[name], end - start, min(MAX_BLOCK_PAGES, MAX_PAGES - pages))
            if entry.in_file != (name, fields["dtype"], fields["shape"]):
                raise ValueError("its type or shape is not that of its note")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            contents.bad.append(f"{name:.300}: {_reason(error)}")
        else:
            pages += len(entry.checksums)
            contents.spans.append(EntrySpan(entry, start, end))
    if size != contents.data + end:
        raise BadFile(f"it is torn: it has {size} bytes, its header describes {contents.data + end}")
    return contents


def _header(text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Parse the text of a header. Return the fields of each tensor, and the metadata. Raises BadFile, ValueError."""
    try:
        header = bounded.parse(text, containers=3 * MAX_TENSORS, strings=8 * MAX_TENSORS, values=12 * MAX_TENSORS)
    except bounded.TooMuchError as error:
        raise BadFile(f"its header has {error}") from None
    except ValueError as error:
        raise BadFile(f"it is torn, or no safetensors file: {error}") from None
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise BadFile("it is not of kvpage dump")
    _check_version(metadata.get("version"), (VERSION, CODED_VERSION))
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not text")
    return header, metadata


def _is_intact(header: bytes, digest: str) -> bool:
    before, field, after = header.partition(_digest_field(digest))
    found = xxhash.xxh3_64(before)
    found.update(_digest_field(_NO_DIGEST) if field else b"")
    found.update(after)
    return found.hexdigest() == digest


def _end_of(fields: dict[str, Any], begin: int) -> int:
    """Return the end of a tensor's data, from its fields in the header. `begin` is the end of the tensor before it.

    Raises ValueError if the data does not start at `begin`, or if its length does not fit its shape; KeyError.
    """
    numbers, shape, dtype = fields["data_offsets"], fields["shape"], fields["dtype"]
    if dtype not in _ITEMSIZE:
        raise ValueError(f"{dtype!r:.40} is no type of elements of a dump")
    sizes = [*numbers, *shape[:_MAX_DIMENSIONS]]
    if len(numbers) != 2 or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise ValueError("sizes and offsets are whole numbers of 0 or more")
    start, end = numbers
    if len(shape) > _MAX_DIMENSIONS or start != begin or end - start != prod(shape) * _ITEMSIZE[dtype]:
        raise ValueError("the tensors do not lie one after the other, each as long as its shape")
    return int(end)


def _reason(error: Exception) -> str:
    """Return the text for an exception that a malformed header or note has caused."""
    if isinstance(error, KeyError):
        return f"it has no field {error.args[0]!r:.40}"
    return f"{error}"[:200] if isinstance(error, ValueError) else "one of its fields has a value of another type"


@contextmanager
def opened(contents: FileContents) -> Iterator[BufferedReader]:
    """Yield the file, to read its data. Raises BadFile."""
    try:
        file = open_regular(contents.path)
    except OSError as error:
        raise BadFile(f"it cannot be read: {error.strerror}") from None
    with file:
        yield file


def read_data(file: BufferedReader, contents: FileContents, start: int, stop: int) -> memoryview:
    """Return bytes `start` to before `stop` of a file's data. Raises BadFile if they cannot be read."""
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
    """Yield for each page of a tensor, or for the string, whether its bytes match its checksum.

    At most _READ_BYTES are in memory, or a coded tensor.
    """
    size = span.entry.body_size
    if isinstance(span.entry, PageTensor) and span.entry.code_size:
        bodies = span.entry.decoded(read_data(file, contents, span.start, span.stop))
        for number, digest in enumerate(span.entry.checksums):
            yield bodies is not None and checksum(bodies[number * size : (number + 1) * size]) == digest
        return
    for number, digest in enumerate(span.entry.checksums):
        found, start = xxhash.xxh3_64(), span.start + number * size
        for at in range(start, start + size, _READ_BYTES):
            found.update(read_data(file, contents, at, min(at + _READ_BYTES, start + size)))
        yield found.intdigest() == digest


# -- The directory: the files of a dump, and ``dump.json``, which is written last and lists them -----------------------
#
# A dump without ``dump.json`` is not finished. During an update, ``dump.json`` lists the old files, which stay until
# the new ``dump.json`` has replaced it. So after a crash, a directory has the old dump or the new one, never a mixture.

SUMMARY = "dump.json"
_FILE = re.compile(r"(?:pages|strings)-([0-9]{6,})\.safetensors\Z")
_MAX_SUMMARY = 64 << 20  # bytes
_MAX_FILES = 400_000
_DIRECTORY_MEMBERS = 8  # most lists and objects in a dump.json that is read; a valid one has fewer


@dataclass(frozen=True, slots=True)
class Summary:
    """The contents of dump.json, which every finished dump has."""

    dumped_ms: int  # start of the dump, in unix milliseconds of the server
    selection: str
    files: dict[str, str]  # digests by name
    server: str = ""  # URL without a password; empty if unknown
    run_id: str = ""  # of the server's process, from INFO; empty if unknown


@contextmanager
def locked(path: Path, *, to_write: bool) -> Iterator[None]:
    """Lock a dump's directory: against writers, and with `to_write` also against readers.

    Raises DumpError if another process uses it, OSError.
    """
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
    """Return the contents of dump.json, or None if the file does not exist.

    Raises BadFile if it is damaged, DumpError if it has another version of the format.
    """
    try:
        raw = read_regular(path / SUMMARY, _MAX_SUMMARY)
        fields = bounded.parse(raw, containers=_DIRECTORY_MEMBERS, strings=2 * _MAX_FILES, values=_MAX_FILES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadFile(f"{SUMMARY} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadFile(f"{SUMMARY} is corrupt: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise BadFile(f"{SUMMARY} is not of kvpage dump")
    try:
        _check_version(fields.get("version"), (VERSION,))
    except OtherVersion as error:
        raise DumpError(f"{path / SUMMARY}: {error}") from None
    except BadFile as error:
        raise BadFile(f"{SUMMARY}: {error}") from None
    dumped_ms, selection, files = (fields.get(name) for name in ("dumped_ms", "selection", "files"))
    if type(dumped_ms) is not int or not 0 <= dumped_ms <= LAST_MOMENT:
        raise BadFile(f"{SUMMARY} is corrupt: dumped_ms must be between 0 and {LAST_MOMENT}, got {dumped_ms!r:.40}")
    if not isinstance(selection, str) or not isinstance(files, dict):
        raise BadFile(f"{SUMMARY} is corrupt: selection must be a string and files an object")
    if not all(_FILE.match(name) and isinstance(digest, str) for name, digest in files.items()):
        raise BadFile(f"{SUMMARY} is corrupt: files must be names of files of a dump with their digests")
    server, run_id = (fields.get(name) for name in ("server", "run_id"))
    return Summary(
        dumped_ms,
        selection,
        files,
        server if isinstance(server, str) else "",
        run_id if isinstance(run_id, str) else "",
    )


def write_summary(path: Path, summary: Summary) -> None:
    """Write dump.json, which declares the dump finished. Raises OSError."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(summary)}, indent=1).encode() + b"\n"
    with replacing(path / SUMMARY) as file:
        file.write(text)


def dump_files(path: Path) -> list[Path]:
    """Return the files of a directory with names of a dump, sorted: pages before strings, each by number."""
    return sorted(file for file in path.iterdir() if _FILE.match(file.name))


def size_of(path: Path) -> int:
    """Return the sum of bytes of a directory's files with names of a dump, without unreadable ones. Raises OSError."""
    nbytes = 0
    for file in dump_files(path):
        with suppress(OSError):
            nbytes += file.stat().st_size
    return nbytes


def new_numbers(path: Path) -> Iterator[int]:
    """Yield consecutive numbers for new files, from the first one above all existing files."""
    return count(1 + max((int(found[1]) for file in path.iterdir() if (found := _FILE.match(file.name))), default=0))


def remove(files: Iterable[Path]) -> None:
    """Delete files, and flush their directories to disk. Directories among them stay. Raises OSError."""
    parents = set()
    for file in files:
        if file.is_dir() and not file.is_symlink():
            continue
        file.unlink()
        parents.add(file.parent)
    for parent in parents:
        flush_directory(parent)


def read_all(files: Iterable[Path], summary: Summary | None) -> Iterator[tuple[Path, FileContents | BadFile]]:
    """Yield each file with the contents of its header, or with the BadFile error of an unusable file.

    With `summary`, a file whose digest differs from that in dump.json is unusable, too.
    """
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
    """Return the files of a dump, pages before strings: those in `summary`, or without it those in the directory.

    Raises DumpError if there is no dump, OSError.
    """
    if summary is not None:
        return [path / name for name in sorted(summary.files)]
    files = dump_files(path)
    if not files:
        raise DumpError(f"{path} holds no dump")
    return files
