"""The bodies of requests of the Messages API, as pydantic models, and their conversion to conversations of a chat."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ..openai.errors import shortened
from ..openai.schema import (
    MAX_BREAKPOINTS,
    MAX_STOP,
    MAX_STOPS,
    MAX_TOOLS,
    OF_CHATS,
    OF_MESSAGES_IN_CHATS,
    OF_RESPONSES,
    Breakpoint,
    ChatBody,
    RequestBody,
    TransferParams,
    Values,
    other_text,
)

DEFAULT_EFFORT = "high"  # of Anthropic's models; not refused if the chat template does not use it
BLOCKS = ("text", "thinking", "tool_use", "tool_result")
_BLOCKS_OF = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}

_UNSUPPORTED: dict[str, Values] = {  # refused fields, with the values that change nothing and are accepted
    **OF_CHATS,
    **OF_RESPONSES,
    "container": (),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "fallbacks": ([],),
    "mcp_servers": ([],),
    "parallel_tool_calls": (True,),
    "speed": ("standard",),
    "top_logprobs": (0,),
}

# The paths of fields in errors of the chat to which a request is converted: see `renamed`.
NAMES = {
    r"enable_thinking": "thinking",
    r"prompt": "messages",
    r"reasoning_effort": "output_config.effort",
    r"response_format": "output_config.format",
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function\.(.+)": r"\1.\2",
    r"tool_choice\.function\.name": "tool_choice.name",
    r"stop": "stop_sequences",
    r"user": "metadata.user_id",
}


class CacheControl(RequestBody):
    """A breakpoint: the prompt up to here is kept, at least for the lifetime `ttl` if there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


def _blocks(content: Any) -> Any:
    """Return content as a list of blocks: a text becomes a block. Raises PydanticCustomError for an unsupported
    block.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for i, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in BLOCKS:
            shown = {"i": i, "kind": shortened(kind), "known": ", ".join(BLOCKS)}
            raise PydanticCustomError("unsupported_value", "block {i} is {kind}; this engine takes {known}", shown)
    return content


class TextBlock(RequestBody):
    """A text of a user, of the system, of an answer, or of a tool's result."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _marks_a_text(self) -> TextBlock:
        if self.cache_control and not self.text:
            raise PydanticCustomError("invalid_value", "an empty text has no breakpoint", {"field": "cache_control"})
        return self


Texts = Annotated[list[TextBlock], Field(fail_fast=True), BeforeValidator(_blocks, str | list[TextBlock])]


class ThinkingBlock(RequestBody):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    cache_control: None = None


class ToolUseBlock(RequestBody):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(RequestBody):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default_factory=list)
    cache_control: CacheControl | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class AnthropicMessage(RequestBody):
    """A message of the conversation."""

    unsupported: ClassVar = OF_MESSAGES_IN_CHATS

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(fail_fast=True), BeforeValidator(_blocks, str | list[Block])]

    @model_validator(mode="after")
    def _of_its_role(self) -> AnthropicMessage:
        for i, block in enumerate(self.content):
            if block.type not in _BLOCKS_OF[self.role]:
                shown = {"i": i, "kind": block.type, "role": self.role, "field": "content"}
                raise PydanticCustomError("invalid_value", "block {i} is {kind}, which the {role} cannot write", shown)
        return self


class AnthropicTool(RequestBody):
    """A tool that the model may call. Tools that Anthropic's servers run have another type."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None

    @property
    def function(self) -> dict[str, Any]:
        """The tool as a function of a chat."""
        return {"name": self.name, "description": self.description, "parameters": self.input_schema}


class ToolChoice(RequestBody):
    """Whether the answer calls tools: as the model decides, any tool, the tool `name`, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("invalid_value", "it is for the type tool, which needs it", {"field": "name"})
        return self


class Metadata(RequestBody):
    """The user for whom the client asks."""

    user_id: str | None = None


class Thinking(RequestBody):
    """Whether the model reasons before it answers. `adaptive` leaves it to the model's chat template."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(RequestBody):
    """A JSON Schema that the answer matches."""

    type: Literal["json_schema"]
    definition: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestBody):
    """The format of the answer, and the effort of the reasoning."""

    effort: str | None = None
    format: OutputFormat | None = None


class Diagnostics(RequestBody):
    """The message of this client with whose prompt this one is compared; none in the first turn."""

    previous_message_id: str | None = None


class CountBody(RequestBody):
    """Body of POST /v1/messages/count_tokens."""

    unsupported: ClassVar = _UNSUPPORTED

    model: str
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1)]
    system: Texts = Field(default_factory=list)
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking = Thinking(type="adaptive")
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None  # an earlier name of `output_config.format`
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # as in a chat

    @model_validator(mode="after")
    def _few_breakpoints(self) -> CountBody:
        marked = [f"tools[{i}]." for i, tool in enumerate(self.tools) if tool.cache_control]
        marked += [f"system[{i}]." for i, text in enumerate(self.system) if text.cache_control]
        for i, message in enumerate(self.messages):
            marked += [f"messages[{i}].content[{j}]." for j, block in enumerate(message.content) if block.cache_control]
        if self.cache_control:
            marked.append("")
        if (count := len(marked)) > MAX_BREAKPOINTS:
            shown = {"most": MAX_BREAKPOINTS, "count": count, "field": f"{marked[MAX_BREAKPOINTS]}cache_control"}
            raise PydanticCustomError("too_many", "a request has at most {most} breakpoints, got {count}", shown)
        return self

    def chat(self) -> ChatBody:
        """Return the request as a conversation of a chat. Raises ApiError (400)."""
        return self._chat(self.system, self.messages)

    def breakpoints(self) -> list[Breakpoint]:
        """Return the places up to which the client wants the prompt to be kept, in the prompt's order."""
        return [Breakpoint(ttl, altered and self._chat(*altered)) for ttl, altered in self._marked()]

    def _marked(self) -> Iterator[tuple[str, tuple[list[TextBlock], list[AnthropicMessage]] | None]]:
        """Yield the lifetime of each breakpoint, and a variant of the request, its system's text and messages, that
        differs directly after the breakpoint; None if nothing is after it.

        The prompts of both have their first different token after the breakpoint. So its place in tokens is found
        whatever the template writes between two texts.
        """
        first = self.messages[0].content[0] if self.messages[0].content else None
        other = _message("user", [_other(first)])
        for tool in self.tools:
            if tool.cache_control:
                system = [_other(self.system[0])] if self.system else []
                yield tool.cache_control.ttl, (system, [other])
        for i, text in enumerate(self.system):
            if text.cache_control:
                system = [*self.system[: i + 1], *map(_other, islice(self.system, i + 1, i + 2))]
                yield text.cache_control.ttl, (system, [other])
        for i, message in enumerate(self.messages):
            for j, block in enumerate(message.content):
                if block.cache_control:
                    yield block.cache_control.ttl, self._altered_after(i, j)
        if self.cache_control:
            yield self.cache_control.ttl, None

    def _altered_after(self, i: int, j: int) -> tuple[list[TextBlock], list[AnthropicMessage]] | None:
        """Return the system's text and the messages, with other text after block `j` of message `i`."""
        message = self.messages[i]
        more = message.content[j + 1 : j + 2]
        if not more and i + 1 == len(self.messages):
            return None
        messages = [
            *self.messages[:i],
            AnthropicMessage.model_construct(
                role=message.role, content=[*message.content[: j + 1], *map(_other, more)]
            ),
        ]
        if not more:
            following = self.messages[i + 1]
            messages.append(_message(following.role, [*map(_other, following.content[:1])]))
        return self.system, messages

    def _chat(self, system: Sequence[TextBlock], messages: Sequence[AnthropicMessage]) -> ChatBody:
        effort = self.output_config.effort
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": _conversation(system, messages),
            "tools": [{"type": "function", "function": tool.function} for tool in self.tools],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "enable_thinking": {"enabled": True, "disabled": False}.get(self.thinking.type),
            "reasoning_effort": None if effort == DEFAULT_EFFORT else effort,
            "chat_template_kwargs": ({"reasoning_effort": effort} if effort else {}) | self.chat_template_kwargs,
            "continue_final_message": messages[-1].role == "assistant",
            **self.more_fields(),
        }
        if output_format := self.output_config.format or self.output_format:
            schema = {"name": "answer", "schema": output_format.definition}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatBody.of(fields)

    def more_fields(self) -> dict[str, Any]:
        return {}


class MessagesBody(CountBody):
    """Body of POST /v1/messages. With `max_tokens` 0 the prompt is computed and kept, and not answered."""

    max_tokens: Annotated[int, Field(ge=0)]
    agent_id: str | None = None
    metadata: Metadata = Metadata()
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP)]], Field(fail_fast=True, max_length=MAX_STOPS)
    ] = Field(default_factory=list)
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    diagnostics: Diagnostics | None = None
    kv_transfer_params: TransferParams = TransferParams()  # as in a chat

    @model_validator(mode="after")
    def _complete_messages(self) -> MessagesBody:
        """Check that a user writes a text, and that each result of a tool is that of a call in the answer before it, as
        in Anthropic's API. An empty answer is not refused, because the engine's own can be empty.
        """
        calls: set[str] = set()
        answered = True  # whether the messages after the last answer have begun
        for i, message in enumerate(self.messages):
            if message.role == "assistant":
                ids = {block.id for block in message.content if isinstance(block, ToolUseBlock)}
                calls, answered = ids if answered else calls | ids, False
                continue
            answered = True
            if message.role == "user":
                _check_asked(message.content, f"messages[{i}].content", calls)
        return self

    @property
    def compared(self) -> str | None:
        """The id of the message with whose prompt this one is compared."""
        return self.diagnostics.previous_message_id if self.diagnostics else None

    def more_fields(self) -> dict[str, Any]:
        return {
            "max_tokens": max(1, self.max_tokens),
            "agent_id": self.agent_id,
            "user": self.metadata.user_id,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "kv_transfer_params": self.kv_transfer_params,
        }


def _check_asked(blocks: Sequence[Block], path: str, calls: Collection[str]) -> None:
    """Check the blocks of a user at `path`; `calls` are the ids of calls that they may answer. Raises
    PydanticCustomError.
    """
    if not blocks:
        raise PydanticCustomError("invalid_value", "must not be empty", {"field": path})
    for j, block in enumerate(blocks):
        if isinstance(block, TextBlock) and not block.text:
            raise PydanticCustomError("invalid_value", "must not be empty", {"field": f"{path}[{j}].text"})
        if isinstance(block, ToolResultBlock) and block.tool_use_id not in calls:
            shown = {"id": shortened(block.tool_use_id), "field": f"{path}[{j}].tool_use_id"}
            raise PydanticCustomError("invalid_value", "the answer before it has no tool_use with the id {id}", shown)


def _message(role: str, content: list[Block]) -> AnthropicMessage:
    """Return a message of blocks that were checked already."""
    return AnthropicMessage.model_construct(role=role, content=content)


def _other(block: Block | None) -> TextBlock:
    """Return a block whose text begins with another character than that of `block`."""
    return TextBlock(type="text", text=other_text(block.text if isinstance(block, TextBlock) else ""))


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _conversation(system: Sequence[TextBlock], messages: Sequence[AnthropicMessage]) -> list[dict[str, Any]]:
    """Return the messages of a chat.

    Results of tools become messages of their own. Consecutive messages of the same role become one, as in Anthropic's
    API. The texts of an answer are joined as the model wrote them, all others with an end of line.
    """
    found = [{"role": "system", "content": _joined(system)}] if system else []
    for message in messages:
        made = [_answer(message.content)] if message.role == "assistant" else list(_asked(message))
        for one in made:
            if found and found[-1]["role"] == one["role"] != "tool":
                found[-1] = _merged(found[-1], one)
            else:
                found.append(one)
    return found


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    between = "" if first["role"] == "assistant" else "\n"
    calls = first.get("tool_calls", []) + second.get("tool_calls", [])
    merged = {**first, **second, "content": between.join(filter(None, (first["content"], second["content"])))}
    return merged | ({"tool_calls": calls} if calls else {})


def _joined(texts: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in texts)


def _answer(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return an earlier answer as a message of a chat."""
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block.text for block in blocks if isinstance(block, TextBlock)),
    }
    if thoughts := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)}}
            for call in calls
        ]
    return message


def _asked(message: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """Yield a message of a user or the system as messages of a chat: results of tools, and texts between them."""
    texts: list[TextBlock] = []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": message.role, "content": _joined(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content)}
    if texts or not message.content:
        yield {"role": message.role, "content": _joined(texts)}
