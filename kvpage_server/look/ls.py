"""`kvpage ls`: the memory of each agent, or the blocks of one request."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import redis
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvpage_server.address import shown
from kvpage_server.look.output import LookError
from kvpage_server.look.pages_on_strings import agent_hint, why_hint
from kvpage_server.look.status import saving_text
from kvpage_server.observe.asking import QueriedStore, ask, named
from kvpage_server.observe.memory_by_agent import (
    UNPROTECTED,
    Agent,
    BlockProtection,
    Holdings,
    LookLimits,
    OtherRequest,
    SharedPrefix,
    holdings_of_store,
    protection_of,
)
from kvpage_server.observe.overview import NotAStore, overview_of_store
from kvpage_server.page import KVType, check_req_id
from kvpage_server.system.terminal import for_people, out, print_json, readable, table_of
from kvpage_server.system.text import as_size, name_shown, plural

LIMITS = LookLimits(agents=10_000, blocks=50_000, requests=10_000)
ROWS = 50  # default of --limit: rows of each table
_MAX_NAMES = 3  # agents in the row of a shared prefix
_MAX_NAME_CHARACTERS = 128  # characters of a name that are shown: the limit of an agent id


def ls(store: QueriedStore, args: argparse.Namespace) -> bool:
    """Print the agents, shared prefixes and other requests of a store, or the blocks of the request `args.req`.

    Return True. Raises RedisError, and LookError if the request has no page or the server refuses SCAN with MAXLEN.
    """
    if args.req is not None:
        return _ls_request(store, args)
    holdings = ask(store, holdings_of_store(LIMITS))
    raise_if_scan_refused(store, holdings)
    if args.json:
        print_json(as_json(holdings, args))
        return True
    tables = [*tables_of(holdings, args.limit or None)]
    for i, table in enumerate(tables):
        out.print(*([Text()] if i else []), table, soft_wrap=False, sep="\n")
    if not tables:
        out.print("no request has a page")
    counts = {"agent": holdings.agents, "shared prefix": holdings.prefixes, "request": holdings.requests}
    _print_omitted(args, {noun: len(rows) for noun, rows in counts.items()})
    for line in remarks(holdings):
        out.print(line)
    if isinstance(store, redis.Redis) and (coded := _coded(store)):
        out.print(f"in memory, {coded}")
    return True


def _coded(store: redis.Redis) -> str:
    """Return the text about the lossless codes in a store's memory; "" if it has none, or the user may not see that."""
    try:
        memory = ask(store, overview_of_store()).memory
    except (NotAStore, redis.ResponseError):
        return ""
    return saving_text(memory.coded_raw, memory.coded) if memory.coded else ""


def _print_omitted(args: argparse.Namespace, counts: Mapping[str, int]) -> None:
    """Print how many rows of each kind the limit `args.limit` omits. `counts` has the number of all rows by noun."""
    more = {noun: count - args.limit for noun, count in counts.items() if 0 < args.limit < count}
    if more:
        omitted = " and ".join(
            plural(count, f"more {noun}").replace("prefixs", "prefixes") for noun, count in more.items()
        )
        out.print(f"and {omitted}; --limit 0 shows all")


def raise_if_scan_refused(store: QueriedStore, holdings: Holdings) -> None:
    """Raise an error if nothing was found because the store refused SCAN.

    Raises ResponseError if it refuses every SCAN, as a gateway does, and LookError if it refuses only the argument
    MAXLEN, as another Redis does.
    """
    if holdings.refused and not (holdings.agents or holdings.requests or holdings.unreadable):
        store.execute_command(b"SCAN", b"0")
        raise LookError(f"this is no kvpage-server, or an older one: it refuses SCAN with MAXLEN ({holdings.refused})")


def tables_of(holdings: Holdings, rows: int | None = None) -> Iterator[RenderableType]:
    """Yield a table of agents, of shared prefixes and of requests, without empty tables, with at most `rows` rows."""
    if holdings.agents:
        yield _agents(holdings.agents[:rows])
    if holdings.prefixes:
        yield _prefixes(holdings.prefixes[:rows])
    if holdings.requests:
        yield _requests(holdings.requests[:rows])


def remarks(holdings: Holdings) -> Iterator[str]:
    """Yield a line about unreadable manifests, and one about entries that were not read because of the user's rights or
    the limits.
    """
    if holdings.unreadable:
        yield f"{plural(len(holdings.unreadable), 'manifest')} cannot be read"
    if holdings.refused:
        yield f"agents and requests cannot be listed: {holdings.refused}"
    elif holdings.cut:
        yield f"incomplete: the store has more {' and '.join(holdings.cut)} than were read"


def _agents(agents: tuple[Agent, ...]) -> Table:
    drop = "saved", "unshared", "model", "blocks", "tokens"
    columns = "agent", "model", "tokens", "blocks", "size", "unshared", "saved", "used", *_protected(agents)
    table = table_of(*columns, numbers_from=2, drop=drop)
    for agent in agents:
        missing = f"{len(agent.blocks) - agent.missing:,} of " if agent.missing else ""
        table.add_row(
            readable(agent.agent_id, _MAX_NAME_CHARACTERS),
            readable(agent.model, _MAX_NAME_CHARACTERS),
            f"{agent.tokens:,}",
            f"{missing}{len(agent.blocks):,}",
            as_size(agent.bytes),
            as_size(agent.own_bytes),
            ago(max(time.time() - agent.manifest.saved_ms / 1000, 0) if agent.manifest.saved_ms else None),
            ago(agent.idle),
            *(protection_text(agent.protection) for _ in _protected(agents)),
        )
    return table


def _protected(rows: Sequence[Agent | OtherRequest]) -> list[str]:
    """Return the column of protections; none if no row is protected."""
    return ["protected"] if any(row.protection != UNPROTECTED for row in rows) else []


def protection_text(protection: BlockProtection) -> Text:
    """Return whether a context is pinned, and until when it is kept for which tenant."""
    parts = ["pinned"] if protection.pinned else []
    if protection.until:
        parts.append(f"until {_minute(protection.until / 1000)}")
    who = readable(f" for {protection.tenant}", _MAX_NAME_CHARACTERS) if protection.tenant else Text()
    return Text(", ".join(parts)).append(who)


def _minute(unix: float) -> str:
    """Return a time in unix seconds as text: 08:15, with the date unless it is today."""
    at = datetime.fromtimestamp(unix)
    return f"{at:%H:%M}" if at.date() == datetime.now().date() else f"{at:%Y-%m-%d %H:%M}"


def _protection_json(protection: BlockProtection) -> dict[str, Any]:
    return {"pinned": protection.pinned, "kept_until_ms": protection.until, "kept_by": protection.tenant}


def ago(seconds: float | None) -> str:
    """Return a duration in its largest unit; "" for None."""
    return "" if seconds is None else " ".join(for_people(seconds).split(" ")[:2])


def _prefixes(prefixes: tuple[SharedPrefix, ...]) -> Table:
    columns = "shared by", "agents", "tokens", "blocks", "size", "saves"
    table = table_of(*columns, numbers_from=1, drop=("blocks", "tokens", "size"))
    for prefix in prefixes:
        others = len(prefix.agents) - _MAX_NAMES
        names = [readable(agent, _MAX_NAME_CHARACTERS) for agent in prefix.agents[:_MAX_NAMES]]
        who = Text(", ").join(names).append(f" and {others:,} more" if others > 0 else "")
        counts = f"{len(prefix.agents):,}", f"{prefix.tokens:,}", f"{prefix.blocks:,}"
        table.add_row(who, *counts, as_size(prefix.bytes), as_size(prefix.saved))
    return table


def _requests(requests: tuple[OtherRequest, ...]) -> Table:
    columns = "request", "blocks", "pages", "size", "in memory", *_protected(requests)
    table = table_of(*columns, numbers_from=1, drop=("in memory", "blocks"))
    for request in requests:
        sizes = as_size(request.bytes), as_size(request.memory)
        name = readable(request.label, _MAX_NAME_CHARACTERS) if request.label else readable(request.req_id)
        protected = [protection_text(request.protection) for _ in _protected(requests)]
        table.add_row(name, f"{request.blocks:,}", f"{request.pages:,}", *sizes, *protected)
    return table


def agent_as_json(agent: Agent, args: argparse.Namespace) -> dict[str, Any]:
    """Return an agent's context for JSON, without its blocks; sizes in bytes."""
    manifest = agent.manifest
    return {
        "url": args.home(manifest.key),
        "agent": agent.agent_id,
        "tenant": agent.tenant,
        "model": manifest.model,
        "fingerprint": manifest.fingerprint,
        "tokens": agent.tokens,
        "found_tokens": agent.found,
        "blocks": len(agent.blocks),
        "missing_blocks": agent.missing,
        "bytes": agent.bytes,
        "own_bytes": agent.own_bytes,
        "memory_bytes": agent.memory,
        "created_ms": manifest.created_ms,
        "saved_ms": manifest.saved_ms,
        "saved_by": manifest.by,
        "idle_seconds": agent.idle,
        **_protection_json(agent.protection),
    }


def as_json(holdings: Holdings, args: argparse.Namespace) -> dict[str, Any]:
    """Return agents, shared prefixes and other requests for JSON, all rows, whatever `args.limit` is."""
    return {
        "url": shown(args.url),
        "unreachable": args.unreachable(),
        "agents": [agent_as_json(agent, args) for agent in holdings.agents],
        "shared": [
            {
                "agents": prefix.agents,
                "tokens": prefix.tokens,
                "blocks": prefix.blocks,
                "bytes": prefix.bytes,
                "saved_bytes": prefix.saved,
            }
            for prefix in holdings.prefixes
        ],
        "requests": [
            {
                "url": args.home(request.req_id),
                "request": request.req_id,
                "label": request.label,
                "blocks": request.blocks,
                "pages": request.pages,
                "bytes": request.bytes,
                "memory_bytes": request.memory,
                **_protection_json(request.protection),
            }
            for request in holdings.requests
        ],
        "unreadable": holdings.unreadable,
        "cut": holdings.cut,
    }


def _ls_request(store: QueriedStore, args: argparse.Namespace) -> bool:
    """Print the blocks of the request `args.req`. Return True. Raises LookError if it has no page."""
    req = check_req_id(args.req)
    answer = store.execute_command("KVPAGEINDEX", req, "WITHSIZES")
    blocks = [named(block) for block in answer]
    if not blocks:
        raise LookError(agent_hint(store, req) or f"request {name_shown(req)} has no page{why_hint(store, req)}")
    if args.json:
        rows = [
            block
            | {"memory_bytes": block["memory"], "complete": bool(block["complete"])}
            | _protection_json(protection_of(block))
            for block in blocks
        ]
        shown = [{k: row[k] for k in row if k != "memory"} for row in rows]
        print_json({"url": args.home(req), "request": req, "blocks": shown})
        return True
    protected = ["protected"] if any(protection_of(block) != UNPROTECTED for block in blocks) else []
    columns = "page", "complete", "planes", "layers", "heads", "pages", "size", "in memory", *protected
    table = table_of(*columns, numbers_from=3, drop=("heads", "layers", "in memory", "planes"))
    for block in blocks[: args.limit or None]:
        planes = " ".join(KVType(plane).name for plane in block["planes"])
        counts = [f"{block[name]:,}" for name in ("layers", "heads", "pages")]
        sizes = [as_size(block[name]) for name in ("bytes", "memory")]
        cells = str(block["page"]), "yes" if block["complete"] else "no", planes, *counts, *sizes
        table.add_row(*cells, *(protection_text(protection_of(block)) for _ in protected))
    out.print(table, soft_wrap=False)
    _print_omitted(args, {"block": len(blocks)})
    return True
