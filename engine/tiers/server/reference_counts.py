"""Manifests on the server, and how many of them name each block: what nobody names any more is deleted.

``refs:{name}`` counts the manifests that name a block. It changes in the transaction that changes the manifest, so a
crash cannot set one without the other; a block whose count has come to 0 is deleted in another, which fails if somebody
has taken the block up meanwhile. A block that no manifest has ever named, because its engine was killed or because it
was shared before its answer was complete, has no count and waits for eviction like anything else.

An agent has a manifest for each model that has answered it, so that models do not take its contexts from each other.
Earlier versions had one an agent, under ``manifest:{agent}``. It is not read, and goes when the next one is saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from engine.tiers.server.block_writer import Saved, Write
from engine.tiers.server.connection import ServerConnection
from engine.tiers.server.manifest import chain_in, manifest_key, moved, names_in, older_key
from kvpage_server.client.questions import Question, integer, ok, texts

Stored = Mapping[str, bytes | None]  # manifests, by key
MakesManifest = Callable[[bytes | None], bytes]  # what an agent's manifest is to be, of the one that is there


async def save(
    connection: ServerConnection, agent_id: str, fingerprint: int, manifest: MakesManifest, write: Write
) -> Saved:
    """Write blocks, and put an agent's manifest of them in place of the one that was there, of which it is made."""
    key, older = manifest_key(agent_id, fingerprint), older_key(agent_id)
    saved, names = await write(), set[str]()

    def change(stored: Stored) -> Stored:
        made = manifest(stored[key])
        names.update(chain_in(made, key))
        return {key: made, older: None}

    await _change(connection, [key, older], change)
    again = await write()  # what somebody deleted before this manifest held on to it
    if again.blocks_written or again.nbytes:  # or since then, because it was replaced by another engine's
        await bury(connection, sorted(names))
    return saved


async def copy(connection: ServerConnection, agent_id: str, new_id: str, fingerprint: int) -> bool:
    """Let an agent have what another one has, in place of its own; whether there is something to be had."""
    source, key, older = manifest_key(agent_id, fingerprint), manifest_key(new_id, fingerprint), older_key(new_id)
    found = False

    def change(stored: Stored) -> Stored:
        nonlocal found
        manifest = moved(stored[source], source, key)
        found = manifest is not None
        return {key: manifest, older: None} if found else {}

    await _change(connection, [source, key, older], change)
    return found


async def delete(connection: ServerConnection, agent_id: str) -> bool:
    """Delete what any model has of an agent; whether there was something."""
    older, found = older_key(agent_id), False

    def change(stored: Stored) -> Stored:
        nonlocal found
        found = found or any(manifest is not None for manifest in stored.values())
        return dict.fromkeys(stored)

    await _change(connection, [older, *await connection.scan(f"{older}:*")], change)
    return found


async def agents(connection: ServerConnection, fingerprint: int) -> list[str]:
    """The agents that have a manifest for this model."""
    before, after = manifest_key("*", fingerprint).split("*")
    found = await connection.scan(f"{before}*{after}")
    return sorted(key.removeprefix(before).removesuffix(after) for key in found)


async def _change(connection: ServerConnection, keys: Sequence[str], change: Callable[[Stored], Stored]) -> None:
    """Put manifests in place of others, or for None delete them, and bury what nobody names any more.

    `change` is given what lies at `keys`, and called anew when that has changed meanwhile.
    """
    dropped: list[str] = []

    def questions(values: Sequence[bytes | None]) -> list[Question]:
        nonlocal dropped
        stored = dict(zip(keys, values, strict=True))
        wanted = change(stored)
        before = Counter(name for key in wanted for name in names_in(stored[key], key))
        after = Counter(name for key, manifest in wanted.items() for name in names_in(manifest, key))
        added, removed = after - before, before - after
        dropped = list(removed)
        puts = [Question(["SET", key, manifest], ok) for key, manifest in wanted.items() if manifest is not None]
        gone = [key for key, manifest in wanted.items() if manifest is None and stored[key] is not None]
        return [
            *puts,
            *(Question(["DEL", key], integer) for key in gone),
            *(Question(["INCRBY", _count_key(name), count], integer) for name, count in added.items()),
            *(Question(["DECRBY", _count_key(name), count], integer) for name, count in removed.items()),
        ]

    answers = await connection.transaction(keys, Question(["MGET", *keys], texts(len(keys))), questions)
    counts = answers[len(answers) - len(dropped) :]
    await bury(connection, [name for name, count in zip(dropped, counts, strict=True) if count <= 0])


async def bury(connection: ServerConnection, names: Sequence[str]) -> None:
    """Delete those of these blocks that no manifest names."""
    if not names:
        return
    keys = list(map(_count_key, names))

    def change(counts: Sequence[bytes | None]) -> list[Question]:
        dead = [name for name, count in zip(names, counts, strict=True) if count is None or _is_none(count)]
        return [question for name in dead for question in _burial(name)]

    await connection.transaction(keys, Question(["MGET", *keys], texts(len(keys))), change)


def _burial(name: str) -> list[Question]:
    keys = [f"seal:{name}", f"state:{name}", _count_key(name)]
    return [Question(["KVPAGEDEL", name], integer), Question(["DEL", *keys], integer)]


def _is_none(count: bytes) -> bool:
    return count == b"0" or count.startswith(b"-")


def _count_key(name: str) -> str:
    return f"refs:{name}"
