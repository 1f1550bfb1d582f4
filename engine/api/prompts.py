"""From messages to tokens, and from tokens to what is shown of them: all that the API needs of a tokenizer.

It has a tokenizer of its own, since the engine's belongs to the engine's thread, and a thread for long prompts, so that
they hold up nobody's stream. A short one is made at once, which takes no longer than to hand it over and back.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from jinja2 import TemplateError
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.api.errors import ApiError, invalid
from engine.api.schema import ChatBody, Message
from engine.spec import ModelCacheSpec

SHORT = 1000  # letters, made in half a millisecond

_Made = TypeVar("_Made")


class Prompts:
    """Makes prompts for one model."""

    def __init__(self, tokenizer: TokenizerWrapper, spec: ModelCacheSpec) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._spec = spec
        self._thread = ThreadPoolExecutor(1, "prompts")
        self._long: set[Future[Any]] = set()  # that the thread has to make: the tokenizer is its own meanwhile
        self._marked = make_text_state_machine(self._tokenizer)

    async def of_chat(self, body: ChatBody) -> list[int]:
        """The tokens of a conversation, set for the answer, as mlx-lm makes them. Raises ApiError."""
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tool_choice == "auto" else []
        if tools and not self._tokenizer.has_tool_calling:
            raise invalid("tools: this model has no tool calling", "tools", "unsupported_value")
        if not self._tokenizer.has_chat_template:
            raise invalid("messages: this model has no chat template; use /v1/completions", "messages")
        messages = [_plain(message, i) for i, message in enumerate(body.messages)]
        letters = sum(len(str(part)) for part in (*messages, *tools))
        tokens = await self._made("messages", letters, lambda: self._of_messages(messages, tools or None))
        return self._fitting(tokens, "messages")

    async def of_text(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a text, as mlx-lm's own generate makes them. Raises ApiError."""
        if isinstance(prompt, str):
            text = prompt
            tokens = await self._made("prompt", len(text), lambda: self._encode(text))
        else:
            tokens = list(prompt)
        if wrong := [token for token in tokens if token >= self._spec.vocab_size]:
            raise invalid(f"prompt: token ids are 0 to {self._spec.vocab_size - 1}, got {wrong[0]}", "prompt")
        return self._fitting(tokens, "prompt")

    def shown(self, token: int) -> str:
        """A token by itself."""
        text: str = self._tokenizer.decode([token])
        return text

    @property
    def tool_parser(self) -> Callable[[str, Any], Any]:
        """Of what stands between a tool call's marks."""
        parser: Callable[[str, Any], Any] = self._tokenizer.tool_parser
        return parser

    def reading(self, prompt: Sequence[int]) -> Any:
        """Where an answer to `prompt` begins, for TextStateMachine.split: in a thought, or not."""
        state = "normal"
        if self._tokenizer.has_thinking:
            opened, closed = self._tokenizer.rfind_think_start(prompt), self._tokenizer.rfind_think_end(prompt)
            state = "reasoning" if opened > closed else "normal"
        return self._marked.make_state(self._tokenizer.response_initial_state or state)

    async def _made(self, param: str, letters: int, make: Callable[[], _Made]) -> _Made:
        try:
            if letters <= SHORT and not self._long:
                return make()
            made = self._thread.submit(make)
            self._long.add(made)
            made.add_done_callback(self._long.discard)
            return await asyncio.wrap_future(made)
        except TemplateError as error:
            raise invalid(f"{param}: the model's chat template refuses this: {error}", param) from error

    def _of_messages(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        return list(self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True))

    def _encode(self, text: str) -> list[int]:
        bos = self._tokenizer.bos_token
        return list(self._tokenizer.encode(text, add_special_tokens=bos is None or not text.startswith(bos)))

    def _fitting(self, tokens: list[int], param: str) -> list[int]:
        if not tokens:
            raise invalid(f"{param}: has no token", param)
        context = self._spec.context
        if context and len(tokens) >= context:
            raise ApiError(
                400,
                f"{param}: {len(tokens)} tokens leave no room for an answer in this model's context of {context}",
                param,
                "context_length_exceeded",
            )
        return tokens


def _plain(message: Message, i: int) -> dict[str, Any]:
    """As chat templates take it: text, the arguments of calls as objects."""
    plain = message.model_dump(exclude_none=True)
    plain.setdefault("content", "")
    if plain["role"] == "developer":
        plain["role"] = "system"
    for j, call in enumerate(plain.get("tool_calls", ())):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except ValueError:
            param = f"messages[{i}].tool_calls[{j}].function.arguments"
            raise invalid(f"{param}: is not JSON", param) from None
    return plain


split = TextStateMachine.split
flush = TextStateMachine.flush
