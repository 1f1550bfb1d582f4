"""KV events over ZMQ: which blocks were stored and removed, as vLLM 0.32 publishes them.

A PUB socket sends batches, each in three frames: a topic; a sequence number of 8 bytes, big-endian, from 0 on; and
MessagePack of ``[unix seconds, events, 0]``. An event is a map with the ``type`` BlockStored, BlockRemoved or
AllBlocksCleared. Each process begins with AllBlocksCleared. A ROUTER socket sends the last batches again: a request is
a sequence number, and the replies are the same three frames, from this number on. The last one has no topic, the number
END, and no batch. Source of the format: ``vllm/distributed/kv_events.py``.

pyzmq and msgspec are imported when events are published (extra ``events``).
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import threading
import time
from binascii import unhexlify
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from itertools import compress, islice
from struct import unpack
from typing import Any, Generic, TypeVar

TOPIC = b"kvpage"
END = (-1).to_bytes(8, "big", signed=True)
MOST_BATCHES = 10_000  # that can be sent again
MOST_BYTES = 64 << 20  # of these batches
MOST_UNREAD = 4 * MOST_BYTES  # bytes of replies that all subscribers together have not read
MOST_CHANGES = 1024  # in a batch, which takes less than a millisecond of Python's lock
MOST_WAITING = 100_000  # changes that wait for the thread, as in vLLM
_GATHER = 0.02  # seconds between two batches, in which changes gather, unless a publisher chooses others
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
T = TypeVar("T")


class KVEventsError(ValueError):
    """Error: an address cannot be used, or a package is not installed."""


# -- Events ------------------------------------------------------------------------------------------------------------

CLEARED: Event = {"type": "AllBlocksCleared"}

_HASH = re.compile(rb"[0-9a-f]{16,256}")


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


# A change of the server's store: whether a block was added, its request and its page id. None if all were removed.
Change = tuple[bool, bytes, int] | None


def events_of_store(changes: Iterable[Change]) -> list[Event]:
    """Return the events of a server's changes: of each block that changed, the state after its last change.

    A name that ends with a hash of 16 or more hexadecimal digits is that of a block by its contents: the page id is the
    group of the KV cache, and the name before the hash belongs to the ownership. Other blocks belong to a session,
    which is the request, and their hash is the name ``REQUEST:PAGE``.
    """
    events: list[Event] = []
    groups: dict[tuple[bytes, int], dict[bytes, bool]] = {}  # by the name before the digits, and the page id
    group, last_space, last_page = dict[bytes, bool](), b"", -1
    for change in changes:
        if change is None:
            events, groups, last_page = [CLEARED], {}, -1
            continue
        was_added, req_id, page = change
        space, dot, digits = req_id.rpartition(b".")
        if page != last_page or space != last_space or not space:
            group = groups.setdefault((space + dot, page), {})
            last_space, last_page = space, page
        group[digits] = was_added
    sessions: dict[bytes, dict[int | bytes, bool]] = {}
    for (before, page), group in groups.items():
        if not _are_hashes(group):
            for digits in [digits for digits in group if not _HASH.fullmatch(digits)]:
                name = before + digits
                sessions.setdefault(name, {})[b"%b:%d" % (name, page)] = group.pop(digits)
        hashes = unpack(f">{len(group)}Q", unhexlify(b"".join([digits[-16:] for digits in group])))
        ownership = f"kvpage:{_text(before[:-1])}" if before[:-1] else "kvpage"
        events += _events(hashes, group.values(), ownership, page)
    gone = [block for blocks in sessions.values() for block, was_added in blocks.items() if not was_added]
    events += _events(gone, [False] * len(gone), "kvpage")
    for name, blocks in sessions.items():
        added = [block for block, was_added in blocks.items() if was_added]
        events += _events(added, [True] * len(added), "kvpage", session=_text(name))
    return events


def _are_hashes(names: Collection[bytes]) -> bool:
    """Return whether all names match _HASH. Faster than a match of each."""
    lengths = [*map(len, names)]
    return min(lengths) >= 16 and max(lengths) <= 256 and not b"".join(names).translate(None, b"0123456789abcdef")


def _events(
    hashes: Sequence[int | bytes], flags: Collection[bool], ownership: str, group: int | None = None, session: str = ""
) -> Iterator[Event]:
    """Yield the events of blocks in one place. `flags` says of each whether it was added."""
    place: dict[str, Any] = {"medium": "STORAGE", "locality": "REMOTE", "ownership": ownership, "group": group}
    new = [*compress(hashes, flags)]
    if len(new) < len(hashes):
        yield removed([block for block, was_added in zip(hashes, flags, strict=True) if not was_added], **place)
    if new:
        yield stored(new, session=session, **place)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


# -- Publication -------------------------------------------------------------------------------------------------------


class KVEvents(Generic[T]):
    """Publisher of events. A thread sends them in batches, so `put` never waits for the network.

    If more than MOST_WAITING changes wait for the thread, the oldest are dropped. The next batch then leaves out a
    number, which no batch has. `dropped` is the number of changes without an event since the start.

    `describe` returns the events of some changes, on this thread. Changes gather for `gather` seconds: each batch costs
    about as much as 500 changes. Addresses are ZMQ's, such as
    ``tcp://127.0.0.1:5557``, on which the publisher listens. With ``>`` before it, `endpoint` is the address of a
    subscriber that listens, to which the publisher connects.
    """

    def __init__(
        self, endpoint: str, replay: str, describe: Callable[[list[T]], list[Event]], gather: float = _GATHER
    ) -> None:
        """Listen on `endpoint`, and on `replay` unless it is empty. Raises KVEventsError."""
        self._zmq, msgspec = _library("zmq", "pyzmq"), _library("msgspec", "msgspec")
        self._encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
        self._describe, self._gather = describe, gather
        self._lock = threading.Lock()  # of the next four
        self._changes: deque[T] = deque(maxlen=MOST_WAITING)
        self.dropped = 0
        self._is_awake = False  # whether the thread is going to look at `_changes`
        self._is_closing = False
        self._batches: deque[tuple[bytes, bytes]] = deque()  # sequence numbers, and payloads
        self._kept = 0  # bytes of the payloads in `_batches`
        # By the identity of each subscriber that has not read all of its replies: the tracker of the last one, and the
        # bytes of the payloads.
        self._unread: dict[bytes, tuple[Any, int]] = {}
        self._requests: dict[bytes, bytes] = {}  # first number of the next reply, by identity, in the order of requests
        self._sent = 0  # the next sequence number
        self._left_out = 0  # value of `dropped` when a number was left out last
        self._context = self._zmq.Context()
        self._replayer: Any = None
        try:
            self._publisher: Any = self._open(self._zmq.PUB, endpoint, _UNREAD)
            if replay:
                self._replayer = self._open(self._zmq.ROUTER, replay, MOST_BATCHES + 1)
        except KVEventsError:
            self._context.destroy(linger=0)
            raise
        self._sleeping, self._waking = os.pipe()
        self._send([CLEARED])
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def put(self, change: T) -> None:
        """Publish the events of a change soon. The events of one thread stay in their order. Thread-safe."""
        self.put_all((change,))

    def put_all(self, changes: Sequence[T]) -> None:
        """Publish the events of all changes soon, like `put`."""
        with self._lock:
            if self._is_closing:
                return
            if (surplus := len(self._changes) + len(changes) - MOST_WAITING) > 0:
                self.dropped += surplus
            self._changes.extend(changes)
            if not self._is_awake:
                self._is_awake = True
                os.write(self._waking, b"\0")

    def put_slowly(self, changes: Iterable[T]) -> None:
        """Publish the events of all changes: wait for the thread where `put` would drop some."""
        rest = iter(changes)
        while some := [*islice(rest, min(MOST_CHANGES, MOST_WAITING))]:
            while len(self._changes) + len(some) > MOST_WAITING and self._thread.is_alive():
                time.sleep(self._gather)
            self.put_all(some)

    def close(self) -> None:
        """Send the events of all changes, and end. Later changes are not published."""
        with self._lock:
            self._is_closing = True
        with suppress(BrokenPipeError):  # the thread may have noticed, and ended, already
            os.write(self._waking, b"\0")
        self._thread.join(_JOIN)
        os.close(self._waking)

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
        try:
            if kind == self._zmq.PUB and address.startswith(">"):
                socket.connect(address[1:])
            else:
                socket.bind(address)
                self._warn_of_strangers(address, socket.getsockopt_string(self._zmq.LAST_ENDPOINT))
        except (self._zmq.ZMQError, TypeError, ValueError) as error:
            raise KVEventsError(f"{address}: {error}; an address is, for example, tcp://127.0.0.1:5557") from None
        return socket

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
        while not self._is_closing or self._changes:
            try:
                ready = dict(poller.poll(_AGAIN if self._requests else None))
                if self._replayer in ready:
                    self._note_request()
                if self._requests:
                    self._replay()
                if self._sleeping in ready:
                    os.read(self._sleeping, 64)
                    if not self._is_closing:
                        time.sleep(self._gather)
                    self._is_awake = False  # before the changes are taken, so that none is left behind
                    self._publish()
            except Exception:
                log.exception("KV events: a request for batches failed")
        for socket in filter(None, (self._publisher, self._replayer)):
            socket.close()
        self._context.term()
        os.close(self._sleeping)

    def _publish(self) -> None:
        before = self._left_out
        while self._changes:
            with self._lock:
                some = [self._changes.popleft() for _ in range(min(len(self._changes), MOST_CHANGES))]
                dropped = self.dropped
            if dropped > self._left_out:
                self._leave_out(dropped)
            try:
                self._send(self._describe(some))
            except Exception:
                log.exception("KV events: an event was not published")
                with self._lock:
                    self.dropped = dropped = self.dropped + len(some)
                self._leave_out(dropped)
        if self._left_out > before:
            log.warning("KV events: changes dropped: %d; subscribers see a gap", self._left_out - before)

    def _leave_out(self, dropped: int) -> None:
        """Leave out a sequence number, so that subscribers notice that changes were dropped, `dropped` in all."""
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
            log.warning("KV events: a request for batches is an empty frame and a number of 8 bytes")
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
