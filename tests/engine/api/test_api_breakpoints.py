"""Breakpoints of the prompt cache, with the clouds' own clients: the prompt is reused up to their tokens.

A token of the tiny models is a letter, and the template writes `role:content` on a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import anthropic
import httpx
import openai
import pytest
from api_engines import RunningEngine, start_engine, write_family
from servers import RunningServer

KINDS = ["llama", "gemma3_text", "mamba2"]  # with all tokens' rows, with windows, with a recurrence
EXPLICIT = {"mode": "explicit"}
HEAD = "system:"


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_family(tmp_path_factory.mktemp("models") / "tiny", request.param))


@pytest.fixture(scope="module")
def family_engine(model: str) -> Iterator[RunningEngine]:
    with start_engine(model) as engine:
        yield engine


def letters(count: int, seed: int) -> str:
    return "".join(Random(seed).choices(ascii_lowercase, k=count))


def part(text: str, kind: str = "text", *, marked: bool = False, ttl: str | None = None) -> dict[str, Any]:
    point = {"prompt_cache_breakpoint": {**EXPLICIT, **({"ttl": ttl} if ttl else {})}} if marked or ttl else {}
    return {"type": kind, "text": text, **point}


def chat(engine: RunningEngine, *parts: dict[str, Any], **fields: Any) -> tuple[int, int, int]:
    """Return the number of a prompt's tokens, and how many of them were read and written."""
    with engine.client() as client:
        messages: Any = [{"role": "system", "content": [*parts]}, {"role": "user", "content": "Hi"}]
        usage = client.chat.completions.create(
            model="tiny", max_tokens=2, temperature=0, messages=messages, **fields
        ).usage
    assert usage
    details = usage.prompt_tokens_details
    assert details
    return usage.prompt_tokens, details.cached_tokens or 0, details.cache_write_tokens or 0


def respond(engine: RunningEngine, *parts: dict[str, Any], **fields: Any) -> tuple[int, int, dict[str, int]]:
    """Return the number of a prompt's tokens, and how many of them were read, and written by lifetime."""
    with engine.client() as client:
        items: Any = [{"role": "developer", "content": [*parts]}, {"role": "user", "content": "Hi"}]
        made = client.responses.create(model="tiny", max_output_tokens=2, temperature=0, input=items, **fields)
    assert made.usage
    details = made.usage.input_tokens_details
    by_ttl = details.cache_write_tokens_details
    if not by_ttl:  # the request gives no lifetime
        return made.usage.input_tokens, details.cached_tokens, {"": details.cache_write_tokens}
    found = {"30m": by_ttl.ttl_30m_tokens, "12h": by_ttl.ttl_12h_tokens}
    assert sum(found.values()) == details.cache_write_tokens
    return made.usage.input_tokens, details.cached_tokens, found


def test_a_prompt_is_read_up_to_a_breakpoint_of_a_chat(family_engine: RunningEngine) -> None:
    stable = letters(331, 1)
    total, _, written = chat(family_engine, part(stable, marked=True), part(letters(200, 2)))
    assert written <= total
    end = len(HEAD + stable)
    total, read, written = chat(family_engine, part(stable, marked=True), part(letters(220, 3)))
    assert (read, written) == (end, total - end)


def test_a_prompt_is_read_up_to_a_breakpoint_of_a_response(family_engine: RunningEngine) -> None:
    stable, middle = letters(287, 4), letters(99, 5)
    respond(family_engine, part(stable, "input_text", marked=True), part(middle, "input_text", ttl="12h"), part("a"))
    end, longer = len(HEAD + stable), len(HEAD + stable + middle)
    total, read, written = respond(
        family_engine, part(stable, "input_text"), part(letters(60, 6), "input_text", ttl="12h")
    )
    assert (read, written) == (end, {"30m": len("Hi\nassistant:"), "12h": 60 + len("\nuser:")})
    total, read, written = respond(family_engine, part(stable + middle, "input_text"), part("b"))
    assert (read, written) == (longer, {"": total - longer})


def test_a_prompt_is_read_up_to_a_breakpoint_of_a_message(family_engine: RunningEngine) -> None:
    stable = letters(301, 7)

    def create(rest: str) -> anthropic.types.Usage:
        system: Any = [{"type": "text", "text": stable, "cache_control": {"type": "ephemeral"}}]
        with anthropic.Anthropic(base_url=family_engine.url, api_key="none", max_retries=0) as client:
            return client.messages.create(
                model="tiny", max_tokens=2, system=system, messages=[{"role": "user", "content": rest}]
            ).usage

    create(letters(80, 8))
    second = create(letters(70, 9))
    assert second.cache_read_input_tokens == len(HEAD + stable + "\nuser:")
    assert second.cache_creation_input_tokens == 0
    assert second.input_tokens == 70 + len("\nassistant:")


@pytest.mark.parametrize("options", [{}, {"prompt_cache_options": EXPLICIT}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_joins_with_the_one_before_reuses_all_else(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """A dot and a line end are one token, as of many models: so the last token before a breakpoint may be another. So
    may that of a word in another script.
    """
    joined = [".\n", "日本", "日本語"]
    with start_engine(write_family(tmp_path / "tiny", kind, joined=joined)) as engine:
        for seed, end, follows in ((12, ".", "\nsecond"), (13, "日本", "語")):
            stable = letters(231, seed)
            for text in ("first", follows, "third", follows):
                _, read, _ = chat(engine, part(stable + end, marked=True), part(text), **options)
                assert read >= len(HEAD + stable) or text == "first"


def test_explicit_breakpoints_alone_are_kept(family_engine: RunningEngine) -> None:
    """Nothing behind the last one is written, and without one nothing is read."""
    stable, rest = letters(210, 10), letters(90, 11)
    options: Any = {"prompt_cache_options": EXPLICIT}
    end = len(HEAD + stable)
    _, read, written = chat(family_engine, part(stable, marked=True), part(rest), **options)
    assert read + written == end
    total, read, written = chat(family_engine, part(stable), part(rest), **options)
    assert (read, written) == (0, 0)
    assert chat(family_engine, part(stable, marked=True), part(rest), **options) == (total, end, 0)
    total, read, by_ttl = respond(family_engine, part(stable, "input_text"), part(rest, "input_text"), **options)
    assert (read, sum(by_ttl.values())) == (0, 0)
    assert chat(family_engine, part(stable), part(rest)) == (total, end, total - end)
    assert chat(family_engine, part(stable), part(rest), n=2, **options) == (total, 0, 0)


def test_the_latest_breakpoints_of_a_request_are_kept(model: str) -> None:
    """Four of the mode explicit; of the mode implicit three, and the end of the prompt."""
    for options, kept in ((EXPLICIT, 4), ({}, 3)):
        texts = [letters(40, 20 + i) for i in range(6)]
        parts = [*(part(text, marked=True) for text in texts), part(letters(30, 30))]
        with start_engine(model) as engine:
            chat(engine, *parts, prompt_cache_options=options)
            for i in range(6 - kept, 6):
                same = "".join(texts[: i + 1])
                _, read, _ = chat(engine, part(same), part(letters(30, 40 + i)))
                assert read == len(HEAD + same)


def test_a_breakpoint_holds_at_another_engine(model: str, server: RunningServer) -> None:
    stable = letters(331, 50)
    with start_engine(model, "--store", server.url, "--keep", "all") as engine:
        chat(engine, part(stable, marked=True), part(letters(200, 51)))
    with start_engine(model, "--store", server.url) as engine:
        _, read, _ = chat(engine, part(stable, marked=True), part(letters(220, 52)))
    assert read == len(HEAD + stable)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mode": "other"}, "prompt_cache_options.mode: Input should be 'implicit' or 'explicit'"),
        ({"ttl": "12h"}, 'prompt_cache_options.ttl: this engine supports only "30m"'),
        ({"prewarm": True}, "prompt_cache_options.prewarm: this engine supports only false"),
        ({"comparison_response_id": "a"}, "prompt_cache_options.comparison_response_id: this engine does not support"),
    ],
)
def test_options_that_a_chat_does_not_have_are_named(engine: RunningEngine, fields: dict[str, Any], said: str) -> None:
    with engine.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"prompt_cache_options": fields},
        )
    assert said in str(refused.value)


@pytest.mark.parametrize("given", [1, {}, {"mode": "implicit"}, {"mode": "explicit", "ttl": "5m"}])
def test_a_wrong_breakpoint_is_refused(engine: RunningEngine, given: object) -> None:
    part = {"type": "text", "text": "Hi", "prompt_cache_breakpoint": given}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
    reply = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("messages[0].content[0].prompt_cache_breakpoint")
