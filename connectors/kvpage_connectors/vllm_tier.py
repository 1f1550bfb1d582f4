"""A secondary tier below vLLM's own offloading to RAM: whole chunks of the KV cache on a kvpage-server.

vLLM copies chunks between GPU and RAM, one row of memory for all layers and ranks of a chunk. This tier moves rows
between RAM and the server, without a copy. It runs in the process of vLLM's scheduler. Tried with vLLM 0.32.

A row is opaque: one page, named by the hash of the chunk and, as its page id, by the KV cache group.
"""

from __future__ import annotations

import hashlib
import importlib
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvpage_connectors.jobs import Blocks, Jobs
from kvpage_connectors.names import Identity, weights_digest
from kvpage_connectors.reasons import guarded
from kvpage_connectors.vllm_hints import PIN, RETAIN, Hint, Sessions, hints_of
from kvpage_server.client import BlockName
from kvpage_server.client.page import BlockPages, PageLayout
from kvpage_server.page import DType

logger = init_logger("vllm.kvpage")

_PATIENCE = 0.0005  # seconds that a step waits for a lookup or load, so that the threads of the tier run
_SHUTDOWN = 4.0  # seconds for stores in progress
_BLOCKS, _BYTES = "vllm:kvpage_blocks", "vllm:kvpage_bytes"


def identity_of(spec: OffloadingSpec, weights: str | None) -> Identity:
    """Return the identity of an engine. `weights` is a name of its weights, None for a digest of the model's folder.

    A tier does not get vLLM's settings for loading a model. So engines that load the same files in different ways, for
    example with `--quantization`, need different names. Raises OSError or ValueError if the weights can't be read.
    """
    config, model = spec.config, Path(spec.config.model.name)
    if weights is None and not model.is_dir():
        raise ValueError(f'{model} is no folder: set "weights" to a name of the model, its revision and quantisation')
    fields = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True).get_run_config()
    settings = model / "config.json"
    fields["model_name"] = hashlib.sha256(settings.read_bytes()).hexdigest() if settings.is_file() else ""
    device = str(current_platform.device_type)
    return Identity(
        weights=weights or weights_digest(model),
        dtype=config.model.dtype,
        block_size=config.cache.tokens_per_hash * config.cache.blocks_per_chunk,
        layout=f"rows-{str(config.kv_cache_layout).lower()}-{device}",
        isa=_cpu_capability() if device == "cpu" else device,
        backend=f"{type(spec).__name__} of vLLM {vllm.__version__}",
        tp=fields["tp_size"],
        pp=fields["pp_size"],
        hash=f"of {config.cache.tokens_per_hash} tokens",
        model={**fields, "bytes": config.worker_kv_bytes_per_block},
    )


def _cpu_capability() -> str:
    """Return the instruction set that decides how vLLM's attention on the CPU packs a block."""
    torch = importlib.import_module("torch")
    return f"{torch.backends.cpu.get_cpu_capability()} amx {torch.cpu._is_amx_tile_supported()}"


@dataclass(slots=True)
class _Running:
    """A job in progress."""

    job: TransferJob
    keys: list[OffloadKey]
    future: Future[list[bool]]


@dataclass(slots=True)
class _Request:
    """Chunks of a request, until it has ended."""

    context: ReqContext
    keys: list[OffloadKey] = field(default_factory=list)  # stored or loaded, to be linked
    used: list[OffloadKey] = field(default_factory=list)  # in RAM
    running: int = 0  # jobs
    is_finished: bool = False


class _Lookups(AsyncLookupManager):
    """Lookups in a thread of vLLM: one KVPAGEPREFIX for the chunks of a request in a KV cache group."""

    def __init__(self, tier: KvpageTier) -> None:
        super().__init__(tier.tier_type)
        self._tier = tier

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        found = self._tier.stored(keys, req_context)
        return [key in found for key in keys]


def _no_jobs() -> list[JobResult]:
    return []


def _no_stats() -> OffloadingConnectorStats | None:
    return None


def _miss() -> LookupResult:
    return LookupResult.MISS


class KvpageTier(SecondaryTierManager):
    """Tier for ``secondary_tiers``. Methods have vLLM's documentation; exceptions in them are counted misses."""

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        url: str = "",
        weights: str | None = None,
        locality: str = Locality.REMOTE.value,
        **options: Any,
    ) -> None:
        """Connect the rows of `primary_kv_view`.

        `weights` is a name of the weights, see `identity_of`; `options` are those of Jobs and PageClient. Raises
        ValueError for an invalid option.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality)
        self._jobs = Jobs(url, logger, **options)
        self.reasons = self._jobs.reasons
        self._memory = primary_kv_view.cast("B")
        self._running: dict[int, _Running] = {}
        self._requests: dict[str, _Request] = {}
        self._sessions = Sessions[OffloadKey]()
        self._is_asking = False  # in this step
        self._names = b""  # beginning of the names; empty if the tier can't be used
        self._name(weights)
        self._lookups = _Lookups(self)

    @guarded(lambda: None)
    def _name(self, weights: str | None) -> None:
        self._names = identity_of(self._offloading_spec, weights).names("vllm")
        logger.info("kvpage: the names of chunks begin with %s", self._names.decode())

    # -- lookups -------------------------------------------------------------------------------------------------------

    @guarded(_miss)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return RETRY until a thread has asked the server. A chunk is loaded only after that."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            self._is_asking = True
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def stored(self, keys: Sequence[OffloadKey], context: ReqContext) -> set[OffloadKey]:
        """Return the stored chunks of a request before the first missing one of each group, which are leased now."""
        groups: dict[int, list[OffloadKey]] = defaultdict(list)
        for key in _in_order(keys, context):
            groups[get_offload_group_idx(key)].append(key)
        found: set[OffloadKey] = set()
        for group in groups.values():
            lookup = self._jobs.lookup(partial(self._named, group), len(group), 1)
            while (count := lookup.answer(1.0)) is None:
                pass
            found.update(group[:count])
        return found

    @guarded(lambda: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of chunks on the server, and link each to the one before it; a request may lease them."""
        self._request(req_context).used += keys
        self._use(_in_order(keys, req_context), req_context)

    def _use(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        own = [hint.lease_ms for hint in _hints_of(context) if hint.is_own]
        self._lease(keys, max(own, default=0))

    def _lease(self, keys: Sequence[OffloadKey], lease_ms: int) -> None:
        groups: dict[int, list[OffloadKey]] = defaultdict(list)
        for key in keys:
            groups[get_offload_group_idx(key)].append(key)
        for group in groups.values():
            self._jobs.lookup(partial(self._named, group), len(group), 1, lease_ms=lease_ms)

    def _protect(self, hint: Hint, keys: Sequence[OffloadKey]) -> None:
        if hint.kind == RETAIN:
            self._lease(keys, hint.lease_ms)
        elif keys:
            self._jobs.pin(partial(self._named, keys), len(keys), pin=hint.kind == PIN)

    def _named(self, keys: Iterable[OffloadKey]) -> list[BlockName]:
        if not self._names:
            raise ValueError("the engine has no identity")
        return [(self._names + get_offload_block_hash(key).hex().encode(), get_offload_group_idx(key)) for key in keys]

    # -- transfers -----------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._jobs.save)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._jobs.load)

    def _submit(self, job: TransferJob, move: Any) -> None:
        keys = list(job.keys)
        blocks = Blocks(len(keys), self.block_size_bytes, partial(self._rows, keys, [*map(int, job.chunk_ids)]))
        self._running[job.job_id] = _Running(job, keys, move(blocks))
        request = self._request(job.req_context)
        request.keys += keys
        request.running += 1

    def _request(self, context: ReqContext) -> _Request:
        return self._requests.setdefault(context.req_id, _Request(context))

    def _rows(self, keys: Sequence[OffloadKey], rows: Sequence[int], part: slice) -> BlockPages:
        size = self.block_size_bytes
        memory = [self._memory[row * size : (row + 1) * size] for row in rows[part]]
        return BlockPages(self._named(keys[part]), PageLayout([(0, 0, 0, DType.UINT8, 1, size)]), memory)

    @guarded(_no_jobs)
    def get_finished_jobs(self) -> list[JobResult]:
        ended = [running for running in self._running.values() if running.future.done()]
        return [self._result(running) for running in ended]

    def _result(self, running: _Running) -> JobResult:
        job, keys, moved = running.job, running.keys, running.future.result()
        good = [key for key, is_moved in zip(keys, moved, strict=True) if is_moved]
        if job.is_promotion and len(good) < len(keys):
            self._lookups.mark_miss(set(keys) - set(good))
        del self._running[job.job_id]
        request = self._requests[job.req_context.req_id]
        request.running -= 1
        self._maybe_link(request)
        nbytes = len(good) * self.block_size_bytes
        seconds = monotonic() - job.submit_time
        return JobResult(job.job_id, len(good) == len(keys), good if job.is_promotion else None, seconds, nbytes)

    def drain_jobs(self) -> None:
        """Wait for all jobs, and give all chunks new names: vLLM resets its cache because the weights may change."""
        wait([running.future for running in self._running.values()])
        self._name(uuid.uuid4().hex)

    # -- requests and steps --------------------------------------------------------------------------------------------

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Follow the hints that name chunks or a session."""
        for hint in _hints_of(req_context):
            keys = [make_offload_key(one, hint.group) for one in hint.hashes]
            self._protect(hint, keys or self._sessions.blocks(hint.session))
        return RequestOffloadingContext()

    @guarded(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)
        if request := self._requests.get(req_context.req_id):
            request.is_finished = True
            self._maybe_link(request)

    def _maybe_link(self, request: _Request) -> None:
        """When the jobs of a finished request have ended, link its chunks on the server, and follow its other hints."""
        if request.is_finished and not request.running:
            del self._requests[request.context.req_id]
            self._end(request)

    @guarded(lambda: None)
    def _end(self, request: _Request) -> None:
        context, every = request.context, _in_order([*request.used, *request.keys], request.context)
        self._sessions.add(context.kv_transfer_params, every)
        self._use(_in_order(request.keys, context), context)
        for hint in _hints_of(context):
            if hint.kind != RETAIN and hint.is_own:
                self._protect(hint, every)

    @guarded(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()
        loads = [running.future for running in self._running.values() if running.job.is_promotion]
        if loads:
            wait(loads, _PATIENCE, FIRST_COMPLETED)
        elif self._is_asking:
            sleep(_PATIENCE)
        self._is_asking = False

    @guarded(lambda: None)
    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._jobs.close(_SHUTDOWN)
        self._running.clear()
        self._memory.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the Prometheus counters ``vllm:kvpage_blocks`` by job and result, and ``vllm:kvpage_bytes`` by job."""
        blocks = "Chunks looked up, loaded and saved: ok, or the reason of a miss."
        return {
            _BLOCKS: OffloadingCounterMetadata(documentation=blocks, labelnames=("job", "result")),
            _BYTES: OffloadingCounterMetadata(documentation="Bytes loaded and saved.", labelnames=("job",)),
        }

    @guarded(_no_stats)
    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        for name, count in self._jobs.take_counts().items():
            job, _, result = name.partition("/")
            if result == "bytes":
                stats.increase_counter(_BYTES, count, (job,))
            else:
                stats.increase_counter(_BLOCKS, count, (job, result))
        return stats


def _hints_of(context: ReqContext) -> list[Hint]:
    return hints_of(context.kv_transfer_params, context.kv_hints)


def _in_order(keys: Collection[OffloadKey], context: ReqContext) -> list[OffloadKey]:
    """Return keys in the order of their tokens, as far as vLLM knows it, each once."""
    return sorted(dict.fromkeys(keys), key=lambda key: context.get_offload_key_position(key) or 0)
