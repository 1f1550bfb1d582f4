"""Names, patterns and manifests may contain any bytes: none breaks the output, or controls a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from browsing import SeenServer, start_seen_server
from servers import RunningServer, start_server
from test_kvpage_cli import kvpage, set_block

from kvpage_server.look.top import engines_table
from kvpage_server.observe.engines import TIERS, EngineFigures, TierFigures
from kvpage_server.observe.overview import parse
from kvpage_server.system.text import name_of_text

REQ = b"\xff\xfe\xc2\x9b31m\xe2\x80\xae"  # invalid UTF-8, and a control sequence of terminals
NO_TIERS = dict.fromkeys(TIERS, TierFigures())
CLEARS = b"\x1bc\x07\xc2\x9b31m\xe2\x80\xae"  # resets a terminal, a bell, red, and right-to-left
FOREIGN = b"\xff\xfe" + CLEARS
SHOWN = "\\xff\\xfe\\x1bc\\x07\\u009b31m\\u202e"


@pytest.fixture(scope="module")
def seen() -> Iterator[SeenServer]:
    """A server where everything that a user may name is FOREIGN."""
    with (
        start_seen_server() as seen,
        seen.server.client() as admin,
        seen.server.client() as other,
        ExitStack() as stack,
    ):
        admin.config_set("latency-monitor-threshold", 1)
        admin.config_set("slowlog-log-slower-than", 0)
        admin.config_set("maxmemory-policy", "noeviction")
        admin.execute_command("CONFIG", "SET", "quota", b"kv:%b.* 64b kv:%b* 1mb" % (REQ, FOREIGN))
        admin.execute_command("ACL", "SETUSER", FOREIGN, "on", ">p", b"~%b*" % FOREIGN, b"&%b*" % FOREIGN, "+@all")
        other.execute_command("AUTH", FOREIGN, "p")
        for words in (["GET", "denied"], ["SET", FOREIGN, FOREIGN], [FOREIGN], ["CONFIG", "GET", FOREIGN]):
            with pytest.raises(redis.ResponseError) if words[0] != "SET" else stack:
                other.execute_command(*words)
        listening = stack.enter_context(other.pubsub())  # type: ignore[no-untyped-call]
        listening.subscribe(FOREIGN)
        assert listening.get_message(timeout=60)
        yield seen


def test_every_answer_about_the_server_is_given(seen: SeenServer) -> None:
    asked: list[list[Any]] = [
        ["INFO", "everything"], ["CONFIG", "GET", "*"], ["ACL", "LIST"], ["ACL", "USERS"], ["ACL", "LOG"],
        ["ACL", "GETUSER", FOREIGN], ["CLIENT", "LIST"], ["SLOWLOG", "GET", 100], ["PUBSUB", "CHANNELS"],
        ["LATENCY", "LATEST"], ["LATENCY", "DOCTOR"], ["MEMORY", "DOCTOR"], ["KVPAGEWHY", REQ],
    ]  # fmt: skip
    with seen.server.client(protocol=3) as client:
        answers = {" ".join(map(str, words[:2])): client.execute_command(*words) for words in asked}
        with pytest.raises(redis.ResponseError, match="the quota of"):
            client.execute_command("KVPAGESET", REQ + b".x", 0, 0, 0, 0, 1, 64, 64, 0, bytes(8192))
    assert FOREIGN in answers["ACL USERS"]


def test_info_escapes_a_pattern(seen: SeenServer) -> None:
    with seen.server.client(protocol=3) as client:
        received = client.execute_command(b"INFO", "quotas")
    assert f"pattern=kv:{SHOWN}*\r\n" in received.decode()


@pytest.mark.parametrize("pattern", ["kv:a,bytes=0,limit=0", "a=b,pattern=c*", "\\~a\\x2c*", "a%2cb"])
def test_no_pattern_of_a_quota_adds_a_field_to_info(pattern: str) -> None:
    with start_server() as server, server.client() as client:
        client.config_set("quota", f"{pattern} 1mb")
        found = client.info("quotas")["quota0"]
        assert [*found] == ["limit", "bytes", "evicted_keys", "index_bytes", "pattern"]
        assert name_of_text(str(found["pattern"])) == pattern.encode()
        (quota,) = parse(client.execute_command(b"INFO", b"everything").decode()).quotas
        assert (quota.pattern, quota.limit, quota.bytes) == (pattern, 1 << 20, 0)


def test_figures_for_people_and_for_prometheus_go_on(seen: SeenServer) -> None:
    assert seen.metrics()["kvpage_quota_limit_bytes", f"kv:{SHOWN}*".replace("\\", "\\\\")] == 1 << 20
    for words in (["status"], ["status", "--json"], ["ls"]):
        printed(*words, url=seen.server.url)


def test_the_page_continues(seen: SeenServer) -> None:
    with seen.browser() as browser, browser.stream("GET", "/page/events") as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        more = next(found for line in lines if "connected" in (found := json.loads(line.removeprefix("data: "))))
    assert any("\\xff\\xfe" in client["user"] for client in more["connected"]["clients"])


def printed(*words: str, url: str, code: int = 0) -> str:
    """The text of a terminal, all of which can be printed. `code` is the expected exit code."""
    *found, errors = kvpage(*words, url=url)
    received = str(found[1])
    assert (found[0], errors) == (code, "")
    assert received.replace("\n", "").isprintable(), received
    return received


def test_no_name_is_a_command_to_a_terminal(server: RunningServer, client: redis.Redis) -> None:
    name = "x" + CLEARS.decode()
    manifest = {"model": name, "by": name, "saved": 1, "chain": ["gone", "r"], "block_tokens": 2, "count": 4}
    for agent in (name, "alice"):
        client.set(f"manifest:{agent}:00aa", "0" * 16 + json.dumps(manifest))
    set_block(client, "r")
    client.execute_command("KVPAGESET", b"\xc2\x9b31mreq", 0, 0, 0, 0, 1, 64, 64, 0, bytes(8192))
    for words in (["ls"], ["why", "alice"], ["stat", "alice"], ["ls", "\x9b31mreq"]):
        code = 1 if words[0] in ("why", "stat") else 0  # a block is missing
        printed(*words, url=server.url, code=code)
        assert json.loads(printed(*words, "--json", url=server.url, code=code))
    agents = json.loads(printed("ls", "--json", url=server.url))["agents"]
    assert {agent["agent"] for agent in agents} == {name, "alice"}, "programs get the names as they are"
    assert kvpage("ls", f"nobody{name}", url=server.url)[2].strip().isprintable()


def test_each_name_has_another_text_in_json(server: RunningServer, client: redis.Redis) -> None:
    names = b"\xff", rb"\xff", rb"\\xff", b"\\\xff", "\udcff".encode("utf-8", "surrogatepass")
    for name in names:
        client.execute_command("KVPAGESET", name, 0, 0, 0, 0, 1, 64, 64, 0, bytes(8192))
        client.set(b"manifest:%b:00aa" % name, b"0" * 16 + b'{"chain": ["gone"], "block_tokens": 4, "count": 4}')
    found = json.loads(printed("ls", "--json", url=server.url))
    for texts in ([each["request"] for each in found["requests"]], [each["agent"] for each in found["agents"]]):
        assert len({*texts}) == len(names)
        assert {text.encode().decode("unicode_escape").encode("latin-1") for text in texts} == {*names}


def test_an_engine_may_call_itself_anything() -> None:
    engine = EngineFigures(
        name="\ud800" + CLEARS.decode(), model="\n", answers=1, computed=1, used=1, room=0, tiers=NO_TIERS
    )
    cells = [str(cell) for column in engines_table([engine]).columns for cell in column.cells]
    assert "".join(cells).isprintable()


def test_a_page_may_live_longer_than_a_calendar_lasts(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "r")
    client.expire("kv:r:0:0:0:0", 9 * 10**15)
    assert "left of" in printed("stat", "kv:r:0:0:0:0", url=server.url)


@pytest.mark.parametrize(
    "wrong",
    [
        {"saved": 10**30}, {"saved": -(10**17)}, {"saved": 10**15}, {"saved": 1.5}, {"saved": True},
        {"created": 10**30}, {"created": -1}, {"created": "1"}, {"saved": float("inf")},
        {"count": -5}, {"count": 10**30}, {"count": 5}, {"count": 0}, {"count": float("nan")}, {"count": "4"},
        {"block_tokens": -4}, {"block_tokens": 1}, {"block_tokens": 10**400}, {"block_tokens": None},
        {"together": -1}, {"together": 10**30}, {"together": []},
        {"model": "\ud800x"}, {"model": 7}, {"model": {"a": 1}}, {"by": "\udfff"}, {"by": ["x"]},
        {"chain": "r"}, {"chain": ["\ud800"]}, {"chain": [5]}, {"chain": []}, {"chain": {"r": 1}}, {"chain": ["r"] * 9},
    ],
    ids=lambda wrong: ascii(wrong)[:30],
)  # fmt: skip
def test_an_invalid_manifest_is_unreadable_and_hides_no_other(
    server: RunningServer, client: redis.Redis, wrong: dict[str, Any]
) -> None:
    set_block(client, "r")
    right = {"model": "tiny", "by": "host:1", "created": 1, "saved": 1, "chain": ["r"], "block_tokens": 4, "count": 4}
    for agent, received in (("alice", right), ("mallory", right | wrong)):
        client.set(f"manifest:{agent}:00aa", "0" * 16 + json.dumps(received))
    found = json.loads(printed("ls", "--json", url=server.url))
    assert [agent["agent"] for agent in found["agents"]] == ["alice"]
    assert found["unreadable"] == ["manifest:mallory:00aa"]
    assert "1 manifest cannot be read" in printed("ls", url=server.url)
    assert "its manifest cannot be read" in printed("why", "mallory", url=server.url, code=1)
    printed("stat", "alice", url=server.url)


def test_a_clock_that_is_ahead_is_no_age(server: RunningServer, client: redis.Redis) -> None:
    set_block(client, "r")
    received = {"saved": 253_000_000_000_000, "chain": ["r"], "block_tokens": 4, "count": 4}
    client.set("manifest:alice:00aa", "0" * 16 + json.dumps(received))
    assert " 0 s " in printed("ls", url=server.url)
    assert "1970" not in printed("why", "alice", url=server.url)


def test_a_long_name_is_one_line_in_a_pipe_and_pads_no_other(server: RunningServer, client: redis.Redis) -> None:
    for agent, model in (("a" * 400, "m" * 5000), ("b" * 400, "tiny"), ("carol", "tiny")):
        received = {"chain": ["r"], "block_tokens": 4, "count": 4, "model": model}
        client.set(f"manifest:{agent}:00aa", "0" * 16 + json.dumps(received))
    _, *lines = printed("ls", url=server.url).split("\n\n")[0].splitlines()
    assert len(lines) == 3
    assert {line.split()[0] for line in lines} == {"a" * 400, "b" * 400, "carol"}
    assert min(map(len, lines)) < 200


def test_no_name_is_markup(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    for number, name in enumerate(("[/red]", "[bold]x", "[link=a]")):
        set_block(client, name)
        client.execute_command("KVPAGEKEEP", name, 1, 3600, f"kv:{name}:0:0:0:0")
        received = {"model": name, "by": name, "saved": 1, "chain": [name], "block_tokens": 4, "count": 4}
        client.set(f"manifest:{name}:00aa", "0" * 16 + json.dumps(received))
        commands = ["status"], ["ls"], ["ls", name], ["stat", name], ["why", name], ["stat", f"kv:{name}:0:0:0:0"]
        for words in (
            *commands,
            ["dump", str(tmp_path / "all"), "--update"],
            ["dump", "--request", name, str(tmp_path / f"{number}")],
        ):
            shown = printed(*words, url=server.url)
            assert words[0] in ("why", "dump") or name in shown, words
    assert "[/red]" in printed("inspect", str(tmp_path / "all"), url="")


def test_printed_names_are_taken_by_the_commands(server: RunningServer, client: redis.Redis, tmp_path: Path) -> None:
    names = [
        b"\xff",
        rb"\xff",
        b"\\\\n",
        b"\xc2\x85",
        b"\x85",
        "\u200b\u202e\U000e0041".encode(),
        b"a'b$c`%41",
        "é😀".encode(),
    ]
    for name in names:
        client.execute_command("KVPAGESET", name, 0, 0, 0, 0, 1, 64, 64, 0, bytes(8192))
    rows = [line.split()[0] for line in printed("ls", url=server.url).splitlines()[1:]]
    assert len({*rows}) == len(names)
    found = json.loads(printed("ls", "--json", url=server.url))["requests"]
    for name in [*rows, *(each["request"] for each in found)]:
        for words in (["ls", name], ["verify", name], ["stat", f"kv:{name}:0:0:0:0"], ["why", name, *"0000"]):
            printed(*words, url=server.url)
        assert printed("why", name, "1", *"000", url=server.url, code=1).startswith("never stored")
    assert printed("dump", str(tmp_path), *(f"--request={name}" for name in rows), url=server.url)
    inspected = printed("inspect", str(tmp_path), url="").splitlines()
    assert {line.split()[0] for line in inspected[2:]} == {*rows}
    code, _, errors = kvpage("why", "a\\b", url=server.url)
    assert (code, r"a backslash in a name is written \\, and a byte \xNN" in errors) == (2, True)
