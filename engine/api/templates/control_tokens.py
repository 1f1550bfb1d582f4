"""Control tokens in the text of a user or of a tool, such as ``<|im_end|>``.

A tokenizer makes the token of such a text, wherever it comes from. So a user can end a turn and begin the system's. A
mark after the first character of the text keeps it apart from the template's own: the rendered conversation is encoded
in pieces, cut at the marks, and no piece has a whole control token of a user's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

MARK = "\ufdd1"  # Unicode's for use within a program: no text has it
ROLES = ("user", "tool")
_BEFORE = "\n"  # SentencePiece adds a space before the first word of a text, and so not before a piece


class ControlTokens:
    """Keeps control tokens out of contents."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        """Control tokens are all special tokens, and other added tokens that the template, a thought or a tool call
        has. Without a template that can be read, they are all added tokens."""
        marks = (tokenizer.think_start, tokenizer.think_end, tokenizer.tool_call_start, tokenizer.tool_call_end)
        written = "\0".join(mark for mark in (template, *marks) if mark)
        added: Iterable[Any] = tokenizer.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special or not template or token.content in written}
        longest_first = sorted((text for text in texts if len(text) > 1 and text.strip()), key=len, reverse=True)
        # A lookahead finds a token that begins within another one, too.
        self._found = re.compile(f"(?=({'|'.join(map(re.escape, longest_first)) or '(?!)'}))")
        self._tokenizer = tokenizer

    def marked(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message whose content has marks, if its role is one of ROLES."""
        if message["role"] not in ROLES:
            return message
        content = message["content"].replace(MARK, "\ufffd")
        cuts = [0, *(found.start() + 1 for found in self._found.finditer(content)), len(content)]
        return {**message, "content": MARK.join(content[a:b] for a, b in pairwise(cuts))}

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered conversation, without its marks."""
        first, *rest = text.split(MARK)
        tokens = self._encode(first)
        if rest:
            before = self._encode(_BEFORE)
            for piece in rest:
                made = self._encode(_BEFORE + piece)
                tokens += made[len(before) :] if made[: len(before)] == before else self._encode(piece)
        return tokens

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
