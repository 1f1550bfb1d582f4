"""The pages of a block as tensors: a plane in one where it is whole and of one geometry, and single pages elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from kvpage_server.page import MAX_BLOCK_PAGES, PageHeader, PageKey, checksum
from kvpage_server.snapshot.format.entries import Geometry, PageTensor, WrittenPages
from kvpage_server.snapshot.format.files import Tensor


class FoundPage(NamedTuple):
    """A page as the server has it."""

    key: PageKey
    header: PageHeader
    ttl_left_ms: int  # -1: for ever
    body: memoryview


def tensors_of(block: Iterable[FoundPage]) -> Iterator[Tensor]:
    """The tensors that hold the pages of a block."""
    pages = sorted(block, key=lambda page: (page.key.kv_type, page.key.layer, page.key.head))
    for _, plane in groupby(pages, lambda page: page.key.kv_type):
        some = list(plane)
        for part in [some] if _is_whole(some) else [[page] for page in some]:
            yield Tensor(_entry(part), [page.body for page in part])


def _is_whole(plane: list[FoundPage]) -> bool:
    """Whether these are all pages of a plane, and have one geometry."""
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
