"""Writing blocks to a page server: those that aren't there yet, each sealed when it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from typing_extensions import Buffer

from engine.memory.blocks import AgentBlocks, Arrays
from engine.spec import ModelCacheSpec
from engine.tiers.server.connection import ServerConnection
from engine.tiers.server.manifest import BlockLayout, BlockPlace, ContextManifest
from kvpage_server.client.buffers import readable
from kvpage_server.client.questions import Question, ok, up_to

Parts = Mapping[BlockPlace, Sequence[Buffer]]  # what belongs where: the arrays, in canonical order


def parts_of(context: AgentBlocks, manifest: ContextManifest, spec: ModelCacheSpec) -> Parts:
    """The blocks of a context and the states that were taken at their ends, as views of the arrays' memory."""
    parts: dict[BlockPlace, Sequence[Buffer]] = {}
    for place, block in zip(manifest.places(spec), context.blocks, strict=False):
        parts[place] = _pieces(block.layers)
        if block.state is not None:
            parts[place.state()] = _pieces(block.state)
    return parts


def _pieces(arrays: Arrays) -> list[memoryview]:
    return [readable(cast(Any, array)) for layer in arrays for array in layer]


async def missing(connection: ServerConnection, layout: BlockLayout, places: Sequence[BlockPlace]) -> list[BlockPlace]:
    """Those that are not complete, or not sealed."""
    found = iter(await connection.ask(question for place in places for question in _questions(place, layout)))
    return [place for place in places if [next(found) for _ in _questions(place, layout)].count(0)]


def _questions(place: BlockPlace, layout: BlockLayout) -> list[Question]:
    sealed = [Question(["EXISTS", place.seal], up_to(1))]
    return [*sealed, Question(["KVBLOCKEXISTS", *place.block], up_to(1))] if layout.nbytes(place) else sealed


async def write(connection: ServerConnection, layout: BlockLayout, parts: Parts, places: Sequence[BlockPlace]) -> None:
    """Write these of the parts, chunk by chunk, each of which is of use when it is sealed."""
    for chunk in layout.chunks(places):
        if layout.nbytes(chunk[0]):
            names, bodies = [place.block for place in chunk], [parts[place] for place in chunk]
            await connection.server.mset_blocks(names, layout.block(chunk[0]), bodies)
        seals = [word for place in chunk for word in (place.seal, place.digest(parts[place]))]
        await connection.ask_one(ok, "MSET", *seals)
