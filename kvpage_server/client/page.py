"""Pages and blocks as callers pass them to the client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, overload

from typing_extensions import Buffer

from kvpage_server.client.errors import BadBuffer
from kvpage_server.core import Memory, PageKeys, SentPages
from kvpage_server.core.pieces import Unusable, as_bytes
from kvpage_server.core.python.bodies import PART
from kvpage_server.page import (
    HEADER_SIZE,
    MAX_HEAD,
    MAX_KV_TYPE,
    MAX_LAYER,
    MAX_PAGE,
    MAX_TTL,
    MAX_U32,
    BlockShape,
    DType,
    PageError,
    PageHeader,
    PageKey,
    Plane,
    check_dtype,
    check_integer,
    check_range,
    check_req_id,
    checksum,
)

# -- The caller's memory as bytes, without a copy: numpy arrays, mx.arrays, bytearrays, memoryviews --------------------


def readable(buffer: Buffer) -> memoryview:
    """Return a view of the bytes of a C-contiguous buffer of any element type. Raises BadBuffer."""
    try:
        return as_bytes(buffer)
    except Unusable as error:
        raise BadBuffer(error.why) from None


def places(buffers: Sequence[Buffer], count: int) -> Memory:
    """Return `count` writable buffers as `Memory`. Raises BadBuffer, which names the first buffer that cannot be
    used.
    """
    if len(buffers) != count:
        raise BadBuffer(f"{count} values need {count} buffers, got {len(buffers)}")
    try:
        return Memory(buffers, writable=True)
    except Unusable as error:
        raise BadBuffer(str(error)) from None


BlockName = tuple[bytes, int]  # req_id, page_id
StateName = tuple[bytes, int, int]  # req_id, page_id, number of blocks that are before the state
BlockBody = Buffer | Sequence[Buffer]  # memory in one piece, or in several consecutive ones


class Page(NamedTuple):
    """A page. Its body is C-contiguous memory, ``[page_size, head_dim]`` of `dtype`."""

    key: PageKey
    body: Buffer
    dtype: DType
    page_size: int
    head_dim: int


class PageLayout:
    """The pages of a block, for several blocks alike: layer, head, kv_type, dtype, page_size and head_dim of each."""

    def __init__(self, pages: Iterable[tuple[int, int, int, DType, int, int]]) -> None:
        """Raise PageError for a number out of range, and TypeError for another type."""
        self.pages = [*pages]
        for layer, head, kv_type, dtype, page_size, head_dim in self.pages:
            check_range("layer_idx", layer, 0, MAX_LAYER)
            check_range("head_idx", head, 0, MAX_HEAD)
            check_range("kv_type", kv_type, 0, MAX_KV_TYPE)
            check_dtype(dtype)
            check_range("page_size", page_size, 1, MAX_U32)
            check_range("head_dim", head_dim, 1, MAX_U32)
        self.packed = b"".join(PART.pack(*page) for page in self.pages)

    def __len__(self) -> int:
        return len(self.pages)


@lru_cache(64)
def layout_of(shape: BlockShape) -> PageLayout:
    """Return the layout of blocks with this shape, in the body's order."""
    every = product(range(shape.layers), shape.planes, range(shape.heads))
    return PageLayout(
        [(layer, head, plane.kv_type, plane.dtype, shape.page_size, plane.head_dim) for layer, plane, head in every]
    )


class KeysOfBlocks(Sequence[PageKey]):
    """The keys of all pages of some blocks, block by block. It makes a PageKey only if one is read from it."""

    def __init__(self, names: Sequence[BlockName], layout: PageLayout) -> None:
        self.names, self.layout = names, layout

    def __len__(self) -> int:
        return len(self.names) * len(self.layout)

    @overload
    def __getitem__(self, at: int) -> PageKey: ...
    @overload
    def __getitem__(self, at: slice) -> list[PageKey]: ...
    def __getitem__(self, at: int | slice) -> PageKey | list[PageKey]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        block, i = divmod(range(len(self))[at], len(self.layout))
        (req_id, page), (layer, head, kv_type, *_) = self.names[block], self.layout.pages[i]
        return PageKey(req_id, layer, head, page, kv_type)


class BlockPages(Sequence[Page]):
    """All pages of some blocks, block by block. It makes a Page only if one is read from it, so a batch of thousands
    costs little more than their names.

    `names` are (req_id, page_id) of the blocks, `bodies` the memory of each page. `keys` are the keys for a read.
    """

    def __init__(self, names: Sequence[BlockName], layout: PageLayout, bodies: Sequence[Buffer]) -> None:
        """Raise BadBuffer for another number of bodies."""
        self.keys, self.bodies = KeysOfBlocks(names, layout), bodies
        if len(bodies) != len(self.keys):
            raise BadBuffer(f"{len(names)} blocks of {len(layout)} pages need {len(self)} bodies, got {len(bodies)}")

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> Page: ...
    @overload
    def __getitem__(self, at: slice) -> list[Page]: ...
    def __getitem__(self, at: int | slice) -> Page | list[Page]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        i = range(len(self))[at]
        return Page(self.keys[i], self.bodies[i], *self.keys.layout.pages[i % len(self.keys.layout)][3:])


def page_keys(keys: Sequence[PageKey]) -> PageKeys:
    """Return keys in the form in which they are sent. Raises as `check_names` for the names of KeysOfBlocks."""
    if not isinstance(keys, KeysOfBlocks):
        return PageKeys(keys)
    try:
        return PageKeys.of_blocks(keys.names, keys.layout.packed)
    except (TypeError, ValueError):
        check_names(keys.names)
        raise


def sized(pages: Sequence[Page], ttl: int) -> SentPages:
    """Check pages and the `ttl` in seconds, and return the pages in the form in which they are sent.

    Raises BadBuffer, which names the first page with a body of another length than its shape has; PageError for a
    dtype, shape or ttl out of range; TypeError for an argument of another type.
    """
    check_range("ttl", ttl, 0, MAX_TTL)
    try:
        if isinstance(pages, BlockPages):
            found = SentPages.of_blocks(pages.keys.names, pages.keys.layout.packed, pages.bodies)
        else:
            found = SentPages(pages)
    except Unusable as error:
        raise BadBuffer(f"page {error.index}: {error.why}") from None
    except (AttributeError, TypeError, ValueError):
        if isinstance(pages, BlockPages):
            check_names(pages.keys.names)
        for i, page in enumerate(pages):
            _check_types(i, page)
        raise
    misfit = found.misfit()
    if misfit >= 0:
        raise _misfit(misfit, pages[misfit])
    return found


def _check_types(index: int, page: Any) -> None:
    """Raise TypeError if `page` is no Page with a PageKey, PageError for an unknown dtype or a shape out of range."""
    if not isinstance(page, tuple) or len(page) != len(Page._fields) or not isinstance(page[0], PageKey):
        raise TypeError(f"page {index} must be a Page whose key is a PageKey, got {page!r:.60}")
    check_dtype(page[2])
    check_range("page_size", page[3], 1, MAX_U32)
    check_range("head_dim", page[4], 1, MAX_U32)


def _misfit(index: int, page: Page) -> Exception:
    """Return the error for a page that can't be written, with its index in the batch and the reason."""
    try:
        check_range("page_size", page.page_size, 1, MAX_U32)
        check_range("head_dim", page.head_dim, 1, MAX_U32)
        nbytes = page.page_size * page.head_dim * check_dtype(page.dtype).itemsize
        check_range("body length", nbytes, 0, MAX_U32)
    except PageError as error:
        return error
    size = len(readable(page.body))
    return BadBuffer(f"page {index}: page_size x head_dim x itemsize is {nbytes} bytes, its body has {size}")


def header_of(key: PageKey, blob: Any) -> PageHeader | None:
    """Return the header at the start of a blob; None if there is no valid header, or it belongs to another page than
    `key`.
    """
    try:
        header = PageHeader.parse(blob[:HEADER_SIZE]) if isinstance(blob, bytes | memoryview) else None
    except PageError:
        return None
    return header if header and header.names(key) else None


def mismatch(header: PageHeader | None, body: memoryview, *, verify: bool) -> str | None:
    """Return the reason why a page is invalid, ``header`` or ``checksum``; None if it is valid.

    `header` is None if it was invalid. With `verify`, the checksum of the body is compared, too.
    """
    if header is None or header.body_size != len(body):
        return "header"
    return "checksum" if verify and header.checksum and checksum(body) != header.checksum else None


def check_keys(keys: Sequence[PageKey]) -> Sequence[PageKey]:
    """Return the keys unchanged. Raises TypeError for another type than PageKey."""
    if isinstance(keys, KeysOfBlocks):
        return keys
    for kind in {*map(type, keys)}:
        if not issubclass(kind, PageKey):
            raise TypeError(f"a page's key must be a PageKey, got {kind.__name__}")
    return keys


def check_connections(connections: int) -> None:
    """Raise ValueError for a number of connections that is not at least 1."""
    check_integer("connections", connections)
    if connections < 1:
        raise ValueError(f"connections must be at least 1, got {connections}")


def check_integers(**numbers: int) -> None:
    """Raise TypeError for an argument that is no integer. The server checks the ranges."""
    for name, number in numbers.items():
        check_integer(name, number)


def check_keep(keys: Sequence[bytes], seconds: int, tenant: str, tenants: int) -> None:
    """Raise TypeError for an argument of `PageClient.keep` that has a wrong type."""
    for key in keys:
        if not isinstance(key, bytes):
            hint = ": bytes(key) is its name" if isinstance(key, PageKey) else ""
            raise TypeError(f"a key must be bytes, got {type(key).__name__}{hint}")
    check_integers(seconds=seconds, tenants=tenants)
    if not isinstance(tenant, str):
        raise TypeError(f"tenant must be str, got {type(tenant).__name__}")


def check_names(names: Sequence[BlockName]) -> None:
    """Raise TypeError for a name that is no (req_id, page_id), PageError for a part of a name that is out of range."""
    for name in names:
        if not isinstance(name, tuple | list) or len(name) != 2:
            raise TypeError(f"a block's name is a tuple (req_id, page_id), got {name!r:.60}")
        req_id, page = name
        check_req_id(req_id)
        check_range("page_id", page, 0, MAX_PAGE)


def check_states(names: Sequence[BlockName], states: Sequence[StateName]) -> None:
    """Check the names of blocks and of states as `check_names`."""
    check_names(names)
    for state in states:
        if not isinstance(state, tuple | list) or len(state) != 3:
            raise TypeError(f"a state's name is a tuple (req_id, page_id, need), got {state!r:.60}")
        check_names([(state[0], state[1])])
        check_range("need", state[2], 1, MAX_U32)


def sized_blocks(
    names: Sequence[BlockName], shape: BlockShape, bodies: Sequence[BlockBody], ttl: int
) -> list[list[memoryview]]:
    """Check blocks and the `ttl` in seconds, and return the pieces of each block's body as bytes.

    Raises BadBuffer for a body of another length than `shape` has; PageError for a name or ttl out of range; TypeError
    for a name or shape of another type.
    """
    check_names(names)
    check_range("ttl", ttl, 0, MAX_TTL)
    if len(bodies) != len(names):
        raise BadBuffer(f"{len(names)} blocks need {len(names)} bodies, got {len(bodies)}")
    pieces = [[*map(readable, body if isinstance(body, list | tuple) else [body])] for body in bodies]
    check_block_sizes((sum(map(len, body)) for body in pieces), shape)
    return pieces


def check_block_sizes(sizes: Iterable[int], shape: BlockShape) -> None:
    """Raise BadBuffer, which names the first block with memory of another length than `shape` has.

    `sizes` has the bytes of each block. Raises TypeError if `shape` is no BlockShape.
    """
    if not isinstance(shape, BlockShape):
        raise TypeError(f"a block's shape must be a BlockShape, got {type(shape).__name__}")
    for i, size in enumerate(sizes):
        if size != shape.nbytes:
            raise BadBuffer(f"block {i}: a block of this shape has {shape.nbytes} bytes, its memory has {size}")


def pages_of_block(name: BlockName, shape: BlockShape) -> Iterator[tuple[PageKey, Plane, slice]]:
    """Yield the key, plane and byte range of each page of a block, in the body's order."""
    req_id, page = name
    pages = product(range(shape.layers), shape.planes, range(shape.heads))
    for (layer, plane, head), span in zip(pages, shape.page_spans(), strict=True):
        yield PageKey(req_id, layer, head, page, plane.kv_type), plane, span
