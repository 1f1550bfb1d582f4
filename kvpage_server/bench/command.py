"""`kvpage bench`: what pages and blocks of all sizes cost on this machine and over this network."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import redis
from rich.console import Console
from rich.progress import track

from kvpage_server.bench.measure import ClientStore, Figures, measure_reads, measure_writes
from kvpage_server.bench.raw import start_raw
from kvpage_server.bench.report import Row, table, write_json, write_plot
from kvpage_server.bench.work import LLAMA3_16, LLAMA3_256, SMOLLM2_16, SMOLLM2_256, Blocks, PageWork, Work
from kvpage_server.client import PageClient
from kvpage_server.client.wire.connection import plain_client
from kvpage_server.page import BlockShape
from kvpage_server.system.plurals import how_many

_KIB, _MIB = 1 << 10, 1 << 20
_GENERATIONS = 8
_HELD = 256 * _MIB  # bytes that a server is asked to hold at once
_DELETED_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Case:
    """Work and its connections."""

    make: Callable[[int], Work]  # for so many generations
    total: int  # bytes of a batch
    connections: int = 1
    verify: bool = False
    unix: bool = False

    def name(self, work: Work) -> str:
        """The work and what is special about it."""
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
    """A server that is measured."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._admin = plain_client(url)
        info = self._admin.info("server")
        kinds = {"kvpage-server": "kvpage_version", "Valkey": "valkey_version", "Redis": "redis_version"}
        self.name = next(f"{kind} {info[field]}" for kind, field in kinds.items() if field in info)

    def cpu_seconds(self) -> float:
        """The CPU seconds that the server has used, from INFO."""
        info = self._admin.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def room(self) -> int:
        """The bytes of pages that it can hold."""
        limit = int(self._admin.info("memory").get("maxmemory", 0))
        return min(_HELD, limit // 2) if limit else _HELD

    def unix_socket(self) -> str | None:
        """The path of its unix socket, when that is on this machine."""
        try:
            path = self._admin.config_get("unixsocket").get("unixsocket")
        except redis.ResponseError:  # CONFIG is not for everybody
            return None
        return path if path and Path(path).is_socket() else None

    def run(self, case: Case, work: Work, seconds: float) -> tuple[Figures, Figures]:
        """Write and read; what was written is deleted."""
        url = f"unix://{self.unix_socket()}" if case.unix else self.url
        with PageClient(url, connections=case.connections, verify=case.verify, deadline=60) as client:
            store = ClientStore(client)
            try:
                writes = measure_writes(store, work, seconds, self.cpu_seconds)
                return writes, measure_reads(store, work, seconds, self.cpu_seconds)
            finally:
                for generation in range(len(work.batches)):
                    keys = work.page_keys(generation)
                    for start in range(0, len(keys), _DELETED_AT_ONCE):
                        client.delete(keys[start : start + _DELETED_AT_ONCE])

    def close(self) -> None:
        self._admin.close()


def run(urls: list[str], *, seconds: float, quick: bool, json: Path | None, plot: Path | None, out: Console) -> None:
    """Measure the servers side by side; show what was found, and write it.

    `seconds` is for each kind of call. Raises PageClientError or RedisError when a server is lost or refuses,
    ModuleNotFoundError when there is nothing to plot with.
    """
    if plot:
        importlib.import_module("matplotlib")
    with ExitStack() as stack:
        targets = [stack.enter_context(closing(Target(url))) for url in urls]
        cases = _QUICK if quick else _FULL
        if all(target.unix_socket() for target in targets):
            cases = [*cases, replace(_USUAL, unix=True)]
        room = min(target.room() for target in targets)
        fitting = [case for case in cases if 2 * case.total <= room]
        if len(fitting) < len(cases):
            left_out = f"{len(cases) - len(fitting)} of {how_many(len(cases), 'case')}"
            out.print(f"left out, as they need a larger maxmemory: {left_out}")
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
    found = {target.name: target.run(case, work, seconds) for target in targets}  # first: it may be gone, or refuse
    with start_raw(unix=case.unix) as connect, closing(connect(case.connections)) as raw:
        ceilings = measure_writes(raw, work, seconds), measure_reads(raw, work, seconds)
    for op, name_of_op in enumerate(("write", "read")):
        figures = {server: of_both[op] for server, of_both in found.items()}
        yield Row(name, name_of_op, figures, ceilings[op].gb_per_s)
