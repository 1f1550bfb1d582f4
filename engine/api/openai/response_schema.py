"""The body of POST /v1/responses, as pydantic models, and its conversion to a conversation of a chat."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from .errors import ApiError, invalid, renamed, shortened
from .schema import (
    MAX_TOOLS,
    OF_CHATS,
    OF_MESSAGES,
    OF_MESSAGES_IN_CHATS,
    ChatBody,
    ChatCacheOptions,
    MarkedBody,
    RequestBody,
    Retention,
    TransferParams,
    Values,
    joined,
    marked,
)

MAX_NEW_ITEMS = 20  # in one request to a conversation, as OpenAI's API
ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")

_UNSUPPORTED: dict[str, Values] = {
    **OF_CHATS,
    **OF_MESSAGES,
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "image": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tokens": (),
    "max_tool_calls": (),
    "messages": (),
    "top_k": (0, -1),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

# The paths of fields in errors of the chat to which a request is converted: see `renamed`.
NAMES = {
    r"messages|prompt": "input",
    r"max_tokens": "max_output_tokens",
    r"reasoning_effort": "reasoning.effort",
    r"response_format": "text.format",
    r"response_format\.json_schema\.(.+)": r"text.format.\1",
    r"(tools\[\d+\])\.function\.(.+)": r"\1.\2",
    r"tool_choice\.function\.name": "tool_choice.name",
    r"tool_choice\.allowed_tools\.(tools\[\d+\])\.function\.name": r"tool_choice.\1.name",
    r"tool_choice\.allowed_tools\.(.+)": r"tool_choice.\1",
}


def _text(content: Any) -> Any:
    return joined(content, TEXTS)


def _items(given: Any) -> Any:
    """Return the input as a list of items: a text is a message of the user, and an item without a type is a message, or
    a reference if it is an id only.

    Raises PydanticCustomError for an unsupported item.
    """
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    items = [
        {"type": "item_reference" if item.keys() == {"id"} else "message", **item} if isinstance(item, dict) else item
        for item in given
    ]
    for i, item in enumerate(items):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind not in ITEMS:
            shown = {"i": i, "kind": shortened(kind), "known": ", ".join(ITEMS)}
            raise PydanticCustomError("unsupported_value", "item {i} is {kind}; this engine takes {known}", shown)
    return items


Text = Annotated[str, BeforeValidator(_text, str | list[dict[str, Any]])]


ShortName = Annotated[str, Field(max_length=64)]
ShortText = Annotated[str, Field(max_length=512)]


class MessageItem(MarkedBody):
    """A message of the conversation."""

    unsupported: ClassVar = OF_MESSAGES_IN_CHATS

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class FunctionCallItem(RequestBody):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionResultItem(MarkedBody):
    """The result of a tool call."""

    TEXT: ClassVar = "output"

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class ReasoningItem(RequestBody):
    """Reasoning of an earlier answer. Its summary is ignored, because the model did not write it."""

    type: Literal["reasoning"]
    content: Text = ""


class ItemReference(RequestBody):
    """The id of an item of a stored response or conversation, which takes its place before the prompt is made."""

    type: Literal["item_reference"]
    id: str


Item = Annotated[
    MessageItem | FunctionCallItem | FunctionResultItem | ReasoningItem | ItemReference, Field(discriminator="type")
]
Items = Annotated[list[Item], Field(fail_fast=True), BeforeValidator(_items, str | list[dict[str, Any]])]


class ResponseTool(RequestBody):
    """A tool that the model may call. Tools that OpenAI's servers run have another type."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextFormat(RequestBody):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    definition: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "json_schema" and self.definition is None:
            raise PydanticCustomError("missing", "Field required", {"field": "schema"})
        return self


class TextConfig(RequestBody):
    """The format of the answer's text."""

    unsupported: ClassVar = {"verbosity": ()}

    format: TextFormat = TextFormat()


class Reasoning(RequestBody):
    """The effort of the reasoning. The whole reasoning is in the answer, so it needs no summary."""

    unsupported: ClassVar = {"context": ("auto",), "mode": ("standard",)}

    effort: str | None = None


class PromptCacheOptions(ChatCacheOptions):
    """Options of the prompt cache, also whether to compute the prompt only, and the response whose prompt to
    compare.
    """

    unsupported: ClassVar = {}

    prewarm: bool = False
    comparison_response_id: str | None = None


Metadata = Annotated[dict[ShortName, ShortText], Field(max_length=16)]


class MetadataBody(RequestBody):
    """Body of POST /v1/conversations/{id}."""

    metadata: Metadata = Field(default_factory=dict)


class ItemsBody(RequestBody):
    """Body of POST /v1/conversations/{id}/items."""

    items: Annotated[Items, Field(max_length=MAX_NEW_ITEMS)]


class ConversationBody(MetadataBody):
    """Body of POST /v1/conversations."""

    items: Annotated[Items, Field(max_length=MAX_NEW_ITEMS)] = Field(default_factory=list)


class ConversationParam(RequestBody):
    """The conversation to which a response belongs."""

    id: str


def _conversation_param(given: Any) -> Any:
    return {"id": given} if isinstance(given, str) else given


class ResponseBody(RequestBody):
    """Body of POST /v1/responses."""

    unsupported: ClassVar = _UNSUPPORTED

    model: str
    input: Items = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[
        ConversationParam | None, BeforeValidator(_conversation_param, str | ConversationParam | None)
    ] = None
    store: bool = True
    stream: bool = False
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    metadata: Metadata = Field(default_factory=dict)
    agent_id: str | None = None
    user: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: PromptCacheOptions = PromptCacheOptions()
    prompt_cache_retention: Retention = "in_memory"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # as in a chat
    kv_transfer_params: TransferParams = TransferParams()  # as in a chat

    @model_validator(mode="after")
    def _one_conversation(self) -> ResponseBody:
        if self.conversation and (self.previous_response_id is not None or not self.store):
            cause = "takes no previous_response_id" if self.store else "is stored: store is true"
            raise PydanticCustomError(
                "invalid_value", "a conversation {cause}", {"cause": cause, "field": "conversation"}
            )
        return self

    def chat(self, earlier: Sequence[dict[str, Any]]) -> ChatBody:
        """Return the request as a conversation of a chat, which begins with the items `earlier` of stored responses.

        Raises ApiError (400).
        """
        if not self.input and not earlier:
            if "input" in self.model_fields_set:
                raise invalid("input: must not be empty", "input")
            raise invalid("input: Field required", "input", "missing_required_parameter")
        known = self._known(earlier)
        _check_results(known, self.input)
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": _conversation(self.instructions, [*known, *self.input]),
            "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "max_tokens": 1 if self.prompt_cache_options.prewarm else self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "agent_id": self.agent_id,
            "user": self.user,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        text_format = self.text.format
        if text_format.type != "text" and text_format.definition is not None:
            schema = {"name": text_format.name or "answer", "schema": text_format.definition}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif text_format.type != "text":
            fields["response_format"] = {"type": text_format.type}
        return ChatBody.of(fields).model_copy(
            update={
                "prompt_cache_options": self.prompt_cache_options,
                "prompt_cache_retention": self.prompt_cache_retention,
                "kv_transfer_params": self.kv_transfer_params,
            }
        )

    def _known(self, earlier: Sequence[dict[str, Any]]) -> Sequence[Item]:
        """Return the items of stored responses. Raises ApiError (400), for example for a call that was cut."""
        try:
            return Before.of({"input": list(earlier)}).input
        except ApiError as error:
            name = "conversation" if self.conversation else "previous_response_id"
            raise invalid(f"{name}: its items cannot be continued: {error}", name) from error


class Before(RequestBody):
    """The items of stored responses."""

    input: Items


def restored(stored: dict[str, Any], path: str) -> Item:
    """Return the stored item to which the item at `path` of a request refers. Raises ApiError (400), for example for a
    call that was cut.
    """
    try:
        (item,) = Before.of({"input": [stored]}).input
    except ApiError as error:
        raise renamed(error, {r"input\[0\](.*)": rf"{path}\1"}) from error
    return item


# An item's id has the first letter and the unique part of the id of its response or conversation, its owner, so that
# references find it.

_OWNERS = {"r": "resp", "c": "conv"}
_ITEM_ID = re.compile(r"[a-z]+_([rc])([0-9a-f]{32})[0-9a-f]{16}")


def new_item_id(prefix: str, owner: str) -> str:
    """Return an id for a new item of a response or a conversation."""
    kind, _, unique = owner.partition("_")
    return f"{prefix}_{kind[0]}{unique}{secrets.token_hex(8)}"


def item_owner(item_id: str) -> str:
    """Return the id of the response or the conversation that had an item first; an empty text for another id."""
    found = _ITEM_ID.fullmatch(item_id)
    return f"{_OWNERS[found[1]]}_{found[2]}" if found else ""


def _choice(choice: Any) -> Any:
    """Return OpenAI's `tool_choice` of a response as that of a chat, where the names are one level deeper."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        deeper = tools = choice.get("tools")
        if isinstance(tools, list):
            deeper = [
                {"type": "function", "function": {"name": tool.get("name")}} if isinstance(tool, dict) else tool
                for tool in tools
            ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": deeper}}
    return choice


def _check_results(known: Iterable[Item], given: Iterable[Item]) -> None:
    """Raise ApiError (400) for the first result of `given` without a call before it, as OpenAI's API does."""
    calls = {item.call_id for item in known if isinstance(item, FunctionCallItem)}
    for i, item in enumerate(given):
        if isinstance(item, FunctionCallItem):
            calls.add(item.call_id)
        elif isinstance(item, FunctionResultItem) and item.call_id not in calls:
            param = f"input[{i}].call_id"
            raise invalid(f"{param}: no function_call before it has the call_id {shortened(item.call_id)}", param)


def _conversation(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat. Reasoning, text and calls of one answer become one message."""
    found: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        if isinstance(item, FunctionResultItem):
            content = marked(item.output, item.marks)
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            found.append({"role": item.role, "content": marked(item.content, item.marks)})
        else:
            if not (found and found[-1]["role"] == "assistant") or _begins_anew(item, found[-1]):
                found.append({"role": "assistant", "content": ""})
            _extend(found[-1], item)
    return found


def _begins_anew(item: Item, message: dict[str, Any]) -> bool:
    """Return whether an item of an answer cannot belong to `message`, because an answer begins with it."""
    if isinstance(item, ReasoningItem):
        return True
    return isinstance(item, MessageItem) and bool(message["content"] or message.get("tool_calls"))


def _extend(message: dict[str, Any], item: Item) -> None:
    if isinstance(item, MessageItem):
        message["content"] += item.content
    elif isinstance(item, ReasoningItem):
        message["reasoning_content"] = item.content
    elif isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        message.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
