"""`kvpage bench`: the speed of page transfers on this machine. The benchmarks of the repository import it, too."""

from __future__ import annotations

import importlib
import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import redis
from numpy.random import default_rng
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvpage_server import __version__
from kvpage_server.client import BlockName, Page, PageClient
from kvpage_server.client.errors import WrongReply
from kvpage_server.client.page import pages_of_block
from kvpage_server.client.raw_commands import plain_client
from kvpage_server.look.output import LookError
from kvpage_server.page import BlockShape, DType, KVType, PageKey, Plane
from kvpage_server.system.text import plural

# -- Work of the benchmark: batches of pages or blocks under generations of keys ---------------------------------------

Array = np.ndarray[Any, np.dtype[np.uint8]]

REQ_ID = b"kvpage-bench"


class BatchMemory:
    """Memory of one batch: `written` is the source of writes, `read` the destination of reads, both uint8 ``[count,
    nbytes]``.
    """

    def __init__(self, count: int, nbytes: int, seed: int) -> None:
        rng = default_rng(seed)
        self.written: Array = np.frombuffer(rng.bytes(count * nbytes), np.uint8).reshape(count, nbytes)
        self.read: Array = np.zeros_like(self.written)

    def spoil(self) -> None:
        """Change the first and the last byte of every item of `read`, so that `check` finds items that were not
        received.
        """
        self.read[:, 0] = ~self.written[:, 0]
        self.read[:, -1] = ~self.written[:, -1]

    def check(self) -> None:
        """Raise LookError if `read` differs from `written`."""
        if not np.array_equal(self.written, self.read):
            raise LookError("the bytes that were read are not those that were written")


class Work:
    """The batches of one benchmark: `generations` batches of `count` items with `nbytes` bytes each. Each batch has
    keys of its own.
    """

    def __init__(self, kind: str, count: int, nbytes: int, generations: int) -> None:
        self.name = f"{count} {kind} of {spell(nbytes)}"
        self.count = count
        self.nbytes = nbytes
        self.batches = [BatchMemory(count, nbytes, seed) for seed in range(generations)]

    @property
    def total(self) -> int:
        return self.count * self.nbytes

    def page_keys(self, generation: int) -> list[PageKey]:
        """Return the keys of the pages in the batch with index `generation`."""
        raise NotImplementedError


class PageWork(Work):
    """Batches of pages of uint8, with eight heads, two planes, and as many layers as `count` needs."""

    def __init__(self, count: int, nbytes: int, generations: int) -> None:
        super().__init__("pages", count, nbytes, generations)
        rows = 128
        self.pages = [
            [
                Page(PageKey(REQ_ID, i // 16, i // 2 % 8, generation, i % 2), body, DType.UINT8, rows, nbytes // rows)
                for i, body in enumerate(batch.written)
            ]
            for generation, batch in enumerate(self.batches)
        ]
        self.keys = [[page.key for page in pages] for pages in self.pages]

    def page_keys(self, generation: int) -> list[PageKey]:
        """Return the keys of the pages in the batch with index `generation`."""
        return self.keys[generation]


class Blocks(Work):
    """Blocks of one shape."""

    def __init__(self, count: int, shape: BlockShape, generations: int) -> None:
        super().__init__("blocks", count, shape.nbytes, generations)
        self.shape = shape
        self.names: list[list[BlockName]] = [
            [(REQ_ID, generation * count + i) for i in range(count)] for generation in range(generations)
        ]

    def page_keys(self, generation: int) -> list[PageKey]:
        """Return the keys of the pages in the batch with index `generation`."""
        return [key for name in self.names[generation] for key, _, _ in pages_of_block(name, self.shape)]


def spell(nbytes: int) -> str:
    """Return a number of bytes as text: "64 KiB", "5.6 MiB"."""
    return f"{nbytes / (1 << 10):.4g} KiB" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.2g} MiB"


def _model(layers: int, heads: int, head_dim: int, tokens: int) -> BlockShape:
    """Return the shape of a block with K and V in bfloat16."""
    planes = tuple(Plane(kv_type, DType.BFLOAT16, head_dim) for kv_type in (KVType.K, KVType.V))
    return BlockShape(layers, heads, tokens, planes)


SMOLLM2_16 = _model(30, 3, 64, 16)  # 360 KiB
LLAMA3_16 = _model(32, 8, 128, 16)  # Llama 3 8B: 2 MiB, 512 pages of 4 KiB
SMOLLM2_256 = _model(30, 3, 64, 256)  # 5.6 MiB
LLAMA3_256 = _model(32, 8, 128, 256)  # 32 MiB


# -- Measurements of a store: GB/s, CPU seconds per GB, and latency. Reads check every byte ----------------------------

GB = 1e9
_DEADLINE = 60.0  # seconds, of a call


class Store(Protocol):
    """Interface of a store that batches are written to and read from."""

    def write(self, work: Work, generation: int) -> None:
        """Store a batch."""

    def read(self, work: Work, generation: int) -> None:
        """Read a batch into its memory."""


class ClientStore:
    """`Store` on a server, through PageClient."""

    def __init__(self, client: PageClient) -> None:
        self._client = client

    def write(self, work: Work, generation: int) -> None:
        if isinstance(work, PageWork):
            self._client.mset(work.pages[generation], deadline=_DEADLINE)
        elif isinstance(work, Blocks):
            bodies = list(work.batches[generation].written)
            self._client.mset_blocks(work.names[generation], work.shape, bodies, deadline=_DEADLINE)

    def read(self, work: Work, generation: int) -> None:
        """Read a batch into its memory. Raises LookError if an item is missing."""
        into = list(work.batches[generation].read)
        if isinstance(work, PageWork):
            found = self._client.mget_into(work.keys[generation], into, deadline=_DEADLINE)
        elif isinstance(work, Blocks):
            found = self._client.mget_blocks_into(work.names[generation], work.shape, into, deadline=_DEADLINE)
        if not all(found):
            missing = f"{found.count(False)} of {plural(len(found), 'value')} that were just written are missing"
            raise LookError(f"{missing}: evicted, at a quota or by other writers, or replaced by another kvpage bench")


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of one kind of call."""

    gb_per_s: float
    cpu_s_per_gb: float | None  # of the server; None if it does not report CPU time
    p50_ms: float  # of a call
    p99_ms: float
    calls: int


def measure_writes(store: Store, work: Work, seconds: float, cpu: Callable[[], float | None] | None = None) -> Figures:
    """Write the batches in turn for `seconds`, after one unmeasured round, and return the measurements.

    `cpu` returns the CPU seconds that the server has used, or None.
    """
    return _measure(store.write, work, seconds, cpu)


def measure_reads(store: Store, work: Work, seconds: float, cpu: Callable[[], float | None] | None = None) -> Figures:
    """Read the batches in turn for `seconds`, after one unmeasured round, and return the measurements.

    Raises LookError for missing values and wrong bytes.
    """
    return _measure(store.read, work, seconds, cpu, check=True)


def _measure(
    move: Callable[[Work, int], None],
    work: Work,
    seconds: float,
    cpu: Callable[[], float | None] | None,
    *,
    check: bool = False,
) -> Figures:
    times: list[float] = []
    before: float | None = None
    for call in range(-len(work.batches), 1_000_000):  # calls below 0, the first round, are a warm-up
        if call == 0:
            before, times = cpu() if cpu else None, []
        generation = call % len(work.batches)
        if check:
            work.batches[generation].spoil()
        started = time.perf_counter()
        move(work, generation)
        times.append(time.perf_counter() - started)
        if check:
            work.batches[generation].check()
        if call >= 2 and sum(times) >= seconds:
            break
    gigabytes = len(times) * work.total / GB
    after = cpu() if cpu else None
    used = None if before is None or after is None else (after - before) / gigabytes
    p50, p99 = np.percentile(times, [50, 99]) * 1000
    return Figures(gigabytes / sum(times), used, p50, p99, len(times))


# -- Raw sockets, the upper bound: a process that has batches in memory and transfers them with a short header ---------
#
# `python -m kvpage_server.bench ADDRESS` is that process. It serves until its standard input ends.

_QUESTION = struct.Struct("<cIIII")  # W or R, generation, connection, number of items, bytes of an item
_DONE = b"."
_SEND_BYTES, _RECEIVE_BYTES = 1024 * 1024, 256 * 1024  # per system call: the fastest sizes
_GATHER = 512  # most buffers of a system call

Generation = tuple[int, int, int, int]  # generation, connection, number of items, bytes of an item


def _move(buffers: list[memoryview], step: Callable[[list[memoryview]], int], most: int) -> None:
    """Pass all buffers to `step`, which is `sendmsg` or `recvmsg_into`, at most `most` bytes in a call.

    Raises EOFError if the peer has closed the connection.
    """
    ends = list(accumulate(map(len, buffers)))
    moved = at = 0
    while at < len(buffers):
        some = buffers[at : min(bisect_left(ends, moved + most, at) + 1, at + _GATHER)]
        begun, beyond = moved - ends[at] + len(some[0]), ends[at + len(some) - 1] - moved - most
        if beyond > 0:
            some[-1] = some[-1][:-beyond]
        some[0] = some[0][begun:]
        count = step(some)
        if not count:
            raise EOFError("the server has closed the connection")
        moved += count
        at = bisect_right(ends, moved)


def _raw_rows(items: Array) -> list[memoryview]:
    return [memoryview(item) for item in items]


def _receive(sock: socket.socket, buffers: list[memoryview]) -> None:
    _move(buffers, lambda some: sock.recvmsg_into(some)[0], _RECEIVE_BYTES)


def _receive_bytes(sock: socket.socket, count: int) -> bytes:
    text = bytearray(count)
    _receive(sock, [memoryview(text)])
    return bytes(text)


def _serve(sock: socket.socket, kept: dict[Generation, list[memoryview]]) -> None:
    with sock, suppress(EOFError, ConnectionError):
        while True:
            op, *generation, nbytes = _QUESTION.unpack(_receive_bytes(sock, _QUESTION.size))
            key = (*generation, nbytes)
            if op == b"W":
                if key not in kept:
                    kept[key] = _raw_rows(np.zeros((generation[-1], nbytes), np.uint8))
                _receive(sock, kept[key])
                sock.sendall(_DONE)
            else:
                _move(kept[key], sock.sendmsg, _SEND_BYTES)


def _listen(address: str) -> socket.socket:
    if address.startswith("/"):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(address)
        sock.listen()
        return sock
    return socket.create_server(("127.0.0.1", int(address)))


def _main(address: str) -> None:
    listening = _listen(address)
    print(address if address.startswith("/") else listening.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            sock, _ = listening.accept()
            threading.Thread(target=_serve, args=(sock, {}), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()
    os._exit(0)  # do not wait for the threads


class RawClient:
    """Client of the raw server, with the interface of `Store`, on one or more connections. Each transfers a part of a
    batch.
    """

    def __init__(self, process: subprocess.Popen[bytes], address: str, connections: int) -> None:
        self.pid = process.pid
        self._sockets = [_connect(address) for _ in range(connections)]
        self._threads = ThreadPoolExecutor(connections)

    def write(self, work: Work, generation: int) -> None:
        """Send a batch and wait for the confirmation."""

        def part(sock: socket.socket, number: int, items: Array) -> None:
            sock.sendall(_QUESTION.pack(b"W", generation, number, *items.shape))
            _move(_raw_rows(items), sock.sendmsg, _SEND_BYTES)
            _receive_bytes(sock, len(_DONE))

        self._each(work.batches[generation].written, part)

    def read(self, work: Work, generation: int) -> None:
        """Receive a batch."""

        def part(sock: socket.socket, number: int, items: Array) -> None:
            sock.sendall(_QUESTION.pack(b"R", generation, number, *items.shape))
            _receive(sock, _raw_rows(items))

        self._each(work.batches[generation].read, part)

    def _each(self, items: Array, part: Callable[[socket.socket, int, Array], None]) -> None:
        parts = np.array_split(items, len(self._sockets))
        numbers = range(len(parts))
        if len(parts) == 1:
            part(self._sockets[0], 0, items)
        else:
            for _ in self._threads.map(part, self._sockets, numbers, parts):
                pass

    def close(self) -> None:
        """Close the connections. The raw server then frees the batches that it keeps for them."""
        for sock in self._sockets:
            sock.close()
        self._threads.shutdown()


def _connect(address: str) -> socket.socket:
    if address.startswith("/"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        return sock
    sock = socket.create_connection(("127.0.0.1", int(address)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


@contextmanager
def start_raw(*, unix: bool = False) -> Iterator[Callable[[int], RawClient]]:
    """Start the raw server as a process. Yield a function that returns a client with a number of connections."""
    with tempfile.TemporaryDirectory() as directory:
        address = str(Path(directory, "raw")) if unix else "0"
        command = [sys.executable, "-m", "kvpage_server.bench", address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin
            assert process.stdout
            try:
                found = process.stdout.readline().decode().strip()
                yield lambda connections: RawClient(process, found, connections)
            finally:
                process.stdin.close()


# -- Results as a table, as JSON, and as a picture ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of one kind of call: on each server, and on raw sockets as the upper bound."""

    work: str
    op: str  # write or read
    figures: dict[str, Figures]  # by server
    raw_gb_per_s: float


def machine() -> dict[str, Any]:
    """Return a description of the machine and the versions."""
    return {
        "kvpage": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }


def table(rows: list[Row]) -> Table:
    servers = list(rows[0].figures)
    found = Table(title="raw: the same bytes over bare sockets on this machine", title_justify="left")
    found.add_column("work")
    found.add_column("")
    for server in servers:
        for column in (f"{server}\nGB/s", "of raw", "CPU s/GB", "p50 ms", "p99 ms"):
            found.add_column(column, justify="right")
    found.add_column("raw\nGB/s", justify="right")
    before = ""
    for row in rows:
        cells = ["" if row.work == before else row.work, row.op]
        before = row.work
        for figures in row.figures.values():
            cpu = "unknown" if figures.cpu_s_per_gb is None else f"{figures.cpu_s_per_gb:.2f}"
            of_raw = f"{figures.gb_per_s / row.raw_gb_per_s:.0%}"
            cells += [f"{figures.gb_per_s:.2f}", of_raw, cpu, f"{figures.p50_ms:.2f}", f"{figures.p99_ms:.2f}"]
        found.add_row(*cells, f"{row.raw_gb_per_s:.2f}")
    return found


def write_json(rows: list[Row], path: Path) -> None:
    path.write_text(
        json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8"
    )


def write_plot(rows: list[Row], path: Path) -> None:
    """Write a chart: GB/s as a bar for each row and server, and as a mark for raw sockets. Needs matplotlib."""
    from matplotlib.figure import Figure

    servers = list(rows[0].figures)
    works = list(dict.fromkeys(row.work for row in rows))
    figure = Figure(figsize=(12, 1.2 + 0.42 * len(works)), layout="constrained")
    for axes, op in zip(figure.subplots(1, 2, sharey=True), ("write", "read"), strict=True):
        found = [row for row in rows if row.op == op]
        height = 0.8 / len(servers)
        for i, server in enumerate(servers):
            bars = [(works.index(row.work), row.figures[server].gb_per_s) for row in found if server in row.figures]
            places = [work + (i + 0.5) * height - 0.4 for work, _ in bars]
            axes.barh(places, [speed for _, speed in bars], height * 0.92, label=server)
        ceilings = [works.index(row.work) for row in found]
        axes.plot([row.raw_gb_per_s for row in found], ceilings, "|", color="black", ms=14, label="raw sockets")
        axes.set_title(op)
        axes.set_xlabel("GB/s")
        axes.set_yticks(range(len(works)), works)
        axes.grid(axis="x", alpha=0.3)
    figure.axes[0].invert_yaxis()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


# -- `kvpage bench`: pages and blocks of several sizes -----------------------------------------------------------------

_KIB, _MIB = 1 << 10, 1 << 20
_GENERATIONS = 8
_HELD = 256 * _MIB  # bytes that are stored on a server at a time, at most
_KEYS_PER_DELETE = 10_000


@dataclass(frozen=True, slots=True)
class Case:
    """The batches of one benchmark, and the options of the client that transfers them."""

    make: Callable[[int], Work]  # from a number of generations
    total: int  # bytes of a batch
    connections: int = 1
    verify: bool = False
    unix: bool = False

    def name(self, work: Work) -> str:
        """Return the name of the work with the case's options."""
        several = f"{self.connections} connections" if self.connections > 1 else ""
        special = [several, "verified" if self.verify else "", "unix socket" if self.unix else ""]
        return ", ".join([work.name, *filter(None, special)])


def _pages(count: int, nbytes: int, *, connections: int = 1, verify: bool = False) -> Case:
    return Case(lambda generations: PageWork(count, nbytes, generations), count * nbytes, connections, verify)


def _blocks(count: int, shape: BlockShape) -> Case:
    return Case(lambda generations: Blocks(count, shape, generations), count * shape.nbytes)


_USUAL = _pages(256, 64 * _KIB)
_QUICK = [_pages(256, 16 * _KIB), _USUAL, _pages(256, 64 * _KIB, connections=4), _blocks(8, LLAMA3_16)]
_FULL = [
    *(_pages(256, size * _KIB) for size in (4, 16, 32)),
    _USUAL,
    _pages(256, 256 * _KIB),
    _pages(64, _MIB),
    _pages(256, 64 * _KIB, verify=True),
    *(_pages(count, 64 * _KIB) for count in (16, 64, 1024, 2048)),
    *(_pages(256, 64 * _KIB, connections=connections) for connections in (2, 4, 16)),
    _blocks(32, SMOLLM2_16),
    _blocks(8, LLAMA3_16),
    _blocks(4, SMOLLM2_256),
    _blocks(2, LLAMA3_256),
]


class Target:
    """Server to measure."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._admin = plain_client(url)
        info = self._admin.info("server")
        kinds = {"kvpage-server": "kvpage_version", "Valkey": "valkey_version", "Redis": "redis_version"}
        names = [f"{kind} {info[field]}" for kind, field in kinds.items() if field in info]
        if not names:
            raise WrongReply("INFO has no version of a server")
        self.name = names[0]

    def cpu_seconds(self) -> float | None:
        """Return the CPU seconds that the server has used, from INFO; None if it has no such fields."""
        info = self._admin.info("cpu")
        used = [float(info[name]) for name in ("used_cpu_user", "used_cpu_sys") if name in info]
        return sum(used) if used else None

    def room(self) -> int:
        """Return the bytes of pages that a benchmark may store at a time: _HELD, or half of `maxmemory` or of the space
        for values on disk if one of them is less.
        """
        limits = self._admin.info("memory").get("maxmemory", 0), self._admin.info("kvpage").get("maxdisk_for_values", 0)
        return min([_HELD, *(int(limit) // 2 for limit in limits if limit)])

    def unix_socket(self) -> str | None:
        """Return the path of the server's unix socket; None if it has none, or the path does not exist on this
        machine.
        """
        try:
            path = self._admin.config_get("unixsocket").get("unixsocket")
        except redis.ResponseError:  # the user may not call CONFIG
            return None
        return path if path and Path(path).is_socket() else None

    def run(self, case: Case, work: Work, seconds: float) -> tuple[Figures, Figures]:
        """Measure the writes and the reads of a case, for `seconds` each, and delete the data. Return both
        measurements.
        """
        url = f"unix://{self.unix_socket()}" if case.unix else self.url
        with PageClient(url, connections=case.connections, verify=case.verify, deadline=60, mapped=case.unix) as client:
            store = ClientStore(client)
            try:
                writes = measure_writes(store, work, seconds, self.cpu_seconds)
                return writes, measure_reads(store, work, seconds, self.cpu_seconds)
            finally:
                for generation in range(len(work.batches)):
                    keys = work.page_keys(generation)
                    for start in range(0, len(keys), _KEYS_PER_DELETE):
                        client.delete(keys[start : start + _KEYS_PER_DELETE])

    def close(self) -> None:
        self._admin.close()


def run(urls: list[str], *, seconds: float, quick: bool, json: Path | None, plot: Path | None, out: Console) -> None:
    """Measure the servers of `urls` in turns. Print a table, and write JSON and a chart if files are given.

    Each kind of call is measured for `seconds`. Raises PageClientError or RedisError when a server cannot be reached or
    refuses a command, LookError when it loses values, ModuleNotFoundError when matplotlib is needed and missing.
    """
    if plot:
        importlib.import_module("matplotlib")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as for Ctrl-C, the data is deleted
    with ExitStack() as stack:
        targets = [stack.enter_context(closing(Target(url))) for url in urls]
        cases = _QUICK if quick else _FULL
        if all(target.unix_socket() for target in targets):
            cases = [*cases, replace(_USUAL, unix=True)]
        room = min(target.room() for target in targets)
        fitting = [case for case in cases if 2 * case.total <= room]
        if not fitting:
            raise LookError(f"all cases need a larger maxmemory or maxdisk: half of the smaller one is {spell(room)}")
        if len(fitting) < len(cases):
            left_out = f"{len(cases) - len(fitting)} of {plural(len(cases), 'case')}"
            out.print(f"left out, as they need a larger maxmemory or maxdisk: {left_out}")
        rows = [
            row for case in track(fitting, console=out, transient=True) for row in _rows(targets, case, room, seconds)
        ]
    out.print(table(rows))
    if json:
        write_json(rows, json)
    if plot:
        write_plot(rows, plot)


def _rows(targets: list[Target], case: Case, room: int, seconds: float) -> Iterator[Row]:
    work = case.make(min(_GENERATIONS, room // case.total))
    name = case.name(work)
    # servers before raw sockets, because an error of a server then ends the case at once
    found = {target.name: target.run(case, work, seconds) for target in targets}
    with start_raw(unix=case.unix) as connect, closing(connect(case.connections)) as raw:
        ceilings = measure_writes(raw, work, seconds), measure_reads(raw, work, seconds)
    for op, name_of_op in enumerate(("write", "read")):
        figures = {server: of_both[op] for server, of_both in found.items()}
        yield Row(name, name_of_op, figures, ceilings[op].gb_per_s)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    with suppress(BrokenPipeError):  # the parent process may have ended
        _main(sys.argv[1])
