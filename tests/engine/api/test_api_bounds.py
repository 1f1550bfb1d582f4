"""No body holds up the others: how much one may make the server do is bounded before it does it.

The bodies are generated: every field of every kind of request, those within fields too, is given the worst of every
kind of JSON that a megabyte holds.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from api_engines import RunningEngine, start_engine, write_tiny
from engine_models import letter_tokenizer, tiny_llama
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from servers import resident

from engine.api.openai import schema
from engine.api.openai.errors import ApiError
from engine.api.openai.prompts import Prompts
from engine.api.openai.schema import ChatBody, CompletionBody, ForkBody, RequestBody
from engine.generation.templates import Renderer
from engine.spec import ModelCacheSpec
from kvpage_server import bounded

MEGABYTE = 1 << 20


def array(element: bytes) -> bytes:
    """Return an array with as many elements as the length limit of a body permits."""
    return b"[" + element + (b"," + element) * (MEGABYTE // (len(element) + 1)) + b"]"


WORST: dict[str, bytes] = {
    "zeros": array(b"0"),
    "as many numbers as may be": b"[" + b"99999," * (schema.MAX_VALUES - 60) + b"0]",
    "negative numbers": array(b"-1"),
    "fractions": array(b"0.1234567890123"),
    "empty lists": array(b"[]"),
    "as many lists as may be": b"[" + b"[]," * (schema.MAX_CONTAINERS - 60) + b"0]",
    "empty objects": array(b"{}"),
    "as many objects as may be": b"[" + b"{}," * (schema.MAX_CONTAINERS - 60) + b"0]",
    "empty strings": array(b'""'),
    "as many strings as may be": b"[" + b'"",' * (schema.MAX_STRINGS - 60) + b'"a"]',
    "messages": b"[" + b'{"role":"user","content":"x"},' * 4000 + b'{"role":"user","content":"x"}]',
    "messages but one": b"[" + b'{"role":"user","content":"x"},' * 4000 + b"0]",
    "parts": b"[" + b'{"type":"text","text":"x"},' * 4000 + b'{"type":"image"}]',
    "names": b"{" + b",".join(b'"%d":0' % i for i in range(schema.MAX_STRINGS - 60)) + b"}",
    "more names": b"{" + b",".join(b'"%d":0' % i for i in range(80_000)) + b"}",
    "one name again and again": b"{" + b'"a":0,' * 100_000 + b'"a":0}',
    "lists in lists": b"[" * 100_000 + b"]" * 100_000,
    "objects in objects": b'{"a":' * 100_000 + b"0" + b"}" * 100_000,
    "a long number": b"1" * MEGABYTE,
    "long numbers": array(b"1" * 4000),
    "a great exponent": b"1e" + b"9" * 300,
    "a text": b'"' + b"a" * MEGABYTE + b'"',
    "a text of escapes": b'"' + b"\\u00e9" * (MEGABYTE // 6) + b'"',
    "a text of quotes": b'"' + b'\\"' * (MEGABYTE // 2) + b'"',
    "a text of backslashes": b'"' + b"\\\\" * (MEGABYTE // 2) + b'"',
    "a text of other letters": b'"' + "é😀".encode() * (MEGABYTE // 6) + b'"',
    "a text that does not end": b'"' + b"a" * MEGABYTE,
}


def models(field: Any) -> Iterator[type[BaseModel]]:
    if isinstance(field, type) and issubclass(field, BaseModel):
        yield field
    for part in get_args(field):
        yield from models(part)


def paths(kind: type[BaseModel]) -> Iterator[Callable[[bytes], bytes]]:
    """Yield for every field of `kind`, and of nested fields, a function from a value to a body that has the value
    there.
    """
    needed = {"model": b'"tiny"', "messages": b'[{"role":"user","content":"x"}]', "prompt": b'"x"', "to": b'"bob"'}
    given_fields = {name: value for name, value in needed.items() if name in kind.model_fields}

    def body(name: str, value: bytes) -> bytes:
        fields = {**given_fields, name: value}
        return b"{" + b",".join(b'"%b":%b' % (key.encode(), held) for key, held in fields.items()) + b"}"

    for name, field in {**kind.model_fields, "unknown": None}.items():
        yield lambda value, name=name: body(name, value)
        for within in models(field.annotation if field else None):
            listed = "list" in str(field.annotation)
            for path in paths(within):
                form = b"[%b]" if listed else b"%b"
                yield lambda value, name=name, path=path, form=form: body(name, form.replace(b"%b", path(value)))


def refused(kind: type[RequestBody], raw: bytes) -> ApiError | None:
    try:
        kind.parse(raw)
    except ApiError as error:
        return error
    return None


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("worst", WORST)
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ForkBody])
def test_no_body_takes_long(kind: type[RequestBody], worst: str) -> None:
    """Wherever it stands. Half a second is many times the time of an idle machine; without bounds it was seconds."""
    for path in paths(kind):
        raw = path(WORST[worst])
        began = time.thread_time()
        refusal = refused(kind, raw)
        assert time.thread_time() - began < 0.5, raw[:200]
        assert refusal is None or (refusal.status == 400 and len(refusal.message) < 500)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('ab"\\[]{},: é'),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\,[{', max_size=4), inner, max_size=4),
        max_leaves=30,
    ),
    st.integers(1, 12),
)
def test_parts_of_a_body_are_counted_as_a_parser_does(value: Any, piece: int) -> None:
    """Whatever its strings look like, and wherever a piece of it ends."""
    limits = dict(zip(("containers", "strings", "values"), counted(value), strict=True))
    raw = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded, "PIECE_BYTES", piece)
        bounded.check(raw, **limits)
        for name, found in limits.items():
            if found:
                with pytest.raises(bounded.TooMuchError):
                    bounded.check(raw, **{**limits, name: found - 1})


def counted(value: Any) -> tuple[int, int, int]:
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, (list, dict)):
        return 0, 0, 0
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    sums = [sum(column) for column in zip((0, 0, 0), *map(counted, parts), strict=True)]
    return sums[0] + 1, sums[1], sums[2] + max(0, len(value) - 1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    with start_engine(write_tiny(tmp_path_factory.mktemp("models") / "tiny")) as engine:
        yield engine


MOST_WAIT = 5.0  # seconds, on a machine that does other things


class Heart:
    """Asks for the server's health again and again; the longest that it waited."""

    def __init__(self, engine: RunningEngine) -> None:
        self.longest = 0.0
        self.beats = 0
        self._url = f"{engine.url}/health/live"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def _beat(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stopped.is_set():
                began = time.perf_counter()
                assert client.get(self._url).status_code == 200
                self.longest = max(self.longest, time.perf_counter() - began)
                self.beats += 1

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()


def test_the_others_are_answered_while_the_worst_is_read(engine: RunningEngine) -> None:
    before = resident(engine.pid)
    with Heart(engine) as heart, httpx.Client(timeout=60) as client:
        for path, where in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
            for worst in WORST.values():
                body = b'{"model":"tiny","max_tokens":1,"%b":%b}' % (where.encode(), worst)
                assert client.post(engine.url + path, content=body).status_code in (400, 413)
    assert heart.beats > 10
    assert heart.longest < MOST_WAIT
    assert resident(engine.pid) - before < 300 << 20


def test_eight_megabytes_of_nothing_are_refused_by_their_length(engine: RunningEngine) -> None:
    body = b'{"messages":[' + b"0," * (4 << 20) + b"0]}"
    with Heart(engine) as heart:
        began = time.perf_counter()
        with suppress(httpx.WriteError):  # the error arrived before all was sent
            assert httpx.post(f"{engine.url}/v1/chat/completions", content=body).status_code == 413
        assert time.perf_counter() - began < 10
    assert heart.longest < MOST_WAIT


def test_a_prompt_far_beyond_the_context_is_not_read_to_its_end(engine: RunningEngine) -> None:
    for path, more in (
        ("/v1/completions", {"prompt": "a b " * 200_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 200_000}]}),
    ):
        reply = httpx.post(engine.url + path, json={"model": "tiny", **more})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "at least 65536 tokens leave no room" in error["message"]


def test_long_tokens_beyond_the_context_are_not_tokenised() -> None:
    """A text that has only long tokens passes the check of its beginning, and is refused by its length."""
    tokenizer = letter_tokenizer()
    tokenizer.add_tokens([64 * "-"])
    spec = replace(ModelCacheSpec.probe(tiny_llama(), tokenizer), context=100)
    with closing(Renderer()) as renderer:
        prompts = Prompts(tokenizer, spec, renderer)
        assert len(asyncio.run(prompts.of_text(99 * 64 * "-"))) == 99
        for beyond in (100, 10_000):
            with pytest.raises(ApiError, match=f"at least {beyond} tokens leave no room"):
                asyncio.run(prompts.of_text(beyond * 64 * "-"))


def test_a_prompt_of_token_ids_may_be_as_long_as_the_context(engine: RunningEngine) -> None:
    reply = httpx.post(
        f"{engine.url}/v1/completions", json={"model": "tiny", "prompt": [5] * 4000, "max_tokens": 1}, timeout=60
    )
    assert reply.json()["usage"]["prompt_tokens"] == 4000


def test_long_input_is_not_repeated_in_errors(engine: RunningEngine) -> None:
    for body in ({"model": "m" * 500_000}, {"model": "tiny", "prompt": ["a", "b" * 100_000]}):
        assert len(httpx.post(f"{engine.url}/v1/completions", json={"prompt": "a", **body}).content) < 500


def test_a_stop_string_has_a_length(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match=r"stop\[0\]"):
        CompletionBody.parse(json.dumps({"model": "m", "prompt": "a", "stop": "a" * 257}).encode())
