"""The endpoints POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..agent_engine import Answer
from ..generation.tokens import PromptError
from ..pool import PoolExhaustedError
from ..scheduling.request import EngineClosedError, Token
from .auth import Tenant
from .openai.errors import ApiError, invalid
from .openai.reading import Reader
from .openai.schema import ChatBody, CompletionBody, CompletionFields
from .openai.shapes import ChatLikelihoods, ChatShape, Envelope, Shape, TextLikelihoods, TextShape
from .service import Service
from .worker import Generation, Prompt

# -- Replies: one JSON object, or a stream of server-sent events -------------------------------------------------------

log = logging.getLogger(__name__)

UNREAD_SECONDS = 5.0  # from the time limit to the end of the connection, so that the client can read its reply

_Result = TypeVar("_Result")


async def answer(
    service: Service, request: Request, generation: Generation, shape: Shape, body: CompletionFields
) -> Response:
    """Return the reply to a request: the complete answer, or a stream if the body requests it.

    `generation` is the queued answer, `shape` the format of the reply. The answer is cancelled when the client
    disconnects, and at the time limit. A stream is returned after its first token, so that an earlier error has an HTTP
    status of its own. Raises ApiError, ClientDisconnect.
    """
    with ExitStack() as ends:
        ends.callback(generation.cancel)
        deadline = _abandon_in_time(generation, request, service.limits.seconds, ends)
        try:
            if body.stream:
                first = await anext(generation, None)
            else:
                async for token in generation:
                    await _run(shape, partial(shape.add, token))
        except ClientDisconnect:
            service.metrics.cancelled.inc()
            raise
        except Exception as error:
            raise refusal(error, service) from error
        if body.stream:
            usage = body.stream_options.include_usage
            events = _events(service, generation, first, shape, usage)
            return _Stream(events, service, generation, deadline, ends.pop_all())
    assert generation.answer
    service.answered(generation)
    return JSONResponse(await _run(shape, partial(shape.whole, generation.answer)))


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of the coroutine `work`. If the client disconnects first, cancel `work` and raise
    ClientDisconnect.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_client_disconnects(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def refusal(error: Exception, service: Service) -> ApiError:
    """Return the API error for an exception of the engine. Log an unexpected one, and return 500 for it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError(504, f"no answer within {service.limits.seconds:g} seconds", code="timeout")
    if isinstance(error, PromptError):
        return invalid(str(error), "prompt")
    if isinstance(error, PoolExhaustedError):
        return invalid(f"prompt and answer need more memory than there is: {error}", "max_tokens", "context_too_large")
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="not_ready", retry_after=1)
    log.error("an answer failed", exc_info=error)
    return ApiError(500, "the engine has failed; its log says why", code="internal_error")


async def _client_disconnects(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel_on_disconnect(generation: Generation, receive: Receive) -> None:
    await _client_disconnects(receive)
    generation.abandon(ClientDisconnect())


def _abandon_in_time(generation: Generation, request: Request, seconds: float, ends: ExitStack) -> float:
    """Start to watch an answer: when its client disconnects, or after `seconds`, it is abandoned.

    Closing `ends` stops the watching. Return the deadline, in the event loop's time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    ends.callback(asyncio.ensure_future(_cancel_on_disconnect(generation, request.receive)).cancel)
    ends.callback(loop.call_at(deadline, generation.abandon, TimeoutError()).cancel)
    return deadline


class _Stream(StreamingResponse):
    """Reply with a stream of server-sent events. If it ends early, the answer is cancelled.

    It ends UNREAD_SECONDS after `deadline`, even if the client does not read.
    """

    def __init__(
        self, events: AsyncIterator[bytes], service: Service, generation: Generation, deadline: float, ends: ExitStack
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._service = service
        self._generation = generation
        self._deadline = deadline
        self._ends = ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._ends:
            try:
                async with asyncio.timeout_at(self._deadline + UNREAD_SECONDS):
                    await self.stream_response(send)
            except TimeoutError:
                log.info("a client did not read its answer in time")
            except ClientDisconnect:
                log.info("a client left its answer")
            finally:
                if not self._generation.answer:
                    self._service.metrics.cancelled.inc()


async def _events(
    service: Service, generation: Generation, first: Token | None, shape: Shape, usage: bool
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a stream: the opening, the `first` token (None if the answer has none), the other
    tokens, and the end.

    With `usage`, the last event before the end has the numbers of tokens. An exception becomes an event with the error.
    """
    try:
        if events := _encoded([*shape.opening(), *(shape.chunks(first) if first else ())]):
            yield events
        async for token in generation:
            if events := await _run(shape, partial(_next, shape, token)):
                yield events
        assert generation.answer
        service.answered(generation)
        yield await _run(shape, partial(_ending, shape, generation.answer, usage=usage))
    except ClientDisconnect:
        raise
    except Exception as error:  # noqa: BLE001 - the status was sent already: an event has the error
        yield _encoded([refusal(error, service).body])


async def _run(shape: Shape, make: Callable[[], _Result]) -> _Result:
    """Return the result of `make`, a call of a method of `shape`. It runs on a thread if `shape.may_take_long`."""
    return await asyncio.to_thread(make) if shape.may_take_long else make()


def _next(shape: Shape, token: Token) -> bytes:
    return _encoded(shape.chunks(token))


def _ending(shape: Shape, whole: Answer, *, usage: bool) -> bytes:
    return _encoded([*shape.closing(whole), *([shape.usage(whole)] if usage else [])]) + b"data: [DONE]\n\n"


def _encoded(chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %s\n\n" % to_json(chunk, inf_nan_mode="null") for chunk in chunks)


async def chat(request: Request) -> Response:
    """Reply to POST /v1/chat/completions with the next message of a conversation."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(ChatBody, request)
    service.check_model(body.model)
    prompts = service.prompts
    logprobs = body.top_logprobs if body.logprobs else None
    tokens = await unless_disconnected(request, prompts.of_chat(body))
    prompt, given = _prompt(service, request, tenant, body, tokens, body.limit, logprobs, continues=prompts.keeps_space)
    first = next((message.content for message in body.messages if message.role == "user"), None)
    prompt = replace(prompt, label=service.label(first or ""))
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered]
    reader = Reader(prompts.markup, tokens, tools, several=body.parallel_tool_calls)
    likelihoods = None if logprobs is None else ChatLikelihoods(prompts.token_text, logprobs)
    shape = ChatShape(_envelope(service, body, given), reader, likelihoods)
    return await answer(service, request, service.ask(prompt), shape, body)


async def complete(request: Request) -> Response:
    """Reply to POST /v1/completions with the continuation of a text."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(CompletionBody, request)
    service.check_model(body.model)
    prompts = service.prompts
    tokens = await unless_disconnected(request, prompts.of_text(body.prompt))
    prompt, given = _prompt(service, request, tenant, body, tokens, body.max_tokens, body.logprobs)
    prompt = replace(prompt, label=service.label(body.prompt if isinstance(body.prompt, str) else ""))
    likelihoods = None if body.logprobs is None else TextLikelihoods(prompts.token_text, tokens, body.logprobs)
    shape = TextShape(_envelope(service, body, given), likelihoods)
    return await answer(service, request, service.ask(prompt), shape, body)


def _prompt(
    service: Service,
    request: Request,
    tenant: Tenant,
    body: CompletionFields,
    tokens: Sequence[int],
    max_tokens: int | None,
    logprobs: int | None,
    *,
    continues: bool = True,
) -> tuple[Prompt, str | None]:
    """Return the prompt for the engine, and the client's name for its agent; None without a name.

    `tokens` are the token ids of the prompt. `max_tokens` and `logprobs` are None if the request does not set them.
    With `continues`, the text of the answer keeps a space at its beginning. Raises ApiError (400).
    """
    agent_id, given = service.agent(request, tenant, body)
    limit = max_tokens or service.limits.max_tokens
    if body.min_tokens > limit:
        raise invalid(f"min_tokens: {body.min_tokens} is above the limit of {limit} tokens", "min_tokens")
    service.prompts.check_ids(body.stop_token_ids, "stop_token_ids")
    service.prompts.check_ids(body.logit_bias, "logit_bias")
    prompt = Prompt(
        agent_id=agent_id,
        keep=given is not None,
        tokens=tokens,
        max_tokens=limit,
        sampling=body.sampling(service.prompts.kept_by_xtc),
        stop=body.stop,
        stop_tokens=body.stop_token_ids,
        continues=continues,
        logprobs=0 if logprobs is None else max(1, logprobs),  # with 0, the token's own logprob would be missing
    )
    return prompt, given


def _envelope(service: Service, body: CompletionFields, given: str | None) -> Envelope:
    return Envelope(body.model, service.engine.spec.fingerprint, given, counts=body.stream_options.include_usage)
