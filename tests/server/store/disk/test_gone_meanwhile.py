"""Blocks that are removed during a command in steps: it treats them as removed."""

from __future__ import annotations

import random
import select
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from servers import RunningServer, start_server
from test_tiered import settle
from turns import measured
from waiting import until
from wire import Wire, encode_command, parse

from kvpage_server.commands.dispatch.checks import wait_for_write_behind
from kvpage_server.commands.notifying import tracking
from kvpage_server.store.disk.database import Disk

MB = 1024**2
UNREADABLE = Path(__file__).parents[3] / "support" / "unreadable.py"


def words(*command: Any) -> list[bytes]:
    return [word if isinstance(word, bytes) else str(word).encode() for word in command]


def meanwhile(server: RunningServer, command: list[bytes], other: list[bytes], after: float) -> Any:
    """The reply to a command, during which somebody else says something."""
    with Wire(server.port) as first, Wire(server.port) as second:
        first.send(encode_command(command))
        time.sleep(after)
        second.ask(*other)
        return parse(first.reply())


def test_all_keys_are_removed_while_a_block_on_disk_is_verified(tmp_path: Path) -> None:
    shape = (1, 4096, 1, 0, 1, 0, 8, 256)  # of many pages: a verification has many steps
    with (
        start_server("--store", "tiered", "--maxmemory", "1mb", directory=tmp_path) as server,
        server.client() as client,
    ):
        for attempt in range(8):
            client.execute_command("KVBLOCKSET", "v", 0, *shape, random.Random(attempt).randbytes(MB))
            client.set("s", bytes(MB))
            settle(client)
            reply = meanwhile(server, words("KVPAGEVERIFY", "v"), words("FLUSHALL"), attempt / 10_000)
            assert reply in ([b"checked", n, b"unchecked", 0, b"corrupt", []] for n in (0, 4096))


@pytest.mark.parametrize("other", ["FLUSHALL", "KVPAGEDEL r"])
@pytest.mark.parametrize("command", ["KVPAGEPIN r", "KVPAGELEASE r 3600000"])
def test_a_block_removed_before_its_pin_or_lease_is_absent(command: str, other: str) -> None:
    pages = [words("r", 0, 0, page, 0, 8, 1, 1, 0, b"x") for page in range(5000)]
    batch = [word for page in pages for word in page]
    with start_server("--maxmemory", "1gb") as server, server.client() as client:
        for attempt in range(5):
            client.execute_command("KVPAGEMSET", len(pages), *batch)
            meanwhile(server, words(*command.split()), words(*other.split()), attempt / 1000)
            assert client.dbsize() == 0
            assert client.info("kvpage")["leased_or_pinned"] == 0


def test_a_disconnected_clients_batch_waits_for_the_queue(tmp_path: Path) -> None:
    """Its steps go on before the event that they wait for."""
    options = ("--store", "tiered", "--write-behind-limit", "1mb")
    with measured(*options, directory=tmp_path) as turns, redis.Redis(port=turns.server.port) as client:
        client.ping()

        def waits() -> tuple[int, int, bool]:
            (one,) = turns.server.clients.values()
            turns.server.keyspace.contents.set_string(b"s", bytes(2 * MB))
            found = 0
            for _ in zip(wait_for_write_behind(one), range(5), strict=False):
                found += 1
            one.in_exec = True
            in_exec = len([*wait_for_write_behind(one)])
            one.in_exec = False
            return found, in_exec, turns.server.tiered is not None and turns.server.tiered.behind.full

        assert turns.on_loop(waits) == (5, 0, True)
        client.save()
        assert turns.on_loop(lambda: [*wait_for_write_behind(next(iter(turns.server.clients.values())))]) == []


def test_a_block_removed_during_its_load_leaves_its_quota(tmp_path: Path) -> None:
    """It stood in the quota's queue again, and the write that was to evict it failed."""
    block = (1, 1, 1024, 0, 1, 0, 1, 512)
    with start_server("--store", "tiered", directory=tmp_path) as server, server.client() as client:
        client.execute_command("KVBLOCKSET", "v", 0, *block, random.Random(0).randbytes(MB))
    slow = tmp_path / "slow"
    slow.touch()
    options = ("--store", "tiered", "--quota", "kv:v:*", "3mb", "--maxmemory", "1mb")  # so reads are borrowed
    with start_server(*options, directory=tmp_path, program=[str(UNREADABLE)]) as server, server.client() as client:
        with Wire(server.port) as reader:
            reader.send(encode_command(words("KVBLOCKGET", "v", 0)))
            until(lambda: any(one["cmd"] == "kvblockget" for one in client.client_list()))
            assert client.execute_command("KVPAGEDEL", "v", 0) == 1
            slow.unlink()
            reader.reply()
        for number in range(1, 6):
            assert client.execute_command("KVBLOCKSET", "v", number, *block, bytes(MB)) == b"OK"
        assert client.execute_command("KVBLOCKEXISTS", "v", 5)


def test_a_write_behind_messages_is_answered_after_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages to clients that track keys take several turns."""
    may_write = threading.Event()

    def write(disk: Disk, changes: Any, run: Any = Disk.write) -> Any:
        assert may_write.wait(60)
        return run(disk, changes)

    monkeypatch.setattr(tracking, "_TURN", -1)
    options = ("--store", "tiered", "--appendfsync", "always")
    with measured(*options, directory=tmp_path) as turns:
        port = turns.server.port
        with Wire(port) as writer, Wire(port) as reader, Wire(port) as other, monkeypatch.context() as patch:
            reader.ask(b"HELLO", b"3")
            assert reader.ask(b"CLIENT", b"TRACKING", b"ON", b"BCAST") == b"+OK\r\n"
            patch.setattr(Disk, "write", write)
            try:
                writer.send(encode_command(words("SET", "key", "value")))
                assert b"invalidate" in reader.reply()
                for _ in range(20):  # turns, in which nothing else is left to do
                    other.ask(b"PING")
                assert not select.select([writer._socket], [], [], 0)[0]
            finally:
                may_write.set()
            assert writer.reply() == b"+OK\r\n"
