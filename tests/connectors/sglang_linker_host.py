"""The example of a linker with SGLang's device pools, transfers and counters on the CPU, in a process with SGLang.

Arguments: the URL of a store. Prints "RESULT" and a JSON object. SGLang imports torchvision there, and none of its
functions is called: it is replaced by empty modules, because it has no build for this PyTorch.
"""

from __future__ import annotations

import json
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


class Nothing(type):
    """Metaclass of classes with any attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


class Absent(Loader):
    """Finder and loader of empty modules."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__getattr__=lambda name: Nothing(name, (), {}), __version__="0.28.0", __file__=__file__)


sys.meta_path.insert(0, Absent())
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import sglang_linker  # noqa: E402
import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup  # noqa: E402

LAYERS, PAGES, TOKENS, STATES = 4, 80, 16, 12
KEYS = [f"{number:064x}" for number in range(50)]  # more than a linker stages at once
(URL,) = sys.argv[1:]


class Engine:
    """Device pools of a model with attention in even layers, and states in odd ones, and a linker for them."""

    def __init__(self, seed: int) -> None:
        def buffers(rows: int, *shape: int) -> list[torch.Tensor]:
            random = torch.Generator().manual_seed(seed)
            return [torch.rand((rows, *shape), generator=random).bfloat16() for _ in range(LAYERS // 2)]

        self.kv = [*buffers(PAGES * TOKENS, 2, 8), *buffers(PAGES * TOKENS, 2, 8)]
        self.states = [buffers(STATES, 3, 5), buffers(STATES, 7)]
        pools = [
            self._entry(PoolName.KV, [self.kv], {0: (0, 2), 2: (1, 3)}, TOKENS),
            self._entry(PoolName.MAMBA, self.states, {1: 0, 3: 1}, 1),
        ]
        group = DevicePoolGroup(pools, LAYERS, TOKENS)
        sglang_linker.resolve_hybrid_device_pool_group = lambda **_: group
        sglang_linker.get_parallel = lambda: SimpleNamespace(tp_rank=0, tp_size=1)
        sglang_linker.get_model = lambda: SimpleNamespace(model_path="")
        params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: None),
            req_to_token_pool=SimpleNamespace(register_layer_transfer_counter=lambda _: None),
            page_size=TOKENS,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
        )
        extra = {"url": URL, "weights": "w1", "lookup_seconds": 30, "transfer_seconds": 60}
        self.linker = sglang_linker.KvpageLinker(None, params, components=set(), extra_config=extra)

    def _entry(
        self, name: PoolName, components: list[list[torch.Tensor]], layers: dict[int, Any], page_size: int
    ) -> DevicePoolEntry:
        return DevicePoolEntry(
            name=name,
            indices_from_pool=name,
            device_pool=None,
            components=components,
            layer_mapping=layers,
            page_size=page_size,
            rows_are_pages=False,
        )

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Load as a forward does, which waits for each layer. Return whether all layers were loaded."""
        assert self.linker.load(rid, transfers)
        index = self.linker.start_layer_wise_loading()
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(LAYERS):
            self.linker.layer_done_counter.wait_until(layer)
        return bool(self.linker.finish_layer_wise_loading(index))

    def offload(self, transfers: list[PoolTransfer]) -> bool:
        assert self.linker.offload(transfers)
        return bool(self.linker._results.get(timeout=60))


def pages(first: int, keys: list[str]) -> PoolTransfer:
    indices = torch.arange(first * TOKENS, (first + len(keys)) * TOKENS)
    return PoolTransfer(PoolName.KV, device_indices=indices, keys=keys)


def state(slot: int, key: str) -> PoolTransfer:
    trailing = PoolHitPolicy.TRAILING_PAGES
    return PoolTransfer(PoolName.MAMBA, device_indices=torch.tensor([slot]), keys=[key], hit_policy=trailing)


def asked(keys: list[str]) -> list[PoolTransfer]:
    trailing = PoolHitPolicy.TRAILING_PAGES
    return [PoolTransfer(PoolName.KV, keys=keys), PoolTransfer(PoolName.MAMBA, keys=keys[-1:], hit_policy=trailing)]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor], at: int, there: int, rows: int) -> bool:
    return all(torch.equal(a[at : at + rows], b[there : there + rows]) for a, b in zip(ours, theirs, strict=True))


writer, reader = Engine(1), Engine(2)
result: dict[str, Any] = {"before": reader.linker.lookup("a", asked(KEYS))}
result["offloaded"] = [
    writer.offload([pages(3, KEYS[:20]), state(5, KEYS[19])]),
    writer.offload([pages(23, KEYS[20:]), state(6, KEYS[-1])]),
]
result["lengths"] = reader.linker.lookup("a", asked(KEYS))
result["loaded"] = reader.load("a", [pages(7, KEYS), state(2, KEYS[-1])])
result["equal"] = [
    equal(reader.kv, writer.kv, 7 * TOKENS, 3 * TOKENS, len(KEYS) * TOKENS),
    equal(reader.states[0], writer.states[0], 2, 6, 1),
    equal(reader.states[1], writer.states[1], 2, 6, 1),
    not equal(reader.kv, writer.kv, 0, 0, TOKENS),
]
result["missing"] = reader.load("b", [pages(0, ["missing"])])
assert reader.linker.load("c", [pages(0, KEYS[:1])])
result["cancelled"] = [reader.linker.cancel_queued_load("c"), reader.linker.start_layer_wise_loading()]
for engine in (writer, reader):
    engine.linker.close()
print("RESULT", json.dumps(result))
