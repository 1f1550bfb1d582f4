"""The protection of values: KVPAGEPREFIX, KVPAGELEASE, KVPAGEPIN, KVPAGEUNPIN, KVPAGEKEEP.

Leases, pins and lifetimes protect a block from eviction, and lifetimes strings, too. They do not protect from expiry or
deletion. `store/keyspace.py` limits the bytes that they may take together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvpage_server.commands.arguments import check_batch, integer_in, plain
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.pages.request import (
    HOLE,
    ascending,
    block_missed,
    block_names,
    count_miss,
    fit_one_step,
    named_blocks,
    note_chain,
    page_id,
    request_name,
)
from kvpage_server.commands.registry import command
from kvpage_server.commands.specs import WORDS_PER_STEP, Parts, PrefixParts, nothing, prefix_words, prefixes, requests
from kvpage_server.commands.steps import STEP, Steps, each, stepwise
from kvpage_server.core import Argument
from kvpage_server.page import MAX_U32
from kvpage_server.resp import Raw, Reply, ReplyError
from kvpage_server.store.contents import unit_of
from kvpage_server.store.eviction.leases import LONGEST_LEASE, LONGEST_LIFETIME, Bytes
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.keyspace import Keyspace, stored_shape
from kvpage_server.store.memory.index import Block
from kvpage_server.system.text import monotonic_ms

LONGEST_TENANT = 128  # bytes of a tenant's name
MOST_TENANTS = 1_000_000

_ROOMS = "maxmemory", "what maxdisk has for values", "what the index may take"  # in the order of `Bytes`


def _exceeded(keyspace: Keyspace, unit: Unit, added: Bytes) -> str:
    """Return why a unit cannot be protected: protected values would exceed their limit by `added`, the bytes to add.
    The text names the first exceeded limit: of memory, the disk or the index.
    """
    most, beside = keyspace.protection.most(unit), keyspace.leases.protected_bytes(unit)
    limits = zip(_ROOMS, added, most, beside, strict=True)
    exceeded = ((room, more, may) for room, more, may, had in limits if had + more > may)
    room, more, may = next(exceeded, (_ROOMS[0], added.memory, most.memory))
    of_what = f"the quota, or of what quotas leave of {room}" if keyspace.eviction_order.quotas.all else room
    return f"leases, pins and lifetimes may take {may} bytes together, half of {of_what}: {more} more would be too many"


_protection = partial(command, group="page", needs=nothing, uses=requests(0), reply="integer")
_pinning = partial(_protection, flags="write", parts=Parts(1), complexity="O(N) with N blocks")


@_protection(
    "kvpageprefix pages_per_block lease_ms N req page [req page ...] [LENGTHS M req page need [req page need ...]]",
    flags="readonly movablekeys",
    uses=prefixes(3, 2),
    parts=PrefixParts(3, 2),
    complexity="O(N + M) with N blocks and M states",
    reply="integer | array of integer",
    summary="Counts the complete blocks before the first incomplete one, and leases them.",
)
def kvpageprefix(client: Client, args: list[Argument]) -> Reply:
    """Return the number of blocks, from the first one, that have `pages_per_block` pages. They are leased for
    `lease_ms` milliseconds; 0 leases nothing.

    A block with that many pages is complete here, whether or not their shapes fit together as KVBLOCKGET wants.

    The count also ends at a block that can't be leased because too much is leased already. So every counted block is
    leased. KVPAGELEASE documents leases behind a gateway.

    LENGTHS is for models with states or windows, which continue only where a state is stored. The state `req page`
    needs the first `need` blocks, and several states may need as many. The reply is an array of the lengths, in
    ascending order, of which all blocks and all states are complete; a state is complete as KVBLOCKEXISTS says.
    Exactly the blocks and states of the longest length are leased. A length that can't be leased, because too much is
    leased already or because a block has changed meanwhile, is not in the reply.
    """
    keyspace = client.keyspace
    pages_per_block = integer_in("pages_per_block", args[0], 1, MAX_U32)
    milliseconds = integer_in("lease_ms", args[1], 0, LONGEST_LEASE)
    blocks, states = checked_prefix(args)

    def steps() -> Steps[Reply]:
        names = yield from each(args[3 : blocks.stop], block_names, 2)
        needed_states = yield from each(args[states.start : states.stop], state_names, 3)
        keyspace.leases.settle(monotonic_ms())
        found: list[Block] = []
        for at, (req_id, page) in enumerate(names):
            block = keyspace.reader.block(req_id, page)
            if block is None or block.pages != pages_per_block:
                yield from _count_misses(client, names[at:], pages_per_block)
                break
            if milliseconds and not needed_states and not keyspace.protection.lease(block, milliseconds):
                break
            found.append(block)
            if at % STEP == 0:
                yield ()
        yield from note_chain(keyspace, found)
        if not needed_states:
            return len(found)
        complete = yield from _complete_states(keyspace, needed_states, len(found))
        lengths = yield from _lease_longest(keyspace, found, pages_per_block, complete, milliseconds)
        encoded = yield from each(lengths, lambda some: [b":%d\r\n" % length for length in some])
        return Raw(b"*%d\r\n%b" % (len(lengths), b"".join(encoded)))

    # a state may have very many pages
    return stepwise(steps(), small=len(args) <= WORDS_PER_STEP and not states)


State = tuple[bytes, int, int]  # req_id, page_id, and the number of blocks that it needs


def state_names(args: Sequence[Argument]) -> list[State]:
    """Return the state of each three arguments. Raises ReplyError for an invalid one."""
    return [
        (request_name(req), page_id(page), integer_in("need", need, 1, MAX_U32))
        for req, page, need in zip(args[::3], args[1::3], args[2::3], strict=True)
    ]


def checked_prefix(args: Sequence[Argument]) -> tuple[range, range]:
    """Return the result of `prefix_words`. Raises ReplyError for a wrong number of blocks or states."""
    blocks, states = prefix_words(args)
    check_batch("KVPAGEPREFIX", args[2 : blocks.stop], 2, "block")
    if blocks.stop < len(args):
        check_batch("LENGTHS", args[blocks.stop + 1 :] or [b""], 3, "state", "M")
    return blocks, states


class _States(NamedTuple):
    """The complete states by length. Most lengths have one, so most have no list, which would be freed in one step."""

    first: dict[int, Block]
    others: dict[int, list[Block]]

    def of(self, length: int) -> list[Block]:
        """Return all states of a length."""
        return [self.first[length], *self.others.get(length, ())]


def _complete_states(keyspace: Keyspace, states: Sequence[State], most: int) -> Steps[_States]:
    """Return the states of each length up to `most` of which all states are complete."""
    complete, incomplete = _States({}, {}), set[int]()
    for at, (req_id, page, need) in enumerate(states):
        if need <= most and need not in incomplete:
            block = keyspace.reader.block(req_id, page)
            if block is None or (yield from stored_shape(keyspace, block)) is None:
                incomplete.add(need)
                complete.first.pop(need, None)
            elif complete.first.setdefault(need, block) is not block:
                complete.others.setdefault(need, []).append(block)
        if at % STEP == 0:
            yield ()
    return complete


Granted = tuple[Block, int, tuple[int, int]]  # the arguments of `Leases.withdraw`


def _lease_longest(
    keyspace: Keyspace, blocks: Sequence[Block], pages_per_block: int, states: _States, milliseconds: int
) -> Steps[list[int]]:
    """Lease the longest length that can be leased, and nothing else. Return all lengths up to it in ascending order.

    `blocks` and `states` were complete in an earlier step. So each is leased only if it still is.
    """
    lengths = yield from ascending([*states.first])
    if not (milliseconds and lengths):
        return lengths

    def lease_all(candidates: Sequence[Block], is_whole: Callable[[Block], bool]) -> Steps[list[Granted]]:
        """Lease blocks in steps, from the first one to the first that cannot be leased."""
        leased: list[Granted] = []
        for at, block in enumerate(candidates):
            if at % STEP == 0:
                yield ()
            is_there = keyspace.reader.block(block.req_id, block.page) is block
            lease = keyspace.leases.of(block)
            before = lease.until, lease.ticket
            if not (is_there and is_whole(block) and keyspace.protection.lease(block, milliseconds)):
                break
            leased.append((block, keyspace.leases.of(block).ticket, before))
        return leased

    leased = yield from lease_all(blocks[: lengths[-1]], lambda block: block.pages == pages_per_block)
    lengths = lengths[: bisect_right(lengths, len(leased))]
    while lengths:
        yield from _withdraw(keyspace, leased, lengths[-1])
        own = states.of(lengths[-1])
        of_states = yield from lease_all(own, lambda state: state.shape_known and state.shape is not None)
        if len(of_states) == len(own):
            return lengths
        yield from _withdraw(keyspace, of_states, 0)
        lengths.pop()
    yield from _withdraw(keyspace, leased, 0)
    return lengths


def _withdraw(keyspace: Keyspace, leased: list[Granted], most: int) -> Steps[None]:
    """Undo leases in steps, from the last one, until `most` are left."""
    while len(leased) > most:
        keyspace.leases.withdraw(*leased.pop())
        if len(leased) % STEP == 0:
            yield ()


def _count_misses(client: Client, names: list[tuple[bytes, int]], pages_per_block: int) -> Steps[None]:
    """Count the block `names[0]` as a missed read, and the complete blocks after it as missed with the reason "hole". A
    block has (req_id, page_id) as its name.
    """
    block_missed(client, *names[0])

    def lost(some: Sequence[tuple[bytes, int]]) -> list[bool]:
        blocks = (client.keyspace.reader.block(*name) for name in some)
        return [block is not None and block.pages == pages_per_block for block in blocks]

    holes = sum((yield from each(names[1:], lost)))
    client.keyspace.counters.misses += 1 + holes
    count_miss(client, HOLE, holes)


@_protection(
    "kvpagelease req lease_ms [page ...]",
    flags="readonly",
    parts=Parts(2),
    complexity="O(N log M) with N blocks and M leases",
    summary="Protects a request, or some of its blocks, from eviction for a while.",
)
def kvpagelease(client: Client, args: list[Argument]) -> Reply:
    """Return the number of leased blocks, from the first one. The limit on the bytes of all leases and pins may end it
    early. A longer lease that a block has already stays.

    A cluster has its own eviction policy: behind a gateway the blocks count as just used and do not expire before the
    end of the lease, but may be evicted. There page ids have to be given.
    """
    keyspace = client.keyspace
    milliseconds = integer_in("lease_ms", args[1], 1, LONGEST_LEASE)
    few = fit_one_step(client, args[0], args[2:])

    def steps() -> Steps[int]:
        blocks = yield from named_blocks(client, args[0], args[2:])
        keyspace.leases.settle(monotonic_ms())
        gone = 0
        for at, block in enumerate(blocks):
            if not (few or keyspace.index.still_has(block)):
                gone += 1
            elif not keyspace.protection.lease(block, milliseconds):
                return at - gone
            if at % STEP == STEP - 1:
                yield ()
        return len(blocks) - gone

    return stepwise(steps(), small=few)


@_pinning(
    "kvpagepin req [page ...]",
    summary="Protects a request, or some of its blocks, from eviction until they are unpinned.",
)
def kvpagepin(client: Client, args: list[Argument]) -> Reply:
    """Return the number of pinned blocks: all that exist. An error if that would exceed the limit: then no pin is
    added.
    """
    keyspace, leases, protection = client.keyspace, client.keyspace.leases, client.keyspace.protection
    few = fit_one_step(client, args[0], args[1:])

    def steps() -> Steps[int]:
        blocks = yield from named_blocks(client, args[0], args[1:])
        leases.settle(monotonic_ms())
        sizes = yield from each(blocks, lambda some: [protection.size_of(one) for one in some if one not in leases])
        added = Bytes(*map(sum, zip(Bytes(0, 0), *sizes, strict=True)))
        if blocks and not leases.have_room(blocks[0], added, protection.most(blocks[0])):
            raise ReplyError(f"ERR {_exceeded(keyspace, blocks[0], added)}")
        new, gone = list[Block](), 0
        for at, block in enumerate(blocks):
            if not (few or keyspace.index.still_has(block)):
                gone += 1
            elif not leases.of(block).pinned:
                if not protection.pin(block):
                    for one in new:
                        leases.unpin(one)  # other leases or pins took the room meanwhile
                    raise ReplyError(f"ERR {_exceeded(keyspace, block, added)}")
                new.append(block)
            if at % STEP == STEP - 1:
                yield ()
        return len(blocks) - gone

    return stepwise(steps(), small=few)


@_pinning("kvpageunpin req [page ...]", summary="Ends the pins of a request, or of some of its blocks.")
def kvpageunpin(client: Client, args: list[Argument]) -> Reply:
    """Return the number of blocks that were pinned."""
    leases = client.keyspace.leases

    def steps() -> Steps[int]:
        blocks = yield from named_blocks(client, args[0], args[1:])
        return sum((yield from each(blocks, lambda some: list(map(leases.unpin, some)))))

    return stepwise(steps(), small=fit_one_step(client, args[0], args[1:]))


@command(
    "kvpagekeep tenant tenants seconds key [key ...]",
    flags="write",
    group="page",
    keys=(4, -1, 1),
    needs=nothing,
    parts=Parts(3),
    reply="array",
    complexity="O(N log M) with N keys and M lifetimes",
    summary="Protects values from eviction for up to a day, also after a restart.",
)
def kvpagekeep(client: Client, args: list[Argument]) -> Reply:
    """Return the number of keys, from the first one, whose values have a lifetime of at least `seconds` now; the first
    end in unix milliseconds, 0 without a key; and why the next key has none: `absent`, or the limit that is reached.

    The key of a page stands for its block. A lifetime is never shortened. If the tenant has given a value a longer one,
    this begins anew. With 0 `seconds`, all lifetimes begin anew, and a value without one gets none: `not kept`.
    `tenant` is a name of up to 128 bytes, for which the bytes count; if there are several `tenants`, each may keep that
    part of the limit. A value that is kept for another tenant counts for that one, unless the end is later. After the
    end, a block that was not used since is evicted first. A new value of a string has the lifetime of the old one.
    """
    keyspace = client.keyspace
    tenant = plain(args[0])
    if len(tenant) > LONGEST_TENANT:
        raise ReplyError(f"ERR tenant must have at most {LONGEST_TENANT} bytes, got {len(tenant)}")
    tenants = integer_in("tenants", args[1], 1, MOST_TENANTS)
    seconds = integer_in("seconds", args[2], 0, LONGEST_LIFETIME)

    def steps() -> Steps[list[Reply]]:
        keyspace.leases.settle(monotonic_ms())
        kept, end, why = 0, 0, ""
        for key in map(plain, args[3:]):
            ends, why = _keep(keyspace, key, seconds, tenant, tenants)
            if why:
                break
            kept, end = kept + 1, min(end or ends, ends)
            if kept % STEP == 0:
                yield ()
        return [kept, end, why.encode()]

    return stepwise(steps(), small=len(args) <= WORDS_PER_STEP)


def _keep(keyspace: Keyspace, key: bytes, seconds: int, tenant: bytes, tenants: int) -> tuple[int, str]:
    """Give the value of a key a lifetime; with 0 seconds, begin that of the value anew. Return its end in unix
    milliseconds, and "", or why it has none.
    """
    entry = keyspace.contents.find(key)
    if entry is None:
        return 0, "absent"
    unit = unit_of(key, entry)
    lease = keyspace.leases.of(unit)
    if not seconds:
        if not lease.kept_until:
            return 0, "not kept"
        seconds, tenant = lease.seconds, lease.tenant
    exceeded = keyspace.protection.keep(unit, seconds, tenant, tenants)
    if exceeded == "share":
        return 0, f"the share of the tenant, one of {tenants}, is used up"
    if exceeded:
        return 0, _exceeded(keyspace, unit, keyspace.protection.size_of(unit))
    return keyspace.leases.of(unit).ends, ""
