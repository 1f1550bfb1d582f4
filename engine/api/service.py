"""State and functions that all endpoints share: the web page, the request's tenant, body and model, and the queue."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive

from kvpage_server.http import discard_body
from kvpage_server.web import page_response

from ..chains import is_unnamed, unnamed_agent
from ..tiers.store import AgentCacheStore
from .auth import AGENT_HEADER, Tenant, Tokens, credential, tenant_of
from .diagnosis import PromptLog, VolatileLines
from .metrics import Metrics
from .models import Models, ServedModel
from .openai.errors import ApiError, invalid, shortened
from .openai.schema import CompletionFields, RequestBody
from .records import ConversationRecords, Records, ResponseRecords
from .watching import MOST_WATCHERS, Watching
from .worker import Answers, Prompt

# -- /: the page in the browser, and its events ------------------------------------------------------------------------

PAGE = Path(__file__).with_name("browser") / "main.html"
_FORGET_TOKEN = '<button class="button" id="leave" type="button" hidden>Forget the token</button>'


async def page(request: Request) -> Response:
    """Return the web page. It contains no data; its script gets them from `events`."""
    return page_response("engine", PAGE, source="model", leave=_FORGET_TOKEN)


async def events(request: Request) -> Response:
    """Reply with a stream of `Watching.events` for the tenant. Raises ApiError (503) if too many pages are open."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    watchers, share = service.watching.watchers, service.tokens.share(MOST_WATCHERS)
    if watchers.total() >= MOST_WATCHERS and watchers[tenant.name] >= share:
        raise ApiError(503, f"{MOST_WATCHERS} pages are shown already, as many as may", retry_after=10)
    service.check_ready()
    events = service.watching.events(tenant, ready=lambda: service.ready, store_health=lambda: service.store_health)
    return StreamingResponse(events, media_type="text/event-stream")


PAGE_ROUTES = [
    Route("/", page, include_in_schema=False),
    Route("/page/events", events, include_in_schema=False),
    Mount("/page", StaticFiles(directory=PAGE.parent, packages=[("kvpage_server.web", "shared")])),
]


LABEL_TEXT, LABEL_LETTERS = 1000, 60  # characters: of the text from which a label is made, and of the label
BODY_SECONDS = 30.0  # time limit for a client to send a body
SHORT_BODY_BYTES = 4096  # a body up to this size is parsed on the event loop, in a fraction of a millisecond

_Parsed = TypeVar("_Parsed", bound=RequestBody)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests, answers and connections, from the command line."""

    body: int = 1 << 20  # bytes; parsing a megabyte may delay other requests by 10 milliseconds
    queue: int = 64  # unfinished answers, including waiting ones; a tenant below its share may exceed it
    seconds: float = 600.0  # from a request to the end of its answer
    max_tokens: int = 512  # of an answer, if the request sets no limit
    connections: int = 1024
    for_each: int = 256  # connections of one address


class Service:
    """State of a server. All endpoints share it."""

    def __init__(
        self, models: Models, tokens: Tokens, limits: Limits, records: Records, *, hash_labels: bool = False
    ) -> None:
        """Serve `models`. With `hash_labels`, contexts without a name are shown as a hash, and not by their first
        words.
        """
        self.models = models
        self.tokens = tokens
        self.limits = limits
        self.metrics = Metrics(models, lambda: self._pending)
        self.watching = Watching(models)
        self.prompt_log = PromptLog()
        self._records = records
        self.responses = ResponseRecords(records)
        self.conversations = ConversationRecords(records)
        self.closing = False
        self.volatile_lines: VolatileLines = "keep"
        self._hash_labels = hash_labels
        self._parser = ThreadPoolExecutor(1, "bodies")
        self._started = False
        self._waiting: Counter[str] = Counter()  # requests that wait for a model, by tenant

    async def start(self) -> None:
        """Load the first model, and accept prompts. Raises the exceptions of `Models.start`."""
        await self.models.start()
        gc.collect()
        gc.freeze()  # otherwise a collection would visit all imported objects, for a tenth of a second
        self._started = True

    @property
    def alive(self) -> bool:
        """Whether no engine has failed. If one has, only a restart of the process helps."""
        return not any(model.failed for model in self.models.by_name.values())

    @property
    def ready(self) -> bool:
        """Whether prompts are accepted."""
        return self._started and self.alive and not self.closing

    @property
    def store_health(self) -> dict[str, object]:
        """State of the page server for a health check; empty if there is none, or no model is loaded. It is that of the
        first loaded model that has a failure, and the number of records that wait in memory for it.

        The engine accepts prompts without its page server, so an outage does not make it unready.
        """
        found = [_store_health(model.engine.store) for model in self.models.loaded if model.engine.pages]
        state = next((one for one in found if one["store"] != "ok"), found[0] if found else {})
        waiting = self._records.waiting
        return {**state, "waiting": waiting} if waiting else state

    def check_ready(self) -> None:
        """Raise ApiError (503) unless prompts are accepted."""
        if not self.ready:
            doing = "being stopped" if self.closing else "out of order" if self._started else "loading its model"
            raise ApiError(503, f"the engine is {doing}", code="not_ready", retry_after=1)

    async def model(self, request: Request, tenant: Tenant, name: str) -> ServedModel:
        """Return the model with this name, which stays loaded until the end of the request. If it is not loaded, wait
        for that.

        Raises ApiError: 404 for an unknown name; 429 if the request has to wait, and the queue is full; 503 if the
        model cannot be loaded; 504 if it is not loaded in time. Raises ClientDisconnect.
        """
        model = self.models.named(name)
        self.check_ready()
        if model.loaded:
            request.state.ends.enter_context(model.in_use())
            return model
        self._check_queue(tenant.name, 1)
        self._waiting[tenant.name] += 1
        try:
            async with asyncio.timeout(self.limits.seconds):
                await unless_disconnected(request, self.models.wait_for(model, request.state.ends))
        except TimeoutError as error:
            message = f"model: {name!r} was not loaded within {self.limits.seconds:g} seconds"
            raise ApiError(504, message, "model", "timeout") from error
        finally:
            self._waiting -= Counter({tenant.name: 1})
        return model

    async def body(self, request: Request) -> bytes:
        """Return the bytes of a request's body. Raises ApiError: 413 if it is too long, 408 after BODY_SECONDS."""
        length = request.headers.get("Content-Length", "0")
        if int(length) > self.limits.body:
            await discard_body(request)
            raise self._too_long()  # before 100 Continue, so that a client which waits for it does not send the body
        body = bytearray()
        within = min(BODY_SECONDS, self.limits.seconds)
        try:
            async with asyncio.timeout(within):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.body:
                        await discard_body(request)
                        raise self._too_long()
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {within:g} seconds", code="timeout") from error
        return bytes(body)

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self.limits.body} bytes", code="body_too_large")

    async def parsed(self, kind: type[_Parsed], request: Request) -> _Parsed:
        """Parse the body of a request as `kind`. A body of more than SHORT_BODY_BYTES is parsed on a thread.

        Raises ApiError (400) for an invalid body, and as `body`.
        """
        raw = await self.body(request)
        if len(raw) <= SHORT_BODY_BYTES:
            return kind.parse(raw)
        return await asyncio.get_running_loop().run_in_executor(self._parser, kind.parse, raw)

    def agent(self, request: Request, tenant: Tenant, body: CompletionFields) -> tuple[str, str | None]:
        """Return the engine's id of a prompt's agent, and the client's name for the agent.

        The name is the field `agent_id`, the header, or the field `user`, whichever exists first. A prompt without a
        name gets the id of a new agent, and None as the name. Raises ApiError (400) for an invalid name, and if the
        header and `agent_id` differ.
        """
        header = request.headers.get(AGENT_HEADER)
        if None not in (header, body.agent_id) and header != body.agent_id:
            names = f"{shortened(body.agent_id)} and {shortened(header)}"
            raise invalid(f"agent_id and the header {AGENT_HEADER} name different agents: {names}", "agent_id")
        user = tenant.agent_of_user(body.user) if body.user else None
        for param, given in (("agent_id", body.agent_id), (AGENT_HEADER, header), ("user", user)):
            if given is not None:
                if is_unnamed(given):
                    raise invalid(f"{param} must not be that of a prompt without a name: {shortened(given)}", param)
                return tenant.agent(given, param), given
        return self.unnamed(request, tenant), None

    def unnamed(self, request: Request, tenant: Tenant) -> str:
        """Return the engine's id of a new agent for a prompt without a name."""
        return tenant.agent(unnamed_agent(credential(request)), "agent_id")

    def label(self, text: str) -> str:
        """Return the label of a context without a name, which `kvpage` and the web pages show.

        It is the first words of `text`, the first text of a user in the prompt, or a hash of them with `hash_labels`.
        """
        words = " ".join(text[:LABEL_TEXT].split())
        if not words or not self._hash_labels:
            return words[:LABEL_LETTERS]
        return "#" + hashlib.blake2b(text.encode(errors="replace"), digest_size=4).hexdigest()

    def answered(self, answers: Answers) -> None:
        """Count the complete answers to a request in the metrics, and add them to the history for the web page."""
        for generation in answers.generations:
            assert generation.answer
            prompt = generation.prompt
            answer, warm = generation.answer, prompt.prewarms
            breakpoints = len(prompt.boundaries)
            self.metrics.answered(answer, prompt.agent_id, answers.model, breakpoints, prewarmed=warm)
            self.watching.answered(
                answer, answers.model, breakpoints, kept=prompt.keep, label=prompt.label, prewarmed=warm
            )

    def ask(self, model: ServedModel, prompts: Sequence[Prompt]) -> Answers:
        """Queue the prompts of a request, and return their answers. Raises ApiError (429) if the queue has no room for
        all of them and the tenant has its share of it.
        """
        self.check_ready()
        assert model.worker
        tenant = tenant_of(prompts[0].agent_id)
        self._check_queue(tenant, len(prompts))
        return model.worker.generate(prompts, tenant)

    @property
    def _pending(self) -> int:
        """Number of unfinished answers, and of requests that wait for a model."""
        return self._waiting.total() + sum(worker.pending for worker in self.models.workers)

    def _check_queue(self, tenant: str, prompts: int) -> None:
        """Raise ApiError (429) if the queue has no room for so many prompts of a tenant, and the tenant has its share
        of it; 400 if it never has.
        """
        queue, more = self.limits.queue, prompts - 1
        if more >= queue:
            raise invalid(f"n: a request has at most {queue} answers here, the length of the queue, got {prompts}", "n")
        has = self._waiting[tenant] + sum(worker.pending_of(tenant) for worker in self.models.workers)
        if self._pending + more >= queue and has + more >= self.tokens.share(queue):
            yours = f", {has} of them yours" if tenant else ""
            raise ApiError(
                429, f"{self._pending} answers of {queue} are due{yours}: the queue is full", None, "queue_full", 1
            )


def _store_health(store: AgentCacheStore) -> dict[str, object]:
    if outage := store.outage:
        return {"store": "unreachable", "reason": outage.reason, "seconds": round(outage.seconds)}
    if not store.connected:
        return {"store": "connecting"}
    failure = store.save_failures.get("page")
    return {"store": "not saving", "reason": failure} if failure else {"store": "ok"}


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of the coroutine `work`. If the client disconnects first, cancel `work` and raise
    ClientDisconnect.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(client_disconnects(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def client_disconnects(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
