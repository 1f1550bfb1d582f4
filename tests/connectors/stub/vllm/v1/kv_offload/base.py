"""Names of chunks, the context of a request, and results of lookups."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, NewType

OffloadKey = NewType("OffloadKey", bytes)  # the hash of a chunk, and the number of its KV cache group in 4 bytes


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    return OffloadKey(block_hash + group_idx.to_bytes(4, "big"))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    return key[:-4]


def get_offload_group_idx(key: OffloadKey) -> int:
    return int.from_bytes(key[-4:], "big")


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


@dataclass
class ReqContext:
    """A request of vLLM."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: Any = None
    positions: dict[OffloadKey, int] = field(default_factory=dict)

    def set_offload_key_position(self, key: OffloadKey, end_token: int) -> None:
        self.positions[key] = end_token

    def get_offload_key_position(self, key: OffloadKey) -> int | None:
        return self.positions.get(key)


@dataclass
class RequestOffloadingContext:
    """Chunks of a request that a tier wants."""


class ScheduleEndContext(NamedTuple):
    new_req_ids: Collection[str]
    preempted_req_ids: Collection[str]


@dataclass(frozen=True)
class OffloadingMetricMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadingCounterMetadata(OffloadingMetricMetadata):
    pass


class OffloadingSpec:
    """Settings of the offloading: `config` is an OffloadingConfig."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.blocks_per_chunk: int = config.cache.blocks_per_chunk
