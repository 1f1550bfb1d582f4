"""Prompts for a text between two others (fill in the middle), for models that have tokens for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .tokens import encode

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
        plain = list(tokenizer.encode(before, add_special_tokens=False))
        special = beginning[: len(beginning) - len(plain)] if beginning[len(beginning) - len(plain) :] == plain else []
        encode(tokenizer, after)  # raises an exception if it is not valid Unicode
        # A continuation has no space before its first word, which SentencePiece would add.
        line = list(tokenizer.encode("\n", add_special_tokens=False))
        behind = list(tokenizer.encode("\n" + after, add_special_tokens=False))
        behind = (
            behind[len(line) :]
            if behind[: len(line)] == line
            else list(tokenizer.encode(after, add_special_tokens=False))
        )
        texts = [[self.prefix, *plain], [self.suffix, *behind]]
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
