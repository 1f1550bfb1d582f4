"""Prompts as token ids, their checks, and prompts for a text between two others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

MAX_TOKEN_IDS = 2**32  # a chain hash covers four bytes of each id


class PromptError(ValueError):
    """Error: the model cannot process a prompt."""


class EmptyPromptError(PromptError):
    """Error: a prompt has no token."""


class PromptTooLongError(PromptError):
    """Error: a prompt leaves no room for an answer in the model's context."""


class UnknownTokenError(PromptError):
    """Error: a prompt has an id that is not in the model's vocabulary, or is not a sequence of ids."""


def token_ids(tokens: Any, vocabulary: int = MAX_TOKEN_IDS) -> list[int]:
    """Return `tokens`, a sequence or an array, as a list of ids below `vocabulary`. Raises UnknownTokenError if that is
    not possible.
    """
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # elements of an array are not of the type int
    if not isinstance(tokens, Iterable) or isinstance(tokens, str | bytes | bytearray | memoryview | Mapping):
        raise UnknownTokenError(f"a prompt in tokens is a sequence of their ids, got {type(tokens).__name__}")
    found = list(tokens)
    if not all(type(token) is int for token in found):
        found = [_token_id(token) for token in found]
    if found and not (min(found) >= 0 and max(found) < vocabulary):
        wrong = next(token for token in found if not 0 <= token < vocabulary)
        raise UnknownTokenError(f"token ids are 0 to {vocabulary - 1}, got {wrong}")
    return found


def _token_id(token: Any) -> int:
    """Return a scalar of an array as an int. Raises UnknownTokenError for a bool or a value that is not an integer."""
    try:
        if isinstance(token, bool):
            raise TypeError
        return index(token)
    except TypeError:
        raise UnknownTokenError(f"token ids are whole numbers, got {token!r:.80}") from None


def check_prompt(tokens: Sequence[int], vocabulary: int, context: int | None) -> None:
    """Raise EmptyPromptError, PromptTooLongError or UnknownTokenError for a prompt that the model cannot process.

    `vocabulary` is the number of token ids, `context` the length of the model's context in tokens, None if unlimited.
    """
    if not tokens:
        raise EmptyPromptError("a prompt has at least one token")
    if context and len(tokens) >= context:
        raise PromptTooLongError(f"a prompt of {len(tokens)} tokens leaves no room in a context of {context}")
    token_ids(tokens, vocabulary)


def check_answer(max_tokens: int, stop: Sequence[str], logprobs: int, vocabulary: int) -> None:
    """Raise ValueError for a limit that an answer cannot have: `max_tokens` below 1, an empty stop string, or too many
    `logprobs`.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if not all(stop):
        raise ValueError("a stop string must not be empty")
    if not 0 <= logprobs <= vocabulary:
        raise ValueError(f"logprobs must be 0 to {vocabulary}, got {logprobs}")


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, encoded as by mlx_lm.generate. Raises UnknownTokenError if it is not valid
    Unicode, and PromptError if the tokenizer fails.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can contain
        raise UnknownTokenError(f"a prompt is text that UTF-8 can spell, got {text[error.start]!a}") from None
    bos = tokenizer.bos_token
    return _encoded(tokenizer, text, special=bos is None or not text.startswith(bos))


def encode_part(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a part of a prompt, without special tokens around it. Raises PromptError if the tokenizer
    fails.
    """
    return _encoded(tokenizer, text, special=False)


def _encoded(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=special, verbose=False))  # no warning of its length
    except BaseException as error:
        # PanicException of tokenizers: its regular expression takes too many steps for this text
        if type(error).__name__ != "PanicException":
            raise
        raise PromptError(f"the tokenizer cannot encode this text: {error}") from error


def encode_after(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text that continues another one, without the space that SentencePiece adds before a
    first word.
    """
    for separator in ("\n", "\x01"):  # the second for texts with whose beginning the first is one token
        before, whole = encode_part(tokenizer, separator), encode_part(tokenizer, separator + text)
        if whole[: len(before)] == before:
            return whole[len(before) :]
    return encode_part(tokenizer, text)


# -- Fill in the middle: prompts for a text between two others, for models that have tokens for it ---------------------

# The tokens before the text, before its continuation, and before the answer, by family.
_AFTER = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
# The same for families whose prompt begins with the continuation.
_BEFORE = (
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
)
# Tokens that end an answer, whether the model's configuration has them or not.
_ENDS = ("▁<EOT>", "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<file_sep>", "<|file_separator|>")


@dataclass(frozen=True, slots=True)
class Infill:
    """The token ids of a family: `middle` may be empty, `ends` end an answer."""

    prefix: int
    suffix: int
    middle: tuple[int, ...]
    suffix_first: bool
    ends: tuple[int, ...]

    def prompt(self, tokenizer: Any, before: str, after: str) -> list[int]:
        """Return the token ids of a prompt whose answer is the text between two others. Raises UnknownTokenError."""
        beginning = encode(tokenizer, before)
        plain = encode_part(tokenizer, before)
        special = beginning[: len(beginning) - len(plain)] if beginning[len(beginning) - len(plain) :] == plain else []
        encode(tokenizer, after)  # raises an exception if it is not valid Unicode
        texts = [[self.prefix, *plain], [self.suffix, *encode_after(tokenizer, after)]]
        if self.suffix_first:
            texts.reverse()
        return [*special, *texts[0], *texts[1], *self.middle]


def infill_of(tokenizer: Any) -> Infill | None:
    """Return the tokens of a tokenizer for a text between two others; None if it has none."""
    known: Mapping[str, int] = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    for suffix_first, families in ((False, _AFTER), (True, _BEFORE)):
        for prefix, suffix, middle in families:
            if prefix in known and suffix in known and (not middle or middle in known):
                middles = (known[middle],) if middle else ()
                ends = tuple(known[end] for end in _ENDS if end in known)
                return Infill(known[prefix], known[suffix], middles, suffix_first, ends)
    return None
