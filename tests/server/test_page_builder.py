"""The page contract: keys, the 64-byte header, round trips, and every way in which a page can be wrong.

Also runs by itself, from this directory: ``python3 -m unittest test_page_builder.py -v``.
"""

from __future__ import annotations

import struct
import time
import unittest
from dataclasses import replace

import _venv  # noqa: F401  # isort: split
import xxhash

from kvpage_server.page import (
    HEADER_SIZE,
    MAGIC,
    MAX_TTL,
    VERSION,
    BlockShape,
    DType,
    KVType,
    PageError,
    PageHeader,
    PageKey,
    Plane,
    check_dtype,
    checksum,
    decode_page,
    encode_page,
    index_key,
)

KEY = PageKey(b"agent-7", layer=5, head=8, page=42, kv_type=KVType.V)
BODY = bytes(range(256)) * 8  # [8, 128] float16


def blob(body: bytes = BODY, *, key: PageKey = KEY, dtype: DType = DType.FLOAT16, ttl: int = 3600) -> bytearray:
    """A page of 8 token rows, created at a time that fills all of its 8 bytes."""
    page = encode_page(key, body, dtype=dtype, page_size=8, head_dim=128, ttl=ttl, created_ms=0x0102_0304_0506_0708)
    return bytearray(page)


class PageKeyTest(unittest.TestCase):
    def test_spells_all_five_parts(self) -> None:
        self.assertEqual(bytes(KEY), b"kv:agent-7:5:8:42:1")

    def test_parses_its_own_encoding(self) -> None:
        for req_id in (b"r", b"x" * 256, b"a@b/c%d", "vår-förfrågan".encode(), b"\xff\xfe"):
            for numbers in ((0, 0, 0, 0), (65535, 65535, 2**32 - 1, 5), (30, 3, 1000, 2)):
                key = PageKey(req_id, *numbers)
                self.assertEqual(PageKey.parse(bytes(key)), key)

    def test_the_index_key_is_no_page_key(self) -> None:
        self.assertEqual(index_key(b"agent-7"), b"kv:agent-7:index")
        with self.assertRaises(PageError):
            PageKey.parse(index_key(b"agent-7"))

    def test_refuses_a_req_id_outside_the_contract(self) -> None:
        for req_id in (b"", b"x" * 257, b"a:b", b"a b", b"a\n", b"\x00", b"\x1f", b"\x7f", b"a\tb"):
            with self.subTest(req_id=req_id):
                with self.assertRaisesRegex(PageError, "^req_id must be 1 to 256 bytes without ':'"):
                    PageKey(req_id, 0, 0, 0, 0)
                with self.assertRaisesRegex(PageError, "^req_id"):
                    index_key(req_id)

    def test_refuses_numbers_out_of_range_and_names_them(self) -> None:
        cases = {
            "layer": ("layer_idx", 65535),
            "head": ("head_idx", 65535),
            "page": ("page_id", 4294967295),
            "kv_type": ("kv_type", 5),
        }
        for field, (name, highest) in cases.items():
            for value in (-1, highest + 1, 2**64):
                with self.subTest(field=field, value=value):
                    with self.assertRaises(PageError) as caught:
                        replace(KEY, **{field: value})
                    self.assertEqual(str(caught.exception), f"{name} must be between 0 and {highest}, got {value}")

    def test_parses_only_the_canonical_spelling(self) -> None:
        spellings = [
            b"",
            b"kv",
            b"kv:a:1:2:3",
            b"kv:a:1:2:3:0:0",
            b"kv:a:01:2:3:0",
            b"kv:a:+1:2:3:0",
            b"kv:a:-1:2:3:0",
            b"kv:a:1:2: 3:0",
            b"kv:a:1:2:3:6",
            b"kv:a:1:2:3:00",
            b"kv:a:65536:2:3:0",
            b"kv:a:1:65536:3:0",
            b"kv:a:1:2:4294967296:0",
            b"kv:a:1:2:3:0\n",
            b"KV:a:1:2:3:0",
            b"kv::1:2:3:0",
            b"kv:a:1:2:\xd9\xa3:0",
            b"kv:" + b"x" * 257 + b":1:2:3:0",
        ]
        for spelling in spellings:
            with self.subTest(spelling=spelling), self.assertRaises(PageError):
                PageKey.parse(spelling)


class HeaderLayoutTest(unittest.TestCase):
    """Each field where the design's table has it, read back with nothing but struct."""

    def field(self, offset: int, code: str) -> object:
        return struct.unpack_from("<" + code, blob(), offset)[0]

    def test_every_field_is_at_its_offset(self) -> None:
        table = [
            (0, "4s", b"KVPG"),
            (4, "B", 2),  # version
            (5, "B", 1),  # dtype: float16
            (6, "B", 1),  # kv_type: V
            (7, "B", 0),  # flags
            (8, "I", 8),  # page_size
            (12, "I", 128),  # head_dim
            (16, "I", 5),  # layer_idx
            (20, "I", 8),  # head_idx
            (24, "Q", 42),  # page_id
            (32, "Q", 0x0102_0304_0506_0708),  # created
            (40, "Q", 3600),  # ttl
            (48, "I", 2048),  # body length
            (52, "I", 0),  # reserved
            (56, "Q", xxhash.xxh3_64_intdigest(BODY)),
        ]
        self.assertEqual(sum(struct.calcsize("<" + code) for _, code, _ in table), HEADER_SIZE)
        for offset, code, expected in table:
            with self.subTest(offset=offset):
                self.assertEqual(self.field(offset, code), expected)

    def test_numbers_are_little_endian(self) -> None:
        self.assertEqual(blob()[32:40], bytes((8, 7, 6, 5, 4, 3, 2, 1)))

    def test_the_body_follows_the_header_at_once(self) -> None:
        self.assertEqual(HEADER_SIZE, 64)
        self.assertEqual(blob()[64:], BODY)

    def test_dtypes_have_the_numbers_of_the_contract(self) -> None:
        names = {1: "FLOAT16", 2: "FLOAT32", 3: "INT8", 4: "BFLOAT16", 5: "FLOAT8_E4M3", 6: "FLOAT8_E5M2"}
        names |= {7: "UINT32", 8: "UINT8", 9: "BOOL", 10: "UINT16", 11: "INT16", 12: "INT32", 13: "UINT64"}
        names |= {14: "INT64", 15: "FLOAT64"}
        self.assertEqual({int(dtype): dtype.name for dtype in DType}, names)
        self.assertEqual([dtype.itemsize for dtype in DType], [2, 4, 1, 2, 1, 1, 4, 1, 1, 2, 2, 4, 8, 8, 8])


class RoundTripTest(unittest.TestCase):
    def test_a_page_is_decoded_unchanged(self) -> None:
        header, body = decode_page(bytes(blob()))
        self.assertEqual(body, BODY)
        self.assertEqual((header.dtype, header.page_size, header.head_dim), (DType.FLOAT16, 8, 128))
        self.assertEqual((header.ttl, header.created_ms), (3600, 0x0102_0304_0506_0708))
        self.assertEqual(header.checksum, checksum(BODY))
        self.assertEqual(header.tensor_size, len(BODY))

    def test_the_body_is_a_view_not_a_copy(self) -> None:
        page = blob()
        _, body = decode_page(page)
        page[HEADER_SIZE] ^= 0xFF
        self.assertEqual(body[0], page[HEADER_SIZE])

    def test_every_dtype_and_plane_survives(self) -> None:
        for dtype in DType:
            for kv_type in KVType:
                key = replace(KEY, kv_type=kv_type)
                body = BODY[: 8 * 16 * dtype.itemsize]
                page = encode_page(key, body, dtype=dtype, page_size=8, head_dim=16)
                header, back = decode_page(page)
                self.assertEqual((header.dtype, header.kv_type, back), (dtype, kv_type, body))
                self.assertEqual(header.tensor_size, len(body))

    def test_the_highest_values_survive(self) -> None:
        key = PageKey(b"a", 65535, 65535, 2**32 - 1, 5)
        page = encode_page(key, b"", dtype=DType.UINT8, page_size=2**32 - 1, head_dim=2**32 - 1, ttl=MAX_TTL)
        header, body = decode_page(page)
        self.assertEqual((header.layer, header.head, header.page, header.kv_type), (65535, 65535, 2**32 - 1, 5))
        self.assertEqual((header.page_size, header.head_dim, header.ttl), (2**32 - 1, 2**32 - 1, MAX_TTL))
        self.assertEqual(len(body), 0)

    def test_a_header_spells_the_bytes_it_was_parsed_from(self) -> None:
        header = PageHeader.parse(blob())
        self.assertEqual(bytes(header), blob()[:HEADER_SIZE])

    def test_a_body_need_not_fill_the_declared_shape(self) -> None:
        header, body = decode_page(encode_page(KEY, b"BLOB_DATA", dtype=DType.FLOAT16, page_size=128, head_dim=64))
        self.assertEqual(body, b"BLOB_DATA")
        self.assertEqual((header.body_size, header.tensor_size), (9, 128 * 64 * 2))

    def test_any_contiguous_buffer_is_a_body(self) -> None:
        for body in (BODY, bytearray(BODY), memoryview(BODY), memoryview(BODY).cast("H", (8, 128))):
            self.assertEqual(encode_page(KEY, body, dtype=DType.FLOAT16, page_size=8, head_dim=128)[64:], BODY)

    def test_created_is_now_in_milliseconds_unless_given(self) -> None:
        before = time.time() * 1000 - 1
        header = PageHeader.parse(encode_page(KEY, BODY, dtype=DType.FLOAT16, page_size=8, head_dim=128))
        self.assertTrue(before <= header.created_ms <= time.time() * 1000 + 1)

    def test_a_header_knows_its_own_key_only(self) -> None:
        header = PageHeader.parse(blob())
        self.assertTrue(header.names(KEY))
        for change in ({"layer": 6}, {"head": 9}, {"page": 43}, {"kv_type": 0}):
            with self.subTest(change=change):
                self.assertFalse(header.names(replace(KEY, **change)))


class BadPageTest(unittest.TestCase):
    """Wrong bytes are worse than no bytes: each damage has an error that names it."""

    def assert_refused(self, page: bytes | bytearray, message: str) -> None:
        with self.assertRaisesRegex(PageError, message):
            decode_page(page)

    def patched(self, offset: int, code: str, value: int | bytes) -> bytearray:
        page = blob()
        struct.pack_into("<" + code, page, offset, value)
        return page

    def test_version_1_is_refused_by_name(self) -> None:
        message = r"^page version 1 \(the 32-byte header of the prototype\) is not supported, only 2$"
        self.assert_refused(self.patched(4, "B", 1), message)
        whole_page_of_version_1 = MAGIC + b"\x01" + bytes(27) + b"body"
        self.assert_refused(whole_page_of_version_1, message)

    def test_other_versions_are_refused(self) -> None:
        for version in (0, 3, 255):
            self.assertNotEqual(version, VERSION)
            self.assert_refused(self.patched(4, "B", version), f"^page version {version} is not supported, only 2$")

    def test_foreign_magic_is_refused(self) -> None:
        self.assert_refused(self.patched(0, "4s", b"KVPg"), r"starts with b'KVPG', got b'KVPg'$")

    def test_a_blob_shorter_than_the_header_is_refused(self) -> None:
        for size in (0, 1, 4, 32, 63):
            self.assert_refused(bytes(blob()[:size]), f"at least 64 bytes, got {size}$")

    def test_unknown_dtypes_are_refused_with_the_known_ones_listed(self) -> None:
        known = (
            "1 float16, 2 float32, 3 int8, 4 bfloat16, 5 float8_e4m3, 6 float8_e5m2, 7 uint32, 8 uint8, "
            "9 bool, 10 uint16, 11 int16, 12 int32, 13 uint64, 14 int64, 15 float64"
        )
        for dtype in (0, 16, 255):
            self.assert_refused(self.patched(5, "B", dtype), f"^dtype must be one of {known}, got {dtype}$")
            with self.assertRaises(PageError):
                check_dtype(dtype)

    def test_fields_out_of_range_are_refused_by_name(self) -> None:
        cases: list[tuple[int, str, int, str]] = [
            (6, "B", 6, "kv_type must be between 0 and 5, got 6"),
            (7, "B", 0x80, "flags must be 0, got 0x80"),
            (8, "I", 0, "page_size must be between 1 and 4294967295, got 0"),
            (12, "I", 0, "head_dim must be between 1 and 4294967295, got 0"),
            (16, "I", 65536, "layer_idx must be between 0 and 65535, got 65536"),
            (20, "I", 65536, "head_idx must be between 0 and 65535, got 65536"),
            (24, "Q", 2**32, "page_id must be between 0 and 4294967295, got 4294967296"),
            (40, "Q", MAX_TTL + 1, f"ttl must be between 0 and {MAX_TTL}, got {MAX_TTL + 1}"),
            (52, "I", 1, "the reserved field must be 0, got 1"),
        ]
        for offset, code, value, message in cases:
            with self.subTest(offset=offset):
                self.assert_refused(self.patched(offset, code, value), f"^{message}$")

    def test_encoding_and_decoding_refuse_the_same(self) -> None:
        good = {"dtype": DType.FLOAT16, "page_size": 8, "head_dim": 128, "ttl": 0, "created_ms": 0}
        cases = {
            "dtype": (0, 16),
            "page_size": (0, -1, 2**32),
            "head_dim": (0, -1, 2**32),
            "ttl": (-1, MAX_TTL + 1),
            "created_ms": (-1, 2**63),
        }
        for field, values in cases.items():
            for value in values:
                name = field.removesuffix("_ms")
                with self.subTest(field=field, value=value), self.assertRaisesRegex(PageError, f"^{name} must be"):
                    encode_page(KEY, BODY, **{**good, field: value})

    def test_a_body_of_another_length_is_refused(self) -> None:
        self.assert_refused(blob()[:-1], "^the header promises a body of 2048 bytes, got 2047$")
        self.assert_refused(blob() + b"\0", "^the header promises a body of 2048 bytes, got 2049$")

    def test_a_flipped_bit_anywhere_in_the_body_is_caught(self) -> None:
        for offset in (HEADER_SIZE, HEADER_SIZE + 1000, HEADER_SIZE + len(BODY) - 1):
            page = blob()
            page[offset] ^= 0x10
            self.assert_refused(page, "^the body does not match the checksum in its header$")

    def test_a_changed_checksum_is_caught(self) -> None:
        self.assert_refused(self.patched(56, "Q", checksum(BODY) ^ 1), "checksum")

    def test_verification_can_be_left_to_another(self) -> None:
        page = blob()
        page[-1] ^= 1
        _, body = decode_page(page, verify=False)
        self.assertEqual(body, page[HEADER_SIZE:])

    def test_a_page_written_without_checksum_is_not_checked(self) -> None:
        page = encode_page(KEY, BODY, dtype=DType.FLOAT16, page_size=8, head_dim=128, with_checksum=False)
        header, body = decode_page(page)
        self.assertEqual((header.checksum, body), (0, BODY))


class BlockShapeTest(unittest.TestCase):
    """The position of each page of a block in its body: layer, plane, head, token, dim."""

    # A 4-bit cache: K and V packed in uint32, with scales and biases, which have another row length and dtype.
    SHAPE = BlockShape(
        layers=3,
        heads=2,
        page_size=4,
        planes=(
            Plane(KVType.K, DType.UINT32, 8),
            Plane(KVType.V, DType.UINT32, 16),
            Plane(KVType.K_SCALES, DType.FLOAT16, 1),
        ),
    )

    def test_pages_tile_the_body_in_order(self) -> None:
        spans = [
            self.SHAPE.page_span(layer, head, plane.kv_type)
            for layer in range(3)
            for plane in self.SHAPE.planes
            for head in range(2)
        ]
        self.assertEqual(len(spans), self.SHAPE.pages)
        self.assertEqual(spans[0].start, 0)
        self.assertEqual([span.start for span in spans[1:]], [span.stop for span in spans[:-1]])
        self.assertEqual(spans[-1].stop, self.SHAPE.nbytes)

    def test_sizes_follow_from_the_shape(self) -> None:
        sizes = [self.SHAPE.page_nbytes(plane) for plane in self.SHAPE.planes]
        self.assertEqual(sizes, [4 * 8 * 4, 4 * 16 * 4, 4 * 1 * 2])
        self.assertEqual(self.SHAPE.layer_nbytes, 2 * sum(sizes))
        self.assertEqual(self.SHAPE.nbytes, 3 * 2 * sum(sizes))

    def test_refuses_a_page_it_has_not(self) -> None:
        cases = [
            ((3, 0, 0), "^layer_idx must be between 0 and 2, got 3$"),
            ((-1, 0, 0), "^layer_idx"),
            ((0, 2, 0), "^head_idx must be between 0 and 1, got 2$"),
            ((0, 0, 3), r"^kv_type must be one of \[0, 1, 2\], got 3$"),
        ]
        for page, message in cases:
            with self.subTest(page=page), self.assertRaisesRegex(PageError, message):
                self.SHAPE.page_span(*page)

    def test_refuses_planes_that_are_missing_doubled_or_out_of_order(self) -> None:
        k, v = self.SHAPE.planes[:2]
        for planes in ((), (k, k), (v, k)):
            with self.subTest(planes=planes), self.assertRaisesRegex(PageError, "^planes must be given once each"):
                replace(self.SHAPE, planes=planes)

    def test_refuses_sizes_out_of_range(self) -> None:
        for change in ({"layers": 0}, {"layers": 65537}, {"heads": 0}, {"heads": 65537}, {"page_size": 0}):
            (name,) = change
            with self.subTest(change=change), self.assertRaisesRegex(PageError, f"^{name} must be between 1 and"):
                replace(self.SHAPE, **change)
        with self.assertRaisesRegex(PageError, "^head_dim"):
            Plane(KVType.K, DType.FLOAT16, 0)


if __name__ == "__main__":
    unittest.main()
