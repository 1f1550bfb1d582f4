"""What the engine keeps of its agents, as others may read it (docs/architecture.md, "How a context travels").

A manifest is a digest and a JSON object. Those of earlier versions say neither the model nor when they were made, and
have all the tokens before the names of the blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvpage_server.segments import tag_of

PREFIX = b"manifest:"
HEAD_BYTES = 1 << 16  # of a manifest, in which all but the tokens of a context of 450,000 of them is told
DIGEST_BYTES = 16
_TOKENS = b', "tokens": ['  # what comes last
_USUAL_BLOCK = 256  # tokens


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an agent's context under one model consists of."""

    key: bytes  # where it lies
    agent_id: str
    fingerprint: str  # of the model; empty in manifests of the earliest versions
    model: str  # its name; empty where the manifest does not say
    tokens: int
    block_tokens: int  # of every block but the last
    blocks: tuple[bytes, ...]  # the requests that they lie under, first to last
    created_ms: int  # when the agent was first stored, in unix milliseconds; 0 where that is not told
    saved_ms: int  # and the last time
    by: str  # the machine and process that stored it then; empty where that is not told

    def tokens_in(self, index: int) -> int:
        """The tokens of one of its blocks."""
        return min(self.block_tokens, self.tokens - index * self.block_tokens)


def parse(key: bytes, raw: bytes) -> Manifest | None:
    """The manifest at a key, from all of it or from its first HEAD_BYTES; None for one that makes no sense, or of which
    more has to be read."""
    agent, _, fingerprint = key.removeprefix(PREFIX).decode("utf-8", "backslashreplace").partition(":")
    try:
        told = _told(raw)
        names, together = [str(name) for name in told["chain"]], max(int(told.get("together", 0)), 0)
        blocks = tuple((tag_of(names, i, together) + name).encode() for i, name in enumerate(names))
        tokens = int(told["count"]) if "count" in told else len(told["tokens"])
        return Manifest(
            key,
            agent,
            fingerprint,
            str(told.get("model", "")),
            tokens,
            int(told.get("block_tokens", 0)) or _block_tokens(tokens, len(blocks)),
            blocks,
            int(told.get("created", 0)),
            int(told.get("saved", 0)),
            str(told.get("by", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _told(raw: bytes) -> Any:
    text = raw[raw.index(b"{") :]
    end = text.find(_TOKENS)
    return json.loads(text[:end] + b"}" if end >= 0 and b'"count"' in text[:end] else text)


def _block_tokens(tokens: int, blocks: int) -> int:
    """How many tokens are in a block, where that is not told: as usual if that can be."""
    usual = _USUAL_BLOCK
    return usual if (blocks - 1) * usual < tokens <= blocks * usual else -(-tokens // max(blocks, 1))
