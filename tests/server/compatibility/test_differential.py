"""The same random commands to Debian's redis-server and to ours: the replies must be the same bytes, errors included.

Every tolerated difference, and every command that both know but that is not compared, is listed in
docs/compatibility.md with its reason; these tests read the document, so that it is true.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from random_commands import KEYS, Commands, Words
from servers import NO_REDIS, REDIS_SERVER, RunningServer, start_redis, start_server
from wire import Wire, encode_command, items, parse

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.access.user import ABSENT
from kvpage_server.commands.specs import SUBCOMMANDS, TABLE, Spec

SEEDS = 20
COMMANDS_A_SEED = 1000
DOCUMENT = (Path(__file__).parents[3] / "docs" / "compatibility.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)


def table_under(heading: str) -> dict[str, str]:
    """The two columns of the table in a section of the document."""
    section = DOCUMENT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return {re.sub("`", "", name): reason for name, reason in rows[1:] if not set(name) <= set("- ")}


def spread(names: str) -> list[str]:
    """The commands of a row, in the spelling of the command table."""
    return [name.lower().replace(" ", "|") for name in names.split(", ")]


NOT_COMPARED = table_under("Commands that are not compared")


Pair = tuple[RunningServer, RunningServer]  # redis-server and ours
Agree = Callable[[bytes, bytes], bool]  # whether redis's reply and ours agree, as far as they can


def close(most: int) -> Agree:
    """Both are numbers that differ by so much at the most, and are negative together."""

    def agree(theirs: bytes, ours: bytes) -> bool:
        if not (theirs[:1] == ours[:1] == b":"):
            return False
        there, here = parse(theirs), parse(ours)
        return abs(there - here) <= most and (there < 0) == (here < 0)

    return agree


def same_set(theirs: bytes, ours: bytes) -> bool:
    """Both are arrays of the same items."""
    return theirs[:1] == ours[:1] == b"*" and sorted(items(theirs)) == sorted(items(ours))


def same_shape(theirs: bytes, ours: bytes) -> bool:
    """Both are arrays of as many items, or both are strings, or both are numbers."""
    if theirs[:1] != ours[:1] or theirs[:1] in b"-+":
        return False
    return theirs[:1] not in b"*%" or len(items(theirs)) == len(items(ours))


def two_arrays(theirs: bytes, ours: bytes) -> bool:
    return theirs[:1] == ours[:1] == b"*"


def two_errors(theirs: bytes, ours: bytes) -> bool:
    """Both are errors; ours is theirs but for the name."""
    return theirs[:1] == ours[:1] == b"-" and theirs.replace(b"Redis ", b"").replace(b"the Redis", b"the") == ours


def same_keys(theirs: bytes, ours: bytes) -> bool:
    """Return whether both are arrays of a key and its access, with the same keys."""
    if not (theirs[:1] == ours[:1] == b"*"):
        return False
    there, here = ([key for key, _ in parse(reply)] for reply in (theirs, ours))
    return there == here


def same_greeting(theirs: bytes, ours: bytes) -> bool:
    """Both are HELLO's map; ours has no less to say, and the same where that is not another version or connection.

    Or both are errors: with more than one mistake, either may be reported.
    """
    if theirs[:1] == ours[:1] == b"-":
        return True
    if theirs[:1] != ours[:1] or theirs[:1] not in b"*%":
        return False
    there, here = (dict(zip(parse(reply)[::2], parse(reply)[1::2], strict=True)) for reply in (theirs, ours))
    return all(here[field] == there[field] or field in (b"version", b"id") for field in there)


def same_map(theirs: bytes, ours: bytes) -> bool:
    """Both are maps, or RESP2's arrays for maps, of the same pairs."""
    if theirs[:1] != ours[:1] or theirs[:1] not in b"*%":
        return False
    there, here = ([*zip(items(reply)[::2], items(reply)[1::2], strict=True)] for reply in (theirs, ours))
    return sorted(there) == sorted(here)


TOLERATED: dict[str, Agree] = {
    "PTTL, PEXPIRETIME": close(2000),
    "KEYS": same_set,
    "COMMAND GETKEYSANDFLAGS": same_keys,
    "ACL SAVE, ACL LOAD": two_errors,
    "HELLO": same_greeting,
    "SCAN, RANDOMKEY, TIME, OBJECT REFCOUNT, MEMORY USAGE, ACL GENPASS, CLIENT ID": same_shape,
}
# Differences that depend on the time between two commands: a fast machine sees none of them.
NOW_AND_THEN: dict[str, Agree] = {
    "TTL, EXPIRETIME": close(3),
    "DBSIZE": close(len(KEYS)),
    "CONFIG GET": same_map,
    "SLOWLOG GET": two_arrays,
    "SLOWLOG LEN, OBJECT IDLETIME": same_shape,
}


IN_ANOTHER_ORDER = ["pubsub", "unsubscribe", "punsubscribe", "publish"]  # in the test of pub/sub


def by_command(agreements: dict[str, Agree]) -> dict[str, Agree]:
    return {command: agree for names, agree in agreements.items() for command in spread(names)}


AGREE = by_command(TOLERATED | NOW_AND_THEN)


def test_the_document_lists_the_tolerances_that_are_tested() -> None:
    documented = [command for names in table_under("Replies that differ") for command in spread(names)]
    assert sorted(documented) == sorted([*AGREE, *IN_ANOTHER_ORDER])
    assert f"{SEEDS * COMMANDS_A_SEED:,} random commands" in DOCUMENT


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Redis and ours, nobody else's."""
    with start_redis("--databases", "1") as theirs, start_server() as ours:
        yield theirs, ours


class Difference(AssertionError):
    """A reply that differs from redis-server's."""


class Twin:
    """Two connections in the same state, one to each server."""

    def __init__(self, pair: Pair, needed: set[str]) -> None:
        """`needed` collects the necessary tolerances."""
        self._wires = [Wire(server.port) for server in pair]
        self._needed = needed
        self._queued: list[Words] | None = None
        self._sent: list[Words] = []

    def exchange(self, batch: list[Words]) -> None:
        """Send some commands at once, and compare the replies."""
        for wire in self._wires:
            wire.send(b"".join(map(encode_command, batch)))
        for words in batch:
            self._sent.append(words)
            theirs, ours = (wire.reply() for wire in self._wires)
            if not self._agree(words, theirs, ours):
                before = "".join(f"\n    after {show(sent)}" for sent in self._sent[-12:-1])
                raise Difference(f"{show(words)}\n  theirs {theirs[:500]!r}\n  ours   {ours[:500]!r}{before}")
            self._follow(words, theirs)

    @property
    def in_transaction(self) -> bool:
        return self._queued is not None

    def _follow(self, words: Words, reply: bytes) -> None:
        name = words[0].lower()
        if name == b"multi" and reply == b"+OK\r\n":
            self._queued = []
        elif (name == b"discard" and reply == b"+OK\r\n") or name == b"exec":
            self._queued = None
        elif reply == b"+QUEUED\r\n" and self._queued is not None:
            self._queued.append(words)

    def _agree(self, words: Words, theirs: bytes, ours: bytes) -> bool:
        if theirs == ours:
            return True
        if words[0].lower() == b"exec" and theirs[:1] == ours[:1] == b"*" and self._queued is not None:
            replies = zip(self._queued, items(theirs), items(ours), strict=True)
            return all(self._agree(*queued) for queued in replies)
        name = words[0].lower().decode("latin1")
        if name in SUBCOMMANDS and len(words) > 1:
            name += "|" + words[1].lower().decode("latin1")
        self._needed.add(name)
        return name in AGREE and AGREE[name](theirs, ours)

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *_: object) -> None:
        for wire in self._wires:
            wire.close()


def show(words: Words) -> str:
    return " ".join(repr(word[:40])[1:] for word in words)


def shared_specs(redis: RunningServer) -> list[Spec]:
    """The commands that both servers know and that are to be compared."""
    with Wire(redis.port) as wire:
        docs = parse(wire.ask(b"COMMAND", b"DOCS"))
    known = set()
    for name, fields in zip(docs[::2], docs[1::2], strict=True):
        known.add(name.decode())
        found = dict(zip(fields[::2], fields[1::2], strict=True))
        known.update(sub.decode() for sub in found.get(b"subcommands", [])[::2])
    excluded = {command for names in NOT_COMPARED for command in spread(names)}
    assert excluded <= set(TABLE) & known, f"not shared: {excluded - (set(TABLE) & known)}"
    return [
        spec
        for name, spec in TABLE.items()
        if name in known - excluded and not name.endswith("|help") and name not in SUBCOMMANDS
    ]


def test_random_commands_are_answered_as_redis_answers_them(pair: Pair) -> None:
    shared = [spec for spec in shared_specs(pair[0]) if spec.group != "pubsub"]
    flushes = [spec for spec in shared if spec.name in ("flushall", "flushdb")]
    others = [spec for spec in shared if spec not in flushes]
    needed: set[str] = set()
    for seed in range(SEEDS):
        rng = random.Random(seed)
        commands = Commands(rng, others)
        with ExitStack() as stack:
            twins = [stack.enter_context(Twin(pair, needed)) for _ in range(3)]
            twins[0].exchange([[b"FLUSHALL"]])
            sent = 0
            try:
                while sent < COMMANDS_A_SEED:
                    twin = rng.choice(twins)
                    batch = some_commands(rng, commands, twin.in_transaction)
                    if rng.random() < 0.005:
                        batch.append(commands.of(rng.choice(flushes)))
                    twin.exchange(batch)
                    sent += len(batch)
            except Difference as difference:
                difference.add_note(f"seed {seed}")
                raise
    assert set(by_command(TOLERATED)) <= needed, "a tolerance is not needed"


def some_commands(rng: random.Random, commands: Commands, in_transaction: bool) -> list[Words]:
    """A pipeline's worth, with a transaction's beginning or end."""
    batch = [commands.next() for _ in range(rng.choice([1, 1, 1, 5, 30]))]
    if in_transaction:
        return [*batch, rng.choice([[b"EXEC"], [b"EXEC"], [b"exec"], [b"DISCARD"], [b"MULTI"]])]
    if rng.random() < 0.1:
        return [[b"WATCH", rng.choice(KEYS)], [b"MULTI"], *batch][rng.randrange(2) :]
    return batch


class Listener:
    """Two subscribed connections, one to each server; their messages up to a ping are compared."""

    def __init__(self, pair: Pair, protocol: int) -> None:
        self._wires = [Wire(server.port) for server in pair]
        self._protocol = protocol
        self._pings = 0
        self.reset()

    def reset(self) -> None:
        """Listen to nothing."""
        for words in ([b"RESET"], [b"HELLO", b"%d" % self._protocol]):
            self.send(words)
        self.events()

    def send(self, words: Words) -> None:
        for wire in self._wires:
            wire.send(encode_command(words))

    def events(self) -> list[list[bytes]]:
        """Return the messages of redis-server and of ours."""
        self._pings += 1
        mark = b"ping %d" % self._pings
        self.send([b"PING", mark])
        return [list(self._until(wire, mark)) for wire in self._wires]

    @staticmethod
    def _until(wire: Wire, mark: bytes) -> Iterator[bytes]:
        while mark not in (frame := wire.reply()):
            yield frame

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        for wire in self._wires:
            wire.close()


def scattered(frames: list[bytes]) -> list[bytes]:
    """Return the items of some replies, in the order of their bytes, to ignore the order of replies."""
    return sorted(item for frame in frames for item in (items(frame) if frame[:1] in b"*>" else [frame]))


@pytest.mark.parametrize("seed", range(5))
def test_messages_and_confirmations_equal_those_of_redis(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    commands = Commands(rng, [spec for spec in shared_specs(pair[0]) if spec.group == "pubsub"])
    with ExitStack() as stack:
        listeners = [stack.enter_context(Listener(pair, protocol)) for protocol in (2, 3, 2, 3)]
        for _ in range(400):
            speaker = rng.choice(listeners)
            if rng.random() < 0.02:
                speaker.reset()
                continue
            words = commands.next() if rng.random() < 0.9 else rng.choice([[b"GET", b"a"], [b"PING"], [b"MULTI", b"x"]])
            speaker.send(words)
            for listener in listeners:
                theirs, ours = listener.events()
                if words[0].lower().decode("latin1") in IN_ANOTHER_ORDER:
                    theirs, ours = scattered(theirs), scattered(ours)
                assert theirs == ours, f"after {show(words)}"


def test_the_same_events_of_keys_are_published(pair: Pair) -> None:
    rng = random.Random(8)
    commands = Commands(rng, [spec for spec in shared_specs(pair[0]) if spec.group in ("string", "generic")])
    at_a_time = {b"EXAT", b"PXAT"}  # one that is past expires when it is swept, and each server sweeps in its own time
    with Listener(pair, protocol=2) as listener, Twin(pair, set()) as twin:
        for server in pair:
            with server.client() as client:
                client.config_set("notify-keyspace-events", "KEAmn")
        twin.exchange([[b"FLUSHALL"]])
        listener.send([b"PSUBSCRIBE", b"__key*__:*"])
        theirs, ours = listener.events()  # before the first command, both servers handle the subscription
        assert theirs == ours
        count = 0
        for _ in range(2000):
            words = commands.next()
            if at_a_time.isdisjoint(word.upper() for word in words):
                twin.exchange([words])
                theirs, ours = listener.events()
                assert theirs == ours, f"after {show(words)}"
                count += len(theirs)
        assert count > 2000
        for server in pair:
            with server.client() as client:
                client.config_set("notify-keyspace-events", "")


FIELDS_OF_A_COMMAND = ("name", "arity", "flags", "first key", "last key", "step", "categories")


def test_command_info_equals_that_of_redis(pair: Pair) -> None:
    allowed = table_under("Where COMMAND INFO differs")
    received = []
    for server in pair:
        with Wire(server.port) as wire:
            rows = parse(wire.ask(b"COMMAND"))
            received.append({row[0].decode(): row for row in [*rows, *(sub for row in rows for sub in row[9])]})
    there, here = received
    different = set()
    for name in sorted(there.keys() & here.keys()):
        for field, theirs, ours in zip(FIELDS_OF_A_COMMAND, there[name], here[name], strict=False):
            if (sorted(theirs) != sorted(ours)) if isinstance(theirs, list) else (theirs != ours):
                different.add((name, field))
    assert different == {(name, row.split(": ")[1]) for row in allowed for name in spread(row.split(": ")[0])}


def test_every_command_of_redis_is_here_or_listed_as_absent(pair: Pair) -> None:
    with Wire(pair[0].port) as wire:
        rows = parse(wire.ask(b"COMMAND"))
    theirs = {row[0].decode(): row[6] for top in rows for row in [top, *top[9]]}
    assert theirs.keys() <= TABLE.keys() | ABSENT.keys()
    assert not TABLE.keys() & ABSENT.keys()
    for name in theirs.keys() & ABSENT.keys():
        assert {category.removeprefix("@") for category in theirs[name]} == ABSENT[name], name
    listed = {name for names in rows_of("Commands of Redis that do not exist here") for name in spread(names[1])}
    without_their_container = {name for name in ABSENT if name.rpartition("|")[0] not in ABSENT}
    assert listed == without_their_container


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table in a section of the document, without its head."""
    section = DOCUMENT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [line.strip("|").strip().split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
