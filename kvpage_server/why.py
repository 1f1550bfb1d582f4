"""Why a read would miss, in words: of a page, of a request, and of an agent of the engine's.

What the engine keeps of an agent is read by the keys it uses (docs/architecture.md, "How a context travels"): a
manifest for each model, which tells the tokens and names the blocks. Each block is a request as any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import redis

from kvpage_server.system.plurals import how_many
from kvpage_server.system.terminal import when

Answer = dict[str, Any]  # KVPAGEWHY's


def why(store: redis.Redis, req: bytes, *name: int) -> Iterator[str]:
    """Lines that say why a read of a request, or of the page of that layer, head, page id and type, would miss."""
    answer = _ask(store, req, *name)
    lines = list(_of_agent(store, req)) if not name and answer["reason"] == "never stored" else []
    yield from lines or [_said(answer)]


def _ask(store: redis.Redis, *name: Any) -> Answer:
    found = store.execute_command("KVPAGEWHY", *name)  # type: ignore[no-untyped-call]
    return {key.decode(): value.decode() if isinstance(value, bytes) else value for key, value in found.items()}


def _said(answer: Answer) -> str:
    if answer["reason"] == "hole":
        return f"block {answer['block']} is not there whole: {_explained(answer['cause'], answer)}"
    return _explained(answer["reason"], answer)


def _explained(reason: str, answer: Answer) -> str:
    if "at" in answer:
        by = f" by {answer['policy']}" if "policy" in answer else ""
        by += f" of {answer['quota']}" if "quota" in answer else ""
        return f"{reason}{by}, {when(answer['at'])}"
    if "since" in answer:
        return f"{reason}, as far as is known since {when(answer['since'])}"
    return f"{reason}: a read would not miss"


# -- agents ------------------------------------------------------------------------------------------------------------


class _Manifest(NamedTuple):
    """What an agent's context under one model consists of."""

    tokens: int
    blocks: list[bytes]  # the requests that they lie under, first to last


def _of_agent(store: redis.Redis, agent: bytes) -> Iterator[str]:
    """What a load of the agent's context would find, a line a model. Looks through the store's keys."""
    key = b"manifest:" + agent
    pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", key) + b":*"
    for found in (key, *sorted(store.scan_iter(pattern, count=1000, _type="string"))):
        raw = store.get(found)
        if isinstance(raw, bytes):
            model = found.removeprefix(key).removeprefix(b":").decode("utf-8", "backslashreplace")
            yield f"an agent's context{f' of model {model}' if model else ''}: {_found(store, _parsed(raw))}"


def _parsed(raw: bytes) -> _Manifest | None:
    """A manifest: JSON, behind a digest that the engine checks. None for one that makes no sense."""
    try:
        told: Any = json.loads(raw[raw.index(b"{") :])
        return _Manifest(len(told["tokens"]), [str(name).encode() for name in told["chain"]])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _found(store: redis.Redis, manifest: _Manifest | None) -> str:
    if manifest is None:
        return "its manifest cannot be read"
    tokens, count = f"{how_many(manifest.tokens, 'token')}", len(manifest.blocks)
    for i, block in enumerate(manifest.blocks):
        answer = _ask(store, block)
        if answer["reason"] != "stored":
            return f"{tokens}, but of {how_many(count, 'block')} only the first {i:,} are there; then: {_said(answer)}"
    return f"{tokens} in {how_many(count, 'block')}, all stored: a load would not miss"
