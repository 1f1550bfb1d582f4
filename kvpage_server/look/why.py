"""`kvpage why`, `stat` and `verify`: reasons of misses, metadata, and checksums, of pages, requests and agents."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import redis
from rich.text import Text

from kvpage_server.address import shown
from kvpage_server.look.ls import agent_as_json, ago, protection_text, raise_if_scan_refused
from kvpage_server.look.multi_store import MultiStore, Unavailable
from kvpage_server.look.output import LookError, UsageError, titled
from kvpage_server.look.pages_on_strings import ABSENT, PagesOnStrings, shell_word, why_hint
from kvpage_server.observe.asking import Fields, QueriedStore, Reading, ask, named, refused
from kvpage_server.observe.context import BlockPlace, context_of
from kvpage_server.observe.memory_by_agent import (
    PREFIX,
    Agent,
    Holdings,
    exact_pattern,
    holdings_of_agent,
    holdings_of_store,
    protection_of,
)
from kvpage_server.page import MAX_PAGE, DType, KVType, PageError, PageKey, check_range, check_req_id, page_named
from kvpage_server.system.terminal import for_people, out, print_json, readable, table_of, when
from kvpage_server.system.text import as_size, name_as_text, name_of_text, name_shown, plural

# -- `kvpage stat` and `kvpage verify` ---------------------------------------------------------------------------------


def stat(store: QueriedStore, args: argparse.Namespace) -> bool:
    """Print the metadata of the page `args.key`, or the blocks of the agent's contexts. Return whether none is missing.

    Raises LookError if there is no such page or agent, UsageError for the key of an index, PageError for a wrong key.
    """
    if not args.key.startswith(b"kv:"):
        return _stat_agent(store, args)
    if args.key.endswith(b":index"):
        word = shell_word(args.key[len("kv:") : -len(":index")])
        raise UsageError(f"{name_shown(args.key)} is the index of a request: kvpage ls {word} lists its blocks")
    key = PageKey.parse(args.key)
    name = (key.req_id, key.layer, key.head, key.page, key.kv_type)
    try:
        found = store.execute_command("KVPAGESTAT", *name)
    except redis.ResponseError as error:
        raise _no_page(args.key, error) from None
    if found is None:
        raise LookError(f"{name_shown(args.key)} is not there{why_hint(store, *name)}")
    page = named(found)
    dtype, plane = DType(page["dtype"]).name.lower(), KVType(page["type"]).name
    of_leases = page["pinned"] is not None
    if args.json:
        pinned = bool(page["pinned"]) if of_leases else None
        print_json({"url": args.home(key.req_id), "key": bytes(key)} | page | {"dtype": dtype, "pinned": pinned})
        return True
    matrix = f"{plural(page['page_size'], 'token')} x {page['head_dim']} {dtype}"
    left, lease = page["ttl_left_ms"], page["lease_left_ms"]
    ttl = "none" if left < 0 else f"{for_people(left / 1000)} left of {page['ttl']} s"
    leases = [
        ("leased", f"{for_people(lease / 1000)} left" if lease else "no"),
        ("protected", protection_text(protection_of(page)) or ("by the lease" if lease else "no")),
    ]
    rows = [
        ("content", f"{plane}, {matrix}, {plural(page['bytes'], 'byte')}"),
        ("position", f"layer {page['layer']}, head {page['head']}, page {page['page']}"),
        ("checksum", page["checksum"].decode() if page["checksum"] else "not read from disk"),
        ("created", when(page["created_ms"])),
        ("TTL", ttl),
        *(leases if of_leases else []),
        ("tier", page["tier"].decode()),
    ]
    out.print(titled(rows))
    return True


def _no_page(key: bytes, error: redis.ResponseError) -> Exception:
    """Return the error for a page if its key holds a string, otherwise `error`, which a query of the page has got."""
    is_string = str(error).startswith("WRONGTYPE")
    return LookError(f"{name_shown(key)}: this key holds a string, not a page") if is_string else error


def _stat_agent(store: QueriedStore, args: argparse.Namespace) -> bool:
    """Print the contexts of the agent `args.key`. Return whether no block is missing.

    Raises LookError if the store has no such agent.
    """
    holdings = ask(store, holdings_of_store())
    found = [agent for agent in holdings.agents if agent.agent_id == name_as_text(args.key)]
    if not found:
        raise_if_scan_refused(store, holdings)
        raise LookError(_maybe_unreachable(args.key, args) or _no_agent(store, args.key))
    contexts = [(agent, ask(store, context_of(agent, holdings))) for agent in found]
    if args.json:
        described = [context_as_json(agent, places, args) for agent, places in contexts]
        print_json({"url": shown(args.url), "unreachable": args.unreachable(), "contexts": described})
    else:
        for agent, places in contexts:
            _show_context(agent, places)
    return not any(agent.missing for agent in found)


def _no_agent(store: QueriedStore, name: bytes) -> str:
    """Return the error text for a name that is not an agent: it may be a request."""
    try:
        blocks = store.execute_command("KVPAGEINDEX", name)
    except redis.ResponseError:  # not a valid request id either
        blocks = []
    if not blocks:
        return f"{name_shown(name)} is no agent, and a page's key is kv:REQ:LAYER:HEAD:PAGE:TYPE"
    word, page = shell_word(name), named(blocks[0])["page"]
    of_a_page = f"kvpage stat kv:{word}:LAYER:HEAD:{page}:TYPE shows a page"
    return f"{name_shown(name)} is a request: kvpage ls {word} lists its blocks, {of_a_page}"


def _maybe_unreachable(name: bytes, args: argparse.Namespace) -> str:
    """Return the message for an agent that may be on an unreachable server; empty if all servers have answered."""
    return f"{name_shown(name)} is not on the servers that answered" if args.unreachable() else ""


def _show_context(agent: Agent, places: list[BlockPlace]) -> None:
    """Print a context and a table of its blocks. `places` has an entry for each of `agent.blocks`."""
    rows = [
        ("agent", readable(agent.agent_id)),
        ("model", readable(agent.model)),
        ("context", f"{plural(agent.tokens, 'token')} in {plural(len(agent.blocks), 'block')}"),
        ("size", f"{as_size(agent.bytes)}, {as_size(agent.own_bytes)} of it unshared"),
        ("last used", f"{ago(agent.idle)} ago" if agent.idle is not None else "unknown"),
    ]
    out.print(titled(rows))
    protected = ["protected"] if all(place.pinned is not None for place in places) else []
    columns = "block", "tokens", "size", "tier", "shared by", *protected
    table = table_of(*columns, numbers_from=0, drop=("shared by", "tokens"))
    for i, place in enumerate(places):
        # without a record, a block may have been removed, or never stored on this server
        why = "missing" if place.why == "never stored" else place.why or "incomplete"
        tier = Text(place.tier) if place.block.complete else Text(why, "red")
        how = protection_text(place.block.protection) or Text("leased" if place.lease else "")
        size, tokens = as_size(place.block.bytes), f"{place.block.tokens:,}"
        table.add_row(f"{i:,}", tokens, size, tier, plural(len(place.agents), "agent"), *[how for _ in protected])
    out.print(table, soft_wrap=False)
    if agent.missing:
        word = shell_word(name_of_text(agent.agent_id))
        out.print(_missing_line(agent.missing, word))


def _missing_line(count: int, word: str) -> Text:
    return Text.assemble((f"{plural(count, 'block')} missing", "red"), readable(f": kvpage why {word} says why"))


def context_as_json(agent: Agent, places: list[BlockPlace], args: argparse.Namespace) -> dict[str, Any]:
    """Return an agent's context and the places of its blocks for JSON."""
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
            "kept_until_ms": place.block.protection.until,
            "kept_by": place.block.protection.tenant,
            "why": place.why,
            "why_at_ms": place.why_at,
            "by": place.by,
        }
        for place in places
    ]
    return agent_as_json(agent, args) | {"places": blocks}


def verify(store: QueriedStore, args: argparse.Namespace) -> bool:
    """Check the checksums of the request's pages, or of all blocks of the agent's contexts, and remove corrupt pages.

    `args.req` names the request or agent, and `args.pages` limits the check to these page ids. Prints the counts, and
    returns whether all are stored and intact. Of a request, blocks are missing that have one of these page ids, or that
    the store has removed. Raises LookError if there is nothing to check, PageError for a wrong name.
    """
    name = check_req_id(args.req)
    for page in args.pages:
        check_range("page_id", page, 0, MAX_PAGE)
    with out.status("hashing"):
        ids = sorted(named(block)["page"] for block in _index_of(store, name))
        answer = _why_pages(store, name, ())
        absent = len({*args.pages}.difference(ids)) if args.pages else _removed_blocks(answer, ids)
        found = _verify_pages(store, name, args.pages)
        agents = () if any(found.values()) or args.pages else ask(store, holdings_of_agent(name)).agents
        blocks = dict.fromkeys(block.name for agent in agents for block in agent.blocks)
        for block in blocks:
            found = {count: found[count] + more for count, more in _verify_pages(store, block, ()).items()}
        missing = len({block.name for agent in agents for block in agent.blocks if not block.complete})
        missing = missing if agents else absent
    checked, unchecked, corrupt = found["checked"], found["unchecked"], found["corrupt"]
    if not (checked or corrupt or unchecked or agents):
        if args.pages:
            raise LookError(f"request {name_shown(name)} has no such page{why_hint(store, name)}")
        hint = why_hint(store, name) if answer["reason"] in _UNKNOWN else ""  # it may be the name of an agent
        no_page = f"request {name_shown(name)} has no page: {_reason_text(answer['reason'], answer)}{hint}"
        raise LookError(_maybe_unreachable(name, args) or no_page)
    if args.json:
        about = {"url": shown(args.url), "agent": name} if agents else {"url": args.home(name), "request": name}
        print_json(about | {"missing_blocks": missing} | found)
        return not corrupt and not missing
    if unchecked:
        out.print(f"{plural(unchecked, 'page')} written without a checksum")
    if missing:
        out.print(_missing_line(missing, shell_word(name)))
    if not corrupt:
        of_blocks = f" in {plural(len(blocks) - missing, 'block')}" if agents else ""
        if ids and not args.pages and ids != [*range(len(ids))]:
            of_blocks = f" in {_blocks(ids)}"  # so that a gap whose reason is not known is seen
        out.print(f"{plural(checked, 'page')}{of_blocks} checked, {'none corrupt' if missing else 'all intact'}")
        if ids and not (missing or args.pages) and (gaps := ids[-1] + 1 - len(ids)):
            before = f"{plural(gaps, 'block')} before block {ids[-1]:,}"
            out.print(f"{before} not stored: {_reason_text(answer['cause'], answer)}", soft_wrap=True)
        return not missing
    out.print(f"[red]corrupt, and removed: {len(corrupt):,} of {plural(checked, 'page')}[/]")
    for key in corrupt:
        out.print(Text("  ") + readable(key))
    return False


def _index_of(store: QueriedStore, req: bytes) -> Any:
    """Return the blocks of a request; none if its server does not answer."""
    try:
        return store.execute_command("KVPAGEINDEX", req)
    except Unavailable:
        return []


def _verify_pages(store: QueriedStore, req: bytes, pages: Sequence[int]) -> dict[str, Any]:
    """Return KVPAGEVERIFY's counts `checked` and `unchecked`, and the keys of `corrupt` pages. Those of a server that
    does not answer are missing.
    """
    try:
        found = named(store.execute_command("KVPAGEVERIFY", req, *pages))
    except Unavailable:
        found = Fields(checked=0, unchecked=0, corrupt=[])
    return {count: found[count] for count in ("checked", "unchecked", "corrupt")}


def _removed_blocks(answer: Answer, stored: Sequence[int]) -> int:
    """Return how many blocks of a request are missing up to its last one, if the store has removed the first of them:
    a client may store single pages. `answer` is KVPAGEWHY's, and `stored` has the page ids of its blocks.
    """
    if answer["reason"] != "hole" or answer["cause"] in (*_UNKNOWN, "incomplete"):
        return 0
    return max(max(stored, default=-1) + 1 - len(stored), 1)


_MOST_MISSING = 20  # missing blocks in the output
_MOST_RUNS = 5  # runs of page ids in the output
_UNKNOWN = "never stored", "gone", ABSENT  # KVPAGEWHY's reasons for a name that no stored request has
Answer = dict[str, Any]  # KVPAGEWHY's reply, decoded: `reason`, and the fields that this reason has


def why(store: QueriedStore, args: argparse.Namespace) -> bool:
    """Print why a read of a request, a page or a string, or the load of an agent, would miss.

    `args.req` is a request id, an agent or a key. `args.name` is empty, or the layer, head, page id and type of a page
    of the request. Return whether the read would hit. Raises UsageError for an incomplete `args.name`, PageError for a
    name or number that no page has.
    """
    if args.name and len(args.name) != 4:
        raise UsageError(f"a page is named by LAYER HEAD PAGE TYPE, got {len(args.name)} of the four")
    name = args.req
    if args.name:
        PageKey(name, *args.name)  # raises PageError for a name or number that no page has
    elif name.startswith(b"kv:") and name.endswith(b":index"):
        word = shell_word(name[len("kv:") : -len(":index")])
        raise UsageError(f"{name_shown(name)} is the index of a request: kvpage why {word} explains the request")
    elif (key := page_named(name)) is not None:
        name, args.name = key.req_id, [key.layer, key.head, key.page, key.kv_type]
    try:
        answer = _why_pages(store, name, args.name)
    except redis.ResponseError as error:
        raise (_no_page(bytes(PageKey(name, *args.name)), error) if args.name else error) from None
    if answer["reason"] in _UNKNOWN and not args.name:  # no request has this name
        holdings = ask(store, holdings_of_agent(name))
        losses, since = _removed_strings(store, b"%b%b:*" % (PREFIX, exact_pattern(name)))
        if holdings.agents or holdings.unreadable or losses:
            return _show_agent(store, args, holdings, losses)
        if (of_string := _why_string(store, name)) is not None:
            return _print_answer(args, {"url": args.home(name), "string": name}, of_string)
        if args.unreachable():
            return _print_answer(args, {"url": shown(args.url), "request": name, "page": []}, {"reason": "gone"})
        answer |= {"since": max(answer.get("since", 0), since)} if since else {}
    if answer["reason"] == "hole":
        blocks = [named(block) for block in store.execute_command("KVPAGEINDEX", name)]
        whole = sum(block["complete"] for block in blocks)
        answer |= {"pages": sum(block["pages"] for block in blocks), "whole_blocks": whole}
        answer |= {"page_ids": [block["page"] for block in blocks]}
    return _print_answer(args, {"url": args.home(name), "request": name, "page": args.name}, answer)


def _print_answer(args: argparse.Namespace, about: Answer, answer: Answer) -> bool:
    """Print the answer about a request, a page or a string. Return whether a read would hit.

    `about` has the fields for JSON that name it.
    """
    if args.json:
        found = about | {"unreachable": args.unreachable()} | answer
        print_json({key: value for key, value in found.items() if key != "page_ids"})
    else:
        for line in _request_lines(args.req, answer):
            out.print(readable(line))
    return bool(answer["reason"] == "stored")


def _why_pages(store: QueriedStore, name: bytes, page: Sequence[int]) -> Answer:
    """Return KVPAGEWHY's reply about a request, or about its `page` (layer, head, page id, type) unless that is empty.

    A name that is no valid request id was never stored.
    """
    if not page:
        try:
            check_req_id(name)
        except PageError:
            return {"reason": "never stored"}
    return _decoded(named(store.execute_command("KVPAGEWHY", name, *page)))


def _decoded(answer: Answer) -> Answer:
    return Fields({name: name_as_text(value) if isinstance(value, bytes) else value for name, value in answer.items()})


# -- strings -----------------------------------------------------------------------------------------------------------


def _why_string(store: QueriedStore, key: bytes) -> Answer | None:
    """Return whether a string is stored, or the reason for its removal. None if the store has no record of it."""
    if isinstance(store, PagesOnStrings):
        return None
    (idle,) = ask(store, _idle_time(key))
    if isinstance(idle, int):
        return {"reason": "stored"}
    losses, _ = _removed_strings(store, exact_pattern(key))
    return next((Fields({k: v for k, v in loss.items() if k != "key"}) for loss in losses), None)


def _idle_time(key: bytes) -> Reading[list[Any]]:
    """Query the idle time of a key. The query does not count as a use."""
    return (yield [[b"OBJECT", b"IDLETIME", key]])


def _removed_strings(store: QueriedStore, pattern: bytes) -> tuple[list[Answer], int]:
    """Return the removed strings whose keys match a glob, the latest first, and the start of the records.

    The start is in unix milliseconds, and 0 if the store keeps no records.
    """
    if isinstance(store, PagesOnStrings):
        return [], 0
    try:
        answers = (
            [*store.of_each(b"KVLOST", pattern).values()]
            if isinstance(store, MultiStore)
            else [store.execute_command(b"KVLOST", pattern)]
        )
    except redis.ResponseError:  # from a gateway, an earlier version, or for a long pattern
        return [], 0
    received = [named(answer) for answer in answers if not refused(answer)]
    losses = [_decoded(named(loss)) for answer in received for loss in answer["strings"]]
    return sorted(losses, key=lambda loss: -loss["at"]), max((answer["since"] for answer in received), default=0)


# -- requests ----------------------------------------------------------------------------------------------------------


def _request_lines(req: bytes, answer: Answer) -> Iterator[str]:
    """Yield the lines that explain an answer about a request, a page or a string."""
    if answer["reason"] != "hole":
        yield _reason_text(answer["reason"], answer)
        return
    pages, block = answer["page_ids"], answer["block"]
    yield f"{plural(answer['pages'], 'page')} stored, in {_blocks(pages)}"
    if not answer["whole_blocks"]:  # a request that is read page by page
        yield f"no block is complete: kvpage why {shell_word(req)} LAYER HEAD PAGE TYPE explains one page"
    first = "nothing" if block == 0 else "block 0" if block == 1 else f"blocks 0 to {block - 1:,}"
    state = "is not complete" if block in pages else "is not there"
    yield f"a read from the start finds {first}; block {block:,} {state}: {_reason_text(answer['cause'], answer)}"


def _blocks(pages: Sequence[int]) -> str:
    """Return sorted page ids of blocks as text, with a range for each run, such as "blocks 0 to 3, 7"."""
    if not pages:  # they were removed meanwhile
        return "no block"
    starts = [pages[0], *(after for before, after in pairwise(pages) if after != before + 1)]
    ends = [*(before for before, after in pairwise(pages) if after != before + 1), pages[-1]]
    runs = [f"{start:,}" if start == end else f"{start:,} to {end:,}" for start, end in zip(starts, ends, strict=True)]
    more = f" and {plural(len(runs) - _MOST_RUNS, 'more run')}" if len(runs) > _MOST_RUNS else ""
    return f"block{'' if len(pages) == 1 else 's'} {', '.join(runs[:_MOST_RUNS])}{more}"


def _reason_text(reason: str, answer: Answer) -> str:
    """Return a reason with the policy, quota, limit and time that the answer has."""
    if "at" in answer:
        by = f" by {answer['policy']}" if "policy" in answer else ""
        by += f" of {answer['quota']}" if "quota" in answer else ""
        limit = answer.get("limit", "")
        by += f" at {'a full file system' if limit == 'filesystem' else limit}" if limit else ""
        return f"{reason}{by}, {when(answer['at'])}"
    if "since" in answer:
        began = f", {when(answer['since'])}" if answer["since"] else ""
        return f"{reason}, or removed before the records of removals began{began}"
    if reason == ABSENT:
        return f"{reason}; a Valkey or Redis Cluster records no reasons"
    of_others = {"stored": ": a read would not miss", "gone": ": it is not on the servers that answered"}
    return reason + of_others.get(reason, "")


# -- agents ------------------------------------------------------------------------------------------------------------


def _show_agent(store: QueriedStore, args: argparse.Namespace, holdings: Holdings, losses: list[Answer]) -> bool:
    """Print an agent's contexts, and the records of its removed manifests in `losses`.

    Return whether a load would find a complete context.
    """
    contexts = [(agent, ask(store, context_of(agent, holdings))) for agent in holdings.agents]
    whole = any(not agent.missing for agent in holdings.agents)
    if args.json:
        found = [context_as_json(agent, places, args) for agent, places in contexts]
        of_agent = {"agent": args.req, "contexts": found, "unreadable": holdings.unreadable}
        print_json({"url": shown(args.url), "unreachable": args.unreachable()} | of_agent | {"lost": losses})
        return whole
    for agent, places in contexts:
        for line in _context_lines(agent, places):
            out.print(readable(line))
    for key in holdings.unreadable:
        model = _model_suffix(name_as_text(key).split(":")[2:])
        out.print(readable(f"an agent's context{model}: its manifest cannot be read"))
    for loss in losses:
        model = _model_suffix(loss["key"].split(":")[2:])
        out.print(
            readable(f"an agent's context{model} is missing: its manifest was {_reason_text(loss['reason'], loss)}")
        )
    return whole


def _model_suffix(model: list[str]) -> str:
    return f" of model {model[0]}" if model and model[0] else ""


def _context_lines(agent: Agent, places: list[BlockPlace]) -> Iterator[str]:
    """Yield lines about a context: the prefix that a load would find, its save, and its missing blocks."""
    whose, tokens, count = _model_suffix([agent.model]), plural(agent.tokens, "token"), len(agent.blocks)
    missing = [(i, place) for i, place in enumerate(places) if not place.block.complete]
    if not missing:
        yield f"an agent's context{whose}: {tokens} in {plural(count, 'block')}, all stored: a load would not miss"
    else:
        first, place = missing[0]
        there = f"but of {plural(count, 'block')} only the first {first:,} are there"
        yield f"an agent's context{whose}: {tokens}, {there}; then: {_missing_reason(place)}"
        yield f"  a load would find {plural(agent.found, 'token')}"
    yield f"  {as_size(agent.bytes)}" + "".join(f", {line}" for line in _dates(agent))
    for i, place in missing[1:_MOST_MISSING]:
        yield f"  block {i:,}: {_missing_reason(place)}"
    if len(missing) > _MOST_MISSING:
        yield f"  and {plural(len(missing) - _MOST_MISSING, 'more block')}"


def _dates(agent: Agent) -> Iterator[str]:
    """Yield the engine and time of the last save, the time of the first save, and the time since the last use."""
    manifest = agent.manifest
    if manifest.saved_ms:
        yield f"stored{f' by {manifest.by}' if manifest.by else ''} {when(manifest.saved_ms)}"
    if manifest.created_ms:
        yield f"for the first time {when(manifest.created_ms)}"
    if agent.idle is not None:
        yield f"used {for_people(agent.idle)} ago"


def _missing_reason(place: BlockPlace) -> str:
    """Return why a block is missing that a manifest names. Engines store it first, but maybe on another server."""
    if place.why == "never stored":
        return _reason_text("never stored here", {"since": place.since})
    by = f" by {place.by}" if place.by else ""
    return f"{place.why or 'incomplete'}{by}" + (f", {when(place.why_at)}" if place.why_at else "")
