"""Engines: the real page tier and the agents' real store, on threads of the world, with a model that is no model.

The result for a token is a hash of the result for the one before, as it is stored in the given block. So a wrong, stale
or foreign byte in a block changes the text, and the expected text is known without any server.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.caches import FullLayer
from engine.chains import common_prefix
from engine.memory.blocks import AgentBlocks, KVBlock
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier
from engine.tiers.store import AgentCacheStore, CacheConfig, StoreUnavailableError
from kvpage_server.page import DType, Plane
from tests.simulation.world import threads

logging.getLogger("engine").addHandler(logging.NullHandler())  # outages are ordinary here

BLOCK = 4  # tokens
_HEADS, _DIM = 2, 16
_PLANES = (Plane(0, DType.UINT8, _DIM), Plane(1, DType.UINT8, _DIM))
SPEC = ModelCacheSpec(
    model_id="hash",
    block_tokens=BLOCK,
    layers=(FullLayer((_HEADS, _HEADS), _PLANES),),
    nesting=(None,),
    vocab_size=1 << 16,
    context=None,
    fingerprint=4711,
    batches=True,
)
_LONGEST = 36  # tokens of a context, before an agent begins anew
WITHIN = 10.0  # seconds of a load
_SLACK = 2.0
_CLOSE = "close"
_DAMAGED = 0.5  # how often a file is, of an engine that died

Rows = list[bytes]  # a token each: 64 bytes


def computed(tokens: Sequence[int], rows: Rows) -> Rows:
    """Return the model's rows of tokens, of which the first rows are known already."""
    rows = list(rows)
    for token in tokens[len(rows) :]:
        rows.append(blake2b(b"%b %d" % (rows[-1] if rows else b"", token)).digest())
    return rows


def text_of(rows: Rows) -> tuple[int, ...]:
    """Return the answer: some tokens that depend on every byte."""
    return tuple(blake2b(b"".join(rows), digest_size=3).digest())


def blocks_of(agent: str, tokens: Sequence[int], rows: Rows, pool: BlockPool) -> AgentBlocks:
    """A context as an engine keeps it."""
    ids = pool.allocate(SPEC.blocks_for(len(tokens)), agent)
    blocks = []
    for number, start in zip(ids, range(0, len(tokens), BLOCK), strict=True):
        some = rows[start : start + BLOCK]
        values = np.frombuffer(b"".join(some), np.uint8).reshape(len(some), len(_PLANES), _HEADS, _DIM)
        planes = tuple(mx.array(np.ascontiguousarray(values[:, i].swapaxes(0, 1))) for i in range(len(_PLANES)))
        mx.eval(planes)
        blocks.append(KVBlock(number, len(some), (planes,)))
    pool.settle({block.block_id: block.nbytes for block in blocks})
    return AgentBlocks(agent, tuple(tokens), tuple(blocks), SPEC.fingerprint)


def rows_in(context: AgentBlocks) -> Rows:
    """Return the rows in a context's blocks."""
    rows = []
    for block in context.blocks:
        planes = np.stack([np.asarray(plane) for plane in block.layers[0]])  # plane, head, token, dim
        rows += [planes[:, :, at].tobytes() for at in range(block.tokens)]
    return rows


def _damage(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


class Engine:
    """One engine and its users, who keep their histories. `wrong` receives errors, `report` receives output."""

    def __init__(
        self, number: int, socket: Path, wrong: Callable[[str], None], report: Callable[[str], None], files: Path | None
    ) -> None:
        self.number = number
        self.busy = False
        self.over = False
        self._url = f"unix://{socket}"
        self._wrong = wrong
        self._report = report
        self._files = files
        self._histories: dict[str, tuple[int, ...]] = {}  # by agent
        self._lives = 0
        self._owner = ""
        self.begin()

    def begin(self) -> None:
        """It starts, for the first time or after its death."""
        self._lives += 1
        self._owner = f"engine {self.number}.{self._lives}"
        self._orders: Any = queue.SimpleQueue()
        self._tier: PageTier | None = None
        self.busy = False
        with threads.turns.of(self._owner):
            threading.Thread(target=self._live, name=self._owner).start()

    def order(self, what: str, *args: Any) -> None:
        """Queue an operation after all earlier ones."""
        self._orders.put((what, *args))

    def close(self) -> None:
        """Have it end in order."""
        self.order(_CLOSE)

    def die(self, chance: random.Random) -> None:
        """It is killed: the system closes its connections. Another one takes its place, and finds its files.

        Sometimes a bit of one has flipped by then.
        """
        threads.turns.kill(self._owner)
        files = sorted(self._files.glob("[!.]*")) if self._files else []
        if files and chance.random() < _DAMAGED:
            _damage(chance.choice(files), chance)
        if self._tier is not None:
            pool: Any = self._tier._connection.server._pool
            for connection in [*pool._available_connections, *pool._in_use_connections]:
                connection.disconnect()
            for task in asyncio.all_tasks(self._tier._connection.loop._loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # a killed process does not log
        self.begin()

    # -- on its thread ---------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._pool = BlockPool(256)
            self._tier = tier = PageTier(self._url, SPEC, self._pool, restore_within=WITHIN)
            self._store = None
            if self._files:
                config = CacheConfig(max_hot_agents=1, prefix_bytes=512, restore_within=WITHIN)
                cold = SafetensorsCacheAdapter(SPEC, self._pool, self._files)
                self._store = AgentCacheStore(SPEC, self._pool, pages=tier, cold=cold, config=config)
            while (order := self._orders.get())[0] != _CLOSE:
                self.busy = True
                getattr(self, f"_do_{order[0]}")(*order[1:])
                self.busy = False
            (self._store or tier).close()
            self._pool.check_empty()
            self.over = True
        except Exception:  # noqa: BLE001 - whatever it is, it is not to be
            self._wrong(f"{self._owner}: {traceback.format_exc()}")

    def _load(self, agent: str, tokens: tuple[int, ...] | None) -> Rows:
        """Return the stored rows of a prompt's beginning, or of the agent's whole context without a prompt."""
        assert self._tier is not None
        began = time.monotonic()
        found = self._store.load(agent, tokens) if self._store else self._tier.load(agent, tokens)
        took = time.monotonic() - began
        if took > WITHIN + _SLACK:
            self._wrong(f"{self._owner}: a load of {agent} took {took:.1f} s")
        known = found if found is None or isinstance(found, AgentBlocks) else found.blocks
        if known is None:
            return []
        rows = rows_in(known)
        if tokens is None:
            if rows != computed(known.tokens, []):
                self._wrong(f"{self._owner}: what was loaded of {agent} was never computed: {known.tokens}")
        else:
            rows = rows[: common_prefix(known.tokens, tokens)]
        self._pool.free(known.block_ids, agent)
        return rows

    def _do_turn(self, agent: str, prompt: tuple[int, ...]) -> None:
        """Somebody says something, and is answered."""
        before = self._histories.get(agent, ())
        tokens = (before if len(before) < _LONGEST else ()) + prompt
        known = self._load(agent, tokens)
        rows = computed(tokens, known)
        text, right = text_of(rows), text_of(computed(tokens, []))
        self._report(f"{agent} {len(known)} {text}")
        if text != right:
            self._wrong(f"{self._owner}: {agent} was answered {text} with {len(known)} tokens loaded, right is {right}")
        tokens += text
        self._histories[agent] = tokens
        context = blocks_of(agent, tokens, computed(tokens, rows), self._pool)
        if self._store:
            self._store.save(context)
        else:
            assert self._tier is not None
            self._tier.save(context)
        self._pool.free(context.block_ids, agent)

    def _do_recall(self, agent: str) -> None:
        self._report(f"{agent} {len(self._load(agent, None))}")

    def _do_fork(self, agent: str, new: str) -> None:
        try:
            forked = (self._store or self._tier).fork(agent, new)  # type: ignore[union-attr]
        except StoreUnavailableError:  # the server died, or its disk fails
            forked = False
        if forked:
            self._histories[new] = self._histories.get(agent, ())

    def _do_delete(self, agent: str) -> None:
        with suppress(StoreUnavailableError):  # the server died, or its disk fails
            (self._store or self._tier).delete(agent)  # type: ignore[union-attr]
        self._histories.pop(agent, None)
