"""Encoder of conversations and texts to token ids.

It has a copy of the tokenizer, because the engine's tokenizer belongs to the engine's thread. Conversations and long
texts are encoded on a separate thread, so that they delay no stream. Short texts are encoded on the event loop, which
is as fast as passing them to a thread.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...chains import common_prefix
from ...generation.structure import Constraint, ConstraintError, Constraints, compiling_thread
from ...generation.templates import (
    OF_THOUGHTS,
    CallFormat,
    ControlTokens,
    Renderer,
    TemplateFailedError,
    call_format,
    short_id,
)
from ...generation.text import ChatTemplate, TokenText, history_adds_space
from ...generation.tokens import PromptError, encode, encode_part, infill_of
from ...scheduling import TenantThread
from ...spec import ModelCacheSpec
from .calls import FORCED, INSTEAD, MARKED, CallError, OfferedTool, Written, compile_calls
from .errors import invalid
from .reading import REASONING, Markup, levels
from .schema import ChatBody, CompletionFields, Message, ResponseFormat, Tool

SHORT = 1000  # characters of a text that is encoded on the event loop, in half a millisecond
LETTERS_A_TOKEN = 16  # nearly every token has fewer characters
NEAR = 16  # tokens before a position which other text after it may change
# Texts that a tokenizer may join with the end of the text before: of each kind of characters, some.
_ACCENT, _JOINER = "\N{COMBINING ACUTE ACCENT}", "\N{ZERO WIDTH JOINER}"
JOINED = (*"aA1!\"'(),-./:;=?_ \n\t", "er", "ing", "s", "  x", "\n\n", _ACCENT, _JOINER)

# Arguments of transformers' `render_jinja_template`, and of `apply_chat_template`.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

_Made = TypeVar("_Made")


class Prompts:
    """Encoder of prompts for one model. Its public methods run on the event loop. Templates and long texts are
    encoded on its thread.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, spec: ModelCacheSpec, renderer: Renderer, *, sanitize: bool = False
    ) -> None:
        """Copy the tokenizer. `renderer` renders chat templates. With `sanitize`, control tokens in the content of
        users and tools are encoded as text.
        """
        self._tokenizer = copy.deepcopy(tokenizer)
        self._spec = spec
        self._chat = ChatTemplate(self._tokenizer, renderer)
        self._sanitize = sanitize
        self._controls: dict[str | None, ControlTokens] = {}  # by template
        self._call_formats: dict[str | None, CallFormat] = {}  # by template
        self._thread = TenantThread(ThreadPoolExecutor(1, f"prompts {spec.name}"))
        # long prompts on the thread; while there are any, the event loop does not use the tokenizer
        self._long: set[Future[Any]] = set()
        self.token_text = TokenText(self._tokenizer)
        self.markup = Markup(self._tokenizer)
        self.infill = infill_of(self._tokenizer)
        # Ends of lines and of the answer, as in mlx-lm's server.
        self.kept_by_xtc = frozenset([*tokenizer.eos_token_ids, *encode_part(tokenizer, "\n")])
        self._constraints = Constraints(self._tokenizer, spec.vocab_size, tokenizer.eos_token_ids)
        self._compiling = TenantThread(compiling_thread(spec.name))
        self._longest = 0  # length of the vocabulary's longest token; 0 until it is needed
        self._keeps_space: bool | None = None  # None before the first conversation
        self.separator = ""  # white space that the template writes between a text and a call, once tools were offered

    async def prepare(self) -> None:
        """Prepare constraints, so that no request waits for it. Without this, the first constraint takes a second."""
        with suppress(
            ConstraintError
        ):  # the tokenizer cannot constrain answers: a request with a constraint is refused
            await asyncio.wrap_future(self._compiling.submit("", self._constraints.prepare))

    async def of_chat(self, body: ChatBody, tenant: str = "", *, answered: bool = True) -> list[int]:
        """Return the token ids of a conversation and the beginning of the answer, encoded as by mlx-lm.

        Raises ApiError (400) if the model has no chat template or no tool calls, the template refuses the conversation,
        or it is longer than the model's context. Without `answered`, it may be longer.
        """
        tools = body.tools  # also with `tool_choice: none`, so that the prompt has the same prefix as earlier ones
        if tools and not self._tokenizer.has_tool_calling:
            raise invalid("tools: this model has no tool calling", "tools", "unsupported_value")
        if not self._tokenizer.has_chat_template:
            raise invalid("messages: this model has no chat template; use /v1/completions", "messages")
        return await self._made("messages", tenant, False, lambda: self._of_messages(body, tools, answered=answered))

    @property
    def keeps_space(self) -> bool:
        """Whether an answer in a conversation keeps its first space: see `history_adds_space`."""
        return self._keeps_space is not False

    async def constraint(
        self, body: CompletionFields, tenant: str = "", prompt: Sequence[int] = ()
    ) -> tuple[Constraint | None, Written | None]:
        """Return the constraint of an answer to `prompt`, token ids, and the calls that it writes; None without. Raises
        ApiError (400), which names a field.
        """
        made = body.constraints
        calls = self._calls(body, prompt) if isinstance(body, ChatBody) else None
        if calls and made.keys() <= {"response_format", "response_format.json_schema.schema"}:
            made = {}
        elif calls and isinstance(body, ChatBody) and body.tool_choice.forces:
            made = {"tool_choice": str, **made}
        else:
            calls = None
        if not (calls or made):
            return None, None
        if len(made) > 1:
            raise invalid(f"an answer has one constraint, got {' and '.join(made)}", list(made)[1])
        for name, given in (("min_tokens", body.min_tokens), ("ignore_eos", body.ignore_eos)):
            if given:
                raise invalid(f"{name}: the end of an answer with a constraint follows from the constraint", name)
        param, make = next(iter(made.items()), ("response_format.json_schema.schema", str))
        work: Callable[[], tuple[Constraint, Written | None] | None]
        work = calls or (lambda: (self._constraints.compile(make()), None))
        try:
            found = await asyncio.wrap_future(self._compiling.submit(tenant, work))
        except CallError as error:
            raise invalid(f"{error.param}: {error}", error.param, "unsupported_value") from error
        except ConstraintError as error:
            raise invalid(f"{param}: {error}", param) from error
        if found is None:
            return None, None
        found[0].field = "tools" if calls else param
        return found

    def _calls(self, body: ChatBody, prompt: Sequence[int]) -> Callable[[], tuple[Constraint, Written] | None] | None:
        """Return a function that compiles the calls of an answer to `prompt`: of a tool that the request forces, of any
        tool instead of the format of the answer, or of `strict` tools. It raises CallError, ConstraintError. Return
        None without such calls.
        """
        offered, formatted = body.offered, body.response_format or ResponseFormat(type="text")
        functions = [
            OfferedTool(tool.function.name, tool.function.parameters or {}, i, bool(tool.function.strict))
            for i, tool in enumerate(body.tools)
            if tool in offered
        ]
        forces = body.tool_choice.forces
        when, answer = (FORCED if forces else MARKED), None
        if formatted.type != "text" and not forces:
            when, answer = INSTEAD, formatted.json_schema.definition if formatted.json_schema else {"type": "object"}
        if not functions or (when == MARKED and not any(function.strict for function in functions)):
            return None
        several = body.parallel_tool_calls and body.tool_choice.type != "function"
        thought = self.markup.start(prompt, body.continued) == REASONING
        offered_to = partial(compile_calls, self._tokenizer, self._constraints, functions, when)
        return partial(offered_to, several=several, answer=answer, thought=thought)

    def end_of_reasoning(self, prompt: Sequence[int], continued: str | None) -> list[int]:
        """Return the token ids that end the reasoning with which the answer to `prompt` begins; empty without one.
        `continued` is as for `Markup.start`.
        """
        if self.markup.start(prompt, continued) != REASONING:
            return []
        return encode_part(self._tokenizer, self._tokenizer.think_end)

    async def of_text(self, prompt: str | Sequence[int], suffix: str = "", tenant: str = "") -> list[int]:
        """Return the token ids of a text, encoded as by mlx_lm.generate; return ids as they are, after a check. With
        `suffix`, the answer is the text between both.

        Raises ApiError (400) for an empty or too long prompt, for an id that is not in the vocabulary, and for a
        `suffix` if the model has no tokens for it.
        """
        if suffix and not self.infill:
            raise invalid("suffix: this model has no fill-in-the-middle tokens", "suffix", "unsupported_value")
        short = len(prompt) + len(suffix) <= SHORT
        return await self._made("prompt", tenant, short, lambda: self._of_text(prompt, suffix))

    async def steady(self, tokens: Sequence[int], end: int, tenant: str = "") -> int:
        """Return how many of the first `end` tokens of a prompt stay the same with any text after them, if a context
        can be continued only at a state; otherwise `end`. A line end, for example, may be one token with a dot.
        """
        if not self._spec.has_state:
            return end
        last = tokens[max(0, end - NEAR) : end]
        return await self._made("messages", tenant, True, lambda: end - self._changing(last))

    def _changing(self, tokens: Sequence[int]) -> int:
        """Return how many of the last tokens of a text change if more text follows."""
        text = self.token_text.of(tokens)
        alone = encode_part(self._tokenizer, text)
        same = min(common_prefix(alone, encode_part(self._tokenizer, text + more)) for more in JOINED)
        least = 0 if text[-1:].isascii() else 1  # of another script than those letters
        return min(max(least, len(alone) - same), len(tokens))

    async def _made(self, param: str, tenant: str, short: bool, make: Callable[[], _Made]) -> _Made:
        """Return the result of `make`, called on the event loop if it is `short` and the thread has no work,
        otherwise on the thread, where tenants take turns. Raises ApiError (400), which names `param`, for an error of
        the template or the prompt.
        """
        try:
            if short and not self._long:
                return make()
            made = self._thread.submit(tenant, make)
            self._long.add(made)
            made.add_done_callback(self._long.discard)
            return await asyncio.wrap_future(made)
        except TemplateFailedError as error:
            raise invalid(f"{param}: the model's chat template refuses this: {error}", param) from error
        except PromptError as error:
            raise invalid(f"{param}: {error}", param) from error

    def _of_messages(self, body: ChatBody, tools: Sequence[Tool], *, answered: bool) -> list[int]:
        """Return the token ids of a conversation: render it with the template, and encode the text."""
        messages = body.messages
        if answered:
            self._check_length([message.content or "" for message in messages], "messages")
        offered = [tool.model_dump(exclude_none=True) for tool in tools] or None
        template = self._chat.source(offered)
        if offered:
            self.separator = self._call_format(template).separator
        variables = _variables(body, template)
        plain = [self._plain(message, template) for message in messages]
        _name_results(plain)
        asks = body.add_generation_prompt and not body.continue_final_message
        if body.continue_final_message:
            variables["continue_final_message"] = True

        def render(messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
            return self._chat.text(messages, template, offered, asks=asks, variables=variables)

        controls = self._control_tokens(template) if self._sanitize else None
        text = controls.rendered(render, plain, variables) if controls else render(plain, variables)
        if answered:
            self._check_length([text], "messages")
            self._check_fits(len(text), "messages")
        tokens = controls.encode(text) if controls else encode_part(self._tokenizer, text)
        if self._keeps_space is None:
            # not with the tools of this request, which a template may write before the last message only
            self._keeps_space = not history_adds_space(self._tokenizer, self._chat.plain)
        return self._fitting(tokens, "messages") if answered else tokens

    def _control_tokens(self, template: str | None) -> ControlTokens:
        if template not in self._controls:
            self._controls[template] = ControlTokens(self._tokenizer, template)
        return self._controls[template]

    def _plain(self, message: Message, template: str | None) -> dict[str, Any]:
        """Return a message for the template: the content as text, and the arguments and ids of calls in the
        format that the template expects. White space that the template writes around a thought is not in the message.
        """
        plain = message.model_dump(exclude_none=True, exclude={"reasoning", "reasoning_content"})
        plain.setdefault("content", "")
        if thought := message.reasoning_content or message.reasoning:
            start, end, following = self._call_format(template).thought
            thought = thought.removeprefix(start).removesuffix(end)
            plain |= {name: thought for name in OF_THOUGHTS if template is None or name in template}
            plain["content"] = plain["content"].removeprefix(following)
        if plain["role"] == "developer":
            plain["role"] = "system"
        for call in plain.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = function["arguments"].strip() or "{}"
            arguments = _parsed(function["arguments"])
            if not self._call_format(template).text:
                function["arguments"] = arguments
        for named in (plain, *plain.get("tool_calls", ())):
            for name in ("id", "tool_call_id"):
                if name in named and self._call_format(template).short_ids:
                    named[name] = short_id(named[name])
        return plain

    def _call_format(self, template: str | None) -> CallFormat:
        if template not in self._call_formats:
            self._call_formats[template] = call_format(
                lambda messages, tools: self._chat.text(messages, template, tools),
                TemplateFailedError,
                self._tokenizer.tool_call_start or "",
                (self._tokenizer.think_start or "", self._tokenizer.think_end or ""),
            )
        return self._call_formats[template]

    def _of_text(self, prompt: str | Sequence[int], suffix: str) -> list[int]:
        if isinstance(prompt, str):
            self._check_length([prompt, suffix], "prompt")
            self._check_fits(len(prompt) + len(suffix), "prompt")
            if suffix and self.infill:
                return self._fitting(self.infill.prompt(self._tokenizer, prompt, suffix), "prompt")
            return self._fitting(encode(self._tokenizer, prompt), "prompt")
        self.check_ids(prompt, "prompt")
        return self._fitting(list(prompt), "prompt")

    def check_ids(self, tokens: Collection[int], param: str) -> None:
        """Raise ApiError (400), which names `param`, for a token id outside of the model's vocabulary."""
        if tokens and (largest := max(tokens)) >= self._spec.vocab_size:
            raise invalid(f"{param}: token ids are 0 to {self._spec.vocab_size - 1}, got {largest}", param)

    def _check_length(self, texts: Sequence[str], param: str) -> None:
        """Raise ApiError for texts that are much longer than the model's context, and encode only their beginning."""
        limit = LETTERS_A_TOKEN * (self._spec.context or 0)
        if limit and sum(map(len, texts)) > limit:
            self._fitting(
                encode(self._tokenizer, "".join(text[:limit] for text in texts)[:limit]), param, least="at least "
            )

    def _check_fits(self, letters: int, param: str) -> None:
        """Raise ApiError for a text of so many characters that it would exceed the model's context even if each of its
        tokens were the longest of the vocabulary.
        """
        if letters > LETTERS_A_TOKEN * (self._spec.context or letters):
            self._longest = self._longest or max(map(len, self._tokenizer.get_vocab()))
            self._check_context(letters // self._longest, param, least="at least ")

    def _fitting(self, tokens: list[int], param: str, least: str = "") -> list[int]:
        """Return the token ids unchanged. Raises ApiError for an empty prompt, and for one that is longer than the
        model's context.
        """
        if not tokens:
            raise invalid(f"{param}: has no token", param)
        self._check_context(len(tokens), param, least)
        return tokens

    def _check_context(self, tokens: int, param: str, least: str) -> None:
        context = self._spec.context
        if context and tokens >= context:
            raise invalid(
                f"{param}: {least}{tokens} tokens leave no room for an answer in this model's context of {context}",
                param,
                "context_length_exceeded",
            )


def _name_results(messages: Iterable[dict[str, Any]]) -> None:
    """Add the name of the tool to each result without one: that of the latest call before it with its id. Templates of
    some models need it, and clients need not send it.
    """
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and not message.get("name") and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


def _variables(body: ChatBody, template: str | None) -> dict[str, Any]:
    """Return the request's variables for a template. Raises ApiError (400) for a reserved name, and for a field that
    the template does not use.
    """
    for name in body.chat_template_kwargs:
        if name in _RESERVED:
            raise invalid(f"chat_template_kwargs: {name} is a field of the request", "chat_template_kwargs")
    for name, needs in (("reasoning_effort", body.reasoning_effort), ("enable_thinking", body.enable_thinking)):
        if needs and template is not None and name not in template:
            raise invalid(f"{name}: this model's chat template does not use it", name, "unsupported_value")
    return body.variables


def _parsed(arguments: str) -> dict[str, Any]:
    """Return the arguments of a tool call, decoded from JSON; an empty object for other text, as of a call that
    `max_tokens` has cut, and for more than 200 levels, which a model can write and templates cannot.
    """
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) and levels(parsed) <= 200 else {}
