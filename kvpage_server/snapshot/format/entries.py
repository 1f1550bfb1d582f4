"""What a tensor of a dump holds, and how the file's metadata tells it: a JSON object a tensor, under the tensor's name.

Of a page or plane: request, page, kv_type, dtype, page_size, head_dim; layer and head of a page, layers and heads (how
many) of a plane; and created_ms, ttl (seconds given at the write), ttl_left_ms (-1: for ever) and checksum (XXH3-64 of
the body, hexadecimal), each one value or, where the pages of a plane differ, a list by layer and head. `unchecked` says
that a page was stored without a checksum; the one here is then the dump's own. Of a string: ttl_left_ms and checksum.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvpage_server.page import DType, PageHeader, PageKey
from kvpage_server.snapshot.format.names import bytes_of, plane_name, string_name, text_of

T = TypeVar("T")

FOREVER = -1  # what PTTL says of a key without an expiry


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
    def sizes(self) -> list[int]:
        """The bytes of each body, in the order in which they lie in the tensor."""
        return [self.geometry.body_size] * len(self.checksums)

    def keys(self) -> Iterator[PageKey]:
        """The pages' keys, in that order."""
        first, (layers, heads) = self.first, self.grid
        for layer in range(first.layer, first.layer + layers):
            for head in range(first.head, first.head + heads):
                yield PageKey(first.req_id, layer, head, first.page, first.kv_type)

    def headers(self) -> Iterator[PageHeader]:
        """The pages' headers, as they were stored."""
        dtype, page_size, head_dim, body_size = self.geometry
        columns = zip(self.keys(), self.written.created_ms, self.written.ttl, self.checksums, strict=True)
        for (key, created_ms, ttl, checksum), unchecked in zip(columns, self.written.unchecked, strict=True):
            about = key.layer, key.head, key.page, created_ms, ttl, body_size, 0 if unchecked else checksum
            yield PageHeader(dtype, key.kv_type, page_size, head_dim, *about)

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
    def sizes(self) -> list[int]:
        return [self.size]

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


def entry_of(name: str, note: str, nbytes: int) -> Entry:
    """The entry of a tensor of so many bytes, from what the metadata says of it.

    Raises ValueError, KeyError or TypeError for a note that is none, or that is of another tensor.
    """
    told = json.loads(note)
    if not isinstance(told, dict):
        raise ValueError(f"of {name} nothing is told")
    entry = _pages_of(told, nbytes) if "request" in told else _string_of(name, told, nbytes)
    if entry.name != name:
        raise ValueError(f"it is told to be {entry.name}")
    return entry


def _string_of(name: str, told: dict[str, Any], nbytes: int) -> String:
    (left_ms,) = _unfolded(told["ttl_left_ms"], 1, int)
    return String(bytes_of(name.removeprefix("string:")), nbytes, left_ms, int(told["checksum"], 16))


def _pages_of(told: dict[str, Any], nbytes: int) -> PageTensor:
    layers, heads = told.get("layers", 1), told.get("heads", 1)
    count = layers * heads
    if not 0 < count <= max(nbytes, 1) or nbytes % count:
        raise ValueError(f"{nbytes} bytes are not {layers} layers of {heads} heads")
    layer, head, dtype = told.get("layer", 0), told.get("head", 0), DType[told["dtype"].upper()]
    created_ms, ttl = (_unfolded(told[name], count, int) for name in ("created_ms", "ttl"))
    pages = PageTensor(
        PageKey(bytes_of(told["request"]), layer, head, told["page"], told["kv_type"]),
        (layers, heads),
        Geometry(dtype, told["page_size"], told["head_dim"], nbytes // count),
        WrittenPages(created_ms, ttl, _unfolded(told["unchecked"], count, bool)),
        _unfolded(told["ttl_left_ms"], count, int),
        [int(digest, 16) for digest in _unfolded(told["checksum"], count, str)],
    )
    next(pages.headers())  # all of one geometry: what is out of range in one is so in each
    return pages
