"""Log-probabilities of tokens, as chat and text completions show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.generation.token_text import REPLACEMENT, TokenText
from engine.scheduling.request import Token

Reply = dict[str, Any]


class ChatLikelihoods:
    """The `logprobs` of /v1/chat/completions."""

    def __init__(self, token_text: TokenText, count: int) -> None:
        """`count`: likeliest tokens that are shown for each token."""
        self._token_text = token_text
        self._count = count

    def of(self, tokens: Sequence[Token]) -> Reply:
        content = [
            {
                **self._of_token(token.token, token.logprob),
                "top_logprobs": [self._of_token(*likely) for likely in token.top[: self._count]],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _of_token(self, token: int, logprob: float | None) -> Reply:
        spelled = self._token_text.bytes_of(token)
        return {"token": _shown(spelled), "logprob": logprob, "bytes": None if spelled is None else list(spelled)}


class TextLikelihoods:
    """The `logprobs` of /v1/completions. It is given all tokens of an answer, in their order."""

    def __init__(self, token_text: TokenText, prompt: Sequence[int], count: int) -> None:
        """`count`: likeliest tokens that are shown for each token."""
        self._token_text = token_text
        self._count = count
        self._answer = token_text.after(prompt)

    def of(self, tokens: Sequence[Token]) -> Reply:
        return {
            "tokens": [self._text(token.token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [self._offset(token.token) for token in tokens],
        }

    def _text(self, token: int) -> str:
        return _shown(self._token_text.bytes_of(token))

    def _top(self, token: Token) -> dict[str, float]:
        """The likeliest tokens by their text. If two have the same text, the less likely one has its id instead."""
        top: dict[str, float] = {}
        for likely, logprob in token.top[: self._count]:
            text = self._text(likely)
            top[f"token_id:{likely}" if text in top else text] = logprob
        return top

    def _offset(self, token: int) -> int:
        """The place of the next token in the answer's text, or of the character of which it is a part."""
        offset = len(self._answer.text)
        self._answer.add_token(token)
        return offset


def _shown(spelled: bytes | None) -> str:
    """The text of a token's bytes. Bytes that are not whole characters are escaped, as in OpenAI's API."""
    return REPLACEMENT if spelled is None else spelled.decode("utf-8", "backslashreplace")
