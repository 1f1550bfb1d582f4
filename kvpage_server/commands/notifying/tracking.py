"""Client-side caching (CLIENT TRACKING): clients cache keys that they read, and get a message when a key changes.

For a client that tracks, the server notes the keys that it reads. When a key changes, its readers get a message, and
the note is deleted until they read the key again. In broadcasting mode nothing is noted: a client gets a message about
every changed key that begins with one of its prefixes.

The messages are sent before any other reply. So when a client receives the reply of its SET, all other clients that
cache the old value have been sent the message; its own message follows its reply. If they take longer than a
millisecond, they are sent in several turns of the event loop. Until the last one, no session runs commands or sends
replies, so a client gets its message before the reply to any later command. A message names one key, as Redis's
do (redis-py understands no others). In broadcasting mode it names all changed keys. If the messages about the changes
sent together take more than 8 MiB, or are more than 8,192, further clients get one that invalidates all of their keys.

A command that names a request but no page, such as KVBLOCKGET, reads every key of the request. The note has the name
`kv:{req}:`, which COMMAND GETKEYS also returns. A request's index is noted under its own key. Both change with every
page of the request.

Costs: O(1) for a key that is read, and O(readers + length of the key) for a change, however many prefixes there are.
Limits: `most_keys` keys, `most_bytes` for the notes of all clients, and a quarter of these bytes for the notes of one
client. Above its own limit, a client loses its oldest notes. Above the others, the server takes the user with the most
bytes, and the client of that user with the most bytes, and this client loses its oldest notes. So no user can use up
the memory of others. A client gets a message about a lost note, as if the key had changed. It gets no message about a
key that it may not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from time import monotonic_ns
from typing import Any, Generic, TypeVar

from kvpage_server.commands.notifying.channels import Mode, Recipient
from kvpage_server.commands.specs import Spec
from kvpage_server.core import Argument
from kvpage_server.page import page_named
from kvpage_server.resp import Push, Raw
from kvpage_server.store.memory.index import BlockKeys

log = logging.getLogger("kvpage")

# -- prefixes ----------------------------------------------------------------------------------------------------------
#
# Values by prefix, in a radix tree: one pass over a name finds all prefixes that it begins with.
#
# Cost: O(length of the name) to find, O(length of the prefix) to set and remove, however many prefixes there are.

T = TypeVar("T")


class _Node(Generic[T]):
    """A node of the tree. Its prefix is the parent's prefix and `label`. Labels of siblings begin with other bytes."""

    __slots__ = ("below", "label", "value")

    def __init__(self, label: bytes) -> None:
        self.label = label
        self.value: T | None = None  # of the node's prefix; None if that is not in the set
        self.below: dict[int, _Node[T]] = {}  # by the first byte of the label


class Prefixes(Generic[T]):
    """Prefixes, each with a value that is not None. The empty prefix is a prefix of every name."""

    def __init__(self) -> None:
        self._root = _Node[T](b"")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, prefix: bytes) -> T | None:
        """Return the value of a prefix, or None."""
        node = self._path(prefix)[-1]
        return node.value if node is not None else None

    def set(self, prefix: bytes, value: T) -> None:
        """Set the value of a prefix."""
        node, at = self._root, 0
        while at < len(prefix):
            child = node.below.get(prefix[at])
            if child is None:
                child = node.below[prefix[at]] = _Node(prefix[at:])
            common = _common(child.label, prefix[at : at + len(child.label)])
            if common < len(child.label):
                child = node.below[prefix[at]] = _divided(child, common)
            node, at = child, at + common
        self._count += node.value is None
        node.value = value

    def remove(self, prefix: bytes) -> None:
        """Remove a prefix. Raises KeyError if it does not exist."""
        *above, node = self._path(prefix)
        if node is None or node.value is None:
            raise KeyError(prefix)
        node.value = None
        self._count -= 1
        for _ in range(2):  # the parent may have no value, and only one child left
            parent = above.pop() if above else None
            if parent is not None:
                _fold(parent, node)
                node = parent

    def of(self, name: bytes, longer_than: int = -1) -> Iterator[T]:
        """Yield the values of a name's prefixes that are longer than `longer_than` bytes, the shortest first."""
        node, at = self._root, 0
        while True:
            if node.value is not None and at > longer_than:
                yield node.value
            child = node.below.get(name[at]) if at < len(name) else None
            if child is None or not name.startswith(child.label, at):
                return
            node, at = child, at + len(child.label)

    def longer_than(self, name: bytes) -> Iterator[T]:
        """Yield the values of the prefixes that are longer than `name` and begin with it. O(their number)."""
        node, at = self._root, 0
        while at < len(name):
            child = node.below.get(name[at])
            if child is None or not child.label.startswith(name[at : at + len(child.label)]):
                return
            node, at = child, at + len(child.label)
        nodes = [node] if at > len(name) else [*node.below.values()]
        while nodes:
            node = nodes.pop()
            nodes += node.below.values()
            if node.value is not None:
                yield node.value

    def _path(self, prefix: bytes) -> list[_Node[T] | None]:
        """Return the nodes from the root to the node of a prefix; the last one is None if that does not exist."""
        path: list[_Node[T] | None] = [self._root]
        node, at = self._root, 0
        while at < len(prefix):
            child = node.below.get(prefix[at])
            if child is None or not prefix.startswith(child.label, at):
                return [*path, None]
            path.append(child)
            node, at = child, at + len(child.label)
        return path


def _common(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix. `other` must not be longer than `one`."""
    return next((at for at, byte in enumerate(other) if byte != one[at]), len(other))


def _divided(node: _Node[T], at: int) -> _Node[T]:
    """Divide a node's label at `at`. Return the new parent, which has the first part."""
    upper = _Node[T](node.label[:at])
    node.label = node.label[at:]
    upper.below[node.label[0]] = node
    return upper


def _fold(parent: _Node[T], node: _Node[T]) -> None:
    """Remove a node that has neither a value nor children, or join a node without a value and its only child."""
    if node.value is not None or len(node.below) > 1:
        return
    first = node.label[0]
    if not node.below:
        del parent.below[first]
        return
    [child] = node.below.values()
    child.label = node.label + child.label
    parent.below[first] = child


CHANNEL = b"__redis__:invalidate"  # the channel of messages in RESP2
_OPENING = {
    2: b"*3\r\n$7\r\nmessage\r\n$%d\r\n%b\r\n" % (len(CHANNEL), CHANNEL),
    3: b">2\r\n$10\r\ninvalidate\r\n",
}
_INDEX = b":index"
_MANY = 1000  # changed keys with a message each; above, one message invalidates all keys
_MOST_SENT = 8 << 20  # bytes of messages that are sent together; above, one invalidates all keys of a client
_MOST_MESSAGES = 8192  # messages that are sent together; above, clients with many changed keys get one for all of them
_TURN = 1_000_000  # nanoseconds
_MANY_KEYS = 16  # changed keys of a client that are many then
_KEY = 64  # bytes of a message about a key, at most, without the key
_MOST_NOTED = 20_000  # pairs of a changed key and a prefix for one block; above, one message invalidates all keys
_STEP = 1000  # notes that are freed before other clients have their turn
_NOTE = 512  # bytes of a note, without the key
_PREFIX = 1024  # bytes of a prefix, without its name
_SHARE = 4  # the notes of one client take at most 1/4 of `most_bytes`
_IN_A_ROW = 64  # notes that a client loses until the client with the most bytes is searched again


@dataclass(slots=True, eq=False)
class _Reader:
    """The notes of a client since it began to track: keys that it may have cached, the oldest first."""

    client: Recipient | None  # None after it has stopped tracking
    keys: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # finding the first item of a dict is slow
    nbytes: int = 0


@dataclass(slots=True, eq=False)
class _Prefix:
    """The clients that track a prefix in broadcasting mode, and the changed keys with the client that changed each.

    The client is None for changes by several clients, and by none.
    """

    clients: dict[Recipient, None] = field(default_factory=dict)
    changed: dict[bytes, Recipient | None] = field(default_factory=dict)

    def note(self, key: bytes, by: Recipient | None) -> None:
        """Note a changed key. One that expiry, eviction or another client has changed, too, is not the client's own
        change.
        """
        self.changed[key] = by if self.changed.get(key, by) is by else None


@dataclass(slots=True)
class _Pending:
    """The pending messages to a client: that all keys are invalid (`flushed`), and the changed keys."""

    flushed: bool = False
    keys: dict[bytes, None] = field(default_factory=dict)


class Tracking:
    """The tracking clients, the keys that they have read, and their messages."""

    def __init__(
        self, everybody: Mapping[int, Recipient], most_keys: Callable[[], int], most_bytes: Callable[[], int]
    ) -> None:
        """Create an instance without clients. `everybody` has all connected clients by id. `most_keys` and `most_bytes`
        return the limits, 0 for none.
        """
        self.clients: dict[Recipient, _Reader] = {}  # with their notes
        self.items = 0  # number of notes: pairs of a key and a reader
        self.nbytes = 0  # of the notes of all clients
        self.is_due = False  # whether messages are pending, also while they are sent in several turns
        self.is_under_way = False  # whether some are sent in the next turn
        self.is_sending = False  # whether one is being sent
        self._everybody = everybody
        self._most_keys = most_keys
        self._most_bytes = most_bytes
        # The readers of each key, with the key as they have it: a long one would be compared with itself for each.
        self._notes: dict[bytes, tuple[bytes, set[_Reader]]] = {}
        self._of_requests: dict[bytes, set[bytes]] = {}  # notes about whole requests, by `kv:{req}:`
        self._of_blocks: dict[tuple[bytes, int], dict[bytes, None]] = {}  # noted pages, by request and page id
        self._ended: deque[_Reader] = deque()  # readers that do not track any more, whose notes are to be freed
        self._losing: tuple[_Reader, int] | None = None  # the client that loses notes, and the number still to lose
        self._prefixes: Prefixes[_Prefix] = Prefixes()
        self._changed_prefixes: dict[_Prefix, None] = {}
        self.due: dict[Recipient, _Pending] = {}  # pending messages, other than those about prefixes
        self._messages = 0  # number of keys that were added to `due` since the last `send_pending`
        self._left = 0  # bytes of messages that may still be sent
        self._steps: Iterator[None] = iter(())  # the rest of the messages that are sent together
        # Called when all pending messages are sent; those of `_first` are called before the others.
        self._first: list[Callable[[], None]] = []
        self._waiting: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self.clients)

    @property
    def keys(self) -> int:
        """Number of noted keys."""
        return len(self._notes)

    @property
    def prefixes(self) -> int:
        """Number of prefixes."""
        return len(self._prefixes)

    # -- tracking clients ------------------------------------------------------------------------------------------

    def begin(self, client: Recipient, mode: Mode) -> None:
        """Start tracking for a client, or change its mode. Earlier notes and prefixes stay."""
        before = client.tracking.prefixes if client.tracking is not None else {}
        for name in mode.prefixes.keys() - before.keys():
            prefix = self._prefixes.get(name)
            if prefix is None:
                prefix = _Prefix()
                self._prefixes.set(name, prefix)
            prefix.clients[client] = None
            client.keep(len(name) + _PREFIX)
        mode.prefixes = before | mode.prefixes
        if client.tracking is not None:
            mode.caching_called = client.tracking.caching_called
        client.tracking = mode
        client.update_fast_path()
        self.clients.setdefault(client, _Reader(client))

    def end(self, client: Recipient) -> None:
        """Stop tracking for a client, and delete its notes."""
        mode, client.tracking = client.tracking, None
        if mode is None:
            return
        client.update_fast_path()
        for name in mode.prefixes:
            prefix = self._prefixes.get(name)
            assert prefix is not None
            prefix.clients.pop(client)
            client.keep(-len(name) - _PREFIX)
            if not prefix.clients:
                self._prefixes.remove(name)
        reader = self.clients.pop(client)
        self._release(reader)
        self._ended.append(reader)
        if len(self._ended) == 1:
            self._free_notes()

    def _release(self, reader: _Reader) -> None:
        """Subtract the notes of a client from all counts before they are freed."""
        assert reader.client is not None
        reader.client.keep(-reader.nbytes)
        self.nbytes -= reader.nbytes
        reader.client, reader.nbytes = None, 0

    def _free_notes(self) -> None:
        """Free the notes of clients that do not track any more, in steps, as there may be a million."""
        left = _STEP
        while self._ended and left:
            reader = self._ended[0]
            count = min(left, len(reader.keys))
            for _ in range(count):
                self._remove_note(reader, next(iter(reader.keys)))
            left -= count
            if not reader.keys:
                self._ended.popleft()
        if self._ended:
            asyncio.get_running_loop().call_soon(self._free_notes)

    # -- read keys -----------------------------------------------------------------------------------------------------

    def notes(self, client: Recipient, spec: Spec) -> bool:
        """Return whether the keys that a client reads with a command are to be noted."""
        return client.tracking is not None and client.tracking.notes_reads and "readonly" in spec.flags

    def note(self, client: Recipient, spec: Spec, args: Sequence[Argument]) -> None:
        """Note the keys that a client has read with a command, if it still tracks."""
        if (reader := self.clients.get(client)) is not None:
            for key, _ in spec.uses_of(args):
                if key not in reader.keys:
                    self._note(reader, client, key)

    def _note(self, reader: _Reader, client: Recipient, key: bytes) -> None:
        noted = self._notes.get(key)
        if noted is None:
            noted = self._notes[key] = key, set()
            if request := _request_read(key):
                self._of_requests.setdefault(request, set()).add(key)
            elif block := _block_of(key):
                self._of_blocks.setdefault(block, {})[key] = None
        key, readers = noted
        readers.add(reader)
        reader.keys[key] = None
        self.items += 1
        self._count(reader, client, len(key) + _NOTE)
        most = self._most_bytes()
        while 0 < most < _SHARE * reader.nbytes:
            self._take_oldest(reader)
        while 0 < most < self.nbytes or 0 < self._most_keys() < len(self._notes):
            self._take_oldest(self._reader_to_trim())

    def _count(self, reader: _Reader, client: Recipient, nbytes: int) -> None:
        reader.nbytes += nbytes
        self.nbytes += nbytes
        client.keep(nbytes)

    def _reader_to_trim(self) -> _Reader:
        """Return the client that loses the next note: of the user with the most bytes, the client with the most bytes.

        For the next `_IN_A_ROW` notes, it stays the same client.
        """
        if self._losing is not None:
            reader, left = self._losing
            if left and reader.keys and reader.client is not None:
                self._losing = reader, left - 1
                return reader
        of_users: defaultdict[object, int] = defaultdict(int)
        for client, reader in self.clients.items():
            of_users[client.user] += reader.nbytes
        user = max(of_users, key=of_users.__getitem__)
        found = max((it for client, it in self.clients.items() if client.user is user), key=lambda it: it.nbytes)
        self._losing = found, _IN_A_ROW - 1
        return found

    def _take_oldest(self, reader: _Reader) -> None:
        """Remove the oldest note of a client, and send a message as if the key had changed."""
        assert reader.client is not None
        key = next(iter(reader.keys))
        self._remove_note(reader, key)
        self._pending_for(reader.client).keys[key] = None

    def _remove_note(self, reader: _Reader, key: bytes) -> None:
        """Remove a client's note of a key."""
        del reader.keys[key]
        if reader.client is not None:
            self._count(reader, reader.client, -len(key) - _NOTE)
        _, readers = self._notes.get(key, (key, set[_Reader]()))
        if reader not in readers:  # `flushed` has deleted all notes meanwhile
            return
        readers.remove(reader)
        self.items -= 1
        if not readers:
            self._remove(key)

    def _remove(self, key: bytes) -> tuple[bytes, set[_Reader]]:
        """Remove a noted key, and return it as its readers have it, with them."""
        noted = self._notes.pop(key)
        if request := _request_read(key):
            names = self._of_requests[request]
            names.discard(key)
            if not names:
                del self._of_requests[request]
        elif block := _block_of(key):
            pages = self._of_blocks[block]
            del pages[key]
            if not pages:
                del self._of_blocks[block]
        return noted

    # -- changed keys --------------------------------------------------------------------------------------------------

    def changed(self, key: bytes, by: Recipient | None) -> None:
        """Prepare the messages about a changed key. `by` is the client whose command has changed it; None for expiry
        and eviction.
        """
        if self._prefixes:
            self._note_in(self._prefixes.of(key), (key,), by)
        if key in self._notes:
            self._changed(key, by)
        if self._of_requests and key[:3] == b"kv:":
            self._request_changed(key[: key.find(b":", 3) + 1], by)

    def block_changed(self, keys: BlockKeys, by: Recipient | None) -> None:
        """Prepare the messages about changed pages of a block. If very many of them are noted, or begin with prefixes,
        one message to a client invalidates all of its keys.
        """
        request, noted = keys.prefix, self._of_blocks.get((keys.req_id, keys.page), {})
        if self._prefixes:
            about = list(self._prefixes.of(request))
            if len(keys) > _MANY or len(keys) * len(about) > _MOST_NOTED:
                self._flush(self._broadcast_clients(request), request, by)
            else:
                self._note_in(iter(about), keys, by)
                if any(True for _ in self._prefixes.longer_than(request)):
                    for key in keys:
                        self._note_in(self._prefixes.of(key, longer_than=len(request)), (key,), by)
        if len(noted) > _MANY:  # the notes stay, because deleting them takes too long, as does a look at their readers
            noting = (client for client, reader in self.clients.items() if reader.keys)
            self._flush((client for client in noting if _gets_messages(client, by)), request, by)
        else:
            for key in [key for key in noted if key in keys]:
                self._changed(key, by)
        self._request_changed(request, by)

    def _note_in(self, prefixes: Iterator[_Prefix], keys: Iterable[bytes], by: Recipient | None) -> None:
        """Note changed keys under their prefixes."""
        for prefix in prefixes:
            for key in keys:
                prefix.note(key, by)
            self._changed_prefixes[prefix] = None
            self._schedule_send()

    def _broadcast_clients(self, request: bytes) -> Iterable[Recipient]:
        """Return the clients with a prefix of `request`, or with one that begins with it.

        If there are more than `_MANY` pairs of such a client and prefix, return all clients in broadcasting mode,
        because a visit to each pair takes too long.
        """
        about = chain(self._prefixes.of(request), self._prefixes.longer_than(request))
        clients = list(islice(chain.from_iterable(prefix.clients for prefix in about), _MANY + 1))
        if len(clients) <= _MANY:
            return clients
        return [client for client in self.clients if client.tracking is not None and client.tracking.broadcast]

    def _request_changed(self, request: bytes, by: Recipient | None) -> None:
        for name in list(self._of_requests.get(request, ())):
            self._changed(name, by)

    def _flush(self, clients: Iterable[Recipient], request: bytes, by: Recipient | None) -> None:
        """Invalidate all keys of those clients that may read some keys of a request, or may do so."""
        may: dict[object, bool] = {}  # by user
        for client in clients:
            mode = client.tracking
            if mode is None or (mode.no_loop and client is by):
                continue
            both = (client, self._everybody.get(mode.redirect, client))
            for one in both:
                if one.user not in may:
                    may[one.user] = one.may_see_some(request)
            if all(may[one.user] for one in both):
                self._pending_for(client).flushed = True

    def _changed(self, name: bytes, by: Recipient | None) -> None:
        """Prepare messages to the readers of a noted key, and delete the notes."""
        name, readers = self._remove(name)
        nbytes = len(name) + _NOTE
        self.items -= len(readers)
        for reader in readers:
            client = reader.client
            if client is None:  # `_free_notes` deletes the note
                continue
            del reader.keys[name]
            reader.nbytes -= nbytes
            self.nbytes -= nbytes
            client.keep(-nbytes)
            if not _gets_messages(client, by):
                continue
            due = self.due.get(client) or self._pending_for(client)
            due.keys[name] = None
            self._messages += 1
            if self._messages > _MOST_MESSAGES and len(due.keys) > _MANY_KEYS:
                self._forget_all(client, due)

    def _forget_all(self, client: Recipient, due: _Pending) -> None:
        """Prepare the message that all keys of a client are invalid, and delete its notes."""
        due.flushed = True
        due.keys.clear()
        reader, self.clients[client] = self.clients[client], _Reader(client)
        self._release(reader)
        self._ended.append(reader)
        if len(self._ended) == 1:
            asyncio.get_running_loop().call_soon(self._free_notes)

    def flushed(self) -> None:
        """Prepare the message that all keys are invalid for all tracking clients, and delete all notes."""
        forgotten = []
        for client, reader in self.clients.items():
            due = self._pending_for(client)
            due.flushed = True
            due.keys.clear()
            self._release(reader)
            forgotten.append(reader.keys)
            self.clients[client] = _Reader(client)
        for prefix in self._changed_prefixes:
            prefix.changed.clear()
        tables: list[dict[Any, Any]] = [self._of_blocks, self._notes]
        self._notes, self._of_requests, self._of_blocks, self.items = {}, {}, {}, 0
        _free(chain(tables, forgotten))

    # -- sending -------------------------------------------------------------------------------------------------------

    def _pending_for(self, client: Recipient) -> _Pending:
        self._schedule_send()
        return self.due.setdefault(client, _Pending())

    def _schedule_send(self) -> None:
        if not self.is_due:
            self.is_due = True
            asyncio.get_running_loop().call_soon(self.send_pending)  # the next reply may cause an earlier call

    def send_pending(self) -> bool:
        """Send the pending messages for a turn. Return whether all were sent. Otherwise the rest is sent in later
        turns, see `when_sent`.
        """
        return not self.is_due or (not self.is_under_way and self._take_turn())

    def when_sent(self, then: Callable[[], None], *, first: bool) -> None:
        """Call `then` when all pending messages are sent, in a later turn. Some must be under way.

        `first` is for a session that has not run yet: the next step of a command that causes messages would hold it
        back again, until the command's end.
        """
        (self._first if first else self._waiting).append(then)

    def _take_turn(self) -> bool:
        """Send messages for up to `_TURN` nanoseconds, and plan the next turn if some are left."""
        end = monotonic_ns() + _TURN
        self.is_sending = True
        while self.is_due:
            try:
                for _ in self._steps:
                    if monotonic_ns() > end:
                        self.is_sending, self.is_under_way = False, True
                        asyncio.get_running_loop().call_soon(self._go_on)
                        return False
            except Exception:  # all sessions wait for the messages to others
                log.exception("CLIENT TRACKING: a message was not sent")
            self.is_due = bool(self.due or self._changed_prefixes)
            self._steps = self._send_together()
        self.is_sending = False
        return True

    def _go_on(self) -> None:
        if self._take_turn():
            self.is_under_way = False
            waiting, self._first, self._waiting = [*self._first, *self._waiting], [], []
            for then in waiting:
                then()

    def _send_together(self) -> Iterator[None]:
        """Send the messages that are pending now, and yield after each client: first up to `_MOST_SENT` bytes of keys.
        Each further client gets one message that invalidates all of its keys, because copies of the keys for hundreds
        of clients take long.
        """
        self._left, self._messages = _MOST_SENT, 0
        everything_due, self.due = self.due, {}
        encoded: dict[int, dict[bytes, bytes]] = {2: {}, 3: {}}  # messages about keys, by protocol and key
        for client, due in everything_due.items():
            to = self._recipient_of(client) if client.tracking is not None else None
            if to is None:
                continue
            keys = [] if due.flushed else _readable_by_both(due.keys, client, to)
            if due.flushed or (keys and not self._fit(keys)):
                self._push(to, _all_invalid(to.protocol))
            elif keys:
                known = encoded[to.protocol]
                for key in keys:
                    if key not in known:
                        known[key] = b"".join(_invalidation([key], to.protocol))
                self._push(to, Raw(b"".join([known[key] for key in keys])))
            yield
        changed_prefixes, self._changed_prefixes = self._changed_prefixes, {}
        for prefix in changed_prefixes:
            changed, prefix.changed = prefix.changed, {}
            if changed:
                yield from self._broadcast(list(prefix.clients), changed)

    def _fit(self, keys: Sequence[bytes]) -> bool:
        """Return whether messages about these keys may still be sent."""
        return sum(map(len, keys)) + _KEY * len(keys) <= self._left

    def _broadcast(self, clients: Iterable[Recipient], changed: Mapping[bytes, Recipient | None]) -> Iterator[None]:
        """Send clients one message about all changed keys of a prefix, and yield after each client. Equal messages are
        created once for each user and protocol.
        """
        encoded: dict[tuple[object, object, int], Raw | None] = {}  # None if the users may read none of the keys
        actors = set(changed.values())
        for client in clients:
            yield
            mode = client.tracking
            if mode is not None and mode.no_loop and client in actors:
                if others := [key for key, by in changed.items() if by is not client]:
                    self._send(client, others)
                continue
            to = self._recipient_of(client) if mode is not None else None
            if to is None:
                continue
            alike = client.user, to.user, to.protocol
            if alike not in encoded:
                keys = _readable_by_both(changed, client, to)
                encoded[alike] = self._encoded(keys, to.protocol) if keys else None
            if (message := encoded[alike]) is not None:
                self._push(to, message)

    def _send(self, client: Recipient, keys: Sequence[bytes]) -> None:
        """Send a client, or the client of its `redirect`, one message about the keys that both may read."""
        to = self._recipient_of(client)
        keys = _readable_by_both(keys, client, to) if to is not None else []
        if to is not None and keys:
            self._push(to, self._encoded(keys, to.protocol))

    def _encoded(self, keys: Sequence[bytes], protocol: int) -> Raw:
        """Return a message about changed keys, or the one that all keys are invalid if it would not fit."""
        return Raw(b"".join(_invalidation(keys, protocol))) if self._fit(keys) else _all_invalid(protocol)

    def _push(self, to: Recipient, message: Raw) -> None:
        """Send an encoded message, or the one that all keys are invalid if it does not fit."""
        if len(message) > self._left:
            message = _all_invalid(to.protocol)
        self._left -= len(message)
        to.push(message)

    def _recipient_of(self, client: Recipient) -> Recipient | None:
        """Return the client that gets a client's messages; None if there is none, or it can't get them."""
        mode, to = client.tracking, client
        assert mode is not None
        if mode.redirect:
            found = self._everybody.get(mode.redirect)
            if found is None or found.gone:
                mode.broken = True
                if client.protocol == 3:
                    client.push(Push([b"tracking-redir-broken", mode.redirect]))
                return None
            to = found
        listens = mode.redirect and (to.channels or to.patterns)
        return to if to.protocol == 3 or listens else None


def _gets_messages(client: Recipient, by: Recipient | None) -> bool:
    """Return whether a client gets messages about noted keys that `by` has changed."""
    mode = client.tracking
    return mode is not None and not mode.broadcast and not (mode.no_loop and client is by)


def _readable_by_both(keys: Iterable[bytes], client: Recipient, to: Recipient) -> list[bytes]:
    """Return the keys that both clients may read."""
    if client.sees_all and to.sees_all:
        return list(keys)
    return [key for key in keys if client.sees(key) and to.sees(key)]


def _request_read(name: bytes) -> bytes:
    """Return `kv:{req}:` if a noted name changes with every page of a request, otherwise b""."""
    request = name.removesuffix(_INDEX[1:])
    return request if name[:3] == b"kv:" and name.find(b":", 3) == len(request) - 1 else b""


def _block_of(key: bytes) -> tuple[bytes, int] | None:
    """Return the request and page id of a page's block; None if the key names no page."""
    name = page_named(key) if key[:3] == b"kv:" else None
    return (name.req_id, name.page) if name is not None else None


def _invalidation(keys: Sequence[bytes], protocol: int) -> Iterator[bytes]:
    """Yield the pieces of a message about changed keys, encoded for RESP version `protocol`, 2 or 3: in RESP2, a
    message of `CHANNEL`.
    """
    yield b"%b*%d\r\n" % (_OPENING[protocol], len(keys))
    for key in keys:
        yield b"$%d\r\n" % len(key)
        yield key
        yield b"\r\n"


def _all_invalid(protocol: int) -> Raw:
    """Return the message that all keys are invalid, encoded for RESP version `protocol`."""
    return Raw(_OPENING[protocol] + (b"_\r\n" if protocol == 3 else b"$-1\r\n"))


def _free(tables: Iterator[dict[Any, Any]]) -> None:
    """Free tables of notes in steps, as they may have a million entries."""
    left = _STEP
    for table in tables:
        while table and left:
            table.popitem()
            left -= 1
        if table:
            asyncio.get_running_loop().call_soon(_free, chain([table], tables))
            return
