"""What a tensor of a dump holds, and how the file's metadata tells it: a JSON object a tensor, under the tensor's name.

Of a page or plane: request, page, kv_type, dtype, page_size, head_dim; layer and head of a page, layers and heads (how
many) of a plane; and created_ms, ttl (seconds given at the write), ttl_left_ms (-1: for ever) and checksum (XXH3-64 of
the body, hexadecimal), each one value or, where the pages of a plane differ, a list by layer and head. `unchecked` says
that a page was stored without a checksum; the one here is then the dump's own. Of a string: ttl_left_ms and checksum.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvpage_server.bounded import json_bounds
from kvpage_server.page import MAX_BLOCK_PAGES, MAX_I64, MAX_LAYER, MAX_TTL, DType, PageHeader, PageKey
from kvpage_server.snapshot.format.names import bytes_of, plane_name, string_name, text_of

T = TypeVar("T")

FOREVER = -1  # the PTTL of a key without an expiry
_MEMBERS = 32  # of a note: more than it has
_DIGEST = re.compile("[0-9a-f]{16}")


class Geometry(NamedTuple):
    """What all pages of a tensor have in common."""

    dtype: DType
    page_size: int
    head_dim: int
    body_size: int  # bytes of each


class WrittenPages(NamedTuple):
    """Fields of pages from when they were stored, by layer and head."""

    created_ms: list[int]
    ttl: list[int]  # seconds given at the write
    unchecked: list[bool]  # whether it was stored without a checksum


@dataclass(frozen=True, slots=True)
class PageTensor:
    """The pages of one tensor: a page, or a plane of a block. Lists are by layer and head."""

    first: PageKey  # of the pages
    grid: tuple[int, int]  # layers and heads; a page by itself has one of each
    geometry: Geometry
    written: WrittenPages
    ttl_left_ms: list[int]
    checksums: list[int]  # XXH3-64 of each body

    @property
    def is_plane(self) -> bool:
        """Whether it is a plane: a page that stands alone is named for itself."""
        return len(self.checksums) > 1

    @property
    def fits(self) -> bool:
        """Whether a body is as long as its shape says."""
        dtype, page_size, head_dim, body_size = self.geometry
        return body_size == page_size * head_dim * dtype.itemsize

    @property
    def name(self) -> str:
        first = self.first
        return plane_name(first.req_id, first.page, first.kv_type) if self.is_plane else text_of(bytes(first))

    @property
    def element(self) -> str:
        """The tensor's element type, as safetensors spells it."""
        return self.geometry.dtype.safetensors if self.fits else "U8"

    @property
    def shape(self) -> list[int]:
        """``[layers, heads, page_size, head_dim]``, ``[page_size, head_dim]``, or the length of a body of no shape."""
        _, page_size, head_dim, body_size = self.geometry
        if not self.fits:
            return [body_size]
        return [*self.grid, page_size, head_dim] if self.is_plane else [page_size, head_dim]

    @property
    def body_size(self) -> int:
        """The bytes of each body."""
        return self.geometry.body_size

    def key(self, number: int) -> PageKey:
        """The key of a page, by its number in the tensor."""
        layer, head = divmod(number, self.grid[1])
        first = self.first
        return PageKey(first.req_id, first.layer + layer, first.head + head, first.page, first.kv_type)

    def keys(self) -> Iterator[PageKey]:
        """The pages' keys, in the order in which their bodies lie in the tensor."""
        return map(self.key, range(len(self.checksums)))

    def header(self, number: int) -> PageHeader:
        """The header of a page as it was stored, by its number in the tensor."""
        dtype, page_size, head_dim, body_size = self.geometry
        key, written = self.key(number), self.written
        checksum = 0 if written.unchecked[number] else self.checksums[number]
        about = key.layer, key.head, key.page, written.created_ms[number], written.ttl[number], body_size, checksum
        return PageHeader(dtype, key.kv_type, page_size, head_dim, *about)

    def headers(self) -> Iterator[PageHeader]:
        """The pages' headers, in the order of `keys`."""
        return map(self.header, range(len(self.checksums)))

    def note(self) -> dict[str, Any]:
        """What the file's metadata says about it."""
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
        }


@dataclass(frozen=True, slots=True)
class String:
    """A plain string without its bytes."""

    key: bytes
    size: int
    left_ms: int  # to live
    checksum: int

    @property
    def name(self) -> str:
        return string_name(self.key)

    @property
    def element(self) -> str:
        """The tensor's element type: bytes."""
        return "U8"

    @property
    def shape(self) -> list[int]:
        return [self.size]

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
        """What the file's metadata says about it."""
        return {"ttl_left_ms": self.left_ms, "checksum": f"{self.checksum:016x}"}


Entry = PageTensor | String


def _folded(values: list[Any]) -> Any:
    """One value for all, if they are equal."""
    return values[0] if len(set(values)) == 1 else values


def _unfolded(value: Any, count: int, kind: type[T]) -> list[T]:
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count or not all(type(value) is kind for value in values):
        raise ValueError(f"{count} pages need {count} of {kind.__name__}")
    return values


def entry_of(name: str, note: str, nbytes: int, most_pages: int = MAX_BLOCK_PAGES) -> Entry:
    """The entry of a tensor of `nbytes` bytes, from its note in the metadata.

    Raises ValueError, KeyError, TypeError or AttributeError for a malformed note, for the note of another tensor, and
    for more than `most_pages` pages.
    """
    most = _MEMBERS * MAX_BLOCK_PAGES
    told = json_bounds.parse(note.encode(), containers=_MEMBERS, strings=most, values=most)
    if not isinstance(told, dict):
        raise ValueError("its note is not a JSON object")
    entry = _pages_of(told, nbytes, most_pages) if "request" in told else _string_of(name, told, nbytes)
    if entry.name != name:
        raise ValueError(f"its note is that of {entry.name:.300}")
    return entry


def _string_of(name: str, told: dict[str, Any], nbytes: int) -> String:
    (left_ms,) = _numbers(told["ttl_left_ms"], 1, FOREVER, MAX_I64)
    return String(bytes_of(name.removeprefix("string:")), nbytes, left_ms, _checksum(told["checksum"]))


def _pages_of(told: dict[str, Any], nbytes: int, most_pages: int) -> PageTensor:
    (layers,), (heads,) = (_numbers(told.get(name, 1), 1, 1, MAX_LAYER + 1) for name in ("layers", "heads"))
    count = layers * heads
    if count > most_pages:
        raise ValueError(f"it has {count} pages, and at most {most_pages} are read")
    if count > 1 and told.keys() & {"layer", "head"}:
        raise ValueError("a plane has all layers and heads from 0")
    if count > max(nbytes, 1) or nbytes % count:
        raise ValueError(f"{nbytes} bytes are not {layers} layers of {heads} heads")
    numbers = (told.get("layer", 0), told.get("head", 0), told["page"], told["kv_type"])
    layer, head, page, kv_type = _unfolded([*numbers], 4, int)
    page_size, head_dim = _unfolded([told["page_size"], told["head_dim"]], 2, int)
    req_id = bytes_of(told["request"])
    PageKey(req_id, layer + layers - 1, head + heads - 1, page, kv_type)  # raises if the last page has no valid key
    pages = PageTensor(
        PageKey(req_id, layer, head, page, kv_type),
        (layers, heads),
        Geometry(DType[told["dtype"].upper()], page_size, head_dim, nbytes // count),
        WrittenPages(
            _numbers(told["created_ms"], count, 0, MAX_I64),
            _numbers(told["ttl"], count, 0, MAX_TTL),
            _unfolded(told["unchecked"], count, bool),
        ),
        _numbers(told["ttl_left_ms"], count, FOREVER, MAX_I64),
        [_checksum(digest) for digest in _unfolded(told["checksum"], count, str)],
    )
    pages.header(0)  # raises for values out of range that all pages have in common
    return pages


def _numbers(value: Any, count: int, low: int, high: int) -> list[int]:
    numbers = _unfolded(value, count, int)
    if min(numbers) < low or max(numbers) > high:
        raise ValueError(f"{low} to {high} are allowed")
    return numbers


def _checksum(digest: Any) -> int:
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("a checksum has 16 hexadecimal digits")
    return int(digest, 16)
