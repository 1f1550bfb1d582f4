"""Statistics of engines are accepted within bounds: counts grow, names are cut, and invalid messages are ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpage_server.observe.engines import CHANNEL, MOST_ENGINES, MOST_USERS, SILENT_SECONDS, TIERS, Engines, parse


def message(name: str = "host:1", computed: int = 0, page: int = 0, **changes: Any) -> bytes:
    tiers = {tier: {"hits": 0, "tokens": 0, "bytes": 0} for tier in TIERS}
    tiers["page"]["tokens"] = page
    usual = {"name": name, "model": "tiny", "answers": 1, "computed": computed, "used": 0, "room": 0, "tiers": tiers}
    return json.dumps(usual | changes).encode()


def test_tokens_are_counted_from_an_engines_first_message() -> None:
    """Its earlier tokens are not part of the current rate."""
    registry = Engines()
    registry.receive(CHANNEL, message(computed=1000, page=5000))
    assert not any(registry.seen().tokens.values())
    registry.receive(CHANNEL, message(computed=1010, page=5090))
    assert (registry.seen().tokens["none"], registry.seen().tokens["page"]) == (10, 90)
    registry.receive(CHANNEL, message(computed=3, page=0))  # it was started anew
    assert (registry.seen().tokens["none"], registry.seen().tokens["page"]) == (10, 90)


def test_a_silent_engine_is_disconnected_until_its_next_message() -> None:
    now = 0.0
    registry = Engines(lambda: now)
    registry.receive(CHANNEL, message("host:2"))
    registry.receive(CHANNEL, message("host:1", computed=1))
    assert [each.name for each in registry.seen().connected] == ["host:1", "host:2"]
    now = SILENT_SECONDS + 1
    assert registry.seen().connected == []
    registry.receive(CHANNEL, message("host:1", computed=5))
    assert [each.name for each in registry.seen().connected] == ["host:1"]
    assert registry.seen().tokens["none"] == 4


def test_there_are_so_many_engines_at_most() -> None:
    registry = Engines()
    for number in range(3 * MOST_ENGINES):
        registry.receive(CHANNEL, message(f"host:{number}"))
    assert len(registry.seen().connected) == MOST_ENGINES


def test_a_user_sees_messages_of_its_own_channel_only() -> None:
    registry = Engines()
    for computed in (0, 10):
        registry.receive(CHANNEL + b":ann", message(computed=computed))
        registry.receive(CHANNEL + b":bob", message(computed=5 * computed))  # of the same name, which anybody may take
        registry.receive(CHANNEL, message("host:2", computed=7 * computed))
    assert [len(registry.seen(user).connected) for user in ("ann", "bob", "nobody", None)] == [1, 1, 0, 3]
    assert [registry.seen(user).tokens["none"] for user in ("ann", "bob", "nobody", None)] == [10, 50, 0, 130]


def test_there_are_so_many_users_at_most() -> None:
    """Further engines are visible to users with all rights."""
    registry = Engines()
    for number in range(3 * MOST_USERS):
        registry.receive(b"%b:%d" % (CHANNEL, number), message(f"host:{number}"))
    known = [number for number in range(3 * MOST_USERS) if registry.seen(str(number)).connected]
    assert len(known) <= MOST_USERS
    assert len(registry.seen().connected) == MOST_ENGINES


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 4000,
        b"1e9999",
        message(computed=-1),
        message(computed=1 << 63),
        message(answers="many"),
        message(answers=1.5),
        message(tiers={}),
        message(tiers=[]),
        message(tiers=dict.fromkeys(TIERS, 1)),
        message(model="x" * 5000),
    ],
)
def test_invalid_messages_are_ignored(raw: bytes) -> None:
    registry = Engines()
    registry.receive(CHANNEL, raw)
    assert (parse(raw), registry.seen().connected) == (None, [])


def test_names_are_cut() -> None:
    found = parse(message("n" * 1000, model="m" * 1000))
    assert found is not None
    assert (len(found.name), len(found.model)) == (100, 100)
