"""Manifests on several servers, where a save cannot make all its changes in one transaction.

    refs:{tag}name                        the number of manifests that name a block
    refs:{tag}name:{agent}:{fingerprint}  a reference: the digest of the manifest that named the block last

All keys of a block have its tag, so they are on one server and change together. A save has five steps, each of which
can be repeated: write the blocks; add a reference to each; write the blocks again that were deleted in between; write
the manifest; remove the references of the old manifest. If an engine dies between two steps, some blocks have too many
references, or none, and are left to eviction. A manifest never names blocks that were not written.

A reference is removed only if it has the digest of the old manifest. If another engine has saved the agent's next
context meanwhile, it has set its own digest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, islice

from kvpage_server.client.raw_commands import RawCommand, integer, ok, text, texts
from kvpage_server.page import SEGMENT

from .block_writer import Saved, Write
from .connection import OUTAGES, ServerConnection, refuses
from .manifest import UNKNOWN, deletion_key, digest_of, manifest_key, named_in, names_in, older_key, renamed_manifest
from .reference_counts import ManifestMaker, Stored, count_key, forget_block, mark_deleted

_CONCURRENT_SEGMENTS = 8  # segments whose references are changed concurrently
_TRIES = 10  # of a fork, while the context is being saved

Reference = tuple[str, bytes | None, bytes | None]  # a block, the number of its manifests, and this manifest's mark


async def save(
    connection: ServerConnection,
    agent_id: str,
    fingerprint: int,
    manifest: ManifestMaker,
    write: Write,
    deletion: bytes | None,
) -> Saved | None:
    """Write blocks, and replace the agent's manifest if all of them exist then, unless `deletion`, the mark of the
    agent's deletion, is unknown. If the mark is another one after that, or its server does not answer any more, delete
    the manifest. Return None if the agent was deleted.
    """
    key = manifest_key(agent_id, fingerprint)
    saved = await write()
    if deletion == UNKNOWN:
        return replace(saved, whole=False)
    try:
        if saved.whole:
            made = manifest(await connection.ask_one(text, "GET", key))
            await _add_references(connection, key, made)
            saved = replace(saved, whole=(await write()).whole)
        if saved.whole:
            await _replace_manifest(connection, key, made)
            (mark,) = await connection.ask([RawCommand(["GET", deletion_key(agent_id)], text)], gone=UNKNOWN)
            if mark not in (None, deletion):
                await _replace_manifest(connection, key, None)
                return replace(saved, whole=False) if mark == UNKNOWN else None
    except OUTAGES as error:
        if refuses(error):
            raise
        saved = replace(saved, whole=False)
    return saved


async def copy(connection: ServerConnection, agent_id: str, new_id: str, fingerprint: int) -> Stored | None:
    """Give an agent the context of another in place of its own. Return its own manifest by key; None if the other has
    no context.
    """
    source, key = manifest_key(agent_id, fingerprint), manifest_key(new_id, fingerprint)
    stored = await connection.ask_one(text, "GET", source)
    for _ in range(_TRIES):
        manifest = renamed_manifest(stored, source, key)
        if manifest is None:
            return None
        await _add_references(connection, key, manifest)
        before, stored = stored, await connection.ask_one(text, "GET", source)
        if stored == before:  # its references existed until the new manifest had its own
            return {key: await _replace_manifest(connection, key, manifest)}
    return None


async def delete(connection: ServerConnection, agent_id: str) -> dict[str, bytes]:
    """Delete an agent's contexts, of any model, and mark the agent as deleted. Return their manifests by key."""
    keys = await connection.scan(f"{older_key(agent_id)}:*", all_of_them=True)
    if keys:
        await connection.ask([mark_deleted(agent_id)])
    older = {key: await _replace_manifest(connection, key, None) for key in keys}
    return {key: manifest for key, manifest in older.items() if manifest is not None}


async def _replace_manifest(connection: ServerConnection, key: str, manifest: bytes | None) -> bytes | None:
    """Replace the manifest at a key, or delete it for None. Remove the references of the old manifest, and return
    it."""
    older: bytes | None = None

    def change(stored: bytes | None) -> list[RawCommand]:
        nonlocal older
        older = stored
        if manifest is not None:
            return [RawCommand(["SET", key, manifest], ok)]
        return [RawCommand(["DEL", key], integer)] if stored is not None else []

    await connection.transaction([key], RawCommand(["GET", key], text), change)
    with suppress(*OUTAGES):  # blocks with too many references are left to eviction
        await _remove_references(connection, key, older, names_in(manifest, key))
    return older


async def _add_references(connection: ServerConnection, key: str, manifest: bytes) -> None:
    """Add a reference to every block that a manifest names."""
    digest = digest_of(manifest)

    def change(references: Sequence[Reference]) -> list[RawCommand]:
        stale = [(block, mark) for block, _, mark in references if mark != digest]
        return [
            *(RawCommand(["SET", _mark_key(block, key), digest], ok) for block, _ in stale),
            *(RawCommand(["INCRBY", count_key(block), 1], integer) for block, mark in stale if mark is None),
        ]

    await _change(connection, key, _segments(manifest, key), change)


async def _remove_references(
    connection: ServerConnection, key: str, manifest: bytes | None, kept: Collection[str]
) -> None:
    """Remove the references of a manifest, except to the blocks in `kept`, and delete blocks without references. A
    block without a count is left to eviction."""
    if manifest is None:
        return
    digest = digest_of(manifest)

    def change(references: Sequence[Reference]) -> list[RawCommand]:
        return [
            raw_command
            for block, count, mark in references
            if mark == digest
            for raw_command in (
                RawCommand(["DEL", _mark_key(block, key)], integer),
                *_decrement(connection, block, count),
            )
        ]

    await _change(connection, key, _segments(manifest, key, kept), change)


def _decrement(connection: ServerConnection, block: str, count: bytes | None) -> list[RawCommand]:
    """Return the commands that decrement a block's count, or delete the block with its last reference."""
    if count is None or not count.isdigit():
        return []
    if int(count) > 1:
        return [RawCommand(["DECRBY", count_key(block), 1], integer)]
    return [connection.server.words.delete(block.encode(), (0, 1)), forget_block(block)]


async def _change(
    connection: ServerConnection,
    key: str,
    segments: Sequence[Sequence[str]],
    change: Callable[[Sequence[Reference]], list[RawCommand]],
) -> None:
    """Change the references of the manifest at a key, segment by segment. Up to _CONCURRENT_SEGMENTS are changed at the
    same time; the first failure is raised when all of these have ended."""

    async def change_one(blocks: Sequence[str]) -> None:
        keys = [word for block in blocks for word in (count_key(block), _mark_key(block, key))]
        await connection.transaction(
            keys,
            RawCommand(["MGET", *keys], texts(len(keys))),
            lambda values: change(list(zip(blocks, values[::2], values[1::2], strict=True))),
        )

    left = iter(segments)
    while some := list(islice(left, _CONCURRENT_SEGMENTS)):
        outcomes = await asyncio.gather(*map(change_one, some), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


def _segments(manifest: bytes, key: str, kept: Collection[str] = ()) -> list[list[str]]:
    """Return the tagged names of a manifest's blocks and states, grouped by segment, without the names in `kept`."""
    named = groupby(named_in(manifest, key, SEGMENT), lambda one: one[0])
    found = ([tag + name for _, name in some if name not in kept] for tag, some in named)
    return [blocks for blocks in found if blocks]


def _mark_key(block: str, key: str) -> str:
    return f"refs:{block}:{key.removeprefix('manifest:')}"
