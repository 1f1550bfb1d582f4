"""vLLM's tiered offloading on the CPU, which vLLM refuses: its worker copies by CUDA. Everything else is vLLM's own.

`CpuTieringSpec` is for `spec_name` and `spec_module_path`. Its worker copies blocks between the paged cache and the RAM
tier with torch, at once.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies of blocks, complete when they are submitted."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion, per_chunk: int) -> None:
        self._region = region
        self._paged = [tensor.tensor for tensor in caches.tensors]
        self._rows = [region.create_next_worker_view(tensor.shape[1] * per_chunk) for tensor in self._paged]
        self._groups, self._per_chunk = caches.group_data_refs, per_chunk
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def _copy(self, job_id: int, paged: GPULoadStoreSpec, rows: Any, *, is_store: bool) -> bool:
        blocks, chunks = iter(paged.block_ids.tolist()), rows.block_ids.tolist()
        first_chunk = size = 0
        for group, count in enumerate(paged.group_sizes):
            skipped = paged.block_indices[group] % self._per_chunk
            for place in range(skipped, skipped + count):
                block = next(blocks)
                chunk, part = divmod(place, self._per_chunk)
                for ref in self._groups[group]:
                    cache = self._paged[ref.tensor_idx][block]
                    width = cache.shape[0]
                    row = self._rows[ref.tensor_idx][chunks[first_chunk + chunk]][part * width : (part + 1) * width]
                    source, to = (cache, row) if is_store else (row, cache)
                    to.copy_(source)
                    size += width
            first_chunk += -(-(skipped + count) // self._per_chunk)
        self._done.append(TransferResult(job_id, True, size, 0.001))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: every job is complete."""

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """TieringOffloadingSpec with a worker that copies in main memory."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
