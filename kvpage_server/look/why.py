"""`kvpage why`: why reading a page or a request, or loading an agent, would miss."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from kvpage_server.address import shown
from kvpage_server.look.hints import typed
from kvpage_server.look.output import LookError
from kvpage_server.look.page import context_as_json
from kvpage_server.look.strings import ABSENT
from kvpage_server.observe.asking import AskedStore, ask, named, text
from kvpage_server.observe.context import BlockPlace, context_of
from kvpage_server.observe.whose import Agent, Holdings, holdings_of_agent
from kvpage_server.system.plurals import as_size, how_many
from kvpage_server.system.terminal import for_people, out, print_json, readable, when

_MOST_MISSING = 20  # blocks that are named
Answer = dict[str, Any]  # KVPAGEWHY's


def why(store: AskedStore, args: argparse.Namespace) -> bool:
    """Why reading a request, or its page with this layer, head, page id and type, would miss."""
    if args.name and len(args.name) != 4:
        raise LookError(f"a page is named by LAYER HEAD PAGE TYPE, got {len(args.name)} of the four")
    req = os.fsencode(args.req)
    found = store.execute_command("KVPAGEWHY", req, *args.name)
    answer = {name: text(value) if isinstance(value, bytes) else value for name, value in named(found).items()}
    if not args.name and answer["reason"] in ("never stored", "gone", ABSENT):  # an agent is no request
        holdings = ask(store, holdings_of_agent(req))
        if holdings.agents or holdings.unreadable:
            _show_agent(store, args, holdings)
            return True
    if answer["reason"] == "hole":
        blocks = [named(block) for block in store.execute_command("KVPAGEINDEX", req)]
        whole = sum(block["complete"] for block in blocks)
        answer |= {"pages": sum(block["pages"] for block in blocks), "whole_blocks": whole}
    if args.json:
        print_json({"url": args.home(req), "request": req, "page": args.name} | answer)
        return True
    for line in _said(args.req, answer):
        out.print(readable(line))
    return True


def _said(req: str, answer: Answer) -> Iterator[str]:
    if answer["reason"] != "hole":
        yield _explained(answer["reason"], answer)
        return
    if not answer["whole_blocks"]:  # somebody reads it page by page
        pages = how_many(answer["pages"], "page")
        how = f": kvpage why {word} LAYER HEAD PAGE TYPE tells of a page" if (word := typed(req)) else ""
        yield f"{pages} stored, and no block whole{how}"
    yield f"block {answer['block']} is not there whole: {_explained(answer['cause'], answer)}"


def _explained(reason: str, answer: Answer) -> str:
    if "at" in answer:
        by = f" by {answer['policy']}" if "policy" in answer else ""
        by += f" of {answer['quota']}" if "quota" in answer else ""
        return f"{reason}{by}, {when(answer['at'])}"
    if "since" in answer:
        return f"{reason}, as far as is known since {when(answer['since'])}"
    if reason == ABSENT:
        return f"{reason}; a Valkey or Redis Cluster does not tell why"
    return f"{reason}: a read would not miss" if reason == "stored" else reason


# -- agents ------------------------------------------------------------------------------------------------------------


def _show_agent(store: AskedStore, args: argparse.Namespace, holdings: Holdings) -> None:
    contexts = [(agent, ask(store, context_of(agent, holdings))) for agent in holdings.agents]
    if args.json:
        found = [context_as_json(agent, places, args) for agent, places in contexts]
        of_agent = {"agent": text(os.fsencode(args.req)), "contexts": found, "unreadable": holdings.unreadable}
        print_json({"url": shown(args.url), "unreachable": args.unreachable()} | of_agent)
        return
    for agent, places in contexts:
        for line in _lines(agent, places):
            out.print(readable(line))
    for key in holdings.unreadable:
        model = _of_model(text(key).split(":")[2:])
        out.print(readable(f"an agent's context{model}: its manifest cannot be read"))


def _of_model(model: list[str]) -> str:
    return f" of model {model[0]}" if model and model[0] else ""


def _lines(agent: Agent, places: list[BlockPlace]) -> Iterator[str]:
    """What a load would find, who saved the agent and when, and what is missing."""
    whose, tokens, count = _of_model([agent.model]), how_many(agent.tokens, "token"), len(agent.blocks)
    missing = [(i, place) for i, place in enumerate(places) if not place.block.complete]
    if not missing:
        yield f"an agent's context{whose}: {tokens} in {how_many(count, 'block')}, all stored: a load would not miss"
    else:
        first, place = missing[0]
        there = f"but of {how_many(count, 'block')} only the first {first:,} are there"
        yield f"an agent's context{whose}: {tokens}, {there}; then: {_missing(place)}"
        yield f"  a load would find {how_many(agent.found, 'token')}"
    yield f"  {as_size(agent.bytes)}" + "".join(f", {line}" for line in _history(agent))
    for i, place in missing[1:_MOST_MISSING]:
        yield f"  block {i:,}: {_missing(place)}"
    if len(missing) > _MOST_MISSING:
        yield f"  and {how_many(len(missing) - _MOST_MISSING, 'more block')}"


def _history(agent: Agent) -> Iterator[str]:
    manifest = agent.manifest
    if manifest.saved_ms:
        yield f"stored{f' by {manifest.by}' if manifest.by else ''} {when(manifest.saved_ms)}"
    if manifest.created_ms:
        yield f"for the first time {when(manifest.created_ms)}"
    if agent.idle is not None:
        yield f"used {for_people(agent.idle)} ago"


def _missing(place: BlockPlace) -> str:
    by = f" by {place.by}" if place.by else ""
    return f"{place.why or 'incomplete'}{by}" + (f", {when(place.why_at)}" if place.why_at else "")
