"""The page contract: names of KV pages, and their 64-byte header.

All packages may import this module; it imports no other module of the project. A *page* is a matrix
``[page_size, head_dim]`` of one request, page id, layer, head and plane: the values of `page_size` consecutive tokens.
It is stored as a *blob*: a 64-byte little-endian header, followed by the *body*, the tensor's bytes.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import index

import xxhash
from typing_extensions import Buffer

MAGIC = b"KVPG"
VERSION = 2
HEADER_SIZE = 64
MAX_REQ_ID = 256
MAX_LAYER = MAX_HEAD = 0xFFFF
MAX_PAGE = 0xFFFF_FFFF
MAX_KV_TYPE = 5
MAX_BLOCK_PAGES = 131_072  # of a block that is stored as a whole; 128 layers of 128 heads with 6 planes are fewer
MAX_SINGLE_PAGES = 8192  # of a block whose pages are stored one by one; 128 layers of 8 heads with 6 planes are fewer
MAX_U32 = 0xFFFF_FFFF
MAX_I64 = 0x7FFF_FFFF_FFFF_FFFF
MAX_U64 = 0xFFFF_FFFF_FFFF_FFFF
MAX_TTL = 0x7FFF_FFFF_FFFF  # seconds; in milliseconds, it can be added to a unix time without an overflow

# The fields of the header in order: name, and format character of `struct`.
_FIELDS = {
    "magic": "4s",
    "version": "B",
    "dtype": "B",
    "kv_type": "B",
    "flags": "B",
    "page_size": "I",
    "head_dim": "I",
    "layer": "I",
    "head": "I",
    "page": "Q",
    "created": "Q",
    "ttl": "Q",
    "body_size": "I",
    "reserved": "I",
    "checksum": "Q",
}


def header_fields(*names: str) -> struct.Struct:
    """Return a struct that reads only these fields of a header, in the header's order; all fields without arguments."""
    passed_over = {name: f"{struct.calcsize('<' + code)}x" for name, code in _FIELDS.items()}
    kept = names or tuple(_FIELDS)
    return struct.Struct("<" + "".join(_FIELDS[n] if n in kept else passed_over[n] for n in _FIELDS))


def _places() -> Iterator[tuple[str, int]]:
    at = 0
    for name, code in _FIELDS.items():
        yield name, at
        at += struct.calcsize("<" + code)


FIELD_AT = dict(_places())  # offset of each field in bytes
LAYOUT = header_fields()
assert LAYOUT.size == HEADER_SIZE

NOT_IN_REQ_ID = bytes([*range(33), 127]) + b":"  # bytes that no request id has
_KEY = re.compile(rb"kv:([^\x00-\x20\x7f:]{1,256})" + 4 * rb":(0|[1-9]\d{0,9})" + rb"\Z")


class PageError(ValueError):
    """Error: a key, header, body or argument breaks the page contract. The message names it and the allowed values."""


class DType(IntEnum):
    """Element types of a body. The value is the dtype byte of the header. A number never changes its meaning."""

    FLOAT16 = 1
    FLOAT32 = 2
    INT8 = 3
    BFLOAT16 = 4
    FLOAT8_E4M3 = 5
    FLOAT8_E5M2 = 6
    UINT32 = 7  # packed quantised values
    UINT8 = 8
    BOOL = 9
    UINT16 = 10
    INT16 = 11
    INT32 = 12
    UINT64 = 13
    INT64 = 14
    FLOAT64 = 15

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _FORMS[self][0]

    @property
    def safetensors(self) -> str:
        """Name in safetensors files."""
        return _FORMS[self][1]


_FORMS = {  # bytes per element, and name in safetensors
    DType.FLOAT16: (2, "F16"),
    DType.FLOAT32: (4, "F32"),
    DType.INT8: (1, "I8"),
    DType.BFLOAT16: (2, "BF16"),
    DType.FLOAT8_E4M3: (1, "F8_E4M3"),
    DType.FLOAT8_E5M2: (1, "F8_E5M2"),
    DType.UINT32: (4, "U32"),
    DType.UINT8: (1, "U8"),
    DType.BOOL: (1, "BOOL"),
    DType.UINT16: (2, "U16"),
    DType.INT16: (2, "I16"),
    DType.INT32: (4, "I32"),
    DType.UINT64: (8, "U64"),
    DType.INT64: (8, "I64"),
    DType.FLOAT64: (8, "F64"),
}
ALLOWED_DTYPES = ", ".join(f"{d.value} {d.name.lower()}" for d in DType)


class KVType(IntEnum):
    """The kinds of tensors that a layer has: keys, values, and the scales and biases of quantised ones."""

    K = 0
    V = 1
    K_SCALES = 2
    K_BIASES = 3
    V_SCALES = 4
    V_BIASES = 5


def check_integer(name: str, value: int) -> int:
    """Return `value` as an int. Raises TypeError with `name` for a bool and for any other value that is no integer,
    because a float would be narrowed.
    """
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, got {type(value).__name__}")


def check_range(name: str, value: int, low: int, high: int) -> int:
    """Return `value` if ``low <= value <= high``. Raises PageError with `name` and the range otherwise.

    Raises TypeError as `check_integer`.
    """
    number = value if type(value) is int else check_integer(name, value)  # a call costs more than the comparison
    if not low <= number <= high:
        raise PageError(f"{name} must be between {low} and {high}, got {value}")
    return value


def check_req_id(req_id: bytes) -> bytes:
    """Return `req_id` if it is 1 to 256 bytes without ':', spaces or control characters. Raises PageError otherwise.

    Raises TypeError for another type than bytes.
    """
    if not isinstance(req_id, bytes):
        raise TypeError(f"req_id must be bytes, got {type(req_id).__name__}")
    if not 0 < len(req_id) <= MAX_REQ_ID or len(req_id.translate(None, NOT_IN_REQ_ID)) < len(req_id):
        raise PageError(f"req_id must be 1 to {MAX_REQ_ID} bytes without ':', spaces or control characters")
    return req_id


def check_dtype(value: int) -> DType:
    """Return the DType with a number. Raises PageError with the allowed numbers for any other number.

    Raises TypeError for a float or a bool, because it may be equal to a number.
    """
    if isinstance(value, float | bool):
        raise TypeError(f"dtype must be an integer, got {type(value).__name__}")
    try:
        return DType(value)
    except ValueError:
        raise PageError(f"dtype must be one of {ALLOWED_DTYPES}, got {value}") from None


@dataclass(frozen=True, slots=True)
class PageKey:
    """Key of one page: ``kv:{req_id}:{layer}:{head}:{page}:{kv_type}``."""

    req_id: bytes
    layer: int
    head: int
    page: int
    kv_type: int

    def __post_init__(self) -> None:
        check_req_id(self.req_id)
        check_range("layer_idx", self.layer, 0, MAX_LAYER)
        check_range("head_idx", self.head, 0, MAX_HEAD)
        check_range("page_id", self.page, 0, MAX_PAGE)
        check_range("kv_type", self.kv_type, 0, MAX_KV_TYPE)

    def __bytes__(self) -> bytes:
        return b"kv:%b:%d:%d:%d:%d" % (self.req_id, self.layer, self.head, self.page, self.kv_type)

    @classmethod
    def parse(cls, key: bytes) -> PageKey:
        """Parse a page key. Raises PageError for anything else: its numbers are in range and have no leading zeros."""
        found = _KEY.match(key)
        if not found:
            raise PageError("a page key is kv:{req_id}:{layer}:{head}:{page}:{kv_type}, numbers without leading zeros")
        req_id, *numbers = found.groups()
        return cls(req_id, *map(int, numbers))


def page_named(key: bytes) -> PageKey | None:
    """Return the page that a key names; None if it is not a page's key."""
    if key[:3] != b"kv:":  # an exception costs ten times as much
        return None
    try:
        return PageKey.parse(key)
    except PageError:
        return None


def index_key(req_id: bytes) -> bytes:
    """Return the key ``kv:{req_id}:index`` of the read-only set of a request's page keys. Raises PageError."""
    return b"kv:%b:index" % check_req_id(req_id)


checksum: Callable[[Buffer], int] = xxhash.xxh3_64_intdigest  # XXH3-64 of a body's bytes


def unix_ms() -> int:
    """Return the time in unix milliseconds; 0 for a clock before 1970, because stored times are not negative."""
    now = time.time_ns() // 1_000_000
    return now if now > 0 else 0


def _wrong_version(version: int) -> PageError:
    hint = " (the 32-byte header of the prototype)" if version == 1 else ""
    return PageError(f"page version {version}{hint} is not supported, only {VERSION}")


def pack_header(
    dtype: int,
    kv_type: int,
    page_size: int,
    head_dim: int,
    layer: int,
    head: int,
    page: int,
    created_ms: int,
    ttl: int,
    body_size: int,
    digest: int,
    flags: int = 0,
) -> bytes:
    """Return the 64 bytes of a header. The arguments are fields of PageHeader. They are not checked here."""
    about = dtype, kv_type, flags, page_size, head_dim, layer, head, page
    return LAYOUT.pack(MAGIC, VERSION, *about, created_ms, ttl, body_size, 0, digest)


@dataclass(frozen=True, slots=True)
class PageHeader:
    """The fields of the 64-byte header before a body. The constructor raises PageError for a field out of range."""

    dtype: DType
    kv_type: int
    page_size: int  # token rows in this body
    head_dim: int  # elements per row
    layer: int
    head: int
    page: int
    created_ms: int  # unix milliseconds
    ttl: int  # seconds given at the write, 0 for none; the store has the current TTL
    body_size: int  # bytes
    checksum: int  # XXH3-64 of the body; 0 when it was written with checksums turned off
    flags: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", check_dtype(self.dtype))  # its number is accepted, too
        check_range("kv_type", self.kv_type, 0, MAX_KV_TYPE)
        check_range("page_size", self.page_size, 1, MAX_U32)
        check_range("head_dim", self.head_dim, 1, MAX_U32)
        check_range("layer_idx", self.layer, 0, MAX_LAYER)
        check_range("head_idx", self.head, 0, MAX_HEAD)
        check_range("page_id", self.page, 0, MAX_PAGE)
        check_range("created", self.created_ms, 0, MAX_I64)  # KVPAGESTAT sends it as a RESP integer
        check_range("ttl", self.ttl, 0, MAX_TTL)
        check_range("body length", self.body_size, 0, MAX_U32)
        check_range("checksum", self.checksum, 0, MAX_U64)
        if self.flags:
            raise PageError(f"flags must be 0, got {self.flags:#x}")

    def __bytes__(self) -> bytes:
        shape = (self.page_size, self.head_dim, self.layer, self.head, self.page)
        return pack_header(
            self.dtype, self.kv_type, *shape, self.created_ms, self.ttl, self.body_size, self.checksum, self.flags
        )

    @classmethod
    def parse(cls, blob: Buffer) -> PageHeader:
        """Return the header at the start of `blob`.

        Raises PageError for a short blob, another magic or version, or a field out of range.
        """
        view = memoryview(blob).cast("B")
        if len(view) < HEADER_SIZE:
            if view[:5] == MAGIC + b"\x01":
                raise _wrong_version(1)
            raise PageError(f"a page blob has at least {HEADER_SIZE} bytes, got {len(view)}")
        magic, version, dtype, kv_type, flags, *rest = LAYOUT.unpack_from(view)
        if magic != MAGIC:
            raise PageError(f"a page blob starts with {MAGIC!r}, got {magic!r}")
        if version != VERSION:
            raise _wrong_version(version)
        page_size, head_dim, layer, head, page, created, ttl, size, reserved, digest = rest
        if reserved:
            raise PageError(f"the reserved field must be 0, got {reserved}")
        return cls(
            dtype=check_dtype(dtype),
            kv_type=kv_type,
            page_size=page_size,
            head_dim=head_dim,
            layer=layer,
            head=head,
            page=page,
            created_ms=created,
            ttl=ttl,
            body_size=size,
            checksum=digest,
            flags=flags,
        )

    @property
    def tensor_size(self) -> int:
        """Bytes of a body of the declared shape."""
        return self.page_size * self.head_dim * self.dtype.itemsize

    def names(self, key: PageKey) -> bool:
        """Return whether the header belongs to the page with `key`. The request id is not compared, because headers do
        not have it.
        """
        return (self.layer, self.head, self.page, self.kv_type) == (key.layer, key.head, key.page, key.kv_type)


def encode_page(
    key: PageKey,
    body: Buffer,
    *,
    dtype: DType,
    page_size: int,
    head_dim: int,
    ttl: int = 0,
    created_ms: int | None = None,
    with_checksum: bool = True,
) -> bytes:
    """Return the blob of a page: header and body.

    `body` is the C-contiguous tensor ``[page_size, head_dim]``; `ttl` is in seconds, 0 for none.
    Raises PageError for a field outside the contract.
    """
    view = memoryview(body).cast("B")
    header = PageHeader(
        dtype=check_dtype(dtype),
        kv_type=key.kv_type,
        page_size=page_size,
        head_dim=head_dim,
        layer=key.layer,
        head=key.head,
        page=key.page,
        created_ms=unix_ms() if created_ms is None else created_ms,
        ttl=ttl,
        body_size=len(view),
        checksum=checksum(view) if with_checksum else 0,
    )
    return b"".join((bytes(header), view))


def decode_page(blob: Buffer, *, verify: bool = True) -> tuple[PageHeader, memoryview]:
    """Return the header of a blob and a view (no copy) of its body.

    Raises PageError if the header is invalid, the body's length differs from the header's,
    or, with `verify`, the body does not match the header's checksum.
    """
    header = PageHeader.parse(blob)
    body = memoryview(blob).cast("B")[HEADER_SIZE:]
    if len(body) != header.body_size:
        raise PageError(f"the header promises a body of {header.body_size} bytes, got {len(body)}")
    if verify and header.checksum and checksum(body) != header.checksum:
        raise PageError("the body does not match the checksum in its header")
    return header, body


@dataclass(frozen=True, slots=True)
class Plane:
    """The tensor of one kv_type of a block: ``[layers, heads, page_size, head_dim]``, all layers together."""

    kv_type: int
    dtype: DType
    head_dim: int

    def __post_init__(self) -> None:
        check_range("kv_type", self.kv_type, 0, MAX_KV_TYPE)
        object.__setattr__(self, "dtype", check_dtype(self.dtype))  # its number is accepted, too
        check_range("head_dim", self.head_dim, 1, MAX_U32)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of a block, which is all pages of one ``(req_id, page_id)``. The order of its body is layer, plane, head,
    token, dim.

    The constructor raises PageError for an invalid shape.
    """

    layers: int
    heads: int
    page_size: int
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        check_range("layers", self.layers, 1, MAX_LAYER + 1)
        check_range("heads", self.heads, 1, MAX_HEAD + 1)
        check_range("page_size", self.page_size, 1, MAX_U32)
        for plane in self.planes:
            if not isinstance(plane, Plane):
                raise TypeError(f"planes must be Planes, got {type(plane).__name__}")
        types = [int(plane.kv_type) for plane in self.planes]
        if not types or types != sorted(set(types)):
            raise PageError(f"planes must be given once each, in the order of their kv_type, got {types}")
        if self.pages > MAX_BLOCK_PAGES:
            raise PageError(f"a block has at most {MAX_BLOCK_PAGES} pages, got {self.pages}")

    @property
    def pages(self) -> int:
        """Number of pages of a complete block."""
        return self.layers * len(self.planes) * self.heads

    @property
    def nbytes(self) -> int:
        """Bytes of the block's body."""
        return self.layers * self.layer_nbytes

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of the body."""
        return self.heads * sum(map(self.page_nbytes, self.planes))

    def page_nbytes(self, plane: Plane) -> int:
        """Return the bytes of one page of `plane`."""
        return self.page_size * plane.head_dim * plane.dtype.itemsize

    def plane(self, kv_type: int) -> Plane:
        """Return the plane of a kv_type. Raises PageError if the block has no such plane."""
        for plane in self.planes:
            if plane.kv_type == kv_type:
                return plane
        raise PageError(f"kv_type must be one of {[int(p.kv_type) for p in self.planes]}, got {kv_type}")

    def page_spans(self) -> Iterator[slice]:
        """Yield the byte range of each page in the body, in the order of the body."""
        start = 0
        for _ in range(self.layers):
            for plane in self.planes:
                size = self.page_nbytes(plane)
                for _ in range(self.heads):
                    yield slice(start, start + size)
                    start += size

    def page_span(self, layer: int, head: int, kv_type: int) -> slice:
        """Return the byte range of a page in the body. Raises PageError for a page outside the block's shape."""
        check_range("layer_idx", layer, 0, self.layers - 1)
        check_range("head_idx", head, 0, self.heads - 1)
        page_plane = self.plane(kv_type)
        start = layer * self.layer_nbytes
        for plane in self.planes:
            if plane is page_plane:
                break
            start += self.heads * self.page_nbytes(plane)
        size = self.page_nbytes(page_plane)
        return slice(start + head * size, start + (head + 1) * size)


# -- Segments of a prompt: consecutive blocks on the same server -------------------------------------------------------
#
# The segments of a long context are distributed over all servers. Very many prompts begin with the same block. So the
# first block of a prompt is a segment of its own: otherwise the next blocks of all of them would be on its server.

SEGMENT = 4  # blocks of each segment but the first one, which has one block


def first_of(index: int, together: int) -> int:
    """Return the index of the first block of the segment that contains block `index` of a prompt.

    `together` is the number of blocks of a segment. Block 0 is a segment of its own.
    """
    return index - (index - 1) % together if index else 0


def tag_of(names: Sequence[str], index: int, together: int) -> str:
    """Return the tag before the name of block `index` in its keys: the name of its segment's first block, in braces.

    `names` are the names of the prompt's blocks. A segment has `together` blocks; 0 means that there is one server, and
    the tag is empty.
    """
    return f"{{{names[first_of(index, together)]}}}" if together else ""


def segment_of(req_id: bytes) -> bytes:
    """Return the segment of a request id: the part in its first braces, as in a cluster, or all of it."""
    _, opened, rest = req_id.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return tag if opened and closed and tag else req_id


def without_segment(req_id: bytes) -> bytes:
    """Return a request id without the segment in braces at its beginning."""
    return req_id.removeprefix(b"{%b}" % segment_of(req_id))
