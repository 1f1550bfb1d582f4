"""Who computes a prefix that several want at once: one does, the others wait for it, and nobody for ever.

A claim is on the first block of a prompt that is not to be had, by its chain hash. Agents of one engine line up for it;
of several engines the first in each line asks the page server for a lease, which only one of them gets. It is renewed
for as long as its holder is alive, and runs out soon after, so another takes the claim over. Whoever waits does so
until the block is published, and for PATIENCE at most. Without an answer of the server every engine is on its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from engine.memory.prefix import chain_hashes, root_of
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier

State = Literal["mine", "wait", "proceed"]

PATIENCE = 30.0  # seconds to wait for another's prefix
LEASE = 3.0  # seconds after which a holder that is not heard of any more has lost its claim
RENEWAL = LEASE / 3
POLL = 0.05  # seconds between two questions whether another engine is done
ANSWER = 0.5  # seconds within which the server must answer the first question


class Claim:
    """A place in a line. ``wait``: somebody else computes it; ``mine``: compute it, and publish; ``proceed``: load once
    more, it may be there now, and compute what isn't. To be released in any state."""

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


class _Line:
    """Who wants one block. The first asks the server, and has the claim when that says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.claims: list[Claim] = []
        self.leased = False  # by the server, to this engine
        self.asking = False  # the server is being asked
        self.answered = False
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
        """The first in line has the claim; whom to tell."""
        return self.claims[0].settle("mine") if self.claims and self.claims[0].state == "wait" else []


class Claims:
    """The claims of an engine's agents. Thread-safe; nothing here waits for the server."""

    def __init__(self, spec: ModelCacheSpec, pages: PageTier | None) -> None:
        """Without `pages` the engine is the only one."""
        self.lock = threading.Condition()
        self._spec = spec
        self._pages = pages
        self._lines: dict[str, _Line] = {}
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
            line = self._lines.setdefault(name, _Line(name))
            alone = not line.claims and self._pages is None
            claim = Claim(self, name, "mine" if alone else "wait")
            line.claims.append(claim)
            self.lock.notify_all()
        return claim

    def published(self, claim: Claim) -> None:
        """Those who wait for it proceed."""
        with self.lock:
            line = self._lines.get(claim.name)
            told = line.dismiss(line.waiting) if line else []
        _tell(told)

    def release(self, claim: Claim) -> None:
        """The next in line has what it had."""
        told: list[Callable[[], object]] = []
        with self.lock:
            line = self._lines.get(claim.name)
            if line and claim in line.claims:
                told = line.dismiss([claim])
                if claim.state == "mine":
                    told += line.give()
                self.lock.notify_all()
        _tell(told)

    def close(self) -> None:
        """Give up all claims; whoever waits proceeds."""
        with self.lock:
            self._closed = True
            told = [tell for line in self._lines.values() for tell in line.dismiss(list(line.claims))]
            self.lock.notify_all()
        _tell(told)
        self._clock.join()
        self._server.shutdown()

    def _watch(self) -> None:
        """On a thread of its own: do what is due."""
        while True:
            told: list[Callable[[], object]] = []
            with self.lock:
                for line in list(self._lines.values()):
                    told += self._look_after(line, time.monotonic())
                if self._closed and not self._lines:
                    return
                if not told:
                    self.lock.wait(POLL if self._lines else None)
            _tell(told)

    def _look_after(self, line: _Line, now: float) -> list[Callable[[], object]]:
        told = line.dismiss([claim for claim in line.waiting if now - claim.since > PATIENCE])
        if self._pages and not line.asking:
            if line.leased and not line.claims:
                self._ask(self._give_back, line)
            elif line.leased and line.due <= now:
                self._ask(self._renew, line)
            elif line.waiting and line.due <= now:
                self._ask(self._apply, line)
        if line.waiting and not line.answered and now - line.claims[0].since > ANSWER:
            told += line.give()
        if not (line.claims or line.asking or line.leased):
            del self._lines[line.name]
        return told

    def _ask(self, question: Callable[[PageTier, _Line], list[Callable[[], object]]], line: _Line) -> None:
        """Have the server asked, on the other thread."""
        pages = self._pages
        assert pages

        def ask() -> None:
            told: list[Callable[[], object]] = []
            try:
                told = question(pages, line)
            finally:
                with self.lock:
                    line.asking, line.answered = False, True
                    self.lock.notify_all()
            _tell(told)

        line.asking = True
        self._server.submit(ask)

    def _apply(self, pages: PageTier, line: _Line) -> list[Callable[[], object]]:
        granted = pages.claim(line.name, LEASE)
        published = pages.sealed([line.name]) > 0  # asked last: it may have been just before the claim was granted
        with self.lock:
            line.leased = granted
            line.due = time.monotonic() + (RENEWAL if granted else POLL)
            if published:
                return line.dismiss(line.waiting)
            return line.give() if granted else []

    def _renew(self, pages: PageTier, line: _Line) -> list[Callable[[], object]]:
        pages.renew(line.name, LEASE)
        with self.lock:
            line.due = time.monotonic() + RENEWAL
        return []

    def _give_back(self, pages: PageTier, line: _Line) -> list[Callable[[], object]]:
        with self.lock:
            line.leased = False
        pages.release(line.name)
        return []


def _tell(callbacks: Iterable[Callable[[], object]]) -> None:
    for callback in callbacks:
        callback()
