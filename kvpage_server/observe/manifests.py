"""Reads the manifests that the engine stores for its agents (docs/architecture.md, "How a context travels").

A manifest is a digest and a JSON object. Earlier versions of it have no model and no times, and put all tokens before
the names of the blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvpage_server.segments import tag_of

PREFIX = b"manifest:"
HEAD_BYTES = 1 << 16  # enough for everything but the tokens, in a context of 450,000 tokens
MOST_BYTES = 1 << 19  # that are read of a manifest; enough in a context of 3.6 million tokens
MOST_KEY = 512  # bytes of a manifest's key; a longer one is no engine's, whose agents have names of 128 letters
MOST_LETTERS = 128  # of a model's name, and of the process that saved the agent
_MOST_NAME = 256  # bytes of a block's name
DIGEST_BYTES = 16
_TOKENS = b', "tokens": ['  # the last field
_USUAL_BLOCK = 256  # tokens
_MOST = 1 << 53  # of anything: what JSON's readers count exactly
_LAST_MOMENT = 253_370_764_800_000  # the year 9999 begins, which is the last that Python's clock can show


@dataclass(frozen=True, slots=True)
class Manifest:
    """An agent's context for one model."""

    key: bytes  # of the manifest itself
    agent_id: str
    fingerprint: str  # of the model; empty in manifests of the earliest versions
    model: str  # its name; empty if unknown
    tokens: int
    block_tokens: int  # of every block but the last
    blocks: tuple[bytes, ...]  # their requests, in order
    created_ms: int  # when the agent was first saved, in unix milliseconds; 0 if unknown
    saved_ms: int  # when it was last saved
    by: str  # the machine and process that saved it last; empty if unknown

    def tokens_in(self, index: int) -> int:
        return min(self.block_tokens, self.tokens - index * self.block_tokens)


def parse(key: bytes, raw: bytes) -> Manifest | None:
    """The manifest at a key, from its whole value or from the first HEAD_BYTES or MOST_BYTES. None if it is damaged, or
    if more of it is needed. Long names of the model and of the process that saved it are cut."""
    agent, _, fingerprint = key.removeprefix(PREFIX).decode("utf-8", "backslashreplace").partition(":")
    try:
        told = _told(raw)
        names, together = [_text(name) for name in _list(told["chain"])], _count(told.get("together", 0))
        blocks = tuple((tag_of(names, i, together) + name).encode() for i, name in enumerate(names))
        if any(len(name) > _MOST_NAME for name in blocks):
            raise ValueError("a block's name is too long")
        tokens = _count(told["count"]) if "count" in told else len(_list(told["tokens"]))
        block_tokens = _count(told.get("block_tokens", 0)) or _block_tokens(tokens, len(blocks))
        if not (len(blocks) - 1) * block_tokens < tokens <= len(blocks) * block_tokens and (tokens or blocks):
            raise ValueError("the blocks are too few or too many for the tokens")
        return Manifest(
            key,
            agent,
            fingerprint,
            _text(told.get("model", ""))[:MOST_LETTERS],
            tokens,
            block_tokens,
            blocks,
            _moment(told.get("created", 0)),
            _moment(told.get("saved", 0)),
            _text(told.get("by", ""))[:MOST_LETTERS],
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _count(told: object) -> int:
    if type(told) is not int or not 0 <= told < _MOST:
        raise ValueError("no count")
    return told


def _moment(told: object) -> int:
    if type(told) is not int or not 0 <= told < _LAST_MOMENT:
        raise ValueError("no moment in unix milliseconds")
    return told


def _text(told: object) -> str:
    if not isinstance(told, str):
        raise ValueError("no text")
    told.encode()  # raises if a half of a surrogate pair stands alone
    return told


def _list(told: object) -> list[object]:
    if not isinstance(told, list):
        raise ValueError("no list")
    return told


def _told(raw: bytes) -> Any:
    text = raw[raw.index(b"{") :]
    end = text.find(_TOKENS)
    return json.loads(text[:end] + b"}" if end >= 0 and b'"count"' in text[:end] else text)


def _block_tokens(tokens: int, blocks: int) -> int:
    """The tokens a block of a manifest that does not say: the usual number if it fits."""
    usual = _USUAL_BLOCK
    return usual if (blocks - 1) * usual < tokens <= blocks * usual else -(-tokens // max(blocks, 1))
