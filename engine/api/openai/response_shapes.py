"""Format of the replies of the Responses API: a response, or the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

from pydantic_core import to_json

from ...agent_engine import Answer, Boundary
from ...chains import ContextNames
from ...scheduling.request import Token
from .errors import ApiError, renamed
from .reading import AnswerPart, Reader
from .response_schema import NAMES, ResponseBody, new_item_id
from .shapes import Reply, kvpage_of, written

_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}  # of the ids of items


class Notes(NamedTuple):
    """Facts about the prompt cache."""

    boundaries: Sequence[Boundary]  # of the prompt, in ascending order
    diagnostics: Callable[[Answer | None], Reply | None]  # returns the field `prompt_cache_diagnostics`


class ResponseReply:
    """Format of a reply, which has one answer. It makes the events of a stream, and the items of the whole response
    from the same parts.
    """

    def __init__(
        self,
        response_id: str,
        body: ResponseBody,
        agent_id: str | None,
        reader: Reader,
        notes: Notes,
        store: Callable[[Reply, ContextNames | None], Awaitable[None]],
    ) -> None:
        """Create a format. `agent_id` is the client's name for the agent. `store` keeps the complete response, with the
        names of its context.
        """
        options = body.prompt_cache_options
        self._response: Reply = {
            "id": response_id,
            "object": "response",
            "prompt_cache_diagnostics": notes.diagnostics(None),
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "conversation": body.conversation and body.conversation.model_dump(),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": body.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_options": {
                "mode": options.mode,
                "ttl": options.ttl,
                "comparison_response_id": options.comparison_response_id,
            },
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": body.store,
            "temperature": body.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice,
            "tools": [{"strict": False, **tool.model_dump()} for tool in body.tools],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }
        self._agent_id = agent_id
        self._notes = notes
        self._silent = options.prewarm
        self._reader = reader
        self._store = store
        self._output: list[Reply] = []  # the items so far; the last one may be open
        self._open = False
        self._reasoning_tokens = 0
        self._numbers = count()  # of the events

    # -- Shape of the answer

    @property
    def may_take_long(self) -> bool:
        """Whether the next method call may take more than some milliseconds."""
        return self._reader.may_take_long

    def opening(self) -> Iterable[Reply]:
        yield {"type": "response.created", "response": self._response}
        yield {"type": "response.in_progress", "response": self._response}

    def chunks(self, token: Token) -> Iterable[Reply]:
        if not self._silent:
            part = self._reader.read(token)
            self._reasoning_tokens += self._reader.reasons
            yield from self._events(part)

    def closing(self, answer: Answer) -> Iterable[Reply]:
        if not self._silent:
            yield from self._events(self._reader.finish(answer.finish_reason))
            if not self._output:  # the next turn needs the answer's message, also if it is empty
                yield from self._extend("message", "output_text", "")
        whole = self._silent or answer.finish_reason != "length"
        yield from self._close("completed" if whole else "incomplete")

    def add(self, token: Token) -> None:
        for _ in self.chunks(token):
            pass

    def choice(self, answer: Answer) -> Reply:
        for _ in self.closing(answer):
            pass
        return {}

    # -- Reply to the request

    async def whole(self, choices: Sequence[Reply], prompts: Sequence[Answer], answers: Sequence[Answer]) -> Reply:
        """Return the complete response, after it was stored."""
        (answer,) = answers
        cut = answer.finish_reason == "length" and not self._silent
        reused, generated = answer.reuse.tokens, 0 if self._silent else len(answer.tokens)
        boundaries = self._notes.boundaries
        living = written(answer, boundaries, answer.kept.tokens if answer.kept else 0)
        details = {f"ttl_{ttl}_tokens": living[ttl] for ttl in ("30m", "12h")}
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": reused,
                "cache_write_tokens": written(answer, boundaries).total(),
                "cache_write_tokens_details": details if any(details.values()) else None,
            },
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": answer.prompt_tokens + generated,
        }
        response = self._response | {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": usage,
            "prompt_cache_diagnostics": self._notes.diagnostics(answer),
            "kvpage": kvpage_of(answer, self._agent_id),
        }
        await self._store(response, answer.context)
        return response

    def encoded(self, events: Iterable[Reply]) -> bytes:
        """Return events as server-sent events, each with its number."""
        numbered = ({**event, "sequence_number": number} for event, number in zip(events, self._numbers, strict=False))
        return b"".join(
            b"event: %s\ndata: %s\n\n" % (event["type"].encode(), to_json(event, inf_nan_mode="null"))
            for event in numbered
        )

    async def ending(self, prompts: Sequence[Answer], answers: Sequence[Answer]) -> bytes:
        """Return the last event of a stream, which has the complete response."""
        response = await self.whole([], prompts, answers)
        return self.encoded([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that has failed."""
        message = str(renamed(error, NAMES))
        failed = {"status": "failed", "output": self._output, "error": {"code": "server_error", "message": message}}
        return self.encoded([{"type": "response.failed", "response": self._response | failed}])

    # -- Items of the output

    def _events(self, part: AnswerPart) -> Iterable[Reply]:
        """Yield the events for a part of an answer."""
        if part.reasoning:
            yield from self._extend("reasoning", "reasoning_text", part.reasoning)
        if part.text:
            yield from self._extend("message", "output_text", part.text)
        for call in part.calls:
            function = call["function"]
            if "id" in call:  # otherwise these are further arguments of the open call
                named = {"call_id": call["id"], "name": function["name"], "arguments": ""}
                yield from self._start("function_call", named)
            if arguments := function.get("arguments"):
                self._output[-1]["arguments"] += arguments
                yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def _extend(self, kind: str, content: str, text: str) -> Iterable[Reply]:
        """Yield the events that add `text` to the open item; start an item of `kind` if another one is open."""
        if not (self._open and self._output[-1]["type"] == kind):
            part: Reply = {"type": content, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            fields: Reply = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._start(kind, {**fields, "content": []})
            yield self._of_item("response.content_part.added", content_index=0, part={**part})
            self._output[-1]["content"].append(part)
        self._output[-1]["content"][0]["text"] += text
        if text:
            logprobs: Reply = {"logprobs": []} if kind == "message" else {}
            yield self._of_item(f"response.{content}.delta", content_index=0, delta=text, **logprobs)

    def _start(self, kind: str, fields: Reply) -> Iterable[Reply]:
        yield from self._close("completed")
        item = {
            "id": new_item_id(_PREFIXES[kind], self._response["id"]),
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        self._output.append(item)
        self._open = True
        added = item | ({"content": []} if "content" in item else {})
        yield {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": added}

    def _of_item(self, kind: str, **fields: Any) -> Reply:
        """Return an event of the last item."""
        return {"type": kind, "item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, **fields}

    def _close(self, status: str) -> Iterable[Reply]:
        """Yield the events that end the open item, if there is one."""
        if not self._open:
            return
        self._open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            named = {"arguments": item["arguments"], "name": item["name"]}
            yield self._of_item("response.function_call_arguments.done", **named)
        else:
            (part,) = item["content"]
            logprobs: Reply = {"logprobs": []} if item["type"] == "message" else {}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, text=part["text"], **logprobs)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": item}
