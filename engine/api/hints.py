"""Hints of an orchestrator on contexts, in vLLM's envelope: those of POST /v1/kv_hints, and those of a request, in its
`kv_transfer_params`.

vLLM leaves the types of actions and their payloads to the component that takes them. Here a payload names the contexts:

    session_id     the context of an agent
    block_hashes   the contexts up to the ends of blocks, which have the names of `chains.chain_hash`; others than full
                   blocks, and blocks that this engine has not had lately, are not found
    neither        in a request: its own context, when its answer is complete; without an agent, its full blocks, or
                   all of it if it has none
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..agent_engine import Answer
from ..memory.blocks import AgentBlocks, block_names
from ..memory.lifetimes import KeptContext, Lifetimes
from ..tiers.loading import Loaded
from ..tiers.store import MAX_HOT_AGENTS
from .auth import Tenant
from .models import ServedModel
from .openai.errors import invalid, shortened
from .openai.schema import LIFETIMES, HintAction, HintsEnvelope
from .openai.shapes import hint_results
from .service import Service

MAX_PINS = MAX_HOT_AGENTS // 2  # contexts of agents in the memory of a model
MAX_BLOCKS = 4096  # in an action
MAX_CONTEXTS = 32  # to which the blocks of an action belong
MAX_SECONDS = LIFETIMES["24h"]
SECONDS = 30.0  # for all actions of an envelope
VERSION = "1"  # of the actions


class HintsBody(HintsEnvelope):
    """Body of POST /v1/kv_hints."""

    model: str | None = None


@dataclass(frozen=True, slots=True)
class Hint:
    """An action on the context of an agent, on those of blocks, or without both on that of the request."""

    action_id: str
    kind: str  # a key of _ACTIONS; empty for another one, an unknown version, or a payload that names other contexts
    agent_id: str | None  # the engine's id of the agent
    blocks: Sequence[str] | None
    seconds: int  # to retain it; 0 to save it only
    short: Sequence[int] = ()  # the tokens of a context without an agent and without a full block

    @classmethod
    def of(cls, action: HintAction, tenant: Tenant, param: str) -> Hint:
        """Return the hint of a tenant's action. Raises ApiError (400) for an invalid payload of a known action."""
        kind, payload = action.action_type, action.payload
        session, blocks, seconds = (payload.get(name) for name in ("session_id", "block_hashes", "seconds"))
        other = session is None and blocks is None and payload.keys() - {"session_id", "block_hashes", "seconds"}
        if kind not in _ACTIONS or action.action_version != VERSION or other:
            return cls(action.action_id, "", None, None, 0)
        if not (session is None or isinstance(session, str)):
            raise invalid(f"session_id must be a text, got {shortened(session)}", f"{param}.payload.session_id")
        if blocks is not None:
            texts = isinstance(blocks, list) and all(isinstance(one, str) for one in blocks)
            if not texts or not 0 < len(blocks) <= MAX_BLOCKS:
                raise invalid(f"block_hashes must be 1 to {MAX_BLOCKS} texts", f"{param}.payload.block_hashes")
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 1 <= seconds <= MAX_SECONDS
        if not (seconds is None or number):
            raise invalid(f"seconds must be 1 to {MAX_SECONDS}, got {shortened(seconds)}", f"{param}.payload.seconds")
        agent_id = None if session is None else tenant.agent(session, f"{param}.payload.session_id")
        return cls(action.action_id, kind, agent_id, blocks, int(seconds or 0))


def hints_of(actions: Iterable[HintAction], tenant: Tenant, param: str) -> list[Hint]:
    """Return the hints of a tenant's actions. Raises ApiError (400) as `Hint.of`; `param` is the field of the list."""
    return [Hint.of(action, tenant, f"{param}[{i}]") for i, action in enumerate(actions)]


async def kv_hints(request: Request) -> Response:
    """Carry out the actions of an envelope, one after another, and reply with the result of each, as `_carry_out`."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(HintsBody, request)
    hints = hints_of(body.actions, tenant, "actions")
    model = await service.model(request, tenant, body.model or service.models.first.name)
    results = await carry_out(Contexts(service, model, tenant), hints)
    return JSONResponse({"message_id": body.message_id, "results": hint_results(results)})


HINT_ROUTES = [Route("/v1/kv_hints", kv_hints, methods=["POST"])]


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contexts of a tenant in a model."""

    service: Service
    model: ServedModel
    tenant: Tenant

    def agents(self, blocks: Sequence[str]) -> dict[str, str]:
        """Return the agents of the tenant that have or had these blocks, by block, as far as the engine knows."""
        agents = self.model.engine.store.agents_of_blocks(blocks)
        pairs = zip(blocks, agents, strict=True)
        return {name: agent for name, agent in pairs if agent and self.tenant.given(agent) is not None}

    async def load(self, agent_id: str, tokens: Sequence[int] | None = None) -> Loaded:
        """Load an agent's context into memory; or with `tokens` these, of any context. The caller frees them. If the
        caller is cancelled, the load ends later, and frees them itself.
        """
        task = asyncio.create_task(self._load(agent_id, tokens))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: self.free(done.result(), agent_id))
            raise

    async def _load(self, agent_id: str, tokens: Sequence[int] | None) -> Loaded:
        worker, store = self.model.worker, self.model.engine.store
        assert worker
        asked = None if tokens is None else [*tokens, 0]  # of a prompt, the last token is never loaded
        lifetimes = Lifetimes((), self.tenant.name, self.service.tokens.count)
        begin = partial(store.begin_load, agent_id, asked, named=tokens is None, lifetimes=lifetimes, whole=True)
        loading = await asyncio.to_thread(begin)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loading.add_done_callback(lambda: loop.call_soon_threadsafe(ended.set))
        await ended.wait()
        return await worker.call(lambda _: loading.result())

    def free(self, loaded: Loaded, agent_id: str) -> None:
        """Free the blocks of a loaded context."""
        if loaded.blocks:
            self.model.engine.pool.free(loaded.blocks.block_ids, agent_id)

    async def kept(self, tokens: int, seconds: int, keep: Callable[[Lifetimes], object]) -> bool:
        """Call `keep` with a lifetime of the first `tokens` of a context. Return whether all of them are kept."""
        loop, report = asyncio.get_running_loop(), asyncio.Queue[KeptContext]()
        lifetimes = Lifetimes([(tokens, seconds)], self.tenant.name, self.service.tokens.count)
        lifetimes.on_report(lambda kept: loop.call_soon_threadsafe(report.put_nowait, kept))
        if await asyncio.to_thread(keep, lifetimes) is False:
            lifetimes.report(KeptContext(0, 0))
        found = await report.get()
        return found.tokens >= tokens and not found.why


async def carry_out(contexts: Contexts, hints: Iterable[Hint], answer: Answer | None = None) -> list[tuple[str, str]]:
    """Carry out hints, one after another, and return the id and the result of each action: `done`, `not_found`
    without such a context, `refused` for a pin or a lifetime above the tenant's share, for a context that cannot be
    saved or freed, and for an action that is not done within SECONDS of the beginning, or `unsupported`. `answer` is
    that of the request which has the hints.
    """
    end, results = asyncio.get_running_loop().time() + SECONDS, list[tuple[str, str]]()
    for hint in hints:
        result = "refused"
        if asyncio.get_running_loop().time() < end:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(end):
                    result = await _carry_out(contexts, _about(hint, answer))
        results.append((hint.action_id, result))
    return results


def _about(hint: Hint, answer: Answer | None) -> Hint:
    """Return the hint with the context of the request, if it names no other."""
    if answer is None or hint.agent_id is not None or hint.blocks is not None:
        return hint
    if answer.context is None:
        return replace(hint, agent_id=answer.agent_id)
    if answer.block:
        return replace(hint, blocks=[answer.block])
    return replace(hint, agent_id=answer.agent_id, short=answer.short)


async def _carry_out(contexts: Contexts, hint: Hint) -> str:
    of_agent, of_blocks = _ACTIONS.get(hint.kind, (None, None))
    if hint.agent_id and hint.short and of_agent:
        return await _of_short(contexts, hint.kind, hint.agent_id, hint.short, hint.seconds)
    if hint.blocks is not None and of_blocks:
        return await of_blocks(contexts, hint.blocks, hint.seconds)
    return await of_agent(contexts, hint.agent_id, hint.seconds) if hint.agent_id and of_agent else "unsupported"


# -- The context of an agent -------------------------------------------------------------------------------------------


async def _pin(contexts: Contexts, agent_id: str, seconds: int) -> str:
    store, tokens = contexts.model.engine.store, contexts.service.tokens
    pinned = store.pinned()
    own = sum(contexts.tenant.given(one) is not None for one in pinned)
    if agent_id not in pinned and (len(pinned) >= MAX_PINS or own >= tokens.share(MAX_PINS)):
        return "refused"
    if await asyncio.to_thread(store.pin, agent_id):
        return "done"
    loaded = await contexts.load(agent_id)  # it is in the tiers below memory alone, or nowhere
    try:
        return _result(await asyncio.to_thread(store.pin, agent_id) if loaded.blocks else None)
    finally:
        contexts.free(loaded, agent_id)


async def _unpin(contexts: Contexts, agent_id: str, seconds: int) -> str:
    return _result(await asyncio.to_thread(contexts.model.engine.store.unpin, agent_id) or None)


async def _retain(contexts: Contexts, agent_id: str, seconds: int) -> str:
    """Save the context to the tiers below memory now, and keep it for `seconds`."""
    store = contexts.model.engine.store
    if seconds:
        loaded = await contexts.load(agent_id)
        try:
            if not loaded.blocks:
                return "not_found"
            return _result(await contexts.kept(len(loaded.blocks), seconds, lambda one: store.retain(agent_id, one)))
        finally:
            contexts.free(loaded, agent_id)
    await asyncio.to_thread(store.flush_dirty, agent_id)
    info = await asyncio.to_thread(store.agent, agent_id)
    return _result(info.saved if info else None)


async def _demote(contexts: Contexts, agent_id: str, seconds: int) -> str:
    """Save the context to the tiers below memory, and free its memory."""
    return _result(await asyncio.to_thread(contexts.model.engine.store.demote, agent_id))


async def _prefetch(contexts: Contexts, agent_id: str, seconds: int) -> str:
    """Load the context into memory."""
    loaded = await contexts.load(agent_id)
    contexts.free(loaded, agent_id)
    return _result(bool(loaded.blocks) or None)


# -- The contexts up to the ends of blocks -----------------------------------------------------------------------------


async def _each(
    contexts: Contexts, blocks: Sequence[str], work: Callable[[AgentBlocks], Awaitable[bool | None]]
) -> str:
    """Load the contexts that end with the last ones of `blocks`, and call `work` with each. Return the worst result."""
    store, agents = contexts.model.engine.store, contexts.agents(blocks)
    ends = store.last_blocks(list(agents))
    if len(ends) > MAX_CONTEXTS:
        return "refused"
    done: list[bool | None] = [None] if len(agents) < len(set(blocks)) else []
    for name in ends:
        agent_id, tokens = agents[name], store.tokens_to(name)
        loaded = await contexts.load(agent_id, tokens)
        try:
            found = loaded.blocks if tokens and loaded.reach >= len(tokens) else None
            done.append(await work(_beginning(found, tokens)) if found else None)
        finally:
            contexts.free(loaded, agent_id)
    return _result(None if not done or None in done else all(done))


def _beginning(context: AgentBlocks, tokens: Sequence[int]) -> AgentBlocks:
    """Return the full blocks of a context that have `tokens`."""
    count, end = 0, 0
    while end < len(tokens):
        end += context.blocks[count].tokens
        count += 1
    return replace(context, tokens=tuple(tokens), blocks=context.blocks[:count])


async def _of_short(contexts: Contexts, kind: str, agent_id: str, tokens: Sequence[int], seconds: int) -> str:
    """Carry out an action on a context without an agent, and without a full block. If memory has a longer one with its
    tokens, this is pinned and demoted.
    """
    store, tenant, tenants = contexts.model.engine.store, contexts.tenant.name, contexts.service.tokens.count
    loaded = await contexts.load(agent_id, tokens)
    try:
        found = loaded.blocks if loaded.reach >= len(tokens) else None
        if not found:
            return "not_found"
        if kind == "pin":
            return _result(await asyncio.to_thread(store.pin_blocks, found, tenant, tenants))
        if kind == "unpin":
            return _result(store.unpin_block(block_names(found.tokens, store.spec, agent_id)[-1]) or None)
        if kind == "retain" and seconds:
            return _result(await contexts.kept(len(tokens), seconds, lambda one: store.retain_blocks(found, one)))
        if kind in ("retain", "demote") and not await asyncio.to_thread(store.save_blocks, found):
            return "refused"
    finally:
        contexts.free(loaded, agent_id)
    return _result(kind != "demote" or store.release(found))


async def _pin_blocks(contexts: Contexts, blocks: Sequence[str], seconds: int) -> str:
    store, tenant, tenants = contexts.model.engine.store, contexts.tenant.name, contexts.service.tokens.count

    async def pin(context: AgentBlocks) -> bool:
        return await asyncio.to_thread(store.pin_blocks, context, tenant, tenants)

    return await _each(contexts, blocks, pin)


async def _unpin_blocks(contexts: Contexts, blocks: Sequence[str], seconds: int) -> str:
    unpinned = [contexts.model.engine.store.unpin_block(name) for name in contexts.agents(blocks)]
    return _result(any(unpinned) or None)


async def _retain_blocks(contexts: Contexts, blocks: Sequence[str], seconds: int) -> str:
    store = contexts.model.engine.store

    async def retain(context: AgentBlocks) -> bool:
        if not seconds:
            return await asyncio.to_thread(store.save_blocks, context)
        return await contexts.kept(len(context), seconds, lambda one: store.retain_blocks(context, one))

    return await _each(contexts, blocks, retain)


async def _demote_blocks(contexts: Contexts, blocks: Sequence[str], seconds: int) -> str:
    own = list(contexts.agents(blocks))
    return _result(await asyncio.to_thread(contexts.model.engine.store.demote_blocks, own))


async def _prefetch_blocks(contexts: Contexts, blocks: Sequence[str], seconds: int) -> str:
    async def loaded(context: AgentBlocks) -> bool:
        return True

    return await _each(contexts, blocks, loaded)


def _result(done: bool | None) -> str:
    """Return the result of an action: `done` is whether it was carried out, None without such a context."""
    return "not_found" if done is None else "done" if done else "refused"


_OfAgent = Callable[[Contexts, str, int], Awaitable[str]]
_OfBlocks = Callable[[Contexts, Sequence[str], int], Awaitable[str]]
_ACTIONS: dict[str, tuple[_OfAgent, _OfBlocks]] = {
    "pin": (_pin, _pin_blocks),
    "unpin": (_unpin, _unpin_blocks),
    "retain": (_retain, _retain_blocks),
    "demote": (_demote, _demote_blocks),
    "prefetch": (_prefetch, _prefetch_blocks),
}
