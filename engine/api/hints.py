"""The endpoint POST /v1/kv_hints: an orchestrator's hints on contexts, in vLLM's envelope (`v1/kv_hints/protocol.py`).

vLLM leaves the actions and their payloads to the component that takes them. Here an action names an agent as its
session, and is an operation of the engine on the agent's context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..tiers.loading import Loading
from ..tiers.store import MAX_HOT_AGENTS
from .auth import Tenant
from .models import ServedModel
from .openai.schema import RequestBody
from .service import Service

MAX_ACTIONS = 32  # in an envelope
MAX_PINS = MAX_HOT_AGENTS // 2  # in the memory of a model
VERSION = "1"  # of the actions


class HintAction(RequestBody):
    """A hint on the context of an agent, which `payload` names as `session_id`."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class HintsBody(RequestBody):
    """Body of POST /v1/kv_hints."""

    protocol_version: Literal["1"]
    message_id: str
    actions: Annotated[list[HintAction], Field(fail_fast=True, max_length=MAX_ACTIONS)]
    model: str | None = None


async def kv_hints(request: Request) -> Response:
    """Carry out the actions of an envelope, one after another, and reply with the result of each: `done`, `not_found`
    for an agent without a context, `refused` for a pin above the tenant's share or a context that cannot be saved, or
    `unsupported`.
    """
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(HintsBody, request)
    model = await service.model(request, tenant, body.model or service.models.first.name)
    results = [
        {"action_id": one.action_id, "result": await _carry_out(service, model, tenant, one)} for one in body.actions
    ]
    return JSONResponse({"message_id": body.message_id, "results": results})


HINT_ROUTES = [Route("/v1/kv_hints", kv_hints, methods=["POST"])]


async def _carry_out(service: Service, model: ServedModel, tenant: Tenant, action: HintAction) -> str:
    """Carry out an action, and return its result. Raises ApiError (400) for an invalid name of an agent."""
    work, session = _ACTIONS.get(action.action_type), action.payload.get("session_id")
    if not work or action.action_version != VERSION or not isinstance(session, str):
        return "unsupported"
    return await work(service, model, tenant, tenant.agent(session, "session_id"))


async def _pin(service: Service, model: ServedModel, tenant: Tenant, agent_id: str) -> str:
    store = model.engine.store
    pinned = store.pinned()
    own = sum(tenant.given(one) is not None for one in pinned)
    if agent_id not in pinned and (len(pinned) >= MAX_PINS or own >= service.tokens.share(MAX_PINS)):
        return "refused"
    return "done" if await asyncio.to_thread(store.pin, agent_id) else "not_found"


async def _unpin(service: Service, model: ServedModel, tenant: Tenant, agent_id: str) -> str:
    return "done" if await asyncio.to_thread(model.engine.store.unpin, agent_id) else "not_found"


async def _retain(service: Service, model: ServedModel, tenant: Tenant, agent_id: str) -> str:
    """Save the context to the tiers below memory now."""
    store = model.engine.store
    await asyncio.to_thread(store.flush_dirty, agent_id)
    info = await asyncio.to_thread(store.agent, agent_id)
    return "not_found" if not info else "done" if info.saved else "refused"


async def _demote(service: Service, model: ServedModel, tenant: Tenant, agent_id: str) -> str:
    """Save the context to the tiers below memory, and free its memory."""
    done = await asyncio.to_thread(model.engine.store.demote, agent_id)
    return "not_found" if done is None else "done" if done else "refused"


async def _prefetch(service: Service, model: ServedModel, tenant: Tenant, agent_id: str) -> str:
    """Load the context into memory."""
    engine, worker = model.engine, model.worker
    assert worker
    loading: Loading = await asyncio.to_thread(engine.store.begin_load, agent_id)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loading.add_done_callback(lambda: loop.call_soon_threadsafe(ended.set))
    await ended.wait()
    loaded = await worker.call(lambda _: loading.result())
    if not loaded.blocks:
        return "not_found"
    engine.pool.free(loaded.blocks.block_ids, agent_id)
    return "done"


_ACTIONS: dict[str, Callable[[Service, ServedModel, Tenant, str], Awaitable[str]]] = {
    "pin": _pin,
    "unpin": _unpin,
    "retain": _retain,
    "demote": _demote,
    "prefetch": _prefetch,
}
