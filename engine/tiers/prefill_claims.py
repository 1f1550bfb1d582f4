"""Claims: one of several prompts computes a prefix that all of them need at the same time, while the others wait.

A claim is on the first missing block of a prompt, by its chain hash. The agents of one engine queue for it. The first
in the queue of each engine requests a lease from the page server, which grants it to one engine only. The holder renews
the lease. If the holder dies, the lease expires, and another engine gets it. A prompt waits until the block is
published, and for at most PATIENCE_SECONDS. If the server does not answer, each engine computes the block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from typing import Literal

from ..chains import chain_hashes
from ..spec import ModelCacheSpec
from .pages import PageTier

State = Literal["mine", "wait", "proceed"]

PATIENCE_SECONDS = 30.0  # longest wait for a prefix that another prompt computes
LEASE_SECONDS = 3.0  # a lease that is not renewed expires after this time
RENEWAL_SECONDS = LEASE_SECONDS / 3
POLL_SECONDS = 0.05  # between two requests to the server
ANSWER_SECONDS = 0.5  # longest wait for the server's first reply; then the first prompt gets the claim


class Claim:
    """A place in a queue, with a state. ``wait``: another prompt computes the block, or the page server has not replied
    yet. ``mine``: the caller computes and publishes it. ``proceed``: the caller loads again, and computes the missing
    rest. A claim must be released in every state.
    """

    def __init__(self, claims: Claims, name: str, state: State) -> None:
        self.name = name  # the chain hash that is claimed; "" when nothing is missing
        self.state = state
        self.since = time.monotonic()
        self._claims = claims
        self._callbacks: list[Callable[[], object]] = []

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the wait is over, on any thread; immediately if it is over already."""
        with self._claims.lock:
            if self.state == "wait":
                self._callbacks.append(callback)
                return
        callback()

    def published(self) -> None:
        """Let the other prompts of this engine proceed, because the block is in memory. Other engines wait until
        `release`."""
        self._claims.published(self)

    def release(self) -> None:
        """End the claim: the block is published, or will not be. It may be called again."""
        self._claims.release(self)

    def settle(self, state: State) -> list[Callable[[], object]]:
        """End the wait, with the lock held. Return the callbacks, which are to be called without the lock."""
        self.state = state
        callbacks, self._callbacks = self._callbacks, []
        return callbacks


class Lease(Enum):
    """The engine that has the lease, by the last reply of the server. UNKNOWN before the first reply."""

    UNKNOWN = auto()
    ELSEWHERE = auto()
    OURS = auto()


class _Queue:
    """Queue of the claims on one block, first in, first out. The first claim is granted when the engine gets the
    lease."""

    def __init__(self, name: str, before: Sequence[str]) -> None:
        """Set the chain hashes of the block, and of the prompt's blocks before it."""
        self.name, self.before = name, before
        self.claims: list[Claim] = []
        self.lease = Lease.UNKNOWN
        self.asking = False  # a request about the block is in progress
        self.due = 0.0  # time.monotonic() from which to request or to renew the lease

    def dismiss(self, claims: Iterable[Claim]) -> list[Callable[[], object]]:
        """Remove claims, and return the callbacks of waiting ones."""
        callbacks = []
        for claim in claims:
            self.claims.remove(claim)
            if claim.state == "wait":
                callbacks += claim.settle("proceed")
        return callbacks

    @property
    def waiting(self) -> list[Claim]:
        return [claim for claim in self.claims if claim.state == "wait"]

    def give(self) -> list[Callable[[], object]]:
        """Give the first prompt its claim, and return its callbacks."""
        return self.claims[0].settle("mine") if self.claims and self.claims[0].state == "wait" else []


class Claims:
    """The claims of an engine's agents. Thread-safe; no method but `close` waits for the server."""

    def __init__(self, spec: ModelCacheSpec, pages: PageTier | None) -> None:
        """Start the thread that requests leases. Without `pages` there are no other engines."""
        self.lock = threading.Condition()  # of the queues and claims; notified when one changes
        self._spec = spec
        self._pages = pages
        self._queues: dict[str, _Queue] = {}  # by the block's chain hash
        self._closed = False
        self._server = ThreadPoolExecutor(1, "kvpage-claim")
        self._clock = threading.Thread(target=self._watch, name="kvpage-claims", daemon=True)
        self._clock.start()

    def begin(self, agent_id: str, tokens: Sequence[int], known: int = 0, *, answers: bool = True) -> Claim:
        """Claim the right to compute the first full block of a prompt beyond its `known` first tokens.

        The claim starts in ``wait``, until the page server has replied. If it does not `answers`, the first prompt in
        this engine's queue has ``mine`` immediately. A block that does not end before the prompt's last token is not
        claimed: the state is ``proceed``. The caller must release the claim in every state.
        """
        size = self._spec.block_tokens
        end = (known // size + 1) * size
        if end >= len(tokens):
            return Claim(self, "", "proceed")
        *before, name = chain_hashes(self._spec.fingerprint, tokens[:end], size, self._spec.chain(agent_id, tokens))
        with self.lock:
            queue = self._queues.setdefault(name, _Queue(name, before))
            alone = not queue.claims and not (self._pages and answers)
            claim = Claim(self, name, "mine" if alone else "wait")
            queue.claims.append(claim)
            self.lock.notify_all()
        return claim

    def published(self, claim: Claim) -> None:
        with self.lock:
            queue = self._queues.get(claim.name)
            callbacks = queue.dismiss(queue.waiting) if queue else []
        _notify(callbacks)

    def release(self, claim: Claim) -> None:
        """Remove a claim, and give it to the next in the queue."""
        callbacks: list[Callable[[], object]] = []
        with self.lock:
            queue = self._queues.get(claim.name)
            if queue and claim in queue.claims:
                callbacks = queue.dismiss([claim])
                if claim.state == "mine":
                    callbacks += queue.give()
                self.lock.notify_all()
        _notify(callbacks)

    def close(self) -> None:
        """Release all claims, and let the waiting prompts proceed."""
        with self.lock:
            self._closed = True
            callbacks = [tell for queue in self._queues.values() for tell in queue.dismiss(list(queue.claims))]
            self.lock.notify_all()
        _notify(callbacks)
        self._clock.join()
        self._server.shutdown()

    def _watch(self) -> None:
        """Request, renew and release leases when that is due, on a thread of its own."""
        while True:
            callbacks: list[Callable[[], object]] = []
            with self.lock:
                for queue in list(self._queues.values()):
                    callbacks += self._look_after(queue, time.monotonic())
                if self._closed and not self._queues:
                    return
                if not callbacks:
                    self.lock.wait(POLL_SECONDS if self._queues else None)
            _notify(callbacks)

    def _look_after(self, queue: _Queue, now: float) -> list[Callable[[], object]]:
        """Start the request that is due for a queue, with the lock held. Return the callbacks of claims that end."""
        callbacks = queue.dismiss([claim for claim in queue.waiting if now - claim.since > PATIENCE_SECONDS])
        if self._pages and not queue.asking:
            if queue.lease is Lease.OURS and not queue.claims:
                self._ask(self._give_back, queue)
            elif queue.lease is Lease.OURS and queue.due <= now:
                self._ask(self._renew, queue)
            elif queue.waiting and queue.due <= now:
                self._ask(self._apply, queue)
        if queue.waiting and queue.lease is Lease.UNKNOWN and now - queue.claims[0].since > ANSWER_SECONDS:
            callbacks += queue.give()
        if not (queue.claims or queue.asking or queue.lease is Lease.OURS):
            del self._queues[queue.name]
        return callbacks

    def _ask(self, question: Callable[[PageTier, _Queue], list[Callable[[], object]]], queue: _Queue) -> None:
        """Send a request about a queue's lease, on the executor's thread."""
        pages = self._pages
        assert pages

        def ask() -> None:
            callbacks: list[Callable[[], object]] = []
            try:
                callbacks = question(pages, queue)
            finally:
                with self.lock:
                    queue.asking = False
                    if queue.lease is Lease.UNKNOWN:  # the server did not answer
                        queue.lease = Lease.ELSEWHERE
                    self.lock.notify_all()
            _notify(callbacks)

        queue.asking = True
        self._server.submit(ask)

    def _apply(self, pages: PageTier, queue: _Queue) -> list[Callable[[], object]]:
        granted = pages.claim(queue.name, LEASE_SECONDS)
        # This lookup follows the claim, because another engine may have published just before the lease was granted.
        published = pages.sealed([queue.name], queue.before) > 0
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


def _notify(callbacks: Iterable[Callable[[], object]]) -> None:
    for callback in callbacks:
        callback()
