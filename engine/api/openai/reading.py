"""Splits what a model says into text, thoughts and tool calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine

from engine.api.openai.prompts import Prompts
from engine.scheduling.request import Token


@dataclass(slots=True)
class Said:
    """A part of an answer. Fields that it does not have are empty."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)  # OpenAI's tool_calls
    tokens: list[Token] = field(default_factory=list)  # the tokens of this part

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    def __iadd__(self, more: Said) -> Said:
        self.text += more.text
        self.reasoning += more.reasoning
        self.calls += more.calls
        self.tokens += more.tokens
        return self


class Reader:
    """Reads one answer. The marks are those that mlx-lm knows for the tokenizer."""

    def __init__(self, prompts: Prompts, prompt: Sequence[int], tools: Sequence[dict[str, Any]]) -> None:
        """`tools` are those that the request offers, in OpenAI's format."""
        self.said = Said()  # all of it
        self._prompts = prompts
        self._state = prompts.reading(prompt)
        self._tools = list(tools)
        self._call: str | None = None  # the beginning of a tool call

    def read(self, token: Token) -> Said:
        """What the next token adds; empty while a mark may be incomplete."""
        self._state, segments = TextStateMachine.split(self._state, token.text)
        return self._take(segments, [] if token.ends_text else [token])

    def finish(self) -> Said:
        """The rest, including an incomplete tool call."""
        self._state, rest, state = TextStateMachine.flush(self._state)
        return self._take([(state, rest), ("", "")])

    def _take(self, segments: Sequence[tuple[str, str]], tokens: Sequence[Token] = ()) -> Said:
        said = Said(tokens=list(tokens))
        for state, text in segments:
            if state == "tool":
                self._call = (self._call or "") + text
                continue
            if self._call is not None:
                said += self._called(self._call)
                self._call = None
            if state == "reasoning":
                said.reasoning += text
            else:
                said.text += text
        self.said += said
        return said

    def _called(self, text: str) -> Said:
        """The calls in a text. What can't be parsed stays text."""
        if not text.strip():
            return Said()
        try:
            parsed = self._prompts.tool_parser(text, self._tools or None)
            calls = parsed if isinstance(parsed, list) else [parsed]
            start = len(self.said.calls)
            return Said(calls=[_call(call, i) for i, call in enumerate(calls, start=start)])
        except (ValueError, KeyError, TypeError, AttributeError):  # of the tokenizer's parser, for what models invent
            return Said(text=text)


def _call(parsed: dict[str, Any], index: int) -> dict[str, Any]:
    arguments = json.dumps(parsed["arguments"], ensure_ascii=False)
    return {
        "index": index,
        "id": parsed.get("id") or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": parsed["name"], "arguments": arguments},
    }
