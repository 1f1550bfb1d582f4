"""`kvpage why`: why reading a page, a request or a string, or loading an agent, would miss."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import redis

from kvpage_server.address import shown
from kvpage_server.look.hints import typed
from kvpage_server.look.output import LookError
from kvpage_server.look.page import context_as_json
from kvpage_server.look.several import AsOne
from kvpage_server.look.strings import ABSENT, AsStrings
from kvpage_server.observe.asking import AskedStore, Reading, ask, named, refused, text
from kvpage_server.observe.context import BlockPlace, context_of
from kvpage_server.observe.manifests import PREFIX
from kvpage_server.observe.whose import Agent, Holdings, holdings_of_agent, literally
from kvpage_server.page import PageError, PageKey, check_req_id
from kvpage_server.system.plurals import as_size, how_many
from kvpage_server.system.terminal import for_people, out, print_json, readable, when

_MOST_MISSING = 20  # blocks that are named
_MOST_RUNS = 5  # runs of page ids that are named
_UNKNOWN = "never stored", "gone", ABSENT  # the reasons of a name that no request has
Answer = dict[str, Any]  # KVPAGEWHY's


def why(store: AskedStore, args: argparse.Namespace) -> bool:
    """Print why reading a request, its page with this layer, head, page id and type, or a string, or loading an agent,
    would miss. Returns whether it would not."""
    if args.name and len(args.name) != 4:
        raise LookError(f"a page is named by LAYER HEAD PAGE TYPE, got {len(args.name)} of the four")
    name = os.fsencode(args.req)
    if not args.name and (key := _page_key(name)) is not None:
        name, args.name = key.req_id, [key.layer, key.head, key.page, key.kv_type]
    try:
        answer = _of_pages(store, name, args.name)
    except redis.ResponseError as error:
        found = _of_string(store, os.fsencode(args.req)) if str(error).startswith("WRONGTYPE") else None
        if found is None:
            raise
        return _show(args, {"url": args.home(name), "string": args.req} | found, found)
    if answer["reason"] in _UNKNOWN and not args.name:  # no request has this name
        holdings = ask(store, holdings_of_agent(name))
        losses, since = _lost(store, b"%b%b:*" % (PREFIX, literally(name)))
        if holdings.agents or holdings.unreadable or losses:
            return _show_agent(store, args, holdings, losses)
        if (of_string := _of_string(store, name)) is not None:
            return _show(args, {"url": args.home(name), "string": text(name)} | of_string, of_string)
        answer |= {"since": max(answer.get("since", 0), since)} if since else {}
    if answer["reason"] == "hole":
        blocks = [named(block) for block in store.execute_command("KVPAGEINDEX", name)]
        whole = sum(block["complete"] for block in blocks)
        answer |= {"pages": sum(block["pages"] for block in blocks), "whole_blocks": whole}
        answer |= {"page_ids": [block["page"] for block in blocks]}
    return _show(args, {"url": args.home(name), "request": name, "page": args.name} | answer, answer)


def _show(args: argparse.Namespace, found: Answer, answer: Answer) -> bool:
    """Print an answer. Returns whether a read would not miss."""
    if args.json:
        print_json({key: value for key, value in found.items() if key != "page_ids"})
    else:
        for line in _said(args.req, answer):
            out.print(readable(line))
    return bool(answer["reason"] == "stored")


def _page_key(name: bytes) -> PageKey | None:
    try:
        return PageKey.parse(name)
    except PageError:
        return None


def _of_pages(store: AskedStore, name: bytes, page: Sequence[int]) -> Answer:
    """Returns KVPAGEWHY's reply, or "never stored" for an invalid name of a request."""
    if not page:
        try:
            check_req_id(name)
        except PageError:
            return {"reason": "never stored"}
    return _texts(named(store.execute_command("KVPAGEWHY", name, *page)))


def _texts(answer: Answer) -> Answer:
    return {name: text(value) if isinstance(value, bytes) else value for name, value in answer.items()}


# -- strings -----------------------------------------------------------------------------------------------------------


def _of_string(store: AskedStore, key: bytes) -> Answer | None:
    """Returns that a string is stored, or the reason of its removal; None if the store knows nothing of the key."""
    if isinstance(store, AsStrings):
        return None
    (idle,) = ask(store, _idle(key))
    if isinstance(idle, int):
        return {"reason": "stored"}
    losses, _ = _lost(store, literally(key))
    return next(({k: v for k, v in loss.items() if k != "key"} for loss in losses), None)


def _idle(key: bytes) -> Reading[list[Any]]:
    """Asks how long a key was not used, which does not count as a read."""
    return (yield [[b"OBJECT", b"IDLETIME", key]])


def _lost(store: AskedStore, pattern: bytes) -> tuple[list[Answer], int]:
    """Returns removed strings that match, the latest first, and the start of the records in unix ms; 0 without them."""
    if isinstance(store, AsStrings):
        return [], 0
    try:
        answers = (
            [*store.of_each(b"KVLOST", pattern).values()]
            if isinstance(store, AsOne)
            else [store.execute_command(b"KVLOST", pattern)]
        )
    except redis.ResponseError:  # a gateway, a server of an earlier version, or a pattern that is too long
        return [], 0
    told = [named(answer) for answer in answers if not refused(answer)]
    losses = [_texts(named(loss)) for answer in told for loss in answer["strings"]]
    return sorted(losses, key=lambda loss: -loss["at"]), max((answer["since"] for answer in told), default=0)


# -- requests ----------------------------------------------------------------------------------------------------------


def _said(req: str, answer: Answer) -> Iterator[str]:
    if answer["reason"] != "hole":
        yield _explained(answer["reason"], answer)
        return
    pages, block = answer["page_ids"], answer["block"]
    yield f"{how_many(answer['pages'], 'page')} stored, in {_blocks(pages)}"
    if not answer["whole_blocks"]:  # somebody reads it page by page
        how = f": kvpage why {word} LAYER HEAD PAGE TYPE tells of a page" if (word := typed(req)) else ""
        yield f"no block is complete{how}"
    first = "nothing" if block == 0 else "block 0" if block == 1 else f"blocks 0 to {block - 1:,}"
    state = "is not complete" if block in pages else "is not there"
    yield f"a read from the start finds {first}; block {block:,} {state}: {_explained(answer['cause'], answer)}"


def _blocks(pages: Sequence[int]) -> str:
    """Blocks by their page ids, with runs of them as one."""
    starts = [pages[0], *(after for before, after in pairwise(pages) if after != before + 1)]
    ends = [*(before for before, after in pairwise(pages) if after != before + 1), pages[-1]]
    runs = [f"{start:,}" if start == end else f"{start:,} to {end:,}" for start, end in zip(starts, ends, strict=True)]
    more = f" and {how_many(len(runs) - _MOST_RUNS, 'more run')}" if len(runs) > _MOST_RUNS else ""
    return f"block{'' if len(pages) == 1 else 's'} {', '.join(runs[:_MOST_RUNS])}{more}"


def _explained(reason: str, answer: Answer) -> str:
    if "at" in answer:
        by = f" by {answer['policy']}" if "policy" in answer else ""
        by += f" of {answer['quota']}" if "quota" in answer else ""
        by += f" at {answer['limit']}" if "limit" in answer else ""
        return f"{reason}{by}, {when(answer['at'])}"
    if "since" in answer:
        return f"{reason}, as far as is known since {when(answer['since'])}"
    if reason == ABSENT:
        return f"{reason}; a Valkey or Redis Cluster does not tell why"
    return f"{reason}: a read would not miss" if reason == "stored" else reason


# -- agents ------------------------------------------------------------------------------------------------------------


def _show_agent(store: AskedStore, args: argparse.Namespace, holdings: Holdings, losses: list[Answer]) -> bool:
    """Print an agent's contexts, also the removed ones. Returns whether a load would find all of one."""
    contexts = [(agent, ask(store, context_of(agent, holdings))) for agent in holdings.agents]
    whole = any(not agent.missing for agent in holdings.agents)
    if args.json:
        found = [context_as_json(agent, places, args) for agent, places in contexts]
        of_agent = {"agent": text(os.fsencode(args.req)), "contexts": found, "unreadable": holdings.unreadable}
        print_json({"url": shown(args.url), "unreachable": args.unreachable()} | of_agent | {"lost": losses})
        return whole
    for agent, places in contexts:
        for line in _lines(agent, places):
            out.print(readable(line))
    for key in holdings.unreadable:
        model = _of_model(text(key).split(":")[2:])
        out.print(readable(f"an agent's context{model}: its manifest cannot be read"))
    for loss in losses:
        model = _of_model(loss["key"].split(":")[2:])
        out.print(
            readable(f"an agent's context{model} is missing: its manifest was {_explained(loss['reason'], loss)}")
        )
    return whole


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
