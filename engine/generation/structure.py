"""Constraints on the text of an answer: JSON, JSON Schemas, regular expressions, choices and grammars.

llguidance compiles a constraint to a parser, which returns a bitmask of the tokens that may follow. A processor of
logits forbids all others. So a text that ends by itself matches the constraint, and a text that `max_tokens` cuts is
the beginning of one that does. The mask of a token depends on the token before it, so an answer with a constraint waits
for its last token before the next step of the model; other answers in the batch wait with it.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from .text import BYTE

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Separators as of `json.dumps`. Without further whitespace, a small model cannot add spaces without end.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
MAX_PROPERTIES = 500  # of a JSON Schema, in all its parts
MAX_REFERENCES = 1000  # of a JSON Schema, different ones
MAX_RULES = 500  # of a grammar; the mask of a token takes 0.05 s with ambiguous ones, and 0.3 s with 1,000
MAX_LETTERS = 32_768  # of a grammar
ALL_MASKS_SECONDS, MASK_SECONDS = 5.0, 0.02  # for the masks of a request: of all, and in addition for each token
MAX_PATTERN = 4096  # characters of a regular expression: time and memory of `a*` N times grow with the square of N
# llguidance follows chains of rules and of `$ref` by recursion: an overflow of the stack would end the process.
_STACK_BYTES = 256 << 20  # virtual memory; chains of 10,000 references need less
# The parts of Lark that are limited: regular expressions, the names of rules and tokens, and grammars of other kinds
# within it, whose parts are not. Strings and comments are passed over.
_LARK = re.compile(
    r""""(?:\\.|[^"\\])*" | //[^\n]* | (?P<regex>/(?:\\.|[^/\\])+/) | (?P<rule>^[ \t]*[?!]*[\w-]+[^:\n"/]*:)"""
    r"| (?P<other>%(?:json|regex|lark)\b)",
    re.MULTILINE | re.VERBOSE,
)
MAX_MULTIPLE = 10_000  # of `multipleOf`, without its decimal point: a state of the parser for each remainder
MAX_COUNT = 1_000_000  # of characters and items
MAX_GIVEN = 4096  # first tokens that are the same in all texts
MAX_GIVEN_BYTES = 16 * MAX_GIVEN  # of longer texts not even the tokens are counted, which takes Python's lock
_ROUNDS = (
    16  # over all references, to find a recursion without an end; after a longer chain of references it is not found
)
# About a tenth of a second for a compilation, and some milliseconds for the mask of a token.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 2_000_000,
    "step_lexer_fuel": 200_000,
    "max_grammar_size": 100_000,
    "max_items_in_row": 20_000,  # for MAX_PROPERTIES that are optional
    "verbose_errors": False,
}


class ConstraintError(ValueError):
    """Error: a constraint is invalid, too large, or uses an unsupported keyword. The message has the reason, and
    `field` is the field of the request, if the error occurs in the answer.
    """

    field: str | None = None


def of_json(schema: dict[str, Any] | bool) -> str:
    """Return the grammar of JSON texts that match a JSON Schema. Raises ConstraintError."""
    plain = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    _check(plain)
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(plain), overrides=JSON_OPTIONS)
    except ValueError as error:
        raise ConstraintError(f"the schema is nested too deeply: {error!s:.100}") from error


def of_regex(regex: str) -> str:
    """Return the grammar of texts that match a regular expression, in the syntax of Rust's regex crate. Raises
    ConstraintError.
    """
    if len(regex) > MAX_PATTERN:
        raise ConstraintError(f"a regular expression has {MAX_PATTERN} characters at most, got {len(regex):,}")
    return LLMatcher.grammar_from_regex(regex)


def of_choice(choices: Sequence[str]) -> str:
    """Return the grammar of one of some texts."""
    return LLMatcher.grammar_from_regex("|".join(map(escaped, choices)))


def of_grammar(grammar: str) -> str:
    """Return a grammar in the syntax of Lark, or of llama.cpp (GBNF). Raises ConstraintError."""
    if len(grammar) > MAX_LETTERS:
        raise ConstraintError(f"a grammar has {MAX_LETTERS:,} characters at most, got {len(grammar):,}")
    try:
        lark = grammar if is_lark_syntax(grammar) else gbnf_to_lark(_GBNF.sub(_plain, grammar))
    except Exception as error:
        raise ConstraintError(f"the grammar is invalid: {error!s:.300}") from error
    parts = [*_LARK.finditer(lark)]
    if (rules := sum(part["rule"] is not None for part in parts)) > MAX_RULES:
        raise ConstraintError(f"a grammar has {MAX_RULES:,} rules at most, got {rules:,}")
    if (letters := sum(len(part["regex"] or "") for part in parts)) > MAX_PATTERN:
        raise ConstraintError(f"the regular expressions of a grammar have {MAX_PATTERN} characters, got {letters:,}")
    if other := next((part["other"] for part in parts if part["other"]), None):
        raise ConstraintError(f"{other} is not supported within a grammar")
    return LLMatcher.grammar_from_lark(lark)


# Comments, texts and character classes of GBNF. One without an end is matched, too, so that the search is linear.
_GBNF = re.compile(r'#[^\r\n]*|"(?:[^"\\]|\\.)*"?|\[(?:[^\]\\]|\\.)*\]?', re.DOTALL)
_GBNF_CHARACTER = re.compile(
    r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(["\\\[\]nrt]))|([^\\])', re.DOTALL
)
_SHORT_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_ESCAPED = {value: f"\\{name}" for name, value in _SHORT_ESCAPES.items()}


def _plain(found: re.Match[str]) -> str:
    """Return a text or a class of GBNF for llguidance's converter, which does not know all escapes, and takes some
    plain characters of a class as operators of regular expressions. Raises ConstraintError.
    """
    whole, inner = found[0], found[0][1:-1]
    if whole[0] == "#" or len(whole) < 2 or whole[-1] != {'"': '"', "[": "]"}[whole[0]]:
        return whole
    negated = whole.startswith("[^")
    parts = [*_GBNF_CHARACTER.finditer(inner, negated)]
    if negated + sum(len(part[0]) for part in parts) < len(inner):
        return whole  # the converter refuses an unknown escape
    if whole[0] == '"':
        return f'"{"".join(_escaped(_character(part), _IN_TEXTS) for part in parts)}"'
    made, i = list[str](), 0
    while i < len(parts):
        is_range = i + 2 < len(parts) and parts[i + 1][0] == "-"
        ends = parts[i : i + 3 : 2] if is_range else parts[i : i + 1]
        made.append("-".join(_escaped(_character(part), _IN_CLASSES) for part in ends))
        i += 3 if is_range else 1
    return f"[{'^' if negated else ''}{''.join(made)}]"


_IN_TEXTS, _IN_CLASSES = '"\\', "\\[]^-&~"  # characters that are escaped


def _character(found: re.Match[str]) -> str:
    digits = found[1] or found[2] or found[3]
    code = int(digits or "0", 16)
    if code > sys.maxunicode or 0xD800 <= code < 0xE000:
        raise ConstraintError(f"the grammar is invalid: {found[0]} is no character")
    return chr(code) if digits else _SHORT_ESCAPES.get(found[4], found[4]) or found[5]


def _escaped(character: str, special: str) -> str:
    if character in _ESCAPED:
        return _ESCAPED[character]
    if character in special:
        return f"\\{character}" if character in '"\\[]' else f"\\x{ord(character):02x}"
    return f"\\x{ord(character):02x}" if ord(character) < 32 or ord(character) == 127 else character


def of_lark(lark: str) -> str:
    """Return a grammar in llguidance's variant of Lark."""
    return LLMatcher.grammar_from_lark(lark)


def lark_of_json(schema: Mapping[str, Any]) -> str:
    """Return Lark for JSON texts that match a JSON Schema, which is an object. Raises ConstraintError."""
    _check(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def compiling_thread(model: str) -> ThreadPoolExecutor:
    """Return an executor with one thread for a model. Its stack is large enough for every grammar within the limits."""
    usual = threading.stack_size(_STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(1, f"constraints {model}")
        executor.submit(bool)  # starts the thread
    finally:
        threading.stack_size(usual)
    return executor


def _check(schema: Any) -> None:
    """Raise ConstraintError for a schema with many properties, whose compilation takes quadratic time, for costly or
    empty values of keywords, and for a recursion that no text can end.
    """
    found, parts, references, multiple, patterns = 0, [schema], set(), 1, 0
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            _check_values(part)
            properties, expressions, pattern = map(part.get, ("properties", "patternProperties", "pattern"))
            patterns += len(pattern) if isinstance(pattern, str) else 0
            patterns += sum(map(len, expressions)) if isinstance(expressions, dict) else 0
            found += len(properties) if isinstance(properties, dict) else 0
            multiple *= _digits(part.get("multipleOf"))
            if isinstance(part.get("$ref"), str):
                references.add(part["$ref"])
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    if found > MAX_PROPERTIES:
        raise ConstraintError(f"properties: a schema has {MAX_PROPERTIES} at most, got {found}")
    if patterns > MAX_PATTERN:
        raise ConstraintError(f"pattern: all together have {MAX_PATTERN} characters at most, got {patterns:,}")
    if len(references) > MAX_REFERENCES:
        raise ConstraintError(f"$ref: a schema has {MAX_REFERENCES} different ones at most, got {len(references)}")
    if multiple > MAX_MULTIPLE:  # llguidance multiplies those of `allOf`
        raise ConstraintError(f"multipleOf: the product of all is {MAX_MULTIPLE} at most, without decimal points")
    if not _ends(schema, references):
        raise ConstraintError("$ref: a text that matches this recursion has no end")


def _check_values(schema: dict[str, Any]) -> None:
    """Raise ConstraintError for values of keywords of which llguidance does not name the keyword."""
    for word in ("enum", "type", "anyOf", "oneOf", "allOf"):
        if schema.get(word) == []:
            raise ConstraintError(f"{word}: an empty list allows no value")
    for word, value in schema.items():
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ConstraintError(f"{word}: a number has 64 bits at most")
        if word in ("minLength", "maxLength", "minItems", "maxItems") and isinstance(value, int) and value > MAX_COUNT:
            raise ConstraintError(f"{word}: {MAX_COUNT} at most, got {value}")


def _digits(multiple: Any) -> int:
    """Return the number without decimal point and last zeros of `multipleOf`; 1 for another value."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not math.isfinite(multiple):
        return 1
    return max(1, abs(int("".join(map(str, Decimal(str(multiple)).normalize().as_tuple().digits)))))


def _ends(schema: Any, references: Collection[str]) -> bool:
    """Return whether a text of finite length can match a schema, which has these references. Return True, too, if that
    is not known after _ROUNDS. Raises ConstraintError for a schema that is nested too deeply.
    """
    targets = {reference: _target(schema, reference) for reference in references}
    finite: set[str] = set()  # references to schemas that a text of finite length matches
    try:
        for _ in range(_ROUNDS):
            if not (more := {name for name in targets.keys() - finite if _is_finite(targets[name], finite)}):
                return _is_finite(schema, finite)
            finite |= more
    except RecursionError as error:
        raise ConstraintError("the schema is nested too deeply") from error
    return True


def _target(schema: Any, reference: str) -> Any:
    """Return the part of a schema that a reference means by its path (RFC 6901); True for other references."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    part = schema
    for name in reference.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        else:
            return True
    return part


def _is_finite(schema: Any, references: Collection[str]) -> bool:
    """Return whether a text of finite length can match a schema, if that is so for these `references`.

    Only a value that must be in the text can be without an end: required properties, one property if `minProperties` is
    given, and the first items of a list.
    """
    if not isinstance(schema, dict):
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in references:
        return False
    for word, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        members = schema.get(word)
        if isinstance(members, list) and not enough(_is_finite(member, references) for member in members):
            return False
    kind = schema.get("type")
    if kind in ("object", ["object"]):
        return _is_finite_object(schema, references)
    if kind in ("array", ["array"]) and isinstance(least := schema.get("minItems", 0), int):
        first = schema.get("prefixItems")
        first = first[:least] if isinstance(first, list) else []
        others = [schema.get("items")] if least > len(first) else []
        return all(_is_finite(item, references) for item in [*first, *others])
    return True


def _is_finite_object(schema: dict[str, Any], references: Collection[str]) -> bool:
    """Return whether each property that an object must have can be finite."""
    properties, patterns, required = (schema.get(word) for word in ("properties", "patternProperties", "required"))
    named = properties if isinstance(properties, dict) else {}
    others = [*patterns.values()] if isinstance(patterns, dict) else []  # schemas of properties with other names
    if schema.get("additionalProperties") is not False:
        others.append(schema.get("additionalProperties"))
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    choices = [[named[name]] if name in named else others for name in needed]
    if not needed and schema.get("minProperties"):
        choices.append([*named.values(), *others])
    return all(any(_is_finite(one, references) for one in some) for some in choices)


def escaped(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)


class Constraints:
    """Compiler of constraints for a model. It may be used on one thread, other than that of the engine."""

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: int, ends: Collection[int]) -> None:
        """Create a compiler. `vocabulary` is the number of token ids of the model's logits, `ends` are the ids that end
        an answer.
        """
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = sorted(ends)
        self._compiled: LLTokenizer | None = None

    def prepare(self) -> None:
        """Read the vocabulary, in a second if it is large, before the first constraint. Raises ConstraintError."""
        assert self._of_llguidance

    def compile(self, grammar: str, begin: int | None = None) -> Constraint:
        """Compile a grammar. With `begin`, a token id, the constraint begins with each such token, and ends with the
        text of the grammar. Raises ConstraintError.
        """
        matcher = LLMatcher(self._of_llguidance, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            error = " ".join(matcher.get_error().split())[:300]
            if error.startswith("Pointer "):
                error = f"$ref: {error}"
            raise ConstraintError("oneOf: its alternatives overlap" if "coerce_one_of" in error else error)
        # The mask is computed first, because this finds the given bytes without Python's lock.
        possible = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        given = matcher.deep_copy()  # by a recursion without an end, or `minItems`, for example
        if (length := len(given.compute_ff_bytes())) > MAX_GIVEN_BYTES:
            raise ConstraintError(f"its texts begin with {length:,} bytes that are always the same: too many")
        if len(given.compute_ff_tokens()) > MAX_GIVEN:
            raise ConstraintError(f"its texts begin with more than {MAX_GIVEN} tokens that are always the same")
        possible[self._ends] = 0
        if not possible.any():  # an endless recursion of `$ref`, for example
            raise ConstraintError("no text matches it")
        return Constraint(matcher, self._ends, begin)

    def pieces(self, text: str) -> list[str | int]:
        """Split a text into its special tokens, as their ids, and the texts between them."""
        special = self._special
        found = re.split(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True))) or '(?!)'})", text)
        return [special.get(piece, piece) for piece in found if piece]

    def literal(self, text: str) -> str:
        """Return Lark for one text. Its special tokens are these tokens, and not their spelling."""
        return " ".join(map(self.of_piece, self.pieces(text))) or '""'

    def of_piece(self, piece: str | int) -> str:
        """Return Lark for a result of `pieces`."""
        return json.dumps(piece, ensure_ascii=False) if isinstance(piece, str) else f"<[{piece}]>"

    @cached_property
    def _special(self) -> dict[str, int]:
        """Ids of the tokens that llguidance does not consider to be text, by their content."""
        tokens, added = self._of_llguidance, self._tokenizer.added_tokens_decoder
        return {token.content: i for i, token in added.items() if i < self._vocabulary and tokens.is_special_token(i)}

    @property
    def _of_llguidance(self) -> LLTokenizer:
        """The tokenizer as llguidance needs it."""
        if self._compiled is None:
            fast = self._tokenizer._tokenizer
            if not isinstance(fast, PreTrainedTokenizerFast):
                raise ConstraintError("this model's tokenizer cannot constrain answers: it is not of `tokenizers`")
            definition = json.loads(fast.backend_tokenizer.to_str())
            decoder = definition["decoder"] or {}
            for step in decoder.get("decoders", [decoder]):
                if step.get("content", " ") != " ":  # llguidance knows only replacements by a space
                    raise ConstraintError("this model's tokenizer cannot constrain answers: its decoder replaces text")
            try:
                spelling = json.dumps(_without_spelling(definition))
                self._compiled = LLTokenizer(spelling, n_vocab=self._vocabulary, eos_token=self._ends)
            except BaseException as error:
                # ValueError: a decoder that llguidance does not know; PanicException: a token of a thousand bytes
                if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                    raise
                raise ConstraintError(f"this model's tokenizer cannot constrain answers: {error}") from error
        return self._compiled


def _without_spelling(definition: dict[str, Any]) -> dict[str, Any]:
    """Return the definition of a tokenizer (tokenizer.json) with other names of its added tokens.

    llguidance encodes text that a grammar requires with the tokenizer. With their own names, the text of an added
    token, such as ``<|im_end|>`` in a schema's enum, would become the token, which may end the answer. Tokens of one
    byte or character are text, also if the tokenizer lists them as special, and so are tokens that merges make, unless
    it does.

    A text that a grammar requires is not normalized, for example to NFC, and gets no first space: an answer has to
    have its bytes.
    """
    model = {**definition["model"]}
    vocabulary = model["vocab"]
    pieces = vocabulary if isinstance(vocabulary, dict) else {piece for piece, _ in vocabulary}
    merges: list[list[str]] = model.get("merges") or []
    made = set(map("".join, merges))
    text = {piece for piece in pieces if len(piece) == 1 or BYTE.fullmatch(piece)}
    text |= {it["content"] for it in definition["added_tokens"] if not it["special"] and it["content"] in made}
    listed = [token for token in definition["added_tokens"] if token["content"] not in text]
    unique = secrets.token_hex(8)
    names = {token["content"]: f"<{unique}-{token['id']}>" for token in listed}
    added = [{**token, "content": names[token["content"]]} for token in listed]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in vocabulary.items()}
    else:  # pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if unknown := model.get("unk_token"):
        model["unk_token"] = names.get(unknown, unknown)
    if not (names.keys().isdisjoint(made) and names.keys().isdisjoint(chain.from_iterable(merges))):
        model["merges"] = [pair for pair in merges if names.keys().isdisjoint((*pair, "".join(pair)))]
    split, normal = _without_first_space(definition.get("pre_tokenizer")), _of_spaces(definition.get("normalizer"))
    changes = {"added_tokens": added, "model": model, "normalizer": normal, "pre_tokenizer": split}
    return {**definition, **changes, "truncation": None, "padding": None}


def _of_spaces(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the part of a normalizer's definition that replaces spaces, as SentencePiece's do."""
    if normalizer is None:
        return None
    if normalizer["type"] == "Sequence":
        return {**normalizer, "normalizers": [part for part in map(_of_spaces, normalizer["normalizers"]) if part]}
    of_spaces = normalizer["type"] == "Prepend" or normalizer.get("pattern") == {"String": " "}
    return normalizer if of_spaces else None


def _without_first_space(split: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the definition of a pre-tokenizer that puts no space before a text. llguidance does so for Metaspace."""
    if split is None:
        return None
    if split["type"] == "Sequence":
        return {**split, "pretokenizers": [_without_first_space(one) for one in split["pretokenizers"]]}
    return {**split, "add_prefix_space": False} if split["type"] == "ByteLevel" else split


class Constraint:
    """A compiled constraint."""

    def __init__(self, matcher: LLMatcher, ends: Sequence[int], begin: int | None) -> None:
        self._matcher = matcher
        self._ends = ends
        self._begin = begin
        self.field: str | None = None  # of the request
        self._masks, self._seconds = 0, 0.0  # of all answers of the request so far, and the time for them

    def _error(self, text: str) -> ConstraintError:
        error = ConstraintError(text[:300])
        error.field = self.field
        return error

    def processor(self, prompt: int, after: Sequence[int] = ()) -> Callable[[mx.array, mx.array], mx.array]:
        """Return a processor of logits for one answer to a prompt of `prompt` tokens. If the answer begins with
        reasoning, the constraint begins `after` the tokens that end it.
        """
        return self._bounded(self._of_calls(prompt) if self._begin is not None else self._of_text(prompt, after))

    def _bounded(self, process: Callable[[mx.array, mx.array], mx.array]) -> Callable[[mx.array, mx.array], mx.array]:
        """Return a processor that raises ConstraintError if the masks of the request took too long: those of an
        ambiguous grammar take time that grows with the square of the length of the text.
        """

        def bounded(tokens: mx.array, logits: mx.array) -> mx.array:
            begun = time.thread_time()  # a busy machine does not end an answer
            masked = process(tokens, logits)
            self._masks, self._seconds = self._masks + 1, self._seconds + time.thread_time() - begun
            if self._seconds > ALL_MASKS_SECONDS + self._masks * MASK_SECONDS:
                raise self._error(f"the masks of {self._masks:,} tokens took {self._seconds:.1f} s")
            return masked

        return bounded

    def _of_text(self, prompt: int, after: Sequence[int]) -> Callable[[mx.array, mx.array], mx.array]:
        """Return a processor for a constraint that begins with the answer, or `after` these tokens. Before them the
        answer cannot end: the next of them is as likely as the end.
        """
        matcher, seen = self._matcher.deep_copy(), prompt
        before: list[int] | None = [] if after else None  # the last tokens of the reasoning

        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            nonlocal seen, before
            more: list[int] = tokens[seen:].tolist()  # type: ignore[assignment]
            seen += len(more)
            if before is not None:
                before = [*before, *more][-len(after) :]
                if before != [*after]:
                    found = next(i for i in reversed(range(len(after))) if before[len(before) - i :] == [*after[:i]])
                    return self._unended(logits, after[found])
                before, more = None, []
            if more and more[-1] in self._ends:
                return logits  # the answer has ended, and this token is not used
            if not matcher.consume_tokens(more):
                raise self._error(f"the answer left its constraint: {matcher.get_error()}")
            return self._masked(matcher, logits)

        return process

    def _unended(self, logits: mx.array, instead: int) -> mx.array:
        """Return logits without the tokens that end an answer; token `instead` is at least as likely as they were."""
        ends = np.zeros(logits.shape[-1], bool)
        ends[self._ends] = True
        other = mx.where(mx.array(ends), -mx.inf, logits)
        likeliest = mx.max(mx.where(mx.array(ends), logits, -mx.inf), axis=-1, keepdims=True)
        return mx.where(mx.arange(logits.shape[-1]) == instead, mx.maximum(logits, likeliest), other)

    def _of_calls(self, prompt: int) -> Callable[[mx.array, mx.array], mx.array]:
        """Return a processor for a constraint that begins with a token."""
        matcher, seen = None, prompt

        def process(tokens: mx.array, logits: mx.array) -> mx.array:
            nonlocal seen, matcher
            more: list[int] = tokens[seen:].tolist()  # type: ignore[assignment]
            seen += len(more)
            for token in more:
                if matcher is None and token == self._begin:
                    matcher = self._matcher.deep_copy()
                if matcher and not matcher.consume_token(token):
                    raise self._error(f"the answer left its constraint: {matcher.get_error()}")
                if matcher and matcher.is_stopped():
                    matcher = None
            return self._masked(matcher, logits) if matcher else logits

        return process

    def _masked(self, matcher: LLMatcher, logits: mx.array) -> mx.array:
        """Return logits without the tokens that may not follow."""
        allowed = np.zeros(logits.shape[-1], bool)
        if matcher.is_stopped():  # nothing may follow but the end
            allowed[self._ends] = True
        else:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed[: len(bits)] = bits[: len(allowed)]
        if matcher.is_error():
            raise self._error(f"no token can be chosen: {matcher.get_error()}")
        return mx.where(mx.array(allowed), logits, -mx.inf)
