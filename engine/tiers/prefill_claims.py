"""Claims: one of several prompts computes a prefix that all of them need at the same time, while the others wait.

A claim is on the first missing block of a prompt, by its chain hash. The agents of one engine queue for it. For the
first in the queue of each engine, `Claims` requests a lease from the page server, which grants it to one engine only.
The holder renews the lease. If the holder dies, the lease expires, and another engine gets it. A prompt waits until the
block is published, and for at most PATIENCE_SECONDS. If the server does not answer, each engine computes the block.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Literal

from ..chains import chain_hashes
from ..event_loop import EventLoop
from ..spec import ModelCacheSpec
from .pages import PageTier

State = Literal["mine", "wait", "proceed"]

PATIENCE_SECONDS = 30.0  # longest wait for a prefix that another prompt computes
LEASE_SECONDS = 3.0  # a lease that is not renewed expires after this time
RENEWAL_SECONDS = LEASE_SECONDS / 3
POLL_SECONDS = 0.05  # between two requests to the server
ANSWER_SECONDS = 0.5  # longest wait for the server's first reply; then the first prompt gets the claim


class Claim:
    """A prompt's place in the queue for a block, with a state: ``wait`` while another prompt computes the block, or the
    page server has not replied; ``mine`` if the caller has to compute and publish it; ``proceed`` if nothing keeps
    the prompt waiting: a caller that waited should load again. The caller must release a claim, whatever its state is.
    """

    def __init__(self, claims: Claims, name: str, state: State) -> None:
        self.name = name  # the chain hash of the claimed block; "" if no block is missing
        self.state = state
        self.decided: Future[None] = Future()  # done once the state is not ``wait``
        self._claims = claims
        if state != "wait":
            self.decided.set_result(None)

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the wait is over, on any thread; immediately if it is over already. It must not wait."""
        self.decided.add_done_callback(lambda _: callback())

    def published(self) -> None:
        """Let the other prompts of this engine proceed, because the block is in memory. Other engines wait until
        `release`."""
        self._claims.published(self)

    def release(self) -> None:
        """End the claim, whether the block was published or not. Further calls have no effect."""
        self._claims.release(self)


class _Queue:
    """Queue of the claims on one block, first in, first out. The first claim is granted when the engine gets the
    lease."""

    def __init__(self, name: str, before: Sequence[str]) -> None:
        """Set the chain hashes of the block, and of the prompt's blocks before it."""
        self.name, self.before = name, before
        self.claims: list[Claim] = []
        self.is_published = False  # whether the block is in memory, though its holder may still write it
        self.emptied = asyncio.Event()  # set when the last claim was removed

    @property
    def waiting(self) -> list[Claim]:
        return [claim for claim in self.claims if claim.state == "wait"]

    def remove(self, claims: Iterable[Claim]) -> list[Claim]:
        """Remove claims. Return the waiting ones, which proceed."""
        removed = list(claims)
        self.claims = [claim for claim in self.claims if claim not in removed]
        waited = [claim for claim in removed if claim.state == "wait"]
        for claim in waited:
            claim.state = "proceed"
        return waited

    def grant(self) -> list[Claim]:
        """Grant the first claim. Return it if it waited."""
        waited = [claim for claim in self.claims[:1] if claim.state == "wait"]
        for claim in waited:
            claim.state = "mine"
        return waited


class Claims:
    """The claims of an engine's agents. Thread-safe; no method but `close` waits for the server.

    Each queue has a coroutine, `_serve`, which requests, renews and ends its lease. Each claim that waits has one,
    `_limit_wait`, which ends the wait after PATIENCE_SECONDS.
    """

    def __init__(self, spec: ModelCacheSpec, pages: PageTier | None, loop: EventLoop) -> None:
        """Start without claims. Without `pages` there are no other engines."""
        self._spec = spec
        self._pages = pages
        self._loop = loop
        self._lock = threading.Lock()  # of the queues, and of the states of claims
        self._queues: dict[str, _Queue] = {}  # by the block's chain hash
        self._serving: set[Future[None]] = set()  # the coroutines of the queues

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
        with self._lock:
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = _Queue(name, before)
                served = self._loop.start(self._serve(queue))
                self._serving.add(served)
                served.add_done_callback(self._serving.discard)
            alone = not queue.claims and not (self._pages and answers)
            claim = Claim(self, name, "mine" if alone else "wait")
            queue.claims.append(claim)
            if queue.is_published:  # after the load that missed the block
                self._loop.call(claim.published)
        if claim.state == "wait":
            self._loop.start(self._limit_wait(claim))
        return claim

    def published(self, claim: Claim) -> None:
        with self._lock:
            queue = self._queues.get(claim.name)
            waited = self._remove(queue, queue.waiting) if queue else []
            if queue:
                queue.is_published = True
        _notify(waited)

    def release(self, claim: Claim) -> None:
        """Remove a claim, and grant the next one in its queue."""
        with self._lock:
            queue = self._queues.get(claim.name)
            if not queue or claim not in queue.claims:
                return
            decided = self._remove(queue, [claim])
            if claim.state == "mine":
                decided += queue.grant()
        _notify(decided)

    def close(self) -> None:
        """Release all claims, and let the waiting prompts proceed. Wait until the leases are given back."""
        with self._lock:
            waited = [claim for queue in self._queues.values() for claim in self._remove(queue, queue.claims)]
        _notify(waited)
        wait(list(self._serving))

    def _remove(self, queue: _Queue, claims: Iterable[Claim]) -> list[Claim]:
        """Remove claims, with the lock held. Return the waiting ones, which proceed."""
        waited = queue.remove(claims)
        if not queue.claims:
            self._loop.call(queue.emptied.set)
        return waited

    # -- on the loop's thread --------------------------------------------------------------------------------------

    async def _limit_wait(self, claim: Claim) -> None:
        """Let a claim proceed after PATIENCE_SECONDS, unless it is decided before."""
        await asyncio.wait([asyncio.wrap_future(claim.decided)], timeout=PATIENCE_SECONDS)
        with self._lock:
            queue = self._queues.get(claim.name)
            waited = self._remove(queue, [claim]) if queue and claim.state == "wait" else []
        _notify(waited)

    async def _serve(self, queue: _Queue) -> None:
        """Request the lease on a block while prompts wait for it, and hold it while they claim the block.

        Before the server's first reply, the first prompt waits no longer than ANSWER_SECONDS.
        """
        answered = False
        while self._is_claimed(queue):
            if not self._pages or not queue.waiting:
                await _occurs(queue.emptied, POLL_SECONDS)
                continue
            request = asyncio.create_task(self._request(self._pages, queue))
            if not answered and not (await asyncio.wait([request], timeout=ANSWER_SECONDS))[0]:
                self._grant(queue)
            answered = True
            if await request:
                await self._hold(self._pages, queue)
            else:
                await _occurs(queue.emptied, POLL_SECONDS)

    def _is_claimed(self, queue: _Queue) -> bool:
        """Return whether a queue has claims. Without one, remove the queue."""
        queue.emptied.clear()
        with self._lock:
            if not queue.claims:
                del self._queues[queue.name]
            return bool(queue.claims)

    async def _request(self, pages: PageTier, queue: _Queue) -> bool:
        """Request the lease. If the block is stored, let all prompts proceed. Return whether the lease was granted."""
        granted = await pages.claim(queue.name, LEASE_SECONDS)
        # This lookup follows the claim, because another engine may have published just before the lease was granted.
        if await pages.sealed([queue.name], queue.before) > 0:
            with self._lock:
                waited = self._remove(queue, queue.waiting)
            _notify(waited)
        return granted

    async def _hold(self, pages: PageTier, queue: _Queue) -> None:
        """Grant the first claim, renew the lease while there are claims, then give it back."""
        while queue.claims:
            queue.emptied.clear()
            self._grant(queue)
            if queue.claims and not await _occurs(queue.emptied, RENEWAL_SECONDS):
                await pages.renew(queue.name, LEASE_SECONDS)
        await pages.release(queue.name)

    def _grant(self, queue: _Queue) -> None:
        with self._lock:
            waited = queue.grant()
        _notify(waited)


async def _occurs(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most `seconds` seconds. Return whether it has occurred."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def _notify(claims: Iterable[Claim]) -> None:
    for claim in claims:
        claim.decided.set_result(None)
