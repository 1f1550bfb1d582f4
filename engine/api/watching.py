"""State for the engine's web page: running prompts, recent answers with the tiers of their tokens, and agents.

While a page is open, the engine is queried once a second, for all pages together. Pages do not wait for the query:
during a long step of the engine, they show the last state.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic_core import to_json

from ..agent_engine import AgentEngine, Answer, JobProgress
from ..startup import Engine
from ..tiers.store import AgentInfo
from .auth import Tenant, tenant_of
from .models import Models

LATELY = 500  # recent answers of each tenant that are kept
EVERY_SECONDS = 1.0
AGENTS_SECONDS = 3.0  # between two queries of the agents, at least
AGENTS_SHARE = 0.05  # share of the time, at most, for these queries, which read from the page server and files
MOST_AGENTS = 1000  # in the list, which has those with the largest contexts
MOST_WATCHERS = 64  # open streams of events; a tenant below its share may exceed it


@dataclass(frozen=True, slots=True)
class Answered:
    """A complete answer, as the page shows it. Durations are in seconds, counts in tokens."""

    number: int  # counts the answers of its tenant, from 1, so that a tenant does not see the number of all requests
    model: str
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
    kept: int | None  # tokens with a lifetime; None if the request has none
    kept_until: float  # unix seconds
    prewarmed: bool
    breakpoints: int


@dataclass(slots=True)
class Totals:
    """Numbers of answers and of their tokens since the start of the engine."""

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
class _History:
    """The answers of one tenant: totals, and the recent ones."""

    totals: Totals = field(default_factory=Totals)
    answers: deque[Answered] = field(default_factory=lambda: deque(maxlen=LATELY))


class Watching:
    """State for the web page of a server with `models`, for all open pages."""

    def __init__(self, models: Models) -> None:
        self.watchers: Counter[str] = Counter()  # open pages, by tenant
        self._models = models
        self._tenants: dict[str, _History] = {}
        self._running: list[tuple[str, JobProgress]] = []  # with the names of their models
        self._agents: list[tuple[str, AgentInfo]] = []
        self._again = 0.0  # time of the next query of the agents, in monotonic seconds
        self._queries: dict[str, asyncio.Task[None]] = {}

    def answered(
        self, answer: Answer, model: str, breakpoints: int, *, kept: bool, label: str, prewarmed: bool
    ) -> None:
        """Add an answer of a model to its tenant's history. It has the agent's name if the context is `kept`, otherwise
        `label`. A `prewarmed` prompt was computed for later requests.
        """
        tenant = Tenant(tenant_of(answer.agent_id))
        seen = self._tenants.setdefault(tenant.name, _History())
        reuse, totals = answer.reuse, seen.totals
        totals.answers += 1
        totals.generated += len(answer.tokens)
        if not answer.shares_prompt:
            totals.prompt += answer.prompt_tokens
            totals.reused[reuse.tier] += reuse.tokens
        seen.answers.append(
            Answered(
                totals.answers,
                model,
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
                answer.kept.tokens if answer.kept else None,
                answer.kept.until / 1000 if answer.kept else 0.0,
                prewarmed,
                breakpoints,
            )
        )

    async def events(
        self, tenant: Tenant, *, ready: Callable[[], bool], store_health: Callable[[], dict[str, object]]
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events once a second, while the server is `ready`: `state`, new `answers`, and `agents`
        after a change.

        They have only the tenant's prompts, answers and agents. `store_health` returns the state of the page server.
        """
        self.watchers[tenant.name] += 1
        last_sent, agents = 0, None
        try:
            while ready():
                self._start_query("running", self._query_batch())
                if time.monotonic() >= self._again:
                    self._start_query("agents", self._query_agents())
                seen = self._tenants.setdefault(tenant.name, _History())
                new = [answer for answer in seen.answers if answer.number > last_sent]
                last_sent = new[-1].number if new else last_sent
                yield _event("state", self._state(tenant, seen.totals, store_health()))
                if new:
                    yield _event("answers", [asdict(answer) for answer in new])
                if agents is not self._agents:
                    agents = self._agents
                    yield _event("agents", _agents_json(agents, tenant))
                await asyncio.sleep(EVERY_SECONDS)
        finally:
            self.watchers -= Counter({tenant.name: 1})

    def _state(self, tenant: Tenant, totals: Totals, store_health: dict[str, object]) -> dict[str, Any]:
        """Return the data of the event `state`, as `tenant` may see it."""
        loaded = self._models.loaded
        pools = [model.engine.pool for model in loaded]
        used, total = sum(pool.used_bytes for pool in pools), sum(pool.total_bytes for pool in pools)
        return {
            "at": time.time(),
            "totals": totals.shown(),
            "running": [
                _progress_json(progress, given, model)
                for model, progress in self._running
                if (given := tenant.given(progress.agent_id))
            ],
            # A tenant does not see the memory of others.
            "memory": None if tenant.name else {"used": used, "total": total},
            "store": store_health,
            "saves": any(model.engine.store.saves for model in loaded),
        }

    def _start_query(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Start the query `work` as a task, unless the last query with the name `what` is still running."""
        query = self._queries.get(what)
        if query and not query.done():
            return work.close()
        self._queries[what] = asyncio.create_task(work)
        return None

    async def _query_batch(self) -> None:
        with ExitStack() as ends:
            models = self._models.held(ends)
            found = await asyncio.gather(*(model.worker.call(_progress_of) for model in models if model.worker))
        self._running = [(model.name, one) for model, those in zip(models, found, strict=True) for one in those]

    async def _query_agents(self) -> None:
        begun = time.monotonic()
        with ExitStack() as ends:
            models = self._models.held(ends)
            found = [(one.name, info) for one in models for info in await asyncio.to_thread(one.engine.store.agents)]
        took = time.monotonic() - begun
        self._again = time.monotonic() + max(AGENTS_SECONDS, took / AGENTS_SHARE)
        if found != self._agents:
            self._agents = found


def _progress_of(engine: Engine) -> list[JobProgress]:
    agents: AgentEngine = engine.agent_engine
    return agents.progress()


def _progress_json(progress: JobProgress, given: str, model: str) -> dict[str, Any]:
    return asdict(progress) | {
        "model": model,
        "agent_id": given if progress.kept else None,
        "stage": progress.stage.name.lower(),
    }


def _agents_json(agents: Iterable[tuple[str, AgentInfo]], tenant: Tenant) -> dict[str, Any]:
    visible = [(info, given, model) for model, info in agents if (given := tenant.given(info.agent_id)) is not None]
    visible.sort(key=lambda each: (-each[0].nbytes, *each[1:]))
    return {
        "count": len(visible),
        "agents": [
            {
                "id": given,
                "model": model,
                "tokens": info.tokens,
                "tiers": info.tiers,
                "bytes": info.nbytes,
                "saved": info.saved,
                "pinned": info.pinned,
            }
            for info, given, model in visible[:MOST_AGENTS]
        ],
    }


def _event(name: str, data: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), to_json(data))
