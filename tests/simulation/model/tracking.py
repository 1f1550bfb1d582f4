"""Client-side caching as the model has it: what a connection that tracks has to be told, and what it may be.

What it has read for sure, and has changed for sure, must be told; what it may have read, or may have changed, may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvpage_server.commands.table import meant
from tests.simulation.model.caching import SYNTAX, Mode, Words, asked_for, contradiction, described
from tests.simulation.model.replies import OK, QUEUED, Err
from tests.simulation.model.rights import Rights, keys_used
from tests.simulation.model.values import Store

if TYPE_CHECKING:
    from tests.simulation.model.model import Conversation

CHANNEL = b"__redis__:invalidate"  # of those who speak RESP2
_READ = frozenset(
    b"get mget strlen getrange kvpageget kvpagemget kvblockget kvblockmget kvpageindex scard smembers".split()
)
_OF_PAGES = frozenset((b"kvpageget", b"kvpagemget"))
_MOVES = frozenset(b"hello reset subscribe unsubscribe psubscribe punsubscribe acl auth".split())
_LIMIT = b"tracking-table-max-keys"


@dataclass(frozen=True)
class Owed:
    """A message that must come: to whom, and of which key's change; None is that of all."""

    to: Conversation
    cause: bytes | None


@dataclass(eq=False)
class Tracking:
    """Of one connection."""

    mode: Mode | None = None
    read: set[bytes] = field(default_factory=set)  # for sure, and not changed since
    noted: set[bytes] = field(default_factory=set)  # the same, perhaps
    ever: set[bytes] = field(default_factory=set)  # noted since it began
    owed: dict[bytes | None, Owed] = field(default_factory=dict)
    due: Counter[bytes | None] = field(default_factory=Counter)  # messages that may come
    told_to: set[int] = field(default_factory=set)  # the ids of all that it has redirected to
    has_broadcast: bool = False
    broken: bool = False  # whether it knows for sure that the one it redirects to is gone
    breaks: bool = False  # whether it must be told that

    def need_not_tell(self, keys: Collection[bytes]) -> None:
        """It is not known whether these have changed, or who is told of that."""
        for name in [name for name, owed in self.owed.items() if owed.cause in keys]:
            del self.owed[name]

    def may_tell(self, keys: Iterable[bytes]) -> None:
        """These have perhaps changed, of which it may be told, for each of its prefixes."""
        for key in keys:
            self.due.update(_names_of(key))
            if self.mode is not None:
                self.due[key] += sum(map(key.startswith, self.mode.prefixes))

    def end(self) -> None:
        """It tracks no more, and need not be told of what it has read."""
        self.mode, self.broken = None, False
        self.read.clear()


class Tracked:
    """A part of `Model`: those who track, and what happens to keys as far as they are concerned.

    A message is sent before another client's next command is run, as things are then. Within what one client sends at
    once it may come before or after a command that changes who is told: what changed `lately` may be told either way.
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
        self.trackers: list[Conversation] = []  # all that have ever tracked, also those that are gone
        self.done: list[tuple[Words, Any, Mode | None]] = []  # by a transaction: what came of each, and its mode then
        self._actor: Conversation | None = None  # whose command is being run
        self._last: Conversation | None = None  # whose was run last
        self._lately: set[bytes] = set()  # keys that the last client's commands have changed
        self._changing: set[bytes] = set()  # keys that this command has
        self._flushing = False
        self.config.pop(_LIMIT, None)

    # -- what is read ----------------------------------------------------------------------------------------------

    def begin_command(self, talk: Conversation) -> None:
        """Somebody's command was run."""
        if talk is not self._last:
            self._lately.clear()
        self._last = self._actor = talk
        self._changing, self.done = set(), []

    def end_command(self, talk: Conversation, words: Words, reply: Any) -> None:
        """And this is what came of it."""
        self._actor, tracking = None, talk.tracking
        runs_many, unclear = bool(self.done), set[bytes]()
        done = [(words, reply, tracking.mode), *self.done]
        for one, came, mode in done:
            spec = meant(one)
            if mode is None or not mode.notes or spec is None or "readonly" not in spec.flags:
                continue
            if isinstance(came, Err) or came is QUEUED or len(one) == 1:
                continue
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
        """What was due, and the server may notice later."""
        return {name for key in self.store.lately_expired() for name in _names_of(key)}

    def _reads(self, words: Words) -> bool:
        """Whether a command reads all of its keys. If one of them is a string, a command for pages reads none."""
        name, store = words[0].lower(), self.store
        if name not in _OF_PAGES:
            return name in _READ
        found = [store.keys.get(key) for key in keys_used(words)]
        return not any(cell is not None and cell.page is None for cell in found)

    def _moved(self) -> None:
        """Somebody else may be told now: nobody knows who is told of what has just changed, or is about to."""
        self.store.now = self._now()
        self.store.expire()  # what was due the server may have told before
        lately = self._lately | self.store.doubtful() | {*self.store.lately_expired()}
        for one in self.trackers:
            tracking = one.tracking
            tracking.need_not_tell(lately)
            tracking.may_tell(lately)
            tracking.breaks = tracking.breaks and not lately
            if _LIMIT in self.config:  # what it has read may have been told when nobody was there to be told
                tracking.read.clear()

    # -- what changes ----------------------------------------------------------------------------------------------

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
                if name in tracking.noted and not (own and sure) and self._may_know(one, name):
                    tracking.due[name] += 1
                if name in tracking.read and sure and not own and mode is not None and not mode.broadcast:
                    self._owe(one, name, key)
                tracking.read.discard(name)
                if sure:
                    tracking.noted.discard(name)
            if mode is not None and mode.is_about(key) and not (own and sure) and self._may_know(one, key):
                times = 1 + self.notifies  # who is notified of SET is told before it is noted that it also expires
                tracking.due[key] += times * sum(map(key.startswith, mode.prefixes))  # each is told for itself
                if sure and not own:
                    self._owe(one, key, key)

    def _may_know(self, one: Conversation, name: bytes) -> bool:
        """Whether it, and who is told in its place, may know of a key."""
        mode = one.tracking.mode
        to = self._connection(mode.redirect) if mode is not None and mode.redirect else None
        rights = [self.users.get(who.user) for who in (one, to) if who is not None]
        return all(some is None or some.may_use(name) for some in rights)

    def _owe(self, one: Conversation, name: bytes | None, cause: bytes | None) -> None:
        """It must be told, or who is told in its place; and if that one is gone, it must be told of that."""
        tracking, mode = one.tracking, one.tracking.mode
        if mode is None or one.gone or one not in self.talks:
            return
        if name is not None and not self._may_know(one, name):
            return
        to = self._connection(mode.redirect) if mode.redirect else one
        if to is None and not self.store.expires:  # which the server notices later, perhaps
            tracking.breaks = not tracking.broken and one.protocol == 3
            tracking.broken = True
        elif to is None:
            return
        elif to.protocol == 3 or (mode.redirect and (to.channels or to.patterns)):
            tracking.owed[name] = Owed(to, cause)

    def begin_flush(self) -> None:
        """Everything goes: all are told that at once, and not of what has just changed."""
        self._flushing = True
        lately = self._lately | {*self.store.lately_expired()}  # which the server may not have noticed before
        for one in self.trackers:
            tracking = one.tracking
            tracking.need_not_tell(lately)
            tracking.read.clear()
            if any(other.tracking.mode is not None for other in self.trackers if other in self.talks):
                tracking.noted.clear()  # or the server does not listen, and notes stay
            tracking.due[None] += 1
            self._owe(one, None, None)

    def end_flush(self) -> None:
        """It has gone."""
        self._flushing = False

    def may_have_changed(self, keys: Iterable[bytes]) -> None:
        """These have perhaps changed, nobody knows when, and were perhaps told."""
        for one in self.trackers:
            one.tracking.may_tell(keys)
            one.tracking.read.difference_update(name for key in keys for name in _names_of(key))

    def need_not_tell(self, keys: Collection[bytes]) -> None:
        """It is not known whether these have changed."""
        for one in self.trackers:
            one.tracking.need_not_tell(keys)
        self.may_have_changed(keys)

    # -- what is told ----------------------------------------------------------------------------------------------

    def track_told(self, talk: Conversation, keys: Sequence[bytes] | None) -> str:
        """A connection was told that these have changed, or that everything is gone. What is wrong with that."""
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
        """Have a message be one that must come; or one that may, whatever it is that has changed."""
        needed = [one for one in sources if name in one.owed and one.owed[name].to is talk]
        if not needed and name is not None:
            self.store.now = self._now()
            self.store.expire()  # what was due the server has noticed
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
        """Whether somebody may be told of what nobody can notice here: it is not known, or was too much to note."""
        is_unclear = name in self._unclear()
        was_noted = name in one.ever and (is_unclear or _LIMIT in self.config)
        return was_noted or (is_unclear and one.mode is not None and one.mode.is_about(name or b""))

    def track_broken(self, talk: Conversation, number: int) -> str:
        """A connection was told that the one it redirects to is gone. What is wrong with that."""
        talk.tracking.breaks = False
        if _LIMIT in self.config:
            talk.tracking.read.clear()  # nobody knows which key it was that is not noted any more
        if number not in talk.tracking.told_to or self._connection(number) is not None:
            return f"was told that its redirection to {number} is broken"
        return ""

    def untold(self, there: Collection[Conversation], late: Collection[bytes]) -> Iterator[tuple[Conversation, str]]:
        """Of those who are there: who was not told of what, but for what may not have been noticed yet."""
        for one in self.trackers:
            for name, owed in one.tracking.owed.items():
                if owed.to in there and owed.cause not in late:
                    yield owed.to, f"was not told that {name or 'everything'!r} has changed"
            if one in there and one.tracking.breaks:
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
