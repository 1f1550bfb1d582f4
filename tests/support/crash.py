"""Kills a server at random moments, again and again, and finds out whether it kept its promises.

Sometimes it receives SIGHUP instead, because its terminal was closed, and must lose nothing.

Writers change their own keys, version by version; a value contains its key and version, from which all its bytes
follow. After each kill, the server's values are compared with the acknowledged ones:

- every value is one that was written to that key, to the last byte
- under `always` no acknowledged change is lost, under `everysec` none that is older than a second
- the writes of one command or transaction are visible together: no reader sees a part of them

In some scenes others fill the disk meanwhile, and free it again. A write may be refused then.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from forked import Process, begin
from servers import CLIENT_OPTIONS, START_WITHIN, answers, free_port
from terminals import terminal

EVERY_SECOND = 1.0  # seconds that may be lost under everysec
WRITERS = 3
UNITS = 10  # of each kind a writer
KINDS = ("strings", "pages", "block", "mixed")
HEADS = 8
PAGE = 12_000  # bytes
BLOCK = 1 * HEADS * 64 * 128 * 2  # bytes: a layer, one plane, 64 rows of 128 float16


def body(name: str, version: int, size: int) -> bytes:
    return version.to_bytes(8, "little") + random.Random(f"{name} {version}").randbytes(size - 8)


def version_of(value: bytes, name: str) -> int:
    """Return the version of a value. Every byte has to match."""
    version = int.from_bytes(value[:8], "little")
    assert value == body(name, version, len(value)), f"{name} is torn: it begins as version {version}"
    return version


@dataclass
class Unit:
    """Keys that are written together, and the versions that were sent and acknowledged, with times. Version 0 is
    absent.
    """

    kind: str
    name: str
    sent: int = 0
    acknowledged: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])

    @staticmethod
    def deletes(version: int) -> bool:
        return version % 7 == 0

    def write(self, client: redis.Redis) -> None:
        """Send the next version, and note that it was acknowledged."""
        self.sent += 1
        self._send(client, self.sent)
        self.acknowledged.append((time.monotonic(), self.sent))

    def _send(self, client: redis.Redis, version: int) -> None:
        name = self.name
        if self.kind == "strings":
            with client.pipeline(transaction=True) as pipe:
                for part, size in (("a", 100), ("b", 5000)):
                    if self.deletes(version):
                        pipe.delete(f"{name}:{part}")
                    else:
                        pipe.set(f"{name}:{part}", body(f"{name}:{part}", version, size))
                pipe.execute()
        elif self.kind == "mixed":
            self._transact(client, version)
        elif self.deletes(version):
            client.execute_command("KVPAGEDEL", name)
        elif self.kind == "pages":
            words: list[Any] = []
            for head in range(HEADS):
                words += [name, 0, head, 0, 0, 8, 1, PAGE, 0, body(f"{name}:{head}", version, PAGE)]
            client.execute_command("KVPAGEMSET", HEADS, *words)
        else:
            client.execute_command("KVBLOCKSET", name, 0, 1, HEADS, 64, 0, 1, 0, 1, 128, body(name, version, BLOCK))

    def _transact(self, client: redis.Redis, version: int) -> None:
        """Read a version and write the next in one transaction: strings, and pages of one block."""
        strings, pages = self._names()
        with client.pipeline(transaction=True) as pipe:
            self._read_all(pipe)
            for name in strings:
                if self.deletes(version):
                    pipe.delete(name)
                else:
                    pipe.set(name, body(name, version, 5000))
            if self.deletes(version):
                pipe.execute_command("KVPAGEDEL", self.name)
            for head, name in enumerate([] if self.deletes(version) else pages):
                written = body(name, version, PAGE)
                pipe.execute_command("KVPAGESET", self.name, 0, head, 0, 0, 8, 1, PAGE, 0, written)
            self._read_all(pipe)
            replies = pipe.execute()
        self._one_version(*replies[:2])
        found = self._one_version(*replies[-2:])
        assert found == (None if self.deletes(version) else version), f"{self.name}: EXEC reads {found}, not {version}"

    def _names(self) -> tuple[list[str], list[str]]:
        return [f"{self.name}:{part}" for part in "ab"], [f"{self.name}:{head}" for head in range(4)]

    def _read_all(self, client: redis.Redis) -> list[Any]:
        strings, pages = self._names()
        words = [word for head in range(len(pages)) for word in (self.name, 0, head, 0, 0)]
        return [client.mget(strings), client.execute_command("KVPAGEMGET", len(pages), *words)]

    def _one_version(self, strings: list[bytes | None], pages: list[bytes | None]) -> int | None:
        return self._version([*strings, *pages], [name for names in self._names() for name in names])

    def read(self, client: redis.Redis) -> int | None:
        """The version that is there, None when nothing is. All its parts have to be of one version."""
        name = self.name
        if self.kind == "mixed":
            with client.pipeline(transaction=True) as pipe:
                self._read_all(pipe)
                return self._one_version(*pipe.execute())
        if self.kind == "strings":
            names = [f"{name}:a", f"{name}:b"]
            values = client.mget(names)
        elif self.kind == "pages":
            names = [f"{name}:{head}" for head in range(HEADS)]
            words = [word for head in range(HEADS) for word in (name, 0, head, 0, 0)]
            values = client.execute_command("KVPAGEMGET", HEADS, *words)
        else:
            names, values = [name], [client.execute_command("KVBLOCKGET", name, 0)]
        return self._version(values, names)

    def _version(self, values: list[bytes | None], names: list[str]) -> int | None:
        """The one version that all parts are of."""
        found = {None if value is None else version_of(value, name) for name, value in zip(names, values, strict=True)}
        assert len(found) == 1, f"{self.name} has parts of the versions {found}"
        return found.pop()

    def check(self, client: redis.Redis, promised: float, *, may_be_evicted: bool) -> None:
        """Compare the values with those acknowledged by the time `promised`; continue from there."""
        least = max(version for when, version in self.acknowledged if when <= promised)
        allowed = range(least, self.sent + 1)
        found = self.read(client)
        if found is None:
            gone = [version for version in allowed if self.deletes(version)]
            assert gone or may_be_evicted, f"{self.name} is lost: versions {allowed} were promised"
            found = gone[-1] if gone else 0
        else:
            assert found in allowed, f"{self.name} has version {found}, promised were {allowed}"
        self.acknowledged = [(0.0, found)]


@dataclass
class Harness:
    """A directory, what should be in it, and servers that live there one after the other."""

    directory: Path
    seed: int
    store: Path | None = None  # where the servers have it, if not there
    kills: int = 0
    hangups: int = 0
    writes: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._promised = 0.0  # writes acknowledged by then must exist
        self._may_be_evicted = False
        self._units = [
            [Unit(kind, f"{kind}-{writer}-{i}") for kind in KINDS for i in range(UNITS)] for writer in range(WRITERS)
        ]

    def live_and_die(self, mode: str, *options: str, may_evict: bool = False, kinds: tuple[str, ...] = KINDS) -> None:
        """Start a server, check the durable values, write for a moment, and kill it."""
        with self._server("--appendfsync", mode, *options) as (process, port):
            self._wait(process, port)
            self._check(port)
            self._write_until(process, port, process.kill, kinds)
            process.wait()
        self._promised = time.monotonic() - (EVERY_SECOND if mode == "everysec" else 0)
        self._may_be_evicted = may_evict
        self.kills += 1

    def be_hung_up_on(self, *options: str) -> None:
        """Start a server, check the durable values, write for a moment, and close its terminal: nothing is lost."""
        with terminal() as place, self._server(*options, start=place.start) as (process, port):
            self._wait(process, port)
            self._check(port)
            self._write_until(process, port, place.close)
            assert process.wait(60) == 0, self._log()
        self._promised = time.monotonic()
        self._may_be_evicted = False
        self.hangups += 1

    def die_within_exec(self, mode: str) -> None:
        """Kill a server during transactions that read and write values on disk, most of them not in memory."""
        self.live_and_die(mode, "--maxmemory", "400kb", kinds=("mixed",))

    def die_at_the_start(self, *options: str) -> None:
        """A server dies before it serves, or soon after."""
        with self._server(*options) as (process, _):
            time.sleep(self._rng.uniform(0, 0.1))
            process.kill()
            process.wait()
        self.kills += 1

    def live(self) -> None:
        """Start a server, check the durable values, and stop it."""
        with self._server() as (process, port):
            self._wait(process, port)
            self._check(port)
            process.terminate()
            assert process.wait(60) == 0, self._log()

    def _check(self, port: int) -> None:
        with redis.Redis(port=port, **CLIENT_OPTIONS) as client:
            for units in self._units:
                for unit in units:
                    unit.check(client, self._promised, may_be_evicted=self._may_be_evicted)

    @contextmanager
    def _server(
        self, *options: str, start: Callable[..., subprocess.Popen[bytes]] | None = None
    ) -> Iterator[tuple[Process, int]]:
        port = free_port()
        place = self.store or self.directory
        command = [sys.executable, "-m", "kvpage_server.app", "--port", str(port), "--dir", str(place)]
        with (self.directory / "log").open("ab") as log:
            command += ["--store", "tiered", *options]
            process = start(command, stdout=log, stderr=log) if start else begin(command, log)
        try:
            yield process, port
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _log(self) -> str:
        return (self.directory / "log").read_text(encoding="utf-8")[-5000:]

    def _wait(self, process: Process, port: int) -> None:
        deadline = time.monotonic() + START_WITHIN
        while not answers(port):
            assert process.poll() is None, f"it does not start without help:\n{self._log()}"
            assert time.monotonic() < deadline, self._log()
            time.sleep(0.005)

    def _write_until(
        self, process: Process, port: int, end: Callable[[], None], kinds: tuple[str, ...] = KINDS
    ) -> None:
        """Have writers of those kinds at work when the server is ended."""
        failures: list[BaseException] = []
        dying = threading.Event()

        def work(units: list[Unit], seed: int) -> None:
            rng = random.Random(seed)
            try:
                with redis.Redis(port=port, **CLIENT_OPTIONS) as client, suppress(redis.ConnectionError):
                    while True:
                        with self._refusals(dying):
                            self._act(client, rng, units)
            except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
                failures.append(error)

        written = [[unit for unit in units if unit.kind in kinds] for units in self._units]
        threads = [threading.Thread(target=work, args=(units, self._rng.randrange(1 << 32))) for units in written]
        for thread in threads:
            thread.start()
        time.sleep(self._rng.choice((self._rng.uniform(0, 0.2), self._rng.uniform(0.2, 1.5))))
        dying.set()
        end()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _act(self, client: redis.Redis, rng: random.Random, units: list[Unit]) -> None:
        unit, act = rng.choice(units), rng.random()
        if act < 0.7:
            unit.write(client)
            self.writes += 1
        elif act < 0.97:
            unit.read(client)
        else:
            client.execute_command(rng.choice(("SAVE", "BGSAVE")))

    @contextmanager
    def _refusals(self, dying: threading.Event) -> Iterator[None]:
        """If the disk may be full, continue after refused commands, and after the server's end."""
        try:
            yield
        except redis.ConnectionError:
            if self.store is None or dying.is_set():
                raise
        except redis.ResponseError as error:
            wanted = "maxdisk has no room" if self.store is None else "writing to disk"  # what SAVE may say, or a write
            if wanted not in str(error):
                raise
            self.refused += 1


def crash(directory: Path, kills: int, seed: int) -> Harness:
    """Kill so many servers, of each kind some. Raises AssertionError when one of them broke a promise."""
    harness = Harness(directory, seed)
    for i in range(kills):
        mode = ("always", "everysec")[i % 2]
        memory = ("--maxmemory", "4mb") if i % 4 < 2 else ()
        disk = ("--maxdisk", "16mb") if i % 10 == 7 else ()
        if i % 10 == 3:
            harness.be_hung_up_on("--appendfsync", ("no", "everysec")[i % 20 // 10], *memory)
        if i % 5 == 4:
            harness.die_at_the_start(*memory)
        elif i % 5 == 2:
            harness.die_within_exec(mode)
        else:
            harness.live_and_die(mode, *memory, *disk, may_evict=bool(disk))
    harness.live()
    return harness


@contextmanager
def others_fill(disk: Path, seed: int) -> Iterator[None]:
    """A small disk is filled, and freed again, from time to time."""
    rng, stopping, theirs = random.Random(seed), threading.Event(), disk / "others"

    def fill() -> None:
        while not stopping.wait(rng.uniform(0.05, 0.5)):
            with suppress(OSError), theirs.open("wb", buffering=0) as file:
                while not stopping.is_set():
                    file.write(bytes(1 << 16))
            stopping.wait(rng.uniform(0.05, 0.5))
            theirs.unlink(missing_ok=True)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        theirs.unlink(missing_ok=True)


def crash_on_a_full_disk(directory: Path, disk: Path, kills: int, seed: int) -> Harness:
    """Kill so many servers whose `disk` others fill meanwhile. Raises AssertionError when one broke a promise."""
    harness = Harness(directory, seed, store=disk)
    harness.live()  # there is room for an empty store
    for i in range(kills):
        policy = ("noeviction", "volatile-ttl")[i % 2]  # nothing expires, so nothing may go
        with others_fill(disk, seed + i):
            harness.live_and_die("always", "--maxmemory-policy", policy)
    harness.live()
    return harness


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    done = crash(place, int(sys.argv[2]), int(sys.argv[3]))
    print(f"{done.kills} kills, {done.writes} acknowledged writes, nothing lost")
