"""KV events over ZMQ: which blocks were stored and removed, as vLLM 0.32 publishes them.

A PUB socket sends batches, each in three frames: a topic; a sequence number of 8 bytes, big-endian, from 0 on; and
MessagePack of ``[unix seconds, events, 0]``. An event is a map with the ``type`` BlockStored, BlockRemoved or
AllBlocksCleared. Each process begins with AllBlocksCleared. A ROUTER socket sends the last batches again: a request is
a sequence number, and the replies are the same three frames, from this number on. The last one has no topic, the number
END, and no batch. Source of the format: ``vllm/distributed/kv_events.py``.

pyzmq and msgspec are imported when events are published (extra ``events``).
"""

from __future__ import annotations

import errno
import importlib
import logging
import math
import os
import re
import socket as sockets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from typing import Any, Generic, Protocol, TypeVar

from kvpage_server.address import ZMQ_ADDRESS, is_zmq_address
from kvpage_server.core import changed_blocks
from kvpage_server.page import without_segment
from kvpage_server.system.text import LogRateLimit

TOPIC = b"kvpage"
END = (-1).to_bytes(8, "big", signed=True)
MOST_BATCHES = 10_000  # that can be sent again
MOST_BYTES = 64 << 20  # of these batches
MOST_UNREAD = 4 * MOST_BYTES  # bytes of replies that all subscribers together have not read
MOST_CHANGES = 4096  # in a batch: Python takes up to 2 us for each, and other threads may run meanwhile
MOST_WAITING = 100_000  # changes that wait for the thread, as in vLLM
_GATHER = 0.02  # seconds in which changes gather after the first one
_UNREAD = MOST_BATCHES  # batches for a subscriber that does not read; it loses later ones
_LONGEST_FRAME = 1024  # bytes of a frame that a subscriber sends; a longer one ends its connection
_MOST_REQUESTS = 1000  # subscribers whose requests wait
_FEW = 16  # requests of a subscriber that are received before they are examined
_AGAIN = 50  # milliseconds until it is examined again whether a waiting request can be answered
_STALLED = 60_000  # milliseconds without progress after which the connection for replies ends
_LINGER = 200  # milliseconds for unsent batches at the end
_JOIN = 2.0  # seconds until the thread has ended

log = logging.getLogger("kvpage")

Event = dict[str, Any]

_HASH = re.compile(rb"[0-9a-f]{16,}")


class KVEventsError(ValueError):
    """Error: an address cannot be used, or a package is not installed."""


# -- Events ------------------------------------------------------------------------------------------------------------

CLEARED: Event = {"type": "AllBlocksCleared"}


def hash_of(name: str) -> int:
    """Return the hash of a block in events from its name in hexadecimal digits: the last 64 bits, as vLLM does."""
    return int(name[-16:], 16)


def stored(
    hashes: Sequence[int | bytes],
    *,
    medium: str,
    locality: str,
    ownership: str,
    parent: int | None = None,
    tokens: Sequence[int] = (),
    block_size: int = 0,
    group: int | None = None,
    session: str = "",
) -> Event:
    """Return a BlockStored. `tokens` are those of all blocks, `block_size` is their number in each block."""
    event: Event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "locality": locality,
        "ownership": ownership,
    }
    if group is not None:
        event["group_idx"] = group
    if session:
        event["session_id"] = session
    return event


def removed(
    hashes: Sequence[int | bytes], *, medium: str, locality: str, ownership: str, group: int | None = None
) -> Event:
    """Return a BlockRemoved."""
    event: Event = {
        "type": "BlockRemoved",
        "block_hashes": hashes,
        "medium": medium,
        "locality": locality,
        "ownership": ownership,
    }
    if group is not None:
        event["group_idx"] = group
    return event


def events_of_store(records: bytes) -> list[Event]:
    """Return the events of a server's changes: of each block that changed, the state after its last change.

    `records` are those of `BlockChanges.take`. A request that is a hash of 16 or more hexadecimal digits, or ends with
    a dot and one, names a block by its contents: the page id is the group of the KV cache, and the name before the hash
    belongs to the ownership. A segment in braces before the name, as on several servers, is left out. Other blocks
    belong to a session, which is the request, and their hash is the name ``REQUEST:PAGE``.
    """
    was_cleared, groups, others = changed_blocks(records)
    events = [CLEARED] if was_cleared else []
    encoded = importlib.import_module("msgspec").Raw
    for space, page, gone, new in groups:
        owner = without_segment(space)
        ownership = f"kvpage:{_text(owner)}" if owner else "kvpage"
        place: dict[str, Any] = {"medium": "STORAGE", "locality": "REMOTE", "ownership": ownership, "group": page}
        if gone:
            events.append(removed(encoded(gone), **place))
        if new:
            events.append(stored(encoded(new), **place))
    sessions: dict[bytes, list[bytes]] = {}
    removed_names: list[bytes] = []
    in_segments: dict[int, dict[int, bool]] = {}  # by page id and hash: whether the block was added
    for (req_id, page), was_added in others.items():
        if (name := without_segment(req_id)) != req_id and _HASH.fullmatch(name):
            in_segments.setdefault(page, {})[hash_of(name.decode())] = was_added
            continue
        blocks = sessions.setdefault(req_id, []) if was_added else removed_names
        blocks.append(b"%b:%d" % (req_id, page))
    place = {"medium": "STORAGE", "locality": "REMOTE", "ownership": "kvpage"}
    for page, hashes in in_segments.items():
        if not all(hashes.values()):
            events.append(removed([one for one, was_added in hashes.items() if not was_added], **place, group=page))
        if any(hashes.values()):
            events.append(stored([one for one, was_added in hashes.items() if was_added], **place, group=page))
    if removed_names:
        events.append(removed(removed_names, **place))
    events += [stored(blocks, session=_text(req_id), **place) for req_id, blocks in sessions.items()]
    return events


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


# -- Publication -------------------------------------------------------------------------------------------------------


class Queue(Protocol):
    """Changes that wait for a publisher. `core.BlockChanges` is one, too."""

    @property
    def dropped(self) -> int:
        """The number of changes that were dropped, because too many waited."""

    @property
    def nbytes(self) -> int:
        """The bytes of the waiting changes, as far as they are known."""

    def take(self, most: int) -> tuple[int, Any]:
        """Remove the oldest changes, at most `most`. Return their number, and the changes."""


class EventQueue:
    """Events that wait, at most `most`; then the oldest are dropped. Calls `wake` when one waits again. Thread-safe."""

    nbytes = 0

    def __init__(self, most: int, wake: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=most)
        self._wake = wake
        self.dropped = 0

    def put(self, event: Event) -> None:
        """Append an event. The events of one thread stay in their order."""
        with self._lock:
            is_first, is_full = not self._events, len(self._events) == self._events.maxlen
            self.dropped += is_full
            self._events.append(event)
        if is_first:
            self._wake()

    def take(self, most: int) -> tuple[int, list[Event]]:
        """Remove the oldest events, at most `most`. Return their number, and the events."""
        with self._lock:
            some = [self._events.popleft() for _ in range(min(most, len(self._events)))]
        return len(some), some


def try_to_listen(address: str, other_ports: dict[int, int], opened: ExitStack) -> None:
    """Listen on a TCP address of ZMQ until `opened` is closed, with another port: that of `other_ports`, by the port,
    or a free one, which is added. Raises KVEventsError, also if the other port is taken: then this server has both.
    """
    zmq = _library("zmq", "pyzmq")
    host, _, asked = address.rpartition(":")
    port = int(asked.replace("*", "0"))  # 0: ZMQ takes a free one
    socket = opened.enter_context(opened.enter_context(zmq.Context()).socket(zmq.PUB))
    socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(f"{host}:{other_ports.get(port, '*')}")
    except zmq.ZMQError as error:
        if port in other_ports:
            raise KVEventsError(f"{port} is another port of this server, too") from None
        raise KVEventsError(f"{address}: {_reason(error.errno)}") from None
    if port:
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        other_ports[port] = int(endpoint.rpartition(":")[2])


def _reason(number: int) -> str:
    """Return why ZMQ cannot listen on an address, by the number of the error."""
    missing = number in (errno.ENODEV, errno.EADDRNOTAVAIL)
    return "this machine has no such address" if missing else os.strerror(number)


def _is_in_use(path: str) -> bool:
    """Return whether a process listens on a unix socket."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except TimeoutError:  # too many connections wait
            return True
        except OSError:
            return False
    return True


Q = TypeVar("Q", bound=Queue)


class KVEvents(Generic[Q]):
    """Publisher of the changes in a queue. A thread sends their events in batches, so no writer waits for the network.

    `queue` makes the queue, `changes`, which holds up to MOST_WAITING changes. If it has dropped some, the next batch
    leaves out a number, which no batch has. `dropped` is the number of changes without an event since the start.

    `describe` returns the events of some changes, on the thread. A batch costs about as much as 3,000 changes of a
    server, so one is sent at the earliest `every` seconds after the one before. Addresses are ZMQ's, such as
    ``tcp://127.0.0.1:5557``, on which the publisher listens. With ``>`` before it, `endpoint` is the address of a
    subscriber that listens, to which the publisher connects.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str,
        queue: Callable[[int, Callable[[], None]], Q],
        describe: Callable[[Any], list[Event]] = list,
        every: float = _GATHER,
    ) -> None:
        """Listen on `endpoint`, and on `replay` unless it is empty. Raises KVEventsError."""
        self._zmq, msgspec = _library("zmq", "pyzmq"), _library("msgspec", "msgspec")
        self._encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
        self._describe, self._every = describe, every
        self._lock = threading.Lock()  # of `_is_running`
        self._is_running = False  # whether the thread has started, and is not to end
        self.changes = queue(MOST_WAITING, self._wake)
        self._failed = 0  # changes whose events could not be made
        self._batches: deque[tuple[bytes, bytes]] = deque()  # sequence numbers, and payloads
        self._kept = 0  # bytes of the payloads in `_batches`
        # By the identity of each subscriber that has not read all of its replies: the tracker of the last one, and the
        # bytes of the payloads.
        self._unread: dict[bytes, tuple[Any, int]] = {}
        self._requests: dict[bytes, bytes] = {}  # first number of the next reply, by identity, in the order of requests
        self._sent = 0  # the next sequence number
        self._left_out = 0  # value of `dropped` when a number was left out last
        self._seldom = LogRateLimit(log)
        self._context = self._zmq.Context()
        self._replayer: Any = None
        self._files: list[str] = []  # unix sockets of this process
        try:
            self._publisher: Any = self._open(self._zmq.PUB, endpoint, _UNREAD)
            if replay:
                self._replayer = self._open(self._zmq.ROUTER, replay, MOST_BATCHES + 1)
        except KVEventsError:
            self._context.destroy(linger=0)
            self._remove_files()
            raise
        self._sleeping, self._waking = os.pipe()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._send([CLEARED])

    @property
    def dropped(self) -> int:
        """The number of changes without an event since the start."""
        return self.changes.dropped + self._failed

    @property
    def nbytes(self) -> int:
        """The bytes of waiting changes, and of the batches that can be sent again."""
        return self.changes.nbytes + self._kept

    def start(self) -> None:
        """Start the thread."""
        self._is_running = True
        self._thread.start()
        self._wake()

    def publish(self) -> None:
        """Send the events of all waiting changes. Before `start` in any thread, then in the publisher's."""
        before, count = self._left_out, MOST_CHANGES
        while count == MOST_CHANGES:  # fewer were the last ones: later ones wait for the next batch
            count, changes = self.changes.take(MOST_CHANGES)
            self._note_dropped()
            if count:
                try:
                    self._send(self._describe(changes))
                except Exception:
                    log.exception("KV events: an event was not published")
                    self._failed += count
                    self._note_dropped()
        if self._left_out > before:
            message = "KV events: changes dropped: %d; subscribers see a gap"
            self._seldom.log(logging.WARNING, message, self._left_out - before)

    def close(self) -> None:
        """Send the events of all changes, and end. Later changes are not published."""
        with self._lock:
            self._is_running = False
            os.write(self._waking, b"\0")
        self._thread.join(_JOIN)
        os.close(self._waking)

    def _wake(self) -> None:
        with self._lock:
            if self._is_running:
                os.write(self._waking, b"\0")

    def _open(self, kind: int, address: str, most_unread: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, _LINGER)
        socket.setsockopt(self._zmq.SNDHWM, most_unread)
        socket.setsockopt(self._zmq.IPV6, 1)
        socket.setsockopt(self._zmq.MAXMSGSIZE, _LONGEST_FRAME)
        if kind == self._zmq.ROUTER:
            socket.setsockopt(self._zmq.RCVHWM, _FEW)
            socket.setsockopt(self._zmq.TCP_MAXRT, _STALLED)
            socket.copy_threshold = 0  # the tracker of a copied message would be done at once
        connects = kind == self._zmq.PUB and address.startswith(">")
        if not is_zmq_address(address[connects:]):
            raise KVEventsError(f"an address is {ZMQ_ADDRESS}, got '{address}'")
        try:
            if connects:
                socket.connect(address[1:])
            else:
                self._bind(socket, address)
                self._warn_of_strangers(address, socket.getsockopt_string(self._zmq.LAST_ENDPOINT))
        except self._zmq.ZMQError as error:
            raise KVEventsError(f"{address}: {_reason(error.errno)}") from None
        return socket

    def _bind(self, socket: Any, address: str) -> None:
        """Bind a socket of ZMQ. Only the owner of a unix socket may connect, whatever the umask is.

        ZMQ would replace any file, also a socket on which another process listens, and leaves its own at the end.
        """
        kind, _, path = address.partition("://")
        is_file = kind == "ipc" and not path.startswith(("@", "*"))
        if is_file and os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise KVEventsError(f"{address}: the file exists and is not a socket")
        if is_file and _is_in_use(path):
            raise KVEventsError(f"{address}: {os.strerror(errno.EADDRINUSE)}")
        before = os.umask(0o077)
        try:
            socket.bind(address)
        finally:
            os.umask(before)
        self._files += [path] if is_file else []

    def _remove_files(self) -> None:
        for path in self._files:
            with suppress(OSError):
                os.unlink(path)

    def _warn_of_strangers(self, address: str, bound: str) -> None:
        """Log a warning if other machines can connect to an address. `bound` is the address as ZMQ resolved it."""
        host = re.fullmatch(r"tcp://\[?([^\]]*)\]?:\d+", bound.rstrip("\0"))
        ip = ip_address(host[1].partition("%")[0].removeprefix("::ffff:")) if host else None
        if ip and not ip.is_loopback:
            log.warning(
                "KV events: everybody who reaches %s can read them, because they have no password: listen on "
                "tcp://127.0.0.1, or let only your routers reach this port",
                address,
            )

    # -- on the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._sleeping, self._zmq.POLLIN)
        if self._replayer is not None:
            poller.register(self._replayer, self._zmq.POLLIN)
        earliest, due = 0.0, math.inf  # times of the next batch
        while self._is_running:
            try:
                waits = [math.ceil(1000 * max(0, due - time.monotonic()))] if due < math.inf else []
                waits += [_AGAIN] if self._requests else []
                ready = dict(poller.poll(min(waits, default=None)))
                if self._replayer in ready:
                    self._note_request()
                if self._requests:
                    self._replay()
                now = time.monotonic()
                if self._sleeping in ready:
                    os.read(self._sleeping, 64)
                    due = min(due, max(now + _GATHER, earliest))
                if now >= due:
                    earliest, due = now + self._every, math.inf
                    self.publish()
            except Exception:
                log.exception("KV events: a request or a batch failed")
                due = time.monotonic() + self._every
        self.publish()
        for socket in filter(None, (self._publisher, self._replayer)):
            socket.close()
        self._context.term()
        self._remove_files()
        os.close(self._sleeping)

    def _note_dropped(self) -> None:
        """Leave out a sequence number if changes were dropped, so that subscribers notice that."""
        if (dropped := self.dropped) > self._left_out:
            self._sent += 1
            self._left_out = dropped

    def _send(self, events: list[Event]) -> None:
        number, payload = self._sent.to_bytes(8, "big"), self._encode([time.time(), events, 0])
        self._sent += 1
        self._batches.append((number, payload))
        self._kept += len(payload)
        while len(self._batches) > MOST_BATCHES or self._kept > MOST_BYTES:
            self._kept -= len(self._batches.popleft()[1])
        self._publisher.send_multipart([TOPIC, number, payload])

    def _note_request(self) -> None:
        """Receive a request of a REQ socket, or of a DEALER with its empty frame: identity, empty frame, number."""
        identity, *rest = self._replayer.recv_multipart()
        if len(rest) != 2 or rest[0] or len(rest[1]) != 8:
            self._seldom.log(
                logging.WARNING, "KV events: a request for batches is an empty frame and a number of 8 bytes"
            )
        elif len(self._requests) < _MOST_REQUESTS:
            self._requests[identity] = rest[1]

    def _replay(self) -> None:
        """Answer the waiting requests. A subscriber waits until it has read its last reply, and all of them until
        fewer than MOST_UNREAD bytes are unread, because unread replies take memory.
        """
        self._unread = {who: unread for who, unread in self._unread.items() if not unread[0].done}
        total = sum(size for _, size in self._unread.values())
        for identity, first in [*self._requests.items()]:
            if identity in self._unread:
                continue
            batches = [batch for batch in self._batches if batch[0] >= first]
            size = sum(len(payload) for _, payload in batches)
            if total and total + size > MOST_UNREAD:
                return
            total += size
            del self._requests[identity]
            for number, payload in batches:
                self._replayer.send_multipart([identity, b"", TOPIC, number, payload])
            last = self._replayer.send_multipart([identity, b"", b"", END, b""], copy=False, track=True)
            self._unread[identity] = last, size


def _library(module: str, package: str) -> Any:
    with suppress(ImportError):
        return importlib.import_module(module)
    raise KVEventsError(f"{package} is not installed: pip install '.[events]' in a checkout of kvpage")
