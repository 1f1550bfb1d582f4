"""Replies of every command: a store in plain Python, without slots, blocks, a disk or an event loop.

`Model.answer` returns the permitted replies of a command, and changes the model as the command changes the server. It
is called at the moment of the command's execution, so only choices of the server are left open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.model.errors import is_unknown, is_wrong
from tests.simulation.model.pages import Pages
from tests.simulation.model.replies import ANYTHING, OK, QUEUED, SOME_KEYS, Err, any_order, between, one_of
from tests.simulation.model.rights import NO_RIGHT, Rights
from tests.simulation.model.server import AboutTheServer
from tests.simulation.model.strings import Strings
from tests.simulation.model.tracking import Tracked, Tracking
from tests.simulation.model.values import Store

Words = tuple[bytes, ...]


@dataclass(eq=False)
class Conversation:
    """The server's state of a connection."""

    name: str
    stranger: bool = False  # no peer's: an engine's, or a tool's
    client: Any = None  # the server's, who knows when the connection is over
    protocol: int = 2
    queued: list[Words] | None = None  # after MULTI
    refused: bool = False  # one of these
    watched: dict[bytes, bool] = field(default_factory=dict)  # and whether it changed
    maybe: set[bytes] = field(default_factory=set)  # those of these that may have
    channels: dict[bytes, None] = field(default_factory=dict)
    patterns: dict[bytes, None] = field(default_factory=dict)  # of which each is for all channels
    user: bytes = b"default"
    called: bytes = b""  # the name that it has given itself
    silent: int = 0  # so many replies are left out, or all where it is negative
    ends: bool = False  # somebody has ended it, or it itself
    quits: bool = False  # it itself: it is answered all that it has asked before
    over: bool = False  # nothing that it says is run any more
    monitors: bool = False
    to_show: deque[tuple[bytes, bytes]] = field(default_factory=deque)  # whose, and what: as it monitors
    may_show: list[tuple[bytes, bytes]] = field(default_factory=list)  # and it may be shown these
    tracking: Tracking = field(default_factory=Tracking)
    unheard: set[bytes] = field(default_factory=set)  # keys with pending keyspace notifications
    event: tuple[bytes, bytes] | None = None  # a key and its event, whose second message is pending

    @property
    def gone(self) -> bool:
        """Return whether the server knows that the connection has ended. Other parts of it may notice later."""
        return self.client is not None and bool(self.client.gone)

    def unwatch(self) -> None:
        """It watches nothing any more."""
        self.watched.clear()
        self.maybe.clear()


_WHILE_LISTENING = frozenset(b"subscribe psubscribe unsubscribe punsubscribe ping quit reset".split())
_AT_ONCE = frozenset((b"exec", b"discard", b"multi", b"watch", b"quit", b"reset"))
_NOT_IN_MULTI = frozenset((b"save", b"bgsave", b"kvdecode", b"shutdown"))
_WRONG = Err("ERR")
_TELLS_TIME = frozenset((b"ttl", b"pttl", b"expiretime", b"pexpiretime"))


class Model(Strings, Pages, AboutTheServer, Tracked):
    """`now` returns unix milliseconds, `elapsed` monotonic ones."""

    def __init__(self, now: Callable[[], int], elapsed: Callable[[], int]) -> None:
        self.store = Store()
        self.store.changed = self._changed
        self.store.elapsed = elapsed
        self.store.paused_until = lambda: self.paused_until
        self._now = now
        self.talks: list[Conversation] = []
        self.talk = Conversation("nobody")  # whose command it is
        self.pushes: list[tuple[Conversation, Any]] = []  # that the last command has caused
        self.config: dict[bytes, bytes] = {}
        self.pinned: set[tuple[bytes, int]] = set()
        self.unpins = 0  # how often blocks were unpinned
        self.leased: dict[tuple[bytes, int], int] = {}  # until milliseconds that nobody sets
        self.paused_until = 0  # of the milliseconds that nobody sets
        self.has_killed = False  # whether somebody has ended others, of whom some may have said nothing yet
        self.limited = False  # whether there is a maxmemory, so that leases may be refused
        self.users: dict[bytes, Rights] = {}  # users with restricted rights
        self.notifies = False  # subscribers of every channel of each change
        self.changes: set[bytes] = set()  # keys that have changed, or may have
        self.let_go: set[bytes] = set()  # keys that the server has let go of by itself
        self.given_up = False  # whether the server has found that something watched has changed
        self.went: set[bytes] = set()  # keys of pages that certainly existed, and were removed, since the last flush
        self.begin_tracking()
        self.disk_fails = False  # or did since all was well
        self.rotted: set[bytes] = set()  # databases with flipped bits: their values may be lost, but not wrong

    @property
    def may_miss(self) -> bool:
        """Whether a value that is there may not be found: the disk fails, or has flipped bits."""
        return self.disk_fails or bool(self.rotted)

    def _changed(self, key: bytes) -> None:
        self._note_change(key)
        self.changes.add(key)
        if self.store.sure:
            _, old, new = self.store.log[-1]
            if old is not None and old.page and (new is None or not new.page):
                self.went.add(key)
        self.track_change(key)
        for talk in self.talks:
            if self.notifies and self.store.sure and not self.store.expires and talk.patterns:
                talk.unheard.add(key)
            if key in talk.watched and self.store.sure:
                talk.watched[key] = True
            elif key in talk.watched:
                talk.maybe.add(key)

    def answer(self, talk: Conversation, words: Words) -> Any:
        """The reply to a command, which is carried out."""
        self.talk, self.pushes, self.store.now = talk, [], self._now()
        name = words[0].lower()
        if is_unknown(words):
            talk.refused = talk.queued is not None
            return _WRONG
        if not self._may(words):
            talk.refused = talk.queued is not None
            return NO_RIGHT
        if (talk.channels or talk.patterns) and talk.protocol == 2 and name not in _WHILE_LISTENING:
            return Err("ERR Can't execute", "EXECABORT Transaction discarded because of: Can't execute")
        if talk.queued is not None and name not in _AT_ONCE:
            if name in _NOT_IN_MULTI:
                talk.refused = True
                return Err(f"ERR Command '{name.decode()}' not allowed inside a transaction")
            talk.queued.append(words)
            return QUEUED
        return self.run(words)

    def _may(self, words: Words) -> bool:
        rights = self.users.get(self.talk.user)
        return rights is None or rights.may(words)

    def run(self, words: Words) -> Any:
        """The same, whatever was queued before."""
        handler = self._handler(words)
        if handler is None:
            return Err("ERR unknown command")
        if self._asks_unclear_time(words):
            return ANYTHING
        received = [words, *(self.talk.queued or ())]
        keys = None if any(map(self._is_about_all, received)) else self.keys_of(words)
        return self.store.in_every_case(self._as_now(handler), keys)

    def _asks_unclear_time(self, words: Words) -> bool:
        """Return whether a command asks when a key expires that is in doubt: its time begins when it is stored."""
        return words[0].lower() in _TELLS_TIME and words[1] in self.store.doubtful()

    def _as_now(self, handler: Callable[[], Any]) -> Callable[[], Any]:
        """Have a command find its conversation as it is now, however often it is run: in every case of a doubt."""
        talk = self.talk
        queued, refused, watched, maybe = talk.queued, talk.refused, dict(talk.watched), set(talk.maybe)
        mode = talk.tracking.mode

        def run() -> Any:
            self.pushes, self.done, talk.tracking.mode = [], [], mode
            if queued is not None:
                talk.queued, talk.refused, talk.watched, talk.maybe = queued, refused, dict(watched), set(maybe)
            return handler()

        return run

    def _handler(self, words: Words) -> Callable[[], Any] | None:
        name = words[0].lower().decode("latin1")
        if is_wrong(words):
            return lambda: _WRONG
        if len(words) > 1:
            below = words[1].lower().replace(b"-", b"_").decode("latin1")
            method = getattr(self, f"do_{name}_{below}", None)
            if method is not None:
                return lambda: method(*words[2:])
        method = getattr(self, f"do_{name}", None)
        return None if method is None else lambda: method(*words[1:])

    @staticmethod
    def _is_about_all(words: Words) -> bool:
        name = words[0].lower()
        return name in (b"keys", b"dbsize", b"randomkey", b"flushall", b"flushdb", b"exists", b"type") or (
            name.startswith((b"kvpage", b"kvblock")) or name in (b"smembers", b"scard", b"sismember")
        )

    def keys_of(self, words: Words) -> Iterable[bytes]:
        """Every word that may be a key, of the command or of what EXEC is to run: too many do no harm."""
        if words[0].lower() != b"exec" or self.talk.queued is None:
            return words[1:]
        return [word for queued in self.talk.queued for word in queued[1:]]

    # -- transactions ----------------------------------------------------------------------------------------------

    def do_multi(self) -> Any:
        if self.talk.queued is not None:
            return Err("ERR MULTI")
        self.talk.queued = []
        return OK

    def do_discard(self) -> Any:
        if self.talk.queued is None:
            return Err("ERR DISCARD without MULTI")
        self._end()
        return OK

    def _end(self) -> None:
        self.talk.queued, self.talk.refused = None, False
        self.talk.unwatch()

    def do_watch(self, *keys: bytes) -> Any:
        if self.talk.queued is not None:
            return Err("ERR WATCH inside MULTI")
        for key in keys:
            self.store.get(key)
            self.talk.watched.setdefault(key, False)
        return OK

    def do_unwatch(self) -> Any:
        self.talk.unwatch()
        return OK

    def do_exec(self) -> Any:
        talk = self.talk
        if talk.queued is None:
            return Err("ERR EXEC without MULTI")
        due = [key for key in talk.watched if key in self.store.keys and self.store.get(key) is None]
        changed = bool(due) or any(talk.watched.values()) or (bool(talk.maybe) and self.given_up)
        queued, refused = talk.queued, talk.refused
        self._end()
        if refused:
            return Err("EXECABORT")
        if changed:
            return None
        replies = []
        for words in queued:
            handler = self._handler(words)
            assert handler is not None
            reply = handler() if self._may(words) else NO_RIGHT
            replies.append(ANYTHING if self._may(words) and self._asks_unclear_time(words) else reply)
            self.done.append((words, replies[-1], talk.tracking.mode))
        return replies

    # -- connections -----------------------------------------------------------------------------------------------

    def do_ping(self, *message: bytes) -> Any:
        if (self.talk.channels or self.talk.patterns) and self.talk.protocol == 2:
            return [b"pong", message[0] if message else b""]
        return message[0] if message else b"PONG"

    def do_echo(self, message: bytes) -> Any:
        return message

    def do_hello(self, protocol: bytes, *_: bytes) -> Any:
        if self.talk.protocol != int(protocol):  # it could not be notified of some of its reads until now
            self.talk.tracking.read.clear()
        self.talk.protocol = int(protocol)
        return ANYTHING

    def do_auth(self, user: bytes, _: bytes) -> Any:
        if user != b"default" and not (user in self.users and self.users[user].is_on):
            return Err("WRONGPASS")
        self.talk.user = user
        return OK

    def change_rights(self, user: bytes, rules: Words) -> None:
        """Change the rights of a user, which is created if necessary, and cancel the transactions that watch keys."""
        for talk in self.talks:
            if talk.user == user:
                talk.watched = dict.fromkeys(talk.watched, True)
        self.users.setdefault(user, Rights([], is_on=False)).change(rules)

    def do_client(self, what: bytes, *words: bytes) -> Any:
        return self.do_tracking(what, *words)

    def do_reset(self) -> Any:
        self._end()
        self.talk.protocol, self.talk.channels, self.talk.patterns = 2, {}, {}
        self.talk.unheard.clear()
        self.talk.tracking.end()
        self.talk.called, self.talk.monitors, self.talk.user = b"", False, b"default"
        self.talk.silent = max(self.talk.silent, 0)  # one that is to be left out still is
        return b"RESET"

    # -- channels --------------------------------------------------------------------------------------------------

    def _listening(self, what: bytes, name: bytes) -> Any:
        return [what, name, len(self.talk.channels) + len(self.talk.patterns)]

    def do_subscribe(self, channel: bytes) -> Any:
        self.talk.channels[channel] = None
        return self._listening(b"subscribe", channel)

    def do_unsubscribe(self, channel: bytes) -> Any:
        self.talk.channels.pop(channel, None)
        return self._listening(b"unsubscribe", channel)

    def do_psubscribe(self, pattern: bytes) -> Any:
        self.talk.patterns[pattern] = None
        return self._listening(b"psubscribe", pattern)

    def do_punsubscribe(self, pattern: bytes) -> Any:
        self.talk.patterns.pop(pattern, None)
        self.talk.unheard.clear()
        return self._listening(b"punsubscribe", pattern)

    def do_publish(self, channel: bytes, message: bytes) -> Any:
        received = [(talk, [b"message", channel, message]) for talk in self.talks if channel in talk.channels]
        received += [(talk, [b"pmessage", every, channel, message]) for talk in self.talks for every in talk.patterns]
        self.pushes += received
        return between(sum(not talk.gone for talk, _ in received), len(received))

    # -- the server ------------------------------------------------------------------------------------------------

    def do_config_set(self, name: bytes, value: bytes) -> Any:
        self.config[name] = value
        self.limited = self.limited or name in (b"maxmemory", b"quota")
        if name == b"page-checksums":
            self.checksums = value == b"yes"
        return OK

    def do_shutdown(self, *words: bytes) -> Any:
        return Err(
            "ERR No shutdown in progress" if words == (b"ABORT",) else "ERR Errors trying to SHUTDOWN", "MISCONF"
        )

    def do_save(self) -> Any:
        return one_of([OK, Err("ERR", "MISCONF")])

    do_kvdecode = do_save

    # -- all keys --------------------------------------------------------------------------------------------------

    def do_keys(self, _: bytes) -> Any:
        return any_order(filter(self._sees, self.store.living()))

    def do_dbsize(self) -> Any:
        living = frozenset(filter(self._sees, self.store.living()))
        found = between(len(living), len(living) + len(list(filter(self._sees, self.store.lately_expired()))))
        found.members = living
        return found

    def do_randomkey(self) -> Any:
        return one_of([*filter(self._sees, self.store.living())] or [None])

    def do_scan(self, _: bytes, *options: bytes) -> Any:
        return SOME_KEYS

    def _sees(self, key: bytes) -> bool:
        rights = self.users.get(self.talk.user)
        return rights is None or rights.may_use(key)

    def do_flushall(self) -> Any:
        unheard = [set(talk.unheard) for talk in self.talks]
        self.begin_flush()
        for key in list(self.store.keys):
            self.store.drop(key)
        self.end_flush()
        for talk, before in zip(self.talks, unheard, strict=True):
            talk.unheard = before  # nobody is notified of these, as in Redis
        self.pinned.clear()
        self.leased.clear()
        self.went.clear()
        return OK

    do_flushdb = do_flushall
