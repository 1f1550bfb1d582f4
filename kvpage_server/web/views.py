"""Conversion of a store's state to JSON for the page. It has the fields that the page shows, and limits their
number.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvpage_server.observe.context import BlockPlace, Pages
from kvpage_server.observe.engines import EnginesSeen
from kvpage_server.observe.memory_by_agent import Agent, Holdings, OtherRequest
from kvpage_server.observe.observer import Moment
from kvpage_server.observe.overview import STORES_NOTHING, Overview
from kvpage_server.system.text import name_as_text

MOST_AGENTS = 500
MOST_REQUESTS = 100
MOST_PREFIXES = 30
MOST_NAMES = 12  # of the agents that share a prefix or a block
MOST_LETTERS = 128  # of such a name; the rest is cut

Shown = dict[str, Any]


def event(name: str, data: object) -> bytes:
    """Return a server-sent event with `data` as JSON."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json.dumps(data, separators=(",", ":")).encode())


def overview(now: Overview, user: str, engines: EnginesSeen) -> Shown:
    """Return the data of the event `overview`: the store's state in numbers, and the engines that `user` may see."""
    shown = asdict(now)
    for unshown in ("commands", "errors"):
        del shown[unshown]
    if now.disk is not None:
        shown["disk"]["full"] = now.disk.is_full
        for times in ("commits", "fetches"):
            shown["disk"][times] = getattr(now.disk, times).percentile(0.99)
    shown["families"] = {
        name: {"count": calls.count, "p50": calls.percentile(0.5), "p99": calls.percentile(0.99)}
        for name, calls in now.families.items()
        if calls.count
    }
    shown["traffic"]["hit_ratio"] = now.traffic.hit_ratio
    shown["user"] = user
    shown["engines"] = [asdict(each) | {"seconds_saved": round(each.seconds_saved, 1)} for each in engines.connected]
    return shown


def moment(then: Moment) -> Shown:
    """Return the rates per second in the time between two overviews; `why` has the misses by reason."""
    return {
        "at": round(then.at, 2),
        "commands": round(then.commands, 1),
        "in": round(then.bytes_in),
        "out": round(then.bytes_out),
        "hits": round(then.hits, 2),
        "misses": round(then.misses, 2),
        "evicted": round(then.evicted, 2),
        "why": {reason: round(count, 2) for reason, count in then.page_misses.items()},
        "used": then.used,
    }


def holdings(found: Holdings, store: str) -> Shown:
    """Return the data of the event `holdings`: agents, tenants, prefixes and other requests, the largest first.

    `shared` has the blocks of several agents, each once. `more_agents` is the bytes of agents beyond MOST_AGENTS.
    `unseen` is the reason if the user may not list keys, or the server is a gateway (`store` is "cluster").
    """
    agents = [_agent(agent) for agent in found.agents[:MOST_AGENTS]]
    requests = [_request(request) for request in found.requests[:MOST_REQUESTS]]
    tenants: Counter[str] = Counter()
    for agent in found.agents:
        tenants[agent.tenant] += agent.own_bytes
    return {
        "agents": agents,
        "agent_count": len(found.agents),
        "agent_bytes": found.bytes,
        "more_agents": sum(agent.own_bytes for agent in found.agents[MOST_AGENTS:]),
        "tenants": dict(tenants.most_common(MOST_AGENTS)),
        "shared": _shared(found),
        "prefixes": [
            {
                "tokens": prefix.tokens,
                "blocks": prefix.blocks,
                "bytes": prefix.bytes,
                "saved": prefix.saved,
                "count": len(prefix.agents),
                "agents": _names(prefix.agents),
            }
            for prefix in found.prefixes[:MOST_PREFIXES]
        ],
        "requests": requests,
        "request_count": len(found.requests),
        "request_bytes": sum(request.bytes for request in found.requests),
        "unreadable": len(found.unreadable),
        "cut": found.cut,
        "unseen": f"This is {STORES_NOTHING}." if store == "cluster" else found.refused,
    }


def _names(agents: Sequence[str]) -> list[str]:
    """Return the first MOST_NAMES names, each cut to MOST_LETTERS."""
    return [name[:MOST_LETTERS] for name in agents[:MOST_NAMES]]


def _agent(agent: Agent) -> Shown:
    return {
        "id": agent.agent_id,
        "model": agent.model,
        "tenant": agent.tenant,
        "tokens": agent.tokens,
        "found": agent.found,
        "bytes": agent.bytes,
        "own": agent.own_bytes,
        "memory": agent.memory,
        "idle": agent.idle,
        "missing": agent.missing,
        "saved": agent.manifest.saved_ms,
    }


def _request(request: OtherRequest) -> Shown:
    return {
        "id": request.label or name_as_text(request.req_id),
        "blocks": request.blocks,
        "pages": request.pages,
        "bytes": request.bytes,
        "memory": request.memory,
    }


def _shared(found: Holdings) -> list[Shown]:
    """Return shared blocks as groups with the same agents: their sums of bytes, tokens and blocks, the largest
    first.
    """
    blocks = {
        block.name: block for agent in found.agents for block in agent.blocks if len(found.owners[block.name]) > 1
    }
    groups: dict[tuple[str, ...], list[int]] = {}
    for name, block in blocks.items():
        group = groups.setdefault(found.owners[name], [0, 0, 0])
        for i, value in enumerate((block.bytes, block.tokens, 1)):
            group[i] += value
    largest = sorted(groups.items(), key=lambda item: -item[1][0])[:MOST_AGENTS]
    return [
        {"agents": _names(names), "count": len(names), "bytes": size, "tokens": tokens, "blocks": count}
        for names, (size, tokens, count) in largest
    ]


def context(agent: Agent, places: list[BlockPlace]) -> Shown:
    """Return an agent's context with its blocks, in order; `places` has the state of each."""
    return _agent(agent) | {
        "blocks": [
            {
                "name": place.block.name.hex(),
                "tokens": place.block.tokens,
                "bytes": place.block.bytes,
                "pages": place.block.pages,
                "there": place.block.complete,
                "with": _names([name for name in place.agents if name != agent.agent_id]),
                "shared": len(place.agents),
                "tier": place.tier,
                "pinned": place.pinned,
                "lease": place.lease,
                "kept_until": place.block.protection.until,
                "kept_by": place.block.protection.tenant,
                "why": place.why,
                "at": place.why_at,
                "by": place.by,
            }
            for place in places
        ]
    }


def pages(found: Pages) -> Shown:
    """Return a block: its shape, and the norms of its pages by layer, plane and head."""
    return {
        "name": name_as_text(found.name),
        "tokens": found.tokens,
        "planes": found.planes,
        "dtypes": found.dtypes,
        "sizes": found.sizes,
        "layers": found.layers,
        "heads": found.heads,
        "norms": _finite(found.norms.tolist()),
    }


def _finite(norms: Any) -> Any:
    """Return nested lists of numbers, rounded to 4 digits, with None for NaN and infinity."""
    if isinstance(norms, list):
        return [_finite(norm) for norm in norms]
    return round(norms, 4) if math.isfinite(norms) else None
