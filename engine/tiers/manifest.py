"""How a context is laid out on the page server: where its blocks lie, and the manifest that lists them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from engine.prefix import ROOT, chain_hash, chain_hashes
from engine.spec import ModelCacheSpec
from kvpage_server.page import PageKey

FORMAT = 1  # of manifests and digests


class Miss(Exception):
    """What is stored cannot be used; the argument is the reason, as it is counted."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies on the server."""

    name: str  # its chain hash
    tokens: int
    agent_id: str | None = None  # of a tail

    def keys(self, spec: ModelCacheSpec) -> list[PageKey]:
        """Its page keys, in canonical order."""
        req_id, page_id = (f"agent/{self.agent_id}", int(self.name[:8], 16)) if self.agent_id else (self.name, 0)
        return [PageKey(req_id.encode(), at.layer, at.head, page_id, at.plane.kv_type) for at in spec.page_order]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an agent's context consists of."""

    agent_id: str
    tokens: tuple[int, ...]
    names: tuple[str, ...]  # the chain hash of every block, the tail's too
    tail_digest: str | None = None  # None when the last block is full

    def place(self, index: int, spec: ModelCacheSpec) -> Place:
        """Where block `index` lies."""
        tokens = min(spec.block_tokens, len(self.tokens) - index * spec.block_tokens)
        return Place(self.names[index], tokens, self.agent_id if tokens < spec.block_tokens else None)

    def places(self, spec: ModelCacheSpec) -> list[Place]:
        """Where all its blocks lie, first to last."""
        return [self.place(i, spec) for i in range(len(self.names))]

    def dump(self, spec: ModelCacheSpec) -> str:
        """The text that is stored."""
        return json.dumps(
            {
                "format": FORMAT,
                "fingerprint": f"{spec.fingerprint:016x}",
                "tokens": self.tokens,
                "chain": self.names,
                "tail": self.tail_digest,
            }
        )

    @classmethod
    def parse(cls, raw: bytes, agent_id: str, spec: ModelCacheSpec) -> Self:
        """What `dump` made. Raises Miss for another model's and for one that contradicts itself."""
        try:
            stored = json.loads(raw)
            if stored["format"] != FORMAT:
                raise Miss("manifest")
            if stored["fingerprint"] != f"{spec.fingerprint:016x}":
                raise Miss("fingerprint")
            tokens = tuple(stored["tokens"])
            names = block_names(tokens, spec)
            tail = stored["tail"]
            if list(names) != stored["chain"] or (tail is None) != (len(tokens) % spec.block_tokens == 0):
                raise Miss("manifest")
            return cls(agent_id, tokens, names, tail)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise Miss("manifest") from error


def block_names(tokens: Sequence[int], spec: ModelCacheSpec) -> tuple[str, ...]:
    """The chain hash of every block that `tokens` fill, a partial last one included."""
    names = chain_hashes(spec.fingerprint, tokens, spec.block_tokens)
    if tail := tokens[len(names) * spec.block_tokens :]:
        names.append(chain_hash(spec.fingerprint, names[-1] if names else ROOT, tail))
    return tuple(names)
