"""What all endpoints need: who asks, what was sent, and an engine that answers."""

from __future__ import annotations

import asyncio
import gc
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from engine.api.auth import AGENT_HEADER, Tenant, Tokens
from engine.api.metrics import Metrics
from engine.api.openai.errors import ApiError, shortened
from engine.api.openai.prompts import Prompts
from engine.api.openai.schema import Asked, RequestBody
from engine.api.watching import Watching
from engine.api.worker import EngineThread, Generation, Prompt
from engine.startup import Engine

BODY_SECONDS = 30.0  # that a client has to send it, at most
SHORT_BODY_BYTES = 4096  # of a body that is parsed at once, in a fraction of a millisecond

_Parsed = TypeVar("_Parsed", bound=RequestBody)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask for, at most."""

    body: int = 1 << 20  # bytes; parsing a megabyte may hold up the others for 10 milliseconds
    queue: int = 64  # answers on their way, those that wait included
    seconds: float = 600.0  # from a request to the end of its answer
    max_tokens: int = 512  # of an answer, when the request sets no limit
    connections: int = 1024
    for_each: int = 256  # connections of one address


class Service:
    """One model, served."""

    def __init__(self, worker: EngineThread, model_id: str, tokens: Tokens, limits: Limits) -> None:
        self.worker = worker
        self.model_id = model_id
        self.limits = limits
        self.metrics = Metrics(lambda: worker.pending)
        self.watching = Watching(worker)
        self.closing = False
        self._tokens = tokens
        self._parser = ThreadPoolExecutor(1, "bodies")
        self._engine: Engine | None = None
        self._prompts: Prompts | None = None

    async def load(self) -> None:
        """Return when prompts are taken. Raises what loading the model raises."""
        engine = await self.worker.loaded()
        self._prompts = Prompts(engine.tokenizer, engine.spec)
        self.metrics.watch(engine)
        self._engine = engine
        gc.collect()
        gc.freeze()  # else a collection looks at all that was imported, for a tenth of a second

    @property
    def alive(self) -> bool:
        """Whether it will take prompts, or does; False when the engine has failed, and nothing but a restart helps."""
        return self._engine is None or self.worker.running

    @property
    def ready(self) -> bool:
        """Whether the engine accepts prompts."""
        return self._engine is not None and self.worker.running and not self.closing

    @property
    def engine(self) -> Engine:
        """To look at; it belongs to the worker's thread. Raises ApiError while there is none."""
        if not self._engine or not self.ready:
            doing = "being stopped" if self.closing else "loading its model" if not self._engine else "out of order"
            raise ApiError(503, f"the engine is {doing}", code="not_ready", retry_after=1)
        return self._engine

    @property
    def prompts(self) -> Prompts:
        """Of the model. Raises ApiError while there is none."""
        assert self.engine
        assert self._prompts
        return self._prompts

    def tenant(self, request: Request) -> Tenant:
        """Whose agents are asked for. Raises ApiError when that is nobody who may."""
        return self._tokens.tenant(request)

    def who(self, request: Request) -> Tenant:
        """Who asks for metrics. Raises ApiError when that is nobody who may."""
        return self._tokens.who(request)

    async def body(self, request: Request) -> bytes:
        """What was sent. Raises ApiError when it is too much, or too slow."""
        length = request.headers.get("Content-Length", "0")
        if int(length) > self.limits.body:
            raise self._too_long()  # who expects to be asked for it is not
        body = bytearray()
        within = min(BODY_SECONDS, self.limits.seconds)
        try:
            async with asyncio.timeout(within):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.body:
                        raise self._too_long()
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {within:g} seconds", code="timeout") from error
        return bytes(body)

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self.limits.body} bytes", code="body_too_large")

    async def parsed(self, kind: type[_Parsed], request: Request) -> _Parsed:
        """What was sent, as a body of that kind; a long one is parsed beside the event loop. Raises ApiError."""
        raw = await self.body(request)
        if len(raw) <= SHORT_BODY_BYTES:
            return kind.parse(raw)
        return await asyncio.get_running_loop().run_in_executor(self._parser, kind.parse, raw)

    def check_model(self, model: str) -> None:
        """Raises ApiError for a model that is not served."""
        if model != self.model_id:
            raise ApiError(
                404, f"model: {shortened(model)} is not served here, {self.model_id!r} is", "model", "model_not_found"
            )

    def agent(self, request: Request, tenant: Tenant, asked: Asked) -> tuple[str, str | None]:
        """The engine's id of the agent that a prompt is of, and what the client calls it.

        The first that is given of `agent_id`, the header and `user`; a prompt without an agent gets one of its own,
        which nothing is kept for.
        """
        header = request.headers.get(AGENT_HEADER)
        for param, given in (("agent_id", asked.agent_id), (AGENT_HEADER, header), ("user", asked.user)):
            if given is not None:
                return tenant.agent(given, param), given
        return tenant.agent(f"anon-{uuid.uuid4().hex}", "agent_id"), None

    def answered(self, generation: Generation) -> None:
        """Count an answer that is complete, and show it."""
        assert generation.answer
        self.metrics.answered(generation.answer, generation.prompt.agent_id)
        self.watching.answered(generation.answer, kept=generation.prompt.keep)

    def ask(self, prompt: Prompt) -> Generation:
        """Have it answered. Raises ApiError when too many wait already."""
        assert self.engine
        if self.worker.pending >= self.limits.queue:
            raise ApiError(
                429, f"{self.limits.queue} prompts wait already, as many as may", code="queue_full", retry_after=1
            )
        return self.worker.generate(prompt)
