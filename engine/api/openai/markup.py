"""The marks of thoughts and tool calls in a model's text, as mlx-lm knows them for its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"  # mlx-lm's states; other states are headers


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks that end one state."""

    following: dict[str, str]  # each mark's next state
    pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        longest_first = sorted(self.following, key=len, reverse=True)
        never = "(?!)"
        object.__setattr__(self, "pattern", re.compile("|".join(map(re.escape, longest_first)) or never))

    def begun(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a mark, at most."""
        longest = max(map(len, self.following), default=0)
        lengths = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in self.following)), 0)


class Markup:
    """A tokenizer's marks by state, and its parser of tool calls."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._with_calls = {state: Marks(following) for state, following in _transitions(tokenizer).items()}
        self._without_calls = {
            state: Marks({mark: next_ for mark, next_ in marks.following.items() if next_ != TOOL})
            for state, marks in self._with_calls.items()
        }
        self.endless = not tokenizer.tool_call_end  # whether calls have no end mark

    def marks(self, state: str, *, calls: bool) -> Marks:
        """The marks that end `state`; without `calls`, those of tool calls are plain text."""
        return (self._with_calls if calls else self._without_calls).get(state) or Marks({})

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The calls in the text between the marks of a call. Raises any exception of
        mlx-lm's parsers."""
        parser: Callable[[str, Any], Any] = self._tokenizer.tool_parser
        parsed = parser(text, list(tools))
        return parsed if isinstance(parsed, list) else [parsed]

    def start(self, prompt: Sequence[int]) -> str:
        """The state in which an answer to `prompt` begins: a thought that the prompt opened, or another one."""
        if initial := self._tokenizer.response_initial_state:
            return str(initial)
        if not self._tokenizer.has_thinking:
            return NORMAL
        opened, closed = self._tokenizer.rfind_think_start(prompt), self._tokenizer.rfind_think_end(prompt)
        return REASONING if opened > closed else NORMAL


def _transitions(tokenizer: TokenizerWrapper) -> dict[str, dict[str, str]]:
    """The marks of mlx-lm's make_text_state_machine, by state, with their next states."""
    following: dict[str, dict[str, str]] = {NORMAL: {}}
    if tokenizer.has_thinking:
        following[NORMAL][tokenizer.think_start] = REASONING
        following[REASONING] = {tokenizer.think_end: NORMAL}
    if tokenizer.has_tool_calling:
        formats = tokenizer.response_transitions.values()
        if not any(next_ == TOOL for edges in formats for _, next_ in edges):
            following[NORMAL][tokenizer.tool_call_start] = TOOL
        if tokenizer.has_thinking:
            following[REASONING][tokenizer.tool_call_start] = TOOL
        # Calls without an end mark are ended by the next one.
        end = tokenizer.tool_call_end
        following[TOOL] = {end: NORMAL} if end else {tokenizer.tool_call_start: TOOL}
    for mark in tokenizer.structural_markers:
        following[NORMAL][mark] = NORMAL
    for state, edges in tokenizer.response_transitions.items():
        following.setdefault(state, {}).update(edges)
    return following
