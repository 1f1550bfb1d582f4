"""One agent's context as a row of blocks, and one block as its pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpage_server.observe.asking import Command, Reading, named, parts_of, refused, text
from kvpage_server.observe.whose import Agent, ContextBlock, Holdings
from kvpage_server.page import DType

MOST_BLOCKS = 2000
MOST_BYTES = 64 << 20  # a larger block's norms are not computed


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block of a context is stored, or why it is missing."""

    block: ContextBlock
    agents: tuple[str, ...]  # all agents that have it
    tier: str  # memory or disk; empty if it is missing
    pinned: bool | None  # None if the store tells nothing of leases and pins
    lease: int | None  # milliseconds left
    why: str  # why it is missing; empty if it is there
    why_at: int  # when it was removed, in unix milliseconds; 0 if unknown
    by: str  # the policy or quota that removed it


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a block, as arrays of [layers, planes, heads]."""

    name: bytes
    tokens: int  # rows of a page
    planes: tuple[int, ...]  # kv_type of each: 0 K, 1 V ...
    dtypes: tuple[str, ...]  # of each plane
    sizes: tuple[int, ...]  # bytes of a page of each plane
    layers: int
    heads: int
    norms: np.ndarray[Any, np.dtype[np.float32]] | None  # root of the mean square; NaN for planes that are not numbers


def context_of(agent: Agent, holdings: Holdings) -> Reading[list[BlockPlace]]:
    """Where the blocks of an agent's context are stored, in order, for the first MOST_BLOCKS of them."""
    blocks = agent.blocks[:MOST_BLOCKS]
    reasons = yield [[b"KVPAGEWHY", block.name] for block in blocks]
    indexes = yield [[b"KVPAGEINDEX", block.name] for block in blocks]
    stats = yield [_stat(block.name, index) for block, index in zip(blocks, indexes, strict=True)]
    return [
        _place(block, holdings.owners.get(block.name, ()), reason, stat)
        for block, reason, stat in zip(blocks, reasons, stats, strict=True)
    ]


def _stat(name: bytes, index: Any) -> Command:
    """Asks about the block's first page."""
    first: dict[str, Any] = next(iter(parts_of(index)), {"page": 0, "planes": [0]})
    return [b"KVPAGESTAT", name, 0, 0, first["page"], int(first["planes"][0])]


def _place(block: ContextBlock, agents: tuple[str, ...], reason: Any, stat: Any) -> BlockPlace:
    why = {} if refused(reason) else named(reason)
    told = {} if refused(stat) or stat is None else named(stat)
    pinned = told.get("pinned", 0)
    there = block.complete or why.get("reason") == b"stored"
    return BlockPlace(
        block,
        agents,
        text(told["tier"]) if told else "",
        None if pinned is None else bool(pinned),
        told.get("lease_left_ms", 0),
        "" if there else text(why.get("cause") or why.get("reason", b"")),
        int(why.get("at", 0)),
        text(why.get("policy") or why.get("quota") or b""),
    )


def pages_of(name: bytes) -> Reading[Pages | None]:
    """A block's pages with their norms; None if the block is not complete, or too large."""
    (index,) = yield [[b"KVPAGEINDEX", name, b"WITHSIZES"]]
    part = next((part for part in parts_of(index) if part["page"] == 0 and part["complete"]), None)
    if part is None or part["bytes"] > MOST_BYTES:
        return None
    planes = [int(plane) for plane in part["planes"]]
    stats = yield [[b"KVPAGESTAT", name, 0, 0, 0, plane] for plane in planes]
    (body,) = yield [[b"KVBLOCKGET", name, 0]]
    if not isinstance(body, bytes) or any(refused(stat) or stat is None for stat in stats):
        return None
    told = [named(stat) for stat in stats]
    dtypes = [DType(stat["dtype"]) for stat in told]
    layers, heads = part["layers"], part["heads"]
    sizes = tuple(stat["bytes"] for stat in told)
    return Pages(
        name,
        told[0]["page_size"],
        tuple(planes),
        tuple(dtype.name.lower() for dtype in dtypes),
        sizes,
        layers,
        heads,
        _norms(body, dtypes, sizes, layers, heads),
    )


_NUMPY = {DType.FLOAT16: np.float16, DType.FLOAT32: np.float32, DType.FLOAT64: np.float64, DType.INT8: np.int8}


def _norms(
    body: bytes, dtypes: list[DType], sizes: tuple[int, ...], layers: int, heads: int
) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """The root of the mean square of each page's values. The order of `body` is layer, plane, head."""
    if len(body) != layers * heads * sum(sizes):
        return None
    rows = np.frombuffer(body, np.uint8).reshape(layers, -1)
    found = np.full((layers, len(sizes), heads), np.nan, np.float32)
    start = 0
    for i, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True)):
        raw = np.ascontiguousarray(rows[:, start : start + size * heads])
        start += size * heads
        if dtype is DType.BFLOAT16:
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif dtype in _NUMPY:
            values = raw.view(_NUMPY[dtype]).astype(np.float32)
        else:
            continue
        found[:, i] = np.sqrt(np.mean(np.square(values.reshape(layers, heads, -1)), axis=2))
    return found
