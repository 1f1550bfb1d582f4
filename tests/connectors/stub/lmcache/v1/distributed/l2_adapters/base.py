from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lmcache.v1.distributed.api import KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.memory_management import MemoryObj


class L2AdapterInterface(ABC):
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.capacity = max_capacity_bytes
        self.used = 0
        self.accessed: list[ObjectKey] = []

    def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.used += sum(sizes)

    def _notify_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def _notify_keys_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.used -= sum(sizes)

    @abstractmethod
    def get_store_event_fd(self) -> int: ...

    @abstractmethod
    def get_lookup_and_lock_event_fd(self) -> int: ...

    @abstractmethod
    def get_load_event_fd(self) -> int: ...

    @abstractmethod
    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int: ...

    @abstractmethod
    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]: ...

    @abstractmethod
    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int: ...

    @abstractmethod
    def query_lookup_and_lock_result(self, task_id: int) -> Any: ...

    @abstractmethod
    def submit_unlock(self, keys: list[ObjectKey]) -> None: ...

    @abstractmethod
    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int: ...

    @abstractmethod
    def query_load_result(self, task_id: int) -> Any: ...

    @abstractmethod
    def close(self) -> None: ...

    def delete(self, keys: list[ObjectKey]) -> None:
        return None

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        raise NotImplementedError

    def report_status(self) -> dict[str, Any]:
        return {}
