"""The context of a command: the server, and the client that sent it."""

from __future__ import annotations

import logging
import os
import secrets
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from kvpage_server.commands.access.user import User
from kvpage_server.commands.access.users import LoginLimiter, Refusals, Users
from kvpage_server.commands.measure import Latency, SlowLog, Stats
from kvpage_server.commands.notifying.channels import Channels, Mode
from kvpage_server.commands.notifying.events import KeyEvents
from kvpage_server.commands.notifying.tracking import Tracking
from kvpage_server.commands.specs import READ, Spec
from kvpage_server.configuration.config import Config
from kvpage_server.core import Command, Slot
from kvpage_server.core.protocol import WORD
from kvpage_server.core.regions import Area
from kvpage_server.page import unix_ms
from kvpage_server.resp import QUEUED, Reply, ReplyError
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.system.text import LogRateLimit

# -- Transactions ------------------------------------------------------------------------------------------------------

MOST_QUEUED = 65_536  # words that a transaction may have, because EXEC runs it without a pause
_COMMAND = 192  # overhead of a queued command in bytes


def too_much_queued() -> ReplyError:
    """Return the error for a transaction of more than `MOST_QUEUED` words. It is not raised here."""
    return ReplyError(f"ERR a transaction takes at most {MOST_QUEUED} words: EXEC runs it without a pause")


class Transaction:
    """The commands that a client has queued since MULTI. Long arguments stay in the arena."""

    __slots__ = ("commands", "refused", "rights", "size", "words")

    def __init__(self, user: User | None) -> None:
        # `edition` of the user at MULTI: EXEC checks the rights for the commands again only if it is another one then
        self.rights: object = user.edition if user is not None else None
        self.commands: list[tuple[Spec, Command]] = []
        self.refused = False  # whether a command was refused, so that EXEC runs none
        self.size = 0  # bytes of memory
        self.words = 0  # number of words, including the names of the commands

    def queue(self, spec: Spec, words: Command) -> Reply:
        """Add a command, and return QUEUED. If the transaction would exceed `MOST_QUEUED` words, return an error
        instead and mark it as refused, so that EXEC fails. `words` are the command's words with its name.
        """
        self.words += len(words)
        if self.words > MOST_QUEUED:
            self.refused = True
            return too_much_queued()
        self.commands.append((spec, words))
        sizes = (len(word) if isinstance(word, bytes) else word.size for word in words)
        self.size += sum(sizes) + WORD * len(words) + _COMMAND
        return QUEUED


NEVER = 1 << 62  # nanoseconds: longer than any call
MANY_BYTES = 16 << 20  # bytes of values that a long reply looks up before it sends them
_FEW_BYTES = 64 << 10  # the same when clients hold as much memory as they may
_SHARES = 32  # parts of the memory that clients may still hold, of which a reply takes one
EPOCH_BITS = 43  # a ticket is the server's epoch, shifted by so many bits, and a number
_TICKET = 200  # bytes of memory of a ticket in addition to its slot
_NOTED = 4  # the notes of CLIENT TRACKING take at most 1/4 of maxmemory-clients


@dataclass(frozen=True, slots=True)
class Pause:
    """A CLIENT PAUSE, which lasts until `ends` (seconds of the monotonic clock)."""

    ends: float
    only_writes: bool


class RowOverride(Protocol):
    """A function that replaces rows of the command table, in a gateway."""

    def __call__(self, client: Client, spec: Spec, words: Command) -> Spec:
        """Return the row with which a client's command runs instead of `spec`. `words` are all words of the command.

        Raises ReplyError if the command is not possible, Postponed if it has to wait.
        """

    def row(self, spec: Spec) -> Spec:
        """Return the row that replaces `spec`, the same for every client. Raises ReplyError if there is none."""


def _has_no_listener() -> None:
    """Raise RuntimeError: the default of `Server.stop`, for a server without a listener."""
    raise RuntimeError("the server does not run")


class PendingHandshake(Protocol):
    """A TLS handshake that is not complete, on an accepted connection."""

    began: float  # seconds of the loop's clock

    def end(self, error: str) -> None:
        """Close the connection, and log `error` as the reason."""


class Totals:
    """Sums over all connections at the time of a count, see `steps.counted`. INFO reports them."""

    connections = 0
    sent = 0  # bytes since they connected
    most_incoming = 0  # the largest `Connection.incoming`, in bytes
    most_outgoing = 0  # the largest `Connection.outgoing`, in bytes
    paused = 0
    listening = 0
    watching = 0
    watched = 0  # keys

    def add(self, client: Client) -> None:
        """Add the connection of one client to the sums."""
        connection = client.connection
        self.connections += 1
        self.sent += connection.sent
        self.most_incoming = max(self.most_incoming, connection.incoming)
        self.most_outgoing = max(self.most_outgoing, connection.outgoing)
        self.paused += connection.paused
        self.listening += bool(client.channels or client.patterns)
        self.watching += bool(client.watching)
        self.watched += len(client.watching)


class Server:
    """The state that all clients share. `stop()` asks the process to end."""

    command_override: RowOverride | None = None  # set in a gateway, which stores its keys on other servers
    port = 0  # the port of the listener; it differs from the configured one if that is 0
    tls: ssl.SSLContext | None = None  # used by the next encrypted connection
    slow_from = NEVER  # nanoseconds: the slow log has calls that take longer
    pause: Pause | None = None
    kv_events: Callable[[], tuple[int, int]] | None = (
        None  # changes without a KV event, and bytes of waiting and sent ones
    )
    rates = (0, 0.0, 0.0)  # commands, bytes in, bytes out: of the last second
    peak_memory = 0
    in_flight = 0  # bytes that clients and handshakes hold: see `Client.held`

    def __init__(
        self,
        config: Config,
        keyspace: Keyspace,
        stop: Callable[[], None] = _has_no_listener,
    ) -> None:
        self.config = config
        self.keyspace = keyspace
        self.tiered = keyspace.tier  # the disk below memory, if there is one
        self.stop = stop
        self.run_id = os.urandom(20).hex()
        self.started_ms = unix_ms()
        self.started = time.monotonic()
        self.users = Users()
        self.refusals = Refusals(lambda: self.config.acllog_max_len)
        self.login_limit = LoginLimiter()
        self.stats = Stats()
        self.slow_log = SlowLog(lambda: self.config.slowlog_max_len)
        self.latency = Latency()
        self.clients: dict[int, Client] = {}
        self.handshakes: dict[PendingHandshake, None] = {}  # the oldest first
        self.seldom = LogRateLimit(logging.getLogger("kvpage"))
        self.client_ids = count(1)
        self.epoch = secrets.randbits(19) | 1  # random: it differs after a restart
        self.channels = Channels()
        tracking = Tracking(
            self.clients, lambda: self.config.tracking_table_max_keys, lambda: self.config.client_memory // _NOTED
        )
        self.events = KeyEvents(keyspace, self.channels, tracking)
        self.monitors: dict[Client, None] = {}
        self.totals = Totals()  # sums of the last count; see `steps.counted`

    @property
    def lookup_bytes(self) -> int:
        """Bytes of values that a long reply looks up before it sends them: a 32nd of the memory left for clients, but
        at least 64 KiB, and at most 16 MiB. So many clients that read do not exceed maxmemory-clients together.
        """
        most = self.config.client_memory
        return max(min((most - self.in_flight) // _SHARES, MANY_BYTES), _FEW_BYTES) if most else MANY_BYTES

    def forget(self, client: Client) -> None:
        """Remove a client that has disconnected from all lists of the server, with its subscriptions, watched and
        tracked keys.
        """
        self.clients.pop(client.id, None)
        self.monitors.pop(client, None)
        self.channels.forget(client)
        self.events.forget(client)
        client.transaction = None

    def refuse(self, client: Client, reason: str, what: bytes, user: bytes = b"") -> None:
        """Add a refusal to the ACL log. `reason` is auth, command, key or channel; `what` is the refused command, key
        or channel, or ``AUTH``. `user` is the name that was tried; if empty, the client's user.
        """
        context = "multi" if client.transaction is not None else "toplevel"
        name = user or (client.user.name if client.user else b"")
        self.refusals.note(reason, context, what, name, str(client))

    @property
    def is_paused(self) -> bool:
        """Whether a CLIENT PAUSE, of all commands or of writes only, has not ended yet. `pause` stays set after its
        end.
        """
        return self.pause is not None and self.pause.ends > time.monotonic()

    def begin_pause(self, pause: Pause) -> None:
        """Set the current CLIENT PAUSE. Clients leave the fast path, because each command has to check the pause."""
        self.pause = pause
        for client in self.clients.values():
            client.update_fast_path()

    def end_pause(self) -> None:
        """End the current CLIENT PAUSE, if there is one, and run the commands that wait for its end."""
        if self.pause is None:
            return
        self.pause = None
        for client in list(self.clients.values()):
            client.update_fast_path()
            client.connection.resume()


class Connection(Protocol):
    """The connection of a client, as commands use it. `net.session.Session` implements it."""

    def push(self, message: Reply) -> None:
        """Send a push message, or a message of a channel, after the replies that are queued already."""

    def close(self) -> None:
        """Close the connection when all replies are sent."""

    def abort(self, error: str = "") -> None:
        """Close the connection immediately. Unsent replies are dropped. If a part of a command is missing, and all
        replies before it were sent, `error` is sent as its reply.
        """

    def resume(self) -> None:
        """Run the command that waits for the end of a CLIENT PAUSE, if there is one."""

    def renew(self) -> None:
        """Note that bytes which unsent replies refer to may have moved to another address."""

    def pass_descriptors(self, reply: bytes, descriptors: Sequence[int]) -> bool:
        """Send a reply with file descriptors on a unix socket. Return False if the client has not read all earlier
        output, or on failure; nothing was sent then.
        """

    def trust(self, trusted: bool) -> None:
        """Set whether the client has authenticated. Only a trusted client may send large frames."""

    @property
    def paused(self) -> bool:
        """Whether a command of the client waits for the end of a CLIENT PAUSE."""

    @property
    def sent(self) -> int:
        """Number of bytes that were sent since the client connected."""

    @property
    def incoming(self) -> int:
        """Bytes of memory of commands that were received incompletely."""

    @property
    def running(self) -> int:
        """Bytes of memory of a command that waits, or whose reply is being sent, and read ahead for this reply."""

    @property
    def outgoing(self) -> int:
        """Bytes of replies and messages that wait to be sent."""

    @property
    def unread(self) -> int:
        """Bytes of memory of replies and messages that wait to be sent. A value that was sent in part counts as a
        whole, because its memory is not free before the end.
        """


@dataclass(slots=True, eq=False)
class Client:
    """The server's state of one connection, as commands use it."""

    server: Server
    address: str
    local_address: str
    connection: Connection
    keyspace: Keyspace = field(init=False)
    id: int = 0
    descriptor: int = -1  # of its socket
    user: User | None = field(default=None, init=False)  # None until it has authenticated
    fast_path_ok: bool = field(default=False, init=False)  # set by `update_fast_path`
    kept: int = field(default=0, init=False)  # bytes of names and slots that the server keeps for it; see `keep`
    tickets: dict[int, Slot] = field(default_factory=dict, init=False)  # by number: slots that stay in use for it
    # They are numbered from a random number on, so that no client learns about others, or takes another's for its own.
    first_ticket: int = field(default=0, init=False)
    last_ticket: int = field(default=0, init=False)  # 0 before the first one
    lent: int = field(default=0, init=False)  # bytes of these slots
    ticket_bytes: int = field(default=0, init=False)  # memory of all tickets
    area: Area | None = field(default=None, init=False)  # memory into which blocks are copied for it
    read_ahead: int = field(default=0, init=False)  # bytes borrowed from disk for later steps of its current reply
    waited_to_authenticate: bool = field(default=False, init=False)  # has waited for its turn to try a password
    protocol: int = field(default=2, init=False)
    name: bytes = field(default=b"", init=False)
    lib_name: bytes = field(default=b"", init=False)
    lib_version: bytes = field(default=b"", init=False)
    last_command: str = field(default="", init=False)
    connected: float = field(default_factory=time.monotonic, init=False)
    active: float = field(default_factory=time.monotonic, init=False)  # time of the last received bytes
    finished: int = field(default_factory=time.monotonic_ns, init=False)  # time of the last reply, or of its last read
    durable_before_reply: int = field(default=0, init=False)  # position of changes to be on disk before its reply
    silence: int = field(default=0, init=False)  # number of replies not to send; negative: all
    unanswered: bool = field(default=False, init=False)  # the reply to the current command will not be sent
    spared: bool = field(default=False, init=False)  # CLIENT NO-EVICT
    touches: bool = field(default=True, init=False)  # its reads count as uses; CLIENT NO-TOUCH
    needs_password: bool = field(default=False, init=False)  # may not log in as a user without a password
    over_http: bool = field(default=False, init=False)  # of the process that answers HTTP
    closing: bool = field(default=False, init=False)
    gone: bool = field(default=False, init=False)  # its connection is closed, and it is about to be forgotten
    transaction: Transaction | None = field(default=None, init=False)  # commands queued since MULTI
    in_exec: bool = field(default=False, init=False)  # the steps of a queued command run in EXEC
    watching: set[bytes] = field(default_factory=set, init=False)  # keys; set by KeyEvents
    watched_changed: bool = field(default=False, init=False)  # the next EXEC fails
    watched_until: int = field(default=0, init=False)  # the next EXEC fails from then on; unix ms, 0 for no such time
    tracking: Mode | None = field(default=None, init=False)  # set by Tracking
    channels: dict[bytes, None] = field(default_factory=dict, init=False)  # subscribed; set by Channels
    patterns: dict[bytes, None] = field(default_factory=dict, init=False)  # subscribed; set by Channels

    def __post_init__(self) -> None:
        self.keyspace = self.server.keyspace

    def push(self, message: Reply) -> None:
        """Send a push message, or a message of a channel, after the replies that are queued already."""
        self.connection.push(message)

    def close(self) -> None:
        """Close the connection when all replies are sent. No further command of the client runs."""
        self.closing = True
        self.fast_path_ok = False
        self.connection.close()

    def __str__(self) -> str:
        """Return the client's line in CLIENT LIST, without a line break."""
        now = time.monotonic()
        incoming, outgoing = self.connection.incoming, self.connection.outgoing
        queued = len(self.transaction.commands) if self.transaction is not None else -1
        fields = {
            "id": self.id,
            "addr": self.address,
            "laddr": self.local_address,
            "fd": self.descriptor,
            "name": self.name.decode("ascii"),
            "age": int(now - self.connected),
            "idle": int(now - self.active),
            "flags": self._flags() or "N",
            "db": 0,
            "sub": len(self.channels),
            "psub": len(self.patterns),
            "ssub": 0,
            "multi": queued,
            "watch": len(self.watching),
            "qbuf": incoming,
            "qbuf-free": 0,
            "argv-mem": 0,
            "multi-mem": self.transaction.size if self.transaction is not None else 0,
            "rbs": 0,
            "rbp": 0,
            "obl": 0,
            "oll": 0,
            "omem": outgoing,
            "tot-mem": self.held,
            "events": "rw" if outgoing else "r",
            "cmd": self.last_command or "NULL",
            "user": self.user.name.decode("utf-8", "surrogateescape") if self.user else "(none)",
            "redir": self.redirection,
            "resp": self.protocol,
            "lib-name": self.lib_name.decode("ascii"),
            "lib-ver": self.lib_version.decode("ascii"),
        }
        return " ".join(f"{name}={value}" for name, value in fields.items())

    @property
    def redirection(self) -> int:
        """Id of the client that gets this client's tracking messages; 0 for itself, -1 if it does not track."""
        return self.tracking.redirect if self.tracking is not None else -1

    def _flags(self) -> str:
        """Return the letters of the field `flags` of CLIENT LIST, which are Redis's; empty for a client without any."""
        mode = self.tracking
        flags = {
            "O": self in self.server.monitors,
            "P": bool(self.channels or self.patterns),
            "x": self.transaction is not None,
            "b": self.connection.paused,
            "t": mode is not None,
            "R": mode is not None and mode.broken,
            "B": mode is not None and mode.broadcast,
            "d": self.watched_changed,
            "A": self.closing,
            "U": self.address.startswith("/"),
            "e": self.spared,
            "T": not self.touches,
        }
        return "".join(flag for flag, is_set in flags.items() if is_set)

    @property
    def listens(self) -> bool:
        """Whether the client is subscribed to a channel or pattern, or has called MONITOR."""
        return bool(self.channels or self.patterns or self in self.server.monitors)

    @property
    def passing(self) -> int:
        """Bytes of memory of commands that are incomplete, queued by MULTI, or running, and of unsent replies and
        messages.
        """
        queued = self.transaction.size if self.transaction is not None else 0
        return self.connection.incoming + self.connection.running + self.connection.unread + queued

    @property
    def held(self) -> int:
        """Bytes of memory of the client: `passing`, and the names and slots that the server keeps for it (`kept`)."""
        return self.passing + self.kept

    def lend(self, slot: Slot) -> int:
        """Keep a slot in use for the client, which reads it from shared memory. Return the ticket."""
        if not self.last_ticket:
            self.first_ticket = (self.server.epoch << EPOCH_BITS) + secrets.randbits(EPOCH_BITS - 1)
            self.last_ticket = self.first_ticket - 1
        self.last_ticket += 1
        self.tickets[self.last_ticket] = slot
        self._count_lent(slot, 1)
        return self.last_ticket

    def take_back(self, ticket: int) -> None:
        """Release the slot of a ticket that the client has."""
        self._count_lent(self.tickets.pop(ticket), -1)

    def take_back_all(self) -> list[Slot]:
        """End all tickets. Return their slots, which the caller frees in steps."""
        all_of_them = list(self.tickets.values())
        self.tickets.clear()
        self.keyspace.memory.unread -= self.lent
        self.keep(-self.ticket_bytes)
        self.lent = self.ticket_bytes = 0
        return all_of_them

    def keep_area(self, area: Area) -> None:
        """Count the memory of an area for the client, as long as it has it."""
        self.area = area
        self.keep(area.size)

    def drop_area(self) -> None:
        """Return the memory of the client's area to the system, unless a thread copies into it: then afterwards."""
        if self.area:
            self.keep(-self.area.size)
            self.area = None

    def _count_lent(self, slot: Slot, sign: int) -> None:
        """Count the memory of a ticket for the client. A slot does not count for maxmemory: it would evict values."""
        nbytes = sign * (slot.footprint + _TICKET)
        self.lent += sign * slot.footprint
        self.keyspace.memory.unread += sign * slot.footprint
        self.ticket_bytes += nbytes
        self.keep(nbytes)

    def keep(self, nbytes: int) -> None:
        """Add `nbytes` to the memory that the server keeps for the client; negative to subtract.

        It has the names of its channels and patterns, and of the keys that it watches or tracks, and the slots of its
        tickets.
        """
        if not self.gone:
            self.kept += nbytes
            self.server.in_flight += nbytes

    # -- the client's user and rights ----------------------------------------------------------------------------------

    def become(self, user: User | None) -> None:
        """Set the client's user; None means that the client has to authenticate."""
        self.user = user
        self.connection.trust(user is not None)
        self.update_fast_path()

    def end_transaction(self) -> None:
        """Discard the commands that are queued since MULTI, and the watched keys."""
        self.transaction = None
        self.server.events.unwatch(self)
        self.update_fast_path()

    def update_fast_path(self) -> None:
        """Compute `fast_path_ok`: whether the core may call the client's commands without a decision in Python.

        Every function that changes one of these conditions has to call this.
        """
        self.fast_path_ok = (
            self.user is not None
            and self.user.unrestricted
            and self.transaction is None
            and not self.channels
            and not self.patterns
            and self.touches
            and self.tracking is None
            and self.server.pause is None
            and self.server.command_override is None
            and not self.silence
            and not self.closing
            and not self.gone
            and self not in self.server.monitors
        )

    @property
    def sees_all(self) -> bool:
        """Whether the client may read every key. False before it has authenticated."""
        return self.user is not None and self.user.keys.all(READ)

    @property
    def cost_of_a_key(self) -> int:
        """Number of patterns that `sees` compares one key with; at least 1."""
        return 1 if self.user is None or self.sees_all else max(self.user.cost, 1)

    def visible(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of `keys` that the client may read, in order; none before it has authenticated."""
        if self.user is None:
            return []
        return list(keys) if self.sees_all else self.user.keys.readable(keys)

    def sees(self, key: bytes) -> bool:
        """Return whether the client may read a key, and so may know that it exists."""
        return self.user is not None and self.user.keys.cover(key, READ)

    def may_see_some(self, prefix: bytes) -> bool:
        """Return False if the client certainly may read no key that begins with `prefix`. True does not mean that there
        is one.
        """
        return self.user is not None and self.user.keys.may_cover_some(prefix, READ)

    def may_subscribe(self, channel: bytes) -> bool:
        """Return whether the client may subscribe to a channel. A pattern is allowed only if its user has exactly this
        pattern.
        """
        return self.user is not None and (self.user.may_listen(channel) or channel in self.user.channels)

    def peers(self) -> Iterator[Client]:
        """Yield the connected clients that this one may see: all if it may read every key, otherwise those with the
        same user.
        """
        there = [other for other in self.server.clients.values() if not other.gone]
        return iter(there if self.sees_all else [other for other in there if other.user is self.user])
