"""Asks a serving engine one question, and measures the answer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

MAX_TOKENS = 24
ANSWER_SECONDS = 300.0  # without a byte

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer and what it took."""

    text: str
    prompt_tokens: int
    tokens_reused: int  # of the prompt
    tier: str  # where they were found
    first_token: float  # seconds from the question to the first of the answer, as the client sees it
    why: str | None = None  # reason, when less was found


def ask(url: str, model: str, messages: Messages) -> Turn:
    """The likeliest next message, streamed. Raises OSError when the engine does not answer."""
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = time.perf_counter()
    text, first = "", 0.0
    kvpage: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    with urlopen(Request(f"{url}/v1/chat/completions", json.dumps(body).encode()), timeout=ANSWER_SECONDS) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            if "error" in chunk:
                raise OSError(chunk["error"]["message"])
            first = first or time.perf_counter() - asked
            text += chunk["choices"][0]["delta"].get("content", "") if chunk["choices"] else ""
            kvpage, usage = chunk.get("kvpage", kvpage), chunk["usage"] or usage
    return Turn(text, usage["prompt_tokens"], kvpage["tokens_reused"], kvpage["tier"], first, kvpage["why"])


def save(url: str) -> None:
    """Wait until the context is saved. Raises OSError."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        with urlopen(f"{url}/metrics", timeout=ANSWER_SECONDS) as reply:
            if b"\nkvpage_engine_dirty_bytes 0.0\n" in reply.read():
                return
        time.sleep(0.05)
    raise OSError("the context is not saved in time")
