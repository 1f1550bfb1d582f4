"""Codes and patterns for both cores, by seed: each core must return the same, and never read or write elsewhere.

Memory is that of numpy arrays, which end where their allocation ends, so that a sanitizer sees the first wrong byte.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from cores import CORES

from kvpage_server.lossless import decode_body, decode_lossless, encode_block_body
from kvpage_server.page import BlockShape, DType, PageError, Plane

KINDS = {1: (7, 255, np.uint16), 2: (10, 31, np.uint16), 3: (23, 255, np.uint32)}  # mantissa, exponents, word
DTYPES = (DType.BFLOAT16, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.UINT32, DType.UINT8)
LETTERS = b"ab*?[]^-\\AB\0\xff"


def exact(data: Any, offset: int = 0) -> Any:
    """Return a copy of bytes as memory of exactly this length, at `offset` from an aligned address."""
    memory = np.empty(len(data) + offset, np.uint8)[offset:]
    memory[:] = np.frombuffer(data, np.uint8)
    return memory


class Codes:
    """`check()` calls both cores with the input of a seed, and raises AssertionError where they differ."""

    def __init__(self) -> None:
        self.rng = random.Random()
        self.kinds: tuple[Callable[[], None], ...] = (self._matrix, self._noise, self._block, self._pattern)
        self.counts = dict.fromkeys(("matrix", "noise", "block", "pattern", "refused"), 0)

    def check(self, seed: int) -> None:
        """Choose the kind of input, and check it."""
        self.rng.seed(seed)
        kind = self.rng.choice(self.kinds)
        self.counts[kind.__name__[1:]] += 1
        kind()

    def _matrix(self) -> None:
        """Encode a matrix, decode it, and decode it with some bytes changed, removed or added."""
        rng = self.rng
        code, channels, rows = rng.choice((1, 2, 3)), 8 * rng.choice((1, 2, 3, 8, 9, 16, 33)), rng.randrange(1, 70)
        pages = rng.choice((1, 1, 2, 8, channels))
        body = exact(self._values(code, rows, channels), rng.choice((0, 0, 1, 2, 3)))
        room = rng.choice((2 * body.nbytes + channels, body.nbytes, rng.randrange(1, body.nbytes)))
        coded = [exact(bytes(room)) for _ in CORES]
        sizes = [core.encode_matrix(code, channels, body, out, pages) for core, out in zip(CORES, coded, strict=True)]
        whole = exact(coded[0][: sizes[0]])
        assert len(set(sizes)) == 1
        assert all(np.array_equal(whole, out[: len(whole)]) for out in coded)
        head = rng.randbytes(rng.choice((16, 20)))
        most = rng.choice((sizes[0] + len(head), len(head) + room, rng.randrange(len(head) + room)))
        sealed = {core.encode_array(head, code, channels, body, most) for core in CORES}
        assert len(sealed) == 1
        if not len(whole):
            return
        assert np.array_equal(self._decoded(code, channels, whole, body.nbytes, pages), body)
        for _ in range(4):
            changed = bytearray(whole)
            for _ in range(rng.choice((0, 1, 40))):
                changed[rng.randrange(len(changed))] = rng.choice((0, 7, 255, rng.randrange(256)))
            cut = rng.choice((0, 0, 1, rng.randrange(len(changed))))
            data = exact(changed[: len(changed) - cut] + rng.randbytes(rng.choice((0, 0, 1, 30))))
            size = rng.choice((body.nbytes, body.nbytes, (rows + rng.choice((-1, 1, 8))) * body.nbytes // rows))
            self._decoded(code, channels, data, size, pages)

    def _values(self, code: int, rows: int, channels: int) -> bytes:
        rng, (mantissa, most, word) = np.random.default_rng(self.rng.getrandbits(32)), KINDS[code]
        spread = self.rng.choice((0, 1, 3, 8, 255))
        near = rng.integers(0, most + 1, channels) + rng.integers(-spread, spread + 1, (rows, channels))
        rest = rng.integers(0, 1 << 32, (rows, channels)) & ~(most << mantissa)
        values: bytes = (rest | np.clip(near, 0, most) << mantissa).astype(word).tobytes()
        return values

    def _decoded(self, code: int, channels: int, coded: Any, size: int, pages: int) -> Any:
        """Return the values that both cores decode; None if they refuse the code."""
        outs = [exact(bytes(size), self.rng.choice((0, 0, 1, 2))) for _ in CORES]
        fits = {core.decode_matrix(code, channels, coded, out, pages) for core, out in zip(CORES, outs, strict=True)}
        assert len(fits) == 1
        if not fits.pop():
            self.counts["refused"] += 1
            return None
        assert all(np.array_equal(outs[0], out) for out in outs)
        return outs[0]

    def _noise(self) -> None:
        """Decode random bytes, with numbers that may be invalid."""
        rng = self.rng
        code, channels = rng.choice((0, 1, 1, 2, 3, 4)), rng.choice((-8, 0, 7, 8, 8, 16, 24, 1 << 40))
        pages = rng.choice((1, 1, 2, 3, 0, -8, 1 << 40))
        size = rng.choice((0, 1, 16, 48, 480, rng.randrange(2000)))
        coded = exact(rng.randbytes(rng.choice((0, 7, 8, 40, rng.randrange(2000)))))
        results = []
        for core in CORES:
            try:
                out = exact(bytes(size))
                results.append((core.decode_matrix(code, channels, coded, out, pages), out.tobytes()))
            except ValueError as error:
                results.append((str(error), b""))
        assert len({fits for fits, _ in results}) == 1
        assert not results[0][0] or len(set(results)) == 1
        with contextlib.suppress(PageError):
            decode_lossless(coded)

    def _block(self) -> None:
        """Decode a coded block whose bytes are changed, most of the time with the checksum of the changed ones."""
        rng = self.rng
        planes = tuple(Plane(i, rng.choice(DTYPES), rng.choice((2, 8, 16, 64))) for i in range(rng.randrange(1, 4)))
        shape = BlockShape(rng.randrange(1, 4), rng.randrange(1, 4), rng.choice((1, 7, 8, 16, 40)), planes)
        parts = []
        for _ in range(shape.layers):
            for plane in shape.planes:
                code = {DType.BFLOAT16: 1, DType.FLOAT16: 2, DType.FLOAT32: 3}.get(plane.dtype)
                rows = shape.heads * shape.page_size
                parts.append(
                    self._values(code, rows, plane.head_dim) if code else bytes(shape.heads * shape.page_nbytes(plane))
                )
        body = exact(b"".join(parts))
        coded = encode_block_body(body.data, shape)
        if coded is None:
            return
        into = exact(bytes(body.nbytes))
        decode_body(exact(coded).data, into.data, shape)
        assert np.array_equal(into, body)
        for _ in range(4):
            changed = bytearray(coded)
            for _ in range(rng.choice((1, 1, 3))):
                changed[rng.choice((rng.randrange(36), rng.randrange(len(changed))))] = rng.choice(
                    (0, 1, 255, rng.randrange(256))
                )
            del changed[rng.choice((len(changed), rng.randrange(16, len(changed)))) :]
            if rng.random() < 0.9:
                digest = xxhash.xxh3_64_intdigest(changed[16:], int.from_bytes(changed[:8], "little"))
                changed[8:16] = digest.to_bytes(8, "little")
            size = rng.choice((body.nbytes, body.nbytes, rng.randrange(2 * body.nbytes)))
            try:
                decode_body(exact(changed).data, exact(bytes(size)).data, rng.choice((shape, None)))
            except PageError:
                self.counts["refused"] += 1

    def _pattern(self) -> None:
        """Compile a pattern and compare names with it."""
        rng = self.rng
        pattern = bytes(rng.choice(LETTERS) for _ in range(rng.choice((0, 1, 5, 12, 70, rng.randrange(1030)))))
        ignore_case = rng.random() < 0.5
        compiled: list[Any] = []
        for core in CORES:
            try:
                compiled.append(core.Glob(pattern, ignore_case))
            except ValueError as error:
                compiled.append(str(error))
        if isinstance(compiled[0], str):
            assert len(set(compiled)) == 1
            return
        assert len({core.literal(pattern) for core in CORES}) == 1
        for _ in range(4):
            name = bytes(rng.choice(b"abAB[]\\\0\xff") for _ in range(rng.choice((0, 1, 5, 20, 300))))
            if rng.random() < 0.5:
                name = bytes(rng.choice(b"ab") if byte in b"*?" else byte for byte in pattern) + name
            assert len({glob.matches(name) for glob in compiled}) == 1
