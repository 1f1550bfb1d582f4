"""What a model's tokens say: text, thoughts, calls of tools."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.api.openai.prompts import Prompts, flush, split
from engine.scheduling.request import Token


@dataclass(slots=True)
class Said:
    """A part of an answer. What is empty was not said in it."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)  # OpenAI's tool_calls
    tokens: list[Token] = field(default_factory=list)  # those that said it

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    def __iadd__(self, more: Said) -> Said:
        self.text += more.text
        self.reasoning += more.reasoning
        self.calls += more.calls
        self.tokens += more.tokens
        return self


class Reader:
    """Reads one answer, by the marks that mlx-lm knows of the model's tokenizer."""

    def __init__(self, prompts: Prompts, prompt: Sequence[int], tools: Sequence[dict[str, Any]]) -> None:
        """`tools`: those that were offered, as OpenAI describes them."""
        self.said = Said()  # all of it
        self._prompts = prompts
        self._state = prompts.reading(prompt)
        self._tools = list(tools)
        self._call: str | None = None  # of a tool, as far as it is said

    def read(self, token: Token) -> Said:
        """What the next token adds, which is nothing while a mark may be half said."""
        self._state, segments = split(self._state, token.text)
        return self._take(segments, [] if token.ends_text else [token])

    def finish(self) -> Said:
        """What was held back, and a call that the answer ended with."""
        self._state, rest, state = flush(self._state)
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
        """The calls in a text. What can't be parsed as a call stays text."""
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
