"""The bodies of requests, as pydantic models.

Unknown fields are ignored, as by other OpenAI-compatible servers, because clients send many that change nothing. A
field that would change the answer and is not supported is refused. ``null`` is the same as an absent field, at any
depth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NotRequired, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, from_json
from typing_extensions import TypedDict

from kvpage_server import bounded

from ...generation.sampling import MAX_BIAS, MAX_XTC_THRESHOLD, Sampling
from ...generation.structure import of_choice, of_grammar, of_json, of_regex
from .errors import ApiError, invalid, shortened

# -- Unsupported fields that would change the answer, with the values that are accepted, because they change nothing ---

Values = tuple[object, ...]

_IN_BOTH: dict[str, Values] = {
    # Fields of vLLM, SGLang, llama.cpp, mlx-lm, and services.
    "adapters": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "custom_logit_processor": (),
    "custom_params": (),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "frequency_context_size": (),
    "grammar": ("",),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora": ([],),
    "lora_path": (),
    "mirostat": (0,),
    "n_predict": (),  # of llama.cpp, where it has precedence over `max_tokens`, also if it is -1 (no limit)
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "presence_context_size": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "random_seed": (),
    "regex": (),
    "repeat_penalty": (1, 0),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "samplers": (),
    "session_params": (),
    "skip_special_tokens": (False,),
    "stop_regex": ([],),
    "t_max_predict_ms": (0, -1),
    "thinking_budget_tokens": (-1,),
    "thinking_token_budget": (),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (),
}
# Fields that chats refuse; Responses and Messages, too.
_IN_CONVERSATIONS: dict[str, Values] = {
    **_IN_BOTH,
    "audio": (),
    "best_of": (1,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "verbosity": (),
    "web_search_options": (),
    # Fields of other servers.
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "include_reasoning": (True,),
    "input_ids": (),
    "parse_tool_calls": (True,),
    "prompt": (),
    "reasoning_format": ("auto", "deepseek"),
    "role_mapping": (),
    "separate_reasoning": (True,),
    "suffix": ("",),
    "thinking_budget": (),
}
# Fields of some APIs that others do not have.
OF_CHATS: dict[str, Values] = {
    **_IN_CONVERSATIONS,
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "enable_thinking": (),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_context_size": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "seed": (),
    "stop": ([],),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "xtc_probability": (0,),
}
OF_RESPONSES: dict[str, Values] = {
    "conversation": (),
    "input": (),
    "instructions": (),
    "max_output_tokens": (),
    "previous_response_id": (),
    "reasoning": (),
    "text": ({"format": {"type": "text"}},),
}
OF_MESSAGES: dict[str, Values] = {
    "output_config": ({},),
    "output_format": (),
    "stop_sequences": ([],),
    "system": ("", []),
    "thinking": (),
}
IN_CHATS: dict[str, Values] = {**_IN_CONVERSATIONS, **OF_RESPONSES, **OF_MESSAGES}
IN_TEXTS: dict[str, Values] = {
    **_IN_BOTH,
    **OF_RESPONSES,
    **OF_MESSAGES,
    "add_special_tokens": (True,),
    # Fields of chats.
    "max_completion_tokens": (),
    "messages": (),
    "reasoning_effort": (),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
}
IN_MESSAGES: dict[str, Values] = {
    "audio": (),
    "function_call": (),
    "prefix": (False,),  # of DeepSeek and Mistral
}
# Fields of a message in a chat that messages in Responses and Messages do not have.
OF_MESSAGES_IN_CHATS: dict[str, Values] = {
    "function_call": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "tool_calls": ([],),
}


MAX_CONTAINERS = 8_192  # lists and objects
MAX_STRINGS = 16_384  # including names of fields; a conversation of 4,096 messages has this number
MAX_VALUES = 131_072  # enough for a long prompt of token ids
MAX_STOPS = 16
# Types of blocks and items in the other APIs.
TAGS = ("text", "thinking", "tool_use", "tool_result", "message", "function_call", "function_call_output", "reasoning")
MAX_STOP = 256  # characters of a stop text, which is compared with the answer at every token
MAX_TOOLS = 128  # as OpenAI's API
MAX_TOP_LOGPROBS = 20  # as OpenAI's API
MAX_STOP_IDS = 128
MAX_ACTIONS = 32  # in an envelope of hints
MAX_ANSWERS = 32  # to one request: the size of the engine's batch
MAX_BREAKPOINTS = 4  # in a request, as the clouds' APIs
MAX_REPETITION_PENALTY = 10  # above about 2, texts are nonsense


def _only(*allowed: object) -> AfterValidator:
    """Return a pydantic validator for a field of OpenAI's API that accepts only the values `allowed`."""

    def check(value: object) -> object:
        if value not in allowed:
            shown = " or ".join(map(json.dumps, allowed))
            raise PydanticCustomError("unsupported_value", "this engine supports only {allowed}", {"allowed": shown})
        return value

    return AfterValidator(check)


class PartBreakpoint(TypedDict):
    """A breakpoint of the prompt cache at the end of a part."""

    mode: Literal["explicit"]
    ttl: NotRequired[Literal["30m", "12h"]]


class TextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: NotRequired[PartBreakpoint]


class RefusalPart(TypedDict):
    """A part of a message of the assistant: its text is that of the refusal."""

    type: Literal["refusal"]
    refusal: str


class Mark(NamedTuple):
    """A breakpoint in a text."""

    end: int  # characters of the text before it
    ttl: str | None  # its lifetime; None for the request's


def joined(content: Any, kinds: Collection[str]) -> Any:
    """Join the parts of a content, of these kinds, to one text. Content that is no list is returned unchanged.

    Raises PydanticCustomError for other parts.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            shown = {"i": i, "kind": shortened(kind)}
            raise PydanticCustomError("unsupported_value", "part {i} is {kind}; this engine takes only text", shown)
        if not isinstance(text := part.get("refusal" if kind == "refusal" else "text"), str):
            raise PydanticCustomError("invalid_value", "part {i} has no text", {"i": i})
        texts.append(text)
    return "".join(texts)


def marked(text: str, marks: Sequence[Mark]) -> str | list[dict[str, Any]]:
    """Return a text with breakpoints as the content of a message: as parts, if there is a breakpoint."""
    starts = [0, *(mark.end for mark in marks)]
    found = [
        {"type": "text", "text": text[start:end], "prompt_cache_breakpoint": {"mode": "explicit", "ttl": ttl}}
        for start, (end, ttl) in zip(starts, marks, strict=False)
    ]
    return [*found, {"type": "text", "text": text[starts[-1] :]}] if found else text


def _marks(content: Any, name: str) -> Iterator[Mark]:
    """Yield the breakpoints in a valid content of the field `name`. Raises PydanticCustomError."""
    end = 0
    for i, part in enumerate(content if isinstance(content, list) else ()):
        end += len(part.get("refusal" if part["type"] == "refusal" else "text"))
        if (given := part.get("prompt_cache_breakpoint")) is None:
            continue
        path = f"{name}[{i}].prompt_cache_breakpoint"
        if not isinstance(given, dict):
            raise PydanticCustomError("dict_type", "", {"field": path})
        ttl = given.get("ttl")
        if given.get("mode") != "explicit":
            raise PydanticCustomError(
                "invalid_value", "a breakpoint needs the mode explicit", {"field": f"{path}.mode"}
            )
        if ttl not in (None, "30m", "12h"):
            needs = "a breakpoint needs a ttl of 30m, or in /v1/responses 12h"
            raise PydanticCustomError("invalid_value", needs, {"field": f"{path}.ttl"})
        yield Mark(end, ttl)


def _text(content: Any) -> Any:
    return joined(content, ("text", "refusal"))


def other_text(text: str) -> str:
    """Return a text that begins with another character."""
    return "b" if text.startswith("a") else "a"


def _biases(biases: Any) -> Any:
    """Return biases by token id. In JSON the ids are texts. Raises PydanticCustomError."""
    if not isinstance(biases, dict):
        return biases
    for token in biases:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise PydanticCustomError("invalid_value", "{token} is no token id, 0 or more", {"token": shortened(token)})
    return {int(token): bias for token, bias in biases.items()}


def _schema(schema: Any) -> Any:
    """Return a JSON Schema, decoded if it is a text. Raises PydanticCustomError."""
    if not isinstance(schema, str):
        return schema
    try:
        return from_json(schema, allow_inf_nan=False)
    except ValueError as error:
        raise PydanticCustomError("invalid_value", "it is not JSON: {error}", {"error": str(error)}) from error


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts of a request: a text, token ids, or a list of them. Raises PydanticCustomError, ApiError."""
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        if len(prompt) > MAX_ANSWERS:
            raise PydanticCustomError("too_long", "a request has at most {most} prompts", {"most": MAX_ANSWERS})
        return [_prompt(one, f"prompt[{i}]") for i, one in enumerate(prompt)]
    return [_prompt(prompt, "prompt")]


def _prompt(prompt: Any, name: str) -> str | list[int]:
    """Return a text or token ids; `name` is its place in the body. Raises PydanticCustomError, ApiError.

    Ids are checked in Python, so that other threads can run meanwhile.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise PydanticCustomError("string_type", "Input should be a valid string, token ids, or a list of them")
    for i, token in enumerate(prompt):
        if type(token) is not int or token < 0:
            param = f"{name}[{i}]"
            raise invalid(f"{param}: a token id is a number, 0 or more, got {shortened(token)}", param)
    return prompt


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, Values]] = {}  # fields that change the answer, except with these values

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parse a body in JSON. Raises ApiError (400) with the name of the first wrong field."""
        try:
            bounded.check(raw, containers=MAX_CONTAINERS, strings=MAX_STRINGS, values=MAX_VALUES)
            body = from_json(raw, allow_inf_nan=False)
        except bounded.TooMuchError as error:
            raise invalid(f"the body holds {error}", code="body_too_large") from error
        except ValueError as error:
            if "recursion limit" in str(error):
                raise invalid("the body is nested too deeply: 200 levels are the most", code="invalid_json") from error
            if "hex escape" in str(error):
                raise invalid(
                    f"the body has half of a surrogate pair, which is no text, or an incomplete escape: {error}",
                    code="invalid_json",
                ) from error
            raise invalid(f"the body is not JSON: {error}", code="invalid_json") from error
        if not isinstance(body, dict):
            raise invalid("the body must be a JSON object", code="invalid_json")
        return cls.of(body)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Return a body with these fields. Raises ApiError (400) with the name of the first wrong field."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _refusal(error.errors(include_url=False)) from error

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON Schema for /openapi.json, with the fields that are not supported."""
        reference = handler(core)
        for name, allowed in cls.unsupported.items():
            field = {"description": "Not supported.", "enum": [*allowed, None]}
            handler.resolve_ref_schema(reference).setdefault("properties", {})[name] = field
        return reference

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        """Remove nulls from a body. Raises ApiError for an unsupported field."""
        if not isinstance(body, dict):
            return body
        for name, allowed in cls.unsupported.items():
            if (value := body.get(name)) is not None and value not in allowed:
                only = f"supports only {' or '.join(map(json.dumps, allowed))}" if allowed else "does not support it"
                raise PydanticCustomError("unsupported_value", "this engine {only}", {"only": only, "field": name})
        return {name: value for name, value in body.items() if value is not None}


class Function(RequestBody):
    """The function of a tool call, with its arguments as JSON."""

    name: str
    arguments: str = "{}"


class ToolCall(RequestBody):
    """A tool call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class MarkedBody(RequestBody):
    """A part of the conversation, with a text that may have breakpoints."""

    TEXT: ClassVar[str] = "content"  # the field with the text

    _marks: list[Mark] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _marked(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(given)
        made._marks = list(_marks(given.get(cls.TEXT), cls.TEXT))
        return made

    @property
    def marks(self) -> Sequence[Mark]:
        """The breakpoints in the text."""
        return self._marks


class Message(MarkedBody):
    """A message of the conversation."""

    unsupported = IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text, str | list[TextPart | RefusalPart] | None)] = None
    refusal: Annotated[str | None, Field(exclude=True)] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # of DeepSeek and vLLM; templates of reasoning models write it
    reasoning: str | None = None  # of mlx-lm and newer vLLM, for the same

    @model_validator(mode="after")
    def _refused(self) -> Self:
        """Use a refusal as the text of the message, after its content."""
        if self.refusal:
            self.content = (self.content or "") + self.refusal
        return self


class FunctionTool(RequestBody):
    """The function of a tool: its name, its description, and the JSON Schema of its parameters."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, Field(exclude=True)] = None  # not for the chat template


class Tool(RequestBody):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(RequestBody):
    """The name of a function that is a tool."""

    name: str


class NamedTool(RequestBody):
    """A tool by its name."""

    type: Annotated[str, _only("function")]
    function: NamedFunction


class AllowedTools(RequestBody):
    """The tools that an answer may call, or has to."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class ChosenTools(RequestBody):
    """Choice of tools: `none`, `auto`, `required`, a `function`, or `allowed_tools`."""

    type: Annotated[str, _only("function", "allowed_tools", "auto", "none", "required")]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for field in ("function", "allowed_tools"):
            if (self.type == field) != (getattr(self, field) is not None):
                raise PydanticCustomError("invalid_value", f"it is for the type {field}", {"field": field})
        return self

    @property
    def names(self) -> list[str] | None:
        """Names of the tools that may be called; None for all."""
        if self.allowed_tools:
            return [tool.function.name for tool in self.allowed_tools.tools]
        return [self.function.name] if self.function else None

    @property
    def forces(self) -> bool:
        """Whether the answer has to call a tool."""
        return self.type in ("required", "function") or bool(
            self.allowed_tools and self.allowed_tools.mode == "required"
        )


def _choice(choice: Any) -> Any:
    """Return a choice of tools as an object. Raises PydanticCustomError."""
    if not isinstance(choice, str):
        return choice
    if choice not in ("auto", "none", "required"):
        allowed = {"allowed": "none, auto, required, or an object with a type"}
        raise PydanticCustomError("unsupported_value", "this engine supports only {allowed}", allowed)
    return {"type": choice}


class StreamOptions(RequestBody):
    """Options of a streamed reply."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # of vLLM: with `include_usage`, each chunk has the numbers so far


class JsonSchema(RequestBody):
    """A named JSON Schema. Answers match it, whether it is `strict` or not."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    definition: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """Format of the answer."""

    type: Annotated[str, _only("text", "json_object", "json_schema")]
    json_schema: JsonSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_schema(cls, given: Any) -> Any:
        """Accept llama.cpp's form, in which the schema is next to the type."""
        if not isinstance(given, dict) or given.get("json_schema") is not None or given.get("schema") is None:
            return given
        if given.get("type") not in ("json_object", "json_schema"):
            return given
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given["schema"]}}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("invalid_value", "it is for the type json_schema", {"field": "json_schema"})
        return self


Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1)]
Schema = Annotated[dict[str, Any], BeforeValidator(_schema, str | dict[str, Any])]


class StructuredOutputs(RequestBody):
    """Constraints of an answer, as in vLLM."""

    unsupported = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (True, False),
        "structural_tag": (),
        "whitespace_pattern": (),
    }

    definition: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool = False


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
_Stops = Annotated[list[_Stop], Field(fail_fast=True, max_length=MAX_STOPS)]
Stops = Annotated[_Stops, BeforeValidator(_listed, _Stop | _Stops)]


class HintAction(RequestBody):
    """A hint on contexts. The components that carry hints out define the types, versions and payloads of actions."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class HintsEnvelope(RequestBody):
    """vLLM's envelope of hints (`v1/kv_hints/protocol.py`)."""

    protocol_version: Literal["1"]
    message_id: str
    actions: Annotated[list[HintAction], Field(fail_fast=True, max_length=MAX_ACTIONS)]


class TransferParams(RequestBody):
    """vLLM's parameters of a request for its connectors."""

    kv_hints: HintsEnvelope | None = None


_Given = TypeVar("_Given")


def _made(grammar: Callable[[_Given], str], given: _Given | None) -> Callable[[], str] | None:
    return None if given is None else partial(grammar, given)


class CompletionFields(RequestBody):
    """Fields that chat and text completions have in common."""

    model: str
    agent_id: str | None = None
    user: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stops = Field(default_factory=list)
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], BeforeValidator(_biases)] = {}
    # Of vLLM and mlx-lm.
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    xtc_probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    xtc_threshold: Annotated[float, Field(ge=0, le=MAX_XTC_THRESHOLD)] = 0.1
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_REPETITION_PENALTY)] = 1.0
    repetition_context_size: Annotated[int, Field(ge=1)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True, max_length=MAX_STOP_IDS)] = []
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    kv_transfer_params: TransferParams = TransferParams()  # of vLLM
    # Constraints of the answer's text.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def constraints(self) -> dict[str, Callable[[], str]]:
        """Constraints of the answer by the names of their fields, as functions that return a grammar. They raise
        ConstraintError.
        """
        formatted, outputs = self.response_format or ResponseFormat(type="text"), self.structured_outputs
        named = formatted.json_schema
        found: dict[str, Callable[[], str] | None] = {
            "response_format": _made(of_json, {"type": "object"} if formatted.type == "json_object" else None),
            "response_format.json_schema.schema": _made(of_json, named.definition if named else None),
            "guided_json": _made(of_json, self.guided_json),
            "guided_regex": _made(of_regex, self.guided_regex),
            "guided_choice": _made(of_choice, self.guided_choice),
            "guided_grammar": _made(of_grammar, self.guided_grammar),
        }
        if outputs:
            found |= {
                "structured_outputs.json": _made(of_json, outputs.definition),
                "structured_outputs.regex": _made(of_regex, outputs.regex),
                "structured_outputs.choice": _made(of_choice, outputs.choice),
                "structured_outputs.grammar": _made(of_grammar, outputs.grammar),
                "structured_outputs.json_object": _made(of_json, {"type": "object"} if outputs.json_object else None),
            }
        return {name: make for name, make in found.items() if make}

    @property
    def choices(self) -> int:
        """Number of answers to compute for each prompt."""
        return self.n

    @property
    def continued(self) -> str | None:
        """The beginning of the answer in a conversation; None for a text."""
        return None

    def sampling(self, kept_by_xtc: Collection[int]) -> Sampling:
        """Return the parameters of the choice of tokens. XTC excludes no token of `kept_by_xtc`."""
        return Sampling(
            self.temperature,
            self.top_p,
            max(0, self.top_k),
            self.min_p,
            self.xtc_probability,
            self.xtc_threshold,
            kept_by_xtc,
            self.seed,
            self.logit_bias,
            self.repetition_penalty,
            self.repetition_context_size,
            self.presence_penalty,
            self.frequency_penalty,
            self.min_tokens,
            self.ignore_eos,
        )


class ChatCacheOptions(RequestBody):
    """Options of the prompt cache. In the mode `implicit` the end of the prompt is a breakpoint, too."""

    unsupported: ClassVar = {"ttl": ("30m",), "prewarm": (False,), "comparison_response_id": ()}

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m", "12h"] = "30m"


LIFETIMES = {"": 0, "5m": 300, "30m": 1800, "1h": 3600, "12h": 43_200, "24h": 86_400}  # seconds
Retention = Literal["in_memory", "24h"]


class Breakpoint(NamedTuple):
    """A place in a conversation up to which the client wants the prompt to be kept."""

    ttl: str  # the lifetime, a key of LIFETIMES; empty if the request names none
    altered: ChatBody | None  # the conversation with other text after the breakpoint; None if nothing is after it


class ChatBody(CompletionFields):
    """Body of POST /v1/chat/completions."""

    unsupported = IN_CHATS

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Annotated[ChosenTools, BeforeValidator(_choice)] = ChosenTools(type="auto")
    parallel_tool_calls: bool = True
    reasoning_effort: Annotated[str, Field(max_length=MAX_STOP)] | None = None
    prompt_cache_options: ChatCacheOptions = ChatCacheOptions()
    prompt_cache_retention: Retention = "in_memory"

    # Of vLLM and SGLang.
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    enable_thinking: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def continued(self) -> str:
        """The beginning of the answer, which the last message has; empty without one."""
        last = self.messages[-1]
        return (last.content or last.reasoning_content or last.reasoning or "") if self.continue_final_message else ""

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for the chat template."""
        named = {"enable_thinking": self.enable_thinking, "reasoning_effort": self.reasoning_effort}
        return self.chat_template_kwargs | {name: value for name, value in named.items() if value is not None}

    @property
    def offered(self) -> list[Tool]:
        """Tools that the answer may call: none of them with `tool_choice: none`."""
        if self.tool_choice.type == "none":
            return []
        names = self.tool_choice.names
        return [tool for tool in self.tools if names is None or tool.function.name in names]

    @property
    def breakpoints(self) -> list[Breakpoint]:
        """The latest breakpoints, in the prompt's order: of the mode `explicit` MAX_BREAKPOINTS in texts; of the mode
        `implicit` one less in texts, and the end of the prompt.
        """
        options, given = self.prompt_cache_options, self.prompt_cache_options.model_fields_set
        found = [(i, mark) for i, message in enumerate(self.messages) for mark in message.marks]
        retention = self.prompt_cache_retention if self.prompt_cache_retention in LIFETIMES else ""
        ttl = options.ttl if "ttl" in given or ((given or found) and not retention) else retention
        implicit = [Breakpoint(ttl, None)] if options.mode == "implicit" else []
        latest = found[len(implicit) - MAX_BREAKPOINTS :]
        marks = [(mark.ttl or options.ttl, i, mark.end) for i, mark in latest]
        return [*(Breakpoint(ttl, self._altered(i, end)) for ttl, i, end in marks), *implicit]

    def _altered(self, i: int, end: int) -> ChatBody | None:
        """Return the conversation with other text after the first `end` characters of message `i`."""
        messages, text = self.messages[: i + 1], self.messages[i].content or ""
        if end < len(text):
            messages[i] = messages[i].model_copy(update={"content": text[:end] + other_text(text[end:])})
        elif following := self.messages[i + 1 : i + 2]:
            messages.append(following[0].model_copy(update={"content": other_text(following[0].content or "")}))
        else:
            return None
        return self.model_copy(update={"messages": messages, "continue_final_message": False})

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the answer; None if the request has none."""
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _chosen_tools(self) -> Self:
        known = {tool.function.name for tool in self.tools}
        if self.tool_choice.forces and not known:
            raise PydanticCustomError("invalid_value", "it needs tools", {"field": "tool_choice"})
        for name in self.tool_choice.names or ():
            if name not in known:
                missing = {"field": "tool_choice", "name": shortened(name)}
                raise PydanticCustomError("invalid_value", "no tool has the name {name}", missing)
        return self

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("invalid_value", "it needs logprobs to be true", {"field": "top_logprobs"})
        return self


class CompletionBody(CompletionFields):
    """Body of POST /v1/completions."""

    unsupported = IN_TEXTS

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts, str | list[int] | list[str | list[int]])]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    echo: bool = False
    suffix: str = ""

    @property
    def choices(self) -> int:
        """Number of answers to compute for each prompt."""
        return self.best_of or self.n

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.choices < self.n:
            raise PydanticCustomError("invalid_value", "it must be at least n", {"field": "best_of"})
        if self.choices > self.n and self.stream:
            raise PydanticCustomError("invalid_value", "a stream has no best_of above n", {"field": "best_of"})
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise PydanticCustomError("invalid_value", "the prompt before it must be a text", {"field": "suffix"})
        if self.echo and self.logprobs is not None:
            unsupported = "this engine has no logprobs of a prompt, so echo takes none"
            raise PydanticCustomError("unsupported_value", unsupported, {"field": "echo"})
        return self


class ForkBody(RequestBody):
    """Body of POST /v1/agents/{id}/fork."""

    to: str
    replace: bool = False  # whether to replace an agent of this name


_CODES = {"missing": "missing_required_parameter", "unsupported_value": "unsupported_value"}


def _refusal(errors: Sequence[ErrorDetails]) -> ApiError:
    """Return the ApiError (400) for the first wrong field of a body, from pydantic's errors.

    A field with several alternative types has an error for each; the one with the most list indices is the most
    precise.
    """
    alike = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    closest = max(alike, key=lambda error: sum(isinstance(part, int) for part in error["loc"]))
    param = _param(closest["loc"], closest.get("ctx", {}).get("field"))
    kind = closest["type"]
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    message = "Input should be an object" if kind in ("dict_type", "model_type") else closest["msg"]
    return invalid(f"{param}: {message}", param, code)


def _param(loc: Sequence[int | str], field: str | None) -> str:
    """Return the path of a field: ``messages[0].content`` for pydantic's ("messages", 0, "content"). `field` is the
    rest of the path, if pydantic does not have it.

    pydantic's names for the alternatives of a union are omitted, and so are TAGS of the items of a list.
    """
    shown = ""
    for i, part in enumerate(loc):
        if isinstance(part, int):
            shown += f"[{part}]"
        elif i and isinstance(loc[i - 1], int) and part in TAGS and (field or i + 1 < len(loc)):
            continue
        elif part.isidentifier() and part not in ("str", "int", "list"):
            shown += f".{part}" if shown else part
    return ".".join(filter(None, (shown, field)))
