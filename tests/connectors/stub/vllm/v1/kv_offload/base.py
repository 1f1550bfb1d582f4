"""Names of chunks, and the context of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NewType

OffloadKey = NewType("OffloadKey", bytes)  # the hash of a chunk, and the number of its KV cache group in 4 bytes


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    return OffloadKey(block_hash + group_idx.to_bytes(4, "big"))


@dataclass
class ReqContext:
    """A request of vLLM."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
