"""Manifests on the server, and how many of them name each block: what nobody names any more is deleted.

``refs:{name}`` counts the manifests that name a block. It changes in the transaction that changes the manifest, so a
crash cannot set one without the other; a block whose count has come to 0 is deleted in another, which fails if somebody
has taken the block up meanwhile. A block that no manifest has ever named, because its engine was killed or because it
was shared before its answer was complete, has no count and waits for eviction like anything else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.tiers.manifest import FORMAT


def manifest_key(agent_id: str) -> str:
    """Where an agent's manifest lies."""
    return f"manifest:{agent_id}"


async def replace(server: Any, agent_id: str, manifest: str | None) -> bool:
    """Put an agent's manifest in place of the one that was there, or for None delete it; whether there was one."""
    key, found = manifest_key(agent_id), False
    dropped: list[str] = []

    async def change(pipe: Any) -> None:
        nonlocal found, dropped
        before = await pipe.get(key)
        found = before is not None
        pipe.multi()
        if manifest is not None:
            pipe.set(key, manifest)
        elif found:
            pipe.delete(key)
        dropped = _recount(pipe, before, manifest)

    replies = await server.transaction(change, key)
    await _bury_dropped(server, dropped, replies)
    return found


async def copy(server: Any, agent_id: str, new_id: str) -> bool:
    """Let an agent have what another one has, in place of its own; whether there is something to be had."""
    source, key, found = manifest_key(agent_id), manifest_key(new_id), False
    dropped: list[str] = []

    async def change(pipe: Any) -> None:
        nonlocal found, dropped
        manifest, before = await pipe.mget(source, key)
        found = manifest is not None
        pipe.multi()
        if found:
            pipe.set(key, manifest)
            dropped = _recount(pipe, before, manifest)

    replies = await server.transaction(change, source, key)
    await _bury_dropped(server, dropped, replies)
    return found


async def agents(server: Any) -> list[str]:
    """Whose manifests there are."""
    found = [key async for key in server.scan_iter(match=manifest_key("*"), count=5000)]
    return sorted({key.decode().removeprefix(manifest_key("")) for key in found})


def _recount(pipe: Any, before: bytes | None, after: bytes | str | None) -> list[str]:
    """Count in the blocks of one manifest, and last of all count out those of the other: these."""
    old, new = _names(before), _names(after)
    for name in new - old:
        pipe.incr(_count_key(name))
    dropped = list(old - new)
    for name in dropped:
        pipe.decr(_count_key(name))
    return dropped


async def _bury_dropped(server: Any, dropped: Sequence[str], replies: Sequence[Any]) -> None:
    """Bury those of the blocks that have been counted out, as the last of these replies say, that nobody names."""
    counts = replies[len(replies) - len(dropped) :]
    await bury(server, [name for name, count in zip(dropped, counts, strict=True) if count == 0])


async def bury(server: Any, names: Sequence[str]) -> None:
    """Delete those of these blocks that no manifest names."""
    if not names:
        return
    keys = list(map(_count_key, names))

    async def change(pipe: Any) -> None:
        counts = await pipe.mget(keys)
        pipe.multi()
        for name, count in zip(names, counts, strict=True):
            if count in (None, b"0"):
                pipe.execute_command("KVPAGEDEL", name)
                pipe.delete(f"seal:{name}", f"state:{name}", _count_key(name))

    await server.transaction(change, *keys)


def _count_key(name: str) -> str:
    return f"refs:{name}"


def _names(manifest: bytes | str | None) -> set[str]:
    """The blocks that a manifest names, of whatever model; of one that makes no sense, none."""
    try:
        stored = json.loads(manifest or "{}")
        return set(map(str, stored["chain"])) if stored["format"] == FORMAT else set()
    except (ValueError, KeyError, TypeError):
        return set()
