"""KVPAGEWHY: the reason why a read of a request or a page would miss."""

from __future__ import annotations

from itertools import count

from kvpage_server.commands.arguments import WRONG_TYPE
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.pages.page import page_name
from kvpage_server.commands.families.pages.request import HOLE, INCOMPLETE, blocks_of, fit_one_step, request_name
from kvpage_server.commands.registry import command
from kvpage_server.commands.specs import nothing, requests
from kvpage_server.commands.steps import STEP, Steps, stepwise
from kvpage_server.core import Argument
from kvpage_server.core.arguments import NAME_WORDS
from kvpage_server.resp import Reply, ReplyError
from kvpage_server.store.contents import NEVER_STORED, OVER_QUOTA
from kvpage_server.store.eviction.ghosts import Ghost
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.entry import is_page

STORED = "stored"


@command(
    "kvpagewhy req [layer head page type]",
    flags="readonly",
    uses=requests(0),
    needs=nothing,
    complexity="O(1) for a page, O(N) for a request of N pages",
    reply="map",
    summary="Says why reading a request or a page would miss.",
    group="page",
)
def kvpagewhy(client: Client, args: list[Argument]) -> Reply:
    """Return a map. `reason` is stored, never stored, expired, evicted, over quota, deleted, overwritten, corrupt or
    hole.

    A request is stored if every block from page id 0 to its last has all its pages, whether or not their shapes fit
    together as KVBLOCKGET wants; `blocks` is the number of its blocks.

    `at` is when the page was removed (unix milliseconds), and `policy` or `quota` is the policy or the pattern of the
    quota that removed it. `limit` is the parameter whose limit the policy kept: maxmemory or maxdisk. If a request has
    a hole, `block` is the page id of its first block that lacks pages, and `cause` is the reason: one of these, or
    incomplete if the block has others of its pages and nothing was removed. `since` says from when on the server
    remembers removals (unix milliseconds).
    """
    keyspace = client.keyspace
    if len(args) == 1:
        return stepwise(_why_request(client, request_name(args[0])), small=fit_one_step(client, args[0]))
    if len(args) != NAME_WORDS:
        raise ReplyError("ERR KVPAGEWHY takes a req, or the five arguments that name a page")
    name = page_name(args)
    entry = keyspace.contents.find(name.key)
    if entry is None:
        ghost = keyspace.ghosts.of_page(name.req_id, name.layer, name.head, name.page, name.kv_type)
        return _explain(keyspace, ghost)
    if not is_page(entry):
        raise ReplyError(WRONG_TYPE)
    return {"reason": STORED}


def _why_request(client: Client, req_id: bytes) -> Steps[dict[str, Reply]]:
    """Return KVPAGEWHY's reply for a request, in steps: its first block that is missing or incomplete, or the number of
    its blocks if there is none.
    """
    keyspace = client.keyspace
    blocks = {block.page: block for block in (yield from blocks_of(client, req_id))}
    if not blocks:
        return _explain(keyspace, keyspace.ghosts.of_request(req_id))
    for page in count():
        block = blocks.get(page)
        if block is not None and block.is_full:
            if page % STEP == 0:
                yield ()
            continue
        ghost = keyspace.ghosts.of_block(req_id, page, block)
        if block is None and ghost is None and page > max(blocks):
            return {"reason": STORED, "blocks": len(blocks)}
        found = _explain(keyspace, ghost, NEVER_STORED if block is None else INCOMPLETE)
        return {"reason": HOLE, "block": page, "cause": found.pop("reason"), **found}
    raise AssertionError


def _explain(keyspace: Keyspace, ghost: Ghost | None, otherwise: str = NEVER_STORED) -> dict[str, Reply]:
    """Return the part of the reply that explains why pages are missing. `ghost` is the record of their removal; without
    one, the reason is `otherwise`.
    """
    if ghost is None:
        return {"reason": otherwise, "since": keyspace.ghosts.since}
    by: dict[str, Reply] = {"quota" if ghost.reason == OVER_QUOTA else "policy": ghost.by} if ghost.by else {}
    if ghost.limit:
        by["limit"] = ghost.limit
    return {"reason": ghost.reason, "at": ghost.at, **by}
