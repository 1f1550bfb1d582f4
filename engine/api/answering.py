"""An answer on its way to a client: whole, or streamed as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.api.errors import ApiError, invalid
from engine.api.schema import Asked
from engine.api.service import Service
from engine.api.shapes import Shape
from engine.api.worker import Generation
from engine.batch_engine import PromptError
from engine.pool import PoolExhaustedError
from engine.request import EngineClosedError, Token

log = logging.getLogger(__name__)

UNREAD = 5.0  # seconds that a client has for what waits to be read when its time is up

_Result = TypeVar("_Result")


async def answer(service: Service, request: Request, generation: Generation, shape: Shape, body: Asked) -> Response:
    """The reply to a request whose prompt is being answered. If the client leaves, or its time is up, so is the answer.

    A stream begins with the first token, so that what goes wrong before it has a status of its own.
    """
    deadline = asyncio.get_running_loop().time() + service.limits.seconds
    tokens = aiter(generation)
    streamed = _Stream(service, generation, tokens, shape, deadline, usage=body.stream_options.include_usage)
    try:
        async with asyncio.timeout_at(deadline):
            await unless_gone(request, streamed.begin() if body.stream else _all(tokens, shape))
    except ClientDisconnect:
        service.metrics.cancelled.inc()
        raise
    except Exception as error:
        raise refusal(error, service) from error
    finally:
        if not streamed.begun:
            generation.cancel()
    if body.stream:
        return streamed
    assert generation.answer
    service.metrics.answered(generation.answer)
    return JSONResponse(shape.whole(generation.answer))


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`. Raises ClientDisconnect, and cancels it, when the client does not wait for it."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def refusal(error: Exception, service: Service) -> ApiError:
    """What a client is told of an error of the engine's."""
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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _all(tokens: AsyncIterator[Token], shape: Shape) -> None:
    async for token in tokens:
        shape.add(token)


class _Stream(StreamingResponse):
    """Server-sent events, a chunk each."""

    def __init__(
        self,
        service: Service,
        generation: Generation,
        tokens: AsyncIterator[Token],
        shape: Shape,
        deadline: float,
        *,
        usage: bool,
    ) -> None:
        super().__init__(self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._service = service
        self._generation = generation
        self._tokens = tokens
        self._shape = shape
        self._deadline = deadline
        self._usage = usage
        self._first: Token | None = None
        self.begun = False

    async def begin(self) -> None:
        """Wait for the first token. Raises what the engine raises instead."""
        self._first = await anext(self._tokens, None)
        self.begun = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._deadline + UNREAD):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.info("a client did not read its answer in time")
        finally:
            if not self._generation.answer:
                self._service.metrics.cancelled.inc()
            self._generation.cancel()

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks():
                yield _event(chunk)
        except Exception as error:  # noqa: BLE001 - the status is sent: an event tells it
            yield _event(refusal(error, self._service).body)
        else:
            yield b"data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        for chunk in self._shape.opening():
            yield chunk
        token = self._first
        while token:
            for chunk in self._shape.chunks(token):
                yield chunk
            async with asyncio.timeout_at(self._deadline):
                token = await anext(self._tokens, None)
        answer = self._generation.answer
        assert answer
        self._service.metrics.answered(answer)
        for chunk in self._shape.closing(answer):
            yield chunk
        if self._usage:
            yield self._shape.usage(answer)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()
