"""`kvpage stat` and `kvpage verify`: what the store knows about a page or an agent, and whether pages are intact."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import redis
from rich.text import Text

from kvpage_server.address import shown
from kvpage_server.look.hints import may_say_why, typed
from kvpage_server.look.ls import agent_as_json, ago, raise_if_blind
from kvpage_server.look.output import LookError, titled
from kvpage_server.observe.asking import AskedStore, ask, named, text
from kvpage_server.observe.context import BlockPlace, context_of
from kvpage_server.observe.whose import Agent, holdings_of_agent, holdings_of_store
from kvpage_server.page import DType, KVType, PageError, PageKey
from kvpage_server.system.plurals import as_size, how_many
from kvpage_server.system.terminal import for_people, out, print_json, readable, table_of, when


def stat(store: AskedStore, args: argparse.Namespace) -> bool:
    """A page's header and what else the store knows about it, or an agent's contexts, block by block."""
    if not args.key.startswith("kv:"):
        return _stat_agent(store, args)
    try:
        key = PageKey.parse(os.fsencode(args.key))
    except PageError as error:
        raise LookError(str(error)) from None
    name = (key.req_id, key.layer, key.head, key.page, key.kv_type)
    found = store.execute_command("KVPAGESTAT", *name)
    if found is None:
        raise LookError(f"{args.key} is not there{may_say_why(store, *args.key.split(':')[1:])}")
    page = named(found)
    dtype, plane = DType(page["dtype"]).name.lower(), KVType(page["type"]).name
    of_leases = page["pinned"] is not None
    if args.json:
        pinned = bool(page["pinned"]) if of_leases else None
        print_json({"url": args.home(key.req_id), "key": bytes(key)} | page | {"dtype": dtype, "pinned": pinned})
        return True
    matrix = f"{how_many(page['page_size'], 'token')} x {page['head_dim']} {dtype}"
    left, lease = page["ttl_left_ms"], page["lease_left_ms"]
    lives = "for ever" if left < 0 else f"{for_people(left / 1000)} more, of {page['ttl']} s"
    leases = [
        ("leased", f"for {for_people(lease / 1000)} more" if lease else "no"),
        ("pinned", "yes" if page["pinned"] else "no"),
    ]
    rows = [
        ("holds", f"{plane}, {matrix}, {how_many(page['bytes'], 'byte')}"),
        ("where", f"layer {page['layer']}, head {page['head']}, page {page['page']}"),
        ("checksum", page["checksum"].decode() if page["checksum"] else "not looked up on disk"),
        ("created", when(page["created_ms"])),
        ("lives", lives),
        *(leases if of_leases else []),
        ("tier", page["tier"].decode()),
    ]
    out.print(titled(rows))
    return True


def _stat_agent(store: AskedStore, args: argparse.Namespace) -> bool:
    holdings = ask(store, holdings_of_store())
    found = [agent for agent in holdings.agents if agent.agent_id == text(os.fsencode(args.key))]
    if not found:
        raise_if_blind(store, holdings)
        raise LookError(_no_agent(store, args.key))
    contexts = [(agent, ask(store, context_of(agent, holdings))) for agent in found]
    if args.json:
        told = [context_as_json(agent, places, args) for agent, places in contexts]
        print_json({"url": shown(args.url), "unreachable": args.unreachable(), "contexts": told})
        return True
    for agent, places in contexts:
        _show_context(agent, places)
    return True


def _no_agent(store: AskedStore, name: str) -> str:
    """What to type instead."""
    try:
        blocks = store.execute_command("KVPAGEINDEX", os.fsencode(name))
    except redis.ResponseError:  # it can be no request either
        blocks = []
    if not blocks:
        return f"{name} is no agent, and a page's key is kv:REQ:LAYER:HEAD:PAGE:TYPE"
    page = named(blocks[0])["page"]
    if not (word := typed(name)):
        return f"{name} is a request, and no agent"
    of_a_page = f"kvpage stat kv:{word}:LAYER:HEAD:{page}:TYPE tells of a page"
    return f"{name} is a request: kvpage ls {word} lists its blocks, {of_a_page}"


def _show_context(agent: Agent, places: list[BlockPlace]) -> None:
    rows = [
        ("agent", readable(agent.agent_id)),
        ("model", readable(agent.model)),
        ("context", f"{how_many(agent.tokens, 'token')} in {how_many(len(agent.blocks), 'block')}"),
        ("size", f"{as_size(agent.bytes)}, {as_size(agent.own_bytes)} of it shared with nobody"),
        ("used", f"{ago(agent.idle)} ago" if agent.idle is not None else "unknown"),
    ]
    out.print(titled(rows))
    protected = ["protected"] if all(place.pinned is not None for place in places) else []
    columns = "block", "tokens", "size", "lies in", "shared by", *protected
    table = table_of(*columns, numbers_from=0, drop=("shared by", "tokens"))
    for i, place in enumerate(places):
        lies = Text(place.tier) if place.block.complete else Text(place.why or "incomplete", "red")
        how = "pinned" if place.pinned else "leased" if place.lease else ""
        size, tokens = as_size(place.block.bytes), f"{place.block.tokens:,}"
        table.add_row(f"{i:,}", tokens, size, lies, how_many(len(place.agents), "agent"), *[how for _ in protected])
    out.print(table, soft_wrap=False)


def context_as_json(agent: Agent, places: list[BlockPlace], args: argparse.Namespace) -> dict[str, Any]:
    """An agent's context and its blocks."""
    blocks = [
        {
            "url": args.home(place.block.name),
            "block": place.block.name,
            "tokens": place.block.tokens,
            "bytes": place.block.bytes,
            "there": place.block.complete,
            "tier": place.tier,
            "agents": len(place.agents),
            "pinned": place.pinned,
            "lease_left_ms": place.lease,
            "why": place.why,
            "why_at_ms": place.why_at,
            "by": place.by,
        }
        for place in places
    ]
    return agent_as_json(agent, args) | {"places": blocks}


def verify(store: AskedStore, args: argparse.Namespace) -> bool:
    """Check the pages of a request, or of an agent's contexts. Returns whether all are there and intact."""
    name = os.fsencode(args.req)
    with out.status("hashing"):
        found = _verified(store, name, args.pages)
        agents = () if any(found.values()) or args.pages else ask(store, holdings_of_agent(name)).agents
        blocks = dict.fromkeys(block.name for agent in agents for block in agent.blocks)
        missing = sum(not block.complete for agent in agents for block in agent.blocks)
        for block in blocks:
            found = {count: found[count] + more for count, more in _verified(store, block, ()).items()}
    checked, unchecked, corrupt = found["checked"], found["unchecked"], found["corrupt"]
    if not (checked or corrupt or unchecked or agents):
        raise LookError(f"request {args.req} has no such page{may_say_why(store, args.req)}")
    if args.json:
        of_agent = {"url": shown(args.url), "agent": text(name), "missing_blocks": missing}
        print_json((of_agent if agents else {"url": args.home(name), "request": name}) | found)
        return not corrupt and not missing
    if unchecked:
        out.print(f"{how_many(unchecked, 'page')} written without a checksum")
    if missing:
        why = f": kvpage why {word} says why" if (word := typed(args.req)) else ""
        out.print(f"{how_many(missing, 'block')} missing{why}")
    if not corrupt:
        of_blocks = f" in {how_many(len(blocks), 'block')}" if agents else ""
        out.print(f"{how_many(checked, 'page')}{of_blocks} checked, all intact")
        return not missing
    out.print(f"[red]corrupt, and removed: {len(corrupt):,} of {how_many(checked, 'page')}[/]")
    for key in corrupt:
        out.print(Text("  ") + readable(key))
    return False


def _verified(store: AskedStore, req: bytes, pages: Sequence[int]) -> dict[str, Any]:
    """KVPAGEVERIFY's counts `checked` and `unchecked`, and the keys of the `corrupt` pages."""
    found = named(store.execute_command("KVPAGEVERIFY", req, *pages))
    return {count: found[count] for count in ("checked", "unchecked", "corrupt")}
