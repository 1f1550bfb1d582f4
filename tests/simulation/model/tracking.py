"""Client-side caching in the model: required and permitted invalidations of a tracking connection.

Certain changes of certain reads must be sent; possible changes, or changes of possible reads, may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvpage_server.commands.specs import spec_of
from tests.simulation.model.caching import SYNTAX, Mode, Words, asked_for, contradiction, described
from tests.simulation.model.replies import OK, QUEUED, Err
from tests.simulation.model.rights import Rights, keys_used
from tests.simulation.model.values import Store

if TYPE_CHECKING:
    from tests.simulation.model.model import Conversation

CHANNEL = b"__redis__:invalidate"  # of RESP2 clients
_READ = frozenset(
    b"""get mget strlen getrange kvpageget kvpagemget kvblockget kvblockmget kvblockmgetcoded kvpageindex scard
    smembers""".split()
)
_OF_PAGES = frozenset((b"kvpageget", b"kvpagemget"))
_MOVES = frozenset(b"hello reset subscribe unsubscribe psubscribe punsubscribe acl auth".split())
_LIMIT = b"tracking-table-max-keys"


@dataclass(frozen=True)
class Owed:
    """A required message: its recipient, and the changed key; None stands for all keys."""

    to: Conversation
    cause: bytes | None


@dataclass(eq=False)
class Tracking:
    """Tracking of one connection."""

    mode: Mode | None = None
    read: set[bytes] = field(default_factory=set)  # for sure, and not changed since
    noted: set[bytes] = field(default_factory=set)  # possibly read keys
    ever: set[bytes] = field(default_factory=set)  # noted since it began
    owed: dict[bytes | None, Owed] = field(default_factory=dict)
    due: Counter[bytes | None] = field(default_factory=Counter)  # permitted messages
    told_to: set[int] = field(default_factory=set)  # the ids of all that it has redirected to
    has_broadcast: bool = False
    broken: bool = False  # whether it certainly knows that its redirection's target has disconnected
    breaks: Owed | None = None  # that message, if it is required

    def need_not_tell(self, keys: Collection[bytes]) -> None:
        """It is unknown whether these keys have changed, or which client is notified."""
        for name in [name for name, owed in self.owed.items() if owed.cause in keys]:
            del self.owed[name]
        if self.breaks is not None and self.breaks.cause in keys:
            self.breaks, self.broken = None, False

    def may_tell(self, keys: Iterable[bytes]) -> None:
        """Permit messages for these possible changes, for each of the prefixes."""
        for key in keys:
            self.due.update(_names_of(key))
            if self.mode is not None:
                self.due[key] += sum(map(key.startswith, self.mode.prefixes))

    def end(self) -> None:
        """End tracking: messages for its reads are not required any more."""
        self.mode, self.broken = None, False
        self.read.clear()


class Tracked:
    """A part of `Model`: tracking clients, and the changes of their keys.

    A message is sent before another client's next command is run, as things are then. In a pipeline of one client it
    may precede or follow a command that changes the recipients: `lately` changed keys permit both.
    """

    store: Store
    talk: Conversation
    talks: list[Conversation]
    users: dict[bytes, Rights]
    config: dict[bytes, bytes]
    notifies: bool
    _now: Callable[[], int]

    def begin_tracking(self) -> None:
        """With a process to whom nobody has said that it tracks."""
        self.trackers: list[Conversation] = []  # all connections that have ever tracked, including closed ones
        # commands of a transaction: each with its result and its mode then
        self.done: list[tuple[Words, Any, Mode | None]] = []
        self._actor: Conversation | None = None  # whose command is being run
        self._last: Conversation | None = None  # whose was run last
        self._lately: set[bytes] = set()  # keys that the last client's commands have changed
        self._changing: set[bytes] = set()  # keys that this command has
        self._flushing = False
        self.config.pop(_LIMIT, None)

    # -- reads ---------------------------------------------------------------------------------------------------------

    def begin_command(self, talk: Conversation) -> None:
        """Somebody's command was run."""
        if talk is not self._last:
            self._lately.clear()
        self._last = self._actor = talk
        self._changing, self.done = set(), []

    def end_command(self, talk: Conversation, words: Words, reply: Any) -> None:
        """Process the result of the command."""
        self._actor, tracking = None, talk.tracking
        runs_many, unclear = bool(self.done), set[bytes]()
        done = [(words, reply, tracking.mode), *self.done]
        for one, reply, mode in done:
            spec = spec_of(one)
            if mode is None or not mode.notes or spec is None or "readonly" not in spec.flags:
                continue
            if isinstance(reply, Err) or reply is QUEUED or len(one) == 1:
                continue
            self.store.now = self._now()
            self.store.expire()  # the server may have swept due keys before, which no command has named since
            before_or_after = self._unswept() | (self._changing if runs_many else set())  # it was read, it has changed
            unclear = unclear or self._unclear() | before_or_after
            keys = keys_used(one)
            tracking.noted.update(keys)
            tracking.ever.update(keys)
            if self._reads(one):
                tracking.read.update(key for key in keys if key not in unclear)
            tracking.due.update(key for key in keys if key in before_or_after)
        if any(one[0].lower() in _MOVES or one[:2] == (b"CLIENT", b"TRACKING") for one, _, _ in done):
            self._moved()
        if tracking.mode is not None and talk.queued is None and words[0].lower() != b"client":
            tracking.mode = replace(tracking.mode, asked=False)

    def lose_note(self, client: Any, key: bytes) -> None:
        """Allow a message about a key that a client has read: the note was lost, as limits allow no more."""
        for one in self.trackers:
            if one.client is client:
                one.tracking.read.discard(key)
                one.tracking.due[key] += 1

    def _unclear(self) -> set[bytes]:
        return {name for key in self.store.doubtful() | self.store.fog for name in _names_of(key)}

    def _unswept(self) -> set[bytes]:
        """Return due keys that the server may notice later."""
        return {name for key in self.store.lately_expired() for name in _names_of(key)}

    def _reads(self, words: Words) -> bool:
        """Whether a command reads all of its keys. If one of them is a string, a command for pages reads none."""
        name, store = words[0].lower(), self.store
        if name not in _OF_PAGES:
            return name in _READ
        found = [store.keys.get(key) for key in keys_used(words)]
        return not any(cell is not None and cell.page is None for cell in found)

    def _moved(self) -> None:
        """Change the recipients: those of current changes are unknown."""
        self.store.now = self._now()
        self.store.expire()  # the server may have notified the removal of due keys before
        lately = self._lately | self.store.doubtful() | {*self.store.lately_expired()}
        for one in self.trackers:
            tracking = one.tracking
            tracking.need_not_tell(lately)
            tracking.may_tell(lately)
            tracking.breaks = tracking.breaks if not lately else None
            if _LIMIT in self.config:  # messages for its reads may have been sent before it was a recipient
                tracking.read.clear()

    # -- changes -------------------------------------------------------------------------------------------------------

    def track_change(self, key: bytes) -> None:
        """A key has changed, or may have."""
        if not self.trackers or self._flushing:
            return
        names, sure = _names_of(key), self.store.sure and key not in self.store.fog | self.store.doubtful()
        self._lately.add(key)
        self._changing.update(names)
        by = None if self.store.expires else self._actor
        for one in self.trackers:
            tracking, mode = one.tracking, one.tracking.mode
            own = by is one and mode is not None and mode.no_loop
            for name in names:
                silent = own and sure and not self._is_due(name)  # a sweep before this change sends a message
                if name in tracking.noted and not silent and self._may_know(one, name):
                    tracking.due[name] += 1
                if name in tracking.read and sure and not own and mode is not None and not mode.broadcast:
                    self._owe(one, name, key)
                tracking.read.discard(name)
                if sure:
                    tracking.noted.discard(name)
            if mode is not None and mode.is_about(key) and not (own and sure) and self._may_know(one, key):
                times = 1 + self.notifies  # a subscriber of SET's event is notified before the expiry is noted
                tracking.due[key] += times * sum(map(key.startswith, mode.prefixes))  # each has a message of its own
                if sure and not own:
                    self._owe(one, key, key)

    def _is_due(self, name: bytes) -> bool:
        """Return whether a key with this name is due, and its expiry is not noted yet."""
        due = (key for key, value in self.store.keys.items() if 0 < value.expires <= self.store.now)
        return any(name in _names_of(key) for key in due)

    def _may_know(self, one: Conversation, name: bytes) -> bool:
        """Return whether the connection, and its redirection's target, may read a key."""
        mode = one.tracking.mode
        to = self._connection(mode.redirect) if mode is not None and mode.redirect else None
        rights = [self.users.get(who.user) for who in (one, to) if who is not None]
        return all(some is None or some.may_use(name) for some in rights)

    def _owe(self, one: Conversation, name: bytes | None, cause: bytes | None) -> None:
        """Require a message to the connection or its redirection's target; if the target has disconnected, the message
        about that.
        """
        tracking, mode = one.tracking, one.tracking.mode
        if mode is None or one.gone or one not in self.talks:
            return
        if name is not None and not self._may_know(one, name):
            return
        to = self._connection(mode.redirect) if mode.redirect else one
        if to is None and not self.store.expires:  # the server may notice it later
            tracking.breaks = Owed(one, cause) if not tracking.broken and one.protocol == 3 else None
            tracking.broken = True
        elif to is None:
            return
        elif to.protocol == 3 or (mode.redirect and (to.channels or to.patterns)):
            tracking.owed[name] = Owed(to, cause)

    def begin_flush(self) -> None:
        """Begin a flush: all clients are notified of it at once, and not of earlier changes."""
        self._flushing = True
        lately = self._lately | self.store.doubtful() | {*self.store.lately_expired()}  # which it may have done after
        for one in self.trackers:
            tracking = one.tracking
            tracking.need_not_tell(lately)
            tracking.read.clear()
            if any(other.tracking.mode is not None for other in self.trackers if other in self.talks):
                tracking.noted.clear()  # or the server does not listen, and notes stay
            tracking.due[None] += 1
            self._owe(one, None, None)

    def end_flush(self) -> None:
        """End the flush."""
        self._flushing = False

    def may_have_changed(self, keys: Iterable[bytes]) -> None:
        """Note that these may have changed at any time, with or without a message."""
        for one in self.trackers:
            one.tracking.may_tell(keys)
            one.tracking.read.difference_update(name for key in keys for name in _names_of(key))

    def need_not_tell(self, keys: Collection[bytes]) -> None:
        """It is not known whether these have changed."""
        for one in self.trackers:
            one.tracking.need_not_tell(keys)
        self.may_have_changed(keys)

    # -- messages ------------------------------------------------------------------------------------------------------

    def track_told(self, talk: Conversation, keys: Sequence[bytes] | None) -> str:
        """Process an invalidation of keys, or of all keys. Return its error."""
        number = talk.client.id if talk.client is not None else 0
        sources = [one for one in self.trackers if one is talk or number in one.tracking.told_to]
        names: Sequence[bytes | None] = [None] if keys is None else keys
        if len(set(names)) < len(names) or not names:
            return f"was told of {keys!r:.200}: of nothing, or of one key twice"
        if len(names) > 1 and not any(one.tracking.has_broadcast for one in sources):
            return f"was told of {keys!r:.200} at once, and has never broadcast"
        for name in names:
            if not self._settle(talk, [one.tracking for one in sources], name):
                return f"was told that {name or 'everything'!r} has changed, and has to do nothing with that"
        return ""

    def _settle(self, talk: Conversation, sources: list[Tracking], name: bytes | None) -> bool:
        """Match a message with a required one; or with a permitted one, for any changed key."""
        needed = [one for one in sources if name in one.owed and one.owed[name].to is talk]
        if not needed and name is not None:
            self.store.now = self._now()
            self.store.expire()  # the server has noticed due keys
            needed = [one for one in sources if name in one.owed and one.owed[name].to is talk]
        for one in needed or [one for one in sources if one.due[name] > 0 or self._may_be_told(one, name)]:
            one.due[name] = max(one.due[name] - 1, 0)
            if needed:
                del one.owed[name]
            for other in sources if not needed else ():
                other.read.discard(name or b"")  # nobody knows who of them it was that is not noted any more
            return True
        return False

    def _may_be_told(self, one: Tracking, name: bytes | None) -> bool:
        """Return whether a message is permitted because of unknown changes, or of too many noted keys."""
        is_unclear = name in self._unclear()
        was_noted = name in one.ever and (is_unclear or _LIMIT in self.config)
        return was_noted or (is_unclear and one.mode is not None and one.mode.is_about(name or b""))

    def track_broken(self, talk: Conversation, number: int) -> str:
        """Process the message that the redirection's target has disconnected. Return its error."""
        talk.tracking.breaks = None
        if _LIMIT in self.config:
            talk.tracking.read.clear()  # nobody knows which key it was that is not noted any more
        if number not in talk.tracking.told_to or self._connection(number) is not None:
            return f"was told that its redirection to {number} is broken"
        return ""

    def untold(self, there: Collection[Conversation], late: Collection[bytes]) -> Iterator[tuple[Conversation, str]]:
        """Yield the missing messages of connected clients, except for changes that may not have been noticed yet."""
        for one in self.trackers:
            for name, owed in one.tracking.owed.items():
                if owed.to in there and owed.cause not in late:
                    yield owed.to, f"was not told that {name or 'everything'!r} has changed"
            if one in there and one.tracking.breaks is not None:
                yield one, "was not told that its redirection is broken"

    # -- commands --------------------------------------------------------------------------------------------------

    def _connection(self, number: int) -> Conversation | None:
        """The connection with an id, as long as it is not over."""
        found = (one for one in self.talks if one.client is not None and one.client.id == number and not one.gone)
        return next(found, None)

    def _may_redirect(self, number: int) -> bool:
        other = self._connection(number)
        return other is not None and (self.talk.user not in self.users or other.user == self.talk.user)

    def do_tracking(self, what: bytes, *words: bytes) -> Any:
        """CLIENT's commands about it."""
        tracking = self.talk.tracking
        mode = tracking.mode
        if what == b"GETREDIR":
            return -1 if mode is None else mode.redirect
        if what == b"TRACKINGINFO":
            unsure = mode is not None and mode.redirect > 0 and self._connection(mode.redirect) is None
            unsure = unsure and not (tracking.broken and not self._lately)
            return described(mode, [True, False] if unsure else [tracking.broken])
        if what == b"CACHING":
            return self._caching(words[0])
        wanted = asked_for(words[1:], self._may_redirect)
        if isinstance(wanted, Err):
            return wanted
        if words[0] == b"OFF":
            tracking.end()
            return OK
        return (SYNTAX if words[0] != b"ON" else contradiction(mode, wanted)) or self._track(wanted)

    def _caching(self, word: bytes) -> Any:
        tracking = self.talk.tracking
        mode = tracking.mode
        if mode is None:
            return Err("ERR CLIENT CACHING can be called only when")
        if word not in (b"YES", b"NO"):
            return SYNTAX
        if not (mode.opt_in if word == b"YES" else mode.opt_out):
            return Err(f"ERR CLIENT CACHING {word.decode()} is only valid when")
        tracking.mode = replace(mode, asked=True)
        return OK

    def _track(self, mode: Mode) -> Any:
        tracking = self.talk.tracking
        if mode.broadcast and not mode.prefixes:
            mode = replace(mode, prefixes=frozenset([b""]))
        if tracking.mode is not None:
            before = tracking.mode
            mode = replace(mode, asked=before.asked, prefixes=before.prefixes | mode.prefixes)
        tracking.mode, tracking.broken = mode, False
        tracking.has_broadcast = tracking.has_broadcast or mode.broadcast
        if mode.redirect:
            tracking.told_to.add(mode.redirect)
        if self.talk not in self.trackers:
            self.trackers.append(self.talk)
        return OK


def _names_of(key: bytes) -> list[bytes]:
    """The names under which a key is noted: its own, and those of its request, which stand for all of its pages."""
    if not key.startswith(b"kv:") or key.count(b":") < 2:
        return [key]
    request = key[: key.index(b":", 3) + 1]
    return [key, request, request + b"index"]
