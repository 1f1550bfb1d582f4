"""Ids of agents, chain hashes of blocks, and the rules for sharing blocks."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, get_args

import numpy as np

ROOT = ""
Share = Literal["none", "system", "all"]
SHARE: tuple[Share, ...] = get_args(Share)

RULE = "an agent id is 1 to 128 of A-Z a-z 0-9 . _ @ + = - and starts with no dot"
_AGENT_ID = re.compile(r"[A-Za-z0-9_@+=-][A-Za-z0-9._@+=-]{0,127}\Z")
_UNNAMED = re.compile(r"anon-([0-9a-f]{16})-[0-9a-f]{32}(@.*)?\Z")


def is_agent_id(name: str) -> bool:
    """Return whether `name` is a valid agent id, which can be a part of keys and file names: see `RULE`."""
    return bool(_AGENT_ID.match(name))


def chain_hash(fingerprint: int, parent: str, tokens: Sequence[int]) -> str:
    """Return the name of a block: 32 hex digits that stand for its tokens and all tokens before them.

    BLAKE2b with 16 bytes over the fingerprint (u64), the parent's 16 bytes (none for the first block) and the token ids
    (u32 each), all little-endian. Equal names mean equal keys and values, independent of the engine.
    """
    digest = hashlib.blake2b(fingerprint.to_bytes(8, "little"), digest_size=16)
    digest.update(bytes.fromhex(parent))
    digest.update(np.asarray(tokens, "<u4").tobytes())
    return digest.hexdigest()


def root_of(agent_id: str) -> str:
    """Return the parent's hash for an agent's first block. It differs between tenants, so they share no blocks.

    ``alice@acme`` is an agent of the tenant ``acme``, whose root is BLAKE2b with 16 bytes over its name. ``alice`` has
    no tenant; its root is ROOT.
    """
    _, at, tenant = agent_id.rpartition("@")
    return hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest() if at else ROOT


@dataclass(frozen=True, slots=True)
class Chain:
    """Rule for the names of the blocks of one context: the root of their hash chain, and the number of blocks whose
    names other clients of the tenant can compute.
    """

    root: str = ROOT
    client: str = ""  # the only client that can name the private blocks; empty if all are shared
    shared: int = 0  # blocks before the first private one

    def parent(self, index: int, before: str | None) -> str:
        """Return the parent's hash in the name of block number `index`. `before` is the chain hash of the block before
        it; None for block 0, whose parent is the root.

        For the first private block it is BLAKE2b with 16 bytes over this hash and the client, so that only this client
        can compute the names of this block and of the blocks after it.
        """
        parent = self.root if before is None else before
        if not self.client or index != self.shared:
            return parent
        return hashlib.blake2b(bytes.fromhex(parent) + self.client.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class ContextNames:
    """The names of a context's blocks, from which its tokens do not follow."""

    blocks: tuple[str, ...]  # chain hashes, also of a partial last block
    chain: Chain
    first: tuple[str, ...]  # hashes of its first tokens: see `tiers.server.tails.first_parts`


SHARED = Chain()  # the chain of an agent without a tenant, with all blocks shared


@dataclass(frozen=True, slots=True)
class Sharing:
    """Rule for sharing the first blocks of contexts between the clients of a tenant.

    A client is a named agent, or all prompts without a name that have the same bearer token.
    """

    share: Share = "all"
    head: tuple[int, ...] = ()  # with "system": the tokens before the text of a system message
    mark: tuple[int, ...] = ()  # the tokens after it

    def chain(self, agent_id: str, tokens: Sequence[int], block_tokens: int) -> Chain:
        """Return the chain for an agent's context of `tokens`. A longer context with the same first tokens has the same
        names for these blocks.
        """
        root = root_of(agent_id)
        if self.share == "all":
            return Chain(root)
        unnamed = _UNNAMED.match(agent_id)
        client = f"token {unnamed[1]}" if unnamed else agent_id
        return Chain(root, client, self._shared(tokens, block_tokens))

    def _shared(self, tokens: Sequence[int], block_tokens: int) -> int:
        """Return the number of first blocks that other clients may use: all blocks that end before the system message
        does. A prompt without a system message, such as a text to be continued, shares none.
        """
        if self.share == "none" or tuple(tokens[: len(self.head)]) != self.head:
            return 0
        text, mark = (np.asarray(ids, "<u4").tobytes() for ids in (tokens, self.mark))
        at = text.find(mark)
        while at % 4 and at >= 0:
            at = text.find(mark, at + 1)
        return len(tokens) if at < 0 else (at // 4 + len(self.mark) - 1) // block_tokens


SHARE_ALL = Sharing()


def is_unnamed(agent_id: str) -> bool:
    """Return whether the id was made by `unnamed_agent`, for a prompt without an agent's name."""
    return bool(_UNNAMED.match(agent_id))


def unnamed_agent(token: str) -> str:
    """Return a new, random id for a prompt without an agent's name. It has a hash of the client's bearer token `token`,
    which may be empty.
    """
    client = hashlib.blake2b(token.encode(), digest_size=8).hexdigest()
    return f"anon-{client}-{uuid.uuid4().hex}"


def chain_hashes(fingerprint: int, tokens: Sequence[int], block_tokens: int, chain: Chain = SHARED) -> list[str]:
    """Return the chain hashes of the full blocks of `tokens`, first to last; a partial last block has none."""
    names: list[str] = []
    for i in range(len(tokens) // block_tokens):
        parent = chain.parent(i, names[-1] if names else None)
        names.append(chain_hash(fingerprint, parent, tokens[i * block_tokens : (i + 1) * block_tokens]))
    return names


def beginnings(fingerprint: int, parent: str, tokens: Sequence[int]) -> list[str]:
    """Return the names of the blocks with the first 1, 2, ... of these tokens: see `chain_hash`."""
    digest = hashlib.blake2b(fingerprint.to_bytes(8, "little") + bytes.fromhex(parent), digest_size=16)
    names: list[str] = []
    for token in np.asarray(tokens, "<u4"):
        digest.update(token.tobytes())
        names.append(digest.hexdigest())
    return names


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens at the start that are the same in both."""
    if (shortest := min(len(a), len(b))) and tuple(a[:shortest]) == tuple(b[:shortest]):
        return shortest
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
