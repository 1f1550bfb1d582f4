"""Manifests on one server. Blocks that no manifest names any more are deleted.

``refs:{name}`` counts the manifests that name a block. It changes in the same transaction as the manifest, so they
always agree. A block whose count is 0 is deleted in a second transaction, unless a manifest has named the block
meanwhile. A block that no manifest has ever named, because its engine was killed or its answer is not complete, has no
count, and is left to eviction.

An agent has a manifest for each model, so that models do not replace each other's contexts. Earlier versions had one
manifest for each agent, ``manifest:{agent}``. It is not read, and the next save deletes it.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvpage_server.client.errors import Refused
from kvpage_server.client.raw_commands import RawCommand, integer, ok, texts

from ...chains import is_agent_id
from .block_writer import Saved, Write
from .connection import ServerConnection
from .manifest import DELETION_SECONDS, deletion_key, manifest_key, names_in, older_key, renamed_manifest

_NO_NUMBER = "not an integer"  # in the error of INCRBY and DECRBY
_NUMBER = re.compile(rb"-?[0-9]{1,18}")

Stored = Mapping[str, bytes | None]  # manifests by key
ManifestMaker = Callable[[bytes | None], bytes]  # makes an agent's manifest, given the old one


async def save(
    connection: ServerConnection,
    agent_id: str,
    fingerprint: int,
    manifest: ManifestMaker,
    write: Write,
    deletion: bytes | None,
) -> Saved | None:
    """Write blocks, and replace the agent's manifest. `manifest` makes the new one from the old one. If the mark of the
    agent's deletion is not `deletion` any more, delete the blocks instead, and return None.
    """
    key, older, mark = manifest_key(agent_id, fingerprint), older_key(agent_id), deletion_key(agent_id)
    saved, names, deleted = await write(), set[str](), False

    def change(stored: Stored) -> Stored:
        nonlocal deleted
        deleted = stored[mark] not in (None, deletion)
        if deleted:
            return {}
        made = manifest(stored[key])
        names.update(names_in(made, key))
        return {key: made, older: None}

    await _change(connection, [key, older, mark], change)
    if deleted:
        await delete_unreferenced(connection, sorted({place.name for place in saved.places}))
        return None
    again = await write()  # blocks may have been deleted before the manifest named them
    if again.blocks_written or again.nbytes:  # another engine may have replaced the manifest since
        await delete_unreferenced(connection, sorted(names))
    return saved


async def copy(connection: ServerConnection, agent_id: str, new_id: str, fingerprint: int) -> Stored | None:
    """Give an agent the context of another in place of its own. Return its own manifest by key; None if the other has
    no context.
    """
    source, key, older = manifest_key(agent_id, fingerprint), manifest_key(new_id, fingerprint), older_key(new_id)
    replaced: Stored | None = None

    def change(stored: Stored) -> Stored:
        nonlocal replaced
        manifest = renamed_manifest(stored[source], source, key)
        replaced = None if manifest is None else {key: stored[key]}
        return {} if manifest is None else {key: manifest, older: None}

    await _change(connection, [source, key, older], change)
    return replaced


async def delete(connection: ServerConnection, agent_id: str) -> dict[str, bytes]:
    """Delete an agent's contexts, of any model, and mark the agent as deleted. Return their manifests by key."""
    older, found = older_key(agent_id), dict[str, bytes]()

    def change(stored: Stored) -> Stored:
        nonlocal found
        found = {key: manifest for key, manifest in stored.items() if manifest is not None}
        return dict.fromkeys(stored)

    await _change(connection, [older, *await connection.scan(f"{older}:*")], change, [mark_deleted(agent_id)])
    return found


def mark_deleted(agent_id: str) -> RawCommand:
    """Return the command that marks an agent as deleted, with another value for each deletion."""
    return RawCommand(["SET", deletion_key(agent_id), uuid.uuid4().hex, "EX", DELETION_SECONDS], ok)


async def agents(connection: ServerConnection, fingerprint: int) -> list[str]:
    """Return the sorted agents that have a manifest for this model.

    Other clients may have stored keys whose names are no agents; these are left out.
    """
    before, after = manifest_key("*", fingerprint).split("*")
    found = await connection.scan(f"{before}*{after}")
    return sorted(filter(is_agent_id, (key.removeprefix(before).removesuffix(after) for key in found)))


async def _change(
    connection: ServerConnection,
    keys: Sequence[str],
    change: Callable[[Stored], Stored],
    marks: Sequence[RawCommand] = (),
) -> None:
    """Replace manifests, or delete them, in a transaction that also counts the manifests of each block. Then delete the
    blocks that no manifest names any more.

    `change` gets the manifests at `keys`, None for a missing one, and returns the new ones by key: None deletes a
    manifest, and a key that it leaves out keeps its own. It is called again if a manifest has changed meanwhile. If a
    manifest is deleted, the transaction has the commands `marks`, too. Counts that are no numbers are deleted, and no
    block then: they are left to eviction. Raises Refused, or an outage.
    """
    dropped: list[str] = []
    counted: set[str] = set()

    def raw_commands(values: Sequence[bytes | None]) -> list[RawCommand]:
        nonlocal dropped
        stored = dict(zip(keys, values, strict=True))
        changed = change(stored)
        before = Counter(name for key in changed for name in names_in(stored[key], key))
        after = Counter(name for key, manifest in changed.items() for name in names_in(manifest, key))
        added, removed = after - before, before - after
        dropped = list(removed)
        counted.update(added, removed)
        puts = [RawCommand(["SET", key, manifest], ok) for key, manifest in changed.items() if manifest is not None]
        deleted = [key for key, manifest in changed.items() if manifest is None and stored[key] is not None]
        return [
            *puts,
            *(RawCommand(["DEL", key], integer) for key in deleted),
            *(marks if deleted else ()),
            *(RawCommand(["INCRBY", count_key(name), count], integer) for name, count in added.items()),
            *(RawCommand(["DECRBY", count_key(name), count], integer) for name, count in removed.items()),
        ]

    try:
        answers = await connection.transaction(keys, RawCommand(["MGET", *keys], texts(len(keys))), raw_commands)
    except Refused as error:
        if _NO_NUMBER not in str(error):
            raise
        await _delete_damaged(connection, sorted(counted))  # the server has run the other commands of the transaction
        return
    counts = answers[len(answers) - len(dropped) :]
    await delete_unreferenced(connection, [name for name, count in zip(dropped, counts, strict=True) if count <= 0])


async def _delete_damaged(connection: ServerConnection, names: Sequence[str]) -> None:
    """Delete the counts that are no numbers, because another client has set them. Their blocks are left to eviction."""
    keys = list(map(count_key, names))

    def change(counts: Sequence[bytes | None]) -> list[RawCommand]:
        damaged = [key for key, count in zip(keys, counts, strict=True) if count and not _NUMBER.fullmatch(count)]
        return [RawCommand(["DEL", key], integer) for key in damaged]

    await connection.transaction(keys, RawCommand(["MGET", *keys], texts(len(keys))), change)


async def delete_unreferenced(connection: ServerConnection, names: Sequence[str]) -> None:
    """Delete the blocks among `names` that no manifest names."""
    if not names:
        return
    keys = list(map(count_key, names))

    def change(counts: Sequence[bytes | None]) -> list[RawCommand]:
        found = zip(names, counts, strict=True)
        unreferenced = [name for name, count in found if count is None or count == b"0" or count.startswith(b"-")]
        return [
            raw_command
            for name in unreferenced
            for raw_command in (RawCommand(["KVPAGEDEL", name], integer), forget_block(name))
        ]

    await connection.transaction(keys, RawCommand(["MGET", *keys], texts(len(keys))), change)


def forget_block(name: str) -> RawCommand:
    """Return the command that deletes the keys of a block, except its pages: seals, count and label."""
    return RawCommand(["DEL", f"seal:{name}", f"state:{name}", label_key(name), count_key(name)], integer)


def label_key(name: str) -> str:
    """Return the key of the text that `kvpage ls` shows for a block of a context without a name."""
    return f"label:{name}"


def count_key(name: str) -> str:
    """Return the key of the number of manifests that name a block."""
    return f"refs:{name}"
