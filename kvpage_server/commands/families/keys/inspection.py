"""OBJECT and MEMORY: representation of values, and use of memory."""

from __future__ import annotations

from functools import partial

from kvpage_server.commands.arguments import SYNTAX_ERROR, as_integer, integer, plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.server.info import human, resident_memory
from kvpage_server.commands.registry import command, container
from kvpage_server.commands.specs import nothing
from kvpage_server.core import Argument
from kvpage_server.resp import Reply, ReplyError, Verbatim
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.entry import TEXT_OVERHEAD, Entry, Text, coded_size_of

_LONGEST_EMBEDDED = 44  # bytes at most of a string with Redis's encoding embstr

_object = partial(command, flags="readonly keyspace", keys=(2, 2, 1), needs=nothing, group="generic")
_memory = partial(command, group="server", since="4.0.0")


container("object", group="generic", summary="A container for how values are kept.")


@_object("object|encoding key", since="2.2.3", reply="bulk | null", summary="Names a value's encoding as Redis would.")
def object_encoding(client: Client, args: list[Argument]) -> Reply:
    """Return int, embstr or raw, as Redis would; null if there is no such key."""
    entry = client.server.keyspace.contents.find(plain(args[0]))
    if entry is None:
        return None
    if not isinstance(entry, Text) or (entry.size > _LONGEST_EMBEDDED):
        return b"raw"
    return b"embstr" if as_integer(entry.data) is None else b"int"


@_object("object|refcount key", since="2.2.3", reply="integer | null", summary="Counts the references to a value.")
def object_refcount(client: Client, args: list[Argument]) -> Reply:
    """Return 1, because values are not shared; null if there is no such key."""
    return None if client.server.keyspace.contents.find(plain(args[0])) is None else 1


@_object(
    "object|idletime key", since="2.2.3", reply="integer | null", summary="Returns the seconds since a value was used."
)
def object_idletime(client: Client, args: list[Argument]) -> Reply:
    """Return the seconds since the key was last used; null if there is no such key. A use of one page of a block counts
    for all of them.
    """
    key, keyspace = plain(args[0]), client.server.keyspace
    return None if keyspace.contents.find(key) is None else keyspace.reader.idle(key)


@_object(
    "object|freq key", since="4.0.0", reply="null", summary="Returns how often a value was used, under an LFU policy."
)
def object_freq(client: Client, args: list[Argument]) -> Reply:
    """Return null if there is no such key. Raises ReplyError otherwise, because there is no LFU policy."""
    if client.server.keyspace.contents.find(plain(args[0])) is None:
        return None
    raise ReplyError(
        "ERR An LFU maxmemory policy is not selected, access frequency not tracked. Please note that when switching "
        "between policies at runtime LRU and LFU data will take some time to adjust."
    )


container("memory", group="server", summary="A container for where memory goes.")


def _usage(key: bytes, entry: Entry) -> int:
    """Return the bytes that a key and its value take."""
    if isinstance(entry, Text):
        return len(key) + entry.size + TEXT_OVERHEAD
    return len(key) + (coded_size_of(entry) or entry.footprint)


@_memory(
    "memory|usage key [SAMPLES count]",
    flags="readonly",
    keys=(2, 2, 1),
    needs=nothing,
    reply="integer | null",
    summary="Returns the bytes that a key and its value occupy.",
)
def memory_usage(client: Client, args: list[Argument]) -> Reply:
    """Return the bytes that a key and its value take; null if there is no such key. SAMPLES has no effect, because a
    value is one piece.
    """
    options = plain_all(args[1:])
    while options:
        if options[0].upper() != b"SAMPLES" or len(options) < 2:
            raise ReplyError(SYNTAX_ERROR)
        if integer(options[1]) < 0:
            raise ReplyError(SYNTAX_ERROR)
        del options[:2]
    key = plain(args[0])
    entry = client.server.keyspace.contents.find(key)
    return None if entry is None else _usage(key, entry)


def _fragmentation(keyspace: Keyspace) -> tuple[float, int]:
    """Return the quotient of held and used bytes of the arena, and their difference in bytes."""
    used, held = keyspace.arena.used, keyspace.arena.held
    return (held / used if used else 1.0), held - used


@_memory(
    "memory|stats",
    flags="allkeys",
    complexity="O(N) with N connections",
    reply="map",
    summary="Describes what the memory is used for.",
)
def memory_stats(client: Client, args: list[Argument]) -> Reply:
    """Return a map of those fields of Redis's MEMORY STATS that exist here. All but ratios and percentages are in
    bytes.
    """
    keyspace = client.server.keyspace
    keys, dataset, resident = len(keyspace), keyspace.memory.used, resident_memory()
    ratio, unused = _fragmentation(keyspace)
    return {
        "total.allocated": dataset,
        "keys.count": keys,
        "keys.bytes-per-key": dataset // keys if keys else 0,
        "dataset.bytes": dataset,
        "dataset.percentage": 100.0 * dataset / resident,
        "allocator.allocated": keyspace.arena.used,
        "allocator.active": keyspace.arena.held,
        "allocator.resident": resident,
        "allocator-fragmentation.ratio": ratio,
        "allocator-fragmentation.bytes": unused,
    }


@_memory("memory|doctor", flags="allkeys", reply="text", summary="Says what is wrong with the memory.")
def memory_doctor(client: Client, args: list[Argument]) -> Reply:
    """Return a text for people about problems with memory."""
    keyspace, memory = client.server.keyspace, client.server.keyspace.memory
    ratio, unused = _fragmentation(keyspace)
    found = []
    if not memory.limit:
        found.append("There is no maxmemory: pages are kept until the machine has no memory left. Set one.")
    elif not keyspace.eviction_order.rules.evicts_expiring and memory.used > 0.9 * memory.limit:
        found.append(f"{human(memory.used)} of {human(memory.limit)} are used; writes will be refused.")
    if unused > 64 * 1024**2 and ratio > 1.5:
        found.append(f"{human(unused)} of the arena hold nothing: values of other sizes were deleted. They are reused.")
    if keyspace.counters.evicted > keyspace.counters.hits > 0:
        found.append("More keys were evicted than read: maxmemory is small for what is written.")
    report = "\n".join(f" * {line}" for line in found) or "The memory is in order."
    return Verbatim(f"{report}\n".encode())
