"""The endpoints of Anthropic's API: POST /v1/messages and POST /v1/messages/count_tokens. A message is computed as the
answer in a chat.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .anthropic.schema import NAMES, CountBody, MessagesBody
from .anthropic.shapes import MessageEnvelope, MessageShape, message_id
from .auth import Tenant
from .completions import answer, conversation
from .diagnosis import AskedPrompt, difference
from .openai.errors import ApiError, renamed
from .service import Service, unless_disconnected


async def create_message(request: Request) -> Response:
    """Reply to POST /v1/messages with the next message of a conversation."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(MessagesBody, request)
    try:
        chat = body.chat()
        model = await service.model(request, tenant, chat.model)
        (prompt,), given, (reader,) = await conversation(service, model, request, tenant, chat, body.breakpoints())
    except ApiError as error:
        raise renamed(error, NAMES) from error
    reply_id = message_id()
    asked = AskedPrompt.of(tenant.name, chat, prompt.tokens)
    diagnostics = _diagnostics(service, tenant, body, asked)
    envelope = MessageEnvelope(reply_id, body.model, given, len(prompt.tokens), prompt.boundaries, diagnostics)
    shape = MessageShape(envelope, reader, silent=not body.max_tokens)
    answers = service.ask(model, [prompt])
    service.prompt_log.add(reply_id, asked)
    return await answer(service, request, answers, [shape], envelope, chat)


async def count_tokens(request: Request) -> Response:
    """Reply to POST /v1/messages/count_tokens with the number of tokens of a prompt."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(CountBody, request)
    try:
        model = await service.model(request, tenant, body.model)
        tokens = await unless_disconnected(request, model.prompts.of_chat(body.chat(), answered=False))
    except ApiError as error:
        raise renamed(error, NAMES) from error
    return JSONResponse({"input_tokens": len(tokens)})


MESSAGE_ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]


def _diagnostics(service: Service, tenant: Tenant, body: MessagesBody, prompt: AskedPrompt) -> dict[str, Any] | None:
    """Return the field `diagnostics`: why the prompt does not begin with that of the message that the request names;
    None if it does, or if the request names none.
    """
    if not body.diagnostics or body.diagnostics.previous_message_id is None:
        return None
    earlier = service.prompt_log.find(body.diagnostics.previous_message_id, tenant.name)
    if not earlier:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    found = difference(earlier, prompt)
    if not found:
        return None
    reason: dict[str, Any] = {"type": f"{found.part}_changed", "cache_missed_input_tokens": found.missed}
    return {"cache_miss_reason": reason | {"reusable_input_tokens": found.reusable, "message": found.message}}
