"""The five page commands over a real connection: replies and errors; no error loses stored data.

Also runs by itself, from this directory: ``python3 -m unittest test_page_commands.py -v``. A kvpage-server on port 9221
is used when there is one (the tests keep to request ids of their own); otherwise one is started and ended again.
"""

from __future__ import annotations

import itertools
import os
import random
import time
import unittest
from contextlib import ExitStack
from typing import Any

import _venv  # noqa: F401  # isort: split
import redis
from servers import CLIENT_OPTIONS, answers, start_server
from waiting import until

from kvpage_server.page import DType, KVType, PageHeader, PageKey, checksum, decode_page, encode_page

PORT = 9221
MAX_TTL = 2**47 - 1

_resources = ExitStack()
_numbers = itertools.count()
port = PORT


def setUpModule() -> None:
    global port
    port = PORT if answers(PORT) and _is_ours(PORT) else _resources.enter_context(start_server()).port


def tearDownModule() -> None:
    _resources.close()


def _is_ours(port: int) -> bool:
    with redis.Redis(port=port, socket_timeout=5) as client:
        try:
            return "kvpage_version" in client.info()
        except redis.RedisError:
            return False


class PageCommandsTest(unittest.TestCase):
    """A connection and a request id that no other test has."""

    has_mset = True

    def setUp(self) -> None:
        self.redis = redis.Redis(port=self.port(), single_connection_client=True, **CLIENT_OPTIONS)
        self.addCleanup(self.redis.close)
        self.req = f"test-{os.getpid()}-{next(_numbers)}."  # without its last letter it is nobody's
        self.addCleanup(self.forget, self.req)

    def port(self) -> int:
        return port

    def forget(self, req: Any) -> None:
        """Leave nothing of a request behind."""
        self.call("KVPAGEDEL", req)

    def call(self, *words: Any) -> Any:
        return self.redis.execute_command(*words)

    def page(self, *, layer: Any = 0, head: Any = 0, page: Any = 0, kv_type: Any = 0, req: Any = None) -> list[Any]:
        """The five arguments that name a page."""
        return [self.req if req is None else req, layer, head, page, kv_type]

    def key(self, *, layer: int = 0, head: int = 0, page: int = 0, kv_type: int = 0) -> PageKey:
        return PageKey(self.req.encode(), layer, head, page, kv_type)

    def set_page(
        self, body: bytes = b"body", *, dtype: int = 1, size: int = 2, dim: int = 1, ttl: int = 0, **name: Any
    ):
        return self.call("KVPAGESET", *self.page(**name), dtype, size, dim, ttl, body)

    def get_page(self, **name: Any) -> Any:
        return self.call("KVPAGEGET", *self.page(**name))

    def page_exists(self, **name: Any) -> Any:
        return self.call("KVPAGEEXISTS", *self.page(**name))

    def assert_refused(self, message: str, *words: Any) -> None:
        """The error is `message`, and the same connection goes on."""
        with self.assertRaises(redis.ResponseError) as caught:
            self.call(*words)
        self.assertEqual(str(caught.exception), message)
        self.assertEqual(self.call("ECHO", "still here"), b"still here")


class DocumentedExampleTest(PageCommandsTest):
    NAME = ("test_req_001", 5, 8, 42, 0)

    def test_works_as_it_stands(self) -> None:
        self.addCleanup(self.call, "DEL", "kv:test_req_001:5:8:42:0")
        self.assertEqual(self.call("KVPAGESET", *self.NAME, 1, 128, 64, 3600, "BLOB_DATA"), b"OK")
        self.assertEqual(self.call("KVPAGEGET", *self.NAME), b"BLOB_DATA")
        self.assertEqual(self.call("KVPAGEEXISTS", *self.NAME), 1)
        self.assertIn(self.redis.ttl("kv:test_req_001:5:8:42:0"), (3599, 3600))


class SetAndGetTest(PageCommandsTest):
    def test_a_body_of_any_size_is_read_back(self) -> None:
        noise = random.Random(1)
        for size in (0, 1, 9, 1022, 1023, 1024, 1025, 4095, 4096, 4097, 16384, 131072, 131073, 3_000_001):
            with self.subTest(size=size):
                body = noise.randbytes(size)
                self.assertEqual(self.set_page(body), b"OK")
                self.assertEqual(self.get_page(), body)

    def test_bytes_that_look_like_protocol_are_just_bytes(self) -> None:
        for body in (b"\r\n", b"$-1\r\n", b"*1\r\n$4\r\nPING\r\n" * 500, b"\0" * 5000):
            self.set_page(body)
            self.assertEqual(self.get_page(), body)

    def test_a_page_that_is_not_there_is_null(self) -> None:
        self.assertIsNone(self.get_page())
        self.assertEqual(self.page_exists(), 0)

    def test_each_of_the_five_parts_names_another_page(self) -> None:
        names: list[dict[str, Any]] = [{}, {"layer": 1}, {"head": 1}, {"page": 1}, {"kv_type": 1}]
        for number, name in enumerate(names):
            self.set_page(b"page %d" % number, **name)
        for number, name in enumerate(names):
            self.assertEqual(self.get_page(**name), b"page %d" % number)
        self.assertIsNone(self.get_page(layer=1, head=1))

    def test_requests_do_not_see_each_other(self) -> None:
        self.set_page(b"mine")
        for other in (self.req + "x", self.req[:-1], self.req.upper()):
            self.assertIsNone(self.get_page(req=other))

    def test_every_plane_and_dtype_is_stored(self) -> None:
        for dtype in DType:
            for kv_type in KVType:
                body = bytes([dtype, kv_type]) * 2
                self.assertEqual(self.set_page(body, dtype=int(dtype), kv_type=int(kv_type)), b"OK")
                self.assertEqual(self.get_page(kv_type=int(kv_type)), body)

    def test_the_highest_numbers_are_stored(self) -> None:
        name = {"layer": 65535, "head": 65535, "page": 2**32 - 1, "kv_type": 5}
        self.assertEqual(self.set_page(b"end", size=2**32 - 1, dim=2**32 - 1, ttl=MAX_TTL, **name), b"OK")
        self.assertEqual(self.get_page(**name), b"end")
        header = PageHeader.parse(self.call("GET", bytes(self.key(**name))))
        self.assertEqual((header.page_size, header.head_dim, header.ttl), (2**32 - 1, 2**32 - 1, MAX_TTL))

    def test_a_req_id_may_hold_any_printable_and_any_high_byte(self) -> None:
        for req in (b"a", b"x" * 256, b"model@v1/chunk%20{tag}", b"\xff\xfe\x80", "vår".encode()):
            with self.subTest(req=req):
                self.addCleanup(self.forget, req)
                self.set_page(req, req=req)
                self.assertEqual(self.get_page(req=req), req)

    def test_writing_again_replaces_body_shape_and_ttl(self) -> None:
        self.set_page(b"first, longer", ttl=100)
        self.set_page(b"second", dtype=2, size=1, dim=3)
        self.assertEqual(self.get_page(), b"second")
        self.assertEqual(self.redis.ttl(bytes(self.key())), -1)
        header, _ = decode_page(self.call("GET", bytes(self.key())))
        self.assertEqual((header.dtype, header.page_size, header.head_dim), (DType.FLOAT32, 1, 3))


class BatchTest(PageCommandsTest):
    def arguments(self, **name: Any) -> list[Any]:
        """The ten arguments of a page whose body says which one it is."""
        return [*self.page(**name), 1, 2, 1, 0, self.body(**name)]

    def body(self, **name: Any) -> bytes:
        return repr(sorted(name.items())).encode() * 300

    def test_a_batch_is_stored_and_read_in_order(self) -> None:
        pages = [{"layer": layer, "head": head, "page": 7} for layer in range(5) for head in range(40)]
        words = [word for page in pages for word in self.arguments(**page)]
        self.assertEqual(self.call("KVPAGEMSET", len(pages), *words), b"OK")
        random.Random(2).shuffle(pages)
        names = [word for page in pages for word in self.page(**page)]
        self.assertEqual(self.call("KVPAGEMGET", len(pages), *names), [self.body(**page) for page in pages])

    def test_holes_are_null_and_stay_in_their_place(self) -> None:
        for page in (1, 3):
            self.set_page(b"%d" % page, page=page)
        names = [word for page in range(5) for word in self.page(page=page)]
        self.assertEqual(self.call("KVPAGEMGET", 5, *names), [None, b"1", None, b"3", None])

    def test_a_page_may_be_asked_for_twice(self) -> None:
        self.set_page(b"x")
        self.assertEqual(self.call("KVPAGEMGET", 3, *self.page() * 3), [b"x"] * 3)

    def test_of_a_page_given_twice_the_last_stays(self) -> None:
        words = [*self.page(), 1, 2, 1, 100, b"first", *self.page(), 1, 2, 1, 0, b"last"]
        self.assertEqual(self.call("KVPAGEMSET", 2, *words), b"OK")
        self.assertEqual(self.get_page(), b"last")
        self.assertEqual(self.redis.ttl(bytes(self.key())), -1)

    def test_one_bad_page_refuses_all_and_is_named(self) -> None:
        self.set_page(b"old", page=1)
        for position, field in itertools.product(range(3), ("layer", "dtype")):
            with self.subTest(position=position, field=field):
                pages = [self.arguments(page=page) for page in range(3)]
                pages[position][1 if field == "layer" else 5] = 70000
                what = {
                    "layer": "layer_idx must be an integer between 0 and 65535, got '70000'",
                    "dtype": "dtype must be an integer between 0 and 255, got '70000'",
                }
                words = [word for page in pages for word in page]
                self.assert_refused(f"page {position + 1} of 3: {what[field]}", "KVPAGEMSET", 3, *words)
                names = [word for page in range(3) for word in self.page(page=page)]
                self.assertEqual(self.call("KVPAGEMGET", 3, *names), [None, b"old", None])

    def test_n_must_match_the_number_of_pages(self) -> None:
        one, name = self.arguments(), self.page()
        for count, given in ((2, 10), (1, 20), (1, 9), (1, 11), (3, 20)):
            words = (one * 2)[:given] if given != 11 else [*one, "more"]
            message = f"KVPAGEMSET with N = {count} takes {count * 10} arguments after N, 10 a page, got {given}"
            if given == 9:
                message = "wrong number of arguments for 'kvpagemset' command"
            self.assert_refused(message, "KVPAGEMSET", count, *words)
        message = "KVPAGEMGET with N = 3 takes 15 arguments after N, 5 a page, got 10"
        self.assert_refused(message, "KVPAGEMGET", 3, *name, *name)
        self.assertEqual(self.page_exists(), 0)

    def test_n_must_be_a_positive_number(self) -> None:
        for count in (0, -1, 2**32, "x", "", "1.0", "+1", "01", 2**64):
            message = f"N must be an integer between 1 and 4294967295, got '{count}'"
            self.assert_refused(message, "KVPAGEMSET", count, *self.arguments())
            self.assert_refused(message, "KVPAGEMGET", count, *self.page())

    def test_a_bad_name_refuses_the_whole_read(self) -> None:
        self.set_page(b"x")
        message = "head_idx must be an integer between 0 and 65535, got '-1'"
        self.assert_refused(message, "KVPAGEMGET", 2, *self.page(), *self.page(head=-1))

    def test_many_large_pages_arrive_whole(self) -> None:
        noise = random.Random(3)
        bodies = [noise.randbytes(65536) for _ in range(200)]
        words = [word for i, body in enumerate(bodies) for word in (*self.page(page=i), 1, 256, 128, 0, body)]
        self.assertEqual(self.call("KVPAGEMSET", len(bodies), *words), b"OK")
        names = [word for i in range(len(bodies)) for word in self.page(page=i)]
        self.assertEqual(self.call("KVPAGEMGET", len(bodies), *names), bodies)


class OneKeyspaceTest(PageCommandsTest):
    """A page is also a Redis string whose value is the blob."""

    def test_get_gives_header_and_body(self) -> None:
        name = {"layer": 5, "head": 8, "page": 42, "kv_type": 1}
        body = bytes(range(256)) * 8
        before = time.time_ns() // 1_000_000
        self.set_page(body, dtype=4, size=8, dim=128, ttl=3600, **name)
        blob = self.call("GET", bytes(self.key(**name)))
        header, got = decode_page(blob)  # checks magic, version and checksum
        self.assertEqual(got, body)
        self.assertTrue(header.names(self.key(**name)))
        self.assertTrue(before <= header.created_ms <= time.time_ns() // 1_000_000)
        self.assertEqual((header.dtype, header.page_size, header.head_dim), (DType.BFLOAT16, 8, 128))
        self.assertEqual((header.ttl, header.body_size, header.checksum), (3600, 2048, checksum(body)))

    def test_key_commands_see_a_page(self) -> None:
        key = bytes(self.key())
        self.set_page()
        self.assertEqual(self.redis.exists(key, key, b"absent"), 2)
        self.assertEqual(self.redis.type(key), b"string")
        self.assertEqual(self.redis.ttl(key), -1)
        self.assertTrue(self.redis.expire(key, 50))
        self.assertIn(self.redis.ttl(key), (49, 50))
        self.assertEqual(self.redis.delete(key), 1)
        self.assertIsNone(self.get_page())
        self.assertEqual(self.page_exists(), 0)

    def test_setting_a_blob_is_a_page_write(self) -> None:
        for size in (0, 10, 5000, 200_000):
            with self.subTest(size=size):
                body = random.Random(size).randbytes(size)
                blob = encode_page(self.key(), body, dtype=DType.UINT8, page_size=10, head_dim=500)
                self.redis.set(bytes(self.key()), blob)
                self.assertEqual(self.page_exists(), 1)
                self.assertEqual(self.get_page(), body)
                self.assertEqual(self.call("GET", bytes(self.key())), blob)

    def test_a_blob_moves_between_keys_of_the_same_page(self) -> None:
        self.set_page(b"travels", layer=3)
        blob = self.call("GET", bytes(self.key(layer=3)))
        self.addCleanup(self.forget, self.req + "-copy")
        self.redis.set(f"kv:{self.req}-copy:3:0:0:0", blob)
        self.assertEqual(self.get_page(req=self.req + "-copy", layer=3), b"travels")

    def test_a_blob_under_another_pages_key_is_no_page(self) -> None:
        blob = encode_page(self.key(), b"x", dtype=DType.UINT8, page_size=1, head_dim=1)
        key = bytes(self.key(layer=1))
        self.addCleanup(self.redis.delete, key)
        self.redis.set(key, blob)
        self.assertEqual(self.page_exists(layer=1), 0)
        self.assertEqual(self.redis.get(key), blob)

    def test_a_damaged_blob_is_refused_and_the_old_page_stays(self) -> None:
        self.set_page(b"good")
        blob = bytearray(encode_page(self.key(), bytes(5000), dtype=DType.UINT8, page_size=10, head_dim=500))
        blob[3000] ^= 1
        message = "the body does not match the checksum in its header"
        self.assert_refused(message, "SET", bytes(self.key()), bytes(blob))
        self.assertEqual(self.get_page(), b"good")

    def test_a_blob_with_flags_is_refused(self) -> None:
        self.set_page(b"good")
        blob = bytearray(encode_page(self.key(), b"x", dtype=DType.UINT8, page_size=1, head_dim=1))
        for flags in (1, 2, 128, 255):
            blob[7] = flags
            message = f"flags must be 0, got {flags:#x}"
            self.assert_refused(message, "SET", bytes(self.key()), bytes(blob))
            if self.has_mset:
                self.assert_refused(message, "MSET", bytes(self.key()), bytes(blob))
        self.assertEqual(self.get_page(), b"good")
        self.addCleanup(self.redis.delete, "a string")
        self.redis.set("a string", bytes(blob))
        self.assertEqual(self.redis.get("a string"), bytes(blob))

    def test_a_plain_string_under_a_page_key_is_no_page(self) -> None:
        key = bytes(self.key())
        self.addCleanup(self.redis.delete, key)
        for text in (b"plain", b"p" * 3000, b"KVPG" + bytes(100)):
            self.set_page(b"a page before")
            self.redis.set(key, text)
            self.assertEqual(self.redis.get(key), text)
            self.assertEqual(self.page_exists(), 0)
            with self.assertRaisesRegex(redis.ResponseError, "^WRONGTYPE"):
                self.get_page()
            self.assertEqual(self.call("KVPAGEMGET", 1, *self.page()), [None])
        self.set_page(b"a page again")
        self.assertEqual(self.get_page(), b"a page again")
        self.assertEqual(self.page_exists(), 1)


class ExpiryTest(PageCommandsTest):
    def test_a_page_is_absent_after_its_ttl(self) -> None:
        key = bytes(self.key())
        self.set_page(b"short-lived", ttl=1)
        self.assertGreater(self.redis.pttl(key), -1)
        self.set_page(b"stays", page=1, ttl=100)
        self.set_page(b"for ever", page=2)
        time.sleep(1.05)
        self.assertIsNone(self.get_page())
        self.assertEqual(self.page_exists(), 0)
        self.assertEqual(self.redis.ttl(key), -2)
        self.assertEqual(self.redis.exists(key), 0)
        names = [word for page in range(3) for word in self.page(page=page)]
        self.assertEqual(self.call("KVPAGEMGET", 3, *names), [None, b"stays", b"for ever"])

    def test_writing_a_page_again_gives_it_a_new_life(self) -> None:
        self.set_page(b"old", ttl=1)
        self.set_page(b"new", ttl=0)
        time.sleep(1.05)
        self.assertEqual(self.get_page(), b"new")

    def test_expire_shortens_a_pages_life(self) -> None:
        self.set_page(b"x", ttl=3600)
        self.assertTrue(self.redis.execute_command("PEXPIRE", bytes(self.key()), 30))
        time.sleep(0.05)
        self.assertIsNone(self.get_page())

    def test_an_unused_page_expires_too(self) -> None:
        expired = self.redis.info("stats")["expired_keys"]
        self.set_page(bytes(100_000), ttl=1)
        until(lambda: self.redis.info("stats")["expired_keys"] > expired)


class BadInputTest(PageCommandsTest):
    """Each has an error that names the argument and the allowed values."""

    RANGES = (
        (1, "layer_idx", 0, 65535),
        (2, "head_idx", 0, 65535),
        (3, "page_id", 0, 4294967295),
        (4, "kv_type", 0, 5),
        (5, "dtype", 0, 255),
        (6, "page_size", 1, 4294967295),
        (7, "head_dim", 1, 4294967295),
        (8, "ttl", 0, MAX_TTL),
    )
    NO_NUMBERS = ("", "x", "1x", "0x1", "1.0", "1e3", "+1", "01", " 1", "1 ", "-0", "\u0663", "1\r\n2", "NaN")

    def setUp(self) -> None:
        super().setUp()
        self.set_page(b"stored before")
        self.addCleanup(self.assert_stored_page_is_untouched)

    def assert_stored_page_is_untouched(self) -> None:
        self.assertEqual(self.get_page(), b"stored before")

    def arguments(self) -> list[Any]:
        return [*self.page(), 1, 2, 1, 0, b"new body"]

    def test_wrong_arity(self) -> None:
        cases = {"KVPAGESET": 10, "KVPAGEGET": 5, "KVPAGEEXISTS": 5}
        for command, count in cases.items():
            words = [*self.arguments(), "one more"]
            for given in (0, 1, count - 1, count + 1):
                message = f"wrong number of arguments for '{command.lower()}' command"
                self.assert_refused(message, command, *words[:given])
        for command in ("KVPAGEMSET", "KVPAGEMGET"):
            message = f"wrong number of arguments for '{command.lower()}' command"
            self.assert_refused(message, command)
            self.assert_refused(message, command, 1)

    def test_numbers_out_of_range(self) -> None:
        for position, name, low, high in self.RANGES:
            for value in (low - 1, high + 1, -(2**31), 2**63, 2**64, 10**30, -(10**30)):
                words = self.arguments()
                words[position] = value
                shown = str(value)[:32]
                message = f"{name} must be an integer between {low} and {high}, got '{shown}'"
                self.assert_refused(message, "KVPAGESET", *words)
                if position <= 4:
                    self.assert_refused(message, "KVPAGEGET", *words[:5])
                    self.assert_refused(message, "KVPAGEEXISTS", *words[:5])

    def test_non_numbers_are_refused(self) -> None:
        for position, name, low, high in self.RANGES:
            for value in self.NO_NUMBERS:
                words = self.arguments()
                words[position] = value
                shown = value.replace("\r", " ").replace("\n", " ")
                message = f"{name} must be an integer between {low} and {high}, got '{shown}'"
                self.assert_refused(message, "KVPAGESET", *words)
                if position <= 4:
                    self.assert_refused(message, "KVPAGEGET", *words[:5])

    def test_an_unknown_dtype_lists_the_known_ones(self) -> None:
        known = (
            "1 float16, 2 float32, 3 int8, 4 bfloat16, 5 float8_e4m3, 6 float8_e5m2, 7 uint32, 8 uint8, "
            "9 bool, 10 uint16, 11 int16, 12 int32, 13 uint64, 14 int64, 15 float64"
        )
        for dtype in (0, 16, 255):
            words = self.arguments()
            words[5] = dtype
            self.assert_refused(f"dtype must be one of {known}, got {dtype}", "KVPAGESET", *words)

    def test_an_odd_req_id(self) -> None:
        message = "req_id must be 1 to 256 bytes without ':', spaces or control characters"
        for req in (
            b"",
            b"x" * 257,
            b"a:b",
            b":",
            b"a b",
            b"a\tb",
            b"a\r\nb",
            b"\0",
            b"a\x7f",
            b"\x1f",
            b"x" * 100_000,
        ):
            with self.subTest(req=req[:300]):
                name = self.page(req=req)
                self.assert_refused(message, "KVPAGESET", *name, 1, 2, 1, 0, b"body")
                self.assert_refused(message, "KVPAGEGET", *name)
                self.assert_refused(message, "KVPAGEEXISTS", *name)

    def test_colons_cannot_smuggle_one_page_into_another(self) -> None:
        """The five arguments joined spell the stored key, but they are not its five parts."""
        smuggled = [self.req + ":0", "0", "0", "0", ""]
        with self.assertRaisesRegex(redis.ResponseError, "^req_id must be"):
            self.call("KVPAGEGET", *smuggled)
        for name in ([f"{self.req}:0:0:0", "0"], [self.req, "0:0:0", "0"], [self.req, "0", "0:0:0"]):
            with self.subTest(name=name), self.assertRaises(redis.ResponseError):
                self.call("KVPAGEGET", *name, *[""] * (5 - len(name)))
        for name in ([f"{self.req}:0", "0", "0", "0"], [self.req, "0:0", "0", "0"], [self.req, "0", "0", "0:0"]):
            key = "kv:" + ":".join(name)
            self.assertEqual(key, bytes(self.key()).decode())  # four words that spell the five-part key
            with self.subTest(name=name), self.assertRaises(redis.ResponseError):
                self.call("KVPAGEGET", *name)


class ConfiguredTest(unittest.TestCase):
    """Effects of the configuration; on servers of its own."""

    def test_a_strict_server_wants_bodies_that_fill_their_shape(self) -> None:
        with start_server("--strict-page-shape", "yes") as server, server.client() as client:
            name = ["r", 0, 0, 0, 0]
            for dtype in DType:
                body = bytes(4 * 6 * dtype.itemsize)
                self.assertEqual(client.execute_command("KVPAGESET", *name, int(dtype), 4, 6, 0, body), b"OK")
                with self.assertRaisesRegex(
                    redis.ResponseError,
                    f"^body must be page_size x head_dim x itemsize = {len(body)} bytes, got {len(body) - 1}$",
                ):
                    client.execute_command("KVPAGESET", *name, int(dtype), 4, 6, 0, body[1:])
            self.assertEqual(client.execute_command("KVPAGEGET", *name), body)
            blob = client.get("kv:r:0:0:0:0")
            client.config_set("strict-page-shape", "no")
            client.execute_command("KVPAGESET", *name, 1, 4, 6, 0, b"short")
            odd = client.get("kv:r:0:0:0:0")
            client.config_set("strict-page-shape", "yes")
            self.assertTrue(client.set("kv:r:0:0:0:0", blob))
            with self.assertRaisesRegex(redis.ResponseError, "^body must be .* = 48 bytes, got 5$"):
                client.set("kv:r:0:0:0:0", odd)
            with self.assertRaisesRegex(redis.ResponseError, "^body must be .* = 48 bytes, got 5$"):
                client.mset({"other": "1", "kv:r:0:0:0:0": odd})
            self.assertEqual((client.get("kv:r:0:0:0:0"), client.get("other")), (blob, None))

    def test_checksums_can_be_left_out(self) -> None:
        with start_server("--page-checksums", "no") as server, server.client() as client:
            client.execute_command("KVPAGESET", "r", 0, 0, 0, 0, 1, 2, 2, 0, b"unhashed")
            header, body = decode_page(client.get("kv:r:0:0:0:0"))
            self.assertEqual((header.checksum, bytes(body)), (0, b"unhashed"))

    def test_a_full_server_evicts_whole_blocks_and_never_refuses(self) -> None:
        with start_server("--maxmemory", "8mb") as server, server.client() as client:
            body = bytes(65536)
            for block in range(40):  # 40 blocks of 8 pages: 20 MiB
                words = [word for head in range(8) for word in ("r", 0, head, block, 0, 1, 256, 128, 0, body)]
                self.assertEqual(client.execute_command("KVPAGEMSET", 8, *words), b"OK")
            there = []
            for block in range(40):
                held = [client.execute_command("KVPAGEEXISTS", "r", 0, head, block, 0) for head in range(8)]
                self.assertIn(sum(held), (0, 8), f"block {block} is there in part")
                there.append(bool(held[0]))
            self.assertGreater(sum(there), 10)
            self.assertLess(sum(there), 20)
            self.assertEqual(client.execute_command("KVPAGEGET", "r", 0, 0, 39, 0), body)

    def test_noeviction_refuses_writes_and_keeps_pages(self) -> None:
        options = ("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
        with start_server(*options) as server, server.client() as client:
            stored = 0
            with self.assertRaisesRegex(redis.ResponseError, "command not allowed when used memory"):
                for stored in range(100):
                    client.execute_command("KVPAGESET", "r", 0, 0, stored, 0, 1, 256, 128, 0, bytes(65536))
            self.assertGreater(stored, 5)
            for page in range(stored):
                self.assertEqual(client.execute_command("KVPAGEEXISTS", "r", 0, 0, page, 0), 1)
            self.assertEqual(client.delete("kv:r:0:0:0:0", "kv:r:0:0:1:0"), 2)
            self.assertEqual(client.execute_command("KVPAGESET", "r", 0, 0, 0, 0, 1, 1, 1, 0, b"fits"), b"OK")


if __name__ == "__main__":
    unittest.main()
