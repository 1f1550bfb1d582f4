"""Pub/sub and keyspace notifications: recipients, in both protocols, and the cost of a client that does not read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis
import redis.asyncio
from servers import RunningServer, start_server, with_constants
from waiting import PATIENCE, until
from wire import Wire, encode_command, items, parse

from kvpage_server.commands.notifying.channels import Channels


def messages(pubsub: redis.client.PubSub, count: int) -> list[dict[str, Any]]:
    """The next `count` messages, confirmations too."""
    found = []
    deadline = time.monotonic() + PATIENCE
    while len(found) < count and time.monotonic() < deadline:
        message = pubsub.get_message(timeout=0.5)
        if message is not None:
            found.append(message)
    return found


def silent(pubsub: redis.client.PubSub) -> bool:
    return pubsub.get_message(timeout=0.1) is None


@pytest.fixture(params=[2, 3])
def listener(server: RunningServer, client: redis.Redis, request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """A client of either protocol."""
    with server.client(protocol=request.param) as listener:
        yield listener


class TestChannels:
    def test_messages_reach_subscribers_by_name_and_by_pattern(
        self, listener: redis.Redis, client: redis.Redis
    ) -> None:
        with listener.pubsub() as pubsub:
            pubsub.subscribe("news", "\x00\n")
            pubsub.psubscribe("n[ae]ws", "other.*")
            assert [message["data"] for message in messages(pubsub, 4)] == [1, 2, 3, 4]
            assert client.publish("news", b"\xff\r\n") == 2
            assert client.publish("naws", "by pattern") == 1
            assert client.publish("\x00\n", "by name") == 1
            assert client.publish("nobody", "listens") == 0
            received = [(m["type"], m["pattern"], m["channel"], m["data"]) for m in messages(pubsub, 4)]
            assert received == [
                ("message", None, b"news", b"\xff\r\n"),
                ("pmessage", b"n[ae]ws", b"news", b"\xff\r\n"),
                ("pmessage", b"n[ae]ws", b"naws", b"by pattern"),
                ("message", None, b"\x00\n", b"by name"),
            ]
            pubsub.unsubscribe("news")
            pubsub.punsubscribe()
            assert [message["data"] for message in messages(pubsub, 3)] == [3, 2, 1]
            assert client.publish("news", "nobody left") == 0
            assert silent(pubsub)

    def test_messages_arrive_in_order_and_none_is_lost(self, listener: redis.Redis, client: redis.Redis) -> None:
        with listener.pubsub(ignore_subscribe_messages=True) as pubsub:
            pubsub.subscribe("ordered")
            pubsub.get_message(timeout=PATIENCE)
            with client.pipeline(transaction=False) as pipe:
                for i in range(3000):
                    pipe.publish("ordered", i)
                assert set(pipe.execute()) == {1}
            assert [int(message["data"]) for message in messages(pubsub, 3000)] == list(range(3000))

    def test_pubsub_lists_the_subscribers(self, listener: redis.Redis, client: redis.Redis) -> None:
        with listener.pubsub() as first, client.pubsub() as second:
            first.subscribe("told.a", "told.b")
            second.subscribe("told.b")
            first.psubscribe("told.*", "x*")
            second.psubscribe("x*")
            messages(first, 4)
            messages(second, 2)
            assert sorted(client.pubsub_channels("told*")) == [b"told.a", b"told.b"]
            assert client.pubsub_numsub("told.b", "told.c") == [(b"told.b", 2), (b"told.c", 0)]
            assert client.pubsub_numpat() == 2

    def test_a_closed_client_is_no_subscriber(self, server: RunningServer, client: redis.Redis) -> None:
        with Wire(server.port) as wire:
            wire.ask(b"SUBSCRIBE", b"left")
            wire.ask(b"PSUBSCRIBE", b"le*")
            assert client.publish("left", "1") == 2
        until(lambda: client.publish("left", "2") == 0)
        assert client.pubsub_numpat() == 0

    def test_resp2_allows_little_else_while_it_listens(self, server: RunningServer) -> None:
        with Wire(server.port) as wire:
            wire.ask(b"SUBSCRIBE", b"news")
            assert wire.ask(b"GET", b"key") == (
                b"-ERR Can't execute 'get': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed "
                b"in this context\r\n"
            )
            assert wire.ask(b"PING", b"still here") == b"*2\r\n$4\r\npong\r\n$10\r\nstill here\r\n"
            wire.ask(b"UNSUBSCRIBE")
            assert wire.ask(b"PING") == b"+PONG\r\n"

    def test_resp3_allows_everything(self, server: RunningServer) -> None:
        with Wire(server.port) as wire:
            wire.ask(b"HELLO", b"3")
            assert wire.ask(b"SUBSCRIBE", b"news")[:1] == b">"
            wire.send(encode_command([b"PUBLISH", b"news", b"to myself"]))
            assert sorted([wire.reply()[:1], wire.reply()[:1]]) == [b":", b">"]
            assert wire.ask(b"PING") == b"+PONG\r\n"

    def test_every_subscriber_gets_messages_in_its_protocol(self, server: RunningServer, client: redis.Redis) -> None:
        with Wire(server.port) as one, Wire(server.port) as other:
            other.ask(b"HELLO", b"3")
            for wire in (one, other):
                wire.ask(b"SUBSCRIBE", b"news")
            assert client.publish("news", "for both") == 2
            assert (one.reply()[:1], other.reply()[:1]) == (b"*", b">")

    def test_a_message_never_breaks_into_a_reply(self, server: RunningServer, client: redis.Redis) -> None:
        """A reply that is made while it is sent is one reply, whatever is published meanwhile."""
        body = bytes(20_000)
        for i in range(400):
            client.execute_command("KVPAGESET", "whole", 0, 0, i, 0, 8, 1, 20_000, 0, body)
        names = [part for i in range(400) for part in (b"whole", b"0", b"0", b"%d" % i, b"0")]
        with Wire(server.port) as wire:
            wire.ask(b"HELLO", b"3")
            wire.ask(b"SUBSCRIBE", b"meanwhile")
            wire.send(encode_command([b"KVPAGEMGET", b"400", *names]))
            time.sleep(0.1)  # it does not fit the socket: some of it waits
            for i in range(10):
                assert client.publish("meanwhile", i) == 1
            frames = [wire.reply() for _ in range(11)]
        replies = [frame for frame in frames if frame[:1] == b"*"]
        assert [len(items(reply)) for reply in replies] == [400]
        assert [parse(frame)[2] for frame in frames if frame[:1] == b">"] == [b"%d" % i for i in range(10)]
        client.execute_command("KVPAGEDEL", "whole")

    def test_in_a_transaction_messages_are_sent_when_it_runs(self, server: RunningServer, client: redis.Redis) -> None:
        with client.pubsub(ignore_subscribe_messages=True) as pubsub, client.pipeline() as pipe:
            pubsub.subscribe("done")
            pubsub.get_message(timeout=PATIENCE)
            pipe.multi()
            pipe.publish("done", "1")
            assert silent(pubsub)
            assert pipe.execute() == [1]
            assert messages(pubsub, 1)[0]["data"] == b"1"

    async def test_many_subscribers_receive_the_same(self, server: RunningServer) -> None:
        async with redis.asyncio.Redis(port=server.port) as client:
            listeners = [client.pubsub(ignore_subscribe_messages=True) for _ in range(40)]
            for listener in listeners:
                await listener.subscribe("all")
                await listener.get_message(timeout=PATIENCE)
            assert await client.publish("all", b"x" * 100_000) == 40
            received = await asyncio.gather(*(listener.get_message(timeout=PATIENCE) for listener in listeners))
            assert [message["data"] for message in received] == [b"x" * 100_000] * 40
            for listener in listeners:
                await listener.aclose()

    def test_a_subscriber_closed_during_a_message_harms_no_other(self) -> None:
        """It subscribes to many patterns, and is closed during a message to one of them."""
        with (
            start_server("--client-output-buffer-limit", "pubsub", "1mb", "0", "0") as server,
            server.client() as client,
            client.pubsub(ignore_subscribe_messages=True) as before,
            client.pubsub(ignore_subscribe_messages=True) as after,
            Wire(server.port) as slow,
        ):
            client.config_set("notify-keyspace-events", "KEA")
            before.psubscribe("flood")
            assert silent(before)
            slow.ask(b"PSUBSCRIBE", *(b"f" + b"*" * i for i in range(1, 31)))
            after.psubscribe("flood*?")
            after.subscribe("flood")
            assert silent(after)
            received = set()
            for i in range(30):
                message = b"%d" % i + bytes(33_000)
                received.add(client.publish("flood", message))
                assert [got["data"] for got in messages(before, 1)] == [message]
                assert [got["data"] for got in messages(after, 1)] == [message]
            assert (min(received), max(received)) == (
                2,
                32,
            )  # some of its patterns may have received it before it was closed
            assert client.pubsub_numpat() == 2

    def test_a_watching_subscriber_may_close_during_an_expiry(self) -> None:
        """The notification of an expired key closes it, while the watched keys are looked up."""
        with (
            start_server("--client-output-buffer-limit", "pubsub", "1mb", "0", "0") as server,
            server.client() as client,
            Wire(server.port) as wire,
        ):
            client.config_set("notify-keyspace-events", "Kx")
            wire.ask(b"HELLO", b"3")
            keys = [b"%d" % i + bytes(200_000) for i in range(60)]
            groups = [keys[:20], keys[20:40], keys[40:]]
            for some in groups:
                client.mset(dict.fromkeys(some, ""))
                assert wire.ask(b"WATCH", *some) == b"+OK\r\n"
            wire.ask(b"PSUBSCRIBE", b"*")
            time.sleep(1 - time.time() % 1)  # keys are swept when a second is over: look at them before
            with client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.pexpireat(key, int(time.time() // 1 * 1000) + 500)
                pipe.execute()
            time.sleep(max(0, 0.6 - time.time() % 1))
            assert not any(client.exists(*some) for some in groups)
            until(lambda: len(client.client_list()) == 1)

    def test_a_closed_client_is_not_listed(self, server: RunningServer, client: redis.Redis) -> None:
        with Wire(server.port) as wire:
            number = parse(wire.ask(b"CLIENT", b"ID"))
            with client.pipeline(transaction=False) as pipe:
                for _ in range(2):
                    pipe.client_kill_filter(_id=number)
                pipe.execute_command("CLIENT", "LIST", "ID", number)
                assert pipe.execute()[:2] == [1, 0]
            assert number not in [int(other["id"]) for other in client.client_list()]

    def test_a_subscriber_that_does_not_read_is_closed(self) -> None:
        with (
            start_server("--client-output-buffer-limit", "pubsub", "8mb", "2mb", "60") as server,
            server.client() as client,
        ):
            with Wire(server.port) as wire:
                wire.ask(b"SUBSCRIBE", b"flood")
                before = server.rss()
                sent = 0
                while client.publish("flood", bytes(100_000)) and sent < 1000:
                    sent += 1
                assert 20 < sent < 400  # the capacity of the sockets, and 8 MiB
                assert server.rss() - before < 64 * 1024**2
            assert client.ping()


class TestNotifications:
    @pytest.fixture
    def events(self, client: redis.Redis) -> Iterator[redis.client.PubSub]:
        """Listens to every event."""
        with client.pubsub(ignore_subscribe_messages=True) as pubsub:
            pubsub.psubscribe("__key*__:*")
            pubsub.get_message(timeout=PATIENCE)
            yield pubsub
        client.config_set("notify-keyspace-events", "")

    @staticmethod
    def events_of(events: redis.client.PubSub, count: int) -> list[tuple[bytes, bytes]]:
        return [(message["channel"], message["data"]) for message in messages(events, count)]

    def test_none_unless_asked_for(self, client: redis.Redis, events: redis.client.PubSub) -> None:
        client.set("key", "1")
        assert silent(events)

    def test_both_channels_report_a_change(self, client: redis.Redis, events: redis.client.PubSub) -> None:
        client.config_set("notify-keyspace-events", "KEA")
        client.set("key", "1", ex=100)
        assert self.events_of(events, 4) == [
            (b"__keyspace@0__:key", b"set"),
            (b"__keyevent@0__:set", b"key"),
            (b"__keyspace@0__:key", b"expire"),
            (b"__keyevent@0__:expire", b"key"),
        ]

    def test_letters_choose_classes_and_channels(self, client: redis.Redis, events: redis.client.PubSub) -> None:
        client.config_set("notify-keyspace-events", "Kg")
        client.set("key", "1")
        client.delete("key")
        assert self.events_of(events, 1) == [(b"__keyspace@0__:key", b"del")]
        client.config_set("notify-keyspace-events", "Emn")
        client.get("missing")
        client.set("key", "1")
        assert self.events_of(events, 2) == [(b"__keyevent@0__:keymiss", b"missing"), (b"__keyevent@0__:new", b"key")]
        client.config_set("notify-keyspace-events", "x")  # no channel: no notification
        client.set("key", "1", px=1)
        assert silent(events)

    def test_events_of_a_large_block_keep_their_order(self, client: redis.Redis, events: redis.client.PubSub) -> None:
        client.config_set("notify-keyspace-events", "KAn")

        def store(layers: int, ttl: int = 0) -> None:
            client.execute_command("KVBLOCKSET", "r", 0, layers, 1, 1, ttl, 1, 0, 8, 1, bytes(layers))

        def changed(layer: int, *words: str) -> list[tuple[bytes, bytes]]:
            return [(b"__keyspace@0__:kv:r:%d:0:0:0" % layer, word.encode()) for word in words]

        store(1002)
        store(1001, ttl=100)
        client.set("then", "1")
        client.execute_command("KVPAGEDEL", "r")
        expected = [event for layer in range(1002) for event in changed(layer, "new", "set")]
        expected += [event for layer in range(1001) for event in changed(layer, "set", "expire")]
        expected += [*changed(1001, "del"), (b"__keyspace@0__:then", b"new"), (b"__keyspace@0__:then", b"set")]
        expected += [event for layer in range(1001) for event in changed(layer, "del")]
        assert self.events_of(events, len(expected)) == expected
        assert silent(events)

    def test_unknown_letters_are_refused(self, client: redis.Redis) -> None:
        with pytest.raises(redis.ResponseError, match="notify-keyspace-events"):
            client.config_set("notify-keyspace-events", "KEq")

    def test_pages_are_reported_by_their_keys(self, client: redis.Redis, events: redis.client.PubSub) -> None:
        client.config_set("notify-keyspace-events", "EA")
        page = "told", 0, 0, 0, 0
        key = b"kv:told:0:0:0:0"
        client.execute_command("KVPAGESET", *page, 1, 1, 4, 0, b"8 bytes.")
        client.execute_command("KVPAGEDEL", "told")
        client.execute_command("KVPAGESET", *page, 1, 1, 4, 100, b"8 bytes.")
        client.execute_command("KVPAGESET", *page, 1, 1, 4, 0, b"8 bytes.")
        client.pexpire(key, 50)
        assert self.events_of(events, 7) == [
            (b"__keyevent@0__:set", key),
            (b"__keyevent@0__:del", key),
            (b"__keyevent@0__:set", key),
            (b"__keyevent@0__:expire", key),
            (b"__keyevent@0__:set", key),
            (b"__keyevent@0__:expire", key),
            (b"__keyevent@0__:expired", key),
        ]

    def test_an_expiry_is_reported_without_a_lookup(self, client: redis.Redis, events: redis.client.PubSub) -> None:
        client.config_set("notify-keyspace-events", "Ex")
        client.set("key", "1", px=100)
        assert self.events_of(events, 1) == [(b"__keyevent@0__:expired", b"key")]

    def test_an_eviction_is_reported(self) -> None:
        options = "--maxmemory", "3mb", "--notify-keyspace-events", "Ee"
        with start_server(*options) as server, server.client() as client, client.pubsub() as events:
            events.psubscribe("__keyevent@0__:*")
            messages(events, 1)
            for i in range(8):
                client.set(f"key:{i}", bytes(700_000))
            received = self.events_of(events, 2)
        assert received == [(b"__keyevent@0__:evicted", b"key:0"), (b"__keyevent@0__:evicted", b"key:1")]


def test_many_subscribers_receive_all_messages_in_order(server: RunningServer, client: redis.Redis) -> None:
    """Several receive the message in every turn; messages that are published meanwhile follow it."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(Wire(server.port)) for _ in range(200)]
        for number, listener in enumerate(listeners):
            listener.ask(b"SUBSCRIBE", b"all", *([b"few"] if number >= 190 else []))
        last = listeners[-1]
        assert last.reply()  # the second confirmation
        with ExitStack() as speakers:
            first, second = (speakers.enter_context(Wire(server.port)) for _ in range(2))
            for number in range(20):
                first.send(encode_command([b"PUBLISH", b"all", b"%d" % number]))
                second.send(encode_command([b"PUBLISH", b"few", b"%d" % number]))
            assert [first.reply() for _ in range(20)] == [b":200\r\n"] * 20
            assert [second.reply() for _ in range(20)] == [b":10\r\n"] * 20
        for listener in listeners[:190]:
            assert [parse(listener.reply())[2] for _ in range(20)] == [b"%d" % number for number in range(20)]
        messages = [tuple(parse(last.reply())[1:]) for _ in range(40)]
        for channel in (b"all", b"few"):
            assert [message for one, message in messages if one == channel] == [b"%d" % number for number in range(20)]


def test_a_subscriber_that_left_during_a_message_gets_no_more(server: RunningServer, client: redis.Redis) -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(Wire(server.port)) for _ in range(100)]
        for listener in listeners:
            listener.ask(b"SUBSCRIBE", b"news")
        client.publish("news", "m")
        for listener in listeners:
            listener.send(encode_command([b"RESET"]) + encode_command([b"PING"]))
            frames = [listener.reply()]
            while frames[-1] != b"+PONG\r\n":
                frames.append(listener.reply())
            assert frames[-2:] == [b"+RESET\r\n", b"+PONG\r\n"]


def test_suppressed_replies_include_no_confirmations(server: RunningServer) -> None:
    """CLIENT REPLY SKIP suppresses a reply; confirmations are pushes, also if they take steps."""
    with Wire(server.port) as wire:
        wire.send(encode_command([b"CLIENT", b"REPLY", b"SKIP"]) + encode_command([b"PSUBSCRIBE", b"a*", b"b*", b"c*"]))
        assert [parse(wire.reply())[1] for _ in range(3)] == [b"a*", b"b*", b"c*"]


def test_a_client_that_left_is_not_counted_for_queued_messages(server: RunningServer, client: redis.Redis) -> None:
    pages = 3000  # of one block: so many notifications are sent in turns
    client.config_set("notify-keyspace-events", "KEA")
    batch = [word for n in range(pages) for word in ("left", n, 0, 0, 0, 1, 1, 4, 0, b"8 bytes.")]
    client.execute_command("KVPAGEMSET", pages, *batch)
    words = b"HELLO 3", b"PSUBSCRIBE news*", b"KVPAGEDEL left", b"RESET", b"PUBLISH news m"
    with Wire(server.port) as wire:
        wire.send(b"".join(encode_command(one.split()) for one in words))
        while wire.reply() != b"+RESET\r\n":
            pass
        assert wire.reply() == b":0\r\n"
    client.config_set("notify-keyspace-events", "")


def test_writers_wait_while_many_events_were_not_sent() -> None:
    """Every subscriber gets all events, and the events that wait take little memory."""
    program = with_constants("kvpage_server.commands.notifying.channels", MOST_WAITING=10_000)
    with start_server("--notify-keyspace-events", "KA", program=program) as server, ExitStack() as stack:
        client = stack.enter_context(server.client())
        listeners = [stack.enter_context(client.pubsub()) for _ in range(12)]
        for listener in listeners:
            listener.psubscribe("__key*", "__key*__:*", "*")
            messages(listener, 3)
        pipeline = client.pipeline(transaction=False)
        for start in range(0, 1000, 100):
            pipeline.mset({f"key:{number}": "value" for number in range(start, start + 100)})
        pipeline.delete(*(f"key:{number}" for number in range(1000)))
        assert pipeline.execute() == [True] * 10 + [1000]
        for listener in listeners:
            assert len(messages(listener, 6000)) == 6000


async def test_messages_that_wait_are_counted() -> None:
    channels = Channels()
    listeners = [Listener() for _ in range(40)]
    for listener in listeners:
        channels.subscribe(listener, b"news")
    sent = 0
    while not channels.is_full:
        assert channels.publish(b"news", bytes(100_000)).count == 40
        sent += 1
    assert 50 < sent < 100
    await asyncio.wait_for(until_sent(channels), PATIENCE)
    assert not channels.is_full
    assert all(listener.messages == sent for listener in listeners)


async def until_sent(channels: Channels) -> None:
    sent = asyncio.Event()
    channels.when_sent(sent.set)
    await sent.wait()


class Listener:
    """A client of `Channels` that counts its messages."""

    protocol = 2

    def __init__(self) -> None:
        self.channels: dict[bytes, None] = {}
        self.patterns: dict[bytes, None] = {}
        self.messages = 0

    def push(self, message: Any) -> None:
        self.messages += 1

    def keep(self, size: int) -> None:
        pass

    def update_fast_path(self) -> None:
        pass
