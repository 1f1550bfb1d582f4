"""Lookups, loads and saves of an engine, executed by threads of the connector.

An engine ends if its connector raises, and stalls if it waits. So the methods of `Jobs` return at once, their results
are futures without exceptions, and every job has a deadline, which includes its time in the queue. A failed job is a
miss: `Reasons` counts and logs it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpage_connectors.reasons import Away, Late, Reasons, reason_of
from kvpage_server.address import DEFAULT_URL, URL, urls_of, with_credentials
from kvpage_server.client import BlockName, Closed, DeadlineExceeded, Disconnected, PageClient
from kvpage_server.client.page import BlockPages, StateName
from kvpage_server.client.raw_commands import RawCommand, integer, up_to

_MIB = 1024 * 1024
_PIECES = {"load": 32 * _MIB, "save": 16 * _MIB}  # bytes of one call; if another fails, the blocks of this one count
_PAUSE = 1.0  # seconds without requests after the server did not answer


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of an engine, to load or to save."""

    count: int
    nbytes: int  # of each
    pages: Callable[[slice], BlockPages]  # of some of the blocks, called by threads; the bodies are the engine's memory


_Move = Callable[[BlockPages, float], list[bool]]  # receives or sends pages until a time


class Lookup:
    """A lookup in progress, or its answer."""

    def __init__(self, future: Future[int], end: float, lease_seconds: float) -> None:
        self._future = future
        self._end = end
        self._leased_until = time.monotonic() + lease_seconds

    @property
    def is_old(self) -> bool:
        """Return whether the found blocks may have been evicted since."""
        return self._future.done() and time.monotonic() > max(self._leased_until, self._end)

    def answer(self, patience: float = 0.0) -> int | None:
        """Return the number of stored blocks, or None while it is unknown. After the deadline it is 0.

        Waits at most `patience` seconds, which lets other threads run.
        """
        if not self._future.done():
            if time.monotonic() >= self._end:
                return 0
            wait([self._future], patience)
        return self._future.result() if self._future.done() else None


class Jobs:
    """Jobs of one engine on one store, and the threads that execute them. Threads can share it.

    `reasons` counts missed blocks. `moved` counts blocks as lookup/ok, load/ok and save/ok, and bytes as load/bytes and
    save/bytes.
    """

    def __init__(
        self,
        url: str,
        log: logging.Logger,
        *,
        threads: int = 4,
        lookup_seconds: float = 0.5,
        transfer_seconds: float = 5.0,
        lease_ms: int = 20_000,
        **options: Any,
    ) -> None:
        """Create the threads, which begin to connect. A store that is away is no error.

        `url` and `options` are those of PageClient. An empty `url` is that of the environment, and a URL without a
        password gets the password of the environment, because engines log their options. `threads` is the number of
        loads and saves at the same time. A lookup has `lookup_seconds`, a load or save `transfer_seconds`, unless its
        call names an `end` in monotonic seconds. Found blocks are protected from eviction for `lease_ms`. Raises
        ValueError for an invalid URL, option or number.
        """
        if not (lookup_seconds > 0 and threads >= 1 and lease_ms >= 0):
            raise ValueError("lookup_seconds must be more than 0, threads at least 1, lease_ms at least 0")
        self.reasons = Reasons(log)
        self.moved: Counter[str] = Counter()
        url = url or os.environ.get(URL) or DEFAULT_URL
        url = url if "password" in options else with_credentials(url)
        self._client = PageClient(url, deadline=transfer_seconds, **options)
        self.lookup_seconds, self.transfer_seconds, self._lease_ms = lookup_seconds, transfer_seconds, lease_ms
        self._lookups = ThreadPoolExecutor(1, "kvpage-lookup")
        self._transfers = ThreadPoolExecutor(threads, "kvpage-transfer")
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._taken: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()  # the client's misses that are in `reasons`
        self._pause = _PAUSE if len(urls_of(url)) == 1 else 0.0  # of several, PageClient leaves a silent one alone
        self._away_until = 0.0
        self._is_closed = False
        for pool, count in ((self._lookups, 1), (self._transfers, threads)):
            for _ in range(count):
                self._submit(pool, "connect", self._connect, lambda: None, lambda: 0)

    # -- called by the engine's threads --------------------------------------------------------------------------------

    def lookup(
        self,
        names: Callable[[], Sequence[BlockName]],
        count: int,
        pages_per_block: int,
        *,
        lease_ms: int | None = None,
        end: float | None = None,
    ) -> Lookup:
        """Begin to count the complete blocks of `names`, from the first one, and to lease them.

        `names` is called by a thread and returns `count` names. A `lease_ms` of 0 counts a use of the blocks, and links
        each to the one before it.
        """
        lease = self._lease_ms if lease_ms is None else lease_ms
        until = time.monotonic() + self.lookup_seconds if end is None else end

        def ask() -> int:
            options: dict[str, Any] = {"pages_per_block": pages_per_block, "lease_ms": lease}
            found = self._client.prefix(names(), deadline=_left(until), **options)
            self._add({"lookup/ok": found})
            return found

        future = self._submit(self._lookups, "lookup", ask, lambda: 0, lambda: count)
        return Lookup(future, until, lease / 1000)

    def lengths(
        self, names: Sequence[BlockName], states: Sequence[StateName], pages_per_block: int, end: float
    ) -> list[int]:
        """Return the lengths at which a model with states can continue, as `PageClient.lengths`; none after `end`. The
        longest is leased. This method waits.
        """

        def ask() -> list[int]:
            options: dict[str, Any] = {"pages_per_block": pages_per_block, "lease_ms": self._lease_ms}
            return self._client.lengths(names, states, deadline=_left(end), **options)

        future = self._submit(self._lookups, "lookup", ask, list[int], lambda: len(names))
        wait([future], max(end - time.monotonic(), 0))
        return future.result() if future.done() else []

    def pin(self, names: Callable[[], Sequence[BlockName]], count: int, *, pin: bool) -> None:
        """Begin to protect blocks from eviction until they are unpinned, or to unpin them.

        `names` is called by a thread and returns `count` names.
        """
        word = b"KVPAGEPIN" if pin else b"KVPAGEUNPIN"
        self.ask("pin", lambda: [RawCommand([word, *name], integer) for name in names()], count)

    def ask(
        self,
        job: str,
        commands: Callable[[], Sequence[RawCommand]],
        count: int,
        *,
        end: float | None = None,
        **options: Any,
    ) -> Future[list[Any]]:
        """Begin to send commands for `count` blocks in a pipeline, with `options` of `PageClient.ask`. The result is
        their decoded replies, or empty.
        """
        until = time.monotonic() + self.lookup_seconds if end is None else end

        def ask() -> list[Any]:
            return self._client.ask(commands(), deadline=_left(until), **options)

        return self._submit(self._lookups, job, ask, list, lambda: count)

    def lock(self, names: Callable[[], Sequence[BlockName]], count: int) -> Future[list[bool]]:
        """Begin to look up and lease blocks of one page each. The result is whether each one exists and is leased.

        One command looks up all blocks before the first missing one, and others the blocks after it. Blocks of a server
        that does not answer are missing.
        """
        end = time.monotonic() + self.lookup_seconds

        def ask() -> list[bool]:
            every = names()
            found = self._client.prefix(every, pages_per_block=1, lease_ms=self._lease_ms, deadline=_left(end))
            rest = [
                RawCommand([b"KVPAGELEASE", req, self._lease_ms, page], up_to(1)) for req, page in every[found + 1 :]
            ]
            after = self._client.ask(rest, gone=0, deadline=_left(end)) if rest else []
            self._add({"lookup/ok": found + sum(after)})
            return [True] * found + [False] * (found < count) + [answer == 1 for answer in after]

        return self._submit(self._lookups, "lookup", ask, lambda: [False] * count, lambda: count)

    def load(self, blocks: Blocks, end: float | None = None, *, here: bool = False) -> Future[list[bool]]:
        """Begin to receive blocks. The result has for each block whether all of its pages arrived. The memory of a
        missed block is undefined.

        The threads share a large load: while one waits for the server, another receives. With `here`, the caller's
        thread receives a part itself: it would wait anyway, and to wake another thread takes a tenth of the time of
        8 MiB.
        """
        return self._shared("load", blocks, _PIECES["load"] // blocks.nbytes, self._receive, end, here)

    def save(
        self, blocks: Blocks, end: float | None = None, *, threads: int = 1, here: bool = False
    ) -> Future[list[bool]]:
        """Begin to store blocks, whose memory must not change until the result has arrived: for each block whether it
        was stored. At most `threads` threads share a large save: while one waits for the server, another sends. The
        others are free for loads. Only a save of one thread can be abandoned. `here` is that of `load`.
        """
        step = max(-(-blocks.count // threads), _PIECES["save"] // blocks.nbytes)
        return self._shared("save", blocks, step, self._send, end, here)

    def abandon(self, saves: Iterable[Future[list[bool]]]) -> None:
        """Cancel saves that wait in the queue, and wait for the others, because their memory will change."""
        wait([future for future in saves if not future.cancel()])

    def take_counts(self) -> dict[str, int]:
        """Return the increase of all counts since the last call, as ``job/ok``, ``job/bytes`` and ``job/reason``."""
        with self._lock:
            missed = dict(self.reasons.counts)  # a copy, because threads add to it
            now = self.moved + Counter({f"{job}/{reason}": n for (job, reason), n in missed.items()})
            new, self._taken = now - self._taken, now
        return dict(new)

    def drain(self, seconds: float) -> bool:
        """Wait at most `seconds` for the loads and saves in progress. Return whether all have ended."""
        with self._lock:
            open_now = set(self._open)
        return not wait(open_now, seconds).not_done

    def close(self, seconds: float = 0.0) -> None:
        """Wait at most `seconds` for loads and saves, end the others as misses, and close the connections."""
        self.drain(seconds)
        self._is_closed = True
        self._client.close()
        self._lookups.shutdown()
        self._transfers.shutdown()

    # -- in the threads ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Open a connection, so that the first job of this thread finds one. No block has the asked name."""
        self._client.prefix([(b"vllm.none", 0)], pages_per_block=1, deadline=self.lookup_seconds)

    def _receive(self, pages: BlockPages, end: float) -> list[bool]:
        return self._client.mget_into(pages.keys, pages.bodies, deadline=_left(end))

    def _send(self, pages: BlockPages, end: float) -> list[bool]:
        self._client.mset(pages, deadline=_left(end))
        return [True] * len(pages)

    def _shared(
        self, job: str, blocks: Blocks, step: int, move: _Move, end: float | None, here: bool
    ) -> Future[list[bool]]:
        """Transfer blocks in parts of `step`, with `here` the last one here. Return a future with all results."""
        until = time.monotonic() + self.transfer_seconds if end is None else end
        parts = [*_pieces(slice(0, blocks.count), step)]
        pools = [self._transfers] * (len(parts) - here) + [None]
        futures = [
            self._transfer(pool, job, blocks, part, move, until) for pool, part in zip(pools, parts, strict=False)
        ]
        return futures[0] if len(futures) == 1 else self._joined(futures)

    def _transfer(
        self, pool: ThreadPoolExecutor | None, job: str, blocks: Blocks, part: slice, move: _Move, until: float
    ) -> Future[list[bool]]:
        done: list[bool] = []

        def run() -> list[bool]:
            for piece in _pieces(part, _PIECES[job] // blocks.nbytes):
                _left(until)
                pages = blocks.pages(piece)
                moved, each = move(pages, until), len(pages.keys.layout)
                found = [True] * (piece.stop - piece.start)
                if not all(moved):
                    found = [all(moved[at : at + each]) for at in range(0, len(moved), each)]
                done.extend(found)
                self._add({f"{job}/ok": sum(found), f"{job}/bytes": blocks.nbytes * sum(found)})
            if not all(done):
                self.reasons.count(job, self._why_missed(), done.count(False))
            return done

        def otherwise() -> list[bool]:
            return done + [False] * (part.stop - part.start - len(done))

        return self._submit(pool, job, run, otherwise, lambda: otherwise().count(False))

    def _joined(self, parts: Sequence[Future[list[bool]]]) -> Future[list[bool]]:
        """Return a future with the results of all parts in one list."""
        whole: Future[list[bool]] = Future()
        left = len(parts)

        def end(_: Future[list[bool]]) -> None:
            nonlocal left
            with self._lock:
                left -= 1
                is_last = left == 0
            if is_last:
                whole.set_result([is_moved for part in parts for is_moved in part.result()])

        for part in parts:
            part.add_done_callback(end)
        if not parts:
            whole.set_result([])
        return whole

    def _submit(
        self,
        pool: ThreadPoolExecutor | None,
        job: str,
        run: Callable[[], T],
        otherwise: Callable[[], T],
        missed: Callable[[], int],
    ) -> Future[T]:
        """Execute `run` in a thread of `pool`, or in this one. After an exception, count `missed()` blocks; the result
        is `otherwise()`.
        """

        def execute() -> T:
            try:
                if self._is_closed:
                    raise Closed
                if time.monotonic() < self._away_until:
                    raise Away
                return run()
            except Exception as error:  # noqa: BLE001 - a miss, whatever the reason
                if isinstance(error, DeadlineExceeded | Disconnected) and not isinstance(error, Closed):
                    self._away_until = time.monotonic() + self._pause
                self.reasons.count(job, reason_of(error), missed(), error)
                return otherwise()

        future: Future[T] = Future()

        def settle() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(execute())

        if pool is not self._lookups:
            with self._lock:
                self._open.add(future)
            future.add_done_callback(self._forget)
        try:
            pool.submit(settle) if pool else settle()
        except RuntimeError:  # the pool was shut down
            self.reasons.count(job, "closed", missed())
            future.set_result(otherwise())
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._open.discard(future)

    def _add(self, numbers: dict[str, int]) -> None:
        with self._lock:
            self.moved.update(numbers)

    def _why_missed(self) -> str:
        """Return the most frequent reason of the client's misses since the last call."""
        with self._lock:
            seen = Counter(self._client.misses)
            new, self._missed = seen - self._missed, seen
        return max(new, key=lambda reason: new[reason], default="absent")


def _left(end: float) -> float:
    """Return the seconds until `end`. Raises Late if there are none."""
    if (left := end - time.monotonic()) <= 0:
        raise Late
    return left


def _pieces(part: slice, step: int) -> Iterator[slice]:
    """Divide a slice of the blocks into slices of `step` blocks, at least 1."""
    step = max(1, step)
    return (slice(start, min(start + step, part.stop)) for start in range(part.start, part.stop, step))
