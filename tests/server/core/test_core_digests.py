"""Digests of pages and of bytes in several pieces."""

from __future__ import annotations

from types import ModuleType

import pytest
import xxhash
from cores import on_each_core

from kvpage_server.page import HEADER_SIZE, PageHeader, pack_header

PAGES = [bytes([i]) * size for i, size in enumerate((1, 300, 64, 5000, 300))]
WHOLE = b"".join(PAGES)


def headers() -> bytearray:
    packed = (pack_header(8, 0, 1, len(page), 0, 0, i, 0, 0, len(page), 0) for i, page in enumerate(PAGES))
    return bytearray(b"".join(packed))


@on_each_core
@pytest.mark.parametrize("pieces", [[WHOLE], PAGES, [b"", WHOLE[:301], b"", WHOLE[301:], b""]])
def test_each_page_s_digest_is_written_into_its_header(core: ModuleType, pieces: list[bytes]) -> None:
    table = headers()
    core.fill_digests(table, pieces)
    found = [PageHeader.parse(table[start : start + HEADER_SIZE]) for start in range(0, len(table), HEADER_SIZE)]
    assert [header.checksum for header in found] == [xxhash.xxh3_64_intdigest(page) for page in PAGES]
    assert core.digest([bytes(table), *pieces]) == xxhash.xxh3_64_intdigest(bytes(table) + WHOLE)


@on_each_core
@pytest.mark.parametrize("pieces", [[], [WHOLE[:-1]], [WHOLE + b"x"], [WHOLE, b"x"], [WHOLE[:200], WHOLE[200:]]])
def test_pieces_that_are_not_the_pages_are_refused(core: ModuleType, pieces: list[bytes]) -> None:
    with pytest.raises(ValueError, match="are not the pages of the headers"):
        core.fill_digests(headers(), pieces)


@on_each_core
def test_headers_that_can_t_be_written_or_are_cut_are_refused(core: ModuleType) -> None:
    with pytest.raises(ValueError, match="are not the pages of the headers"):
        core.fill_digests(headers()[:-1], [WHOLE])
    with pytest.raises(ValueError, match="read-only"):
        core.fill_digests(bytes(headers()), [WHOLE])


@on_each_core
@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 1_000_000])
def test_a_copy_is_hashed(core: ModuleType, size: int) -> None:
    source = bytes(range(256)) * (size // 256 + 1)
    target = bytearray(size)
    assert core.copy_hashed(memoryview(source)[:size], target) == xxhash.xxh3_64_intdigest(source[:size])
    assert target == source[:size]


@on_each_core
def test_a_copy_of_another_size_is_refused(core: ModuleType) -> None:
    with pytest.raises(ValueError, match="5 bytes do not fit into 4"):
        core.copy_hashed(b"12345", bytearray(4))
    with pytest.raises(ValueError, match="read-only"):
        core.copy_hashed(b"1234", b"1234")
