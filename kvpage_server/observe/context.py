"""Details of one agent's context: the tier of each block or the reason why it is missing, and the pages of one
block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from kvpage_server.observe.asking import Command, Reading, named, parts_of, refused, text
from kvpage_server.observe.memory_by_agent import Agent, ContextBlock, Holdings
from kvpage_server.page import DType

MOST_BLOCKS = 2000  # blocks of a context that are returned
MOST_BYTES = 64 << 20  # bytes of a request's pages; the norms of more bytes are not computed
MOST_PAGES = 20_000  # pages of a block; the norms of more pages are not computed
PIECE_BYTES = 1 << 20  # bytes of pages that are read with one command
_MOST_PARTS = 64  # blocks of a request; the norms of more blocks are not computed


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The state of a block of a context: where it is stored, or why it is missing."""

    block: ContextBlock
    agents: tuple[str, ...]  # all agents that have it
    tier: str  # memory or disk; empty if it is missing
    pinned: bool | None  # None if the store does not report leases and pins
    lease: int | None  # milliseconds until its lease ends
    why: str  # the reason why it is missing; empty if it is stored
    why_at: int  # time of its removal, in unix milliseconds; 0 if unknown
    since: int  # start of the records of removals, in unix milliseconds, if they have none of it; 0 if unknown
    by: str  # the policy or quota that removed it, and the exceeded limit


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a block. `norms` has the shape ``[layers, planes, heads]``."""

    name: bytes
    tokens: int  # rows of a page
    planes: tuple[int, ...]  # kv_type of each: 0 K, 1 V ...
    dtypes: tuple[str, ...]  # name of each plane's element type
    sizes: tuple[int, ...]  # bytes of a page of each plane
    layers: int
    heads: int
    # Root of the mean square of each page's values; NaN for pages of types that `_NUMPY` lacks, and for pages of more
    # than PIECE_BYTES.
    norms: np.ndarray[Any, np.dtype[np.float32]]


def context_of(agent: Agent, holdings: Holdings) -> Reading[list[BlockPlace]]:
    """Return the state of each block of an agent's context, in order, for the first MOST_BLOCKS blocks.

    `holdings` has the agents of each block.
    """
    blocks = agent.blocks[:MOST_BLOCKS]
    reasons = yield [[b"KVPAGEWHY", block.name] for block in blocks]
    indexes = yield [[b"KVPAGEINDEX", block.name, b"TOTAL"] for block in blocks]
    stats = yield [_stat(block.name, index) for block, index in zip(blocks, indexes, strict=True)]
    return [
        _state_of(block, holdings.owners.get(block.name, ()), reason, stat)
        for block, reason, stat in zip(blocks, reasons, stats, strict=True)
    ]


def _stat(name: bytes, index: Any) -> Command:
    """Return the KVPAGESTAT command for the first page of a block. `index` is the reply to its KVPAGEINDEX."""
    first: dict[str, Any] = next(iter(parts_of(index)), {"page": 0, "planes": [0]})
    return [b"KVPAGESTAT", name, 0, 0, first["page"], int(first["planes"][0])]


def _state_of(block: ContextBlock, agents: tuple[str, ...], reason: Any, stat: Any) -> BlockPlace:
    why = {} if refused(reason) else named(reason)
    received = {} if refused(stat) or stat is None else named(stat)
    pinned = received.get("pinned", 0)
    there = block.complete or why.get("reason") == b"stored"
    return BlockPlace(
        block,
        agents,
        text(received["tier"]) if received else "",
        None if pinned is None else bool(pinned),
        received.get("lease_left_ms", 0),
        "" if there else text(why.get("cause") or why.get("reason", b"")),
        int(why.get("at", 0)),
        int(why.get("since", 0)),
        " at ".join(text(why[what]) for what in ("policy", "quota", "limit") if what in why),
    )


def pages_of(name: bytes) -> Reading[Pages | None]:
    """Return the pages of the block with request id `name`, with their norms.

    Return None if the block is not complete, or if it exceeds one of the limits above. Each command reads at most
    PIECE_BYTES, so that a large block does not delay other clients.
    """
    (index,) = yield [[b"KVPAGEINDEX", name, b"TOTAL"]]
    if not all(total["blocks"] <= _MOST_PARTS and total["bytes"] <= MOST_BYTES for total in parts_of(index)):
        return None
    (index,) = yield [[b"KVPAGEINDEX", name, b"WITHSIZES"]]
    part = next((part for part in parts_of(index) if part["page"] == 0 and part["complete"]), None)
    if part is None or part["pages"] > MOST_PAGES:
        return None
    planes = [int(plane) for plane in part["planes"]]
    stats = yield [[b"KVPAGESTAT", name, 0, 0, 0, plane] for plane in planes]
    if any(refused(stat) or stat is None for stat in stats):
        return None
    received = [named(stat) for stat in stats]
    dtypes, sizes = [DType(stat["dtype"]) for stat in received], [int(stat["bytes"]) for stat in received]
    layers, heads = part["layers"], part["heads"]
    norms = np.full((layers, len(planes), heads), np.nan, np.float32)
    for at, dtype, size in zip(range(len(planes)), dtypes, sizes, strict=True):
        if dtype not in _NUMPY or size > PIECE_BYTES:
            continue
        places, step = [*product(range(layers), range(heads))], max(PIECE_BYTES // size, 1)
        for start in range(0, len(places), step):
            asked: list[bytes | int] = [b"KVPAGEMGET", len(places[start : start + step])]
            for layer, head in places[start : start + step]:
                asked += [name, layer, head, 0, planes[at]]
            (bodies,) = yield [asked]
            if refused(bodies) or any(body is None or len(body) != size for body in bodies):
                return None
            for (layer, head), body in zip(places[start : start + step], bodies, strict=True):
                norms[layer, at, head] = _norm(body, dtype)
    names = tuple(dtype.name.lower() for dtype in dtypes)
    return Pages(name, received[0]["page_size"], tuple(planes), names, tuple(sizes), layers, heads, norms)


_NUMPY = {
    DType.FLOAT16: np.float16,
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
    DType.INT8: np.int8,
    DType.BFLOAT16: np.uint16,
}


def _norm(body: bytes, dtype: DType) -> float:
    """Return the root of the mean square of a page's values; NaN if the page is empty."""
    raw = np.frombuffer(body, _NUMPY[dtype])
    bfloat16 = dtype is DType.BFLOAT16
    values = (raw.astype(np.uint32) << 16).view(np.float32) if bfloat16 else raw.astype(np.float32)
    return float(np.sqrt(np.mean(np.square(values)))) if len(values) else math.nan
