"""The endpoints POST /v1/chat/completions and POST /v1/completions. Their routes are in `server`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..agent_engine import Answer, Boundary
from ..generation.structure import Constraint, ConstraintError
from ..generation.tokens import PromptError
from ..memory.lifetimes import Lifetimes
from ..pool import PoolExhaustedError
from ..scheduling.request import EngineClosedError, Token
from ..tiers.store import AgentCacheStore
from .auth import Tenant, credential
from .diagnosis import NOT_READ, AskedPrompt, PromptLog, common_prefix, without_volatile
from .hints import Contexts, carry_out, hints_of
from .models import ServedModel
from .openai.errors import ApiError, invalid
from .openai.prompts import Prompts
from .openai.reading import CallOptions, Reader
from .openai.schema import LIFETIMES, MAX_ANSWERS, Breakpoint, ChatBody, CompletionBody, CompletionFields
from .openai.shapes import CHAT, TEXT, ChatLikelihoods, ChatShape, Envelope, Kind, Reply, TextLikelihoods, TextShape
from .service import Service, client_disconnects, unless_disconnected
from .worker import Answers, Prompt

# -- Replies: one JSON object, or a stream of server-sent events -------------------------------------------------------


class Shape(Protocol):
    """Format of an answer. `opening`, `chunks` and `closing` return the chunks of a stream. For an answer that is not
    streamed, `add` takes each token, and `choice` returns its part of the reply.
    """

    @property
    def may_take_long(self) -> bool: ...
    def opening(self) -> Iterable[Reply]: ...
    def chunks(self, token: Token) -> Iterable[Reply]: ...
    def closing(self, answer: Answer) -> Iterable[Reply]: ...
    def add(self, token: Token) -> None: ...
    def choice(self, answer: Answer) -> Reply: ...


class Replies(Protocol):
    """Format of a reply: a whole one with its choices, or the events of a stream, the last one, and the one of an
    error.
    """

    async def whole(self, choices: Sequence[Reply], prompts: Sequence[Answer], answers: Sequence[Answer]) -> Reply: ...
    def encoded(self, chunks: Iterable[Reply]) -> bytes: ...
    async def ending(self, prompts: Sequence[Answer], answers: Sequence[Answer]) -> bytes: ...
    def failure(self, error: ApiError) -> bytes: ...


log = logging.getLogger(__name__)

UNREAD_SECONDS = 5.0  # from the time limit to the end of the connection, so that the client can read its reply

_Result = TypeVar("_Result")


async def answer(
    service: Service,
    request: Request,
    answers: Answers,
    shapes: Sequence[Shape],
    envelope: Replies,
    body: CompletionFields,
) -> Response:
    """Return the reply to a request: the complete answers, or a stream if the body requests it.

    `answers` are queued, `shapes` are their formats. The answers are cancelled when the client disconnects, and at the
    time limit. A stream is returned after its first token, so that an earlier error has an HTTP status of its own.
    Raises ApiError, ClientDisconnect.
    """
    with ExitStack() as ends:
        ends.callback(answers.cancel)
        deadline = _abandon_in_time(answers, request, service.limits.seconds, ends)
        try:
            if body.stream:
                first = await anext(answers)
            else:
                async for index, event in answers:
                    if isinstance(event, Token):
                        await _run(shapes[index], partial(shapes[index].add, event))
        except ClientDisconnect:
            service.metrics.cancelled.inc()
            raise
        except Exception as error:
            raise refusal(error, service) from error
        if body.stream:
            events = _events(service, answers, first, shapes, envelope)
            return _Stream(events, service, answers, deadline, ends.pop_all())
    service.answered(answers)
    choices = [await _run(shapes[i], partial(shapes[i].choice, whole)) for i, whole in enumerate(answers.whole)]
    return JSONResponse(await envelope.whole(_best(choices, shapes, body), answers.of_prompts, answers.whole))


def _best(choices: list[dict[str, Any]], shapes: Sequence[Shape], body: CompletionFields) -> list[dict[str, Any]]:
    """Return the `n` of `best_of` choices of each prompt whose tokens have the highest mean log-probability, the best
    first and numbered anew. If `n` equals `best_of`, return `choices` unchanged.
    """
    means = [shape.mean_logprob for shape in shapes if isinstance(shape, TextShape)]
    if body.choices == body.n or not means:
        return choices
    best: list[dict[str, Any]] = []
    for start in range(0, len(choices), body.choices):
        ranked = sorted(range(start, start + body.choices), key=lambda i: -means[i])
        best += [choices[i] for i in ranked[: body.n]]
    return [choice | {"index": index} for index, choice in enumerate(best)]


def refusal(error: Exception, service: Service) -> ApiError:
    """Return the API error for an exception of the engine. An unexpected exception is logged, and becomes status
    500.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError(504, f"no answer within {service.limits.seconds:g} seconds", code="timeout")
    if isinstance(error, PromptError):
        return invalid(str(error), "prompt")
    if isinstance(error, ConstraintError):
        named = f"{error.field}: " if error.field else ""
        return invalid(f"{named}the answer's constraint failed: {error}", error.field, "constraint_too_large")
    if isinstance(error, PoolExhaustedError):
        return invalid(f"prompt and answer need more memory than there is: {error}", "max_tokens", "context_too_large")
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="not_ready", retry_after=1)
    log.error("an answer failed", exc_info=error)
    return ApiError(500, "the engine has failed; its log says why", code="internal_error")


async def _cancel_on_disconnect(answers: Answers, receive: Receive) -> None:
    await client_disconnects(receive)
    answers.abandon(ClientDisconnect())


def _abandon_in_time(answers: Answers, request: Request, seconds: float, ends: ExitStack) -> float:
    """Start to watch an answer: when its client disconnects, or after `seconds`, it is abandoned.

    Closing `ends` stops the watching. Return the deadline, in the event loop's time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    ends.callback(asyncio.ensure_future(_cancel_on_disconnect(answers, request.receive)).cancel)
    ends.callback(loop.call_at(deadline, answers.abandon, TimeoutError()).cancel)
    return deadline


class _Stream(StreamingResponse):
    """Reply with a stream of server-sent events. If it ends early, the answer is cancelled.

    It ends UNREAD_SECONDS after `deadline`, even if the client does not read.
    """

    def __init__(
        self, events: AsyncIterator[bytes], service: Service, answers: Answers, deadline: float, ends: ExitStack
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._service = service
        self._answers = answers
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
                if not self._answers.complete:
                    self._service.metrics.cancelled.inc()


async def _events(
    service: Service,
    answers: Answers,
    first: tuple[int, Token | Answer],
    shapes: Sequence[Shape],
    envelope: Replies,
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a stream: the openings with the `first` event, the further tokens, and the ends.

    An exception becomes an event.
    """
    try:
        index, event = first
        opening = envelope.encoded(chunk for shape in shapes for chunk in shape.opening())
        if events := opening + envelope.encoded(await _run(shapes[index], partial(_next, shapes[index], event))):
            yield events
        async for index, event in answers:
            if events := envelope.encoded(await _run(shapes[index], partial(_next, shapes[index], event))):
                yield events
        service.answered(answers)
        yield await envelope.ending(answers.of_prompts, answers.whole)
    except ClientDisconnect:
        raise
    except Exception as error:  # noqa: BLE001 - the status was sent already: an event has the error
        yield envelope.failure(refusal(error, service))


async def _run(shape: Shape, make: Callable[[], _Result]) -> _Result:
    """Return the result of `make`, a call of a method of `shape`. It runs on a thread if `shape.may_take_long`."""
    return await asyncio.to_thread(make) if shape.may_take_long else make()


def _next(shape: Shape, event: Token | Answer) -> list[dict[str, Any]]:
    return list(shape.chunks(event) if isinstance(event, Token) else shape.closing(event))


async def chat(request: Request) -> Response:
    """Reply to POST /v1/chat/completions with the next message of a conversation."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(ChatBody, request)
    if any(mark.ttl == "12h" for message in body.messages for mark in message.marks):
        raise invalid("prompt_cache_breakpoint: this API has no ttl of 12h, /v1/responses has it", "messages")
    model = await service.model(request, tenant, body.model)
    asked, given, readers, _ = await conversation(service, model, request, tenant, body, f"chat_{uuid4().hex}")
    envelope = _envelope(model, CHAT, body, given, asked, asked[0].boundaries)
    shapes = []
    for i, reader in enumerate(readers):
        likelihoods = ChatLikelihoods(model.prompts.token_text, body.top_logprobs) if body.logprobs else None
        shapes.append(ChatShape(envelope, i, reader, likelihoods))
    return await answer(service, request, service.ask(model, asked), shapes, envelope, body)


async def conversation(
    service: Service,
    model: ServedModel,
    request: Request,
    tenant: Tenant,
    body: ChatBody,
    reply_id: str,
    breakpoints: Sequence[Breakpoint] | None = None,
    compared: AskedPrompt | None = None,
) -> tuple[list[Prompt], str | None, list[Reader], AskedPrompt]:
    """Return the prompts of a conversation for the engine, one for each choice, the client's name for the agent, a
    reader of each answer, and the prompt for a comparison with later ones, which is logged as that of `reply_id`.
    `breakpoints` are by default those of the body. `compared` is the prompt of the reply that the request names.

    Raises ApiError (400) for a conversation that the model or its template refuses, and ClientDisconnect.
    """
    prompts = model.prompts
    logprobs = body.top_logprobs if body.logprobs else None
    agent_id = service.agent(request, tenant, body)[1]
    log, comparable = service.prompt_log, AskedPrompt.of(tenant.name, agent_id, credential(request), body)
    if earlier := log.last(comparable):
        comparable.find_volatile(earlier[-1])
    volatile = partial(without_volatile, lines=sorted(comparable.volatile), mode=service.volatile_lines)
    changed = volatile(body)
    comparable.moved = service.volatile_lines == "move" and changed is not body
    body = changed
    tokens = await unless_disconnected(request, prompts.of_chat(body, tenant.name))
    comparable.tokens.extend(tokens)
    constraint, written = await unless_disconnected(request, prompts.constraint(body, tenant.name, tokens))
    first = next((message.content for message in body.messages if message.role == "user"), None)
    continues = prompts.keeps_space or body.continue_final_message
    asked, given = _prompts(
        service, model, request, tenant, body, [(tokens, first)], body.limit, logprobs, constraint, continues=continues
    )
    marks = body.breakpoints
    if breakpoints is not None:
        marks = [mark._replace(altered=mark.altered and volatile(mark.altered)) for mark in breakpoints]
    boundaries = sorted([await _boundary(prompts, request, mark, tokens, tenant.name) for mark in marks])
    requested = [(boundary.tokens, LIFETIMES[boundary.ttl]) for boundary in boundaries if boundary.ttl]
    kept = (boundaries[-1].tokens if boundaries else 0) if body.prompt_cache_options.mode == "explicit" else None
    asked = [replace(prompt, boundaries=boundaries, kept_tokens=kept) for prompt in asked]
    comparable.kept, comparable.requested_lifetimes = kept, requested
    comparable.unread = NOT_READ if kept == 0 else None
    log.add(reply_id, comparable)
    for before in filter(None, (*earlier, compared)):
        if before.may_have_expired:  # ask before the answer stores its context again, but do not wait
            ask = partial(_ask_why, model.engine.store, asked[0].agent_id, comparable, before)
            asyncio.get_running_loop().run_in_executor(None, ask)
    explain = partial(_explanation, log, reply_id, comparable, earlier)
    asked[0] = replace(asked[0], explain=explain, lifetimes=Lifetimes(requested, tenant.name, service.tokens.count))
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered]
    streams = not (body.stop or body.stop_token_ids)
    ids = [call.id for message in body.messages for call in message.tool_calls or ()]
    options = CallOptions(body.parallel_tool_calls, streams, prompts.separator, body.continued, ids)
    readers = [Reader(prompts.markup, tokens, tools, written=written, options=options) for _ in asked]
    return asked, given, readers, comparable


def _ask_why(store: AgentCacheStore, agent_id: str, prompt: AskedPrompt, before: AskedPrompt) -> None:
    """Note in a prompt why the page server does not have the context of an earlier one."""
    if found := store.why_removed(agent_id, tuple(before.tokens)):
        prompt.removed.append((before, *found))


def _explanation(
    log: PromptLog, reply_id: str, prompt: AskedPrompt, earlier: Sequence[AskedPrompt], answer: Answer
) -> str | None:
    """Log the answer to a prompt. Return why less was reused than the client's last prompts, `earlier`, had."""
    log.answered(reply_id, answer)
    found = next(filter(None, (prompt.why(before, answer.reuse.tokens) for before in earlier)), None)
    prompt.begin_lifetimes(earlier[0] if earlier else None, answer)
    return found


async def _boundary(
    prompts: Prompts, request: Request, mark: Breakpoint, tokens: Sequence[int], tenant: str
) -> Boundary:
    """Return a breakpoint in the prompt `tokens`, after 0 tokens if the model's template refuses a conversation that
    ends there.
    """
    if not mark.altered:
        return Boundary(len(tokens), mark.ttl, len(tokens))
    try:
        end = common_prefix(tokens, await unless_disconnected(request, prompts.of_chat(mark.altered, tenant)))
        return Boundary(end, mark.ttl, await unless_disconnected(request, prompts.steady(tokens, end, tenant)))
    except ApiError:
        return Boundary(0, mark.ttl, 0)


async def complete(request: Request) -> Response:
    """Reply to POST /v1/completions with the continuations of texts."""
    service: Service = request.app.state.service
    tenant = service.tokens.tenant(request)
    body = await service.parsed(CompletionBody, request)
    model = await service.model(request, tenant, body.model)
    prompts = model.prompts
    texts = [
        (await unless_disconnected(request, prompts.of_text(prompt, body.suffix, tenant.name)), prompt)
        for prompt in body.prompt
    ]
    if body.suffix and prompts.infill:
        body = body.model_copy(update={"stop_token_ids": [*body.stop_token_ids, *prompts.infill.ends]})
    constraint, _ = await unless_disconnected(request, prompts.constraint(body, tenant.name))
    logprobs = body.logprobs if body.choices == body.n else max(1, body.logprobs or 0)  # best_of compares them
    labelled = [(tokens, prompt if isinstance(prompt, str) else None) for tokens, prompt in texts]
    asked, given = _prompts(service, model, request, tenant, body, labelled, body.max_tokens, logprobs, constraint)
    envelope = _envelope(model, TEXT, body, given, asked)
    shapes = []
    for i, one in enumerate(asked):
        likelihoods = None if body.logprobs is None else TextLikelihoods(prompts.token_text, one.tokens, body.logprobs)
        prompt = texts[i // body.choices][1]
        echo = "" if not body.echo else prompt if isinstance(prompt, str) else prompts.token_text.of(prompt)
        shapes.append(TextShape(envelope, i, likelihoods, echo))
    return await answer(service, request, service.ask(model, asked), shapes, envelope, body)


def _prompts(
    service: Service,
    model: ServedModel,
    request: Request,
    tenant: Tenant,
    body: CompletionFields,
    texts: Sequence[tuple[Sequence[int], str | None]],
    max_tokens: int | None,
    logprobs: int | None,
    constraint: Constraint | None,
    *,
    continues: bool = True,
) -> tuple[list[Prompt], str | None]:
    """Return the prompts for the engine, one for each choice, and the client's name for the agent; None without a name.

    `texts` are the token ids of each prompt, with its first text of a user, if it has one. `max_tokens` and `logprobs`
    are None if the request does not set them. With `continues`, the text of the answer keeps a space at its beginning.
    The context of the first choice is that of the agent. Raises ApiError (400).
    """
    agent_id, given = service.agent(request, tenant, body)
    if given is not None and len(texts) > 1:
        raise invalid(f"agent_id: is for one prompt, got {len(texts)} prompts", "agent_id")
    if len(texts) * body.choices > MAX_ANSWERS:
        raise invalid(f"prompt: {len(texts) * body.choices} answers, the most in a request are {MAX_ANSWERS}", "prompt")
    limit = max_tokens or service.limits.max_tokens
    if body.min_tokens > limit:
        raise invalid(f"min_tokens: {body.min_tokens} is above the limit of {limit} tokens", "min_tokens")
    model.prompts.check_ids(body.stop_token_ids, "stop_token_ids")
    model.prompts.check_ids(body.logit_bias, "logit_bias")
    sampling = body.sampling(model.prompts.kept_by_xtc)
    asked: list[Prompt] = []
    for tokens, text in texts:
        leader, label = len(asked), service.label(text or "")
        end_of_reasoning = model.prompts.end_of_reasoning(tokens, body.continued) if constraint else ()
        for i in range(body.choices):
            named = given is not None and not i
            seed = None if sampling.seed is None else sampling.seed + i
            prompt = Prompt(
                agent_id=agent_id if named or not asked else service.unnamed(request, tenant),
                keep=named,
                tokens=tokens,
                max_tokens=limit,
                sampling=replace(sampling, seed=seed),
                stop=body.stop,
                stop_tokens=body.stop_token_ids,
                continues=continues,
                logprobs=0 if logprobs is None else max(1, logprobs),  # with 0, the token's own would be missing
                constraint=constraint,
                end_of_reasoning=end_of_reasoning,
                leader=leader if i else None,
                label=label,
                lifetimes=Lifetimes((), tenant.name, service.tokens.count),
            )
            asked.append(prompt)
    if envelope := body.kv_transfer_params.kv_hints:
        hints = hints_of(envelope.actions, tenant, "kv_transfer_params.kv_hints.actions")
        asked[0] = replace(asked[0], follow=partial(carry_out, Contexts(service, model, tenant), hints))
    return asked, given


def _envelope(
    model: ServedModel,
    kind: Kind,
    body: CompletionFields,
    given: str | None,
    asked: Sequence[Prompt],
    boundaries: Sequence[Boundary] | None = None,
) -> Envelope:
    options, fingerprint = body.stream_options, model.engine.spec.fingerprint
    envelope = Envelope(kind, body.model, fingerprint, given, boundaries, counts=options.include_usage)
    if options.continuous_usage_stats:
        envelope.prompt_tokens = sum(len(one.tokens) for one in asked if one.leader is None)
    return envelope
