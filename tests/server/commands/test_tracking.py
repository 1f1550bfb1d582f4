"""CLIENT TRACKING: clients that cache keys are notified of changes, as in Redis, and of nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import chain

import pytest
import redis
from servers import NO_REDIS, REDIS_SERVER, RunningServer, start_redis, start_server
from waiting import until
from wire import Wire, encode_command, parse

CHANNEL = b"__redis__:invalidate"
ALL = b"all keys"  # stands for the null that says so


class Cache:
    """A connection, and the keys of its invalidations."""

    def __init__(self, server: RunningServer, protocol: int = 3) -> None:
        self._wire = Wire(server.port)
        self._marks = 0
        self.ask("HELLO", str(protocol))
        self.id = int(parse(self.ask("CLIENT", "ID")[-1]))

    def ask(self, *words: str | bytes) -> list[bytes]:
        """Run a command: return the frames up to its reply, with invalidations before it."""
        return self.ask_all([words])

    def ask_all(self, commands: list[tuple[str | bytes, ...]]) -> list[bytes]:
        """Run several commands together: return all frames without invalidations."""
        self._told: list[list[bytes]] = getattr(self, "_told", [])
        encoded = [[word.encode() if isinstance(word, str) else word for word in words] for words in commands]
        self._wire.send(b"".join(map(encode_command, encoded)))
        return list(self._frames())

    def _frames(self) -> Iterator[bytes]:
        """Yield frames up to the reply of a ping, without invalidations."""
        self._marks += 1
        mark = b"mark %d" % self._marks
        self._wire.send(encode_command([b"PING", mark]))
        while mark not in (frame := self._wire.reply()):
            keys = invalidated_by(frame)
            if keys is None:
                yield frame
            else:
                self._told.append(keys)

    def invalidated(self) -> list[bytes]:
        """Return the invalidated keys since the last call, in order of their bytes; repeated keys are repeated."""
        self.ask_all([])
        received, self._told = self._told, []
        return sorted(key for keys in received for key in keys)

    def close(self) -> None:
        self._wire.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def invalidated_by(frame: bytes) -> list[bytes] | None:
    """Return the keys that a frame invalidates, or the marker for all; None for any other frame."""
    if frame.startswith(b">2\r\n$10\r\ninvalidate\r\n"):
        keys = parse(frame)[1]
    elif frame.startswith((b"*3\r\n$7\r\nmessage\r\n", b">3\r\n$7\r\nmessage\r\n")) and CHANNEL in frame:
        keys = parse(frame)[2]
    else:
        return None
    return [ALL] if keys is None else list(keys)


@pytest.fixture
def caches(server: RunningServer) -> Iterator[tuple[Cache, Cache]]:
    """Yield a connection that caches, and one that writes."""
    with Cache(server) as cache, Cache(server) as writer:
        writer.ask("FLUSHALL")
        yield cache, writer


PAGE = ("r", "0", "0", "0", "0")
PAGE_KEY = b"kv:r:0:0:0:0"
BLOCK = ("r", "0", "1", "1", "1", "0", "1", "0", "1", "2", b"abcd")
SET_PAGE = ("KVPAGESET", *PAGE, "1", "1", "2", "0", b"abcd")


class TestWhatIsTold:
    def test_a_change_is_sent_once_to_each_reader(self, caches: tuple[Cache, Cache]) -> None:
        cache, writer = caches
        writer.ask("MSET", "a", "1", "b", "2")
        cache.ask("CLIENT", "TRACKING", "ON")
        assert cache.invalidated() == []
        cache.ask("MGET", "a", "b", "absent")
        writer.ask("SET", "a", "2")
        writer.ask("SET", "a", "3")
        assert cache.invalidated() == [b"a"]
        writer.ask("DEL", "b", "a")
        writer.ask("SET", "absent", "1")
        assert cache.invalidated() == [b"absent", b"b"]
        cache.ask("GET", "absent")
        cache.ask("CLIENT", "TRACKING", "OFF")
        writer.ask("SET", "absent", "2")
        assert cache.invalidated() == []

    @pytest.mark.parametrize(
        "change",
        [
            SET_PAGE,
            ("KVPAGEMSET", "1", *SET_PAGE[1:]),
            ("KVBLOCKSET", *BLOCK),
            ("KVPAGEDEL", "r"),
            ("KVPAGEDEL", "r", "0"),
            ("DEL", PAGE_KEY),
            ("SET", PAGE_KEY, "text"),
            ("EXPIRE", PAGE_KEY, "100"),
            ("PEXPIRE", PAGE_KEY, "0"),
            ("FLUSHALL",),
        ],
        ids=lambda words: " ".join(str(word) for word in words[:3]),
    )
    @pytest.mark.parametrize("stored", ["page by page", "as a block"])
    def test_every_kind_of_page_change_notifies_its_readers(
        self, caches: tuple[Cache, Cache], change: tuple[str | bytes, ...], stored: str
    ) -> None:
        cache, writer = caches
        writer.ask(*(SET_PAGE if stored == "page by page" else ("KVBLOCKSET", *BLOCK)))
        cache.ask("CLIENT", "TRACKING", "ON")
        reads = {
            ("GET", PAGE_KEY): PAGE_KEY,
            ("KVPAGEGET", *PAGE): PAGE_KEY,
            ("KVPAGEMGET", "1", *PAGE): PAGE_KEY,
            ("KVBLOCKGET", "r", "0"): b"kv:r:",
            ("KVPAGEINDEX", "r"): b"kv:r:",
            ("SMEMBERS", "kv:r:index"): b"kv:r:index",
        }
        for read in reads:
            cache.ask(*read)
        assert cache.invalidated() == []
        writer.ask(*change)
        assert cache.invalidated() == ([ALL] if change == ("FLUSHALL",) else sorted(set(reads.values())))
        writer.ask(*SET_PAGE)
        assert cache.invalidated() == []

    def test_a_page_missing_in_a_new_whole_block_has_changed(
        self, server: RunningServer, caches: tuple[Cache, Cache]
    ) -> None:
        cache, writer = caches
        other = b"kv:r:0:0:0:1"
        writer.ask("KVPAGESET", "r", "0", "0", "0", "1", *SET_PAGE[6:])
        cache.ask("CLIENT", "TRACKING", "ON")
        cache.ask("GET", other)
        with server.client() as client, client.pipeline() as watching:
            watching.watch(other)
            writer.ask("KVBLOCKSET", *BLOCK)
            assert cache.invalidated() == [other]
            watching.multi()
            watching.get(other)
            with pytest.raises(redis.WatchError):
                watching.execute()
            assert not client.exists(other)

    def test_a_new_page_changes_reads_of_its_request_only(self, caches: tuple[Cache, Cache]) -> None:
        cache, writer = caches
        writer.ask(*SET_PAGE)
        cache.ask("CLIENT", "TRACKING", "ON")
        cache.ask("GET", PAGE_KEY)
        cache.ask("SCARD", "kv:r:index")
        cache.ask("SCARD", "kv:s:index")
        writer.ask("KVPAGESET", "r", "0", "0", "1", "0", *SET_PAGE[6:])
        assert cache.invalidated() == [b"kv:r:index"]

    def test_expiry_and_eviction_notify_even_their_cause(self) -> None:
        with start_server("--maxmemory", "4mb") as server, Cache(server) as cache, server.client() as client:
            cache.ask("CLIENT", "TRACKING", "ON", "NOLOOP")
            cache.ask("SET", "short", "1", "PX", "50")
            cache.ask("SET", "evicted", bytes(100_000))
            cache.ask("MGET", "short", "evicted")
            for i in range(60):
                cache.ask("SET", f"key:{i}", bytes(100_000))
            assert client.info("stats")["evicted_keys"] > 0
            while client.exists("short"):
                pass
            assert cache.invalidated() == [b"evicted", b"short"]

    def test_values_that_leave_memory_for_the_disk_have_not_changed(self) -> None:
        with start_server("--store", "tiered", "--maxmemory", "8mb") as server, Cache(server) as cache:
            cache.ask("CLIENT", "TRACKING", "ON")
            cache.ask("SET", "first", bytes(1_000_000))
            cache.ask("GET", "first")
            with server.client() as client:
                client.save()
                for i in range(20):
                    client.set(f"key:{i}", bytes(1_000_000))
                    client.save()
                assert client.info("kvpage")["disk_dropped_from_memory"] > 0
            assert cache.invalidated() == []

    def test_own_changes_follow_their_reply_or_are_not_sent(self, server: RunningServer) -> None:
        with Cache(server) as cache:
            cache.ask("CLIENT", "TRACKING", "ON")
            cache.ask_all([("GET", "own"), ("SET", "own", "1")])
            assert cache.invalidated() == [b"own"]
            cache.ask("CLIENT", "TRACKING", "ON", "NOLOOP")
            cache.ask_all([("GET", "own"), ("SET", "own", "2"), ("MULTI",), ("GET", "own"), ("DEL", "own"), ("EXEC",)])
            assert cache.invalidated() == []

    @pytest.mark.parametrize("start", [start_server, *([start_redis] if REDIS_SERVER else [])])
    def test_own_changes_are_sent_before_the_next_reply(
        self, start: Callable[[], AbstractContextManager[RunningServer]]
    ) -> None:
        """The same in Redis and Valkey, also for commands that the server receives together."""
        transaction = [[b"MULTI"], [b"GET", b"k"], [b"SET", b"k", b"3"], [b"EXEC"]]
        reads_and_writes = [[b"GET", b"k"], [b"SET", b"k", b"1"], [b"PING"], [b"GET", b"k"], [b"SET", b"k", b"2"]]
        told = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n"
        expected = b"_\r\n+OK\r\n" + told + b"+PONG\r\n$1\r\n1\r\n+OK\r\n" + told
        expected += b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n$1\r\n2\r\n+OK\r\n" + told + b"$3\r\nend\r\n"
        with start() as server, Wire(server.port) as wire:
            wire.ask(b"HELLO", b"3")
            wire.ask(b"CLIENT", b"TRACKING", b"ON")
            wire.send(b"".join(map(encode_command, [*reads_and_writes, *transaction, [b"ECHO", b"end"]])))
            received = b""
            while not received.endswith(b"end\r\n"):
                received += wire.reply()
        assert received == expected

    def test_a_client_that_changed_all_keys_gets_no_empty_message(self, server: RunningServer) -> None:
        with Cache(server) as cache:
            cache.ask("CLIENT", "TRACKING", "ON", "BCAST", "NOLOOP")
            cache.ask("SET", "own", "1")
            cache.ask_all([])
            assert cache._told == []

    def test_an_expiry_during_an_own_write_is_reported(self) -> None:
        with start_server() as server, Cache(server) as cache:
            cache.ask("CLIENT", "TRACKING", "ON", "BCAST", "NOLOOP", "PREFIX", "short")
            cache.ask("SET", "short", "1", "PX", "1")
            time.sleep(0.01)
            cache.ask("SET", "short", "2")
            assert cache.invalidated() == [b"short"]

    @pytest.mark.parametrize(
        "refused", [("NOSUCH",), ("GET",), ("CLIENT", "NOSUCH"), ("EXEC", "x")], ids=lambda words: " ".join(words)
    )
    def test_caching_ends_with_a_refused_command(self, caches: tuple[Cache, Cache], refused: tuple[str, ...]) -> None:
        cache, writer = caches
        cache.ask("CLIENT", "TRACKING", "ON", "OPTOUT")
        cache.ask_all([("CLIENT", "CACHING", "NO"), refused, ("GET", "kept")])
        writer.ask("SET", "kept", "1")
        assert cache.invalidated() == [b"kept"]
        cache.ask_all([("CLIENT", "CACHING", "NO"), ("CLIENT", "TRACKING"), ("GET", "kept")])
        writer.ask("SET", "kept", "2")
        assert cache.invalidated() == []

    def test_caching_applies_to_all_parts_of_a_command(self, caches: tuple[Cache, Cache]) -> None:
        cache, writer = caches
        keys = [b"part:%d" % i for i in range(1500)]
        cache.ask("CLIENT", "TRACKING", "ON", "OPTIN")
        cache.ask_all([("CLIENT", "CACHING", "YES"), ("MGET", *keys), ("GET", "other")])
        writer.ask("MSET", "other", "1", *[word for key in keys[:500] for word in (key, "1")])
        assert cache.invalidated() == sorted(keys[:500])
        writer.ask("MSET", *[word for key in keys[1000:] for word in (key, "1")])
        assert cache.invalidated() == sorted(keys[1000:])

    def test_many_changes_are_sent_in_few_broadcast_messages(self, caches: tuple[Cache, Cache]) -> None:
        cache, writer = caches
        cache.ask("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "many:")
        keys = [f"many:{i}" for i in range(500)]
        writer.ask("MSET", *[word for key in keys for word in (key, "1")])
        cache.ask_all([])
        assert len(cache._told) == 1
        assert cache.invalidated() == sorted(key.encode() for key in keys)

    @pytest.mark.parametrize(
        ("mode", "word", "received"),
        [("OPTIN", "YES", True), ("OPTIN", None, False), ("OPTOUT", "NO", False), ("OPTOUT", None, True)],
    )
    def test_caching_applies_to_all_parts_and_no_later_command(
        self, caches: tuple[Cache, Cache], mode: str, word: str | None, received: bool
    ) -> None:
        cache, writer = caches
        keys = [b"long:%d" % i for i in range(1500)]
        cache.ask("CLIENT", "TRACKING", "ON", mode)
        asked = [("CLIENT", "CACHING", word)] if word else []
        cache.ask_all([*asked, ("MGET", *keys), ("GET", "after")])
        changed = keys[::100]
        for key in (*changed, b"after"):
            writer.ask("SET", key, "1")
        assert cache.invalidated() == sorted(
            [*(changed if received else ()), *([b"after"] if mode == "OPTOUT" else ())]
        )


class TestWhoIsTold:
    def test_resp2_is_notified_on_another_connection(self, server: RunningServer) -> None:
        with Cache(server, 2) as cache, Cache(server, 2) as listener, Cache(server) as writer:
            listener.ask("SUBSCRIBE", CHANNEL)
            assert cache.ask("CLIENT", "TRACKING", "ON", "REDIRECT", str(listener.id)) == [b"+OK\r\n"]
            cache.ask("GET", "redirected")
            writer.ask("SET", "redirected", "1")
            assert listener.invalidated() == [b"redirected"]
            writer.ask("FLUSHALL")
            assert listener.invalidated() == [ALL]
            assert cache.invalidated() == []

    def test_a_redirection_to_a_closed_client_is_reported_broken(self, server: RunningServer) -> None:
        with Cache(server) as cache, Cache(server) as writer, server.client() as client:
            with Cache(server) as listener:
                cache.ask("CLIENT", "TRACKING", "ON", "REDIRECT", str(listener.id))
                assert cache.ask("CLIENT", "GETREDIR") == [b":%d\r\n" % listener.id]
                [line] = [it for it in client.client_list() if it["id"] == str(cache.id)]
                assert (line["flags"], line["redir"]) == ("t", str(listener.id))
            cache.ask("GET", "lost")
            writer.ask("SET", "lost", "1")
            assert cache.ask("PING") == [b">2\r\n$21\r\ntracking-redir-broken\r\n:%d\r\n" % listener.id, b"+PONG\r\n"]
            [line] = [it for it in client.client_list() if it["id"] == str(cache.id)]
            assert line["flags"] == "tR"
            assert b"broken_redirect" in cache.ask("CLIENT", "TRACKINGINFO")[0]

    def test_no_client_is_notified_of_unreadable_keys(self, server: RunningServer) -> None:
        with server.client() as client, Cache(server) as admin, ExitStack() as stack:
            for name in ("tenantA", "tenantB"):
                client.acl_setuser(name, enabled=True, nopass=True, keys=[f"kv:{name}.*"], commands=["+@all"])
            try:
                a, b, other = (stack.enter_context(Cache(server)) for _ in range(3))
                for cache, name in ((a, "tenantA"), (b, "tenantB"), (other, "tenantA")):
                    cache.ask("AUTH", name, "")
                a.ask("CLIENT", "TRACKING", "ON", "BCAST")
                b.ask("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "kv:")
                other.ask("CLIENT", "TRACKING", "ON")
                other.ask("KVPAGEGET", "tenantA.x", "0", "0", "0", "0")
                other.ask("KVPAGEINDEX", "tenantA.x")
                admin.ask("KVPAGESET", "tenantA.x", *SET_PAGE[2:])
                admin.ask("KVBLOCKSET", "tenantB.x", *BLOCK[1:])
                admin.ask("SET", "other", "1")
                assert a.invalidated() == [b"kv:tenantA.x:0:0:0:0"]
                assert b.invalidated() == [b"kv:tenantB.x:0:0:0:0"]
                assert other.invalidated() == [b"kv:tenantA.x:", b"kv:tenantA.x:0:0:0:0"]
                refused = [b"-ERR The client ID you want redirect to does not exist\r\n"]
                b.ask("CLIENT", "TRACKING", "OFF")
                assert b.ask("CLIENT", "TRACKING", "ON", "REDIRECT", str(a.id)) == refused
                other.ask("KVPAGEGET", "tenantA.x", "0", "0", "0", "0")
                client.acl_setuser("tenantA", reset_keys=True, keys=["kv:tenantA.y*"])
                admin.ask("DEL", "kv:tenantA.x:0:0:0:0")
                assert a.invalidated() == other.invalidated() == []
            finally:
                client.acl_deluser("tenantA", "tenantB")


class TestWhatItCosts:
    def test_no_more_keys_are_noted_than_allowed(self) -> None:
        with start_server("--tracking-table-max-keys", "100") as server, Cache(server) as cache:
            cache.ask("CLIENT", "TRACKING", "ON")
            for i in range(250):
                cache.ask("GET", f"key:{i}")
            assert cache.invalidated() == sorted(b"key:%d" % i for i in range(150))
            with server.client() as client:
                received = client.info("stats")
                assert (received["tracking_total_keys"], received["tracking_total_items"]) == (100, 100)
                assert client.info("clients")["tracking_clients"] == 1

    def test_a_closed_client_leaves_little_memory(self, server: RunningServer) -> None:
        with Cache(server) as stays, server.client() as client:
            client.flushall()
            stays.ask("CLIENT", "TRACKING", "ON")
            for _ in range(100):
                with Cache(server) as cache:
                    cache.ask("CLIENT", "TRACKING", "ON")
                    cache.ask("GET", "popular")
                    cache.ask("CLIENT", "TRACKING", "ON", "NOLOOP")
            assert client.info("stats")["tracking_total_items"] < 10
            with Cache(server) as cache:
                cache.ask("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", "a", "PREFIX", "b")
                assert client.info("stats")["tracking_total_prefixes"] == 2
            stays.close()
            names = ("tracking_clients", "tracking_total_keys", "tracking_total_items", "tracking_total_prefixes")
            until(lambda: not any((received := client.info())[name] for name in names))


KEYS = ["a", "b", "user:1", "user:2", "kv:r:0:0:0:0"]
READS = ["GET {}", "MGET {} {}", "STRLEN {}", "EXISTS {} {}", "TTL {}", "GETRANGE {} 0 -1", "TYPE {}"]
WRITES = [
    *("SET {} 1", "SET {} 1 EX 100", "SET {} 1 NX", "DEL {} {}", "INCR {}", "EXPIRE {} 100", "PERSIST {}"),
    *("MSET {} 1 {} 2", "GETDEL {}", "GETEX {} EX 100", "GETSET {} 1", "UNLINK {}", "PEXPIRE {} 0", "SETNX {} 1"),
]
MODES = ["", "BCAST", "OPTIN", "OPTOUT", "NOLOOP", "PREFIX user:", "PREFIX us", "PREFIX b", "REDIRECT {id}"]


def random_words(rng: random.Random) -> str:
    """A command; `{id}` stands for the id of the connection that listens."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(READS).format(*rng.choices(KEYS, k=2))
    if kind < 0.65:
        return rng.choice(WRITES).format(*rng.choices(KEYS, k=2))
    if kind < 0.75:
        return "CLIENT TRACKING ON " + " ".join(rng.choices(MODES, k=rng.randrange(4)))
    others = ["CLIENT TRACKING OFF", "CLIENT CACHING YES", "CLIENT CACHING NO", "CLIENT TRACKINGINFO"]
    others += ["CLIENT GETREDIR", "FLUSHALL", "CLIENT TRACKING", "CLIENT TRACKING on nonsense", "RESET"]
    others += ["CLIENT CACHING maybe", "CLIENT UNBLOCK 999", "CLIENT UNBLOCK 999 never", "CLIENT UNBLOCK x ERROR"]
    return rng.choice(others)


@pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)
def test_redis_sends_the_same_invalidations() -> None:
    """The same random commands of three clients to redis-server and ours: the same replies and invalidations."""
    with start_redis() as theirs, start_server() as ours:
        received = 0
        for seed in range(15):
            rng = random.Random(seed)
            with ExitStack() as stack:
                pairs = [
                    [stack.enter_context(Cache(server, protocol)) for server in (theirs, ours)]
                    for protocol in (3, 3, 2, 2)
                ]
                listeners = pairs[3]
                for listener in listeners:
                    listener.ask("FLUSHALL")
                    listener.ask("SUBSCRIBE", CHANNEL)
                sent = []
                for _ in range(200):
                    place, batch = rng.randrange(3), [random_words(rng)]
                    if rng.random() < 0.2:
                        inside = [random_words(rng) for _ in range(3)]
                        inside = [words for words in inside if words not in ("RESET", "CLIENT TRACKING OFF")]
                        batch += ["MULTI", *inside, "EXEC"]
                    if {"RESET", "CLIENT TRACKING OFF"} & {*batch}:
                        batch.append("FLUSHALL")  # Redis keeps keys that were read before, and we do not
                    sent.append(f"{place}: {'; '.join(batch)}")
                    answers = []
                    for one, listener in zip(pairs[place], listeners, strict=True):
                        frames = one.ask_all([tuple(words.format(id=listener.id).split()) for words in batch])
                        if "RESET" in batch:
                            one.ask("HELLO", "3" if place < 2 else "2")
                        answers.append([frame.replace(b":%d\r\n" % listener.id, b":id\r\n") for frame in frames])
                    assert answers[0] == answers[1], sent[-12:]
                    for there, here in pairs:
                        keys, ours_keys = set(there.invalidated()), set(here.invalidated())  # once a round is enough
                        agree = ours_keys <= keys if ALL in ours_keys else ours_keys == keys  # before all: not again
                        assert agree, f"seed {seed}: {keys} {ours_keys} after " + "\n".join(sent[-40:])
                        received += len(keys)
        assert received > 500


def test_a_reader_of_very_many_pages_gets_one_flush_message(server: RunningServer) -> None:
    """One message instead of thousands; keys that were read of other blocks stay tracked."""
    block = [b"KVBLOCKSET", b"r", b"0", b"25", b"80", b"1", b"0", b"1", b"0", b"8", b"1", b"b" * 2000]
    pages = [word for at in range(2000) for word in (b"r", b"%d" % (at // 80), b"%d" % (at % 80), b"0", b"0")]
    with Cache(server) as reader, Cache(server) as writer:
        writer.ask(*block)
        reader.ask("CLIENT", "TRACKING", "ON")
        reader.ask(b"KVPAGEMGET", b"2000", *pages)
        reader.ask("GET", "other")
        writer.ask(*block)
        assert reader.invalidated() == [ALL]
        writer.ask("SET", "other", "value")
        assert reader.invalidated() == [b"other"]


LARGE = [b"KVBLOCKSET", b"mine.r", b"0", b"1001", b"1", b"1", b"0", b"1", b"0", b"8", b"1", b"b" * 1001]
SMALLER = [b"KVBLOCKSET", b"mine.r", b"0", b"1000", b"1", b"1", b"0", b"1", b"0", b"8", b"1", b"b" * 1000]


def test_a_large_block_invalidates_all_keys_of_prefixes(server: RunningServer) -> None:
    """One message for each change, to the clients that may read some of its keys, and to no other."""
    with server.client() as admin, Cache(server) as writer:
        for user, keys in ((b"mine", b"~kv:mine.*"), (b"page", b"~kv:mine.r:7:0:0:0"), (b"theirs", b"~kv:theirs.*")):
            admin.execute_command("ACL", "SETUSER", user, "on", ">word", keys, "+@all")
        with ExitStack() as stack:

            def cache(*words: str, user: str = "default") -> Cache:
                found = stack.enter_context(Cache(server))
                if user != "default":
                    found.ask("AUTH", user, "word")
                found.ask("CLIENT", "TRACKING", "ON", *words)
                return found

            told = [
                *(cache("BCAST", user=user) for user in ("default", "mine", "page")),
                *(cache("BCAST", "PREFIX", prefix) for prefix in ("k", "kv:mine.r:", "kv:mine.r:7:")),
            ]
            untold = [cache("BCAST", user="theirs"), cache("BCAST", "PREFIX", "kv:mine.r2:"), cache()]
            for change in (LARGE, LARGE, [b"KVPAGEDEL", b"mine.r"]):
                writer.ask(*change)
                assert [one.invalidated() for one in told] == [[ALL]] * 6
                assert [one.invalidated() for one in untold] == [[]] * 3
            writer.ask(*SMALLER)
            assert [len(one.invalidated()) for one in told] == [1000, 1000, 1, 1000, 1000, 1]
            assert [one.invalidated() for one in untold] == [[]] * 3
        for user in ("mine", "page", "theirs"):
            admin.acl_deluser(user)
        admin.flushall()


def test_a_client_that_ignores_its_own_changes_gets_no_flush(server: RunningServer) -> None:
    with Cache(server) as writer, Cache(server) as other:
        writer.ask("CLIENT", "TRACKING", "ON", "BCAST", "NOLOOP")
        writer.ask(*LARGE)
        assert writer.invalidated() == []
        other.ask(*LARGE)
        assert writer.invalidated() == [ALL]


def test_a_reader_of_few_pages_of_a_large_block_gets_their_keys(server: RunningServer) -> None:
    with Cache(server) as reader, Cache(server) as other, Cache(server) as writer:
        writer.ask(*LARGE)
        reader.ask("CLIENT", "TRACKING", "ON")
        other.ask("CLIENT", "TRACKING", "ON")
        other.ask("GET", "other")
        for name in ("7:0:0:0", "1000:0:0:0", "1001:0:0:0", "0:1:0:0", "7:0:1:0"):  # the last three do not exist
            reader.ask("GET", f"kv:mine.r:{name}")
        for change in (LARGE, [b"KVPAGEDEL", b"mine.r"]):
            writer.ask(*change)
            assert reader.invalidated() == [b"kv:mine.r:1000:0:0:0", b"kv:mine.r:7:0:0:0"]
            assert other.invalidated() == []
            reader.ask("MGET", "kv:mine.r:7:0:0:0", "kv:mine.r:1000:0:0:0")


def test_long_keys_for_many_clients_invalidate_all_keys() -> None:
    """At most 8 MiB of keys are sent together; each further client gets a short message."""
    with start_server() as server, Cache(server) as writer, ExitStack() as stack:
        caches = [stack.enter_context(Cache(server)) for _ in range(6)]
        for cache in caches[:3]:
            cache.ask("CLIENT", "TRACKING", "ON", "BCAST")
        key = b"a" * (3 << 20)
        for cache in caches[3:]:
            cache.ask("CLIENT", "TRACKING", "ON")
            cache.ask("GET", key)
        writer.ask("SET", key, "value")
        received = [cache.invalidated() for cache in caches]
        assert all(received)
        assert sorted(map(len, chain(*received))) == [len(ALL)] * 4 + [len(key)] * 2
        writer.ask_all([("MULTI",), *(("SET", key + end, "value") for end in (b"", b"b", b"c")), ("EXEC",)])
        assert [cache.invalidated() for cache in caches] == [[ALL]] * 3 + [[]] * 3
        writer.ask("SET", "short", "value")
        assert [cache.invalidated() for cache in caches] == [[b"short"]] * 3 + [[]] * 3
