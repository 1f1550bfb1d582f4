"""KV events of the server: their form, their order, and batches that are sent again."""

from __future__ import annotations

import os
import random
import socket as sockets
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import redis
import zmq
from event_readers import Subscriber, hashes, subscribed
from servers import RunningServer, free_port, start_server

from kvpage_server import app, kv_events
from kvpage_server.commands.context import Server
from kvpage_server.configuration.config import Config
from kvpage_server.core import BlockChanges
from kvpage_server.kv_events import MOST_WAITING, Event, EventQueue, KVEvents, KVEventsError, events_of_store
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.system import text

HASH = "ab" * 32
HIGH = 0xABABABABABABABAB
SPACE = "vllm.lbhnc-vec.31d70e42848e5546"


@contextmanager
def publishing(*options: str, directory: Path | None = None) -> Iterator[tuple[RunningServer, redis.Redis, Subscriber]]:
    events, replay = free_port(), free_port()
    address = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
    asked = ["--kv-events", address[0], "--kv-events-replay", address[1], *options]
    with (
        start_server(*asked, directory=directory) as server,
        server.client() as client,
        subscribed(events, replay) as found,
    ):
        yield server, client, found


def with_queue(address: str, replay: str) -> KVEvents[EventQueue]:
    events = KVEvents(address, replay, EventQueue)
    events.start()
    return events


Change = (
    tuple[bool, bytes, int] | None
)  # whether a block was added, its request and its page id; None: all were removed


def note(queue: BlockChanges, changes: Iterable[Change]) -> None:
    for change in changes:
        if change is None:
            queue.clear()
        else:
            was_added, req_id, page = change
            queue.note(req_id, page, was_added)


def described(changes: Iterable[Change]) -> list[Event]:
    """The events of some changes, as a subscriber decodes them."""
    queue = BlockChanges(MOST_WAITING, lambda: None)
    note(queue, changes)
    found = events_of_store(queue.take(MOST_WAITING)[1])
    return list(msgspec.msgpack.decode(msgspec.msgpack.encode(found)))


def set_page(client: redis.Redis, name: str, page: int = 0, head: int = 0) -> None:
    client.execute_command("KVPAGESET", name, 0, head, page, 0, 1, 1, 8, 0, b"x" * 16)


def test_a_block_is_an_event_in_the_form_of_vllm() -> None:
    with publishing() as (_, client, subscriber):
        for head in range(3):
            set_page(client, f"{SPACE}.{HASH}", 2, head)
        cleared, found = subscriber.until(lambda events: len(events) == 2)
        assert cleared == {"type": "AllBlocksCleared"}
        assert found == {
            "type": "BlockStored",
            "block_hashes": [HIGH],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "medium": "STORAGE",
            "lora_name": None,
            "group_idx": 2,
            "locality": "REMOTE",
            "ownership": f"kvpage:{SPACE}",
        }


def test_a_block_of_a_request_belongs_to_a_session() -> None:
    with publishing() as (_, client, subscriber):
        set_page(client, "chat", 7)
        _, found = subscriber.until(lambda events: len(events) == 2)
        assert (found["block_hashes"], found["session_id"]) == ([b"chat:7"], "chat")
        assert found["ownership"] == "kvpage"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "*", "0.0.0.0", "[::]"])
def test_an_address_of_other_machines_is_warned_of(caplog: pytest.LogCaptureFixture, host: str) -> None:
    address = f"tcp://{host}:{free_port()}"
    with_queue(address, "").close()
    assert (f"everybody who reaches {address} can read them" in caplog.text) == (host not in ("127.0.0.1", "[::1]"))


def test_a_unix_socket_is_no_address_of_other_machines(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with_queue(f"ipc://{tmp_path}/events", "").close()
    assert caplog.text == ""


def test_a_unix_socket_belongs_to_one_process_and_user(tmp_path: Path) -> None:
    events, replay = (tmp_path / name for name in ("events", "replay"))
    before = os.umask(0)
    try:
        first = with_queue(f"ipc://{events}", f"ipc://{replay}")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (events, replay)} == {0o700}
    other = f"ipc://{tmp_path}/other"
    for addresses in ((f"ipc://{events}", ""), (other, f"ipc://{replay}")):
        with pytest.raises(KVEventsError, match=r"ipc://.*: Address already in use"):
            with_queue(*addresses)
    assert {*tmp_path.iterdir()} == {events, replay}
    first.close()
    assert [*tmp_path.iterdir()] == []
    with sockets.socket(sockets.AF_UNIX) as left:
        left.bind(str(events))
    with_queue(f"ipc://{events}", "").close()


def test_a_file_is_not_replaced_by_a_unix_socket(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("precious", encoding="utf-8")
    with pytest.raises(KVEventsError, match="file: the file exists and is not a socket"):
        with_queue(f"ipc://{place}", "")
    assert place.read_text(encoding="utf-8") == "precious"


def test_info_counts_dropped_changes() -> None:
    with publishing() as (_, client, _):
        assert client.info("kvpage")["kv_events_dropped"] == 0


def test_removed_blocks_are_events() -> None:
    with publishing() as (_, client, subscriber):
        for name in "abc":
            set_page(client, name)
        found = subscriber.until(lambda events: len(hashes(events)) == 3)
        client.delete("kv:a:0:0:0:0")
        client.execute_command("KVPAGEDEL", "b")
        found += subscriber.until(lambda events: len(hashes(found + events)) == 1)
        client.flushall()
        set_page(client, "d")
        found += subscriber.until(lambda events: b"d:0" in hashes(events))
        changes = [(event["type"], block) for event in found for block in event.get("block_hashes", [b""])]
        assert changes == [
            ("AllBlocksCleared", b""),
            *[("BlockStored", name) for name in (b"a:0", b"b:0", b"c:0")],
            *[("BlockRemoved", name) for name in (b"a:0", b"b:0")],
            ("AllBlocksCleared", b""),
            ("BlockStored", b"d:0"),
        ]
        (removed, *_) = (event for event in found if event["type"] == "BlockRemoved")
        assert removed["block_hashes"][0] == b"a:0"
        assert {name: value for name, value in removed.items() if name != "block_hashes"} == {
            "type": "BlockRemoved",
            "medium": "STORAGE",
            "locality": "REMOTE",
            "ownership": "kvpage",
        }


def test_a_batch_says_the_state_after_its_changes() -> None:
    first, second = (f"{SPACE}.{number:064x}".encode() for number in (1, 2))
    changes: list[Change] = [
        (True, first, 0),
        (True, b"chat", 7),
        None,
        (True, first, 0),
        (True, b"chat", 1),
        (True, b"chat", 2),
    ]
    changes += [(False, first, 0), (False, second, 0), (True, second, 0), (True, second, 1), (False, b"chat", 1)]
    found = described(changes)
    assert [(event["type"], event.get("block_hashes"), event.get("group_idx")) for event in found] == [
        ("AllBlocksCleared", None, None),
        ("BlockRemoved", [1], 0),
        ("BlockStored", [2], 0),
        ("BlockStored", [2], 1),
        ("BlockRemoved", [b"chat:1"], None),
        ("BlockStored", [b"chat:2"], None),
    ]
    assert {event["ownership"] for event in found[1:4]} == {f"kvpage:{SPACE}"}
    assert found[-1]["session_id"] == "chat"


def test_blocks_of_segments_are_stored_and_removed_by_hash() -> None:
    first, second = (f"{{segment}}{number:032x}".encode() for number in (1, 2))
    found = described([(True, first, 0), (True, second, 0), (False, first, 0), (True, first, 1)])
    assert [(event["type"], event["block_hashes"], event["group_idx"]) for event in found] == [
        ("BlockRemoved", [1], 0),
        ("BlockStored", [2], 0),
        ("BlockStored", [1], 1),
    ]


def test_a_subscriber_knows_the_blocks_whatever_the_batches_are() -> None:
    """Blocks are added, removed and cleared at random, and the changes are cut into batches at random."""
    chance = random.Random(44)
    names = [f"{space}{number:064x}".encode() for space in (f"{SPACE}.", "other.") for number in range(6)]
    names += [b"chat", b"chat.abc", b".", b"\xff"]
    known: set[tuple[str, int | bytes, int | None]] = set()
    blocks: set[tuple[bytes, int]] = set()
    for _ in range(300):
        changes: list[Change] = []
        for _ in range(chance.randrange(12)):
            block = chance.choice(names), chance.randrange(2)
            was_added = block not in blocks
            (blocks.add if was_added else blocks.remove)(block)
            changes.append((was_added, *block))
            if chance.random() < 0.01:
                blocks.clear()
                changes.append(None)
        found = described(changes)
        assert len(found) <= 1 + 2 * 4 + 9, "an event has all blocks of its kind"
        for event in found:
            if event["type"] == "AllBlocksCleared":
                known.clear()
                continue
            some = {(event["ownership"], block, event.get("group_idx")) for block in event["block_hashes"]}
            known = known | some if event["type"] == "BlockStored" else known - some
        wanted: set[tuple[str, int | bytes, int | None]] = set()
        for name, page in blocks:
            space, _, digits = name.rpartition(b".")
            if len(digits) == 64:
                wanted.add((f"kvpage:{space.decode()}", int(digits, 16), page))
            else:
                wanted.add(("kvpage", b"%b:%d" % (name, page), None))
        assert known == wanted


def test_no_changes_are_no_batch() -> None:
    with publisher() as (events, *ports), subscribed(*ports) as subscriber:
        assert described([]) == []
        assert [number for number, _ in subscriber.replay(0)] == [0]
        for number in range(3):
            events.changes.add_all([])  # wakes nobody
            events.changes.note(b"r", number, True)
            batches = replayed(subscriber, b"r:%d" % number)
        assert [number for number, _ in batches] == [0, 1, 2, 3]


def test_evicted_blocks_are_removed() -> None:
    with publishing("--maxmemory", "1mb", "--store", "memory") as (_, client, subscriber):
        for number in range(400):
            client.execute_command("KVPAGESET", f"r{number}", 0, 0, 0, 0, 1, 16, 256, 0, b"x" * 8192)
        stored = {f"{key[3:].split(b':')[0].decode()}:0".encode() for key in client.scan_iter("kv:*:0")}
        assert 0 < len(stored) < 400
        subscriber.until(lambda events: hashes(events) == stored)


def test_blocks_on_disk_are_published_after_a_restart(tmp_path: Path) -> None:
    with publishing("--store", "tiered", directory=tmp_path) as (_, client, _):
        for number in range(3):
            set_page(client, f"r{number}")
    with publishing("--store", "tiered", directory=tmp_path) as (_, client, subscriber):
        assert hashes(subscriber.until(lambda events: len(hashes(events)) == 3)) == {b"r0:0", b"r1:0", b"r2:0"}
        set_page(client, "r0", head=1)  # the block is not new
        set_page(client, "r3")
        found = subscriber.until(lambda events: b"r3:0" in hashes(events))
        assert hashes(found) == {b"r3:0"}


def test_a_subscriber_that_dies_misses_none_of_10000_events() -> None:
    """One subscriber is killed while it reads. Another one begins after the first number that it has not confirmed."""
    program = textwrap.dedent(
        """
        import sys
        from event_readers import Subscriber, hashes
        subscriber = Subscriber(*map(int, sys.argv[1:]))
        while True:
            subscriber.until(lambda events: len(hashes(events)) >= 1000)
            print(subscriber.next, flush=True)
        """
    )
    with publishing() as (server, client, subscriber):
        ports = [socket.split(":")[-1] for socket in _addresses(server)]
        path = f"import sys; sys.path[:0] = {sys.path!r}\n"
        dying = subprocess.Popen(
            [sys.executable, "-c", path + program, *ports], stdout=subprocess.PIPE, encoding="utf-8"
        )
        assert dying.stdout
        with client.pipeline(transaction=False) as pipe:
            for number in range(10_000):
                pipe.execute_command("KVPAGESET", f"r{number}", 0, 0, 0, 0, 1, 1, 8, 0, b"x" * 16)
                if number % 500 == 499:
                    pipe.execute()
                if number == 3_999:
                    subscriber.next = int(dying.stdout.readline())
                    dying.kill()
                    dying.wait()
        dying.stdout.close()
        before = list(subscriber.replay(0))[: subscriber.next]
        known = [event for _, events in before for event in events]
        wanted = {b"r%d:0" % number for number in range(10_000)}
        after = subscriber.until(lambda events: len(hashes(known + events)) == 10_000)
        assert 0 < len(hashes(known)) < 10_000
        assert hashes(known + after) == wanted
        stored = [block for event in known + after for block in event.get("block_hashes", ())]
        assert len(stored) == 10_000, "each block is published once"


def _addresses(server: RunningServer) -> list[str]:
    with server.client() as client:
        return [client.config_get(name)[name] for name in ("kv-events", "kv-events-replay")]


# -- the publisher by itself -------------------------------------------------------------------------------------------


@contextmanager
def publisher(
    describe: Callable[[bytes], list[Event]] = events_of_store, endpoint: str = "", replay: bool = True
) -> Iterator[tuple[KVEvents[BlockChanges], int, int]]:
    ports = free_port(), free_port()
    address = [f"tcp://127.0.0.1:{port}" for port in ports]
    found = KVEvents(endpoint or address[0], address[1] if replay else "", BlockChanges, describe)
    found.start()
    try:
        yield found, *ports
    finally:
        found.close()


def test_all_events_are_sent_before_the_end() -> None:
    with publisher() as (events, *ports), subscribed(*ports) as subscriber:
        subscriber.until(lambda found: bool(found))
        events.changes.note(b"first", 0, True)
        subscriber.live()  # the subscription has arrived
        for number in range(3000):
            events.changes.note(b"r", number, True)
        events.close()
        found = 0
        while found < 3000:
            found += sum(len(event["block_hashes"]) for event in subscriber.live()[1])
        events.changes.note(b"late", 0, True)
        events.close = lambda: None  # type: ignore[method-assign]


def replayed(subscriber: Subscriber, last: int | bytes) -> list[tuple[int, list[Event]]]:
    """All batches that are sent again, once `last` is stored."""
    while True:
        batches = list(subscriber.replay(0))
        if last in hashes([event for _, some in batches for event in some]):
            return batches
        time.sleep(0.01)


def test_dropped_changes_are_a_gap_in_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MOST_WAITING", 10)
    describing, may_go_on = threading.Event(), threading.Event()

    def describe(changes: bytes) -> list[Event]:
        describing.set()
        assert may_go_on.wait(60)
        return events_of_store(changes)

    ports = free_port(), free_port()
    events = KVEvents(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", BlockChanges, describe)
    events.start()
    with subscribed(*ports) as subscriber:
        events.changes.note(b"first", 0, True)
        assert describing.wait(60)
        for number in range(25):
            events.changes.note(b"r", number, True)
        assert events.dropped == 15
        may_go_on.set()
        batches = replayed(subscriber, b"r:24")
        assert [number for number, _ in batches] == [0, 1, 3]
        assert hashes([event for _, some in batches for event in some]) == {b"first:0"} | {
            b"r:%d" % number for number in range(15, 25)
        }
        events.close()


def test_changes_without_an_event_are_a_gap_too() -> None:
    """The changes after them are published, and the publisher ends."""

    def describe(events: list[Event]) -> list[Event]:
        if any(300 in event["block_hashes"] for event in events):
            raise ValueError("not to be described")
        return events

    ports = free_port(), free_port()
    events = KVEvents(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", EventQueue, describe)
    events.start()
    with subscribed(*ports) as subscriber:
        for number in range(5000):
            events.changes.put(kv_events.stored([number], medium="GPU", locality="LOCAL", ownership="kvpage"))
        batches = replayed(subscriber, 4999)
        known = hashes([event for _, some in batches for event in some])
        assert events.dropped == 5000 - len(known)
        assert 300 not in known
        numbers = [number for number, _ in batches]
        assert set(range(numbers[-1])) - set(numbers)
        events.close()


def test_batches_that_are_sent_again_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MOST_BYTES", 10_000)
    with publisher() as (events, *ports), subscribed(*ports) as subscriber:
        for number in range(20):
            events.changes.note(b"x" * 3000, number, True)
            batches = replayed(subscriber, b"x" * 3000 + b":%d" % number)
        assert batches[-1][0] == 20
        assert len(batches) < 5


def test_all_blocks_on_disk_are_published_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, most in (
        (kv_events, "MOST_WAITING", 10),
        (kv_events, "MOST_CHANGES", 4),
        (app, "MOST_CHANGES", 4),
    ):
        monkeypatch.setattr(module, name, most)
    ports = free_port(), free_port()
    events, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    server = Server(Config(kv_events=events, kv_events_replay=replay), Keyspace())
    for number in range(1000):
        server.keyspace.contents.index.open(b"r", number)
    with app._kv_events(server), subscribed(*ports) as subscriber:
        wanted = {b"r:%d" % number for number in range(1000)}
        assert hashes(subscriber.until(lambda found: b"r:999" in hashes(found))) == wanted
        assert server.kv_events is not None
        dropped, nbytes = server.kv_events()
        assert dropped == 0
        assert 1000 * len(b"r:0") < nbytes < 1000 * 200


def test_the_publisher_connects_to_a_listening_subscriber() -> None:
    context, port = zmq.Context(), free_port()
    listening = context.socket(zmq.SUB)
    listening.setsockopt(zmq.RCVTIMEO, 60_000)
    listening.bind(f"tcp://127.0.0.1:{port}")
    listening.subscribe(b"")
    with publisher(endpoint=f">tcp://127.0.0.1:{port}", replay=False) as (events, *_):
        while not listening.poll(100):
            events.changes.note(b"r", 0, True)
        assert msgspec.msgpack.decode(listening.recv_multipart()[2])[1]
    context.destroy(linger=0)


def test_other_requests_for_batches_are_ignored() -> None:
    with publisher() as (_, _, port), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(f"tcp://127.0.0.1:{port}")
        for request in ([b""], [b"", b"\0"], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", bytes(8)]):
            socket.send_multipart(request)
        assert [socket.recv_multipart()[2] for _ in range(2)] == [bytes(8), kv_events.END]
        assert not socket.poll(100)


def test_wrong_requests_are_one_line_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_SELDOM_SECONDS", 3600.0)
    with publisher() as (_, _, port), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(1000):
            socket.send(b"")
        socket.send_multipart([b"", bytes(8)])
        assert socket.recv_multipart()[2] == bytes(8)
    assert len(caplog.records) == 1


def test_unread_replies_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber that does not read its replies delays those of others, and takes no more memory."""
    monkeypatch.setattr(kv_events, "MOST_UNREAD", 32 << 20)
    request = [b"", bytes(8)]
    megabyte = bytes(1 << 20)

    def describe(records: bytes) -> list[Event]:
        return [event | {"padding": megabyte} for event in events_of_store(records)]

    with publisher(describe) as (events, *ports), zmq.Context() as context, subscribed(*ports) as subscriber:
        for number in range(20):
            events.changes.note(b"r", number, True)
            replayed(subscriber, b"r:%d" % number)  # each change in a batch of its own
        strangers = [context.socket(zmq.DEALER) for _ in range(2)]
        for socket in strangers:
            for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 1 << 16), (zmq.LINGER, 0), (zmq.RCVTIMEO, 60_000)):
                socket.setsockopt(option, value)
            socket.connect(f"tcp://127.0.0.1:{ports[1]}")
        strangers[0].send_multipart(request)
        assert strangers[0].poll(60_000)
        strangers[1].send_multipart(request)
        assert not strangers[1].poll(300)
        assert len(events._unread) == 1
        while strangers[0].recv_multipart()[2] != kv_events.END:
            pass
        assert strangers[1].recv_multipart()[2] == bytes(8)
        for socket in strangers:
            socket.close()


def test_a_long_request_for_batches_is_not_received(caplog: pytest.LogCaptureFixture) -> None:
    with publisher() as (_, *ports), zmq.Context() as context, subscribed(*ports) as subscriber:
        with context.socket(zmq.DEALER) as socket:
            socket.connect(f"tcp://127.0.0.1:{ports[1]}")
            socket.send_multipart([b"", bytes(8), bytes(10 << 20)])
            assert list(subscriber.replay(0))
        assert list(subscriber.replay(0))
    assert not caplog.records


def test_the_first_reply_is_enough_for_a_req_socket() -> None:
    """vLLM's replay is asked by REQ sockets, too."""
    with publisher() as (_, _, port), zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send((10**6).to_bytes(8, "big"))
        assert socket.recv_multipart() == [b"", kv_events.END, b""]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://127.0.0.1:x", "an address is tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "an address is tcp://HOST:PORT"),  # ZMQ would listen on the port 34463
        ("nonsense", "an address is tcp://HOST:PORT"),
        (">", "an address is tcp://HOST:PORT"),
        ("", "an address is tcp://HOST:PORT"),
        ("tcp://198.51.100.1:5557", "this machine has no such address"),
        ("ipc:///no/such/folder", "ipc:///no/such/folder: No such file or directory$"),
    ],
)
def test_an_unusable_address_is_named(address: str, reason: str) -> None:
    with pytest.raises(KVEventsError, match=reason):
        KVEvents(address, "", EventQueue)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(KVEventsError, match=r"pyzmq is not installed: pip install '\.\[events\]'"):
        KVEvents("tcp://127.0.0.1:*", "", EventQueue)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--kv-events-replay", "tcp://*:1"], "kv-events-replay needs kv-events"),
        (["--kv-events", "tcp://*:1", "--store", "cluster", "--cluster-nodes", "a:1"], "no blocks are stored here"),
        (["--kv-events", "nonsense"], "kv-events must be .* such as tcp://127.0.0.1:5557, .* got 'nonsense'"),
        (["--kv-events", "tcp://*:65536"], "kv-events must be .*, got 'tcp://"),
        (["--kv-events", ">ipc://a", "--kv-events-replay", ">ipc://b"], "kv-events-replay must be .*, got '>ipc://b'"),
    ],
)
def test_a_wrong_configuration_is_refused(options: list[str], error: str) -> None:
    for words in (["--port", "0"], ["--check-config"]):
        with pytest.raises(SystemExit, match=error):
            app.main([*words, *options])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (HASH, ("kvpage", HIGH)),
        (f"lmcache.model@1@0@{HASH}@", ("kvpage", f"lmcache.model@1@0@{HASH}@:3".encode())),
        ("ab" * 7, ("kvpage", ("ab" * 7 + ":3").encode())),
        (f"a.b.{HASH[:31]}", ("kvpage:a.b", int(HASH[15:31], 16))),
        (f".{HASH}", ("kvpage", HIGH)),
        (f"a..{HASH}", ("kvpage:a.", HIGH)),
        (f"{HASH}.", ("kvpage", f"{HASH}.:3".encode())),
        (f"{HASH}{HASH}.{HASH[:16]}", (f"kvpage:{HASH}{HASH}", HIGH)),
        ("ab" * 128, ("kvpage", HIGH)),
        (f"a-{HASH}", ("kvpage", f"a-{HASH}:3".encode())),
        ("", ("kvpage", b":3")),
        (f"{{{'cd' * 16}}}{HASH}", ("kvpage", HIGH)),
        (f"{{vllm.lb.{'cd' * 16}}}vllm.lb.{HASH}", ("kvpage:vllm.lb", HIGH)),
        (f"{{a.{HASH}", ("kvpage:{a", HIGH)),
        ("{a}chat", ("kvpage", b"{a}chat:3")),
        (f"a.b.{HASH}".upper(), ("kvpage", f"a.b.{HASH}".upper().encode() + b":3")),
    ],
)
def test_names_with_hashes_are_recognised(name: str, found: tuple[str, int | bytes]) -> None:
    (event,) = described([(True, name.encode(), 3)])
    assert (event["ownership"], event["block_hashes"][0]) == found
