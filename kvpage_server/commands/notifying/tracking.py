"""Client-side caching (CLIENT TRACKING): clients cache what they read, and get a message when it changes.

For a client that tracks, the server notes which keys it read. When a key changes, its readers get a message, and the
note is deleted until they read the key again. In broadcasting mode nothing is noted: a client gets a message about
every changed key that begins with one of its prefixes.

The messages are sent before any other reply. So when a client is told that a key is set, all other clients that cache
the old value have been sent the message; its own comes after its reply. A message names one key, as Redis's do
(redis-py understands no others). In broadcasting mode it names all changed keys.

A command that names a request but no page, such as KVBLOCKGET, reads every key of the request. It is noted under
`kv:{req}:`, which is also what COMMAND GETKEYS returns. A request's index is noted under its own key. Both change with
every page of the request.

Costs: O(1) for a key that is read, and O(readers + lengths of prefixes) for a change. `most_keys` limits the notes:
above it, the oldest keys are treated as changed. A client gets no message about a key that it may not read.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvpage_server.commands.notifying.recipient import Mode, Recipient
from kvpage_server.commands.table.keys import KeyPrefix
from kvpage_server.commands.table.spec import Spec
from kvpage_server.core import Argument
from kvpage_server.resp.reply import Push, Raw

CHANNEL = b"__redis__:invalidate"  # for RESP2, on another connection
_OPENING = {
    2: b"*3\r\n$7\r\nmessage\r\n$%d\r\n%b\r\n" % (len(CHANNEL), CHANNEL),
    3: b">2\r\n$10\r\ninvalidate\r\n",
}
_INDEX = b":index"
_MANY = 1000  # keys of a block that get a message each
_STEP = 1000  # notes that are freed before other clients have their turn

Notes = OrderedDict[bytes, set[int]]  # keys and the ids of those who read them; a dict is slow to give its first item


@dataclass(slots=True)
class _Prefix:
    """The clients that broadcast a prefix, the keys that changed, and the client that changed each, if it was one."""

    clients: dict[Recipient, None] = field(default_factory=dict)
    changed: dict[bytes, Recipient | None] = field(default_factory=dict)

    def note(self, keys: Sequence[bytes], by: Recipient | None) -> None:
        """Note keys that changed. What also changed by itself, or by another, is no client's own change."""
        for key in keys:
            self.changed[key] = by if self.changed.get(key, by) is by else None


@dataclass(slots=True)
class _Due:
    """What a client will be sent: that every key is gone, or which keys changed."""

    flushed: bool = False
    keys: dict[bytes, None] = field(default_factory=dict)


class Tracking:
    """The clients that track, what they read, and what they will be sent. `clients` are all connections by id."""

    def __init__(self, clients: Mapping[int, Recipient], most_keys: Callable[[], int]) -> None:
        self.clients: dict[Recipient, None] = {}  # those that track
        self.items = 0  # readers of all keys
        self.is_due = False  # whether something is to be told
        self._everybody = clients
        self._most_keys = most_keys
        self._notes: Notes = OrderedDict()
        self._of_requests: dict[bytes, set[bytes]] = {}  # notes about whole requests, by `kv:{req}:`
        self._prefixes: dict[bytes, _Prefix] = {}
        self._lengths: list[int] = []  # of the prefixes, each once
        self._due: dict[Recipient, _Due] = {}

    def __bool__(self) -> bool:
        return bool(self.clients)

    @property
    def keys(self) -> int:
        """The number of remembered keys."""
        return len(self._notes)

    @property
    def prefixes(self) -> int:
        """The number of prefixes."""
        return len(self._prefixes)

    # -- who tracks ------------------------------------------------------------------------------------------------

    def begin(self, client: Recipient, mode: Mode) -> None:
        """Let a client track, or change how it tracks. Its notes and prefixes stay."""
        if client.tracking is not None:
            mode.prefixes = client.tracking.prefixes | mode.prefixes
            mode.asked = client.tracking.asked
        client.tracking = mode
        client.settle()
        self.clients[client] = None
        for prefix in mode.prefixes:
            self._prefixes.setdefault(prefix, _Prefix()).clients[client] = None
        self._measure_prefixes()

    def end(self, client: Recipient) -> None:
        """Stop tracking for a client. Its notes stay as long as it is connected."""
        mode, client.tracking = client.tracking, None
        if mode is None:
            return
        client.settle()
        self.clients.pop(client, None)
        for name in mode.prefixes:
            prefix = self._prefixes[name]
            prefix.clients.pop(client, None)
            if not prefix.clients:
                del self._prefixes[name]
        self._measure_prefixes()

    def forget(self, client: Recipient) -> None:
        """Remove a client that is gone. Its notes go with their keys, or with the last client that tracks."""
        self.end(client)
        if self._notes and not self.clients:
            self._forget_notes()

    def _measure_prefixes(self) -> None:
        self._lengths = sorted(set(map(len, self._prefixes)))

    # -- what was read ---------------------------------------------------------------------------------------------

    def note(self, client: Recipient, spec: Spec, args: Sequence[Argument]) -> None:
        """Note what a client that tracks has read with a command."""
        if client.tracking is not None and client.tracking.notes_reads and "readonly" in spec.flags:
            for key, _ in spec.uses_of(args):
                self._note(client, key)

    def _note(self, client: Recipient, key: bytes) -> None:
        readers = self._notes.get(key)
        if readers is None:
            readers = self._notes[key] = set()
            if request := _request_read(key):
                self._of_requests.setdefault(request, set()).add(key)
            if 0 < self._most_keys() < len(self._notes):
                self._changed(next(iter(self._notes)), None)
        elif len(readers) > 2 * len(self.clients):  # most of them are gone
            self.items -= len(readers)
            readers &= {tracking.id for tracking in self.clients}
            self.items += len(readers)
        self.items += client.id not in readers
        readers.add(client.id)

    # -- what changed ----------------------------------------------------------------------------------------------

    def changed(self, keys: Sequence[bytes], by: Recipient | None) -> None:
        """Take note that a key changed, or all pages of a block, by a client's command or by expiry or eviction."""
        for length in self._lengths:
            self._changed_prefixes(keys, length, by)
        notes = self._notes
        if notes:
            noted = [key for key in keys if key in notes]
            if len(noted) > _MANY:
                self._changed_together(noted, by)
            else:
                for key in noted:
                    self._changed(key, by)
            first = keys[0]
            if self._of_requests and first[:3] == b"kv:":
                for name in list(self._of_requests.get(first[: first.find(b":", 3) + 1], ())):
                    self._changed(name, by)

    def _changed_prefixes(self, keys: Sequence[bytes], length: int, by: Recipient | None) -> None:
        """Note which of the prefixes of that length changed."""
        prefixes = self._prefixes
        first = keys[0]
        if len(keys) > 1 and length <= first.find(b":", 3) + 1:  # the pages of a block all begin with its request
            prefix = prefixes.get(first[:length])
            if prefix is not None:
                prefix.note(keys, by)
                self._tell_soon()
            return
        for key in keys:
            prefix = prefixes.get(key[:length]) if len(key) >= length else None
            if prefix is not None:
                prefix.note((key,), by)
                self._tell_soon()

    def _changed(self, name: bytes, by: Recipient | None) -> None:
        """Send its readers a message about a noted key that changed, and delete the note."""
        readers = self._notes.pop(name)
        self.items -= len(readers)
        if request := _request_read(name):
            names = self._of_requests[request]
            names.discard(name)
            if not names:
                del self._of_requests[request]
        for client in self._to_be_told(readers, by):
            self._due_to(client).keys[name] = None

    def _changed_together(self, names: Sequence[bytes], by: Recipient | None) -> None:
        """For very many keys that changed at once: tell their readers that every key is gone. The notes stay."""
        for client in self._to_be_told(set().union(*map(self._notes.__getitem__, names)), by):
            self._due_to(client).flushed = True

    def _to_be_told(self, readers: Iterable[int], by: Recipient | None) -> Iterator[Recipient]:
        for number in readers:
            client = self._everybody.get(number)
            mode = client.tracking if client is not None else None
            if client is not None and mode is not None and not mode.broadcast and not (mode.no_loop and client is by):
                yield client

    def flushed(self) -> None:
        """Every key is gone: tell all clients that track."""
        for client in self.clients:
            due = self._due_to(client)
            due.flushed = True
            due.keys.clear()
        for prefix in self._prefixes.values():
            prefix.changed.clear()
        self._forget_notes()

    def _forget_notes(self) -> None:
        notes, self._notes = self._notes, OrderedDict()
        self._of_requests = {}
        self.items = 0
        _free(notes)

    # -- telling ---------------------------------------------------------------------------------------------------

    def _due_to(self, client: Recipient) -> _Due:
        self._tell_soon()
        return self._due.setdefault(client, _Due())

    def _tell_soon(self) -> None:
        if not self.is_due:
            self.is_due = True
            asyncio.get_running_loop().call_soon(self.tell)  # or before the next reply is sent, if that is sooner

    def tell(self) -> None:
        """Send the messages about what changed."""
        self.is_due = False
        everything_due, self._due = self._due, {}
        for client, due in everything_due.items():
            if client.tracking is None:
                continue
            messages: list[list[bytes] | None] = [None] if due.flushed else []
            self._send(client, [*messages, *([key] for key in due.keys)])
        for prefix in self._prefixes.values():
            changed, prefix.changed = prefix.changed, {}
            if changed:
                self._broadcast(prefix.clients, changed)

    def _broadcast(self, clients: Iterable[Recipient], changed: Mapping[bytes, Recipient | None]) -> None:
        """Send some clients messages about keys. Equal messages are encoded once for each protocol."""
        encoded: dict[int, Raw] = {}
        actors = set(changed.values())
        for client in clients:
            mode = client.tracking
            if mode is not None and mode.no_loop and client in actors:
                if others := [key for key, by in changed.items() if by is not client]:
                    self._send(client, [others])
                continue
            to = self._told(client) if mode is not None else None
            if to is None:
                continue
            if not (client.sees_all and to.sees_all):
                self._send(client, [list(changed)])
            else:
                protocol = to.protocol
                if protocol not in encoded:
                    encoded[protocol] = _spelt([list(changed)], protocol)
                to.push(encoded[protocol])

    def _send(self, client: Recipient, messages: Sequence[list[bytes] | None]) -> None:
        """Send a client, or the one it redirects to, a message about keys that both may read. None means all keys."""
        to = self._told(client)
        if to is None:
            return
        if not (client.sees_all and to.sees_all):
            seen = (m if m is None else [key for key in m if client.sees(key) and to.sees(key)] for m in messages)
            messages = [message for message in seen if message is None or message]
        if messages:
            to.push(_spelt(messages, to.protocol))

    def _told(self, client: Recipient) -> Recipient | None:
        """The connection that gets a client's messages, or None."""
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


def _request_read(name: bytes) -> bytes:
    """`kv:{req}:` if a noted name changes with every page of a request, nothing otherwise."""
    if type(name) is KeyPrefix:
        return bytes(name)
    return name[: -len(_INDEX) + 1] if name[:3] == b"kv:" and name.endswith(_INDEX) else b""


def _spelt(messages: Sequence[list[bytes] | None], protocol: int) -> Raw:
    """The messages about changed keys. For RESP2 they come from a channel."""
    opening = _OPENING[protocol]
    return Raw(b"".join([opening + _spelt_keys(keys, protocol) for keys in messages]))


def _spelt_keys(keys: list[bytes] | None, protocol: int) -> bytes:
    if keys is None:
        return b"_\r\n" if protocol == 3 else b"$-1\r\n"
    return b"*%d\r\n" % len(keys) + b"".join([b"$%d\r\n%b\r\n" % (len(key), key) for key in keys])


def _free(notes: Notes) -> None:
    """Free notes in steps, as there may be a million."""
    for _ in range(min(_STEP, len(notes))):
        notes.popitem()
    if notes:
        asyncio.get_running_loop().call_soon(_free, notes)
