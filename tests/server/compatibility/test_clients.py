"""Client libraries as their users use them: redis-py in every variant and with its cache, valkey-glide, ioredis,
node-redis with its cache, and readers of INFO.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio
import redis
import redis.asyncio
from node_packages import installed
from redis._parsers import _AsyncHiredisParser, _AsyncRESP2Parser, _HiredisParser, _RESP2Parser
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.cache import CacheConfig
from servers import CLIENT_OPTIONS, RunningServer

from kvpage_server.page import decode_page

NAME = ["clients", 5, 8, 42, 0]
BODY = random.Random(9).randbytes(300_000)
VARIANTS = [
    pytest.param(protocol, hiredis, id=f"RESP{protocol}-{'hiredis' if hiredis else 'python'}")
    for protocol in (2, 3)
    for hiredis in (True, False)
]

# redis-py exchanges its RESP2 parser for the RESP3 one by itself.
SYNC_PARSER: dict[bool, Any] = {True: _HiredisParser, False: _RESP2Parser}
ASYNC_PARSER: dict[bool, Any] = {True: _AsyncHiredisParser, False: _AsyncRESP2Parser}


@pytest.mark.parametrize(("protocol", "hiredis"), VARIANTS)
class TestRedisPy:
    @pytest.fixture
    def r(self, server: RunningServer, protocol: int, hiredis: bool) -> Iterator[redis.Redis]:
        options = {**CLIENT_OPTIONS, "protocol": protocol, "parser_class": SYNC_PARSER[hiredis]}
        pool = redis.ConnectionPool(port=server.port, **options)
        with redis.Redis.from_pool(pool) as client:
            client.flushall()
            yield client

    def test_speaks_the_protocol_that_was_asked_for(self, r: redis.Redis, protocol: int) -> None:
        assert r.ping()
        assert r.client_info()["resp"] == str(protocol)
        assert r.client_info()["lib-name"].startswith("redis-py")

    def test_strings(self, r: redis.Redis) -> None:
        assert r.set(b"\0binary\r\nkey", BODY, ex=100)
        assert r.get(b"\0binary\r\nkey") == BODY
        assert r.ttl(b"\0binary\r\nkey") in (99, 100)
        assert r.set("key", "old")
        assert r.set("key", "new", xx=True, get=True) == b"old"
        assert r.set("key", "never", nx=True) is None
        assert r.get("absent") is None
        assert r.mset({"a": 1, "b": 2})
        assert r.mget("a", "absent", "b") == [b"1", None, b"2"]
        assert r.incrby("a", 41) == 42
        assert r.getdel("a") == b"42"
        assert r.delete("b", "key", "absent") == 2
        assert r.strlen(b"\0binary\r\nkey") == len(BODY)

    def test_pages(self, r: redis.Redis) -> None:
        assert r.execute_command("KVPAGESET", *NAME, 1, 128, 64, 3600, BODY) in (b"OK", True)
        assert r.execute_command("KVPAGEGET", *NAME) == BODY
        absent = ["clients", 6, 8, 42, 0]
        assert r.execute_command("KVPAGEMGET", 2, *NAME, *absent) == [BODY, None]
        assert r.execute_command("KVPAGEEXISTS", *absent) == 0
        header, body = decode_page(r.get("kv:clients:5:8:42:0"))
        assert (header.page_size, header.head_dim, header.ttl, bytes(body)) == (128, 64, 3600, BODY)

    def test_errors_are_exceptions_and_the_connection_stays_open(self, r: redis.Redis) -> None:
        with pytest.raises(redis.ResponseError, match="unknown command 'NOSUCH'"):
            r.execute_command("NOSUCH", "a")
        with pytest.raises(redis.ResponseError, match="kv_type must be an integer between 0 and 5, got '6'"):
            r.execute_command("KVPAGEGET", "clients", 0, 0, 0, 6)
        r.set("text", "abc")
        with pytest.raises(redis.ResponseError, match="value is not an integer or out of range"):
            r.incr("text")
        assert r.ping()

    def test_pipelines(self, r: redis.Redis) -> None:
        with r.pipeline(transaction=False) as pipe:
            for i in range(5000):
                pipe.set(f"p:{i}", i)
            pipe.execute_command("NOSUCH")
            *stored, error = pipe.execute(raise_on_error=False)
        assert stored == [True] * 5000
        assert isinstance(error, redis.ResponseError)
        assert sorted(r.scan_iter("p:*", count=300)) == sorted(b"p:%d" % i for i in range(5000))

    def test_transactions(self, r: redis.Redis) -> None:
        with r.pipeline() as pipe:
            assert pipe.set("a", 1).incr("a").get("a").ttl("a").execute() == [True, 2, b"2", -1]
            pipe.watch("a")
            r.set("a", 10)
            pipe.multi()
            pipe.set("a", 20)
            with pytest.raises(redis.WatchError):
                pipe.execute()
        assert r.get("a") == b"10"
        assert r.transaction(lambda pipe: pipe.multi() or pipe.incr("a"), "a") == [11]

    def test_messages(self, r: redis.Redis) -> None:
        with r.pubsub() as pubsub:
            pubsub.subscribe("news")
            pubsub.psubscribe("w*")
            kinds = [pubsub.get_message(timeout=60)["type"] for _ in range(2)]
            assert kinds == ["subscribe", "psubscribe"]
            assert r.publish("news", BODY) == 1
            assert r.publish("weather", "rain") == 1
            first, second = pubsub.get_message(timeout=60), pubsub.get_message(timeout=60)
            assert (first["type"], first["channel"], first["data"]) == ("message", b"news", BODY)
            assert (second["type"], second["pattern"], second["data"]) == ("pmessage", b"w*", b"rain")
            pubsub.unsubscribe()
            assert pubsub.get_message(timeout=60)["type"] == "unsubscribe"

    def test_server_information_is_parsed(self, r: redis.Redis) -> None:
        info = r.info()
        assert info["role"] == "master"
        assert isinstance(info["used_memory"], int)
        assert r.info("server").keys() >= {"redis_version", "kvpage_version"}
        assert r.dbsize() == 0
        assert len(r.config_get("maxmemory*")) > 1
        assert r.command_count() > 60
        assert r.time()[0] > 1_600_000_000
        assert r.client_setname("tester")
        assert r.client_getname() in ("tester", b"tester")
        assert any(client["name"] == "tester" for client in r.client_list())


class TestRedisPyCache:
    """Its client-side cache answers repeated reads without a request until an invalidation."""

    @pytest.fixture
    def keeps(self, server: RunningServer) -> Iterator[redis.Redis]:
        with server.client(protocol=3, cache_config=CacheConfig()) as client:
            client.flushall()
            yield client

    def test_it_is_notified_of_every_change(self, keeps: redis.Redis, server: RunningServer) -> None:
        cache = keeps.get_cache()
        assert cache is not None
        with server.client() as writer:
            for value in (b"1", b"2", b"3"):
                writer.mset({"kept": value, "beside": value})
                assert [keeps.get("kept") for _ in range(3)] == [value] * 3
                assert keeps.mget("kept", "beside") == [value] * 2
                assert cache.size == 2
            calls = server_calls(writer)
            assert [keeps.get("kept") for _ in range(100)] == [b"3"] * 100
            assert server_calls(writer) - calls < 10, "they were answered from the cache"
            writer.delete("kept")
            assert keeps.get("kept") is None
            writer.flushall()
            assert keeps.mget("kept", "beside") == [None, None]

    def test_pages_and_expiring_keys(self, keeps: redis.Redis, server: RunningServer) -> None:
        key = "kv:clients:5:8:42:0"
        with server.client() as writer:
            for body in (BODY, BODY[::-1]):
                writer.execute_command("KVPAGESET", *NAME, 1, 128, 64, 0, body)
                assert [keeps.get(key)[64:] for _ in range(3)] == [body] * 3
            writer.execute_command("KVPAGEDEL", "clients")
            assert keeps.get(key) is None
            writer.set("short", "1", px=1000)
            assert keeps.get("short") == b"1"
            while writer.exists("short"):
                pass
            assert keeps.get("short") is None


def server_calls(client: redis.Redis) -> int:
    return int(client.info("stats")["total_commands_processed"])


class TestRedisPyConnections:
    def test_a_pool_shared_by_threads(self, server: RunningServer) -> None:
        pool = redis.BlockingConnectionPool(max_connections=8, port=server.port, **CLIENT_OPTIONS)

        def work(worker: int) -> int:
            with redis.Redis(connection_pool=pool) as client:
                noise = random.Random(worker)
                for i in range(50):
                    body = noise.randbytes(noise.choice((10, 5000, 70_000)))
                    client.execute_command("KVPAGESET", f"pool-{worker}", 0, 0, i, 0, 1, 1, 1, 0, body)
                    assert client.execute_command("KVPAGEGET", f"pool-{worker}", 0, 0, i, 0) == body
            return worker

        with ThreadPoolExecutor(24) as threads:
            assert sorted(threads.map(work, range(24))) == list(range(24))
        pool.disconnect()

    def test_urls_decoding_and_single_connections(self, server: RunningServer) -> None:
        with redis.Redis.from_url(f"{server.url}/0?protocol=3", decode_responses=True) as client:
            assert client.set("text", "vår")
            assert client.get("text") == "vår"
            assert client.config_get("port") == {"port": str(server.port)}
        with server.client(single_connection_client=True, health_check_interval=1) as client:
            ids = {client.client_id() for _ in range(5)}
            assert len(ids) == 1

    def test_there_is_one_database(self, server: RunningServer) -> None:
        with server.client(db=0) as client:
            assert client.ping()
        with server.client(db=1) as client, pytest.raises(redis.ResponseError, match="DB index is out of range"):
            client.ping()

    def test_a_client_that_was_ended_connects_again(self, server: RunningServer) -> None:
        with server.client() as admin, redis.Redis(port=server.port) as client:
            first = client.client_id()
            assert admin.client_kill_filter(_id=first) == 1
            assert client.client_id() > first


@pytest.mark.parametrize(("protocol", "hiredis"), VARIANTS)
class TestRedisPyAsyncio:
    @pytest_asyncio.fixture
    async def r(self, server: RunningServer, protocol: int, hiredis: bool) -> AsyncIterator[redis.asyncio.Redis]:
        options = {**CLIENT_OPTIONS, "retry": AsyncRetry(NoBackoff(), 0), "protocol": protocol}
        pool = redis.asyncio.BlockingConnectionPool(
            port=server.port, max_connections=10, parser_class=ASYNC_PARSER[hiredis], **options
        )
        async with redis.asyncio.Redis.from_pool(pool) as client:
            await client.flushall()
            yield client

    async def test_many_tasks_share_a_pool(self, r: redis.asyncio.Redis) -> None:
        async def work(worker: int) -> None:
            body = random.Random(worker).randbytes(worker * 1000)
            for i in range(5):
                name = [f"task-{worker}", 0, 0, i, 0]
                await r.execute_command("KVPAGESET", *name, 1, 1, 1, 0, body)
                assert await r.execute_command("KVPAGEGET", *name) == body

        await asyncio.gather(*map(work, range(60)))

    async def test_pipelines_and_transactions(self, r: redis.asyncio.Redis) -> None:
        async with r.pipeline(transaction=False) as pipe:
            for i in range(1000):
                pipe.set(f"p:{i}", i)
            assert await pipe.execute() == [True] * 1000
        async with r.pipeline() as pipe:
            assert await pipe.incr("n").incr("n").execute() == [1, 2]
        assert len([key async for key in r.scan_iter("p:*")]) == 1000

    async def test_messages(self, r: redis.asyncio.Redis) -> None:
        async with r.pubsub() as pubsub:
            await pubsub.subscribe("news")
            assert (await pubsub.get_message(timeout=60))["type"] == "subscribe"
            await r.publish("news", "hello")
            assert (await pubsub.get_message(timeout=60))["data"] == b"hello"

    async def test_a_cancelled_read_harms_no_other(self, r: redis.asyncio.Redis) -> None:
        await r.set("big", bytes(8_000_000))
        reads = [asyncio.create_task(r.get("big")) for _ in range(10)]
        await asyncio.sleep(0.02)
        for read in reads[::2]:
            read.cancel()
        done = await asyncio.gather(*reads, return_exceptions=True)
        assert all(len(value) == 8_000_000 for value in done if not isinstance(value, BaseException))
        assert await r.get("big") == bytes(8_000_000)


class TestValkeyGlide:
    @pytest.fixture(params=["RESP2", "RESP3"])
    def glide(self, server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Any]:
        glide_sync = pytest.importorskip("glide_sync", reason="valkey-glide-sync has no wheel for this platform")
        configuration = glide_sync.GlideClientConfiguration(
            [glide_sync.NodeAddress("127.0.0.1", server.port)],
            protocol=glide_sync.ProtocolVersion[request.param],
            request_timeout=20_000,
        )
        client = glide_sync.GlideClient.create(configuration)
        client.flushall()
        yield client
        client.close()

    def test_strings(self, glide: Any) -> None:
        assert glide.set("key", BODY) == "OK"
        assert glide.get("key") == BODY
        assert glide.get("absent") is None
        assert glide.exists(["key", "absent"]) == 1
        assert glide.mset({"a": "1", "b": "2"}) == "OK"
        assert glide.mget(["a", "absent", "b"]) == [b"1", None, b"2"]
        assert glide.incr("a") == 2
        assert glide.expire("key", 100)
        assert glide.ttl("key") in (99, 100)
        assert glide.delete(["key", "a", "absent"]) == 2

    def test_pages(self, glide: Any) -> None:
        name = ["clients", "5", "8", "42", "0"]
        assert glide.custom_command(["KVPAGESET", *name, "1", "128", "64", "0", BODY]) in ("OK", b"OK")
        assert glide.custom_command(["KVPAGEGET", *name]) == BODY
        assert glide.custom_command(["KVPAGEMGET", "2", *name, *name]) == [BODY, BODY]

    def test_its_automatic_commands_work(self, glide: Any) -> None:
        assert b"role:master" in glide.info()
        assert glide.ping() == b"PONG"
        assert glide.config_get(["maxmemory-policy"])

    def test_errors(self, glide: Any) -> None:
        from glide_sync import RequestError

        with pytest.raises(RequestError, match="head_idx must be an integer"):
            glide.custom_command(["KVPAGEGET", "clients", "0", "-1", "0", "0"])
        assert glide.ping() == b"PONG"


@pytest.mark.parametrize("script", ["ioredis.mjs", "caching.mjs"])
def test_clients_of_another_world(server: RunningServer, script: str) -> None:
    node = installed()
    with server.client() as client:
        client.flushall()
    command = ["node", str(node / script), str(server.port)]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100)
    assert result.returncode == 0, result.stderr


class TestMetrics:
    """INFO the way exporters read it: sections of name:value lines, numbers where they want numbers."""

    # Fields that redis_exporter turns into gauges and counters, as far as they exist here.
    NUMBERS = """
        uptime_in_seconds process_id connected_clients blocked_clients maxclients pubsub_clients used_memory
        used_memory_rss used_memory_peak maxmemory mem_fragmentation_ratio loading total_connections_received
        total_commands_processed instantaneous_ops_per_sec total_net_input_bytes total_net_output_bytes
        rejected_connections expired_keys evicted_keys keyspace_hits keyspace_misses pubsub_channels pubsub_patterns
        total_error_replies used_cpu_sys used_cpu_user connected_slaves master_repl_offset cluster_enabled
    """

    def read(self, client: redis.Redis, *sections: str) -> dict[str, dict[str, str]]:
        """Parse as redis_exporter does: by lines, a section begins with '# '."""
        text = client.execute_command("INFO", *sections, NEVER_DECODE=True)
        found: dict[str, dict[str, str]] = {}
        for line in text.decode().split("\r\n"):
            if line.startswith("# "):
                found[line[2:]] = section = {}
            elif line:
                name, colon, value = line.partition(":")
                assert colon, line
                assert re.fullmatch(r"[a-zA-Z0-9_.|-]+", name), line
                section[name] = value
        return found

    @pytest.fixture
    def r(self, client: redis.Redis) -> redis.Redis:
        client.set_response_callback("INFO", lambda reply, **_: reply)
        return client

    def test_numbers_are_numbers(self, r: redis.Redis) -> None:
        fields = {name: value for section in self.read(r).values() for name, value in section.items()}
        missing = [name for name in self.NUMBERS.split() if name not in fields]
        assert not missing
        for name in self.NUMBERS.split():
            float(fields[name])
        assert fields["role"] == "master"
        assert fields["redis_mode"] == "standalone"

    def test_sections_can_be_chosen(self, r: redis.Redis) -> None:
        assert set(self.read(r, "memory")) == {"Memory"}
        assert set(self.read(r, "MEMORY", "clients")) == {"Memory", "Clients"}
        assert self.read(r, "nosuch") == {}
        for word in ("all", "everything", "default"):
            assert {"Server", "Clients", "Memory", "Stats", "Replication", "CPU", "Kvpage"} <= set(self.read(r, word))

    @pytest.mark.parametrize("again", [False, True], ids=["at once", "after a reset"])
    def test_counters_match_the_commands(self, again: bool, r: redis.Redis) -> None:
        if again:
            r.config_resetstat()
        before = self.read(r)["Stats"]
        for _ in range(7):
            r.get("absent")
        r.set("there", "x")
        for _ in range(5):
            r.get("there")
        with pytest.raises(redis.ResponseError):
            r.execute_command("NOSUCH")
        after = self.read(r)["Stats"]

        def grown(name: str) -> int:
            return int(after[name]) - int(before[name])

        assert grown("keyspace_misses") == 7
        assert grown("keyspace_hits") == 5
        assert grown("total_error_replies") == 1
        assert grown("total_commands_processed") == 14  # the INFO before and 13 more; unknown commands are not run
        assert grown("total_net_input_bytes") > 14 * 10

    def test_keys_and_memory(self, r: redis.Redis) -> None:
        assert "db0" not in self.read(r)["Keyspace"]
        for page in range(10):
            r.execute_command("KVPAGESET", "metrics", 0, 0, page, 0, 1, 1, 1, 100, bytes(100_000))
        r.set("forever", "x")
        fields = self.read(r)
        keys = dict(pair.split("=") for pair in fields["Keyspace"]["db0"].split(","))
        assert (keys["keys"], keys["expires"]) == ("11", "10")
        assert int(fields["Memory"]["used_memory"]) > 1_000_000
        assert (fields["Kvpage"]["requests"], fields["Kvpage"]["blocks"]) == ("1", "10")

    def test_calls_by_command(self, r: redis.Redis) -> None:
        r.get("x")
        stats = self.read(r, "commandstats")["Commandstats"]
        values = dict(pair.split("=") for pair in stats["cmdstat_get"].split(","))
        assert int(values["calls"]) >= 1
        assert {"usec", "usec_per_call", "rejected_calls", "failed_calls"} <= set(values)


def test_an_exporters_questions_are_answered(client: redis.Redis) -> None:
    """Requests of redis_exporter on every scrape."""
    questions: list[tuple[list[str], Callable[[Any], bool]]] = [
        (["CLIENT", "SETNAME", "redis_exporter"], bool),
        (["CONFIG", "GET", "*"], lambda reply: len(reply) > 10),
        (["INFO", "ALL"], bool),
        (["LATENCY", "LATEST"], lambda reply: isinstance(reply, list)),
        (["SLOWLOG", "LEN"], lambda reply: isinstance(reply, int)),
        (["SLOWLOG", "GET", "1"], lambda reply: isinstance(reply, list)),
        (["INFO", "CLUSTER"], bool),
        (["MODULE", "LIST"], lambda reply: reply == []),
    ]
    for words, right in questions:
        assert right(client.execute_command(*words)), words


def test_threads_that_publish_and_listen(server: RunningServer) -> None:
    """Every message arrives, in the order of its sender."""
    with server.client() as client, client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe("a", "b")
        while pubsub.get_message(timeout=0.2) is not None:
            pass

        def send(channel: str) -> None:
            with server.client() as sender:
                for i in range(300):
                    sender.publish(channel, i)

        threads = [threading.Thread(target=send, args=(channel,)) for channel in "ab"]
        for thread in threads:
            thread.start()
        got: dict[bytes, list[int]] = {b"a": [], b"b": []}
        while sum(map(len, got.values())) < 600:
            message = pubsub.get_message(timeout=60)
            if message:
                got[message["channel"]].append(int(message["data"]))
        for thread in threads:
            thread.join()
        assert got == {b"a": list(range(300)), b"b": list(range(300))}
