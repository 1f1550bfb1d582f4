"""LMCache's serde wrapper and memory of its cache with the plugin and its serde, in a process with the real LMCache.

Argument: the URL of a store. Prints "RESULT" and a JSON object.
"""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Callable
from typing import Any

import torch
from kvpage_connectors.lmcache_l2 import KvpageL2Adapter
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
from lmcache.v1.memory_management import MemoryObj

COUNT, SHAPE = 4, (2, 4, 64, 128)
LAYOUT = MemoryLayoutDesc([torch.Size(SHAPE)], [torch.bfloat16])


def keys_of(model: str) -> list[ObjectKey]:
    return [ObjectKey(bytes([at]) * 32, model, 0) for at in range(COUNT)]


def objects(memory: Any, name: str) -> list[MemoryObj]:
    made = memory.reserve_write(keys=keys_of(name), is_temporary=[False] * COUNT, layout_desc=LAYOUT, tag="_default")
    return [made[key][1] for key in keys_of(name)]


def ended(event: int, query: Callable[[], Any]) -> Any:
    poll = select.poll()
    poll.register(event, select.POLLIN)
    assert poll.poll(120_000)
    return query()


def main() -> None:
    memory = L1Manager(L1ManagerConfig(L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name="")))
    inner = KvpageL2Adapter({"url": sys.argv[1], "lookup_seconds": 60, "transfer_seconds": 60})
    serde = create_serde_processor(SerdeConfig("kvpage_lossless"))
    adapter = SerdeL2AdapterWrapper(inner=inner, serde=serde, l1_manager=memory)
    stored, loaded = objects(memory, "stored"), objects(memory, "loaded")
    torch.manual_seed(0)
    for one in stored:
        one.tensor.copy_(torch.randn(SHAPE) * torch.exp(torch.randn(*SHAPE[:2], 1, SHAPE[-1])))
    adapter.submit_store_task(keys_of("model"), stored)
    [result] = ended(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks).values()
    task = adapter.submit_load_task(keys_of("model"), loaded)
    found = ended(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    told = {
        "stored": result.is_successful(),
        "found": [found.test(at) for at in range(COUNT)],
        "equal": [bytes(one.byte_array) == bytes(other.byte_array) for one, other in zip(stored, loaded, strict=True)],
        "sizes": [entry.size_bytes for entry in inner.list_l2_keys().entries],
        "raw": stored[0].get_size(),
    }
    print("RESULT", json.dumps(told))
    adapter.close()


main()
