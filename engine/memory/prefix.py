"""Names for runs of tokens: chain hashes, and how much two runs share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

ROOT = ""


def chain_hash(fingerprint: int, parent: str, tokens: Sequence[int]) -> str:
    """The name of a block: 32 hex digits that stand for its tokens and everything before them.

    BLAKE2b with 16 bytes over the fingerprint (u64), the parent's 16 bytes (none for the first block) and the
    token ids (u32 each), all little-endian. Equal names mean equal keys and values, whoever computed them.
    """
    digest = hashlib.blake2b(fingerprint.to_bytes(8, "little"), digest_size=16)
    digest.update(bytes.fromhex(parent))
    digest.update(np.asarray(tokens, "<u4").tobytes())
    return digest.hexdigest()


def root_of(agent_id: str) -> str:
    """Where the chain of an agent's blocks begins: agents of different tenants share nothing, whatever they compute.

    ``alice@acme`` is an agent of the tenant ``acme``, whose root is BLAKE2b with 16 bytes over its name; ``alice`` is
    nobody's, and begins at ROOT.
    """
    _, at, tenant = agent_id.rpartition("@")
    return hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest() if at else ROOT


def chain_hashes(fingerprint: int, tokens: Sequence[int], block_tokens: int, root: str = ROOT) -> list[str]:
    """The chain hashes of the full blocks of `tokens`, first to last; a partial last block has none."""
    names: list[str] = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        names.append(chain_hash(fingerprint, names[-1] if names else root, tokens[start : start + block_tokens]))
    return names


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens from the first on are the same in both."""
    if (shortest := min(len(a), len(b))) and tuple(a[:shortest]) == tuple(b[:shortest]):
        return shortest
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
