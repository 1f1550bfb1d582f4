"""Statistics of engines are accepted within bounds: counts grow, names are cut, and invalid messages are ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpage_server.observe import engines
from kvpage_server.observe.engines import CHANNEL, MOST_ENGINES, MOST_USERS, SILENT_SECONDS, Engines, parse


def message(name: str = "host:1", computed: int = 0, page: int = 0, **changes: Any) -> bytes:
    tiers = {tier: {"hits": 0, "tokens": 0, "bytes": 0} for tier in engines.TIERS}
    tiers["page"]["tokens"] = page
    usual = {"name": name, "model": "tiny", "answers": 1, "computed": computed, "used": 0, "room": 0, "tiers": tiers}
    return json.dumps(usual | changes).encode()


def test_tokens_are_counted_from_an_engines_first_message() -> None:
    """Its earlier tokens are not part of the current rate."""
    heard = Engines()
    heard.receive(CHANNEL, message(computed=1000, page=5000))
    assert not any(heard.seen().tokens.values())
    heard.receive(CHANNEL, message(computed=1010, page=5090))
    assert (heard.seen().tokens["none"], heard.seen().tokens["page"]) == (10, 90)
    heard.receive(CHANNEL, message(computed=3, page=0))  # it was started anew
    assert (heard.seen().tokens["none"], heard.seen().tokens["page"]) == (10, 90)


def test_a_silent_engine_is_disconnected_until_its_next_message() -> None:
    now = 0.0
    heard = Engines(lambda: now)
    heard.receive(CHANNEL, message("host:2"))
    heard.receive(CHANNEL, message("host:1", computed=1))
    assert [each.name for each in heard.seen().connected] == ["host:1", "host:2"]
    now = SILENT_SECONDS + 1
    assert heard.seen().connected == []
    heard.receive(CHANNEL, message("host:1", computed=5))
    assert [each.name for each in heard.seen().connected] == ["host:1"]
    assert heard.seen().tokens["none"] == 4


def test_there_are_so_many_engines_at_most() -> None:
    heard = Engines()
    for number in range(3 * MOST_ENGINES):
        heard.receive(CHANNEL, message(f"host:{number}"))
    assert len(heard.seen().connected) == MOST_ENGINES


def test_a_user_sees_messages_of_its_own_channel_only() -> None:
    heard = Engines()
    for computed in (0, 10):
        heard.receive(CHANNEL + b":ann", message(computed=computed))
        heard.receive(CHANNEL + b":bob", message(computed=5 * computed))  # of the same name, which anybody may take
        heard.receive(CHANNEL, message("host:2", computed=7 * computed))
    assert [len(heard.seen(user).connected) for user in ("ann", "bob", "nobody", None)] == [1, 1, 0, 3]
    assert [heard.seen(user).tokens["none"] for user in ("ann", "bob", "nobody", None)] == [10, 50, 0, 130]


def test_there_are_so_many_users_at_most() -> None:
    """Further engines are visible to users with all rights."""
    heard = Engines()
    for number in range(3 * MOST_USERS):
        heard.receive(b"%b:%d" % (CHANNEL, number), message(f"host:{number}"))
    known = [number for number in range(3 * MOST_USERS) if heard.seen(str(number)).connected]
    assert len(known) <= MOST_USERS
    assert len(heard.seen().connected) == MOST_ENGINES


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
        message(tiers=dict.fromkeys(engines.TIERS, 1)),
        message(model="x" * 5000),
    ],
)
def test_invalid_messages_are_ignored(raw: bytes) -> None:
    heard = Engines()
    heard.receive(CHANNEL, raw)
    assert (parse(raw), heard.seen().connected) == (None, [])


def test_names_are_cut() -> None:
    found = parse(message("n" * 1000, model="m" * 1000))
    assert found is not None
    assert (len(found.name), len(found.model)) == (100, 100)
