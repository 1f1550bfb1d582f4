"""The output stays small for any number of names that clients invent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest
from browsing import SeenServer, start_seen_server
from servers import resident
from waiting import until
from wire import Wire, encode_command

from kvpage_server.monitor.app import MOST_LABELS, OTHERS
from kvpage_server.observe.engines import MOST_ENGINES, TIERS
from kvpage_server.observe.memory_by_agent import LookLimits
from kvpage_server.web.routes import MOST_AGENTS, MOST_REQUESTS

MIB = 1 << 20
TIER = {"hits": 1, "tokens": 1, "bytes": 1}


def manifest(name: str) -> str:
    return "0" * 16 + json.dumps({"agent_id": name, "model": name, "chain": [name], "count": 16, "block_tokens": 16})


def engine(name: str) -> str:
    figures = dict.fromkeys(("answers", "computed", "used", "room"), 1)
    return json.dumps({"name": name, "model": name, "tiers": dict.fromkeys(TIERS, TIER), **figures})


INVENTED: Mapping[str, Callable[[str], list[str]]] = {
    "commands": lambda name: [f"NOSUCH-{name}"],
    "clients": lambda name: ["CLIENT", "SETNAME", name],
    "libraries": lambda name: ["CLIENT", "SETINFO", "LIB-NAME", name],
    "misses": lambda name: ["KVPAGEGET", name, "0", "0", "0", "0"],
    "requests": lambda name: ["KVPAGESET", name, "0", "0", "0", "0", "1", "2", "4", "0", "0123456789abcdef"],
    "agents": lambda name: ["SET", f"manifest:{name}:{name:0>16}", manifest(name)],
    "engines": lambda name: ["PUBLISH", f"kvpage:engines:{name}", engine(name)],
}


def invent(seen: SeenServer, names: range) -> None:
    with Wire(seen.server.port) as wire:
        for start in names[::100]:
            some = [f"invented{number}" for number in range(start, min(start + 100, names.stop))]
            asked = [[word.encode() for word in of(name)] for name in some for of in INVENTED.values()]
            wire.send(b"".join(map(encode_command, asked)))
            for _ in asked:
                wire.reply()


def shown(seen: SeenServer, agents: int) -> dict[str, str]:
    """Return the events of a page after it has received this number of agents."""
    received: dict[str, str] = {}
    with seen.browser() as browser, browser.stream("GET", "/page/events") as reply:
        for line in reply.iter_lines():
            word, _, rest = line.partition(": ")
            if word == "event":
                name = rest
            elif word == "data":
                received[name] = rest
            if word == "data" and name == "more" and len(json.loads(received["holdings"])["agents"]) >= agents:
                break
    return received


def engines_shown(seen: SeenServer) -> int:
    """The number of engines on the page after more of them have published, since a silent engine is not shown."""
    with seen.server.client() as client, client.pipeline(transaction=False) as pipe:
        for number in range(2 * MOST_ENGINES):
            pipe.publish(f"kvpage:engines:{number}", engine(f"engine{number}"))
        pipe.execute()
    return len(json.loads(shown(seen, MOST_AGENTS)["overview"])["engines"])


@pytest.mark.parametrize("count", [3000, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_names_that_clients_invent_become_no_labels_and_few_rows(count: int) -> None:
    with start_seen_server("--maxmemory", "64mb") as seen:
        invent(seen, range(1))
        shown(seen, 1)
        until(lambda: ("kvpage_errors_total", "ERR") in seen.metrics(), "the figures of now")
        labels, memory = seen.metrics().keys(), resident(seen.companion())

        invent(seen, range(1, count))
        until(lambda: seen.metrics()["kvpage_errors_total", "ERR"] >= count, "the figures of now")
        received = shown(seen, MOST_AGENTS)
        assert seen.metrics().keys() == labels
        assert resident(seen.companion()) < memory + 48 * MIB
        until(lambda: engines_shown(seen) == MOST_ENGINES, "as many engines as are shown")

    assert sum(map(len, received.values())) < MIB
    holdings = json.loads(received["holdings"])
    assert len(holdings["agents"]) == MOST_AGENTS < holdings["agent_count"] <= LookLimits().agents
    assert len(holdings["requests"]) == MOST_REQUESTS


def test_of_many_quotas_the_largest_have_labels() -> None:
    with start_seen_server() as seen, seen.server.client() as client:
        quotas = {f"kv:tenant{number}.*": f"{number + 1}mb" for number in range(3 * MOST_LABELS)}
        client.config_set("quota", " ".join(f"{pattern} {limit}" for pattern, limit in quotas.items()))
        until(lambda: any(name == "kvpage_quota_limit_bytes" for name, *_ in seen.metrics()), "the figures of now")
        received = seen.metrics()
    limits = {key[1]: limit for key, limit in received.items() if key[0] == "kvpage_quota_limit_bytes"}
    assert len(limits) == MOST_LABELS + 1
    assert limits["kv:tenant299.*"] == 300 * MIB
    assert limits[OTHERS] == sum(range(1, 201)) * MIB
