"""The lossless code of pages: bytes and speed with keys and values of SmolLM2, compared with zstd and a copy; the store
on disk and in memory with the code and without it; and blocks over slow links.

zstd is the system's library, and is left out where there is none. It codes exponents apart from signs and mantissas,
which are stored as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from importlib.resources import files
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import engine  # noqa: F401 - picks the BLAS before MLX is imported

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.findings import Finding, show, write
from benchmarks.pages import tables
from benchmarks.perplexity import SMOLLM2
from benchmarks.servers import Server, _run, start_kvpage
from benchmarks.slow_link import slow_link
from benchmarks.turns import Turns
from engine import model
from kvpage_server import core
from kvpage_server.client import AsyncPageClient
from kvpage_server.client.commands import Coding
from kvpage_server.client.raw_commands import encoded
from kvpage_server.lossless import decode_lossless, encode_lossless
from kvpage_server.page import BlockShape, DType, KVType, Plane

TOKENS = 1024
STEP = 128  # tokens of a step
RATIOS = {16: 1.33, 128: 1.4}  # targets, by the tokens of a page; on disk as well
INTRO = (
    "The lossless code with keys and values of SmolLM2-135M on engine/demo/handbook.txt; GB/s of raw bytes of one core."
)
IN_A_BATCH = 8  # blocks of one read of a store in memory
COPIES = 8  # of all keys and values that a store on disk gets
LEAST_WRITTEN = 320 << 20  # bytes that are written to compare with memory: more than `write-behind-limit`
LINKS = {0.25: 1.3, 1.25: None, 0.0: None}  # GB/s of links, 0 for the loopback, and the targets of loads
LINK_COPIES = 4  # of all keys and values, which are 4,096 tokens
LINK_TOKENS = 64  # of a block, 1.5 MB
LINK_TASKS = 2  # that load at the same time, as an engine's
Pages = np.ndarray[Any, np.dtype[np.uint16]]


class Rates(NamedTuple):
    """Raw bytes by coded bytes, and GB/s of raw bytes."""

    ratio: float
    encode: float
    decode: float


def main(options: list[str] | None = None) -> None:
    """Measure pages of 16 and of 128 tokens in bfloat16. `--quick` takes fewer rounds, and writes nothing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks page_code", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and nothing is written")
    parser.add_argument("--links", action="store_true", help="slow links only, and nothing is written")
    parser.add_argument("--memory", action="store_true", help="blocks in memory only, and nothing is written")
    args = parser.parse_args(options)
    if core.NAME != "native":
        sys.exit(f"the core is not compiled: {core.REASON}")
    quick, planes = args.quick, keys_and_values()
    if args.memory:
        show([*in_memory(planes, rounds=1 if quick else 5)], INTRO)
        return
    if args.links:
        show([*over_links(planes, rounds=3 if quick else 9)], INTRO)
        return
    library = find_library("zstd")
    zstd = Zstd(library) if library else None
    findings = []
    for tokens, least in RATIOS.items():
        for name, plane in planes.items():
            pages = plane.reshape(-1, tokens, plane.shape[-1])
            ours = rates(pages, _ours, decode_lossless, rounds=2 if quick else 7)
            work = f"{name}, pages of {tokens} tokens"
            findings.append(Finding(work, "raw bytes", "ratio", "", ours.ratio, at_least=least))
            for what, rate in (("encode", ours.encode), ("decode", ours.decode)):
                findings.append(Finding(work, "a copy", f"{what}, GB/s", f"{rate:.2f} GB/s", rate / copies(pages)))
            if zstd:
                theirs = rates(pages, zstd.encode, zstd.decode, rounds=1 if quick else 3)
                findings.append(Finding(work, "raw bytes", "ratio of zstd", "", theirs.ratio))
                for what, a, b, aim in (
                    ("encode", ours.encode, theirs.encode, 8.0),
                    ("decode", ours.decode, theirs.decode, 3.5),
                ):
                    at_least = aim if tokens >= 128 else None
                    measured = f"{a:.2f} / {b:.2f} GB/s"
                    findings.append(Finding(work, "zstd 1", what, measured, a / b, at_least=at_least))
    findings += at_rest(planes, rounds=1 if quick else 5)
    findings += beside_memory(planes, rounds=1 if quick else 5)
    findings += in_memory(planes, rounds=1 if quick else 5)
    findings += over_links(planes, rounds=3 if quick else 9)
    show(findings, INTRO)
    if not quick:
        write(findings, "page_code", {}, intro=INTRO)
        tables.rewrite()


def keys_and_values() -> dict[str, Pages]:
    """Return keys and values as bfloat16 in uint16: ``[layers, heads, tokens, head_dim]``."""
    network, tokenizer = model.load(SMOLLM2)
    tokens = tokenizer.encode(files("engine.demo").joinpath("handbook.txt").read_text(encoding="utf-8"))[:TOKENS]
    caches = make_prompt_cache(network)
    for start in range(0, TOKENS, STEP):
        network(mx.array(tokens[start : start + STEP])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
    found = {}
    for index, name in enumerate(("keys", "values")):
        plane = mx.stack([cache.state[index][0] for cache in caches]).astype(mx.bfloat16)
        found[name] = np.array(plane.view(mx.uint16))
    return found


def rates(
    pages: Pages, encode: Callable[[Pages], bytes], decode: Callable[[bytes], bytes | bytearray], *, rounds: int
) -> Rates:
    """Code and decode all pages, and compare them. The rates are medians of the rounds, in processor time."""
    encoding, decoding = [], []
    for _ in range(rounds):
        begin = time.thread_time()
        coded = [encode(page) for page in pages]
        encoding.append(time.thread_time() - begin)
        begin = time.thread_time()
        decoded = [decode(one) for one in coded]
        decoding.append(time.thread_time() - begin)
        assert all(one == page.tobytes() for one, page in zip(decoded, pages, strict=True))
    size = sum(map(len, coded))
    return Rates(pages.nbytes / size, pages.nbytes / median(encoding) / 1e9, pages.nbytes / median(decoding) / 1e9)


def copies(pages: Pages) -> float:
    """Return the GB/s of a copy of each page to new memory."""
    begin = time.thread_time()
    for _ in range(5):
        for page in pages:
            bytes(page)
    return 5 * pages.nbytes / (time.thread_time() - begin) / 1e9


class Stored(NamedTuple):
    """A store on disk: bytes of its file, GB/s of raw bytes from the first write to the end of SAVE, and of the reads
    after a restart; seconds of the server's processor for a raw GB, of writes and of reads.
    """

    nbytes: int
    write: float
    read: float
    write_cpu: float
    read_cpu: float


def at_rest(planes: dict[str, Pages], *, rounds: int) -> Iterator[Finding]:
    """Yield the bytes of the file of a store, and the speed of writes and of reads after a restart, as medians."""
    keys, values = planes["keys"], planes["values"]
    for tokens, least in RATIOS.items():
        bodies = [
            np.stack([keys[:, :, start : start + tokens], values[:, :, start : start + tokens]], 1)
            for start in range(0, TOKENS, tokens)
        ]
        for kind in ("blocks", "single pages"):
            found = defaultdict[str, list[Stored]](list)
            for _ in range(rounds):
                for mode in ("off", "disk"):
                    found[mode].append(_stored(bodies, mode, whole=kind == "blocks"))
            off, on = (Stored(*map(median, zip(*found[mode], strict=True))) for mode in ("off", "disk"))
            work, against = f"{kind} of {tokens} tokens on disk", "page-code off"
            measured = f"{on.nbytes / 1e6:.0f} / {off.nbytes / 1e6:.0f} MB"
            yield Finding(work, against, "bytes of the file", measured, off.nbytes / on.nbytes, at_least=least)
            for what, a, b in ("write, GB/s", on.write, off.write), ("read, GB/s", on.read, off.read):
                yield Finding(work, against, what, f"{a:.2f} / {b:.2f} GB/s", a / b)
            for what, a, b in ("write", on.write_cpu, off.write_cpu), ("read", on.read_cpu, off.read_cpu):
                yield Finding(work, against, f"{what}, CPU s/GB", f"{a:.2f} / {b:.2f}", a / b)


def _stored(bodies: list[Pages], mode: str, *, whole: bool) -> Stored:
    """Write bodies of blocks to a new store, as blocks or as single pages, restart it, and compare all of them."""
    raw = COPIES * sum(body.nbytes for body in bodies) / 1e9
    names = [(f"copy{copy}", page) for copy in range(COPIES) for page in range(len(bodies))]
    with TemporaryDirectory() as place:
        options = ("--store", "tiered", "--dir", place, "--page-code", mode, "--maxdisk", "0", "--scrub-rate", "0")
        with start_kvpage(*options) as server:
            commands = [_writes(bodies[page], name, page, whole=whole) for name, page in names]
            write, write_cpu = _timed(server, [*commands, ("SAVE",)])
            nbytes = int(server.admin.info("kvpage")["disk_file_bytes"])
        with start_kvpage(*options) as server:
            read, read_cpu = _timed(server, [("KVBLOCKGET", *name) for name in names])
            for name, page in names:
                assert server.admin.execute_command("KVBLOCKGET", name, page) == bodies[page].tobytes()
    return Stored(nbytes, raw / write, raw / read, write_cpu / raw, read_cpu / raw)


def _writes(body: Pages, name: str, page: int, *, whole: bool) -> tuple[Any, ...]:
    """Return the command that stores the body ``[layers, planes, heads, tokens, head_dim]`` of a block."""
    layers, planes, heads, tokens, dim = body.shape
    dtype = int(DType.BFLOAT16)
    if whole:
        kinds = (word for plane in range(planes) for word in (plane, dtype, dim))
        return ("KVBLOCKSET", name, page, layers, heads, tokens, 0, planes, *kinds, body.tobytes())
    words: list[Any] = []
    for layer, plane, head in np.ndindex(layers, planes, heads):
        words += [name, layer, head, page, plane, dtype, tokens, dim, 0, body[layer, plane, head].tobytes()]
    return ("KVPAGEMSET", layers * planes * heads, *words)


def _timed(server: Server, commands: list[tuple[Any, ...]]) -> tuple[float, float]:
    """Send commands one after the other. Return the seconds, and those of the server's processor."""
    cpu, begin = server.cpu_seconds(), time.perf_counter()
    for words in commands:
        server.admin.execute_command(*words)
    return time.perf_counter() - begin, server.cpu_seconds() - cpu


def beside_memory(planes: dict[str, Pages], *, rounds: int) -> Iterator[Finding]:
    """Yield the speed of batches of long pages that are written to the default store, compared with memory."""
    heads = [head for plane in planes.values() for head in plane.reshape(-1, *plane.shape[2:])]
    pairs = [np.concatenate(pair, 1) for pair in zip(heads[::2], heads[1::2], strict=True)]
    for pages in ([head[:512] for head in heads], pairs):
        found = defaultdict[str, list[float]](list)
        for _ in range(rounds):
            for mode, options in (
                ("memory", ()),
                ("off", ("--store", "tiered")),
                ("disk", ("--store", "tiered", "--page-code", "disk")),
            ):
                found[mode].append(_written(pages, options))
        in_memory, off, on = (median(found[mode]) for mode in ("memory", "off", "disk"))
        work, against = f"pages of {pages[0].nbytes >> 10} KiB to the default store", "memory"
        measured = f"{on:.2f} / {in_memory:.2f} GB/s"
        yield Finding(work, against, "write with page-code disk", measured, on / in_memory, at_least=0.55)
        measured = f"{off:.2f} / {in_memory:.2f} GB/s"
        yield Finding(work, against, "write with page-code off", measured, off / in_memory)


def _written(pages: list[Pages], options: tuple[str, ...]) -> float:
    """Write batches of all pages to a new store, and return the GB/s until the last reply."""
    dtype, nbytes = int(DType.BFLOAT16), sum(page.nbytes for page in pages)
    batches = []
    for batch in range(-(-LEAST_WRITTEN // nbytes)):
        words: list[Any] = ["KVPAGEMSET", len(pages)]
        for head, page in enumerate(pages):
            words += [f"r{batch}", head // 4, head % 4, 0, 0, dtype, *page.shape, 0, page.tobytes()]
        spelt = [encoded(word) for word in words]
        batches.append(b"*%d\r\n" % len(spelt) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in spelt))
    with start_kvpage(*options, "--scrub-rate", "0") as server, server.connect() as sock:
        begin = time.perf_counter()
        for sent in batches:
            sock.sendall(sent)
            assert sock.recv(100) == b"+OK\r\n"
        return len(batches) * nbytes / (time.perf_counter() - begin) / 1e9


# -- Memory ------------------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """A store in memory: its `used_memory`, GB/s of raw bytes of the first reads, and seconds of the server's processor
    for a raw GB of them.
    """

    nbytes: float
    read: float
    read_cpu: float


def in_memory(planes: dict[str, Pages], *, rounds: int) -> Iterator[Finding]:
    """Yield the memory of idle blocks, and the speed of their first reads, as medians."""
    keys, values = planes["keys"], planes["values"]
    for tokens in RATIOS:
        bodies = [
            np.stack([keys[:, :, start : start + tokens], values[:, :, start : start + tokens]], 1)
            for start in range(0, TOKENS, tokens)
        ]
        found = defaultdict[str, list[Kept]](list)
        for _ in range(rounds):
            for mode in ("off", "idle"):
                found[mode].append(_kept(bodies, mode))
        off, on = (Kept(*map(median, zip(*found[mode], strict=True))) for mode in ("off", "idle"))
        work, against = f"idle blocks of {tokens} tokens in memory", "page-code off"
        measured = " / ".join(f"{COPIES * 1e9 / kept.nbytes:.1f}" for kept in (on, off))
        yield Finding(work, against, "contexts in 1 GB", measured, off.nbytes / on.nbytes, at_least=1.35)
        measured = f"{on.read:.2f} / {off.read:.2f} GB/s"
        yield Finding(work, against, "first read, GB/s", measured, on.read / off.read, at_least=0.7)
        measured = f"{on.read_cpu:.2f} / {off.read_cpu:.2f}"
        yield Finding(work, against, "first read, CPU s/GB", measured, on.read_cpu / off.read_cpu)
        longest = median(_longest_turn(bodies) for _ in range(rounds))
        yield Finding(work, "", "longest turn of the event loop", "milliseconds", longest, at_most=10)


def _kept(bodies: list[Pages], mode: str) -> Kept:
    """Write bodies of blocks to a new store, wait until they are idle, read all in batches, and compare them."""
    raw = COPIES * sum(body.nbytes for body in bodies) / 1e9
    names = [(f"copy{copy}", page) for copy in range(COPIES) for page in range(len(bodies))]
    options = "--store", "tiered", "--page-code", mode, "--scrub-rate", "0"
    with TemporaryDirectory() as place, start_kvpage(*options, "--dir", place) as server:
        _timed(server, [*(_writes(bodies[page], name, page, whole=True) for name, page in names), ("SAVE",)])
        while mode != "off" and server.admin.info("kvpage")["memory_coded_values"] < len(names):
            time.sleep(0.1)
        nbytes = int(server.admin.info("memory")["used_memory"])
        batches = [names[at : at + IN_A_BATCH] for at in range(0, len(names), IN_A_BATCH)]
        reads = [("KVBLOCKMGET", len(some), *(word for name in some for word in name)) for some in batches]
        read, read_cpu = _timed(server, reads)
        for name, page in names:
            assert server.admin.execute_command("KVBLOCKGET", name, page) == bodies[page].tobytes()
    return Kept(nbytes, raw / read, read_cpu / raw)


def _longest_turn(bodies: list[Pages]) -> float:
    """Return the milliseconds of the longest turn of the loop while blocks are written, coded, and read in batches."""
    command = sys.executable, "-m", "benchmarks.turns"
    more = "--store", "tiered", "--page-code", "always", "--scrub-rate", "0"
    with _run("kvpage-server", "kvpage_version", *command, more=more) as server:
        turns, names = Turns(server.directory), [("context", page) for page in range(len(bodies))]
        turns.longest()
        for name, page in names:
            server.admin.execute_command(*_writes(bodies[page], name, page, whole=True))
        while server.admin.info("kvpage")["memory_coded_values"] < len(names):
            time.sleep(0.1)
        for at in range(0, len(names), IN_A_BATCH):
            some = names[at : at + IN_A_BATCH]
            server.admin.execute_command("KVBLOCKMGET", len(some), *(word for name in some for word in name))
        return turns.longest()


# -- Links -------------------------------------------------------------------------------------------------------------


def over_links(planes: dict[str, Pages], *, rounds: int) -> Iterator[Finding]:
    """Yield the seconds in which blocks of 4,096 tokens are written and loaded over links, raw and in the code."""
    keys, values = planes["keys"], planes["values"]
    starts = range(0, TOKENS, LINK_TOKENS)
    bodies = [
        np.stack([plane[:, :, start : start + LINK_TOKENS] for plane in (keys, values)], 1) for start in starts
    ] * LINK_COPIES
    heads, dim = keys.shape[1], keys.shape[3]
    kinds = tuple(Plane(kv_type, DType.BFLOAT16, dim) for kv_type in (KVType.K, KVType.V))
    shape = BlockShape(len(keys), heads, LINK_TOKENS, kinds)
    for rate, least in LINKS.items():
        with start_kvpage("--store", "memory") as server:
            url = server.url
            if rate:
                with slow_link(server.port, rate * 1e9) as url:
                    found = asyncio.run(_moved(url, shape, bodies, rounds))
            else:
                found = asyncio.run(_moved(url, shape, bodies, rounds))
        work = f"{sum(body.nbytes for body in bodies) / 1e6:.0f} MB, " + (f"{rate} GB/s" if rate else "loopback")
        for i, what in enumerate(("write", "load")):
            raw, coded, auto = (found[coding][i] for coding in ("never", "always", "auto"))
            measured = f"{raw:.3f} / {coded:.3f} s"
            at_least = least if what == "load" else None
            yield Finding(work, "raw blocks", f"{what} in the code", measured, raw / coded, at_least=at_least)
            if not rate:
                measured = f"{raw:.3f} / {auto:.3f} s"
                yield Finding(work, "raw blocks", f"{what} by auto", measured, raw / auto, at_least=0.95)


async def _moved(url: str, shape: BlockShape, bodies: list[Pages], rounds: int) -> dict[Coding, tuple[float, float]]:
    """Return the median seconds of writes and of loads, by the client's choice between raw and coded blocks."""
    names = [(b"context", page) for page in range(len(bodies))]
    memory = [np.zeros(shape.nbytes, np.uint8) for _ in bodies]
    seconds = defaultdict[Coding, list[tuple[float, float]]](list)
    codings: tuple[Coding, ...] = ("never", "always", "auto")
    clients = {coding: AsyncPageClient(url, code=coding, deadline=60, verify=False) for coding in codings}

    async def load(client: AsyncPageClient, left: Iterator[slice]) -> None:
        for part in left:
            assert not any(await client.fetch_blocks_into(names[part], shape, memory[part]))

    async def write(client: AsyncPageClient, left: Iterator[slice]) -> None:
        for part in left:
            await client.mset_blocks(names[part], shape, bodies[part])

    for first in range(rounds + 1):
        for at in range(len(codings)):  # each follows each other one as often: coded writes leave other memory behind
            coding = codings[(first + at) % len(codings)]
            client, took = clients[coding], []
            for move in (write, load):
                left = (slice(start, start + 4) for start in range(0, len(bodies), 4))
                begin = time.perf_counter()
                await asyncio.gather(*(move(client, left) for _ in range(LINK_TASKS)))
                took.append(time.perf_counter() - begin)
            seconds[coding].append((took[0], took[1]))
            assert all(bytes(one) == body.tobytes() for one, body in zip(memory, bodies, strict=True))
    for client in clients.values():
        await client.close()
    return {
        coding: (median(one for one, _ in found[1:]), median(one for _, one in found[1:]))
        for coding, found in seconds.items()
    }


def _ours(page: Pages) -> bytes:
    coded = encode_lossless(page.data, DType.BFLOAT16)
    assert coded is not None
    return coded


def _place(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)


class Zstd:
    """zstd 1 on exponents; the other bits are stored as they are."""

    def __init__(self, name: str) -> None:
        self._library = ctypes.CDLL(name)
        for made in ("ZSTD_createCCtx", "ZSTD_createDCtx"):
            getattr(self._library, made).restype = ctypes.c_void_p
        self._encoder = ctypes.c_void_p(self._library.ZSTD_createCCtx())
        self._decoder = ctypes.c_void_p(self._library.ZSTD_createDCtx())
        self._library.ZSTD_compressCCtx.restype = self._library.ZSTD_decompressDCtx.restype = ctypes.c_size_t

    def encode(self, page: Pages) -> bytes:
        exponents = (page >> 7).astype(np.uint8)
        rest = (page >> 8 & 0x80 | page & 0x7F).astype(np.uint8)
        out = np.empty(exponents.nbytes + exponents.nbytes // 128 + 512, np.uint8)
        size = self._library.ZSTD_compressCCtx(self._encoder, *_place(out), *_place(exponents), 1)
        assert size <= out.nbytes
        return struct.pack("<II", size, page.size) + out[:size].tobytes() + rest.tobytes()

    def decode(self, coded: bytes) -> bytes:
        size, count = struct.unpack_from("<II", coded)
        out = np.empty(count, np.uint8)
        body = np.frombuffer(coded, np.uint8, size, offset=8)
        assert self._library.ZSTD_decompressDCtx(self._decoder, *_place(out), *_place(body)) == count
        exponents = out.astype(np.uint16)
        rest = np.frombuffer(coded, np.uint8, offset=8 + size).astype(np.uint16)
        return ((rest & 0x80) << 8 | exponents << 7 | rest & 0x7F).astype(np.uint16).tobytes()
