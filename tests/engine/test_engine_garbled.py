"""No reply from the network raises out of the page tier, or is taken for a context.

`make soak` has the conversation of the README go on for ten minutes behind a proxy in bad weather.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import redis
from pools import pool_of
from proxy import Weather, start_proxy
from servers import RunningServer
from test_engine_pages import MODEL, SPEC, TOKENS, context, held, letter_tokenizer, same
from waiting import PATIENCE

# isort: split
from engine.batch_engine import BlockPoolBatchEngine
from engine.persistent.errors import PersistentError
from engine.persistent.storage import PersistentStore
from engine.pool import BlockPool
from engine.tiers.pages import PageTier
from engine.tiers.server.connection import CircuitBreaker

SECONDS = float(os.environ.get("WEATHER_SECONDS", 600))  # under `make soak`
LINES = [
    *(b"", b"+", b"-", b":", b"$", b"*", b"%", b">", b"_", b"=", b"~", b"(", b",", b"#", b"!", b"|", b"\x00"),
    *(b"HTTP/1.1 400", b"*0", b"*1", b"*-1", b"*1\r\n*1\r\n*1\r\n:1", b"*2\r\n+OK\r\n+OK", b"*9\r\n:1", b"$-1"),
    *(b"$-7", b"$x", b"$0\r\n", b"$2\r\nab", b"+OK", b"+QUEUED", b"-ERR no", b"-", b"-MOVED 5 a:1", b":1", b":-5"),
    *(b":99999999999999999999", b":1x", b"#t", b",nan", b"%1\r\n+a\r\n+b", b"%1\r\n*0\r\n+b", b">2\r\n+a\r\n+b"),
    *(b"(12345678901234567890", b"=3\r\ntxt", b"*1\r\n%1\r\n+a\r\n:1"),
]  # fmt: skip

GREETINGS = {
    b"HELLO": b"%1\r\n$5\r\nproto\r\n:3",
    b"SETINFO": b"+OK",
    b"kvblockmget": b"*2\r\n*1\r\n+kvpagemget\r\n*1\r\n+kvblockmget",
}


pool = pool_of(32)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A breaker that never opens: the server is asked every time."""
    monkeypatch.setattr(CircuitBreaker, "allows", lambda self: True)


def everything(tier: PageTier, pool: BlockPool) -> None:
    """All that a page tier can be asked. The result may only be the saved context, and no exception."""
    for tokens in (None, TOKENS):
        loaded = tier.load("alice", tokens)
        assert loaded is None or same(loaded, context(), len(loaded))
        held(pool, loaded)
    tier.save(context())
    tier.publish(context())
    tier.fork("alice", "twin")
    tier.agents()
    tier.has("alice")
    tier.tokens_of("alice")
    tier.loop.run(tier.sealed(["0" * 32, "1" * 32]))
    tier.loop.run(tier.claim("name", 1))
    tier.loop.run(tier.renew("name", 1))
    tier.loop.run(tier.release("name"))
    tier.delete("twin")


@contextmanager
def answering(line: Callable[[int], bytes], *, greets: bool = True) -> Iterator[str]:
    """The URL of a server that answers whatever it is asked with one line after another, by number; with `greets` not
    before it has greeted as it should."""
    count = itertools.count()

    def answer(client: socket.socket) -> None:
        with client, suppress(OSError):
            while asked := client.recv(1 << 16):
                greeting = next((words for name, words in GREETINGS.items() if name in asked), None) if greets else None
                client.sendall((greeting or line(next(count))) + b"\r\n")

    def serve(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}"
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(line)[2:-1])
@pytest.mark.parametrize("greets", [True, False], ids=["greets", "babbles"])
@pytest.mark.usefixtures("impatient")
def test_an_answer_of_any_kind_is_a_miss(pool: BlockPool, line: bytes, greets: bool) -> None:
    """To every question the same one."""
    with answering(lambda _: line, greets=greets) as url:
        tier = PageTier(url, SPEC, pool, deadline=0.05)
        everything(tier, pool)
        reasons = {*tier.misses, *tier.unsaved, *tier.unasked}
        assert reasons
        assert reasons <= {"garbled", "refused", "slow", "down", "absent", "manifest"}
        tier.close()


@pytest.mark.usefixtures("impatient")
def test_answers_of_any_kinds_are_misses(pool: BlockPool) -> None:
    """One after the other, hundreds of them, by chance."""
    rng = random.Random(8)
    with answering(lambda _: rng.choice(LINES)) as url:
        tier = PageTier(url, SPEC, pool, deadline=0.02)
        for _ in range(30):
            everything(tier, pool)
        tier.close()


@pytest.mark.parametrize("where", ["answers", "questions"])
@pytest.mark.usefixtures("impatient")
def test_every_bit_of_a_conversation_may_turn_over(
    server: RunningServer, client: redis.Redis, pool: BlockPool, where: str
) -> None:
    """One bit of each of its first bytes after the other: in frames, lengths, counts, keys, digests, manifests."""
    direct = PageTier(server.url, SPEC, pool)
    seen: set[str] = set()
    for at in range(0, 700, 7):
        assert direct.save(context())
        with start_proxy(server.port) as proxy:
            flip = _Flip(at, 1 << at % 8)
            proxy.weather = flip
            flip.of = where
            tier = PageTier(proxy.url, SPEC, pool, deadline=0.2)
            loaded = tier.load("alice")
            assert loaded is None or same(loaded, context(), len(loaded))
            held(pool, loaded)
            seen |= set(tier.misses)
            tier.close()
    assert len(seen) > 1
    direct.close()


class _Flip(Weather):
    """Turns over one bit, and no other."""

    def __init__(self, at: int, bit: int) -> None:
        super().__init__()
        self.at, self.bit = at, bit
        self.of = "answers"
        self._passed = {"answers": 0, "questions": 0}

    def pass_on(self, data: bytes, way: str) -> bytes:
        start = self._passed[way]
        self._passed[way] += len(data)
        if way == self.of and start <= self.at < start + len(data):
            changed = bytearray(data)
            changed[self.at - start] ^= self.bit
            return bytes(changed)
        return data


@pytest.mark.parametrize(
    "seconds", [4.0, pytest.param(SECONDS, marks=[pytest.mark.soak, pytest.mark.timeout(SECONDS + 120)])]
)
def test_the_loop_of_the_readme_survives_bad_weather(
    server: RunningServer, client: redis.Redis, seconds: float
) -> None:
    """It loads, submits, steps and saves, for several agents, while bits turn over, connections break, bytes are lost
    and late, both ways: every answer is that of an engine without a server, and nothing takes longer than it may."""
    tokenizer = letter_tokenizer()
    pool, alone = BlockPool(64), BlockPool(64)
    engine = BlockPoolBatchEngine(MODEL, tokenizer, SPEC, pool)
    reference = BlockPoolBatchEngine(MODEL, tokenizer, SPEC, alone)
    random_ = random.Random(5)
    turns, longest, slowest, found = 0, 0.0, 0.0, 0
    with start_proxy(server.port) as proxy:
        proxy.weather = Weather(random=random.Random(6))
        pages = PageTier(proxy.url, SPEC, pool, deadline=0.3, restore_within=2.0)
        end = time.monotonic() + seconds
        while time.monotonic() < end or not found:
            assert time.monotonic() < end + PATIENCE, "nothing was ever found"
            agent = f"agent-{random_.randrange(4)}"
            start = random_.randrange(6)
            prompt = TOKENS[start : start + random_.randrange(20, 400)]
            begun = time.monotonic()
            known = pages.load(agent, prompt)
            longest = max(longest, time.monotonic() - begun)
            engine.submit(agent, prompt, cache=known, max_tokens=4)
            (done,) = engine.step()
            reference.submit(agent, prompt, max_tokens=4)
            (right,) = reference.step()
            assert done.tokens == right.tokens
            found += done.tokens_reused > 0
            begun = time.monotonic()
            pages.save(done.blocks)
            slowest = max(slowest, time.monotonic() - begun)
            pool.free(done.blocks.block_ids)
            alone.free(right.blocks.block_ids)
            held(pool, known)
            turns += 1
        print(
            f"\n{turns} turns, {found} of them with something found; {dict(proxy.weather.happened)}; the longest load "
            f"took {longest:.2f} s, the longest save {slowest:.2f} s; misses {dict(pages.misses)}, "
            f"unsaved {dict(pages.unsaved)}"
        )
        pages.close()
    pool.check_empty()
    assert pages.misses["garbled"] or seconds < 20
    assert longest < 2.0 + 20.0


def test_a_persistent_store_raises_documented_errors_only() -> None:
    for line in LINES:
        with answering(lambda _, line=line: line) as url:
            store = PersistentStore(url, deadline=0.05)
            for call in (store.manifest, store.delete):
                with suppress(redis.RedisError, PersistentError):
                    call("instance")
            store.close()


@pytest.mark.parametrize("seconds", [0.5])
def test_a_load_ends_at_its_limit_with_the_received_part(
    server: RunningServer, client: redis.Redis, pool: BlockPool, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Each chunk arrives in time, but not all of them do. That is no failure of the server's."""
    monkeypatch.setattr("engine.tiers.server.manifest.CHUNK_BYTES", 1)
    direct = PageTier(server.url, SPEC, pool)
    assert direct.save(context())
    direct.close()
    with start_proxy(server.port) as proxy:
        monkeypatch.setattr("engine.tiers.server.connection.CONNECTIONS", 1)
        tier = PageTier(proxy.url, SPEC, pool, restore_within=2.0)
        held(pool, tier.load("alice", TOKENS[:9]))  # is connected
        proxy.hold = 0.15
        tier._within = seconds
        begun = time.monotonic()
        loaded = tier.load("alice", TOKENS)
        assert time.monotonic() - begun < seconds + 20
        assert loaded is None or same(loaded, context(), len(loaded))
        assert held(pool, loaded) < 700
        assert tier.misses["late"] == 1
        assert tier.breaker.state == "closed"
        tier.close()


def test_a_prompt_waiting_for_its_turn_waits_for_no_server(
    server: RunningServer, client: redis.Redis, pool: BlockPool
) -> None:
    """More loads than are done at once, each of which takes a good part of the deadline: the others' has not begun."""
    direct = PageTier(server.url, SPEC, pool)
    assert direct.save(context(TOKENS[:9]))
    direct.close()
    with start_proxy(server.port) as proxy:
        tier = PageTier(proxy.url, SPEC, pool, deadline=3.0, restore_within=60.0)
        proxy.hold = 0.15
        begun = time.monotonic()
        fetches = [tier.fetch("alice") for _ in range(100)]
        for fetch in fetches:
            assert held(pool, fetch.result()) == 9
        assert time.monotonic() - begun > 3.0
        assert not tier.misses
        assert tier.breaker.opened == 0
        tier.close()
