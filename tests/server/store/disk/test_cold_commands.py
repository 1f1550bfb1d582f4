"""Every command, alone and in transactions, on a server whose memory has room for few of its values: as a model of it
answers, which knows no disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import hiredis
import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from servers import RunningServer, start_server
from wire import Wire, encode_command

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.specs import SUBCOMMANDS, TABLE, Spec, find
from kvpage_server.page import DType, PageKey, encode_page, unix_ms
from tests.simulation.model.model import Model
from tests.simulation.model.pages import WRONG_TYPE
from tests.simulation.model.replies import ANYTHING, Err, May, agrees, between, fields, is_error

PAGE = 6000  # bytes of every page
SHAPE = [b"2", b"1", b"1", b"0", b"1", b"0", b"8", b"%d" % PAGE]  # of every block: 2 layers, a head, a plane
LAYERS = 2
PROTECTED = "OOM command not allowed when leased, pinned and kept values take more than"
MOST_DRIFT = 60_000  # milliseconds between the execution of a command and the model's

Words = list[bytes]


def page_key(words: Iterable[bytes]) -> bytes:
    return b"kv:" + b":".join(words)


class ColdModel(Model):
    """The simulation's model of a server whose time is real, and whose SCAN returns all keys at once."""

    def __init__(self) -> None:
        super().__init__(unix_ms, unix_ms)
        self.limited = True

    def expect(self, words: Words, found: Any = None) -> Any:
        """Return the reply to a command, and execute it in the model, unless the server's reply `found` says that a
        protected block would grow above its limit.
        """
        self.store.now = unix_ms()
        if is_error(found, PROTECTED) and self._stores_new_pages(words):
            return ANYTHING
        return self.run(tuple(words))

    def _stores_new_pages(self, words: Words) -> bool:
        """Return whether a command stores a page that does not exist, or a whole block. All pages are of PAGE bytes."""
        spec = find(words)
        pages = {key for key in self.store.living() if self.store.keys[key].page}
        return any(key.startswith(b"kv:") and key not in pages for key, _ in spec.uses_of(words[spec.words :]))

    def time(self, milliseconds: int, unit: int = 1) -> Any:
        time, drift = super().time(milliseconds, unit), MOST_DRIFT // unit
        return time if time < 0 else between(time - drift, time + drift)

    def do_scan(self, _: bytes, *options: bytes) -> Any:
        keys = set(self.store.living())
        return [b"0", May(f"all of {keys}", lambda reply: set(reply) == keys)]

    def do_sscan(self, key: bytes, *_: bytes) -> Any:
        members = self.do_smembers(key)
        return members if members is WRONG_TYPE else [b"0", members]

    def do_kvlost(self, key: bytes) -> Any:
        return fields({b"strings": []}) if self.store.get(key) else ANYTHING

    def do_object_encoding(self, key: bytes) -> Any:
        value = self.store.get(key)
        if value is None:
            return None
        if value.page or len(value.data) > 44:
            return b"raw"
        return b"int" if value.data.removeprefix(b"-").isdigit() else b"embstr"

    def do_object_freq(self, key: bytes) -> Any:
        return Err("ERR An LFU") if self.store.get(key) else None


def parse(reply: bytes) -> Any:
    reader = hiredis.Reader()
    reader.feed(reply)
    return reader.gets()


# -- commands ----------------------------------------------------------------------------------------------------------

requests = st.sampled_from([b"r", b"s"])
pages = st.sampled_from([b"0", b"1"])
names = st.tuples(requests, st.sampled_from([b"0", b"1", b"2"]), st.just(b"0"), pages, st.sampled_from([b"0", b"1"]))
page_keys = names.map(page_key)
keys = st.sampled_from([b"a", b"b", b"n"]) | page_keys
indices = st.sampled_from([b"kv:r:index", b"kv:s:index", b"a"])
bodies = st.integers(0, 255).map(lambda fill: bytes([fill]) * PAGE)
blocks = st.tuples(bodies, bodies).map(b"".join)
strings = st.sampled_from([b"7", b"short", b"long " * 200, b"longer " * 3000])
ttls = st.sampled_from([b"0", b"1000"])
amounts = st.sampled_from([b"1", b"-5", b"70"])
positions = st.sampled_from([b"0", b"-1", b"3", b"63", b"64", b"-7000", b"900"])
later = [b"1000"]
NEW_PAGE = [b"8", b"1", b"%d" % PAGE]  # dtype, page_size, head_dim


@st.composite
def blobs(draw: Any) -> tuple[bytes, bytes]:
    key = draw(page_keys)
    return key, encode_page(PageKey.parse(key), draw(bodies), dtype=DType.UINT8, page_size=1, head_dim=PAGE)


@st.composite
def new_pages(draw: Any) -> Words:
    return [*draw(names), *NEW_PAGE, draw(ttls), draw(bodies)]


some_pages = st.lists(pages, max_size=2, unique=True)
pairs = blobs() | st.tuples(keys, strings)


def words(*parts: Any) -> st.SearchStrategy[Words]:
    """Words that are those of some strategies and constants, one after the other."""
    drawn = [part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts]
    return st.tuples(*drawn).map(lambda found: [word for part in found for word in _listed(part)])


def _listed(part: Any) -> Words:
    return [part] if isinstance(part, bytes) else [word for inner in part for word in _listed(inner)]


def some(what: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[Words]:
    return st.lists(what, min_size=1, max_size=most).map(_listed)


def counted(what: st.SearchStrategy[Any], most: int = 4) -> st.SearchStrategy[Words]:
    return st.lists(what, min_size=1, max_size=most).map(lambda found: [b"%d" % len(found), *_listed(found)])


def maybe(*options: Words) -> st.SearchStrategy[Words]:
    return st.sampled_from([[], *options])


ARGUMENTS: dict[str, st.SearchStrategy[Words]] = {
    "set": words(pairs, maybe([b"NX"], [b"XX"], [b"GET"], [b"EX", b"1000"], [b"KEEPTTL"], [b"XX", b"GET"])),
    "setex": words(keys, later, strings),
    "psetex": words(keys, [b"1000000"], strings),
    "setnx": words(pairs),
    "getset": words(pairs),
    "getex": words(keys, maybe([b"EX", b"1000"], [b"PERSIST"])),
    "mset": some(pairs),
    "msetnx": some(pairs),
    "getrange": words(keys, positions, positions),
    "substr": words(keys, positions, positions),
    "incrby": words(keys, amounts),
    "decrby": words(keys, amounts),
    **dict.fromkeys(("mget", "del", "unlink", "touch"), some(keys)),
    "exists": some(keys | indices),
    **dict.fromkeys(("get", "getdel", "strlen", "incr", "decr", "persist", "memory|usage"), words(keys)),
    **dict.fromkeys(("object|encoding", "object|refcount", "object|idletime", "object|freq"), words(keys)),
    **dict.fromkeys(("type", "ttl", "pttl", "expiretime", "pexpiretime"), words(keys | indices)),
    **dict.fromkeys(("expire", "pexpire"), words(keys, st.sampled_from([b"1000000", b"-1"]))),
    **dict.fromkeys(("expireat", "pexpireat"), words(keys, st.sampled_from([b"4000000000000"]))),
    "keys": words(b"*"),
    "kvlost": words(keys),
    "scan": words(b"0", b"COUNT", b"1000"),
    **dict.fromkeys(("randomkey", "dbsize", "flushall", "flushdb"), words()),
    **dict.fromkeys(("smembers", "scard"), words(indices)),
    "sismember": words(indices, keys),
    "sscan": words(indices, b"0", b"COUNT", b"1000"),
    "kvpageset": new_pages(),
    "kvpagemset": counted(new_pages()),
    **dict.fromkeys(("kvpageget", "kvpageexists", "kvpagestat"), words(names)),
    **dict.fromkeys(("kvpagemget", "kvpagemexists"), counted(names)),
    "kvpagewhy": words(names) | words(requests),
    **dict.fromkeys(("kvpagedel", "kvpageverify", "kvpagepin", "kvpageunpin"), words(requests, some_pages)),
    "kvpageindex": words(requests),
    "kvpageprefix": words(
        st.sampled_from([b"2", b"3"]),
        b"0",
        counted(st.tuples(requests, pages)),
        words() | words(b"LENGTHS", counted(st.tuples(requests, pages, st.sampled_from([b"1", b"2"])))),
    ),
    "kvpagekeep": words(b"", b"1", b"1000", some(keys)),
    "kvpagelease": words(requests, b"1", some_pages),
    "kvblockset": words(requests, pages, SHAPE, blocks),
    **dict.fromkeys(("kvblockget", "kvblockexists"), words(requests, pages)),
    "kvblockmget": counted(st.tuples(requests, pages)),
}
TRANSACTIONS = {"multi", "exec", "discard", "watch", "unwatch"}  # see `CommandsMachine.transact`
APART = {"shutdown", "quit", "reset", "monitor", "subscribe", "psubscribe"}  # after these the connection is another
ELSEWHERE = {"kvblocksetcoded", "kvblockmgetcoded"}  # tests of coded blocks have their replies
ELSEWHERE |= {
    f"kvmap|{name}" for name in ("area", "attach", "blockmget", "copy", "mget", "release", "socket")
}  # they need a unix socket
APART |= {"auth"}  # wrong passwords are slowed down


def touches_keys(spec: Spec) -> bool:
    return bool(spec.keys[0] or spec.uses or spec.flags & {"write", "readonly"})


def test_every_command_for_keys_is_compared_with_the_model() -> None:
    """A new one needs its arguments here, and its answer in the model."""
    known = ARGUMENTS.keys() | TRANSACTIONS | ELSEWHERE
    assert {name for name, spec in TABLE.items() if touches_keys(spec)} <= known
    assert known <= TABLE.keys()
    assert all(hasattr(ColdModel, f"do_{name.replace('|', '_')}") for name in ARGUMENTS)


def called(name: str, args: Words) -> Words:
    return [*(word.encode() for word in name.split("|")), *args]


def _of_another(name: str) -> Words:
    """Return the shortest call of a command without keys; its reply does not matter here."""
    spec = TABLE[name]
    return called(name, [b"x"] * (abs(spec.arity) - spec.words))


OTHERS = sorted(TABLE.keys() - ARGUMENTS.keys() - TRANSACTIONS - APART - SUBCOMMANDS.keys())
WEIGHED = [name for name in sorted(ARGUMENTS) for _ in range(1 if name.startswith("flush") else 6)]
commands = st.sampled_from(WEIGHED).flatmap(lambda name: ARGUMENTS[name].map(lambda args: called(name, args)))
others = st.sampled_from(OTHERS).map(_of_another)

# -- the machine -------------------------------------------------------------------------------------------------------

MEMORY = "40kb"  # for some 250 KB of values
PRESS = [b"set", b"press", b"p" * 30_000]  # later commands find memory full of this value


class CommandsMachine(RuleBasedStateMachine):
    """A server, the model, and two connections."""

    server: RunningServer

    def __init__(self) -> None:
        super().__init__()
        self.model = ColdModel()
        self.wire, self.other = Wire(self.server.port), Wire(self.server.port)
        self.wire.ask(b"FLUSHALL")

    def check(self, words: Words, reply: bytes) -> None:
        found = parse(reply)
        expected = self.model.expect(words, found)
        assert agrees(expected, found), f"{shown(words)} answered {shown([reply])}, not {expected!r:.200}"

    @initialize(single=st.booleans())
    def fill(self, single: bool) -> None:
        """Store a value of every kind on disk only: blocks stored whole, or page by page, strings long and short."""
        for number, (req, page) in enumerate(product((b"r", b"s"), (b"0", b"1"))):
            body = bytes([number]) * PAGE
            if single and req == b"s":
                whole = [[req, layer, b"0", page, b"0", *NEW_PAGE, b"0", body] for layer in (b"0", b"1")]
                words = [b"kvpagemset", b"2", *_listed(whole)]
            else:
                words = [b"kvblockset", req, page, *SHAPE, body * LAYERS]
            self.check(words, self.wire.ask(*words))
        words = [b"mset", b"a", b"longer " * 3000, b"b", b"long " * 900, b"n", b"7"]
        self.check(words, self.wire.ask(*words))
        self.press()

    @rule(words=commands)
    def command(self, words: Words) -> None:
        self.check(words, self.wire.ask(*words))

    @rule(word=st.sampled_from([b"ON", b"OFF"]))
    def look(self, word: bytes) -> None:
        """Who only looks is answered alike."""
        assert self.wire.ask(b"CLIENT", b"NO-TOUCH", word) == b"+OK\r\n"

    @rule()
    def press(self) -> None:
        """Make earlier values leave memory: a hold, or a queued write, would keep them there."""
        for _ in range(3):
            self.check(PRESS, self.wire.ask(*PRESS))
        self.wire.ask(b"kvpageunpin", b"r")
        self.wire.ask(b"kvpageunpin", b"s")

    @rule(words=others)
    def another(self, words: Words) -> None:
        assert b"internal error" not in self.wire.ask(*words)

    @rule(batch=st.lists(commands, min_size=2, max_size=8))
    def pipeline(self, batch: list[Words]) -> None:
        self.wire.send(b"".join(map(encode_command, batch)))
        for words in batch:
            self.check(words, self.wire.reply())

    @rule(
        batch=st.lists(commands | others, min_size=1, max_size=8),
        press=st.booleans(),
        watched=st.none() | keys,
        between=st.none() | commands,
        discard=st.integers(0, 9).map(lambda n: n == 0),
    )
    def transact(
        self, batch: list[Words], press: bool, watched: bytes | None, between: Words | None, discard: bool
    ) -> None:
        """Run commands as a transaction, after another connection's, which may change a watched key."""
        batch = [words for words in batch if "no_multi" not in find(words).flags]
        if press:
            self.press()
        if watched is not None:
            assert self.wire.ask(b"WATCH", watched) == b"+OK\r\n"
        before = dict(self.model.store.keys)
        if between is not None:
            self.check(between, self.other.ask(*between))
        self.wire.send(b"".join(map(encode_command, [[b"MULTI"], *batch])))
        assert self.wire.reply() == b"+OK\r\n"
        assert {self.wire.reply() for _ in batch} <= {b"+QUEUED\r\n"}
        if discard:
            assert self.wire.ask(b"DISCARD") == b"+OK\r\n"
            return
        replies = parse(self.wire.ask(b"EXEC"))
        if replies is None:  # a value that was written again as it was has changed, too
            assert watched is not None
            assert between is not None
            assert _may_change(between, watched)
            return
        if watched is not None:
            assert self.model.store.keys.get(watched) == before.get(watched), "what was watched has changed"
        assert len(replies) == len(batch)
        for words, found in zip(batch, replies, strict=True):
            expected = self.model.expect(words, found) if find(words).name in ARGUMENTS else ANYTHING
            assert agrees(expected, found), f"{shown(words)} answered {found!r:.200}, not {expected!r:.200}"

    def teardown(self) -> None:
        """Check that the keys and values match the model."""
        self.check([b"keys", b"*"], self.wire.ask(b"KEYS", b"*"))
        for key in [*self.model.store.living()]:
            self.check([b"get", key], self.wire.ask(b"GET", key))
        self.wire.close()
        self.other.close()


def _may_change(words: Words, key: bytes) -> bool:
    spec = find(words)
    if "write" not in spec.flags:
        return False
    named = [name for name, _ in spec.uses_of(words[spec.words :])]
    return not named or any(key.startswith(name) for name in named)


def shown(words: Words) -> str:
    return " ".join(repr(word[:60]) for word in words)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    options = ("--store", "tiered", "--appendfsync", "always", "--maxmemory", MEMORY)
    with start_server(*options, directory=tmp_path) as running:
        yield running


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("examples", [20, pytest.param(1000, marks=pytest.mark.soak)])
def test_commands_and_transactions_find_values_on_disk(server: RunningServer, examples: int) -> None:
    machine = type("Machine", (CommandsMachine,), {"server": server})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    with server.client() as client:
        hypothesis.stateful.run_state_machine_as_test(
            machine, settings=settings(max_examples=examples, stateful_step_count=30, suppress_health_check=checks)
        )
        info = client.info("kvpage")
    print(f"{info['disk_fetched']} values were fetched, {info['disk_dropped_from_memory']} left memory")
    assert info["disk_fetched"] > examples // 4  # fewer on a busy machine, where values leave memory later
    assert info["disk_corrupt"] == 0
