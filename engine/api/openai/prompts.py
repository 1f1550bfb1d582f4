"""Makes tokens of messages, and text of tokens.

It has its own tokenizer, since the engine's belongs to the engine's thread. Long prompts are made on a thread of their
own, so that they delay no stream. Short ones are made at once, which is as fast as handing them over.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from engine.api.openai.errors import invalid
from engine.api.openai.markup import Markup
from engine.api.openai.schema import ChatBody, Message, Tool
from engine.generation.token_text import TokenText, template_writes_space
from engine.generation.tokens import encode
from engine.spec import ModelCacheSpec

SHORT = 1000  # characters, made in half a millisecond
FEW = 16  # messages
LETTERS_A_TOKEN = 16  # nearly always more than a token has

_Made = TypeVar("_Made")


class Prompts:
    """Makes prompts for one model."""

    def __init__(self, tokenizer: TokenizerWrapper, spec: ModelCacheSpec) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._spec = spec
        self._thread = ThreadPoolExecutor(1, "prompts")
        self._long: set[Future[Any]] = set()  # long prompts; while there are any, only the thread uses the tokenizer
        self.token_text = TokenText(self._tokenizer)
        self.markup = Markup(self._tokenizer)
        self._keeps_space: bool | None = None  # unknown before the first conversation

    async def of_chat(self, body: ChatBody) -> list[int]:
        """The tokens of a conversation, up to the answer, as mlx-lm makes them. Raises ApiError."""
        tools = body.offered
        if tools and not self._tokenizer.has_tool_calling:
            raise invalid("tools: this model has no tool calling", "tools", "unsupported_value")
        if not self._tokenizer.has_chat_template:
            raise invalid("messages: this model has no chat template; use /v1/completions", "messages")
        texts = [message.content or "" for message in body.messages]
        calls = tools or any(message.tool_calls for message in body.messages)
        short = not calls and len(texts) <= FEW and sum(map(len, texts)) <= SHORT
        return await self._made("messages", short, lambda: self._of_messages(body.messages, tools, texts))

    @property
    def keeps_space(self) -> bool:
        """Whether an answer in a conversation keeps its first space: see `template_writes_space`."""
        return self._keeps_space is not False

    async def of_text(self, prompt: str | Sequence[int]) -> list[int]:
        """The tokens of a text, as mlx-lm's own generate makes them. Raises ApiError."""
        return await self._made("prompt", len(prompt) <= SHORT, lambda: self._of_text(prompt))

    async def _made(self, param: str, short: bool, make: Callable[[], _Made]) -> _Made:
        try:
            if short and not self._long:
                return make()
            made = self._thread.submit(make)
            self._long.add(made)
            made.add_done_callback(self._long.discard)
            return await asyncio.wrap_future(made)
        except TemplateError as error:
            raise invalid(f"{param}: the model's chat template refuses this: {error}", param) from error

    def _of_messages(self, messages: Sequence[Message], tools: Sequence[Tool], texts: Sequence[str]) -> list[int]:
        self._check_length(texts, "messages")
        plain = [_plain(message, i) for i, message in enumerate(messages)]
        offered = [tool.model_dump(exclude_none=True) for tool in tools] or None
        tokens = self._tokenizer.apply_chat_template(plain, tools=offered, add_generation_prompt=True)
        if self._keeps_space is None:
            self._keeps_space = not template_writes_space(self._tokenizer)
        return self._fitting(list(tokens), "messages")

    def _of_text(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            self._check_length([prompt], "prompt")
            return self._fitting(encode(self._tokenizer, prompt), "prompt")
        if prompt and (largest := max(prompt)) >= self._spec.vocab_size:
            raise invalid(f"prompt: token ids are 0 to {self._spec.vocab_size - 1}, got {largest}", "prompt")
        return self._fitting(list(prompt), "prompt")

    def _check_length(self, texts: Sequence[str], param: str) -> None:
        """Refuse a text that is much too long, without looking at all of it."""
        limit = LETTERS_A_TOKEN * (self._spec.context or 0)
        if limit and sum(map(len, texts)) > limit:
            self._fitting(
                encode(self._tokenizer, "".join(text[:limit] for text in texts)[:limit]), param, least="at least "
            )

    def _fitting(self, tokens: list[int], param: str, least: str = "") -> list[int]:
        if not tokens:
            raise invalid(f"{param}: has no token", param)
        context = self._spec.context
        if context and len(tokens) >= context:
            many = f"{least}{len(tokens)} tokens"
            raise invalid(
                f"{param}: {many} leave no room for an answer in this model's context of {context}",
                param,
                "context_length_exceeded",
            )
        return tokens


def _plain(message: Message, i: int) -> dict[str, Any]:
    """A message for chat templates: its content as text, the arguments of calls as objects."""
    plain = message.model_dump(exclude_none=True)
    plain.setdefault("content", "")
    if plain["role"] == "developer":
        plain["role"] = "system"
    for j, call in enumerate(plain.get("tool_calls", ())):
        param = f"messages[{i}].tool_calls[{j}].function.arguments"
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except ValueError:
            raise invalid(f"{param}: is not JSON", param) from None
        except RecursionError:
            raise invalid(f"{param}: is nested too deeply", param) from None
    return plain
