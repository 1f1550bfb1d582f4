"""Clients that send wrong passwords are slowed down; other clients are not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from servers import RunningServer, start_server
from waiting import until

from kvpage_server.commands.access import users
from kvpage_server.commands.access.users import FREE_FAILURES, LoginLimiter, TooMany


class Clock:
    """Monotonic seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(users, "time", clock)
    return clock


def fail(known: LoginLimiter, address: str, times: int = FREE_FAILURES) -> None:
    for _ in range(times):
        known.note(address)


def test_ten_failures_are_free_and_then_tries_are_a_second_apart(clock: Clock) -> None:
    known = LoginLimiter()
    fail(known, "10.0.0.1:1", FREE_FAILURES - 1)
    assert known.take_turn("10.0.0.1:2") == 0
    known.note("10.0.0.1:2")
    assert [known.take_turn(f"10.0.0.1:{port}") for port in range(3)] == [1, 2, 3]
    assert known.take_turn("10.0.0.2:1") == 0
    assert known.take_turn("10.0.0.1:1", over_http=True) == 0
    clock.now += 10
    assert known.take_turn("10.0.0.1:9") == 0


def test_too_long_a_wait_is_refused(clock: Clock) -> None:
    known = LoginLimiter()
    fail(known, "10.0.0.1:1")
    waits = [known.take_turn("10.0.0.1:1") for _ in range(10)]
    assert max(waits) == 10
    with pytest.raises(TooMany, match="try again in 10 seconds"):
        known.take_turn("10.0.0.1:1")


def test_failures_are_forgiven_one_every_six_seconds(clock: Clock) -> None:
    known = LoginLimiter()
    fail(known, "10.0.0.1:1", FREE_FAILURES + 2)
    clock.now += 2 * 6
    assert known.take_turn("10.0.0.1:1") == 0  # a turn that is due
    assert known.take_turn("10.0.0.1:1") == 1
    clock.now += 6
    assert [known.take_turn("10.0.0.1:1") for _ in range(3)] == [0, 0, 0]


def test_an_ipv6_network_counts_as_one_address(clock: Clock) -> None:
    known = LoginLimiter()
    for host in range(FREE_FAILURES):
        known.note(f"[2001:db8::{host:x}]:70")
    assert known.take_turn("[2001:db8::ffff]:80") == 1
    assert known.take_turn("[2001:db8:0:1::1]:80") == 0
    assert known.take_turn("[fe80::1%eth0]:80") == 0


def test_memory_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "_MOST_ADDRESSES", 100)
    known = LoginLimiter()
    fail(known, "10.0.0.1:1")
    for host in range(99):
        known.note(f"10.1.0.{host}:1")
    assert known.take_turn("10.0.0.1:1") == 1
    known.note("10.2.0.1:1")
    assert len(known) == 100
    assert known.take_turn("10.0.0.1:1") == 0


@pytest.fixture
def locked() -> Iterator[RunningServer]:
    with start_server("--requirepass", "right", "--user", "app", "on", ">word", "~*", "+@all") as server:
        yield server


def say(server: RunningServer, *commands: str) -> list[str]:
    """The first line of each reply, on a connection of its own."""
    with server.connect() as sock, sock.makefile("rb") as replies:
        found = []
        for command in commands:
            sock.sendall(command.encode() + b"\r\n")
            found.append(replies.readline().decode().strip())
        return found


WRONG = "-WRONGPASS invalid username-password pair or user is disabled."


def test_a_guesser_is_slowed_on_all_connections_others_are_not(locked: RunningServer) -> None:
    with locked.client(password="right") as known:
        known.ping()
        assert say(locked, *["AUTH wrong"] * FREE_FAILURES) == [WRONG] * FREE_FAILURES
        began = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda n: say(locked, f"AUTH wrong{n}"), range(3)))
        assert answers == [[WRONG]] * 3
        assert time.monotonic() - began > 2.5  # the first after a second, the others a second apart
        assert known.ping()
        assert say(locked, "AUTH app word", "PING") == ["+OK", "+PONG"]  # in its turn
    assert locked.log.count("a wrong password") == 1


def test_others_are_answered_while_a_guesser_waits(locked: RunningServer) -> None:
    with locked.client(password="right") as known, locked.connect() as guesser:
        known.ping()
        guesser.sendall(b"AUTH wrong\r\n" * (FREE_FAILURES + 3))
        received = b""
        while received.count(b"WRONGPASS") < FREE_FAILURES:
            received += guesser.recv(10_000)
        assert known.set("k", "v")
        guesser.settimeout(0.1)
        with suppress(TimeoutError):
            received += guesser.recv(10_000)
        assert received.count(b"WRONGPASS") < FREE_FAILURES + 3, "it waits for a second, and for another, and another"


def test_a_transaction_is_no_way_round(locked: RunningServer) -> None:
    say(locked, *["AUTH wrong"] * FREE_FAILURES)
    with locked.connect() as sock, sock.makefile("rb") as replies:
        sock.sendall(b"AUTH app word\r\nMULTI\r\nAUTH wrong\r\nSET k v\r\nEXEC\r\n")
        lines = [replies.readline().decode().strip() for _ in range(7)]
    assert lines[:5] == ["+OK", "+OK", "+QUEUED", "+QUEUED", "*2"]
    assert lines[5] == "-ERR 'auth' would have to wait, and a command inside a transaction can't"
    assert lines[6] == "+OK"


def test_hello_waits_as_auth_does(locked: RunningServer) -> None:
    say(locked, *["AUTH wrong"] * FREE_FAILURES)
    began = time.monotonic()
    assert say(locked, "HELLO 3 AUTH app wrong") == [WRONG]
    assert time.monotonic() - began > 0.5


def test_a_refusal_names_the_time_to_retry(locked: RunningServer) -> None:
    say(locked, *["AUTH wrong"] * FREE_FAILURES)
    with locked.connect() as sock, sock.makefile("rb") as replies, locked.client(password="right") as known:
        known.ping()
        waiting = [locked.connect() for _ in range(10)]
        for one in waiting:
            one.sendall(b"AUTH wrong\r\n")
        until(lambda: [other["cmd"] for other in known.client_list()].count("auth") == 10)
        sock.sendall(b"AUTH app word\r\n")
        assert b"ERR too many wrong passwords came from your address: try again in 10 seconds" in replies.readline()
        for one in waiting:
            one.close()
