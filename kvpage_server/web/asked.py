"""What else the page asks a store: slow calls, connections, and blocks that agents have lost."""

from __future__ import annotations

from itertools import islice
from typing import Any

from kvpage_server.observe.asking import Reading, named, refused, text
from kvpage_server.observe.whose import Agent, ContextBlock, Holdings

SLOW_CALLS = 32
MOST_CLIENTS = 200
MOST_LOSSES = 50
SHOWN_LETTERS = 80  # of an argument

Shown = dict[str, Any]


def slow_calls() -> Reading[list[Shown] | None]:
    """The last slow calls, newest first; None if the user lacks the right."""
    (answer,) = yield [[b"SLOWLOG", b"GET", SLOW_CALLS]]
    if refused(answer):
        return None
    return [_slow(call) for call in answer]


def _slow(call: Any) -> Shown:
    if isinstance(call, dict):  # redis-py has read it
        words, number, at, took = call["command"], call["id"], call["start_time"], call["duration"]
        said = text(words)
    else:
        number, at, took, words, *_ = call
        said = " ".join(text(word)[:SHOWN_LETTERS] for word in words[:8])
    return {"number": number, "at": at, "seconds": took / 1e6, "said": said[: 3 * SHOWN_LETTERS]}


def clients() -> Reading[Shown | None]:
    """The connections; None if the user lacks the right."""
    (answer,) = yield [[b"CLIENT", b"LIST"]]
    if refused(answer):
        return None
    rows = answer.rstrip(b"\n").split(b"\n", MOST_CLIENTS)[:MOST_CLIENTS]
    lines = [dict(word.partition("=")[::2] for word in text(row).split(" ")) for row in rows]
    wanted = ("id", "addr", "name", "user", "age", "idle", "cmd", "lib-name", "flags")
    return {
        "count": answer.rstrip(b"\n").count(b"\n") + 1,
        "clients": [{name: line.get(name, "")[:SHOWN_LETTERS] for name in wanted} for line in lines],
    }


def losses(holdings: Holdings) -> Reading[list[Shown]]:
    """For agents with missing blocks: the first missing one, why, and which agent was saved next. Blocks that were
    stored again meanwhile are left out."""
    holes = [(agent, *hole) for agent in holdings.agents if (hole := _first_hole(agent))]
    told = list(islice(holes, MOST_LOSSES))
    reasons = yield [[b"KVPAGEWHY", block.name] for _, _, block in told]
    return sorted(
        (
            _loss(holdings, agent, index, reason)
            for (agent, index, _), reason in zip(told, reasons, strict=True)
            if refused(reason) or named(reason).get("reason") != b"stored"
        ),
        key=lambda loss: -loss["at"],
    )


def _first_hole(agent: Agent) -> tuple[int, ContextBlock] | None:
    return next(((index, block) for index, block in enumerate(agent.blocks) if not block.complete), None)


def _loss(holdings: Holdings, agent: Agent, index: int, reason: Any) -> Shown:
    why = {} if refused(reason) else named(reason)
    at = int(why.get("at", 0))
    later = [other for other in holdings.agents if at and other.manifest.saved_ms >= at and other is not agent]
    after = min(later, key=lambda other: other.manifest.saved_ms, default=None)
    return {
        "agent": agent.agent_id,
        "block": index,
        "missing": agent.missing,
        "tokens": agent.tokens - agent.found,
        "why": text(why.get("cause") or why.get("reason", b"unknown")),
        "by": text(why.get("policy") or why.get("quota") or b""),
        "at": at,
        "next": after.agent_id if after else "",
    }
