"""Checks of every command and every reply: it was sent, the server may refuse it, its reply is permitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import hiredis

from kvpage_server.commands.context import Client
from kvpage_server.commands.specs import TABLE
from kvpage_server.resp import NULL_ARRAY, ReplyError, Stream
from tests.simulation.acting.peers import Asked, Peer, shown
from tests.simulation.acting.process import Process
from tests.simulation.judging.departures import Departures
from tests.simulation.judging.endings import Endings
from tests.simulation.judging.messages import Messages
from tests.simulation.judging.moments import agreed_meanwhile
from tests.simulation.judging.monitors import Monitors
from tests.simulation.judging.refusals import TOO_MUCH, Refusals
from tests.simulation.judging.unfinished import Unfinished
from tests.simulation.model.model import Conversation, Model, Words
from tests.simulation.model.replies import ANYTHING, QUEUED, Err, May, agrees, is_error
from tests.simulation.model.rights import Rights
from tests.simulation.model.values import Cell, Value, read_page
from tests.simulation.world.machine import Machine

_CHANGE = frozenset(
    b"""set mset del incrby decrby pexpire kvblockset kvblocksetcoded kvpageset kvpagemset kvpagedel multi exec watch
    discard""".split()
)
_TOO_LARGE = (  # before a command was complete; the connection ends
    "OOM connections hold more than maxmemory-clients",
    "ERR Protocol error: command exceeds client-query-buffer-limit",
)
_NOT_ON_DISK = "MISCONF Errors writing to disk: "  # and the connection ends
_ANY_SIZE = 1 << 40  # bytes
_LEASES = frozenset((b"kvpageprefix", b"kvpagelease", b"exec"))
_SLACK = 100  # milliseconds that looks at the clock may cost between a lease and the end of its command


class Violation(BaseException):
    """The server violated its specification. No code of the server catches this."""


class Judge:
    """Receives every executed command and every reply; raises Violation."""

    def __init__(self, machine: Machine, peers: list[Peer]) -> None:
        self.machine = machine
        self.peers = peers
        self.tenants: list[bytes] = []
        self.checksums = True  # of pages, as a server begins
        self.model = Model(lambda: machine.clock.unix_ms, lambda: machine.clock.now // 1_000_000)
        self.process: Process
        self.endings: Endings
        self._departures: Departures
        self._unfinished: Unfinished
        self._refusals: Refusals
        self.commands = 0
        self.acknowledged = 0  # acknowledged changes of the model
        self.positions: deque[tuple[int, int]] = deque()  # when there were how many changes
        self.boundaries: set[int] = set()  # of the model's log, between commands
        self.rotted = self.model.rotted
        self.just_stored = 0  # bytes, by the last command that stored any and those in progress
        self.trace: list[tuple[int, int, int, Words]] = []  # time, peer, step, command
        self._by_id: dict[int, tuple[Peer, Conversation]] = {}
        self._stranger = Peer(
            -1, self.received, lambda peer, by_server: self.lost(peer)
        )  # it has no socket here: an engine, or a tool
        self._monitors = Monitors(self.model, self.fail)
        self._messages = Messages(self.model, self.fail)
        self.let_go = self.model.let_go  # since this process began
        self.violation: Violation | None = None
        self._leasing = 0  # number of commands that may have leased blocks

    def begin(self, process: Process) -> None:
        """Another process serves."""
        self.process = process
        self._by_id.clear()
        self.let_go.clear()
        process.broke = self.note_broken
        self.endings = Endings(process, self.model, self.fail)
        self._departures = Departures(self.model, process, self.fail)
        self._unfinished = Unfinished(self.model, process, self.fail)
        self._refusals = Refusals(self.model, process, self.fail)
        self.model.pinned.clear()
        self.model.leased.clear()
        self.model.talks, self.model.paused_until, self.model.has_killed = [], 0, False
        self.model.went.clear()
        self.model.config.clear()
        self.model.begin_tracking()
        self.model.checksums = self.checksums
        self.model.users = {user: Rights([user + b":", b"kv:q%b:" % user[1:]]) for user in self.tenants}

    def fail(self, text: str) -> None:
        """Note the first error, and raise it."""
        if self.violation is None:
            self.violation = Violation(text)
        raise self.violation

    def note_broken(self, text: str) -> None:
        """The server has met an exception that it did not expect."""
        if self.violation is None:
            self.violation = Violation(text)

    # -- commands --------------------------------------------------------------------------------------------------

    def ran(self, client: Client, words: Any, reply: Any) -> Any:
        """The server has run a command, or refused it. Return the sent reply."""
        command = tuple([word if type(word) is bytes else bytes(word.body) for word in words])
        peer, talk = self._who(client, command)
        if talk.over:
            self.fail(f"peer {peer.number}: the server ran {shown(command)} of a connection that is over")
        here = peer.talk is talk and peer.sock is not None  # or its result will not be received
        if here and (not peer.unrun or peer.unrun[0].words != command):
            expected = peer.unrun[0].words if peer.unrun else None
            self.fail(f"peer {peer.number}: the server ran {shown(command)}, sent was {shown(expected or ())}")
        asked, peer.moved = peer.unrun.popleft() if here else Asked(-1, command), self.machine.clock.now
        self.commands += 1
        self.process.stored.clear()
        asked.ran, asked.elapsed = self.machine.clock.unix_ms, self.model.store.elapsed()
        asked.unpins = self.model.unpins
        if asked.audit is not None:
            peer.unanswered.append(asked)
            return reply
        runs_many = command[0].lower() == b"exec"
        watched, self.model.given_up = dict(talk.watched), reply is NULL_ARRAY
        marks = {id(one): dict(one.watched) for one in self.model.talks if one.watched} if runs_many else {}
        self.model.begin_command(talk)
        evicted = self.note_evictions()
        if runs_many and reply is not NULL_ARRAY:
            talk.watched = watched  # its own evictions are not changes before it
        self.trace.append((self.machine.clock.unix_ms, peer.number, asked.step, command))
        listened = len(talk.channels) + len(talk.patterns)
        hashes = self.model.checksums
        self._answer(talk, asked, reply)
        while self.process.lost_notes:
            self.model.lose_note(*self.process.lost_notes.pop())
        self._monitors.ran(client, command, asked.queued, reply)
        self.model.may_have_changed(evicted)
        if self.model.checksums != hashes:
            self.model.store.doubt_checksums()
        if len(talk.channels) + len(talk.patterns) < listened and self.process.server.channels.busy:
            peer.may_come += peer.pushes  # messages wait for their turn, and are sent to the subscribers of that time
            peer.pushes.clear()
        elif len(talk.channels) + len(talk.patterns) > listened and self.process.server.channels.busy:
            peer.may_come += [one for other in self.peers for one in other.pushes if other is not peer]
        if evicted and not asked.streamed:
            self._departures.forget_again(evicted)
        if evicted and runs_many:
            self._lose_sight(asked, marks)  # the order of its commands is unknown
        pieces = self.process.later if isinstance(reply, Stream) else reply  # all commands of an EXEC have been run
        if runs_many and isinstance(pieces, list | tuple) and any(_says_full(piece) for piece in pieces):
            self._lose_sight(asked, marks)
        if here and not talk.silent:
            peer.unanswered.append(asked)
        elif command[0].lower() in (b"hello", b"reset", b"exec"):
            peer.speaks = 0  # the protocol of the next message is unknown
        talk.silent -= talk.silent > 0
        for listening, message in self.model.pushes:
            for one in self.peers:
                if one.talk is listening and one.sock is not None:
                    one.pushes.append(message)
        if asked.doubt is None:
            return reply
        items = self._followed(asked, reply.items)
        next(items)
        return replace(reply, items=items)

    def _lose_sight(self, asked: Asked, marks: dict[int, dict[bytes, bool]]) -> None:
        """The changes of a transaction are unknown: a part of it was refused, or values were evicted meanwhile.

        `marks`: the watched keys.
        """
        if asked.expected is None:
            return  # it was not to be run
        store = self.model.store
        changed = {key for key, _, _ in store.log[asked.at :]}
        store.settle(changed)
        store.fog |= changed
        self.model.need_not_tell(changed)
        for talk in self.model.talks:
            talk.unheard -= changed
            for key in changed & talk.watched.keys():
                if not marks.get(id(talk), {}).get(key):
                    talk.watched[key] = False
                    talk.maybe.add(key)
        asked.expected = ANYTHING

    def _followed(self, asked: Asked, items: Iterator[Any]) -> Iterator[Any]:
        """Follow a reply in steps: its effect is known when it is complete, and the next command follows."""
        last, doubt = None, asked.doubt
        try:
            yield None  # to be entered before it is closed, if its client disconnects before the first step
            self.process.stored.clear()  # by others
            for last in items:
                self.note_evictions()  # which were before it, and not by it
                if doubt is not None and doubt.later:
                    self._unfinished.learn_stored(asked, doubt, self.process.stored)
                    self._note_moment()
                if doubt is not None and asked.words[0].lower() == b"kvpagedel":
                    self._unfinished.learn_deleted(asked, doubt)
                    self._note_moment()
                yield last
                self.process.stored.clear()  # by others
        except GeneratorExit:
            self._unfinished.abandon(asked)
            raise
        self._resolve(asked, hiredis.ReplyError(str(last)) if isinstance(last, ReplyError) else last)

    def _resolve(self, asked: Asked, reply: Any) -> None:
        """Process the result of a command in steps. Its missing effects are undone."""
        known = len(self.model.store.log)
        self._unfinished.resolve(asked, reply)
        if len(self.model.store.log) > known:
            self._note_moment()

    def _answer(self, talk: Conversation, asked: Asked, reply: Any) -> None:
        """Have the model do the same."""
        model, store, command = self.model, self.model.store, asked.words
        before, gone, model.pushes = len(store.log), store.gone, []
        asked.queued = [*talk.queued] if talk.queued and command[0].lower() == b"exec" else []
        unclear = store.options() if isinstance(reply, Stream) else {}
        refusal = self._refusals.why(str(reply) if isinstance(reply, ReplyError) else "", command)
        if not isinstance(reply, ReplyError) and talk.queued is None and self._refusals.must_refuse(command):
            self.fail(f"{shown(command)} was not refused: values exceed maxmemory, and noeviction evicts none of them")
        if refusal:
            asked.expected = self._refused(talk, command, refusal)
        elif talk.stranger and talk.queued is None and command[0].lower() not in _CHANGE:
            asked.expected = ANYTHING  # no client here receives it, and it is unchanged
        else:
            asked.expected = model.answer(talk, command)
        if model.given_up:
            model.done.clear()
        model.end_command(talk, command, asked.expected)
        if asked.heard is not None or isinstance(reply, Stream):
            asked.unsure = store.doubtful() | store.fog
        asked.at, asked.end = before, len(store.log)
        asked.changes = asked.end - before - (store.gone - gone)  # that a key is due is nobody's promise
        if asked.end > before:
            self._note_moment()
        asked.streamed = isinstance(reply, Stream)
        self._note_leasing(asked)
        if asked.changes:
            self._note_stored(asked)
        elif command[0].lower() == b"config" and b"maxmemory" in command:
            self.just_stored = _ANY_SIZE  # memory may be larger for now
        if asked.streamed:
            self._unfinished.begin(asked, unclear)

    def _who(self, client: Client, words: Words) -> tuple[Peer, Conversation]:
        """Return the peer of a connection, and its conversation: a peer's first command sets its name, no other
        client's does.
        """
        if client.id not in self._by_id:
            peer, talk = self._stranger, Conversation("", stranger=True)
            if words[:2] == (b"CLIENT", b"SETNAME"):
                peer = self.peers[int(words[2].split(b".")[0])]
                talk = peer.talk if peer.name == words[2] else Conversation(words[2].decode())
            self._by_id[client.id], talk.client = (peer, talk), client
            self.model.talks = [one for one in self.model.talks if one.client.id in client.server.clients] + [talk]
        return self._by_id[client.id]

    def _refused(self, talk: Conversation, words: Words, error: str) -> Any:
        if words[0].lower() == b"exec":
            talk.queued, talk.refused = None, False
            talk.unwatch()
        elif talk.queued is not None:
            talk.refused = True
        return Err(error[:20])

    def _note_stored(self, asked: Asked) -> None:
        store = self.model.store
        cells = [cell for _, _, cell in store.log[asked.at : asked.end]]
        cells += [cell for doubt in store.doubts for cell in doubt.coming.values()]
        self.just_stored = sum(cell.size for cell in cells if cell is not None)

    # -- replies ---------------------------------------------------------------------------------------------------

    def received(self, peer: Peer, reply: Any) -> None:
        """A peer has read something."""
        peer.moved = self.machine.clock.now
        if self._messages.is_one(peer, reply) or self._monitors.is_shown(peer, reply):
            return
        breaks_off = self.model.disk_fails and is_error(reply, _NOT_ON_DISK)
        peer.talk.ends = peer.talk.ends or breaks_off
        if breaks_off and not peer.unanswered:
            return  # it waited for room, which others have made for it, and that is not on disk
        if not peer.unanswered and is_error(reply, *_TOO_LARGE):
            return
        if not peer.unanswered:
            self.fail(f"peer {peer.number} was told {reply!r:.300} though it has asked nothing")
        asked = peer.unanswered.popleft()
        if asked.audit is not None:
            asked.audit(asked, reply)
            return
        self._note_protocol(peer, asked, reply)
        if breaks_off:
            self._broke_off(peer, asked)
            return
        if asked.doubt is not None:
            self._resolve(asked, reply)
        is_right, now = agrees(asked.expected, reply) or self._may_miss(asked, reply), self.machine.clock.unix_ms
        if not is_right and not agreed_meanwhile(self.model, peer.talk, asked, reply, now):
            self.fail(
                f"peer {peer.number}, step {asked.step}: {shown(asked.words)}\n  was answered {reply!r:.600}\n"
                f"  but may be       {asked.expected!r:.600}{_differences(asked.expected, reply)}"
            )
        if _promises(asked, reply):
            self.acknowledged = max(self.acknowledged, asked.end)
        self._note_protection(asked, reply)
        if asked.heard is not None:
            asked.heard(asked, reply)

    def _note_protocol(self, peer: Peer, asked: Asked, reply: Any) -> None:
        """Note the protocol of the next reply. It is unknown after a transaction with a HELLO, whose own reply is not
        read. The model may have run later commands of the peer already.
        """
        name = asked.words[0].lower()
        if name == b"hello" and isinstance(reply, dict | list):
            peer.speaks = int(asked.words[1])
        elif name == b"reset" and reply == b"RESET":
            peer.speaks = 2
        elif name == b"exec" and any(words[0].lower() == b"hello" for words in asked.queued or ()):
            peer.speaks = 0

    def _broke_off(self, peer: Peer, asked: Asked) -> None:
        """Its effect is in memory and not on disk, and the connection ends."""
        for one in (asked, *peer.unanswered):
            self._unfinished.abandon(one)
        peer.unanswered.clear()

    def _may_miss(self, asked: Asked, reply: Any) -> bool:
        """Return whether a reply may omit values that could not be read from disk, or exceeded a limit."""
        is_missing = reply is None and asked.words[0].lower() != b"exec"
        if self.model.may_miss and (is_missing or is_error(reply, "ERR reading from disk failed")):
            return True
        return asked.streamed and is_error(reply, "OOM") and TOO_MUCH in str(reply)

    def _note_protection(self, asked: Asked, reply: Any) -> None:
        """Note pins and leases that the reply confirms."""
        name, model = asked.words[0].lower(), self.model
        if name == b"kvpageprefix" and isinstance(reply, int | list):
            leased = set(_leased_by(asked.words, reply))
            if len(model.store.log) == asked.at:
                for block in leased:
                    model.protect(*block, asked.elapsed - _SLACK + int(asked.words[2]))
            if asked.leases is not None and asked.leasing == self._leasing:
                ends = self._ends_of_leases(asked.leases)
                more = {block for block, end in ends.items() if end > asked.leases[block]} - leased
                if more:
                    self.fail(f"{shown(asked.words)} was answered {reply!r:.300} and leased {sorted(more)[:3]}, too")
        if name not in (b"kvpagepin", b"kvpagelease") or type(reply) is not int:
            return
        if name == b"kvpagepin" and asked.unpins != model.unpins:
            return  # a later command, whose reply follows, may have unpinned the blocks
        pages = [int(word) for word in asked.words[3 if name == b"kvpagelease" else 2 :]]
        blocks = {(asked.words[1], page) for page in model._blocks(asked.words[1], *pages)}
        if reply == len(blocks) and len(model.store.log) == asked.at:
            for block in blocks:
                model.protect(*block, asked.elapsed - _SLACK + int(asked.words[2]) if name == b"kvpagelease" else 0)

    def _note_leasing(self, asked: Asked) -> None:
        """Note the leases of the blocks that a prefix names, before its first step, unless another command in steps may
        lease them, too.
        """
        name = asked.words[0].lower()
        if name not in _LEASES:
            return
        self._leasing += 1
        others = (one for peer in self.peers for one in peer.unanswered if one is not asked)
        if name == b"kvpageprefix" and asked.streamed and not any(one.words[0].lower() in _LEASES for one in others):
            asked.leasing, asked.leases = self._leasing, self._ends_of_leases(_named_by(asked.words))

    def _ends_of_leases(self, names: Iterable[tuple[bytes, int]]) -> dict[tuple[bytes, int], int]:
        keyspace = self.process.server.keyspace
        blocks = {name: keyspace.index.block(*name) for name in names}
        return {name: keyspace.leases.of(block).until if block else 0 for name, block in blocks.items()}

    def lost(self, peer: Peer) -> None:
        """A connection is over. Its commands in steps may continue."""
        peer.unanswered.clear()
        peer.unrun.clear()
        peer.pushes.clear()
        peer.may_come.clear()

    def seen(self, key: bytes, known: Cell, value: Any, expires: int) -> Cell:
        """Return a key's state after a lookup: the known one, or the result if none is known."""
        if key not in self.model.store.fog:
            return known
        if value is None:
            return None
        if value[:4] != b"KVPG":
            return Value(value, max(expires, 0))
        return read_page(key, value, max(expires, 0))

    def note_evictions(self) -> list[bytes]:
        """Remove the server's evictions since the last call from the model."""
        left = self._departures.forget()
        if left:
            self._note_moment()
        return left

    def _note_moment(self) -> None:
        """The current store may be the durable state later."""
        self.boundaries.add(len(self.model.store.log))
        self.positions.append((self.machine.clock.now, len(self.model.store.log)))


def _promises(asked: Asked, reply: Any) -> bool:
    """Whether a write was done, or a transaction with one. If it found nothing to do, that is promised, too."""
    if asked.queued and isinstance(reply, list):
        parts = zip(asked.queued, reply, strict=True)
        return any(_is_write(words) and not is_error(part) for words, part in parts)
    return _is_write(asked.words) and not is_error(reply) and reply != QUEUED


def _is_write(words: Words) -> bool:
    spec = TABLE.get(words[0].lower().decode(errors="replace"))
    return spec is not None and spec.writes


def _differences(expected: Any, reply: Any) -> str:
    """Return the difference of a set from the expected one."""
    if not isinstance(expected, May) or expected.members is None or not isinstance(reply, list | set):
        return ""
    more, less = sorted(set(reply) - expected.members), sorted(expected.members - set(reply))
    return f"\n  too many are {more[:5]!r}, missing are {less[:5]!r}"


def _says_full(piece: Any) -> bool:
    return type(piece) is bytes and piece.startswith(b"-OOM")


def _named_by(words: Words) -> list[tuple[bytes, int]]:
    """Return the blocks and states that a KVPAGEPREFIX names."""
    end = 4 + 2 * int(words[3])
    blocks = zip(words[4:end:2], map(int, words[5:end:2]), strict=True)
    return [*blocks, *zip(words[end + 2 :: 3], map(int, words[end + 3 :: 3]), strict=False)]


def _leased_by(words: Words, reply: int | list[int]) -> list[tuple[bytes, int]]:
    """Return the blocks and states that a KVPAGEPREFIX has leased, by its reply."""
    if not int(words[2]) or reply == []:
        return []
    names, count = _named_by(words), int(words[3])
    longest = reply if isinstance(reply, int) else reply[-1]
    needs = map(int, words[4 + 2 * count + 4 :: 3])
    return [*names[:longest], *(state for state, need in zip(names[count:], needs, strict=True) if need == longest)]
