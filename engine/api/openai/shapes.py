"""Formats of OpenAI's replies: chat and text completions, complete or as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pydantic_core import to_json

from ...agent_engine import Answer, Boundary
from ...generation.text import REPLACEMENT, TokenText
from ...memory.lifetimes import KeptContext
from ...scheduling.request import Token
from .errors import ApiError
from .reading import AnswerPart, Reader
from .schema import LIFETIMES

# -- Log-probabilities of tokens, as chat and text completions show them -----------------------------------------------

Reply = dict[str, Any]


class ChatLikelihoods:
    """Format of the `logprobs` of /v1/chat/completions."""

    def __init__(self, token_text: TokenText, count: int) -> None:
        """Create the format with the `count` likeliest tokens at the position of each token."""
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
    """Format of the `logprobs` of /v1/completions. `of` must be called with all tokens of an answer, in order."""

    def __init__(self, token_text: TokenText, prompt: Sequence[int], count: int) -> None:
        """Create the format for the answer to `prompt` (token ids), with the `count` likeliest tokens at each
        position.
        """
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
        """Return the log-probabilities of the likeliest tokens, and of the answer's token, by text.

        If two tokens have the same text, the key of the less likely one is its id, unless it is the answer's token.
        """
        likeliest, own = token.top[: self._count], self._text(token.token)
        if token.logprob is not None and all(likely != token.token for likely, _ in likeliest):
            likeliest = (*likeliest, (token.token, token.logprob))
        top: dict[str, float] = {}
        for likely, logprob in likeliest:
            text = self._text(likely)
            named = likely != token.token and (text == own or text in top)
            top[f"token_id:{likely}" if named else text] = logprob
        return top

    def _offset(self, token: int) -> int:
        """Return the offset of the next token in the answer's text, in characters; of a token that continues a
        character, the offset of this character. Must be called once per token.
        """
        offset = len(self._answer.text)
        self._answer.add_token(token)
        return offset


def _shown(spelled: bytes | None) -> str:
    """Return the text of a token's bytes. Incomplete characters are escaped, as in OpenAI's API; "" for None."""
    return REPLACEMENT if spelled is None else spelled.decode("utf-8", "backslashreplace")


class Kind(NamedTuple):
    """The names of an endpoint's objects."""

    prefix: str  # of ids
    whole: str
    chunk: str


CHAT = Kind("chatcmpl", "chat.completion", "chat.completion.chunk")
TEXT = Kind("cmpl", "text_completion", "text_completion")


class Envelope:
    """Fields that all replies to a request have in common."""

    def __init__(
        self,
        kind: Kind,
        model: str,
        fingerprint: int,
        agent_id: str | None,
        boundaries: Sequence[Boundary] | None,
        *,
        counts: bool,
    ) -> None:
        """Set the fields. `agent_id` is the client's name for the agent. `boundaries` of the prompt are in ascending
        order; None for the end of each prompt. With `counts`, chunks of a stream have the field `usage`.
        """
        self._kind = kind
        self._id = f"{kind.prefix}-{uuid.uuid4().hex}"
        self._common = {"created": int(time.time()), "model": model, "system_fingerprint": f"fp_{fingerprint:016x}"}
        self._agent_id = agent_id
        self._boundaries = boundaries
        self._counts = counts
        self.prompt_tokens: int | None = None  # of all prompts: `usage` of chunks has the numbers so far; None: null
        self._generated = 0

    def count_token(self) -> None:
        """Count a token of an answer."""
        self._generated += 1

    def chunk(self, *choices: Reply, **more: Any) -> Reply:
        """Return a chunk of a stream, with parts of some choices."""
        usage: Reply = {"usage": None} if self._counts else {}
        if self._counts and self.prompt_tokens is not None:
            numbers = self.prompt_tokens, self._generated, self.prompt_tokens + self._generated
            usage["usage"] = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), numbers, strict=True))
        return {"id": self._id, "object": self._kind.chunk, **self._common, "choices": choices, **usage, **more}

    async def whole(self, choices: Sequence[Reply], prompts: Sequence[Answer], answers: Sequence[Answer]) -> Reply:
        """Return the complete reply to a request. `prompts` are answers, one for each prompt; `answers` are all."""
        opening = {"id": self._id, "object": self._kind.whole, **self._common, "choices": choices}
        usage = usage_of(prompts, answers, self._boundaries)
        return opening | {"usage": usage, "kvpage": self.kvpage(answers[0])}

    def encoded(self, chunks: Iterable[Reply]) -> bytes:
        """Return chunks as server-sent events."""
        return b"".join(b"data: %s\n\n" % to_json(chunk, inf_nan_mode="null") for chunk in chunks)

    async def ending(self, prompts: Sequence[Answer], answers: Sequence[Answer]) -> bytes:
        """Return the last events of a stream, as `whole`: the numbers of tokens, if chunks have them, and the end."""
        counts = [self.chunk(usage=usage_of(prompts, answers, self._boundaries))] if self._counts else []
        return self.encoded(counts) + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that has failed."""
        return self.encoded([error.body])

    def kvpage(self, answer: Answer) -> Reply:
        """Return the field `kvpage`."""
        return kvpage_of(answer, self._agent_id)


class ChatShape:
    """Format of replies of /v1/chat/completions."""

    def __init__(self, envelope: Envelope, index: int, reader: Reader, logprobs: ChatLikelihoods | None) -> None:
        self._envelope = envelope
        self._index = index
        self._reader = reader
        self._logprobs = logprobs
        self._held: list[Token] = []  # tokens without a chunk yet, because the reader holds their text back

    @property
    def may_take_long(self) -> bool:
        """Whether the next method call may take more than some milliseconds."""
        return self._reader.may_take_long

    def opening(self) -> Iterable[Reply]:
        yield self._delta({"role": "assistant", "content": ""})

    def chunks(self, token: Token) -> Iterable[Reply]:
        self._envelope.count_token()
        yield from self._replies(self._reader.read(token))

    def closing(self, answer: Answer) -> Iterable[Reply]:
        yield from self._replies(self._reader.finish(answer.finish_reason), last=True)
        choice = {"index": self._index, "delta": {}, "logprobs": None, "finish_reason": self._reason(answer)}
        yield self._envelope.chunk(choice, kvpage=self._envelope.kvpage(answer))

    def add(self, token: Token) -> None:
        self._reader.read(token)

    def choice(self, answer: Answer) -> Reply:
        self._reader.finish(answer.finish_reason)
        parsed = self._reader.parsed
        message: Reply = {"role": "assistant", "content": parsed.text, "refusal": None}
        if parsed.reasoning:
            message |= _reasoning(parsed.reasoning)
        if parsed.calls:
            message["content"] = parsed.text or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in parsed.calls]
        logprobs, reason = self._of(parsed.tokens), self._reason(answer)
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _replies(self, part: AnswerPart, *, last: bool = False) -> Iterable[Reply]:
        self._held += part.tokens
        delta: Reply = {"content": part.text} if part.text else {}
        if part.reasoning:
            delta |= _reasoning(part.reasoning)
        for call in part.calls:
            if "tool_calls" in delta:
                yield self._delta(delta, self._taken())
                delta = {}
            delta["tool_calls"] = [call]
        if delta or (last and self._held and self._logprobs is not None):
            yield self._delta(delta, self._taken())

    def _taken(self) -> Reply | None:
        """Return the log-probabilities of the tokens without a chunk."""
        tokens, self._held = self._held, []
        return self._of(tokens)

    def _delta(self, delta: Reply, logprobs: Reply | None = None) -> Reply:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._envelope.chunk(choice)

    def _reason(self, answer: Answer) -> str:
        called = self._reader.parsed.calls and (answer.finish_reason == "stop" or self._reader.cut)
        return "tool_calls" if called else answer.finish_reason

    def _of(self, tokens: Sequence[Token]) -> Reply | None:
        return self._logprobs.of(tokens) if self._logprobs else None


def _reasoning(text: str) -> Reply:
    """Return the fields with the reasoning before an answer: the names of mlx-lm and newer vLLM, and of DeepSeek."""
    return {"reasoning": text, "reasoning_content": text}


class TextShape:
    """Format of replies of /v1/completions."""

    may_take_long = False

    def __init__(self, envelope: Envelope, index: int, logprobs: TextLikelihoods | None, echo: str) -> None:
        """Create a format for the answer `index`, whose text begins with `echo`."""
        self._envelope = envelope
        self._index = index
        self._logprobs = logprobs
        self._echo = echo
        self._tokens: list[Token] = []  # without a chunk yet
        self._logprob = 0.0  # sum of the tokens' log-probabilities
        self._count = 0

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens so far; 0 without a token."""
        return self._logprob / max(1, self._count)

    def opening(self) -> Iterable[Reply]:
        if self._echo:
            yield self._envelope.chunk(self._choice(self._echo, (), None))

    def chunks(self, token: Token) -> Iterable[Reply]:
        self._envelope.count_token()
        self.add(token)
        if token.text:
            yield self._envelope.chunk(self._choice(token.text, self._taken(), None))

    def closing(self, answer: Answer) -> Iterable[Reply]:
        choice = self._choice("", self._taken(), answer.finish_reason)
        yield self._envelope.chunk(choice, kvpage=self._envelope.kvpage(answer))

    def add(self, token: Token) -> None:
        if not token.ends_text:
            self._tokens.append(token)
            self._logprob += token.logprob or 0.0
            self._count += 1

    def choice(self, answer: Answer) -> Reply:
        return self._choice(self._echo + answer.text, self._taken(), answer.finish_reason)

    def _choice(self, text: str, tokens: Sequence[Token], reason: str | None) -> Reply:
        logprobs = self._logprobs.of(tokens) if self._logprobs else None
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _taken(self) -> list[Token]:
        tokens, self._tokens = self._tokens, []
        return tokens


def kvpage_of(answer: Answer, agent_id: str | None) -> Reply:
    """Return the field `kvpage`: the reused tokens of an answer, their tier, and durations in milliseconds.

    `agent_id` is the client's name for the agent.
    """
    reuse = answer.reuse
    return {
        "agent_id": agent_id,
        "tier": reuse.tier,
        "tokens_reused": reuse.tokens,
        "restore_ms": round(1000 * reuse.restore_seconds, 3),
        "waited_ms": round(1000 * reuse.waited_seconds, 3),
        "first_token_ms": round(1000 * reuse.time_to_first_token, 3),
        "coded": None if reuse.coded is None else round(reuse.coded, 3),
        "mapped": reuse.mapped,
        "why": reuse.why,
        "block_hash": answer.block,
        "kv_hints": hint_results(answer.hints),
        "kept": kept_of(answer.kept),
    }


def hint_results(results: Sequence[tuple[str, str]] | None) -> list[Reply] | None:
    """Return the results of hints, each with the id of its action, as replies show them."""
    return None if results is None else [{"action_id": one, "result": result} for one, result in results]


def kept_of(kept: KeptContext | None) -> Reply | None:
    """Return the part of a context that has a lifetime: its tokens, the end in unix seconds, and why not more of it is
    kept; None if the request has no lifetime.
    """
    if kept is None:
        return None
    return {"tokens": kept.tokens, "until": kept.until // 1000 or None, "why": kept.why or None}


def written(answer: Answer, boundaries: Sequence[Boundary], first: int | None = None) -> Counter[str]:
    """Return how many tokens of a prompt were computed and are kept, by the longest lifetime of the next breakpoints.
    `boundaries` are in ascending order. With `first`, only so many first tokens of the prompt count.
    """
    at, found = answer.reuse.tokens, Counter[str]()
    for i, boundary in enumerate(boundaries if answer.not_kept is None else ()):
        tokens = boundary.tokens if first is None else min(boundary.tokens, first)
        longest = max((boundary.ttl for boundary in boundaries[i:]), key=LIFETIMES.__getitem__)
        found[longest] += max(0, tokens - at)
        at = max(at, tokens)
    return found


def usage_of(
    prompts: Sequence[Answer], answers: Sequence[Answer], boundaries: Sequence[Boundary] | None = None
) -> Reply:
    """Return the numbers of tokens. `prompts` are answers, one for each prompt; `answers` are all. `boundaries` of the
    prompt are as for `written`; None for the end of each prompt.
    """
    prompted = sum(answer.prompt_tokens for answer in prompts)
    generated = sum(len(answer.tokens) for answer in answers)
    kept = [
        written(
            answer, [Boundary(answer.prompt_tokens, "", answer.prompt_tokens)] if boundaries is None else boundaries
        ).total()
        for answer in prompts
    ]
    return {
        "prompt_tokens": prompted,
        "completion_tokens": generated,
        "total_tokens": prompted + generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.reuse.tokens for answer in prompts),
            "cache_write_tokens": sum(kept),
        },
    }
