"""The endpoints of OpenAI's Conversations API, below /v1/conversations. `conversation` of a response continues one."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .openai.errors import ApiError, shortened
from .openai.response_schema import ConversationBody, ItemsBody, MetadataBody
from .records import StoredConversation
from .responses import listed, no_conversation, page_bounds, resolved, shown_items
from .service import Service


async def create_conversation(request: Request) -> Response:
    """Reply to POST /v1/conversations with a new conversation."""
    service, tenant = _service_and_tenant(request)
    body = await service.parsed(ConversationBody, request)
    conversation_id = f"conv_{uuid4().hex}"
    items = shown_items(await resolved(service, tenant, "items", body.items, []), conversation_id)
    made = await service.conversations.create(tenant, conversation_id, body.metadata, items)
    return JSONResponse(_shown(conversation_id, made))


async def get_conversation(request: Request) -> Response:
    """Reply to GET /v1/conversations/{id} with a conversation."""
    return JSONResponse(_shown(*await _found(request)))


async def update_conversation(request: Request) -> Response:
    """Reply to POST /v1/conversations/{id}: its metadata is replaced."""
    service, tenant = _service_and_tenant(request)
    body = await service.parsed(MetadataBody, request)
    conversation_id, _ = await _found(request)
    await service.conversations.describe(tenant, conversation_id, body.metadata)
    return JSONResponse(_shown(*await _found(request)))


async def delete_conversation(request: Request) -> Response:
    """Reply to DELETE /v1/conversations/{id}: the conversation and its items are deleted."""
    service, tenant = _service_and_tenant(request)
    conversation_id = request.path_params["conversation_id"]
    if not await service.conversations.delete(tenant, conversation_id):
        raise no_conversation(conversation_id)
    return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


async def add_items(request: Request) -> Response:
    """Reply to POST /v1/conversations/{id}/items with the items, which are added to the end."""
    service, tenant = _service_and_tenant(request)
    conversation_id = request.path_params["conversation_id"]
    body = await service.parsed(ItemsBody, request)
    _, stored = await _found(request)
    items = shown_items(await resolved(service, tenant, "items", body.items, stored.items), conversation_id)
    if not await service.conversations.append(tenant, conversation_id, items):
        raise no_conversation(conversation_id)
    return JSONResponse(listed(items, more=False))


async def list_items(request: Request) -> Response:
    """Reply to GET /v1/conversations/{id}/items with the items: the last one first, or the first one with `order=asc`;
    at most `limit`, and those behind the item `after`. Together they are no longer than a request's body may be, unless
    one is, because a client may leave many replies unread.
    """
    service, tenant = _service_and_tenant(request)
    conversation_id, stored = await _found(request)
    ids, more = page_bounds(request, stored.items)
    items, left = await service.conversations.page(tenant, conversation_id, ids, service.limits.body)
    return JSONResponse(listed(items, more=more or left))


async def get_item(request: Request) -> Response:
    """Reply to GET /v1/conversations/{id}/items/{item} with an item."""
    service, tenant = _service_and_tenant(request)
    conversation_id, stored = await _found(request)
    item_ids = [one for one in stored.items if one == request.path_params["item_id"]]
    items = await service.conversations.items(tenant, conversation_id, item_ids)
    if not items:
        raise _no_item(request)
    return JSONResponse(items[0])


async def delete_item(request: Request) -> Response:
    """Remove an item for DELETE /v1/conversations/{id}/items/{item}, and reply with the remaining conversation."""
    service, tenant = _service_and_tenant(request)
    conversation_id, stored = await _found(request)
    item_id = request.path_params["item_id"]
    if item_id not in stored.items or not await service.conversations.remove(tenant, conversation_id, item_id):
        raise _no_item(request)
    return JSONResponse(_shown(conversation_id, stored))


CONVERSATION_ROUTES = [
    Route("/v1/conversations", create_conversation, methods=["POST"]),
    Route("/v1/conversations/{conversation_id}", get_conversation, methods=["GET"]),
    Route("/v1/conversations/{conversation_id}", update_conversation, methods=["POST"]),
    Route("/v1/conversations/{conversation_id}", delete_conversation, methods=["DELETE"]),
    Route("/v1/conversations/{conversation_id}/items", add_items, methods=["POST"]),
    Route("/v1/conversations/{conversation_id}/items", list_items, methods=["GET"]),
    Route("/v1/conversations/{conversation_id}/items/{item_id}", get_item, methods=["GET"]),
    Route("/v1/conversations/{conversation_id}/items/{item_id}", delete_item, methods=["DELETE"]),
]


def _no_item(request: Request) -> ApiError:
    message = f"the conversation has no item {shortened(request.path_params['item_id'])}"
    return ApiError(404, message, "item_id", "item_not_found")


def _service_and_tenant(request: Request) -> tuple[Service, str]:
    service: Service = request.app.state.service
    return service, service.tokens.tenant(request).name


async def _found(request: Request) -> tuple[str, StoredConversation]:
    """Return the conversation of a request, and its id. Raises ApiError (404)."""
    service, tenant = _service_and_tenant(request)
    conversation_id = request.path_params["conversation_id"]
    if not (stored := await service.conversations.find(tenant, conversation_id)):
        raise no_conversation(conversation_id)
    return conversation_id, stored


def _shown(conversation_id: str, stored: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation_id,
        "object": "conversation",
        "created_at": stored.created_at,
        "metadata": stored.metadata,
    }
