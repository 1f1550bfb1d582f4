"""State for the engine's web page: running prompts, recent answers with the sources of their tokens, and agents.

The engine is queried once a second while a page is open, for all pages together, and no page waits for it: during a
long step the pages show the last state.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic_core import to_json

from ..agent_engine import AgentEngine, Answer, JobProgress
from ..startup import Engine
from ..tiers.store import AgentInfo
from .auth import Tenant, tenant_of
from .worker import EngineThread

LATELY = 500  # most recent answers that are kept for each tenant
EVERY_SECONDS = 1.0
AGENTS_SECONDS = 3.0  # least time between two queries of the agents
AGENTS_SHARE = 0.05  # largest share of the time for these queries, which read from the page server and files
MOST_AGENTS = 1000  # in the list, the largest
MOST_WATCHERS = 64  # open streams of events; a tenant below its share may exceed it


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, as the page shows it."""

    number: int  # within its tenant, because a tenant must not see the number of other requests
    at: float  # unix seconds
    agent: str | None  # its tenant's name for the agent; None without a name
    label: str  # the first words of a prompt without a name, or a hash
    prompt: int  # tokens
    reused: int
    tier: str
    why: str | None
    restore_seconds: float
    waited_seconds: float
    first_seconds: float
    generated: int  # tokens of the answer


@dataclass(slots=True)
class Totals:
    """Numbers of answers and of their tokens, since the start."""

    answers: int = 0
    prompt: int = 0
    generated: int = 0
    reused: Counter[str] = field(default_factory=Counter)  # by tier

    def shown(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "prompt": self.prompt,
            "generated": self.generated,
            "reused": dict(self.reused),
        }


@dataclass(slots=True)
class _Tenancy:
    """History of answers of one tenant."""

    totals: Totals = field(default_factory=Totals)
    answers: deque[Answered] = field(default_factory=lambda: deque(maxlen=LATELY))


class Watching:
    """State for the web page of one engine, for all open pages."""

    def __init__(self, worker: EngineThread) -> None:
        self.watchers: Counter[str] = Counter()  # open pages, by tenant
        self._worker = worker
        self._tenants: dict[str, _Tenancy] = {}
        self._running: list[JobProgress] = []
        self._agents: list[AgentInfo] = []
        self._again = 0.0  # time.monotonic() from which the agents are queried again
        self._asking: dict[str, asyncio.Task[None]] = {}

    def answered(self, answer: Answer, *, kept: bool, label: str) -> None:
        """Add an answer to its tenant's history, with its agent's name if it is `kept`, or else with `label`."""
        tenant = Tenant(tenant_of(answer.agent_id))
        seen = self._tenants.setdefault(tenant.name, _Tenancy())
        reuse, totals = answer.reuse, seen.totals
        totals.answers += 1
        totals.prompt += answer.prompt_tokens
        totals.generated += len(answer.tokens)
        totals.reused[reuse.tier] += reuse.tokens
        seen.answers.append(
            Answered(
                totals.answers,
                time.time(),
                tenant.given(answer.agent_id) if kept else None,
                "" if kept else label,
                answer.prompt_tokens,
                reuse.tokens,
                reuse.tier,
                reuse.why,
                reuse.restore_seconds,
                reuse.waited_seconds,
                reuse.time_to_first_token,
                len(answer.tokens),
            )
        )

    async def events(
        self, engine: Engine, tenant: Tenant, store_health: Callable[[], dict[str, object]]
    ) -> AsyncIterator[bytes]:
        """Yield a tenant's view as server-sent events, once a second, as long as the engine runs."""
        self.watchers[tenant.name] += 1
        last_sent, agents = 0, None
        try:
            while self._worker.running:
                self._ask("running", self._look_at_batch())
                if time.monotonic() >= self._again:
                    self._ask("agents", self._look_at_agents(engine))
                seen = self._tenants.setdefault(tenant.name, _Tenancy())
                new = [answer for answer in seen.answers if answer.number > last_sent]
                last_sent = new[-1].number if new else last_sent
                yield _event("state", self._state(engine, tenant, seen.totals, store_health()))
                if new:
                    yield _event("answers", [asdict(answer) for answer in new])
                if agents is not self._agents:
                    agents = self._agents
                    yield _event("agents", _shown(agents, tenant))
                await asyncio.sleep(EVERY_SECONDS)
        finally:
            self.watchers -= Counter({tenant.name: 1})

    def _state(self, engine: Engine, tenant: Tenant, totals: Totals, store_health: dict[str, object]) -> dict[str, Any]:
        pool = engine.pool
        return {
            "at": time.time(),
            "totals": totals.shown(),
            "running": [
                _progress(progress, given) for progress in self._running if (given := tenant.given(progress.agent_id))
            ],
            # A tenant does not see the memory of others.
            "memory": None if tenant.name else {"used": pool.used_bytes, "total": pool.total_bytes},
            "store": store_health,
            "saves": engine.store.saves,
        }

    def _ask(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Start the coroutine `work`, a query, unless the last one with the name `what` is still running."""
        asking = self._asking.get(what)
        if asking and not asking.done():
            return work.close()
        self._asking[what] = asyncio.create_task(work)
        return None

    async def _look_at_batch(self) -> None:
        self._running = await self._worker.call(_progress_of)

    async def _look_at_agents(self, engine: Engine) -> None:
        begun = time.monotonic()
        found = await asyncio.to_thread(engine.store.agents)
        took = time.monotonic() - begun
        self._again = time.monotonic() + max(AGENTS_SECONDS, took / AGENTS_SHARE)
        if found != self._agents:
            self._agents = found


def _progress_of(engine: Engine) -> list[JobProgress]:
    agents: AgentEngine = engine.agents
    return agents.progress()


def _progress(progress: JobProgress, given: str) -> dict[str, Any]:
    return asdict(progress) | {"agent_id": given if progress.kept else None, "stage": progress.stage.name.lower()}


def _shown(agents: Iterable[AgentInfo], tenant: Tenant) -> dict[str, Any]:
    its = [(info, given) for info in agents if (given := tenant.given(info.agent_id)) is not None]
    its.sort(key=lambda each: (-each[0].nbytes, each[1]))
    return {
        "count": len(its),
        "agents": [
            {"id": given, "tokens": info.tokens, "tiers": info.tiers, "bytes": info.nbytes, "saved": info.saved}
            for info, given in its[:MOST_AGENTS]
        ],
    }


def _event(name: str, data: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), to_json(data))
