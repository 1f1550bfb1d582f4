"""The process that answers HTTP, while the store has names, manifests and blocks that are large beyond reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from browsing import SeenServer, start_seen_server
from servers import resident
from waiting import until

from kvpage_server.observe.asking import ask
from kvpage_server.observe.context import PIECE_BYTES, pages_of
from kvpage_server.observe.memory_by_agent import MOST_BYTES, MOST_KEY, Known, holdings_of_store

MIB = 1 << 20


@pytest.fixture
def seen() -> Iterator[SeenServer]:
    with start_seen_server("--maxmemory", "2gb") as seen:
        yield seen


def manifest(**received: Any) -> bytes:
    return b"0123456789abcdef" + json.dumps({"chain": ["b1"], "count": 4} | received).encode()


class Weighed:
    """A store that adds up the sizes of its replies."""

    def __init__(self, store: redis.Redis) -> None:
        self._store = store
        self.largest = 0  # bytes of the largest answer to one command
        self.total = 0

    def execute_command(self, *words: Any) -> Any:
        return self._store.execute_command(*words)

    def pipeline(self, transaction: bool) -> Any:
        pipeline = self._store.pipeline(transaction=transaction)
        execute = pipeline.execute

        def weigh(raise_on_error: bool = True) -> list[Any]:
            answers = execute(raise_on_error=raise_on_error)
            sizes = [size_of(answer) for answer in answers]
            self.largest, self.total = max([self.largest, *sizes]), self.total + sum(sizes)
            return list(answers)

        pipeline.execute = weigh
        return pipeline


def size_of(answer: Any) -> int:
    if isinstance(answer, bytes):
        return len(answer)
    if isinstance(answer, dict):
        return sum(map(size_of, answer.values())) + 8 * len(answer)
    return sum(map(size_of, answer)) if isinstance(answer, list) else 8


def events(seen: SeenServer, names: list[str]) -> dict[str, bytes]:
    """The data of the first event of each name."""
    found: dict[str, bytes] = {}
    with seen.browser() as browser, browser.stream("GET", "/page/events") as reply:
        name = ""
        for line in reply.iter_lines():
            word, _, rest = line.partition(": ")
            name = rest if word == "event" else name
            if word == "data":
                found.setdefault(name, rest.encode())
            if set(names) <= found.keys():
                return found
    raise AssertionError(f"only {found.keys()} arrived")


def test_long_names_cost_a_viewer_and_the_process_little(seen: SeenServer) -> None:
    with seen.server.client() as client:
        client.set("manifest:alice:f1", manifest(model="m" * 20_000, by="b" * 20_000))
        events(seen, ["holdings", "more"])
        before = resident(seen.companion())
        for number in range(100):
            client.set(b"manifest:%d%b:f1" % (number, b"n" * MIB), manifest())
        until(lambda: seen.event("overview", seen.browser())["contents"]["keys"] > 100, "the figures of now")
    received = events(seen, ["holdings", "more", "overview", "moments"])
    assert sum(map(len, received.values())) < 100_000
    assert [len(agent["model"]) for agent in json.loads(received["holdings"])["agents"]] == [128]
    assert resident(seen.companion()) < before + 32 * MIB


def test_a_look_reads_a_bounded_part_of_a_manifest(seen: SeenServer) -> None:
    with seen.server.client() as client:
        client.set("manifest:huge:f1", manifest(tokens=[1] * 5_000_000, chain=[f"{i:032}" for i in range(100_000)]))
        client.set(
            "manifest:many:f1", manifest(chain=[f"{i:032}" for i in range(10_000)], count=40_000, block_tokens=4)
        )
        client.set("manifest:" + "n" * MOST_KEY + ":f1", manifest())
        weighed = Weighed(client)
        holdings = ask(weighed, holdings_of_store())
        assert [agent.agent_id for agent in holdings.agents] == ["many"]
        assert holdings.unreadable == (b"manifest:huge:f1",)
        assert weighed.largest == MOST_BYTES
        assert weighed.total < 8 * MIB


def test_a_request_of_many_blocks_is_summed_by_the_server(seen: SeenServer) -> None:
    with seen.server.client() as client:
        with client.pipeline(transaction=False) as pipeline:
            for page in range(5000):
                pipeline.execute_command("KVPAGESET", "many", 0, 0, page, 0, 1, 8, 8, 0, bytes(128))
            pipeline.execute()
        weighed = Weighed(client)
        (request,) = ask(weighed, holdings_of_store(known=Known())).requests
        assert (request.blocks, request.pages, request.bytes) == (5000, 5000, 5000 * 128)
        assert weighed.largest < 1000
        (total,) = client.execute_command("KVPAGEINDEX", "many", "TOTAL")
        parts = client.execute_command("KVPAGEINDEX", "many", "WITHSIZES")
        assert total[b"memory"] == sum(part[b"memory"] for part in parts)
        assert (total[b"complete"], total[b"page"], total[b"planes"]) == (1, 0, [0])
        assert client.execute_command("KVPAGEINDEX", "nobody", "TOTAL") == []


def test_the_norms_of_a_large_block_are_read_in_pieces(seen: SeenServer) -> None:
    with seen.server.client() as client:
        layers, heads, tokens, values = 4, 8, 512, 256  # a page of 256 KiB, a block of 16 MiB
        body = bytes(range(60)) * (layers * heads * 2 * tokens * values * 2 // 60 + 1)
        body = body[: layers * heads * 2 * tokens * values * 2]
        planes = (0, 1, values, 1, 1, values)
        client.execute_command("KVBLOCKSET", "large", 0, layers, heads, tokens, 0, 2, *planes, body)
        weighed = Weighed(client)
        found = ask(weighed, pages_of(b"large"))
        assert found is not None
        assert found.norms.shape == (layers, 2, heads)
        assert (found.norms > 0).all()
        assert PIECE_BYTES // 2 < weighed.largest <= PIECE_BYTES
        with seen.browser() as browser:
            shown = browser.get("/page/block", params={"name": b"large".hex()}).json()
        assert shown["norms"][0][0][0] == pytest.approx(found.norms[0, 0, 0], rel=1e-3)


def test_scan_leaves_out_keys_that_are_too_long(seen: SeenServer) -> None:
    with seen.server.client() as client:
        client.mset({"short": 1, "l" * 100: 2})
        client.execute_command("ACL", "SETUSER", "some", "on", "nopass", "~s*", "~l*", "+@all")
        for _ in range(2):
            assert client.execute_command("SCAN", 0, "MAXLEN", 5, "COUNT", 1000) == (0, [b"short"])
            assert client.execute_command("SCAN", 0, "MAXLEN", 99, "MATCH", "l*", "COUNT", 1000) == (0, [])
            client.execute_command("AUTH", "some", "")
        with pytest.raises(redis.ResponseError, match="syntax error"):
            client.execute_command("SCAN", 0, "MAXLEN", 0)
        client.execute_command("AUTH", "default", "")
        client.execute_command("KVPAGESET", "r", 0, 0, 0, 0, 1, 8, 8, 0, bytes(128))
        with pytest.raises(redis.ResponseError, match="syntax error"):
            client.execute_command("SSCAN", "kv:r:index", 0, "MAXLEN", 5)
