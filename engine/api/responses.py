"""The endpoints of OpenAI's Responses API, below /v1/responses. A response is computed as the answer in a chat."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..agent_engine import Answer
from ..chains import ContextNames
from ..tiers.store import AgentCacheStore
from .completions import answer, conversation
from .diagnosis import AskedPrompt, diagnosis
from .openai.errors import ApiError, invalid, renamed, shortened
from .openai.response_schema import NAMES, Item, ItemReference, ResponseBody, new_item_id, restored
from .openai.response_shapes import Notes, ResponseReply
from .records import MAX_TURNS, StoredTurn
from .service import Service

MAX_ITEMS = 100  # in a list, as OpenAI's API
_PARTS = {"model": "model_changed", "tools": "tools_changed", "options": "reasoning_effort_changed"}  # else the input


async def create_response(request: Request) -> Response:
    """Reply to POST /v1/responses with the next response of a conversation."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(ResponseBody, request)
    earlier = await _earlier(service, tenant.name, body.previous_response_id)
    items = [item for turn in earlier for item in (*turn.input, *turn.output)]
    if body.conversation:
        items = await _items_of(service, tenant.name, body.conversation.id)
    if body.input:
        given = await resolved(service, tenant.name, "input", body.input, (item["id"] for item in items))
        body = body.model_copy(update={"input": given})
    response_id = f"resp_{uuid4().hex}"
    try:
        chat = body.chat(items)
        model = await service.model(request, tenant, chat.model)
        compared = body.prompt_cache_options.comparison_response_id
        known = service.prompt_log.find(compared, tenant.name, "resp_")
        (prompt,), agent_id, (reader,), asked = await conversation(
            service, model, request, tenant, chat, response_id, compared=known
        )
        prompt = replace(prompt, prewarms=body.prompt_cache_options.prewarm)
        diagnostics = partial(_diagnostics, compared, known, asked)
        if not body.store:
            prompt = replace(prompt, keep=False, written=False)
        ancestors = [*earlier[-1].ancestors, body.previous_response_id] if earlier and body.previous_response_id else []
        store = partial(_store, service, tenant.name, body, ancestors)
        reply = ResponseReply(response_id, body, agent_id, reader, Notes(prompt.boundaries, diagnostics), store)
        return await answer(service, request, service.ask(model, [prompt]), [reply], reply, chat)
    except ApiError as error:
        raise renamed(error, NAMES) from error


async def get_response(request: Request) -> Response:
    """Reply to GET /v1/responses/{id} with a stored response."""
    if request.query_params.get("stream", "false") != "false":
        raise invalid("stream: a stored response is not sent as a stream", "stream", "unsupported_value")
    service: Service = request.app.state.service
    tenant, response_id = service.tokens.tenant(request), request.path_params["response_id"]
    if not (response := await service.responses.response(tenant.name, response_id)):
        raise _not_found(response_id)
    return JSONResponse(response)


async def input_items(request: Request) -> Response:
    """Reply to GET /v1/responses/{id}/input_items with the items of the request of a stored response: the last one
    first, or the first one with `order=asc`; at most `limit`, and those behind the item `after`.
    """
    service: Service = request.app.state.service
    tenant, response_id = service.tokens.tenant(request), request.path_params["response_id"]
    if not (turn := await service.responses.turn(tenant.name, response_id)):
        raise _not_found(response_id)
    by_id = {item["id"]: item for item in turn.input}
    ids, more = page_bounds(request, list(by_id))
    return JSONResponse(listed([by_id[one] for one in ids], more=more))


def page_bounds(request: Request, ids: Sequence[str]) -> tuple[list[str], bool]:
    """Return the ids of the items that a request for a list wants, and whether there are more. Raises ApiError (400)
    for a wrong parameter.
    """
    order, limit = request.query_params.get("order", "desc"), request.query_params.get("limit", "20")
    after = request.query_params.get("after")
    if order not in ("asc", "desc"):
        raise invalid(f"order: is asc or desc, got {shortened(order)}", "order")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_ITEMS):
        raise invalid(f"limit: is 1 to {MAX_ITEMS}, got {shortened(limit)}", "limit")
    ids = ids if order == "asc" else ids[::-1]
    if after is not None:
        if after not in ids:
            raise invalid(f"after: there is no item {shortened(after)}", "after")
        ids = ids[ids.index(after) + 1 :]
    page = list(ids[: int(limit)])
    return page, len(page) < len(ids)


def listed(items: Sequence[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """Return items as the API lists them."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": more}


async def delete_response(request: Request) -> Response:
    """Reply to DELETE /v1/responses/{id}: the stored response is deleted, and its context."""
    service: Service = request.app.state.service
    tenant, response_id = service.tokens.tenant(request), request.path_params["response_id"]
    turn = await service.responses.turn(tenant.name, response_id)
    response = await service.responses.response(tenant.name, response_id)
    if not await service.responses.delete(tenant.name, response_id):
        raise _not_found(response_id)
    left: int | None = None  # tokens of its context that stay; None for all
    if turn and turn.context:
        contexts = [turn.context, *await service.responses.release(tenant.name, turn.context)]
        if response and response.get("model") in service.models.by_name:
            store = (await service.model(request, tenant, response["model"])).engine.store
            left = min([await _free(service, tenant.name, store, context) for context in reversed(contexts)])
    service.prompt_log.delete(response_id, tenant.name, left)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


RESPONSE_ROUTES = [
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/{response_id}", get_response, methods=["GET"]),
    Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/input_items", input_items, methods=["GET"]),
]


def no_conversation(conversation_id: str) -> ApiError:
    """Return the error for an unknown conversation, or another tenant's."""
    message = f"there is no conversation {shortened(conversation_id)}"
    return ApiError(404, message, "conversation", "conversation_not_found")


async def _free(service: Service, tenant: str, store: AgentCacheStore, context: ContextNames) -> int:
    """Free a deleted response's context, except the blocks up to the last one in which the context of a stored response
    ends; they are freed with that response. Return the number of the first tokens that stay.
    """
    ends = await asyncio.to_thread(store.ends_in, context)
    for kept in range(len(ends), 0, -1):
        if end := await service.responses.last_end(tenant, ends[kept - 1]):
            if end != context.blocks[kept - 1]:
                await service.responses.leave(tenant, end, replace(context, blocks=context.blocks[:kept]))
            return await asyncio.to_thread(store.forget, context, kept)
    return await asyncio.to_thread(store.forget, context)


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"there is no response {shortened(response_id)}", "response_id", "response_not_found")


async def _earlier(service: Service, tenant: str, response_id: str | None) -> list[StoredTurn]:
    """Return the turns of the conversation up to a response. Raises ApiError (400) if one of them is not stored, or if
    there are MAX_TURNS.
    """
    if response_id is None:
        return []
    name = "previous_response_id"
    found = await service.responses.conversation(tenant, response_id)
    if found is None:
        message = f"{name}: {shortened(response_id)}, or a response before it in its conversation, is not stored"
        raise invalid(message, name, "previous_response_not_found")
    if found[-1].conversation:
        message = f"{name}: the response is one of a conversation, {found[-1].conversation}: name the conversation"
        raise invalid(message, name)
    if len(found) >= MAX_TURNS:
        raise invalid(f"{name}: the conversation has {len(found)} turns, which is the maximum", name)
    return found


async def _items_of(service: Service, tenant: str, conversation_id: str) -> list[dict[str, Any]]:
    """Return the items of a conversation. Raises ApiError (404) if there is none of this tenant."""
    stored = await service.conversations.find(tenant, conversation_id)
    if not stored:
        raise no_conversation(conversation_id)
    return await service.conversations.items(tenant, conversation_id, stored.items)


async def _store(
    service: Service,
    tenant: str,
    body: ResponseBody,
    ancestors: list[str],
    response: dict[str, Any],
    context: ContextNames | None,
) -> None:
    """Store a complete response, with the names of its context, if the request wants it."""
    if not body.store:
        return
    items, conversation = shown_items(body.input, response["id"]), body.conversation.id if body.conversation else None
    await service.responses.put(
        tenant, response, StoredTurn(items, response["output"], ancestors, conversation, context)
    )
    if conversation:
        await service.conversations.append(tenant, conversation, [*items, *response["output"]])


async def resolved(
    service: Service, tenant: str, field: str, items: Sequence[Item], known: Iterable[str]
) -> Sequence[Item]:
    """Return the items in a field of a request, with stored items in place of references to them. `known` has the ids
    of the items before them. Raises ApiError (404) for an unknown item or another tenant's, and (400) for a duplicate.
    """
    ids = [item.id for item in items if isinstance(item, ItemReference)]
    if not ids:
        return items
    before = set(known)
    for one in ids:
        if one in before:
            message = f"Duplicate item found with id {shortened(one)}. Remove duplicate items from your input."
            raise invalid(message, field)
        before.add(one)
    stored = {**await service.responses.items(tenant, ids), **await service.conversations.referenced(tenant, ids)}
    for one in ids:
        if one not in stored:
            message = f"Item with id {shortened(one)} not found. No stored response or conversation has it."
            raise ApiError(404, message, field, "item_not_found")
    return [
        restored(stored[item.id], f"{field}[{i}]") if isinstance(item, ItemReference) else item
        for i, item in enumerate(items)
    ]


def shown_items(items: Iterable[Item], owner: str) -> list[dict[str, Any]]:
    """Return items of a request as the API lists them, each with an id of the response or the conversation `owner`."""
    return [{"id": new_item_id("item", owner), **_shown(item.model_dump())} for item in items]


def _shown(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of a request as the API lists it, with its text as a list of parts."""
    if item["type"] == "message":
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
        return {**item, "status": "completed", "content": [{"type": kind, "text": item["content"], **more}]}
    if item["type"] == "reasoning":
        return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": item["content"]}]}
    return {**item, "status": "completed"}


def _diagnostics(
    compared: str | None, earlier: AskedPrompt | None, prompt: AskedPrompt, answer: Answer | None
) -> dict[str, Any] | None:
    """Return the field `prompt_cache_diagnostics`: why less than the prompt of the response `compared` was reused; None
    if the request names none. Without the answer, nothing is known of evicted tokens.
    """
    if compared is None:
        return None
    if not earlier:
        return {"type": "comparison_response_not_found"}
    found = diagnosis(earlier, prompt, answer)
    if not found.part:
        return {"type": "unavailable", **found.own_fields} if found.lost.why else {"type": "cache_hit"}
    return {
        "type": "cache_miss",
        "reason": _PARTS.get(found.part, "input_changed"),
        "cache_missed_tokens": found.missed,
        "comparison_reusable_tokens": found.reusable,
        **found.own_fields,
    }
