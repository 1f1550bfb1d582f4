"""Writer of the blocks that the page server lacks, and of a seal after each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any, cast

from typing_extensions import Buffer

from kvpage_server.client.page import readable
from kvpage_server.client.raw_commands import RawCommand, up_to

from ...memory.blocks import AgentBlocks, Arrays
from .connection import OUTAGES, ServerConnection, refuses
from .manifest import BlockLayout, BlockPlace

Parts = Mapping[BlockPlace, Sequence[Buffer]]  # the arrays of each place, in canonical order


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of a save."""

    blocks_written: int
    blocks_present: int  # stored before, by any engine
    nbytes: int  # of blocks and states written
    whole: bool = True  # False if some could not be written, because one of several servers is unavailable
    places: tuple[BlockPlace, ...] = field(default=(), compare=False, repr=False)  # of the blocks and states written


Write = Callable[[], Awaitable[Saved]]  # writes the missing blocks of a context


def parts_of(context: AgentBlocks, places: Iterable[BlockPlace], inner: Iterable[BlockPlace]) -> Parts:
    """Return a context's blocks, the states at their ends, and the states at `inner` places, as views of the arrays'
    memory."""
    parts: dict[BlockPlace, Sequence[Buffer]] = {}
    for place, block in zip(places, context.blocks, strict=False):
        parts[place] = _pieces(block.layers)
        if block.state is not None:
            parts[place.state()] = _pieces(block.state)
    states = context.states
    return parts | {place: _pieces(states[place.end]) for place in inner}


def _pieces(arrays: Arrays) -> list[memoryview]:
    return [readable(cast(Any, array)) for layer in arrays for array in layer]


async def missing(
    connection: ServerConnection,
    layout: BlockLayout,
    places: Sequence[BlockPlace],
    *,
    untouched: bool = False,
    silent: int = 0,
) -> list[BlockPlace]:
    """Return the places that are not complete or not sealed. With `untouched`, this does not count as a use of their
    keys. `silent` replaces the answers of one of several servers that does not answer: with 0, its places are returned,
    with 1, they are not.
    """
    raw_commands = [_raw_commands(place, connection, layout) for place in places]
    ask = connection.ask_untouched if untouched else connection.ask
    answers = iter(await ask(chain.from_iterable(raw_commands), gone=silent))
    return [place for place, own in zip(places, raw_commands, strict=True) if [next(answers) for _ in own].count(0)]


def _raw_commands(place: BlockPlace, connection: ServerConnection, layout: BlockLayout) -> list[RawCommand]:
    sealed = [RawCommand(["EXISTS", place.seal], up_to(1))]
    return [*sealed, connection.server.words.exists(place.block)] if layout.nbytes(place) else sealed


async def write(
    connection: ServerConnection, layout: BlockLayout, parts: Parts, places: Sequence[BlockPlace]
) -> list[BlockPlace]:
    """Write some of the parts, chunk by chunk, and seal each chunk. Return the places that were written.

    If one of several servers is unavailable, these are the places before the first one that belongs to it.
    """
    written: list[BlockPlace] = []
    for chunk in layout.chunks(places):
        try:
            done = await _write_chunk(connection, layout, parts, chunk)
        except OUTAGES as error:
            if not connection.several or refuses(error):
                raise
            done = []
        written += done
        if len(done) < len(chunk):
            break
    return written


async def link(connection: ServerConnection, layout: BlockLayout, places: Iterable[BlockPlace]) -> None:
    """Declare to the server that each block extends the one before it, so that it evicts a context from the end.

    The server cannot derive this from the blocks' names. A load declares it, too, but may never happen.
    """
    blocks = [place for place in places if not place.of_state and layout.nbytes(place)]
    if len(blocks) > 1:
        pages = layout.block(blocks[0]).pages
        await connection.server.prefix([place.block for place in blocks], pages_per_block=pages, lease_ms=0)


async def _write_chunk(
    connection: ServerConnection, layout: BlockLayout, parts: Parts, chunk: Sequence[BlockPlace]
) -> Sequence[BlockPlace]:
    """Write and seal a chunk. Return the blocks that were written and sealed."""
    if layout.nbytes(chunk[0]):
        names, bodies = [place.block for place in chunk], [parts[place] for place in chunk]
        try:
            await connection.server.mset_blocks(names, layout.block(chunk[0]), bodies)
        except OUTAGES as error:
            if not connection.several or refuses(error):
                raise
            present = await connection.ask([connection.server.words.exists(name) for name in names], gone=0)
            chunk = [place for place, _ in takewhile(lambda one: one[1], zip(chunk, present, strict=True))]
    connection.progressed()
    await connection.write({place.seal: place.digest(parts[place]) for place in chunk})
    return chunk
