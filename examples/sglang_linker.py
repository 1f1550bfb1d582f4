"""A UnifiedCacheLinker of SGLang: KV pages move between the GPU and a kvpage-server, without SGLang's pools in RAM.

    PYTHONPATH=examples python -m sglang.launch_server --model-path MODEL --enable-unified-cache-external-linker \\
        --unified-cache-external-linker-config '{"linker": "KvpageLinker", "linker_module_path": "sglang_linker",
        "linker_extra_config": {"url": "redis://127.0.0.1:9221"}}'

SGLang 0.5.23 has linkers for hybrid and sparse models on GPUs. This one was not run on a GPU, but with SGLang's views
of pools and its counters of layers on the CPU (tests/connectors/sglang_linker_host.py). Pages are copied to pinned
memory, `_STAGED` at a time, which the HiCache backend stores and loads. So names, checksums, deadlines and misses are
those of docs/sglang.md; HiCache's own pages have other names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, Queue
from typing import Any

import torch
from kvpage_connectors.sglang_hicache import KvpageHiCache
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_model, get_parallel
from sglang.srt.utils import get_device_module

logger = logging.getLogger("sglang.kvpage")

_device = get_device_module()  # torch.cuda, or the module of another device

_STAGED = 32  # pages of a pool that are copied at once


class StagedPool:
    """Pinned memory for pages of a device pool. For the backend it is a host pool whose pages are numbered from 0."""

    layout, storage_format_tag = "device", None

    def __init__(self, entry: Any) -> None:
        self.entry = entry
        self.page_size = int(entry.page_size)
        self.dtype = entry.kv_buffer[0].dtype
        self._sizes = [size for component in entry.buffer_meta for _, _, size in component]
        self._rows = [  # of each buffer that a page has
            size // (buffer.nbytes // buffer.shape[0])
            for buffer, size in zip(entry.kv_buffer, self._sizes, strict=True)
        ]
        self.memory = torch.empty((_STAGED, sum(self._sizes)), dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Return address and bytes of each piece of the staged pages with these indices."""
        pages = [index // self.page_size for index in indices.tolist()[:: self.page_size]]
        starts = [sum(self._sizes[:i]) for i in range(len(self._sizes))]
        return [self.memory[page, start:].data_ptr() for page in pages for start in starts], self._sizes * len(pages)

    def copy(self, rows: list[int], *, to_device: bool) -> None:
        """Copy pages that begin at these rows of the device's buffers, from or to the staged pages 0, 1 and so on."""
        for page, row in enumerate(rows):
            start = 0
            for buffer, count, size in zip(self.entry.kv_buffer, self._rows, self._sizes, strict=True):
                there = buffer[row : row + count].view(torch.uint8)
                here = self.memory[page, start : start + size].view(there.shape)
                (there if to_device else here).copy_(here if to_device else there, non_blocking=True)
                start += size


class KvpageLinker(UnifiedCacheLinker):
    """Linker for ``--unified-cache-external-linker-config``. Methods have SGLang's documentation."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        """Connect. `extra_config` is that of the HiCache backend. Raises ValueError for a model without a pool of keys
        and values.
        """
        self.forward_stream = forward_stream
        self.group = resolve_hybrid_device_pool_group(
            kvcache=params.token_to_kv_pool_allocator.get_kvcache(),
            page_size=params.page_size,
            params=params,
            components=components,
        )
        self.pools = self.group.entry_map
        if PoolName.KV not in self.pools:  # DeepSeek V4 has only pools for parts of them
            raise ValueError(f"the model has no pool {PoolName.KV}, only {', '.join(self.pools)}")
        self.layer_done_counter = LayerWiseLoadCounter(self.group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        tp_rank, tp_size = get_parallel().tp_rank, get_parallel().tp_size
        config = HiCacheStorageConfig(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            attn_cp_rank=params.attn_cp_rank,
            attn_cp_size=params.attn_cp_size,
            is_mla_model=self.group.rank_replicated,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name=get_model().model_path,
            extra_config={"interface_v1": 1, **extra_config},
        )
        self._is_writer = config.is_storage_writer
        self._backend = KvpageHiCache(config, {})
        self._staged = {name: StagedPool(entry) for name, entry in self.pools.items()}
        for name, pool in self._staged.items():
            self._backend.register_mem_host_pool_v2(pool, name)
        self._stream = _device.Stream()
        self._pending: dict[str, list[PoolTransfer]] = {}  # loads of the next batch
        self._worker = ThreadPoolExecutor(1, "kvpage-linker")  # one thread, since the staged pages are used by one job
        self._running: list[Future[None]] = []
        self._results: Queue[bool] = Queue()  # of offloads

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        asked = self.group.resolve_transfers(transfers)
        keys = next((transfer.keys for transfer in transfers if transfer.name == PoolName.KV), None)
        if not asked or not keys:
            return []
        sides = [transfer for transfer in asked if transfer.name != PoolName.KV]
        return self._backend.batch_exists_v2(list(keys), sides).restorable_prefix_pages or []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        resolved = self.group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        if resolved:
            self._pending[rid] = resolved
        return bool(resolved)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._pending.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        if not self._pending:
            return -1
        loads, self._pending = [one for some in self._pending.values() for one in some], {}
        index = self.layer_done_counter.update_producer()
        ready = _device.Event()
        ready.record()

        def run() -> None:
            """Load all layers, and then report each: the backend stores whole pages."""
            try:
                if not self._moved(loads, [ready], to_device=True):
                    raise RuntimeError("a page was missed; the log has the reason")
            except Exception as error:  # noqa: BLE001 - the requests of the batch are aborted
                self.layer_done_counter.fail(index, error)
                return
            for layer in range(self.group.num_layers):
                self.layer_done_counter.complete(index, layer)

        self._run(run)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        saves = self.group.resolve_transfers(transfers, allow_partial=True)
        if saves and not self._is_writer:
            saves = [one for one in saves if one.name == PoolName.MAMBA]  # the others are equal on all ranks
            if not saves:
                self._results.put(True)
                return True
        if not saves:
            return False
        ready = self.record_offload_ready()

        def run() -> None:
            try:
                self._results.put(self._moved(saves, ready, to_device=False))
            except Exception:
                logger.exception("kvpage: an offload failed")
                self._results.put(False)

        self._run(run)
        return True

    def num_completed_offloads(self) -> int:
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        return self._results.get_nowait()

    def reset(self) -> None:
        self._pending.clear()
        for job in self._running:
            job.result()
        self._running.clear()
        try:
            while True:
                self._results.get_nowait()
        except Empty:
            self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        self._worker.shutdown()
        self._backend.close()

    def _run(self, job: Callable[[], None]) -> None:
        self._running = [job for job in self._running if not job.done()]
        self._running.append(self._worker.submit(job))

    def _moved(self, transfers: Sequence[PoolTransfer], ready: Sequence[Any], *, to_device: bool) -> bool:
        """Copy pages between device and store. Return whether all were moved."""
        for event in ready:
            event.synchronize()
        with _device.stream(self._stream):
            return all(
                self._moved_part(transfer, start, to_device)
                for transfer in transfers
                for start in range(0, len(transfer.keys or ()), _STAGED)
            )

    def _synchronize(self) -> None:
        """Wait for the copies."""
        copied = _device.Event()
        copied.record(self._stream)
        copied.synchronize()

    def _moved_part(self, transfer: PoolTransfer, start: int, to_device: bool) -> bool:
        """Copy at most _STAGED pages, and wait for the copies."""
        pool = self._staged[transfer.name]
        keys = list(transfer.keys or ())[start : start + _STAGED]
        tokens = transfer.host_indices[start * pool.page_size : (start + len(keys)) * pool.page_size]
        rows = self.pools[transfer.name].prepare_locations(tokens)
        staged = replace(transfer, keys=keys, host_indices=torch.arange(len(keys) * pool.page_size))
        if not to_device:
            pool.copy(rows, to_device=False)
            self._synchronize()
        move = self._backend.batch_get_v2 if to_device else self._backend.batch_set_v2
        moved = all(move([staged])[transfer.name])
        if to_device and moved:
            pool.copy(rows, to_device=True)
            self._synchronize()
        return moved
