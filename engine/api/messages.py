"""The endpoints of Anthropic's API: POST /v1/messages and POST /v1/messages/count_tokens. A message is computed as the
answer in a chat.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..agent_engine import Answer
from .anthropic.schema import NAMES, CountBody, MessagesBody
from .anthropic.shapes import MessageEnvelope, MessageShape, message_id
from .completions import answer, conversation
from .diagnosis import AskedPrompt, diagnosis
from .openai.errors import ApiError, renamed
from .service import Service, unless_disconnected


async def create_message(request: Request) -> Response:
    """Reply to POST /v1/messages with the next message of a conversation."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(MessagesBody, request)
    reply_id = message_id()
    try:
        chat = body.chat()
        model = await service.model(request, tenant, chat.model)
        earlier = service.prompt_log.find(body.compared, tenant.name, "msg_")
        (prompt,), given, (reader,), asked = await conversation(
            service, model, request, tenant, chat, reply_id, body.breakpoints(), earlier
        )
        prompt = replace(prompt, prewarms=not body.max_tokens)
        diagnostics = partial(_diagnostics, body, earlier, asked)
        envelope = MessageEnvelope(reply_id, body.model, given, len(prompt.tokens), prompt.boundaries, diagnostics)
        shape = MessageShape(envelope, reader, silent=not body.max_tokens)
        return await answer(service, request, service.ask(model, [prompt]), [shape], envelope, chat)
    except ApiError as error:
        raise renamed(error, NAMES) from error


async def count_tokens(request: Request) -> Response:
    """Reply to POST /v1/messages/count_tokens with the number of tokens of a prompt."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(CountBody, request)
    try:
        model = await service.model(request, tenant, body.model)
        tokens = await unless_disconnected(request, model.prompts.of_chat(body.chat(), tenant.name, answered=False))
    except ApiError as error:
        raise renamed(error, NAMES) from error
    return JSONResponse({"input_tokens": len(tokens)})


MESSAGE_ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]


def _diagnostics(
    body: MessagesBody, earlier: AskedPrompt | None, prompt: AskedPrompt, answer: Answer | None
) -> dict[str, Any] | None:
    """Return the field `diagnostics`: why less than the prompt of the message that the request names was reused; None
    if nothing less was, or if the request names none. Without the answer, nothing is known of evicted tokens.
    """
    if body.compared is None:
        return None
    if not earlier:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    found = diagnosis(earlier, prompt, answer)
    own = {"reusable_input_tokens": found.reusable, **found.own_fields}
    if found.part in (None, "options"):
        return {"cache_miss_reason": {"type": "unavailable", **own}} if found.part or found.lost.why else None
    reason: dict[str, Any] = {"type": f"{found.part}_changed", "cache_missed_input_tokens": found.missed}
    return {"cache_miss_reason": reason | own}
