from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryObj

FACTORIES: dict[str, Callable[[dict[str, Any]], SerdeProcessor]] = {}


class Serializer(ABC):
    @abstractmethod
    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int: ...

    @abstractmethod
    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int: ...


class Deserializer(ABC):
    @abstractmethod
    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None: ...


class SerdeProcessor(ABC): ...  # noqa: B024 - of its methods none is called


class AsyncSerdeProcessor(SerdeProcessor):
    def __init__(self, serializer: Serializer, deserializer: Deserializer, max_workers: int = 1) -> None:
        self.serializer = serializer
        self.deserializer = deserializer
        self.max_workers = max_workers


def get_registered_serde_types() -> list[str]:
    return list(FACTORIES)


def register_serde_factory(name: str, factory: Callable[[dict[str, Any]], SerdeProcessor]) -> None:
    FACTORIES[name] = factory
