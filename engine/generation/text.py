"""The text of tokens, the bytes of one token, the text of a conversation, and that of an answer after a prompt."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from .templates import Renderer, TemplateFailedError
from .tokens import PromptError, encode_after, encode_part

LONGEST_CHARACTER = 4  # bytes of UTF-8
CONTEXT = 8  # tokens before a token that may change its spelling, for a tokenizer of an unknown kind
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's spelling of a single byte


class Detokenizer(Protocol):
    """Interface of mlx-lm's StreamingDetokenizer that the engine uses."""

    @property
    def text(self) -> str:
        """The text so far, without an incomplete character."""

    def add_token(self, token: int) -> None:
        """Add a token's text."""

    def finalize(self) -> None:
        """Add an incomplete character at the end as U+FFFD."""


class TokenText:
    """Conversion of one tokenizer's tokens to text. A token without an entry in the vocabulary, such as a padding row
    of the model, has no text.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._spell: Callable[[str], bytes] | None = None  # None: the tokenizer decodes in an unknown way
        kind = tokenizer.detokenizer
        if isinstance(kind, BPEStreamingDetokenizer):
            self._spell = _byte_level
        elif isinstance(kind, SPMStreamingDetokenizer):
            self._spell = _sentence_piece

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of UTF-8 that a token adds to a text.

        Return None for a part of a character if the tokenizer does not provide its bytes.
        """
        piece = self.piece(token)
        if piece is None:
            return b""
        if self._spell:
            return self._spell(piece)
        once, twice = self._decode([token]), self._decode([token, token])
        text = twice[len(once) :] if twice.startswith(once) else once  # decoding drops a space before the first token
        return None if REPLACEMENT in text else text.encode()

    def of(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids. Bytes that are no UTF-8 become U+FFFD."""
        text = self.after(())
        for token in tokens:
            text.add_token(token)
        text.finalize()
        return text.text

    def piece(self, token: int) -> str | None:
        """Return the entry of the vocabulary for a token id; None if there is none."""
        if token >= len(self._tokenizer) and not getattr(self._tokenizer, "is_fast", False):
            return None  # tokenizers in Python raise all kinds of errors
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token)
        return piece

    def as_generated(self) -> Detokenizer:
        """Return a detokenizer whose text equals that of mlx_lm.generate, without the first space. Of an answer whose
        first tokens are single spaces, mlx_lm.generate removes them all with a SentencePiece tokenizer.
        """
        detokenizer = self._tokenizer.detokenizer
        size = len(detokenizer.tokenmap) if self._spell else None
        return _Known(detokenizer, lambda token: self.piece(token) is not None and (size is None or token < size))

    def after(self, prompt: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for an answer: its text is that of prompt and answer, without the text of the prompt.

        A character that the prompt begins and the answer completes belongs to the answer.
        """
        if self._spell:
            return _Bytes(self, prompt)
        return _Windowed(self, self._decode, prompt)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text


Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class ChatTemplate:
    """The chat template of a tokenizer, rendered in the renderer's process."""

    def __init__(self, tokenizer: TokenizerWrapper, renderer: Renderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer

    def source(self, tools: Tools = None) -> str | None:
        """Return the template for a conversation with these tools; None if it is a Python function of the tokenizer."""
        own = getattr(type(self._tokenizer._tokenizer), "apply_chat_template", None)
        if self._tokenizer._chat_template or own is not PreTrainedTokenizerBase.apply_chat_template:
            return None
        template: str = self._tokenizer.get_chat_template(None, tools)
        return template

    def text(
        self,
        messages: Messages,
        source: str | None,
        tools: Tools = None,
        *,
        asks: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the text of a conversation, rendered as by mlx-lm with a template from `source`. With `asks`, the
        beginning of an answer follows it.

        `variables` are further variables of the template. Raises TemplateFailedError if it fails, and PromptError for
        half of a surrogate pair, which JSON can contain and UTF-8 cannot.
        """
        asked = {"tools": tools, "add_generation_prompt": asks, **variables}
        if source is not None:
            own = {**self._tokenizer.special_tokens_map, "enable_thinking": self._tokenizer.has_thinking}
            text = self._renderer.render(messages, source, own | asked)
        else:
            try:
                text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, **asked))
            except Exception as error:
                raise TemplateFailedError(f"{type(error).__name__}: {error!s:.500}") from error
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise PromptError(f"{half!a} is half of a surrogate pair, which is no text") from None
        return text

    def plain(self, messages: Messages, asks: bool) -> str:
        """Return the text of a conversation without tools. Raises as `text`."""
        return self.text(messages, self.source(), asks=asks)

    def tokens(self, messages: Messages, *, asks: bool = True) -> list[int]:
        """Return the token ids of a conversation without tools, encoded as by mlx-lm. Raises as `text`."""
        return encode_part(self._tokenizer, self.plain(messages, asks))


def history_adds_space(tokenizer: Any, render: Callable[[Messages, bool], str]) -> bool:
    """Return whether the chat template, or the tokenizer after a special token, puts a space before an answer in the
    history, in addition to the answer's own.

    If so, the API removes a space at the beginning of an answer from the reply, so that the next prompt has the same
    tokens. `render` is `ChatTemplate.plain`. If it raises an exception, return False.
    """
    asked = {"role": "user", "content": "a"}
    try:
        prompt = render([asked], True)
        kept, dropped = (render([asked, {"role": "assistant", "content": text}], False) for text in (" b", "b"))
    except Exception:  # noqa: BLE001 - templates raise all kinds of errors
        return False
    if kept.startswith(prompt + "  b"):
        return True
    written = [*encode_part(tokenizer, prompt), *encode_after(tokenizer, " b")]
    return encode_part(tokenizer, dropped)[: len(written)] == written != encode_part(tokenizer, kept)[: len(written)]


class _Known:
    """Wrapper of mlx-lm's detokenizer that skips tokens without text, and removes one space at most."""

    def __init__(self, detokenizer: Any, known: Callable[[int], bool]) -> None:
        self._detokenizer = detokenizer
        self._known = known

    @property
    def text(self) -> str:
        return str(self._detokenizer.text)

    def add_token(self, token: int) -> None:
        if self._known(token):
            self._detokenizer.add_token(token)
            self._detokenizer.trim_space = False  # of SentencePiece's, which looks for one while its text is empty

    def finalize(self) -> None:
        self._detokenizer.finalize()


class _Bytes:
    """Detokenizer of an answer, for tokenizers that provide the bytes of each token."""

    def __init__(self, tokens: TokenText, prompt: Sequence[int]) -> None:
        self.text = ""
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        end = b""
        for token in reversed(prompt):
            end = (tokens.bytes_of(token) or b"") + end
            if len(end) >= LONGEST_CHARACTER:
                break
        self._decoder.decode(end)  # the decoder keeps an incomplete character for the next call

    def add_token(self, token: int) -> None:
        self.text += self._decoder.decode(self._tokens.bytes_of(token) or b"")

    def finalize(self) -> None:
        self.text += self._decoder.decode(b"", final=True)


class _Windowed:
    """Detokenizer of an answer, for other tokenizers. It decodes new tokens together with some tokens before them, and
    removes the text of the latter.
    """

    def __init__(self, tokens: TokenText, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        self.text = ""
        self._tokens = tokens
        self._decode = decode
        self._before = [token for token in prompt[-CONTEXT:] if tokens.piece(token) is not None]
        self._held: list[int] = []  # not in the text yet
        while self._before and decode(self._before).startswith(REPLACEMENT):
            self._before.pop(0)  # it begins within a character
        while self._before and decode(self._before).endswith(REPLACEMENT):
            self._held.insert(0, self._before.pop())

    def add_token(self, token: int) -> None:
        if self._tokens.piece(token) is not None:
            self._held.append(token)
            self._read(CONTEXT)

    def finalize(self) -> None:
        self._read(0)

    def _read(self, most: int) -> None:
        """Add the text of the held tokens. Up to `most` held tokens may be an incomplete character, which stays
        held.
        """
        text = self._decode([*self._before, *self._held])
        if text.endswith(REPLACEMENT) and len(self._held) <= most:
            return
        self.text += text[len(self._decode(self._before)) :]
        self._before, self._held = self._held or self._before, []


def _alphabet() -> dict[str, int]:
    """Return the byte of each character in the alphabet of byte-level vocabularies, which is that of GPT-2."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()
assert _ALPHABET.keys() == set(ByteLevel.alphabet())


def _byte_level(piece: str) -> bytes:
    """Return the bytes of a vocabulary entry as the tokenizers package decodes it.

    An entry with a character outside of the byte alphabet is text.
    """
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


def _sentence_piece(piece: str) -> bytes:
    if byte := BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode("utf-8", "replace")


# -- The text of an answer, token by token, up to a stop string --------------------------------------------------------


class AnswerText:
    """Text of an answer, from its tokens. Returned text is never revised: an incomplete character, and a possible
    beginning of a stop string, are held back.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        """Start with a new `detokenizer`. The text ends before the first of the `stop` strings that begins after the
        text of `min_tokens` tokens.
        """
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._text = ""
        self._min_tokens = min_tokens
        self._tokens = 0
        self._unsearched = 0  # characters at the beginning that are not searched for stop strings
        self._read = 0  # characters that `read` has returned
        self._held = 0  # characters at the end that may be the beginning of a stop string
        self._finished = False
        self.stopped_by: str | None = None  # the stop string that has ended the text

    @property
    def text(self) -> str:
        """The whole text of the answer, without the stop string and the text after it. Final after `finish`."""
        return self._text

    def add(self, token: int) -> None:
        self._detokenizer.add_token(token)
        self._tokens += 1
        if self._stop:
            self._look()

    def finish(self) -> None:
        """End the text, because no token follows. Text that was held back becomes final."""
        if self.stopped_by is None:
            self._detokenizer.finalize()
            self._look()
        self._finished = True
        self._held = 0

    def read(self) -> str:
        """Return the text that was completed since the last call."""
        if not (self._stop or self._finished):
            self._look()
        start, self._read = self._read, len(self._text) - self._held
        return self._text[start : self._read]

    def _look(self) -> None:
        before, self._text = len(self._text), self._detokenizer.text
        if self._tokens <= self._min_tokens:
            self._unsearched = len(self._text)
            return
        start = max(self._unsearched, before - self._longest)  # earlier text was searched before
        found = [(at, word) for word in self._stop if (at := self._text.find(word, start)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._text = self._text[:at]
        self._held = 0 if found else self._beginning_of_a_stop()

    def _beginning_of_a_stop(self) -> int:
        """Return the length in characters of the longest end of the text with which a stop string may begin."""
        lengths = range(min(self._longest - 1, len(self._text) - self._unsearched), 0, -1)
        ends = (length for length in lengths if any(word.startswith(self._text[-length:]) for word in self._stop))
        return next(ends, 0)
