"""How a context is laid out on the page server: where its blocks lie, and the manifest that lists them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from engine.prefix import ROOT, chain_hash, chain_hashes
from engine.spec import ModelCacheSpec, PageAt, Shapes, pages
from kvpage_server.page import PageKey

FORMAT = 2  # of manifests and digests


class Miss(Exception):
    """What is stored cannot be used; the argument is the reason, as it is counted."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where on the server the tokens of a block lie, or the state after them."""

    name: str  # the block's chain hash
    tokens: int
    end: int  # the position after the last of them
    agent_id: str | None = None  # of a tail
    of_state: bool = False

    @property
    def seal(self) -> str:
        """The key of its digest, unless it's a tail's: that is in the manifest."""
        return f"{'state' if self.of_state else 'seal'}:{self.name}"

    def state(self) -> Place:
        """Where the state after these tokens lies."""
        return replace(self, of_state=True)

    def shapes(self, spec: ModelCacheSpec) -> Shapes:
        """Of the arrays that lie there."""
        return spec.state_shapes(self.end) if self.of_state else spec.token_shapes(self.tokens)

    def pages(self, spec: ModelCacheSpec) -> list[tuple[PageKey, PageAt]]:
        """Its pages, in canonical order."""
        req_id, page_id = (f"agent/{self.agent_id}", int(self.name[:8], 16)) if self.agent_id else (self.name, 0)
        return [
            (PageKey(req_id.encode(), at.layer, at.head, page_id, at.plane.kv_type), at)
            for at in pages(self.shapes(spec))
        ]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an agent's context consists of."""

    agent_id: str
    tokens: tuple[int, ...]
    names: tuple[str, ...]  # the chain hash of every block, the tail's too
    tail_digest: str | None = None  # None when the last block is full
    tail_state_digest: str | None = None  # None also when no layer carries a state

    def place(self, index: int, spec: ModelCacheSpec) -> Place:
        """Where the tokens of block `index` lie."""
        start = index * spec.block_tokens
        tokens = min(spec.block_tokens, len(self.tokens) - start)
        return Place(self.names[index], tokens, start + tokens, self.agent_id if tokens < spec.block_tokens else None)

    def places(self, spec: ModelCacheSpec) -> list[Place]:
        """Where the tokens of all its blocks lie, first to last."""
        return [self.place(i, spec) for i in range(len(self.names))]

    @property
    def digests(self) -> dict[str, str]:
        """What it knows of its tail, by seal."""
        name = self.names[-1] if self.names else ""
        known = {f"seal:{name}": self.tail_digest, f"state:{name}": self.tail_state_digest}
        return {seal: digest for seal, digest in known.items() if digest}

    def dump(self, spec: ModelCacheSpec) -> str:
        """The text that is stored."""
        return json.dumps(
            {
                "format": FORMAT,
                "fingerprint": f"{spec.fingerprint:016x}",
                "tokens": self.tokens,
                "chain": self.names,
                "tail": self.tail_digest,
                "state": self.tail_state_digest,
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
            return cls(agent_id, tokens, names, tail, stored["state"])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise Miss("manifest") from error


def block_names(tokens: Sequence[int], spec: ModelCacheSpec) -> tuple[str, ...]:
    """The chain hash of every block that `tokens` fill, a partial last one included."""
    names = chain_hashes(spec.fingerprint, tokens, spec.block_tokens)
    if tail := tokens[len(names) * spec.block_tokens :]:
        names.append(chain_hash(spec.fingerprint, names[-1] if names else ROOT, tail))
    return tuple(names)
