"""Takes a batch of commands to the nodes that have their keys, wherever the keys are by now.

It follows redirections, refreshes an outdated map, and tries again what could not be done. A read is given up soon,
since its pages can be computed. A write is tried until its deadline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvpage_server.client.cluster.commands import Command, ask, ask_lines
from kvpage_server.client.cluster.plan import Errand, Failed, Plan, Round
from kvpage_server.client.cluster.topology import Address, Node, Shard, SlotMap, ask_slots, redirection, slot_of
from kvpage_server.client.errors import DeadlineExceeded, Disconnected, PageClientError, Refused, WrongReply
from kvpage_server.client.wire.deadline import Deadline
from kvpage_server.client.wire.reply import OTHER_SIZE, Answer

READ_TRIES = 3  # of a read that no node answers
FOLLOWED = 8  # redirections of one command
_PAUSES = (0.0, 0.02, 0.05, 0.1, 0.2)  # seconds before each further try; the last one stays
_AGAIN = frozenset({"TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"})  # the cluster is changing


@dataclass(slots=True)
class _Way:
    """How one command of a batch goes."""

    to: Node | None = None  # where it was redirected to by ASK
    tries: int = 0  # that came to nothing
    followed: int = 0
    from_replica: bool = False
    answer: Answer | Failed = None
    over: bool = False


@dataclass
class Router:
    """Takes commands to the nodes of one cluster. Shared by all its plans."""

    address: Address
    read_from_replicas: bool
    slots: SlotMap = field(default_factory=SlotMap)
    outdated: bool = True  # whether the map is known not to be what it should
    _turn: Any = field(default_factory=count)

    def ask(self, commands: Sequence[Command], end: Deadline) -> Plan[list[Answer | Failed]]:
        """The same, but raises the first error if all commands fail."""
        answers = yield from self.answers(commands, end)
        if answers and all(isinstance(answer, Failed) for answer in answers):
            raise answers[0].error.again()
        return answers

    def answers(self, commands: Sequence[Command], end: Deadline) -> Plan[list[Answer | Failed]]:
        """The answers, Failed for each read that no node answered; TRYAGAIN for what can be done apart.

        Raises refusals, and the error of a write that couldn't be done until `end`."""
        late = Failed(end.exceeded())
        ways = [
            _Way(answer=late, from_replica=self.read_from_replicas and not (one.writes or one.at_primary))
            for one in commands
        ]
        slots = [slot_of(one.key) for one in commands]
        left, pause = list(range(len(commands))), 0.0
        if left and self.outdated:
            yield from self._refresh()
        while left and end.seconds_left() > 0:
            groups, lost = self._by_node(left, slots, ways)
            outcomes = yield Round([_errand(commands, group, to) for to, group in groups.items()], pause)
            failures = len(lost)
            for i in lost:
                self._failed(commands[i], ways[i], Refused(f"CLUSTERDOWN nobody serves slot {slots[i]}"))
            for ((node, _, _), group), outcome in zip(groups.items(), outcomes, strict=True):
                if isinstance(outcome, Failed):
                    if isinstance(outcome.error, Refused) and outcome.error.code not in _AGAIN:
                        raise outcome.error.again()
                    failures += len(group)
                    for i in group:
                        self._failed(commands[i], ways[i], outcome.error)
                    continue
                for i, answer in zip(group, outcome, strict=True):
                    failures += self._answered(commands[i], slots[i], ways[i], answer, node)
            left = [i for i in left if not ways[i].over]
            tries = max((ways[i].tries for i in left), default=0)
            pause = _PAUSES[min(tries, len(_PAUSES)) - 1] if tries else 0.0
            if pause >= end.seconds_left():
                break
            if left and failures:
                yield from self._refresh()
        for i in left:
            self._give_up(commands[i], ways[i], end)
        return [way.answer for way in ways]

    def _by_node(
        self, left: Sequence[int], slots: Sequence[int], ways: Sequence[_Way]
    ) -> tuple[dict[tuple[Node, bool, bool], list[int]], list[int]]:
        """The commands by node, use of ASKING, and use as a replica; and the commands whose slot nobody serves."""
        groups: dict[tuple[Node, bool, bool], list[int]] = defaultdict(list)
        lost, turn = [], next(self._turn)
        for i in left:
            way, shard = ways[i], self.slots.shard(slots[i])
            if way.to:
                groups[way.to, True, False].append(i)
            elif shard is None:
                lost.append(i)
            elif way.from_replica and shard.replicas:
                groups[shard.replicas[turn % len(shard.replicas)], False, True].append(i)
            else:
                groups[shard.primary, False, False].append(i)
        return groups, lost

    def _answered(self, command: Command, slot: int, way: _Way, answer: Answer, node: Node) -> bool:
        """Take a node's answer, or follow a redirection. Returns whether it is a failure. Raises Refused."""
        if not isinstance(answer, Refused):
            absent = not answer or answer is OTHER_SIZE  # null, 0, or nothing of a string
            if absent and way.from_replica and self._has_replicas(slot):
                way.from_replica = False  # the replica may be behind
            else:
                way.answer, way.over = answer, True
            return False
        if answer.code == "TRYAGAIN" and command.apart:
            way.answer, way.over = answer, True
            return False
        to = redirection(str(answer), node) if answer.code in ("MOVED", "ASK") else None
        if to is None and answer.code not in _AGAIN:
            raise answer.again()
        if to and way.followed == FOLLOWED:
            answer = Refused(f"CLUSTERDOWN the nodes disagree about who serves slot {slot}, at last came {answer}")
        if to is None or way.followed == FOLLOWED:
            self._failed(command, way, answer)
            return True
        way.followed, way.from_replica, way.to = way.followed + 1, False, None
        if answer.code == "ASK":
            way.to = to[1]
        else:
            self.slots.moved(*to)
            self.outdated = True  # the next call will ask; this one knows where to go
        return False

    def _failed(self, command: Command, way: _Way, error: PageClientError) -> None:
        """Note that a try has failed. That there was no time for it says less than why the one before it failed."""
        way.tries += 1
        way.to, way.from_replica, way.followed = None, False, 0
        if way.tries == 1 or not isinstance(error, DeadlineExceeded):
            way.answer = Failed(error)
        in_doubt = command.once and not isinstance(error, Refused)
        way.over = in_doubt or (not command.writes and way.tries >= READ_TRIES)

    def _give_up(self, command: Command, way: _Way, end: Deadline) -> None:
        if command.writes:
            assert isinstance(way.answer, Failed)
            error = way.answer.error
            raise type(error)(f"{error} (tried {way.tries} times in {end.spent()})")

    def _has_replicas(self, slot: int) -> bool:
        shard = self.slots.shard(slot)
        return bool(shard and shard.replicas)

    def scatter(self, slots: Sequence[int], texts: Sequence[bytes]) -> Plan[list[int]]:
        """Send short commands to the nodes of their slots. Returns the positions of those that no number answered."""
        if self.outdated:
            yield from self._refresh()
        groups: dict[Shard | None, list[int]] = defaultdict(list)
        for i, slot in enumerate(slots):
            groups[self.slots.shard(slot)].append(i)
        left = groups.pop(None, [])
        outcomes = yield Round(
            [Errand(shard.primary, ask_lines([texts[i] for i in group])) for shard, group in groups.items() if shard]
        )
        for group, lines in zip(groups.values(), outcomes, strict=True):
            if isinstance(lines, Failed):
                left += group
            else:
                left += [i for i, line in zip(group, lines, strict=True) if line[:1] != b":"]
        return left

    # -- one node after the other ------------------------------------------------------------------------------------

    def home(self, key: bytes) -> Plan[Node]:
        """The node that has a key. Raises Refused if nobody serves its slot."""
        if self.outdated:
            yield from self._refresh()
        shard = self.slots.shard(slot_of(key))
        if shard is None:
            self.outdated = True
            raise Refused(f"CLUSTERDOWN nobody serves slot {slot_of(key)}")
        return shard.primary

    def strayed(self, error: PageClientError) -> bool:
        """Whether to try again after this error, because the cluster is changing or its map was out of date."""
        if not isinstance(error, Refused):
            self.outdated = True
            return not isinstance(error, WrongReply)
        self.outdated = True
        return error.code in _AGAIN | {"MOVED", "ASK"}

    def primaries(self) -> Plan[list[Node]]:
        if self.outdated:
            yield from self._refresh()
        return self.slots.primaries()

    # -- the map -----------------------------------------------------------------------------------------------------

    def _refresh(self) -> Generator[Round, list[Any], None]:
        """Ask the nodes in turn until one returns the map. If none does, the old map stays.

        Raises the last error if there is no old map; rather a refusal, such as that of a server that is no cluster."""
        error: PageClientError = Disconnected("the cluster's URL names no node")
        for node in dict.fromkeys([*self.slots.nodes(), *self.address.seeds]):
            [outcome] = yield Round([Errand(node, ask_slots(node))])
            if not isinstance(outcome, Failed) and outcome.nodes():
                self.slots, self.outdated = outcome, False
                return
            if not isinstance(outcome, Failed):
                error = Refused(f"CLUSTERDOWN nobody serves slots, says {node}")
            elif isinstance(outcome.error, Refused) and outcome.error.code not in _AGAIN:
                error = Refused(f"{outcome.error} (asked {node} which slots the nodes of the cluster serve)")
            elif not isinstance(error, Refused):
                error = outcome.error
        if not self.slots.nodes():
            raise error.again()


def _errand(commands: Sequence[Command], group: Sequence[int], to: tuple[Node, bool, bool]) -> Errand:
    node, asking, replica = to
    return Errand(node, ask([commands[i] for i in group], asking=asking), replica)
