"""What holds of everything that a server does: its replies, what it forgets, and what is left when all is quiet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hiredis

from kvpage_server.commands.context import Client
from kvpage_server.resp.reply import NULL_ARRAY, ReplyError, Stream
from kvpage_server.store.eviction.policies import NO_EVICTION, VOLATILE_TTL
from tests.simulation.model import Conversation, Model, Words
from tests.simulation.model_pages import block_of
from tests.simulation.model_rights import Rights, keys_used
from tests.simulation.peers import Asked, Peer
from tests.simulation.process import Process
from tests.simulation.replies import A_NUMBER, ANYTHING, Err, May, agrees, between, gathered, is_error, one_of
from tests.simulation.values import Cell, Doubt, Value, read_page
from tests.simulation.world.machine import Machine

READS_IN_STEPS = frozenset(
    b"mget kvpagemget kvblockget kvblockmget kvpagemexists kvblockexists kvpageindex kvpageverify".split()
)
SETS_IN_STEPS = frozenset((b"keys", b"smembers", b"dbsize"))
_OF_ONE_MOMENT = frozenset((b"mget",))  # though it waits for the disk
_CHANGE = frozenset(
    b"set mset del incrby decrby pexpire kvblockset kvpageset kvpagemset kvpagedel multi exec watch discard".split()
)
_COUNTED = frozenset(b"kvpagedel del unlink setnx msetnx expire pexpire expireat pexpireat persist".split())
_MOST_MOMENTS = 400
_NOT_ON_DISK = "MISCONF Errors writing to disk: "  # and the connection ends
_TOO_MUCH = "would have to be in memory at once, maxmemory-clients allows"
_AT_ONCE = frozenset((b"FLUSHALL",))  # it frees in steps what it has removed at once


class Violation(BaseException):
    """The server did what it must not. No code of the server's is to catch this."""


class Judge:
    """Told of every command that was run and of every reply that came; raises Violation."""

    def __init__(self, machine: Machine, peers: list[Peer]) -> None:
        self.machine = machine
        self.peers = peers
        self.tenants: list[bytes] = []
        self.checksums = True  # of pages, as a server begins
        self.model = Model(lambda: machine.clock.unix_ms, lambda: machine.clock.now // 1_000_000)
        self.process: Process
        self.commands = 0
        self.disk_fails = False  # or did since all was well
        self.acknowledged = 0  # changes of the model that were told to be done
        self.positions: deque[tuple[int, int]] = deque()  # when there were how many changes
        self.boundaries: set[int] = set()  # of the model's log, between commands
        self.rotted = self.model.rotted
        self.just_stored = 0  # bytes, by the last command that stored any and those that are under way
        self.trace: list[tuple[int, int, int, Words]] = []  # when, who, which step, what was run
        self._by_id: dict[int, tuple[Peer, Conversation]] = {}
        self._stranger = Peer(-1, self.told, self.lost)  # it has no socket here: an engine, or a tool
        self._left: list[bytes] = []  # keys that the server has let go of by itself, and the model has still
        self.let_go = self.model.let_go  # since this process began
        self.violation: Violation | None = None

    def begin(self, process: Process) -> None:
        """Another process serves."""
        self.process = process
        self._by_id.clear()
        self._left = []
        self.let_go.clear()
        process.broke, process.leaves = self.note_broken, self.leaves
        self.model.pinned.clear()
        self.model.leased.clear()
        self.model.talks, self.model.paused_until = [], 0
        self.model.went.clear()
        self.model.checksums = self.checksums
        self.model.users = {user: Rights([user + b":", b"kv:q%b:" % user[1:]]) for user in self.tenants}

    def fail(self, text: str) -> None:
        """Something is wrong: the first thing is what is told."""
        if self.violation is None:
            self.violation = Violation(text)
        raise self.violation

    def note_broken(self, text: str) -> None:
        """The server has met an exception that it did not expect."""
        if self.violation is None:
            self.violation = Violation(text)

    # -- commands --------------------------------------------------------------------------------------------------

    def ran(self, client: Client, words: Any, reply: Any) -> Any:
        """The server has run a command, or refused it. What it sends in reply."""
        said = tuple([word if type(word) is bytes else bytes(word.body) for word in words])
        peer, talk = self._who(client, said)
        here = peer.talk is talk and peer.sock is not None  # or nobody is there to say what came of it
        if here and (not peer.unrun or peer.unrun[0].words != said):
            expected = peer.unrun[0].words if peer.unrun else None
            self.fail(f"peer {peer.number}: the server ran {shown(said)}, sent was {shown(expected or ())}")
        asked, peer.moved = peer.unrun.popleft() if here else Asked(-1, said), self.machine.clock.now
        self.commands += 1
        asked.ran, asked.elapsed = self.machine.clock.unix_ms, self.model.store.elapsed()
        if asked.audit is not None:
            peer.unanswered.append(asked)
            return reply
        runs_many = said[0].lower() == b"exec"
        watched, self.model.given_up = dict(talk.watched), reply is NULL_ARRAY
        marks = {id(one): dict(one.watched) for one in self.model.talks if one.watched} if runs_many else {}
        evicted = self.note_evictions()
        if runs_many and reply is not NULL_ARRAY:
            talk.watched = watched  # what it evicts itself has not changed before it
        self.trace.append((self.machine.clock.unix_ms, peer.number, asked.step, said))
        listened = len(talk.channels) + len(talk.patterns)
        hashes = self.model.checksums
        self._answer(talk, asked, reply)
        if self.model.checksums != hashes:
            self.model.store.doubt_checksums()
        if len(talk.channels) + len(talk.patterns) < listened and self.process.server.channels.busy:
            peer.may_come += peer.pushes  # messages wait for their turn, and are for those who listen then
            peer.pushes.clear()
        elif len(talk.channels) + len(talk.patterns) > listened and self.process.server.channels.busy:
            peer.may_come += [one for other in self.peers for one in other.pushes if other is not peer]
        if evicted and not asked.streamed:
            self._forget_again(evicted)
        if evicted and runs_many:
            self._lose_sight(asked, marks)  # nobody knows which of its commands came before and which after
        if runs_many and isinstance(reply, tuple) and any(_says_full(piece) for piece in reply):
            self._lose_sight(asked, marks)
        if here:
            peer.unanswered.append(asked)
        for listening, message in self.model.pushes:
            for one in self.peers:
                if one.talk is listening and one.sock is not None:
                    one.pushes.append(message)
        return reply if asked.doubt is None else replace(reply, items=self._followed(asked, reply.items))

    def _forget_again(self, evicted: list[bytes]) -> None:
        """Some of what a command has stored was evicted to make room for the rest of it."""
        there = set(self.process.server.keyspace.listing.names())
        for key in evicted:
            if key not in there:
                self._forget(key)

    def _lose_sight(self, asked: Asked, marks: dict[int, dict[bytes, bool]]) -> None:
        """What a transaction has changed is not known: some of it was refused, or something evicted meanwhile.

        `marks`: what was watched.
        """
        if asked.expected is None:
            return  # it was not to be run
        store = self.model.store
        changed = {key for key, _, _ in store.log[asked.at :]}
        store.settle(changed)
        store.fog |= changed
        for talk in self.model.talks:
            talk.owed -= changed
            talk.unheard -= changed
            for key in changed & talk.watched.keys():
                if not marks.get(id(talk), {}).get(key):
                    talk.watched[key] = False
                    talk.maybe.add(key)
        asked.expected = ANYTHING

    def _followed(self, asked: Asked, items: Iterator[Any]) -> Iterator[Any]:
        """A reply in steps: what it has done is known when it is made, and the next command comes after that."""
        last, doubt = None, asked.doubt
        try:
            for last in items:
                self.note_evictions()  # which were before it, and not by it
                if doubt is not None and asked.words[0].lower() == b"kvpagedel":
                    self._learn_deleted(asked, doubt)
                yield last
        except GeneratorExit:
            self._abandon(asked)
            raise
        self._resolve(asked, hiredis.ReplyError(str(last)) if isinstance(last, ReplyError) else last)

    def _answer(self, talk: Conversation, asked: Asked, reply: Any) -> None:
        """Have the model do the same."""
        model, store, said = self.model, self.model.store, asked.words
        before, gone, model.pushes = len(store.log), store.gone, []
        unclear = store.doubtful() | store.fog if isinstance(reply, Stream) else set()
        refusal = self._refusal(str(reply) if isinstance(reply, ReplyError) else "", said)
        if refusal:
            asked.expected = self._refused(talk, said, refusal)
        elif talk.stranger and talk.queued is None and said[0].lower() not in _CHANGE:
            asked.expected = ANYTHING  # nobody here is told, and it is as it was
        else:
            asked.expected = model.answer(talk, said)
        if asked.heard is not None:
            asked.unsure = store.doubtful() | store.fog
        asked.at, asked.end = before, len(store.log)
        asked.changes = asked.end - before - (store.gone - gone)  # that a key is due is nobody's promise
        if asked.end > before:
            self._note_moment()
        asked.streamed = isinstance(reply, Stream)
        if asked.changes:
            self._note_stored(asked)
        if asked.streamed and asked.changes and said[0] not in _AT_ONCE:
            self._doubt(asked)
            asked.unclear = unclear & asked.doubt.variants[1].keys()
        elif asked.streamed and said[0].lower() == b"kvpagedel" and asked.expected == 0:
            asked.doubt = Doubt([{}, {}], pending=True)  # there may be pages before it is done

    def _who(self, client: Client, words: Words) -> tuple[Peer, Conversation]:
        """Whose connection it is, and what was said on it: a peer's first command is its name, nobody else's is."""
        if client.id not in self._by_id:
            peer, talk = self._stranger, Conversation("", stranger=True)
            if words[:2] == (b"CLIENT", b"SETNAME"):
                peer = self.peers[int(words[2].split(b".")[0])]
                talk = peer.talk if peer.name == words[2] else Conversation(words[2].decode())
            self._by_id[client.id], talk.client = (peer, talk), client
            self.model.talks = [one for one in self.model.talks if one.client.id in client.server.clients] + [talk]
        return self._by_id[client.id]

    def _refusal(self, error: str, words: Words) -> str:
        """Why the server may refuse a command that is right, empty when it does not."""
        if _TOO_MUCH in error:
            return error
        if error.startswith(("OOM", "EXECABORT Transaction discarded because of: OOM")):
            keyspace = self.process.server.keyspace
            queued = words[0].lower() == b"exec" and keyspace.memory.maxmemory > 0  # what waited for it has gone by now
            if not (keyspace.memory.is_full or self._may_refuse or queued):
                self.fail(f"{shown(words)} was refused for want of memory: {keyspace.memory.used} are used")
            return error
        if error.endswith("because of previous errors.") or "Can't execute" in error:
            return ""
        if error.startswith(("MISCONF", "ERR reading from disk failed", "EXECABORT Transaction discarded because of")):
            if not self.disk_fails:
                self.fail(f"{shown(words)} was refused though the disk works: {error}")
            return error
        return ""

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

    def _doubt(self, asked: Asked) -> None:
        """What a command does in steps may or may not be done, until it says so."""
        store = self.model.store
        before: dict[bytes, Cell] = {}
        for key, old, _ in store.log[asked.at :]:
            before.setdefault(key, old)
        after = {key: store.keys.get(key) for key in before}
        asked.doubt = Doubt([after, before], pending=True)
        store.doubts.append(asked.doubt)

    # -- replies ---------------------------------------------------------------------------------------------------

    def told(self, peer: Peer, reply: Any) -> None:
        """A peer has read something."""
        peer.moved = self.machine.clock.now
        is_message = isinstance(reply, list) and reply[:1] in ([b"message"], [b"pmessage"], [b"invalidate"])
        if is_message and peer.speaks and isinstance(reply, hiredis.PushNotification) != (peer.speaks == 3):
            self.fail(f"peer {peer.number}, who speaks RESP{peer.speaks}, was told {reply!r:.200} in the other")
        if isinstance(reply, list) and reply[:1] == [b"invalidate"]:
            peer.talk.told(reply[1])
            return
        if isinstance(reply, list) and reply[:1] == [b"pmessage"] and reply[2].startswith(b"__key"):
            self._notified(peer, *reply[2:])
            return
        if (peer.pushes or peer.may_come) and self._is_push(peer, reply):
            if peer.pushes and agrees(peer.pushes[0], list(reply)):
                peer.pushes.popleft()
            elif reply in peer.may_come:
                peer.may_come.remove(reply)
            else:
                self.fail(f"peer {peer.number} was told {reply!r:.200}, expected was {[*peer.pushes][:1]!r:.200}")
            return
        if not peer.unanswered and peer.unrun and self.disk_fails and is_error(reply, _NOT_ON_DISK):
            return  # it waited for room, which others have made for it, and that is not on disk
        if not peer.unanswered:
            self.fail(f"peer {peer.number} was told {reply!r:.300} though it has asked nothing")
        asked = peer.unanswered.popleft()
        if asked.audit is not None:
            asked.audit(asked, reply)
            return
        self._note_protocol(peer, asked.words, reply)
        if is_error(reply, _NOT_ON_DISK) and self.disk_fails:
            self._broke_off(peer, asked)
            return
        if asked.doubt is not None:
            self._resolve(asked, reply)
        if not agrees(asked.expected, reply) and not self._agreed_meanwhile(peer.talk, asked, reply):
            self.fail(
                f"peer {peer.number}, step {asked.step}: {shown(asked.words)}\n  was answered {reply!r:.600}\n"
                f"  but may be       {asked.expected!r:.600}{_differences(asked.expected, reply)}"
            )
        found_nothing = reply == 0 and asked.words[0].lower() in _COUNTED
        if asked.changes and not is_error(reply) and not found_nothing:
            self.acknowledged = max(self.acknowledged, asked.end)
        self._note_protection(asked, reply)
        if asked.heard is not None:
            asked.heard(asked, reply)

    def _note_protocol(self, peer: Peer, words: Words, reply: Any) -> None:
        """In which protocol the next reply comes. A transaction may have had a HELLO."""
        name = words[0].lower()
        if name == b"hello" and isinstance(reply, dict):
            peer.speaks = int(words[1])
        elif name == b"reset" and reply == b"RESET":
            peer.speaks = 2
        elif name == b"exec" and peer.talk.protocol != peer.speaks:
            peer.speaks = 0

    def _notified(self, peer: Peer, channel: bytes, message: bytes) -> None:
        """A keyspace notification: of a change, told to the key's channel and then to the event's."""
        kind, _, name = channel.partition(b":")
        if kind == b"__keyspace@0__":
            key, peer.talk.event = name, (name, message)
        else:
            key, known, peer.talk.event = message, peer.talk.event, None
            peer.talk.unheard.discard(key)
            if known not in (None, (key, name)):
                self.fail(f"peer {peer.number} was notified of {name!r} of {key!r} after {known!r}")
        if key not in self.model.changes | self.model.store.keys.keys():
            self.fail(f"peer {peer.number} was notified of {message!r} in {channel!r}, which has never changed")

    def _is_push(self, peer: Peer, reply: Any) -> bool:
        return isinstance(reply, list) and reply[:1] in ([b"message"], [b"pmessage"])

    def _broke_off(self, peer: Peer, asked: Asked) -> None:
        """What it did is in memory and not on disk, and the connection ends."""
        for one in (asked, *peer.unanswered):
            self._abandon(one)
        peer.unanswered.clear()

    def _resolve(self, asked: Asked, reply: Any) -> None:
        """A command in steps has said what became of it."""
        store, doubt = self.model.store, asked.doubt
        if doubt is None:
            return  # the client has gone, or was quick
        changed, now = store.log[asked.at : asked.end], self.machine.clock.unix_ms
        settled = {key for key, _, _ in changed}.difference(asked.deleted, *doubt.variants)  # by others
        settled |= {key for key, old, new in changed if old and not new and asked.ran < old.expires <= now}  # by time
        asked.expected = _fewer(asked.expected, len(settled | doubt.evicted.keys()))
        asked.doubt, doubt.pending = None, False
        if asked.came:
            asked.expected = (
                A_NUMBER if isinstance(asked.expected, May) else between(asked.expected, asked.expected + asked.came)
            )
        if is_error(reply):
            if not self._may_fail_late(reply):
                self.fail(f"step {asked.step}: {shown(asked.words)} failed: {reply!r:.300}")
            asked.expected = Err(str(reply)[:12])
            self._may_not_be_told(asked)
        if doubt not in store.doubts:  # all of it is settled
            if not is_error(reply):
                self._learn_evicted(doubt)
            return
        store.doubts.remove(doubt)
        if len(store.log) > asked.end:
            store.note_late(asked.at, doubt)
        if not is_error(reply):
            self._learn_times(asked, doubt)
            self._learn_evicted(doubt)
            return
        for talk in self.model.talks:
            talk.not_changed(doubt.variants[0])
        store.sure = False
        for key, value in doubt.variants[1].items():
            store._set(key, value)
        store.sure = True
        store.fog |= asked.unclear

    def _learn_deleted(self, asked: Asked, doubt: Doubt) -> None:
        """A step of a deletion is done: others see what is left.

        Pages that come meanwhile may be deleted, too, in any of the steps.
        """
        store, there = self.model.store, set(self.process.server.keyspace.listing.names())
        others = {key for one in store.doubts if one is not doubt for variant in one.variants for key in variant}
        done = {key for key, cell in doubt.variants[0].items() if cell is None} - there - others
        store.settle(sorted(done))
        asked.deleted |= done
        _, req, *pages = asked.words
        named = {(req, int(page)) for page in pages}
        new = {key for key, _, cell in store.log[asked.end :] if cell is not None and key.startswith(b"kv:%b:" % req)}
        store.now = self.machine.clock.unix_ms
        new = {key for key in new if (not named or block_of(key) in named) and store.get(key) is not None}
        gone = new - there
        for key in sorted(gone):
            self._forget(key)
        asked.came += len(gone)

    def _learn_evicted(self, doubt: Doubt) -> None:
        """What was evicted while a command in steps came to it was so before, or afterwards: then it is not there."""
        keyspace, store = self.process.server.keyspace, self.model.store
        there = set(keyspace.listing.names()) if doubt.evicted else set()
        store.sure = False
        for key, cell in doubt.evicted.items():
            store.fog.discard(key)
            store._set(key, replace(cell, expires=keyspace.expires_of(key)) if cell and key in there else None)
        store.sure = True

    def _learn_times(self, asked: Asked, doubt: Doubt) -> None:
        """A time to live begins when a command in steps comes to it, which is not when it was begun."""
        took = self.model.store.elapsed() - asked.elapsed
        moved = self.machine.clock.unix_ms - asked.ran - took  # somebody has set the clock, or it is rounded
        soonest, latest = min(moved, 0), took + max(moved, 0) + 1
        for key, cell in doubt.variants[0].items():
            now = self.model.store.keys.get(key)
            if cell is None or now is not cell or not cell.expires:
                continue
            expires = self.process.server.keyspace.expires_of(key)
            if expires and not soonest <= expires - cell.expires <= latest:
                self.fail(f"step {asked.step}: {key!r} expires at {expires}, asked was {cell.expires}")
            if expires:
                self.model.store.keys[key] = replace(cell, expires=expires)

    def _may_fail_late(self, reply: Any) -> bool:
        keyspace = self.process.server.keyspace
        return (is_error(reply, "OOM") and (keyspace.memory.maxmemory > 0 or self._may_refuse)) or (
            is_error(reply, "MISCONF", "ERR reading from disk") and self.disk_fails
        )

    def _agreed_meanwhile(self, talk: Conversation, asked: Asked, reply: Any) -> bool:
        """Whether a reply that was made in steps was right at some moment of these; an array's parts each at one."""
        name = asked.words[0].lower()
        is_missing = reply is None and name != b"exec"
        if self._may_miss and (is_missing or is_error(reply, "ERR reading from disk failed")):
            return True
        if asked.streamed and is_error(reply, "OOM") and _TOO_MUCH in str(reply):
            return True
        if name not in READS_IN_STEPS | SETS_IN_STEPS or not asked.streamed:
            return False
        store = self.model.store
        store.now = self.machine.clock.unix_ms
        store.expire()
        if name == b"kvpageverify":
            return self._was_verified(asked, reply)
        if name in SETS_IN_STEPS:
            return self._was_gathered(talk, asked, reply)
        moments = [asked.expected]
        changes, used = store.log[asked.at :], tuple(map(_beginning, keys_used(asked.words)))
        now, doubts, store.doubts = dict(store.keys), store.doubts, []
        end, self.model.talk = len(store.log), talk
        for key, old, _ in reversed(changes):
            if old is None:
                store.keys.pop(key, None)
            else:
                store.keys[key] = old
            if (used and not key.startswith(used)) or len(moments) > _MOST_MOMENTS:
                continue
            kept, store.now = store.now, 0
            moments.append(self.model.run(asked.words))
            store.now = kept
        store.keys, store.doubts = now, doubts
        del store.log[end:]
        moments.append(self.model.run(asked.words))
        moments = [one for moment in moments for one in (moment.options if isinstance(moment, May) else [moment])]
        if name == b"kvpageindex" and isinstance(reply, list) and all(isinstance(one, list) for one in moments):
            return _was_listed(moments, reply)
        if isinstance(reply, list) and all(isinstance(one, list) and len(one) == len(moments[0]) for one in moments):
            if name not in _OF_ONE_MOMENT:
                moments = [[one_of(options) for options in zip(*moments, strict=True)]]
            if self._may_miss:
                moments = [[one_of([part, None]) for part in moment] for moment in moments]
        return any(agrees(moment, reply) for moment in moments)

    def _was_gathered(self, talk: Conversation, asked: Asked, reply: Any) -> bool:
        """Whether a set, or its size, has what was always there, and nothing else but what was there at some moment."""
        store, self.model.talk, end = self.model.store, talk, len(self.model.store.log)
        moments = [*asked.expected.options, *self.model.run(asked.words).options]
        if any(moment.members is None for moment in moments):
            return agrees(ANYTHING, reply)
        is_index, start = asked.words[0].lower() == b"smembers", _beginning(asked.words[-1])
        least = frozenset.intersection(*(moment.members for moment in moments))
        most = frozenset.union(*(moment.members for moment in moments))
        for key, *cells in store.log[asked.at : end]:
            if is_index and not key.startswith(start):
                continue
            there = [cell is not None and (cell.page is not None or not is_index) for cell in cells]
            least -= {key} if not all(there) else set()
            most |= {key} if any(there) and self.model._sees(key) else set()
        return gathered([least, most], reply)

    def _was_verified(self, asked: Asked, reply: Any) -> bool:
        """Whether pages were verified that were there at some moment, and all that were there at every one."""
        if not isinstance(reply, list | dict):
            return False
        told = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
        req, pages = asked.words[1], set(map(int, asked.words[2:]))
        changed = {key for key, _, _ in self.model.store.log[asked.at :] if block_of(key)[0] == req}
        changed = {key for key in changed if not pages or block_of(key)[1] in pages}
        sets = [option.members or frozenset() for option in asked.expected.options]
        least, most = frozenset.intersection(*sets) - changed, frozenset.union(*sets) | changed
        corrupt = set(told[b"corrupt"])
        count = told[b"checked"] + told[b"unchecked"]
        return len(least) <= count <= len(most) and corrupt <= (most if self.rotted else set())

    @property
    def _may_miss(self) -> bool:
        return self.disk_fails or self.rotted

    def _note_protection(self, asked: Asked, reply: Any) -> None:
        """What pins and leases were promised."""
        name, model = asked.words[0].lower(), self.model
        if name == b"kvpageprefix" and type(reply) is int and len(model.store.log) == asked.at:
            names = zip(asked.words[4::2], map(int, asked.words[5::2]), strict=True)
            for block, _ in zip(names, range(reply), strict=False):
                model.protect(*block, asked.ran + int(asked.words[2]))
        if name not in (b"kvpagepin", b"kvpagelease") or type(reply) is not int:
            return
        pages = [int(word) for word in asked.words[3 if name == b"kvpagelease" else 2 :]]
        blocks = {(asked.words[1], page) for page in model._blocks(asked.words[1], *pages)}
        if reply == len(blocks) and len(model.store.log) == asked.at:
            for block in blocks:
                model.protect(*block, asked.ran + int(asked.words[2]) if name == b"kvpagelease" else 0)

    def _abandon(self, asked: Asked) -> None:
        """Nobody will know what became of it: what it may have done stays in doubt."""
        if asked.doubt is not None:
            asked.doubt.pending = False
            asked.doubt = None
            self.model.store.settle(asked.unclear)
            self.model.store.fog |= asked.unclear
            self._may_not_be_told(asked)

    def _may_not_be_told(self, asked: Asked) -> None:
        """Of what it has perhaps not changed, nobody is notified for sure."""
        changed = {key for key, _, _ in self.model.store.log[asked.at : asked.end]}
        for talk in self.model.talks:
            talk.unheard -= changed

    def lost(self, peer: Peer) -> None:
        """A connection is over."""
        for asked in peer.unanswered:
            self._abandon(asked)
        peer.unanswered.clear()
        peer.unrun.clear()
        peer.pushes.clear()
        peer.may_come.clear()

    def seen(self, key: bytes, known: Cell, value: Any, expires: int) -> Cell:
        """What a key is after somebody has looked: what is known of it, or what was found where nothing is."""
        if key not in self.model.store.fog:
            return known
        if value is None:
            return None
        if value[:4] != b"KVPG":
            return Value(value, max(expires, 0))
        return read_page(key, value, max(expires, 0))

    # -- what leaves -----------------------------------------------------------------------------------------------

    def leaves(self, keys: list[bytes], evicted: bool) -> None:
        """The server is about to let go of keys by itself: it evicts them, or has found them damaged on disk."""
        if evicted:
            for key in keys:
                self._check_eviction(key)
        elif not self.rotted:
            self.fail(f"{keys[:3]!r} could not be read from disk, where nothing was damaged")
        self._left += keys
        self.let_go.update(keys)

    def _check_eviction(self, key: bytes) -> None:
        """Whether a key may be evicted."""
        model, policy = self.model, self.process.server.keyspace.evictor.policy
        if policy == NO_EVICTION:
            self.fail(f"{key!r} was evicted under noeviction")
        if not (model.limited or self._maxdisk or self.disk_fails):
            self.fail(f"{key!r} was evicted, and nothing is limited")
        known = model.store.keys.get(key)
        is_text = known is not None and known.page is None
        if not is_text and model.is_protected(block_of(key), self.machine.clock.unix_ms):
            self.fail(f"{key!r} was evicted though its block is pinned or leased")
        is_known = known is not None and key not in model.store.doubtful() | model.store.fog
        expires = self.process.server.keyspace.expires_of(key)  # which a transaction may have set that is being run
        if policy == VOLATILE_TTL and key[:3] != b"kv:" and is_known and known and not (known.expires or expires > 0):
            self.fail(f"{key!r} was evicted under volatile-ttl, and does not expire")

    def note_evictions(self) -> list[bytes]:
        """What the server has let go of since this was asked, the model forgets."""
        left, self._left = self._left, []
        if left:
            self.model.store.now = self.machine.clock.unix_ms
            for key in left:
                self._forget(key)
            self._note_moment()
        return left

    def _note_moment(self) -> None:
        """The store as it is now may be what is on disk later."""
        self.boundaries.add(len(self.model.store.log))
        self.positions.append((self.machine.clock.now, len(self.model.store.log)))

    def _forget(self, key: bytes) -> None:
        """A key has gone. What is about to be stored by a command in steps may still come."""
        store = self.model.store
        pending = [doubt for doubt in store.doubts if key in doubt.coming]
        for doubt in pending:
            (doubt.rest_of or doubt).evicted[key] = doubt.coming[key]
        store.settle([key])
        store.drop(key)
        if pending:
            store.fog.add(key)

    @property
    def _maxdisk(self) -> int:
        tiered = self.process.server.tiered
        return 0 if tiered is None else tiered.stored.maxdisk

    @property
    def _may_refuse(self) -> bool:
        """Whether a value may be refused that memory has room for."""
        return self._maxdisk > 0 or self.process.server.keyspace.evictor.quotas is not None


def _beginning(key: bytes) -> bytes:
    """How the keys begin that a key of a command stands for: a request's index for all of its pages."""
    return key.removesuffix(b"index") if key[:3] == b"kv:" else key


def _was_listed(moments: list[list[May]], reply: list[Any]) -> bool:
    """Whether blocks were each so at some moment, and all that were there at every one are told, in their order."""
    pages = [row[b"page"] if isinstance(row, dict) else row[1] for row in reply]
    always = frozenset.intersection(*[frozenset().union(*(row.members or () for row in moment)) for moment in moments])
    rows = [row for moment in moments for row in moment]
    known = all(any(agrees(row, told) for row in rows) for told in reply)
    return known and pages == sorted(set(pages)) and always <= {b"%d" % page for page in pages}


def _differences(expected: Any, reply: Any) -> str:
    """In which a set is not what it may be."""
    if not isinstance(expected, May) or expected.members is None or not isinstance(reply, list | set):
        return ""
    more, less = sorted(set(reply) - expected.members), sorted(expected.members - set(reply))
    return f"\n  too many are {more[:5]!r}, missing are {less[:5]!r}"


def _fewer(expected: Any, by: int) -> Any:
    """What a command may count that has come too late for so many keys."""
    options = [one for one in (expected.options if isinstance(expected, May) else [expected]) if type(one) is int]
    return between(max(min(options) - by, 0), max(options)) if by and options else expected


def _says_full(piece: Any) -> bool:
    return type(piece) is bytes and piece.startswith(b"-OOM")


def shown(words: Words) -> str:
    """A command as redis-cli reads it."""
    return " ".join(_word(word) for word in words)


def _word(word: bytes) -> str:
    plain = all(32 < byte < 127 and byte not in b"\"'\\" for byte in word)
    if plain and 0 < len(word) <= 60:
        return word.decode()
    text = "".join(chr(byte) if 31 < byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in word[:60])
    return f'"{text}"' + (f"...({len(word)} bytes)" if len(word) > 60 else "")
