"""Who computes a prefix that several want at once: one does, the others wait for it, and nobody for ever.

A claim is on the first block of a prompt that is not to be had, by its chain hash. Agents of one engine line up for it;
of several engines the first in each queue asks the page server for a lease, which only one of them gets. It is renewed
for as long as its holder is alive, and runs out soon after, so another takes the claim over. Whoever waits does so
until the block is published, and for PATIENCE_SECONDS at most. Without an answer of the server every engine is on its
own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from typing import Literal

from engine.memory.prefix import chain_hashes, root_of
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier

State = Literal["mine", "wait", "proceed"]

PATIENCE_SECONDS = 30.0  # to wait for another's prefix
LEASE_SECONDS = 3.0  # after them, a holder that is not heard of any more has lost its claim
RENEWAL_SECONDS = LEASE_SECONDS / 3
POLL_SECONDS = 0.05  # between two questions whether another engine is done
ANSWER_SECONDS = 0.5  # within them the server must answer the first question


class Claim:
    """A place in a queue. ``wait``: somebody else computes it; ``mine``: compute it, and publish; ``proceed``: load
    once more, it may be there now, and compute what isn't. To be released in any state."""

    def __init__(self, claims: Claims, name: str, state: State) -> None:
        self.name = name  # the chain hash that is claimed; "" when nothing is missing
        self.state = state
        self.since = time.monotonic()
        self._claims = claims
        self._callbacks: list[Callable[[], object]] = []

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call it when the waiting is over, on whichever thread that is; at once if it is over already."""
        with self._claims.lock:
            if self.state == "wait":
                self._callbacks.append(callback)
                return
        callback()

    def published(self) -> None:
        """The block is there for the agents of this engine. For others' engines the claim stands until `release`."""
        self._claims.published(self)

    def release(self) -> None:
        """The claim is void: the block is published, or will not be. May be called again."""
        self._claims.release(self)

    def settle(self, state: State) -> list[Callable[[], object]]:
        """With the lock held: the waiting is over; whom to tell, without it."""
        self.state = state
        told, self._callbacks = self._callbacks, []
        return told


class Lease(Enum):
    """Which engine computes a block, as the server said last. UNKNOWN before its first answer."""

    UNKNOWN = auto()
    ELSEWHERE = auto()
    OURS = auto()


class _Queue:
    """Who wants one block. The first asks the server, and has the claim when that says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.claims: list[Claim] = []
        self.lease = Lease.UNKNOWN
        self.asking = False  # the server is being asked
        self.due = 0.0  # when to ask or to renew

    def dismiss(self, claims: Iterable[Claim]) -> list[Callable[[], object]]:
        """They leave the line; whom to tell that they wait no longer."""
        told = []
        for claim in claims:
            self.claims.remove(claim)
            if claim.state == "wait":
                told += claim.settle("proceed")
        return told

    @property
    def waiting(self) -> list[Claim]:
        return [claim for claim in self.claims if claim.state == "wait"]

    def give(self) -> list[Callable[[], object]]:
        """The first in the queue has the claim; whom to tell."""
        return self.claims[0].settle("mine") if self.claims and self.claims[0].state == "wait" else []


class Claims:
    """The claims of an engine's agents. Thread-safe; nothing here waits for the server."""

    def __init__(self, spec: ModelCacheSpec, pages: PageTier | None) -> None:
        """Without `pages` the engine is the only one."""
        self.lock = threading.Condition()
        self._spec = spec
        self._pages = pages
        self._queues: dict[str, _Queue] = {}
        self._closed = False
        self._server = ThreadPoolExecutor(1, "kvpage-claim")
        self._clock = threading.Thread(target=self._watch, name="kvpage-claims", daemon=True)
        self._clock.start()

    def begin(self, agent_id: str, tokens: Sequence[int], known: int = 0) -> Claim:
        """Claim the first full block of a prompt that is not among its `known` first tokens.

        There is nothing to claim, and the state is ``proceed``, when all are; a token of the prompt is never known.
        """
        size = self._spec.block_tokens
        end = (known // size + 1) * size
        if end >= len(tokens):
            return Claim(self, "", "proceed")
        name = chain_hashes(self._spec.fingerprint, tokens[:end], size, root_of(agent_id))[-1]
        with self.lock:
            queue = self._queues.setdefault(name, _Queue(name))
            alone = not queue.claims and self._pages is None
            claim = Claim(self, name, "mine" if alone else "wait")
            queue.claims.append(claim)
            self.lock.notify_all()
        return claim

    def published(self, claim: Claim) -> None:
        """Those who wait for it proceed."""
        with self.lock:
            queue = self._queues.get(claim.name)
            told = queue.dismiss(queue.waiting) if queue else []
        _tell(told)

    def release(self, claim: Claim) -> None:
        """The next in the queue has what it had."""
        told: list[Callable[[], object]] = []
        with self.lock:
            queue = self._queues.get(claim.name)
            if queue and claim in queue.claims:
                told = queue.dismiss([claim])
                if claim.state == "mine":
                    told += queue.give()
                self.lock.notify_all()
        _tell(told)

    def close(self) -> None:
        """Give up all claims; whoever waits proceeds."""
        with self.lock:
            self._closed = True
            told = [tell for queue in self._queues.values() for tell in queue.dismiss(list(queue.claims))]
            self.lock.notify_all()
        _tell(told)
        self._clock.join()
        self._server.shutdown()

    def _watch(self) -> None:
        """On a thread of its own: do what is due."""
        while True:
            told: list[Callable[[], object]] = []
            with self.lock:
                for queue in list(self._queues.values()):
                    told += self._look_after(queue, time.monotonic())
                if self._closed and not self._queues:
                    return
                if not told:
                    self.lock.wait(POLL_SECONDS if self._queues else None)
            _tell(told)

    def _look_after(self, queue: _Queue, now: float) -> list[Callable[[], object]]:
        told = queue.dismiss([claim for claim in queue.waiting if now - claim.since > PATIENCE_SECONDS])
        if self._pages and not queue.asking:
            if queue.lease is Lease.OURS and not queue.claims:
                self._ask(self._give_back, queue)
            elif queue.lease is Lease.OURS and queue.due <= now:
                self._ask(self._renew, queue)
            elif queue.waiting and queue.due <= now:
                self._ask(self._apply, queue)
        if queue.waiting and queue.lease is Lease.UNKNOWN and now - queue.claims[0].since > ANSWER_SECONDS:
            told += queue.give()
        if not (queue.claims or queue.asking or queue.lease is Lease.OURS):
            del self._queues[queue.name]
        return told

    def _ask(self, question: Callable[[PageTier, _Queue], list[Callable[[], object]]], queue: _Queue) -> None:
        """Have the server asked, on the other thread."""
        pages = self._pages
        assert pages

        def ask() -> None:
            told: list[Callable[[], object]] = []
            try:
                told = question(pages, queue)
            finally:
                with self.lock:
                    queue.asking = False
                    if queue.lease is Lease.UNKNOWN:  # it was asked in vain
                        queue.lease = Lease.ELSEWHERE
                    self.lock.notify_all()
            _tell(told)

        queue.asking = True
        self._server.submit(ask)

    def _apply(self, pages: PageTier, queue: _Queue) -> list[Callable[[], object]]:
        granted = pages.claim(queue.name, LEASE_SECONDS)
        published = pages.sealed([queue.name]) > 0  # asked last: it may have been just before the claim was granted
        with self.lock:
            queue.lease = Lease.OURS if granted else Lease.ELSEWHERE
            queue.due = time.monotonic() + (RENEWAL_SECONDS if granted else POLL_SECONDS)
            if published:
                return queue.dismiss(queue.waiting)
            return queue.give() if granted else []

    def _renew(self, pages: PageTier, queue: _Queue) -> list[Callable[[], object]]:
        pages.renew(queue.name, LEASE_SECONDS)
        with self.lock:
            queue.due = time.monotonic() + RENEWAL_SECONDS
        return []

    def _give_back(self, pages: PageTier, queue: _Queue) -> list[Callable[[], object]]:
        with self.lock:
            queue.lease = Lease.ELSEWHERE
        pages.release(queue.name)
        return []


def _tell(callbacks: Iterable[Callable[[], object]]) -> None:
    for callback in callbacks:
        callback()
