"""Formats of the replies of the Messages API: a whole message, the events of a stream, and errors."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from ...agent_engine import Answer, Boundary
from ...scheduling.request import Token
from ..openai.errors import ApiError, renamed
from ..openai.reading import AnswerPart, Reader
from ..openai.shapes import kvpage_of, written
from .schema import NAMES

Event = dict[str, Any]

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> Event:
    """Return an error in Anthropic's format."""
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessageEnvelope:
    """Fields of a message without its content: its id, the numbers of tokens, and the diagnosis."""

    def __init__(
        self,
        message_id: str,
        model: str,
        agent_id: str | None,
        prompt_tokens: int,
        boundaries: Sequence[Boundary],
        diagnostics: Callable[[Answer | None], Event | None],
    ) -> None:
        """Set the fields. `agent_id` is the client's name for the agent.

        `boundaries` are in ascending order. `diagnostics` returns the field of this name.
        """
        self._opening = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._agent_id = agent_id
        self._prompt_tokens = prompt_tokens
        self._boundaries = boundaries
        self._diagnostics = diagnostics

    def message(self, content: list[Event], ending: Event, usage: Event, answer: Answer | None) -> Event:
        """Return a message. `ending` has its `stop_reason` and `stop_sequence`."""
        return {**self._opening, "content": content, **ending, "usage": usage, "diagnostics": self._diagnostics(answer)}

    def start(self) -> Event:
        """Return the first event of a stream. The numbers of reused and kept tokens follow in `message_delta`."""
        usage = self._usage(self._prompt_tokens, 0, {"5m": 0, "1h": 0}, 0)
        return {"type": "message_start", "message": self.message([], _ending(None, None), usage, None)}

    def delta(self, ending: Event, answer: Answer, output_tokens: int) -> Event:
        """Return the event at the end of a message."""
        usage, kvpage = self.usage(answer, output_tokens), kvpage_of(answer, self._agent_id)
        own = {"kvpage": kvpage, "diagnostics": self._diagnostics(answer)}
        return {"type": "message_delta", "delta": ending, "usage": usage, **own}

    async def whole(self, choices: Sequence[Event], prompts: Sequence[Answer], answers: Sequence[Answer]) -> Event:
        """Return the whole reply: the one message of `choices`."""
        return {**choices[0], "kvpage": kvpage_of(answers[0], self._agent_id)}

    def usage(self, answer: Answer, output_tokens: int) -> Event:
        """Return the numbers of tokens. The prompt's are `cache_read_input_tokens`, which were reused;
        `cache_creation_input_tokens`, the others before the last breakpoint; and `input_tokens`, the rest.
        """
        read, created = answer.reuse.tokens, {"5m": 0, "1h": 0} | written(answer, self._boundaries)
        return self._usage(self._prompt_tokens - read - sum(created.values()), read, created, output_tokens)

    def _usage(self, computed: int, read: int, created: Mapping[str, int], output_tokens: int) -> Event:
        return {
            "input_tokens": computed,
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": sum(created.values()),
            "cache_creation": {f"ephemeral_{ttl}_input_tokens": count for ttl, count in created.items()},
            "output_tokens": output_tokens,
        }

    def encoded(self, events: Iterable[Event]) -> bytes:
        """Return events as server-sent events."""
        return b"".join(
            b"event: %s\ndata: %s\n\n" % (event["type"].encode(), to_json(event, inf_nan_mode="null"))
            for event in events
        )

    async def ending(self, prompts: Sequence[Answer], answers: Sequence[Answer]) -> bytes:
        """Return the last event of a stream."""
        return self.encoded([{"type": "message_stop"}])

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that has failed."""
        return self.encoded([error_body(renamed(error, NAMES))])


class MessageShape:
    """Format of an answer as a message. It makes the events of a stream, and the content of the whole message from the
    same parts.
    """

    def __init__(self, envelope: MessageEnvelope, reader: Reader, *, silent: bool) -> None:
        """Create a format. If it is `silent`, the answer is not shown: only its prompt was wanted."""
        self._envelope = envelope
        self._reader = reader
        self._silent = silent
        self._content: list[Event] = []  # the blocks so far; the last one may be open
        self._arguments = ""  # JSON of the open block's tool call, as far as it was read
        self._open = False
        self._unreadable = False  # whether the arguments of a call cannot be parsed

    @property
    def may_take_long(self) -> bool:
        """Whether the next method call may take more than some milliseconds."""
        return self._reader.may_take_long

    def opening(self) -> Iterable[Event]:
        yield self._envelope.start()

    def chunks(self, token: Token) -> Iterable[Event]:
        if not self._silent:
            yield from self._events(self._reader.read(token))

    def closing(self, answer: Answer) -> Iterable[Event]:
        yield from self._finish(answer)
        yield self._envelope.delta(self._ending(answer), answer, self._output_tokens(answer))

    def add(self, token: Token) -> None:
        for _ in self.chunks(token):
            pass

    def choice(self, answer: Answer) -> Event:
        for _ in self._finish(answer):
            pass
        usage = self._envelope.usage(answer, self._output_tokens(answer))
        return self._envelope.message(self._content, self._ending(answer), usage, answer)

    def _finish(self, answer: Answer) -> Iterable[Event]:
        if not self._silent:
            yield from self._events(self._reader.finish(answer.finish_reason))
        yield from self._close()

    def _output_tokens(self, answer: Answer) -> int:
        return 0 if self._silent else len(answer.tokens)

    def _ending(self, answer: Answer) -> Event:
        if self._silent or self._unreadable or answer.finish_reason == "length":
            return _ending("max_tokens", None)
        if self._reader.parsed.calls:
            return _ending("tool_use", None)
        return _ending("stop_sequence" if answer.stopped_by else "end_turn", answer.stopped_by)

    def _events(self, part: AnswerPart) -> Iterable[Event]:
        """Yield the events for a part of an answer."""
        if part.reasoning:
            yield from self._extend({"type": "thinking", "thinking": "", "signature": ""}, "thinking", part.reasoning)
        if part.text:
            yield from self._extend({"type": "text", "text": ""}, "text", part.text)
        for call in part.calls:
            function = call["function"]
            if "id" in call:  # otherwise these are further arguments of the open call
                yield from self._start({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            if arguments := function.get("arguments"):
                self._arguments += arguments
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _extend(self, block: Event, field: str, text: str) -> Iterable[Event]:
        """Yield the events that add `text` to the open block; start `block` if another one is open."""
        if not (self._open and self._content[-1]["type"] == block["type"]):
            yield from self._start(block)
        self._content[-1][field] += text
        yield self._delta({"type": f"{field}_delta", field: text})

    def _start(self, block: Event) -> Iterable[Event]:
        yield from self._close()
        self._content.append(block)
        self._open = True
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": {**block}}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> Iterable[Event]:
        """Yield the events that end the open block, if there is one."""
        if not self._open:
            return
        if self._content[-1]["type"] == "tool_use":
            try:
                # a call that `max_tokens` has cut has the arguments that are whole
                self._content[-1]["input"] = from_json(self._arguments or "{}", allow_partial=True)
            except ValueError:  # a grammar allows any nesting, and numbers of any length
                self._unreadable = True
            self._arguments = ""
        self._open = False
        yield {"type": "content_block_stop", "index": len(self._content) - 1}


def message_id() -> str:
    """Return the id of a new message."""
    return f"msg_{uuid.uuid4().hex}"


def _ending(reason: str | None, stop: str | None) -> Event:
    return {"stop_reason": reason, "stop_sequence": stop}
