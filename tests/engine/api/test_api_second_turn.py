"""A later turn of a conversation computes its new text only: at the same engine, at another one, after a restart.

With the clouds' own clients, for models with all tokens' rows, with windows, and with a recurrence. The tiny models
compute a prompt in less than the time that is worth a write, so the engines write all contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import anthropic
import pytest
from api_engines import RunningEngine, start_engine, write_family
from servers import start_server

KINDS = ["llama", "gemma3_text", "mamba2"]
LEAST = 0.98  # of the tokens of the turn before, prompt and answer, are reused
FIRST = "".join(Random(11).choices(ascii_lowercase, k=900))
LATER = ["And then?", "Why?", "Where?"]
ANSWER = 12  # tokens

Turn = Callable[[RunningEngine, str], tuple[int, int]]  # returns the tokens of prompt and answer, and the reused ones


def responses() -> Turn:
    """Return a function that continues a conversation by `previous_response_id`."""
    before: list[str] = []

    def turn(engine: RunningEngine, text: str) -> tuple[int, int]:
        named: Any = {"previous_response_id": before[-1]} if before else {}
        with engine.client() as client:
            made = client.responses.create(model="tiny", input=text, max_output_tokens=ANSWER, temperature=0, **named)
        before.append(made.id)
        assert made.usage
        return made.usage.total_tokens, made.usage.input_tokens_details.cached_tokens

    return turn


def messages() -> Turn:
    """Return a function that continues a conversation by sending all of it, with `cache_control`."""
    history: list[Any] = []

    def turn(engine: RunningEngine, text: str) -> tuple[int, int]:
        history.append({"role": "user", "content": text})
        control: Any = {"cache_control": {"type": "ephemeral"}, "extra_body": {"temperature": 0}}
        with anthropic.Anthropic(base_url=engine.url, api_key="none", max_retries=0, timeout=60) as client:
            made = client.messages.create(model="tiny", max_tokens=ANSWER, messages=[*history], **control)
        history.append({"role": "assistant", "content": made.content})
        used = made.usage
        reused = used.cache_read_input_tokens or 0
        prompt = used.input_tokens + reused + (used.cache_creation_input_tokens or 0)
        return prompt + used.output_tokens, reused

    return turn


@contextmanager
def engines(model: Path, directory: Path, count: int) -> Iterator[list[RunningEngine]]:
    """Run a page server whose data is in `directory`, and engines."""
    with ExitStack() as ends:
        server = ends.enter_context(start_server("--store", "tiered", directory=directory))
        yield [ends.enter_context(start_engine(model, "--store", server.url, "--keep", "all")) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begin", [responses, messages], ids=["previous_response_id", "cache_control"])
def test_a_later_turn_reuses_the_turns_before(tmp_path: Path, kind: str, begin: Callable[[], Turn]) -> None:
    model, store = write_family(tmp_path / "tiny", kind), tmp_path / "store"
    store.mkdir()
    turn = begin()
    shares = []
    with engines(model, store, 2) as (one, other):
        before, _ = turn(one, FIRST)
        for engine, text in ((one, LATER[0]), (other, LATER[1])):
            tokens, reused = turn(engine, text)
            shares.append(reused / before)
            before = tokens
    with engines(model, store, 1) as (restarted,):  # the page server, too
        _, reused = turn(restarted, LATER[2])
        shares.append(reused / before)
    assert min(shares) >= LEAST, shares
