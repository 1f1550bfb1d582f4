"""The endpoints of /v1/agents: a tenant's agents, and operations on their contexts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..tiers.store import AgentInfo, StoreUnavailableError
from .auth import Tenant
from .models import ServedModel
from .openai.errors import ApiError
from .openai.schema import ForkBody
from .service import Service

MODEL = "model"  # the parameter of URLs that names a model

_Answer = TypeVar("_Answer")


async def index(request: Request) -> Response:
    """Reply with all agents of the request's tenant, of the loaded models or of the parameter `model`. Raises ApiError:
    401, 403, and as `Service.model`.
    """
    service, tenant = _service_and_tenant(request)
    service.check_ready()
    models = [await _model(request)] if MODEL in request.query_params else service.models.held(request.state.ends)
    data = []
    for model in models:
        found = await asyncio.to_thread(model.engine.store.agents)
        data += [_agent_json(info, tenant, model) for info in found if tenant.given(info.agent_id)]
    return JSONResponse({"object": "list", "data": data})


async def show(request: Request) -> Response:
    """Reply with one agent. Raises ApiError (404) for an unknown agent."""
    _, tenant = _service_and_tenant(request)
    return JSONResponse(await _info(await _model(request), tenant, request.path_params["agent"]))


async def save(request: Request) -> Response:
    """Save an agent's context to the tiers below memory, wait for that, and reply with the agent.

    Raises ApiError: 404 for an unknown agent, 409 without a tier to save to, 503 if the save fails.
    """
    _, tenant = _service_and_tenant(request)
    given = request.path_params["agent"]
    model = await _model(request)
    store = model.engine.store
    info = await _info(model, tenant, given)
    if not store.saves:
        raise ApiError(409, "this engine has neither a --store nor a --cold directory to save to", code="no_store")
    if not info["saved"]:
        await asyncio.to_thread(store.flush_dirty, tenant.agent(given, "agent_id"))
        info = await _info(model, tenant, given)
    if not info["saved"]:
        reasons = ", ".join(f"{tier}: {reason}" for tier, reason in store.save_failures.items()) or "evicted"
        raise ApiError(503, f"{given!r} could not be saved ({reasons})", code="not_saved", retry_after=1)
    return JSONResponse(info)


async def fork(request: Request) -> Response:
    """Give another agent the context of an agent, and reply with the other agent.

    Raises ApiError: 404 for an unknown agent, 409 if the other one exists and the body does not have `replace`.
    """
    service, tenant = _service_and_tenant(request)
    body = await service.parsed(ForkBody, request)
    given = request.path_params["agent"]
    agent_id, new_id = tenant.agent(given, "agent_id"), tenant.agent(body.to, "to")
    model = await _model(request)
    store = model.engine.store
    known = None if body.replace else await _call_store(store.agent, new_id)
    if known:
        raise ApiError(409, f"to: there is an agent {body.to!r}; replace: true replaces it", "to", "agent_exists")
    if not await _call_store(store.fork, agent_id, new_id):
        raise _unknown(given)
    service.prompt_log.delete_agent(tenant.name, body.to)
    return JSONResponse(await _info(model, tenant, body.to), 201)


async def delete(request: Request) -> Response:
    """Delete an agent's contexts in all tiers, of all models.

    Raises ApiError: 404 for an unknown agent, 500 if its cold file cannot be removed, 503 if the page server is needed
    and does not answer.
    """
    service, tenant = _service_and_tenant(request)
    given = request.path_params["agent"]
    agent_id = tenant.agent(given, "agent_id")
    service.check_ready()
    models = await service.models.settled(request.state.ends) or [await _model(request)]
    try:
        known = await asyncio.to_thread(service.models.delete_files, agent_id)
        deletes = (_call_store(model.engine.store.delete, agent_id) for model in models)
        found = await asyncio.gather(*deletes, return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one
    except OSError as error:
        why = error.strerror or str(error)
        raise ApiError(500, f"{given!r} is forgotten but for its cold file, which cannot be removed: {why}") from None
    service.prompt_log.delete_agent(tenant.name, given)
    if not (known or any(found)):
        raise _unknown(given)
    return JSONResponse({"id": given, "object": "agent.deleted", "deleted": True})


class AgentConvertor(PathConvertor):
    """Convertor of the agent's name in a URL, which does not end with /save or /fork."""

    regex = ".*(?<!/save)(?<!/fork)"


register_url_convertor("agent", AgentConvertor())

AGENT_ROUTES = [
    Route("/v1/agents", index),
    Route("/v1/agents/{agent:path}/save", save, methods=["POST"]),
    Route("/v1/agents/{agent:path}/fork", fork, methods=["POST"]),
    Route("/v1/agents/{agent:agent}", show),
    Route("/v1/agents/{agent:agent}", delete, methods=["DELETE"]),
]


def _service_and_tenant(request: Request) -> tuple[Service, Tenant]:
    """Return the service, and the tenant of the request's token, as `Tokens.tenant` does. Raises ApiError: 401 for a
    missing or unknown token, 403 for the token of WATCHER.
    """
    service: Service = request.app.state.service
    return service, service.tokens.tenant(request)


async def _model(request: Request) -> ServedModel:
    """Return the model that the parameter `model` of the URL names, the first one without it. Raises as
    `Service.model`.
    """
    service, tenant = _service_and_tenant(request)
    return await service.model(request, tenant, request.query_params.get(MODEL, service.models.first.name))


async def _info(model: ServedModel, tenant: Tenant, given: str) -> dict[str, Any]:
    """Return the tenant's agent with the name `given` for JSON. Raises ApiError: 404 for an unknown agent, 503."""
    agent_id = tenant.agent(given, "agent_id")
    info = await _call_store(model.engine.store.agent, agent_id)
    if not info:
        raise _unknown(given)
    return _agent_json(info, tenant, model)


async def _call_store(ask: Callable[..., _Answer], *agents: str) -> _Answer:
    """Call a method of the store with the ids of agents, on a thread. Return its result.

    Raises ApiError (503) if the method needs the page server, and the server does not answer.
    """
    try:
        return await asyncio.to_thread(ask, *agents)
    except StoreUnavailableError as error:
        raise ApiError(503, f"{error}: ask again when it is back", code="store_unavailable", retry_after=1) from error


def _agent_json(info: AgentInfo, tenant: Tenant, model: ServedModel) -> dict[str, Any]:
    """Return an agent for JSON, with the tenant's name for it."""
    return {
        "id": tenant.given(info.agent_id),
        "object": "agent",
        "model": model.name,
        "tokens": info.tokens,
        "tiers": info.tiers,
        "bytes": info.nbytes,
        "saved": info.saved,
        "pinned": info.pinned,
    }


def _unknown(given: str) -> ApiError:
    return ApiError(404, f"agent_id: nothing is remembered of {given!r}", "agent_id", "agent_not_found")
