"""Reads of blocks and of large pages from memory that the client maps, instead of over the connection.

Both must be on one machine, and the connection a unix socket. A client that is connected over TCP asks the server for
the path of its socket (`KVMAP SOCKET`). `KVMAP BLOCKMGET`, or `KVMAP MGET` for pages, says where they are and keeps
them there; the client copies them, and compares the digest of each copy; `KVMAP RELEASE` confirms that the server has
kept all of them until then. Everything that cannot be read so is read over the connection.

Without the right to read every key, a client cannot map that memory. Each connection has an *area* then, which the
client maps (`KVMAP AREA`) and the server copies blocks into (`KVMAP COPY`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from kvpage_server.client.commands import BlobCommands, Missed, PageCommands, ShapeWords
from kvpage_server.client.errors import Closed, Disconnected, Refused, WrongReply
from kvpage_server.client.page import BlockName
from kvpage_server.client.raw_commands import array
from kvpage_server.client.wire.connection import Deadline, PageConnection, PagePool
from kvpage_server.client.wire.exchange import Request, command, word
from kvpage_server.client.wire.reply import Values, only
from kvpage_server.core import Memory, PageKeys, copy_hashed, digest
from kvpage_server.page import BlockShape, PageKey

T = TypeVar("T")

LEAST_MAPPED = 256 * 1024  # of a batch: a smaller one is not faster, because it takes two round trips
LEAST_PAGE = 128 * 1024  # bytes of a page, on average: the server answers KVPAGEMGET for smaller ones sooner
NOT_IN_PLACE = "blocks are read in place only over the unix socket of one kvpage-server, and not with mapped=False"
_BYTES_AT_ONCE = 64 << 20  # bytes of blocks that the client keeps in the server's memory at the same time
_PART_BYTES = 8 << 20  # bytes that the client copies while the server looks up the next part
_HALF = (4 << 20) + 4096  # bytes of one half of an area, or of one block if that is larger: they stay in the cache
_MOST_AREA = 32 << 20  # bytes of an area
_AROUND = 128  # bytes that the server needs for each block, at most, in addition to the block
_MOST_BLOCKS = 256  # in a command
_MOST_DESCRIPTORS = 128  # in a reply
_NOT_POSSIBLE = ("ERR unknown", "ERR KVMAP", "ERR a gateway")  # errors of a server that cannot be mapped at all
_SHARED_BYTES = 2 << 20  # bytes that each further thread copies, at least: to wake one takes a tenth of a millisecond
_MOST_COPYING = 4  # threads that share a copy, at most
_REFUSED_FOR = 30.0  # seconds without another attempt after a refusal
_ASKED_FOR = 30.0  # seconds until a client asks again for the server's unix socket
_GET_SEALS, _NO_SHRINK = 1034, 2  # fcntl(2) of Linux

Copying = Callable[[], Any]  # copies bytes of the map into the caller's memory, which takes milliseconds


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """A request, and work to do between sending it and receiving its reply. The results of both are a pair."""

    request: Request[Any]
    work: Copying


Steps = Generator[Request[Any] | Copying | Meanwhile, Any, T]


@dataclass(frozen=True, slots=True)
class Dialogue(Generic[T]):
    """Several requests on one connection: a generator that yields each request, and gets its decoded reply. Between
    requests, or with one as a `Meanwhile`, it yields functions to call, and gets their results.

    It can be begun again, on a connection. If it fails, the connection has to be closed, because the server keeps its
    tickets.
    """

    steps: Callable[[PageConnection], Steps[T]]


class Maps:
    """The regions of a server's memory that a client has mapped, by number. Threads may share it.

    `socket` is the pool of connections to the server's unix socket: the client's own `pool`, or for a client that is
    connected over TCP another one as soon as `found_socket` was called with the server's reply.
    """

    def __init__(self, pool: PagePool) -> None:
        self._over_tcp = None if "path" in pool.connection_kwargs else pool
        self.socket: PagePool | None = None if self._over_tcp else pool
        self._socket_name: Any = None  # KVMAP SOCKET's reply
        self._asked_until = 0.0  # by the monotonic clock
        self.read_bytes = 0  # bytes of blocks that were copied out of the regions
        self._read_before = 0  # bytes of them before the current unix socket of a client over TCP
        self._refused_until = 0.0  # by the monotonic clock
        self.copies_only = False  # whether the user may not map the server's memory
        self.has_pages = True  # whether the user may ask where pages are
        self._regions: dict[int, memoryview] = {}
        self._lock = threading.Lock()
        self._helpers = ThreadPoolExecutor(_MOST_COPYING, "kvpage-copy")
        self._process = os.getpid()  # of the helpers' threads

    @property
    def refused(self) -> bool:
        """Whether the server, or the system, has refused a map in the last half minute."""
        return monotonic() < self._refused_until

    def refuse(self) -> None:
        """Read blocks over the connection for half a minute."""
        self._refused_until = monotonic() + _REFUSED_FOR

    @property
    def has_to_ask(self) -> bool:
        """Whether the client has to send `ASK_SOCKET` over TCP, and to call `found_socket`, before it uses `socket`."""
        return self._over_tcp is not None and not self.refused and monotonic() >= self._asked_until

    def found_socket(self, reply: Any) -> None:
        """Use the unix socket of a reply to `ASK_SOCKET`. Without one, read blocks over TCP.

        A server that refuses the command is not asked again, because that may be logged as an attempt without rights.
        """
        with self._lock:  # several threads may have asked at the same time, and use the first one's pool
            if reply != self._socket_name:
                self._close_socket()
                self._socket_name, self.socket, self._read_before = reply, self._pool_at(reply), self.read_bytes
            if self.socket is None:
                self._refused_until = inf if isinstance(reply, Refused) else monotonic() + _REFUSED_FOR
            self._asked_until = monotonic() + _ASKED_FOR  # from now on, other threads take the pool

    def _pool_at(self, reply: Any) -> PagePool | None:
        """Return a pool for the unix socket of a reply to `ASK_SOCKET`, or None."""
        try:
            path, _ = (os.fsdecode(bytes(word)) for word in array(2)(reply))
        except (TypeError, ValueError, WrongReply):
            return None
        assert self._over_tcp
        return self._over_tcp.at_socket(path, partial(_check_socket, reply))

    def lose_socket(self, failed: PagePool) -> None:
        """Close the unix socket, because a connection of the pool `failed` has failed.

        The client asks for it again, because the server may have restarted. But if no block was read there, it reads
        blocks over TCP for half a minute. If another thread has replaced the pool since, this does nothing.
        """
        with self._lock:
            if self.socket is not failed:
                return
            if self.read_bytes == self._read_before:
                self.refuse()
            self._asked_until = 0.0
            self._close_socket()

    def _close_socket(self) -> None:
        """Close the connections to the unix socket of a client over TCP."""
        lost, self.socket, self._socket_name = self.socket, None, None
        if lost:
            lost.close()

    def copy_each(self, copy: Callable[[int], str | None], indexes: Sequence[int], nbytes: int) -> Missed:
        """Call `copy` for each index, which copies `nbytes` in all. Return the reasons for misses. Threads on other
        cores help if they run before this thread has copied everything itself.
        """
        left = iter(indexes)  # all threads take from it

        def some() -> Missed:
            return {i: why for i in left if (why := copy(i))}

        if self._process != os.getpid():  # a fork has no threads of its parent
            self._helpers, self._process = ThreadPoolExecutor(_MOST_COPYING, "kvpage-copy"), os.getpid()
        count = min(nbytes // _SHARED_BYTES, len(indexes), _cores(), _MOST_COPYING) - 1
        try:
            helpers = [self._helpers.submit(some) for _ in range(count)]
        except RuntimeError as error:  # a ThreadPoolExecutor refuses work after its shutdown
            raise Closed from error
        try:
            missed = some()
        finally:
            begun = [helper for helper in helpers if not helper.cancel()]
            wait(begun)  # they use the caller's memory
        return missed | {i: why for helper in begun for i, why in helper.result().items()}

    def count(self, nbytes: int) -> None:
        """Add bytes that were copied out of the regions."""
        with self._lock:
            self.read_bytes += nbytes

    def numbers(self) -> set[int]:
        """Return the numbers of the mapped regions."""
        with self._lock:
            return set(self._regions)

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Return those of some regions that are not mapped, each once."""
        return [number for number in dict.fromkeys(numbers) if number not in self._regions]

    def part(self, number: int, offset: int, size: int) -> memoryview:
        """Return bytes of a mapped region. Raises WrongReply if the region does not have them, Closed after `close`."""
        region = self._regions.get(number)
        if region is None:
            raise Closed
        if not 0 <= offset <= offset + size <= len(region):
            raise WrongReply(f"{size} bytes from {offset} on are not in a region of {len(region)} bytes")
        return region[offset : offset + size]

    def add(self, sizes: dict[int, int], descriptors: Sequence[int], ended: Iterable[int]) -> None:
        """Map the regions of some descriptors, given the bytes of each region by number. Remove ended regions.

        Raises OSError, or WrongReply for memory that could become shorter while it is read.
        """
        for (number, size), descriptor in zip(sizes.items(), descriptors, strict=True):
            view = _mapped(descriptor, size)
            with self._lock:
                self._regions[number] = view
        with self._lock:
            for number in ended:
                self._regions.pop(number, None)

    def close(self) -> None:
        """Unmap all regions when their current readers have finished."""
        if self._over_tcp:
            self._close_socket()
        self._helpers.shutdown()
        with self._lock:
            self._regions.clear()


def _cores() -> int:
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _mapped(descriptor: int, size: int) -> memoryview:
    """Map `size` bytes of shared memory for reading. Raises OSError, or WrongReply for memory that could become shorter
    while it is read.
    """
    if sys.platform == "linux" and not fcntl.fcntl(descriptor, _GET_SEALS) & _NO_SHRINK:
        raise WrongReply("the server's memory is not sealed")
    if os.fstat(descriptor).st_size < size:
        raise WrongReply(f"the server's memory is shorter than {size} bytes")
    return memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ))


def maps_of(pool: PagePool | None) -> Maps | None:
    """Return new Maps for a client of one server that may be on this machine, None for another client."""
    return Maps(pool) if pool and pool.is_local and not pool.has_tls else None


# -- requests ----------------------------------------------------------------------------------------------------------


class _ReplyWithDescriptors:
    """Receiver of one reply that carries file descriptors. It closes the descriptors that its user does not take."""

    def __init__(self) -> None:
        self._values = Values(with_errors=True)
        self._descriptors: list[int] = []
        self._is_cut = False  # whether this process could not take all descriptors

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    @property
    def done(self) -> bool:
        return self._values.done

    def receive(self, fd: int) -> int:
        """Receive available bytes and descriptors, as in `Receiver`."""
        with socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                data, descriptors, flags, _ = socket.recv_fds(
                    sock, 1 << 16, _MOST_DESCRIPTORS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                )
            except BlockingIOError:
                return -1
        self._descriptors += descriptors
        self._is_cut = self._is_cut or bool(flags & socket.MSG_CTRUNC)
        self._values.feed(data)
        return len(data)

    def feed(self, data: bytes) -> None:
        """Parse bytes, as in `Receiver`."""
        self._values.feed(data)

    def result(self) -> tuple[Any, list[int]]:
        """Return the reply, which may be a Refused, and the descriptors; none if not all of them were received."""
        taken, self._descriptors = self._descriptors, []
        if self._is_cut:
            self._descriptors, taken = taken, []
        return self._values.result()[0], taken


def _for_descriptors(*words: bytes | int) -> Request[tuple[Any, list[int]]]:
    return Request(lambda: iter((command(*words),)), _ReplyWithDescriptors, lambda found: found)


def _request(*words: bytes | int) -> Request[Any]:
    """Return a request whose result is the reply, which may be a Refused."""
    return _asking(lambda: iter((command(*words),)))


def _asking(pieces: Callable[[], Iterator[bytes]]) -> Request[Any]:
    return Request(pieces, lambda: Values(with_errors=True), only)


ASK_SOCKET = _request(b"KVMAP", b"SOCKET")


def _check_socket(expected: Any, connection: PageConnection, deadline: Deadline) -> None:
    """Raise Disconnected if a new connection does not lead to the server that has sent the reply `expected`."""
    if connection.converse(ASK_SOCKET, deadline) != expected:
        raise Disconnected("the unix socket belongs to another server")


class _Located(NamedTuple):
    """A request for where blocks are, or `are_keys`: where the values of keys are, which may be no pages without a
    digest. A user may have the right to one of them only.
    """

    request: Request[Any]
    are_keys: bool


def _locate(names: Sequence[BlockName], expected: ShapeWords, some: range) -> _Located:
    words = (part for i in some for part in names[i])
    return _Located(_request(b"KVMAP", b"BLOCKMGET", len(some), *words, *expected), are_keys=False)


def _locate_pages(names: PageKeys, some: range) -> _Located:
    keys = names[some.start : some.stop].keys()
    pieces = b"*%d\r\n" % (2 + len(some)), word(b"KVMAP"), word(b"MGET"), keys
    return _Located(_asking(lambda: iter(pieces)), are_keys=True)


def _release(tickets: Sequence[int]) -> Request[Any]:
    return _request(b"KVMAP", b"RELEASE", *tickets)


# -- reading -----------------------------------------------------------------------------------------------------------


class _Lent(NamedTuple):
    """Where a block is: `size` bytes from `offset` on in a region, with a digest as text or None, until a RELEASE."""

    region: int
    offset: int
    size: int
    digest: bytes | None
    ticket: int


def _lent(item: Any) -> _Lent:
    """Return an item of KVMAP BLOCKMGET's reply. Raises WrongReply."""
    try:
        lent = _Lent(*item)
    except TypeError:
        raise WrongReply(f"KVMAP BLOCKMGET answered {item!r:.60} for a block") from None
    if not all(type(number) is int for number in (*lent[:3], lent.ticket)):
        raise WrongReply(f"KVMAP BLOCKMGET answered {item!r:.60} for a block")
    return lent


def _map_missing(maps: Maps, numbers: Iterable[int]) -> Steps[None]:
    """Map some regions, unless they are mapped. After a refusal, `maps.refused` is set."""
    if not (missing := maps.missing(numbers)):
        return
    before = maps.numbers()  # other threads may map more meanwhile, which the reply does not have
    reply, descriptors = yield _for_descriptors(b"KVMAP", b"ATTACH", *missing[:_MOST_DESCRIPTORS])
    try:
        if isinstance(reply, Refused) or not descriptors:
            _refuse(maps, reply)
            return
        _, existing, passed = array(3)(reply)
        maps.add({int(number): int(size) for number, size in passed}, descriptors, before - set(existing))
    except (TypeError, ValueError) as error:
        raise WrongReply(f"KVMAP ATTACH answered {reply!r:.60}") from error
    except OSError:  # no descriptor, or no memory
        maps.refuse()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def read_mapped(
    maps: Maps, to: PageCommands, names: Sequence[BlockName], shape: BlockShape, places: Memory, verify: bool
) -> Dialogue[Missed]:
    """Return the dialogue that reads blocks of one shape into the buffers `places`. Its result has the reason for each
    miss, by index, as that of `PageCommands.read_blocks`. With `verify`, digests are compared.
    """
    views, expected = places.views(), to.shape_words(shape)

    def steps(connection: PageConnection) -> Steps[Missed]:
        missed: Missed = {}
        wire: list[int] = []  # indexes of blocks to read over the connection
        at_once = min(max(_BYTES_AT_ONCE // shape.nbytes, 1), _MOST_BLOCKS)
        for start in range(0, len(names), at_once):
            some = range(start, min(start + at_once, len(names)))
            left = [*some]
            if not maps.refused and not maps.copies_only:
                left = []
                yield from _read(maps, partial(_locate, names, expected), some, views, missed, left, verify)
            if maps.copies_only and not maps.refused and shape.nbytes <= _MOST_AREA - _AROUND:
                left = yield from _read_copies(maps, connection, names, left, expected, views, missed, verify)
            wire += left
        if wire:
            found = yield to.read_blocks(
                [names[i] for i in wire], shape, Memory([views[i] for i in wire], writable=True), verify
            )
            missed.update({wire[i]: why for i, why in found.items()})
        return missed

    return Dialogue(steps)


def read_mapped_pages(
    maps: Maps, to: PageCommands, names: PageKeys, key: Callable[[int], PageKey], places: Memory, verify: bool
) -> Dialogue[Missed]:
    """Return the dialogue that reads pages into the buffers `places`. Its result has the reason for each miss, by
    index, as that of `PageCommands.read_pages`. `key` returns the key of an index. Checksums are always compared. A
    value without one may be no page, so it is read over the connection.
    """
    views = places.views()

    def steps(connection: PageConnection) -> Steps[Missed]:
        missed: Missed = {}
        wire: list[int] = []  # indexes of pages to read over the connection
        start = 0
        while start < len(names):
            stop, nbytes = start + 1, len(views[start])
            while stop < min(len(names), start + _MOST_BLOCKS) and nbytes + len(views[stop]) <= _BYTES_AT_ONCE:
                nbytes += len(views[stop])
                stop += 1
            some = range(start, stop)
            if maps.refused or maps.copies_only or not maps.has_pages:
                wire += some
            else:
                yield from _read(maps, partial(_locate_pages, names), some, views, missed, wire, verify=True)
            start = stop
        if wire:
            into = Memory([views[i] for i in wire], writable=True)
            found = yield to.read_pages(PageKeys([key(i) for i in wire]), into, verify)
            missed.update({wire[i]: why for i, why in found.items()})
        return missed

    return Dialogue(steps)


def _read(
    maps: Maps,
    locate: Callable[[range], _Located],
    some: range,
    views: Sequence[memoryview],
    missed: Missed,
    wire: list[int],
    verify: bool,
) -> Steps[None]:
    """Copy the blocks or pages with the indexes `some` into their `views`, while the server looks up the next ones. Add
    misses to `missed`, and the indexes of values to read over the connection to `wire`.
    """
    parts = [(part, locate(part)) for part in _parts(some, views)]
    wrong, copied, tickets = Missed(), dict[int, _Lent](), list[int]()
    answer = yield parts[0][1].request
    for k, (part, located) in enumerate(parts, start=1):
        lent = yield from _borrow(maps, located, answer, part, missed, wire)
        if isinstance(answer, Refused):
            wire += (i for later, _ in parts[k:] for i in later)
            break
        tickets += [block.ticket for block in lent.values()]
        if maps.missing(block.region for block in lent.values()):
            wire += lent
            lent = {}
        copied |= lent
        work = partial(_copy_lent, maps, lent, views, verify)
        if k < len(parts):
            answer, found = yield Meanwhile(parts[k][1].request, work)
        else:
            found = yield work
        wrong |= found
    if tickets and (yield _release(tickets)) != len(tickets):
        wire += copied
    else:
        missed.update(wrong)
        maps.count(sum(block.size for block in copied.values()))


def _parts(some: range, views: Sequence[memoryview]) -> Iterator[range]:
    """Divide the indexes of values into ranges of _PART_BYTES or a little more."""
    start, nbytes = some.start, 0
    for i in some:
        nbytes += len(views[i])
        if nbytes >= _PART_BYTES or i == some[-1]:
            yield range(start, i + 1)
            start, nbytes = i + 1, 0


def _copy_lent(maps: Maps, lent: dict[int, _Lent], views: Sequence[memoryview], verify: bool) -> Missed:
    """Copy blocks out of mapped regions. Return the reasons for misses."""
    parts = {i: maps.part(block.region, block.offset, block.size) for i, block in lent.items()}

    def copy(i: int) -> str | None:
        return _copy(parts[i], lent[i].digest if verify else None, views[i])

    return maps.copy_each(copy, [*lent], sum(map(len, parts.values())))


def _borrow(
    maps: Maps, located: _Located, answer: Any, some: range, missed: Missed, wire: list[int]
) -> Steps[dict[int, _Lent]]:
    """Borrow the blocks or pages with the indexes `some`, given the `answer` to `located`, and map their regions if
    possible. Return where each one is, by index. Add absent values to `missed`, and the indexes of values to read over
    the connection to `wire`, such as blocks in another shape than the expected one, and values that may be no page.
    """
    if isinstance(answer, Refused):
        if located.are_keys and answer.code == "NOPERM":
            maps.has_pages = False  # such a user may read blocks all the same
        elif _is_impossible(answer):
            _refuse(maps, answer)
        wire += some
        return {}
    lent: dict[int, _Lent] = {}
    for i, item in zip(some, array(len(some))(answer), strict=True):
        if item is None:
            missed[i] = "absent"
        elif isinstance(item, Refused | bytes):  # a short string is no page
            wire.append(i)
        else:
            lent[i] = _lent(item)
    if located.are_keys and (unknown := [i for i, page in lent.items() if page.digest is None]):
        yield _release([lent.pop(i).ticket for i in unknown])
        wire += unknown
    yield from _map_missing(maps, [block.region for block in lent.values()])
    return lent


def _refuse(maps: Maps, answer: Any) -> None:
    """Stop mapping the server's memory: for ever if the user has no right to do so, otherwise for half a minute."""
    if isinstance(answer, Refused) and answer.code == "NOPERM":
        maps.copies_only = True
    else:
        maps.refuse()


def _is_impossible(error: Refused) -> bool:
    """Return whether the server refuses all commands for maps to this client."""
    return error.code == "NOPERM" or str(error).startswith(_NOT_POSSIBLE)


def _copy(source: memoryview, digest: bytes | None, into: memoryview) -> str | None:
    """Copy a block. Return the reason if it is a miss: its size is wrong, or the copy does not match `digest`."""
    if len(source) != len(into):
        return "size"
    if digest is not None:
        return None if b"%016x" % copy_hashed(source, into) == digest else "checksum"
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
    return None


# -- copies by the server ----------------------------------------------------------------------------------------------


def _read_copies(
    maps: Maps,
    connection: PageConnection,
    names: Sequence[BlockName],
    some: Sequence[int],
    expected: ShapeWords,
    views: Sequence[memoryview],
    missed: Missed,
    verify: bool,
) -> Steps[list[int]]:
    """Copy the blocks with the indexes `some`, which have the same size, into their `views`, by way of the connection's
    area. Add misses to `missed`. Return the indexes of blocks to read over the connection.

    The server copies a part of the blocks into one half of the area, while the client copies the part before out of the
    other half. Two blocks may be too large for that; there is only one half then.
    """
    if not some:
        return []
    size = max(len(views[i]) for i in some) + _AROUND
    at_once = min(max(_HALF // size, 1), _MOST_BLOCKS)
    half = at_once * size
    halves = 2 if 2 * half <= _MOST_AREA else 1
    parts = [some[start : start + at_once] for start in range(0, len(some), at_once)]

    def ask(k: int) -> Request[Any]:
        words = (word for i in parts[k] for word in names[i])
        return _request(b"KVMAP", b"COPY", k % halves * half, len(parts[k]), *words, *expected)

    answer: Any = None
    for _ in range(2):  # once more if the connection was opened again, as its area has ended then
        if connection.area is None or len(connection.area) < halves * half:
            yield from _open_area(maps, connection, halves * half)
        if connection.area is None:
            return [*some]
        answer = yield ask(0)
        if connection.area is not None:
            break
    area, wrong, wire = connection.area, Missed(), list[int]()
    for k, part in enumerate(parts):
        if area is None or isinstance(answer, Refused):
            maps.refuse()
            return [*some]
        found = dict(zip(part, array(len(part))(answer), strict=True))
        work = partial(_copy_all, area, found, views, verify)
        if k + 1 == len(parts):
            why = yield work
        elif halves == 2:
            answer, why = yield Meanwhile(ask(k + 1), work)
        else:
            why = yield work
            answer = yield ask(k + 1)
        wrong.update(why)
        wire += [i for i, item in found.items() if isinstance(item, Refused)]
    yield _request(b"PING")
    if connection.area is not area:  # it may have ended before the copies were complete
        return [*some]
    missed.update(wrong)
    maps.count(sum(len(views[i]) for i in some if i not in wrong) - sum(len(views[i]) for i in wire))
    return wire


def _copy_all(area: memoryview, found: dict[int, Any], views: Sequence[memoryview], verify: bool) -> Missed:
    """Copy blocks out of an area, given an item of KVMAP COPY's reply for each index. Return the misses."""
    wrong: Missed = {}
    for i, item in found.items():
        if item is None:
            wrong[i] = "absent"
        if item is None or isinstance(item, Refused):
            continue
        try:
            at, size, text = item
            source = area[at : at + size]
        except (TypeError, ValueError):
            raise WrongReply(f"KVMAP COPY answered {item!r:.60} for a block") from None
        if not 0 <= at <= at + size <= len(area):
            raise WrongReply(f"{size} bytes from {at} on are not in an area of {len(area)} bytes")
        if why := _copy(source, text if verify else None, views[i]):
            wrong[i] = why
    return wrong


def _open_area(maps: Maps, connection: PageConnection, size: int) -> Steps[None]:
    """Map an area of at least `size` bytes for a connection. After a refusal, `maps.refused` is set."""
    reply, descriptors = yield _for_descriptors(b"KVMAP", b"AREA", size)
    try:
        if isinstance(reply, Refused) or not descriptors:
            maps.refuse()
            return
        connection.area = _mapped(descriptors[0], int(reply))
    except (TypeError, ValueError) as error:
        raise WrongReply(f"KVMAP AREA answered {reply!r:.60}") from error
    except OSError:  # no descriptor, or no memory
        maps.refuse()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


# -- blocks in place ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlocksInPlace:
    """Blocks in the server's memory. `views` has None for each block that is not there, `missed` the reasons for
    absent and damaged blocks by index. `tickets` keep the blocks there.
    """

    views: list[memoryview | None]
    missed: Missed
    tickets: list[int]


def borrow(
    maps: Maps, to: BlobCommands, names: Sequence[BlockName], shape: BlockShape, verify: bool
) -> Dialogue[BlocksInPlace]:
    """Return the dialogue that borrows blocks of one shape. With `verify`, the digest of each block is compared in the
    map.
    """
    expected = to.shape_words(shape) if isinstance(to, PageCommands) else ()

    def steps(connection: PageConnection) -> Steps[BlocksInPlace]:
        found = BlocksInPlace([None] * len(names), {}, [])
        for start in range(0, 0 if maps.copies_only else len(names), _MOST_BLOCKS):
            some = range(start, min(start + _MOST_BLOCKS, len(names)))
            located = _locate(names, expected, some)
            lent = yield from _borrow(maps, located, (yield located.request), some, found.missed, [])
            found.tickets.extend(block.ticket for block in lent.values())
            if maps.missing(block.region for block in lent.values()):
                continue
            yield partial(_compare, maps, lent, found, shape, verify)
        return found

    return Dialogue(steps)


def _compare(maps: Maps, lent: dict[int, _Lent], found: BlocksInPlace, shape: BlockShape, verify: bool) -> None:
    """Add views of borrowed blocks to `found`, if their sizes, and with `verify` their digests, are right."""
    for i, block in lent.items():
        view = maps.part(block.region, block.offset, block.size)
        if len(view) != shape.nbytes:
            found.missed[i] = "size"
        elif verify and block.digest is not None and b"%016x" % digest([view]) != block.digest:
            found.missed[i] = "checksum"
        else:
            found.views[i] = view


def give_back(tickets: Sequence[int]) -> Dialogue[None]:
    """Return the dialogue that ends tickets. Raises Disconnected if the server has not kept the blocks until then."""

    def steps(connection: PageConnection) -> Steps[None]:
        for start in range(0, len(tickets), _MOST_BLOCKS):
            some = tickets[start : start + _MOST_BLOCKS]
            if (yield _release(some)) != len(some):
                raise Disconnected("the server has not kept the blocks while they were read")

    return Dialogue(steps)
