"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from engine.api.answering import answer, unless_gone
from engine.api.auth import Tenant
from engine.api.openai.likelihoods import ChatLikelihoods, TextLikelihoods
from engine.api.openai.reading import Reader
from engine.api.openai.schema import Asked, ChatBody, CompletionBody
from engine.api.openai.shapes import ChatShape, Envelope, TextShape
from engine.api.service import Service
from engine.api.worker import Prompt


async def chat(request: Request) -> Response:
    """The next message of a conversation."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(ChatBody, request)
    service.check_model(body.model)
    prompts = service.prompts
    logprobs = body.top_logprobs if body.logprobs else None
    tokens = await unless_gone(request, prompts.of_chat(body))
    prompt, given = _prompt(service, request, tenant, body, tokens, body.limit, logprobs, continues=prompts.keeps_space)
    first = next((message.content for message in body.messages if message.role == "user"), None)
    prompt = replace(prompt, label=service.label(first or ""))
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered]
    reader = Reader(prompts.markup, tokens, tools, several=body.parallel_tool_calls)
    likelihoods = None if logprobs is None else ChatLikelihoods(prompts.token_text, logprobs)
    shape = ChatShape(_envelope(service, body, given), reader, likelihoods)
    return await answer(service, request, service.ask(prompt), shape, body)


async def complete(request: Request) -> Response:
    """The continuation of a text."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(CompletionBody, request)
    service.check_model(body.model)
    prompts = service.prompts
    tokens = await unless_gone(request, prompts.of_text(body.prompt))
    prompt, given = _prompt(service, request, tenant, body, tokens, body.max_tokens, body.logprobs)
    prompt = replace(prompt, label=service.label(body.prompt if isinstance(body.prompt, str) else ""))
    likelihoods = None if body.logprobs is None else TextLikelihoods(prompts.token_text, tokens, body.logprobs)
    shape = TextShape(_envelope(service, body, given), likelihoods)
    return await answer(service, request, service.ask(prompt), shape, body)


def _prompt(
    service: Service,
    request: Request,
    tenant: Tenant,
    body: Asked,
    tokens: Sequence[int],
    max_tokens: int | None,
    logprobs: int | None,
    *,
    continues: bool = True,
) -> tuple[Prompt, str | None]:
    """The prompt for the engine, and the client's name for the agent."""
    agent_id, given = service.agent(request, tenant, body)
    prompt = Prompt(
        agent_id=agent_id,
        keep=given is not None,
        tokens=tokens,
        max_tokens=max_tokens or service.limits.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=body.stop,
        continues=continues,
        logprobs=0 if logprobs is None else max(1, logprobs),  # a token's own logprob comes with those of others
    )
    return prompt, given


def _envelope(service: Service, body: Asked, given: str | None) -> Envelope:
    return Envelope(body.model, service.engine.spec.fingerprint, given, counts=body.stream_options.include_usage)
