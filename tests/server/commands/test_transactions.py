"""MULTI and EXEC: all or nothing, nobody in between, and watched keys. What Redis answers to each misuse is compared by
the differential test."""

from __future__ import annotations

import threading
import time

import pytest
import redis
from servers import RunningServer, start_server
from waiting import until
from wire import Wire, items, parse

from kvpage_server.page import DType, PageKey, encode_page


class TestTransactions:
    def test_commands_run_at_exec_and_not_before(self, server: RunningServer, client: redis.Redis) -> None:
        with client.pipeline() as pipe, server.client() as other:
            pipe.multi()
            pipe.set("key", "1").incr("key").get("key")
            assert other.exists("key") == 0
            assert pipe.execute() == [True, 2, b"2"]

    def test_one_error_does_not_stop_the_others(self, client: redis.Redis) -> None:
        with client.pipeline() as pipe:
            replies = pipe.set("key", "text").incr("key").set("other", "1").execute(raise_on_error=False)
        assert isinstance(replies[1], redis.ResponseError)
        assert replies[::2] == [True, True]
        assert client.get("other") == b"1"

    def test_a_command_that_cannot_be_queued_spoils_all(self, server: RunningServer, client: redis.Redis) -> None:
        with Wire(server.port) as wire:
            wire.ask(b"MULTI")
            assert wire.ask(b"SET", b"key", b"1") == b"+QUEUED\r\n"
            assert wire.ask(b"SET", b"key").startswith(b"-ERR wrong number")
            assert wire.ask(b"EXEC").startswith(b"-EXECABORT Transaction discarded because of previous errors.")
            assert wire.ask(b"EXEC") == b"-ERR EXEC without MULTI\r\n"
        assert client.exists("key") == 0

    def test_a_wrong_page_does_not_stop_the_others(self, server: RunningServer, client: redis.Redis) -> None:
        with Wire(server.port) as wire:
            wire.ask(b"MULTI")
            for words in (b"txx 0 0 0 0 8 1 1 0 x", b"txx 0 0 1 9 8 1 1 0 x"):
                assert wire.ask(b"KVPAGESET", *words.split()) == b"+QUEUED\r\n"
            done, refused = items(wire.ask(b"EXEC"))
            assert (done, refused.startswith(b"-ERR kv_type must be")) == (b"+OK\r\n", True)
        assert client.exists("kv:txx:0:0:0:0", "kv:txx:0:0:1:9") == 1

    def test_discard_forgets_everything(self, server: RunningServer, client: redis.Redis) -> None:
        with Wire(server.port) as wire:
            wire.ask(b"WATCH", b"key")
            wire.ask(b"MULTI")
            wire.ask(b"SET", b"key", b"1")
            assert wire.ask(b"DISCARD") == b"+OK\r\n"
            client.set("key", "changed")
            wire.ask(b"MULTI")
            assert wire.ask(b"EXEC") == b"*0\r\n"

    def test_no_other_client_runs_in_between(self, server: RunningServer, client: redis.Redis) -> None:
        stop = threading.Event()
        torn = []

        def read() -> None:
            with server.client() as reader:
                while not stop.is_set():
                    pair = reader.mget("left", "right")
                    if pair[0] != pair[1]:
                        torn.append(pair)

        readers = [threading.Thread(target=read) for _ in range(2)]
        client.mset({"left": 0, "right": 0})
        for reader in readers:
            reader.start()
        for i in range(300):
            with client.pipeline() as pipe:
                pipe.set("left", i)
                for j in range(20):
                    pipe.get(f"other:{j}")
                pipe.set("right", i).execute()
        stop.set()
        for reader in readers:
            reader.join()
        assert not torn

    def test_a_streamed_reply_is_whole_and_of_its_moment(self, client: redis.Redis) -> None:
        def page(number: int, body: bytes) -> list[object]:
            return ["KVPAGESET", "streamed", 0, 0, number, 0, 1, 1, 4, 0, body]

        names = [part for i in range(300) for part in ("streamed", 0, 0, i, 0)]
        with client.pipeline() as pipe:
            for i in range(300):
                pipe.execute_command(*page(i, b"before %d" % i))
            pipe.execute_command("KVPAGEMGET", 300, *names)
            for i in range(300):
                pipe.execute_command(*page(i, b"after %d" % i))
            pipe.keys("kv:streamed:0:0:1?:0").execute_command("KVPAGEMGET", 300, *names)
            replies = pipe.execute()
        assert replies[300] == [b"before %d" % i for i in range(300)]
        assert sorted(replies[-2]) == [b"kv:streamed:0:0:%d:0" % i for i in range(10, 20)]
        assert replies[-1] == [b"after %d" % i for i in range(300)]
        assert client.execute_command("KVPAGEDEL", "streamed") == 300

    def test_long_bodies_wait_in_their_receive_memory(self) -> None:
        body = bytes(range(256)) * 16384  # 4 MiB
        count = 8
        key = PageKey(b"queued", 0, 0, 0, 0)
        blob = encode_page(key, body, dtype=DType.UINT8, page_size=1024, head_dim=4096)
        with start_server() as server, server.client() as client, Wire(server.port) as wire:
            wire.ask(b"MULTI")
            before = server.rss()
            for i in range(count):
                assert wire.ask(b"SET", b"long:%d" % i, body) == b"+QUEUED\r\n"
                page = b"queued", b"0", b"0", b"%d" % i, b"0", b"8", b"1024", b"4096", b"0", body
                assert wire.ask(b"KVPAGESET", *page) == b"+QUEUED\r\n"
            assert wire.ask(b"SET", bytes(key), blob) == b"+QUEUED\r\n"
            assert client.dbsize() == 0
            assert server.rss() - before < 1.5 * (2 * count + 1) * len(body)
            assert wire.ask(b"EXEC") == b"*%d\r\n" % (2 * count + 1) + b"+OK\r\n" * (2 * count + 1)
            assert client.mget(f"long:{i}" for i in range(count)) == [body] * count
            assert client.execute_command("KVPAGEGET", "queued", 0, 0, count - 1, 0) == body
            assert client.get(bytes(key)) == blob
            wire.ask(b"MULTI")
            wire.ask(b"SET", b"gone", body)
            wire.close()  # the queue is deleted with its client
            used = sum(client.memory_usage(name) for name in client.keys("*"))
            until(lambda: client.info("memory")["used_memory"] < 1.1 * used)

    def test_the_protocol_may_change_under_way(self, server: RunningServer) -> None:
        with Wire(server.port) as wire:
            for words in ([b"MULTI"], [b"GET", b"no such key"], [b"HELLO", b"3"], [b"GET", b"no such key"]):
                wire.ask(*words)
            first, _, last = items(wire.ask(b"EXEC"))
            assert (first, last) == (b"$-1\r\n", b"_\r\n")


class TestWatch:
    def changed(self, server: RunningServer, client: redis.Redis, *change: object, gone: bool = False) -> bool:
        """Return whether a transaction fails after another client's change of a watched key."""
        with server.client() as watcher, watcher.pipeline() as pipe:
            pipe.watch("key", "untouched")
            if change:
                client.execute_command(*change)
            until(lambda: not (gone and client.exists("key")))
            pipe.multi()
            pipe.set("done", "1")
            try:
                return pipe.execute() != [True]
            except redis.WatchError:
                return True

    @pytest.mark.parametrize(
        "change",
        [
            *("SET key 1", "DEL key", "UNLINK key", "INCR key", "EXPIRE key 100", "PERSIST key", "GETDEL key"),
            *("GETEX key EX 10", "MSET other 1 key 2", "FLUSHALL", "EXPIRE key -1", "GETSET key 1", "PEXPIREAT key 1"),
        ],
    )
    def test_any_change_of_a_watched_key_stops_the_transaction(
        self, server: RunningServer, client: redis.Redis, change: str
    ) -> None:
        client.set("key", "7", ex=1000)
        assert self.changed(server, client, *change.split())
        assert client.exists("done") == 0

    @pytest.mark.parametrize(
        "no_change", ["GET key", "SET other 1", "SETNX key 1", "EXPIRE key 1 NX", "TOUCH key", "DEL other", "GETEX key"]
    )
    def test_commands_without_a_change_do_not_fail_it(
        self, server: RunningServer, client: redis.Redis, no_change: str
    ) -> None:
        client.set("key", "7", ex=1000)
        assert not self.changed(server, client, *no_change.split())

    def test_a_created_key_has_changed(self, server: RunningServer, client: redis.Redis) -> None:
        assert self.changed(server, client, "SET", "key", "1")

    def test_a_flush_changes_only_keys_that_there_were(self, server: RunningServer, client: redis.Redis) -> None:
        assert not self.changed(server, client, "FLUSHALL")

    def test_a_key_that_expires_has_changed(self, server: RunningServer, client: redis.Redis) -> None:
        client.set("key", "1", px=1500)
        assert self.changed(server, client, gone=True)

    def test_a_key_that_had_expired_before_has_not(self, server: RunningServer, client: redis.Redis) -> None:
        client.set("key", "1", px=1)
        time.sleep(0.01)
        assert not self.changed(server, client, gone=True)

    def test_pages_are_watched_as_any_key(self, server: RunningServer, client: redis.Redis) -> None:
        page = "watched", 0, 0, 0, 0
        with server.client() as watcher:
            for change in (("KVPAGESET", *page, 1, 1, 4, 0, b"8 bytes."), ("KVPAGEDEL", "watched")):
                with watcher.pipeline() as pipe:
                    pipe.watch("kv:watched:0:0:0:0")
                    client.execute_command(*change)
                    pipe.multi()
                    pipe.set("done", "1")
                    with pytest.raises(redis.WatchError):
                        pipe.execute()

    def test_an_evicted_key_has_changed(self) -> None:
        with start_server("--maxmemory", "2mb") as server, server.client() as client:
            client.set("key", "1")
            assert self.changed(server, client, "MSET", *(w for i in range(9) for w in (f"f:{i}", bytes(500_000)))) or (
                self.changed(server, client, "SET", "last", bytes(500_000))
            )

    def test_own_changes_count_and_unwatch_forgives(self, server: RunningServer, client: redis.Redis) -> None:
        with Wire(server.port) as wire:
            wire.ask(b"WATCH", b"key")
            wire.ask(b"SET", b"key", b"1")
            wire.ask(b"MULTI")
            assert parse(wire.ask(b"EXEC")) is None
            wire.ask(b"WATCH", b"key")
            wire.ask(b"SET", b"key", b"2")
            wire.ask(b"UNWATCH")
            wire.ask(b"MULTI")
            assert wire.ask(b"EXEC") == b"*0\r\n"

    def test_a_closed_client_watches_nothing(self, server: RunningServer, client: redis.Redis) -> None:
        """A write notifies watchers: without a watcher there is no work, and no memory."""
        for i in range(200):
            with Wire(server.port) as wire:
                wire.ask(b"WATCH", *(b"watched:%d:%d" % (i, j) for j in range(10)))
        client.mset({f"watched:{i}:0": "1" for i in range(200)})
        watching = [line for line in client.client_list() if line.get("watch", "0") != "0"]
        assert not watching


def test_counters_by_optimistic_locking_lose_no_step(server: RunningServer, client: redis.Redis) -> None:
    client.set("counter", 0)

    def count() -> None:
        with server.client() as own:
            for _ in range(50):
                own.transaction(lambda pipe: _step(pipe), "counter")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.get("counter") == b"200"


def _step(pipe: redis.client.Pipeline) -> None:
    value = int(pipe.get("counter"))
    pipe.multi()
    pipe.set("counter", value + 1)
