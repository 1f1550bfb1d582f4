"""Connector of vLLM's paged KV cache in main memory to a kvpage-server, for the CPU backend.

vLLM makes two instances. The one of the scheduler finds stored blocks and decides which blocks are loaded and saved; it
sends a `Work` with each step to the instance of each worker, whose threads move the pages directly between the paged
cache and the socket. Tried with vLLM 0.32.

In a block of the CPU backend, each head of a layer has its keys and then its values. So each of them is a page: layer,
head, K or V. Within a page, the kernel decides the order of the elements (`vec` transposes the keys); the layout in the
names says which.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from time import sleep
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger

from kvpage_connectors.jobs import Blocks, Jobs, Lookup
from kvpage_connectors.reasons import guarded
from kvpage_connectors.vllm_hints import PIN, RETAIN, Hint, Sessions, hints_of
from kvpage_connectors.vllm_identity import identity_of, weights_of
from kvpage_connectors.vllm_metrics import Counts, Metrics
from kvpage_connectors.vllm_paged import Paged, layout_of, pages_of
from kvpage_server.client import BlockName
from kvpage_server.client.page import BlockPages

logger = init_logger("vllm.kvpage")

_PATIENCE = 0.0009  # seconds that a step without other work waits, so that the connector's threads run
_SHUTDOWN = 4.0  # seconds for saves in progress; vLLM kills a worker after 5


# -- Messages from the scheduler to the workers ------------------------------------------------------------------------


@dataclass
class Job:
    """Blocks of a request: their hashes, and their numbers in the paged cache."""

    req_id: str
    hashes: list[bytes]
    blocks: list[int]


@dataclass
class Work(KVConnectorMetadata):
    """The jobs of one step."""

    names: bytes = b""  # beginning of the names
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)  # requests whose blocks are freed when their saves have ended
    preempted: set[str] = field(default_factory=set)
    is_idle: bool = False  # the step computes no token


@dataclass
class Known:
    """State of a request in the scheduler. Numbers of blocks count from its beginning."""

    request: Any
    lookup: Lookup | None = None
    computed: int = 0  # tokens in the paged cache, as of the last lookup
    stored: int = 0  # blocks that are stored, or on the way
    limit: int | None = None  # the first block that could not be loaded: looked up no more
    loading: list[int] = field(default_factory=list)  # blocks of the paged cache
    has_saved: bool = False


def _no_tokens() -> tuple[int | None, bool]:
    return 0, False


def _not_delayed() -> tuple[bool, dict[str, Any] | None]:
    return False, None


def _no_counts() -> KVConnectorStats | None:
    return None


def _nothing_finished() -> tuple[set[str] | None, set[str] | None]:
    return None, None


class KvpageConnector(KVConnectorBase_V1):
    """Connector for ``kv_connector``. Methods have vLLM's documentation; exceptions in them are counted misses."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Connect the cache. ``kv_connector_extra_config`` has ``url``, options of Jobs and PageClient, and optionally
        the digest of the ``weights``. Raises ValueError for an invalid option.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = dict(self._kv_transfer_config.kv_connector_extra_config)
        weights = options.pop("weights", None)
        self._jobs = Jobs(options.pop("url", ""), logger, **options)
        self.reasons = self._jobs.reasons
        self._known: dict[str, Known] = {}
        self._ending: dict[str, Known] = {}  # finished requests whose blocks are being saved
        self._sessions = Sessions[bytes]()
        self._work = Work()  # of the next step
        self._may_wait = True  # in this step
        self._memory: list[memoryview] = []  # of each layer
        self._loading: dict[str, tuple[Job, Future[list[bool]]]] = {}
        self._saving: dict[str, list[Future[list[bool]]]] = {}
        self._ended: set[str] = set()
        self._lost: set[int] = set()
        self._layout: Paged | None = None
        self._names = b""  # beginning of the names; empty if the connector can't be used
        self._connect(kv_cache_config, weights)

    @guarded(lambda: None)
    def _connect(self, kv_cache_config: Any, weights: str | None) -> None:
        self._layout = layout_of(self._vllm_config, kv_cache_config)
        if self.role is KVConnectorRole.SCHEDULER:
            self._name(weights or weights_of(self._vllm_config))
            if self._kv_transfer_config.kv_load_failure_policy == "fail":
                logger.warning('kvpage: a lost block ends its request: set kv_load_failure_policy to "recompute"')

    def _name(self, weights: str) -> None:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        assert self._layout
        layout, cache = self._layout, self._vllm_config.cache_config
        isa = _get_attn_isa(self._vllm_config.model_config.dtype, layout.tokens, layout.dim, cache.cache_dtype)
        identity = identity_of(
            self._vllm_config,
            weights,
            layout=f"{str(cache.kv_cache_layout).lower()}-{isa}",
            isa=isa,
            backend=f"CPU_ATTN {self._vllm_config.attention_config.backend}",
            dtype=layout.dtype.name.lower(),
            block_size=layout.tokens,
            layers=layout.layers,
            heads=layout.heads,
            dim=layout.dim,
        )
        self._names = identity.names("vllm")
        logger.info("kvpage: the names of blocks begin with %s", self._names.decode())

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a block that is not saved is a miss, and no reason to compute a request again."""
        return False

    # -- in the scheduler ----------------------------------------------------------------------------------------------

    @guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """Follow the hints that name blocks or a session."""
        self._known[request.request_id] = Known(request)
        for hint in hints_of(request.kv_transfer_params, request.kv_hints):
            self._protect(hint, hint.hashes or self._sessions.blocks(hint.session))

    def _protect(self, hint: Hint, hashes: Sequence[bytes]) -> None:
        if not hashes or not self._layout or not self._names:
            return
        names = partial(self._named, self._names, hashes)
        if hint.kind == RETAIN:
            self._jobs.lookup(names, len(hashes), self._layout.pages, lease_ms=hint.lease_ms)
        else:
            self._jobs.pin(names, len(hashes), pin=hint.kind == PIN)

    @guarded(lambda: None)
    def _end(self, request: Any, stored: int) -> None:
        """Follow the hints for the blocks of a request itself, of which the first ones are stored."""
        hashes, params = request.block_hashes[:stored], request.kv_transfer_params
        self._sessions.add(params, hashes)
        for hint in hints_of(params, request.kv_hints):
            if hint.is_own:
                self._protect(hint, hashes)

    @guarded(_no_tokens)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        known, layout = self._known[request.request_id], self._layout
        if not layout or not self._names or request.skip_reading_prefix_cache:
            return 0, False
        known.computed = num_computed_tokens
        count = min((request.num_tokens - 1) // layout.tokens, len(request.block_hashes))  # computes one token at least
        count = count if known.limit is None else min(count, known.limit)
        if count * layout.tokens <= num_computed_tokens:
            known.stored = num_computed_tokens // layout.tokens  # by the request that has computed them
            return 0, False
        if known.lookup is None or known.lookup.is_old:
            hashes = request.block_hashes[:count]
            known.lookup = self._jobs.lookup(partial(self._named, self._names, hashes), count, layout.pages)
        found = known.lookup.answer(_PATIENCE if self._may_wait else 0)
        self._may_wait = False
        if found is None:
            return None, False
        known.stored = found
        tokens = found * layout.tokens - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def _named(self, names: bytes, hashes: Sequence[bytes]) -> list[BlockName]:
        return [(names + one.hex().encode(), 0) for one in hashes]

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        known, layout = self._known[request.request_id], self._layout
        known.lookup = None
        if num_external_tokens > 0 and layout:
            first = known.computed // layout.tokens
            last = first + num_external_tokens // layout.tokens
            known.loading = list(blocks.get_block_ids()[0][:last])
            job = Job(request.request_id, request.block_hashes[first:last], known.loading[first:])
            self._work.loads.append(job)

    @guarded(Work)
    def build_connector_meta(self, scheduler_output: Any) -> Work:
        work, self._work, self._may_wait = self._work, Work(), True
        work.is_idle = not scheduler_output.total_num_scheduled_tokens
        work.preempted = set(scheduler_output.preempted_req_ids or ())
        work.names = self._names
        if work.names:
            self._plan_saves(scheduler_output, work)
        return work

    @guarded(lambda: None)
    def _plan_saves(self, scheduler_output: Any, work: Work) -> None:
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        computed = {one.req_id: one.num_computed_tokens for one in new}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for req_id, tokens in computed.items():
            known, layout = self._known.get(req_id), self._layout
            if known is None or layout is None:
                continue
            hashes = known.request.block_hashes  # of tokens that are certain
            full = min((tokens + scheduler_output.num_scheduled_tokens[req_id]) // layout.tokens, len(hashes))
            if full > known.stored:
                blocks = scheduler_output.kv_connector_block_state.get_block_ids(req_id)[0]
                work.saves.append(Job(req_id, hashes[known.stored : full], list(blocks[known.stored : full])))
                known.stored, known.has_saved = full, True

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        lost = connector_output.invalid_block_ids or ()
        for known in self._known.values() if lost else ():
            missing = [index for index, block in enumerate(known.loading) if block in lost]
            if missing:
                known.limit = known.stored = missing[0]  # it is computed and saved again
        for req_id in connector_output.finished_recving or ():
            if req_id in self._known:
                self._known[req_id].loading = []
        for req_id in connector_output.finished_sending or ():
            if ended := self._ending.pop(req_id, None):
                self._end(ended.request, ended.stored)

    @guarded(_not_delayed)
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        known = self._known.pop(request.request_id)
        has_saves = known.has_saved and not known.loading  # vLLM waits for the end of a load, before which saves ended
        if has_saves:
            self._work.ended.add(request.request_id)
            self._ending[request.request_id] = known
        else:
            self._end(request, known.stored)
        return has_saves, None

    def reset_cache(self) -> bool | None:
        """Give all blocks new names, because the weights may have changed. Return True."""
        self._name(uuid.uuid4().hex)
        return True

    # -- in a worker ---------------------------------------------------------------------------------------------------

    @guarded(lambda: None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._layout:
            self._memory = [self._bytes_of(kv_caches[name], self._layout) for name in self._layout.layers]
            self._tensors = kv_caches  # `_memory` is theirs

    def _bytes_of(self, cache: Any, layout: Paged) -> memoryview:
        """Return the memory of a layer's tensor, ``[blocks, heads, tokens, K and V]``. Raises ValueError if a head of a
        block is not in one piece.
        """
        shape, sizes = tuple(cache.shape[1:]), (layout.heads, layout.tokens, 2 * layout.dim)
        strides = (sizes[0] * sizes[1] * sizes[2], sizes[1] * sizes[2], sizes[2], 1)
        if cache.device.type != "cpu" or shape != sizes or tuple(cache.stride()) != strides:
            raise ValueError(f"a layer of the cache has shape {shape} and strides {cache.stride()}, not {strides}")
        nbytes = cache.shape[0] * strides[0] * layout.dtype.itemsize
        return memoryview((ctypes.c_ubyte * nbytes).from_address(cache.data_ptr())).cast("B")

    def _blocks(self, names: bytes, job: Job) -> Blocks:
        named = [(names + one.hex().encode(), 0) for one in job.hashes]
        nbytes = self._layout.block_nbytes if self._layout else 1
        return Blocks(len(named), nbytes, partial(self._pages, named, job.blocks))

    def _pages(self, names: Sequence[BlockName], blocks: Sequence[int], part: slice) -> BlockPages:
        layout = self._layout
        if not layout or not self._memory:
            raise ValueError("the paged cache has another layout than the scheduler assumes")
        size, bodies = layout.page_nbytes, list[memoryview]()
        for block in blocks[part]:
            sleep(0)  # lets the engine's thread run
            starts = range(block * layout.heads * 2 * size, (block + 1) * layout.heads * 2 * size, size)
            bodies += [memory[at : at + size] for memory in self._memory for at in starts]
        return BlockPages(names[part], pages_of(layout), bodies)

    @guarded(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        for req_id in kv_connector_metadata.preempted:
            self._jobs.abandon(self._saving.pop(req_id, []))

    @guarded(lambda: None)
    def start_load_kv(self, /, forward_context: Any, **kwargs: Any) -> None:
        work = self._work_of_step()
        for job in work.loads:
            self._loading[job.req_id] = job, self._jobs.load(self._blocks(work.names, job))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: `wait_for_save` saves all layers of a block."""

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        work = self._work_of_step()
        for job in work.saves:
            running = [future for future in self._saving.get(job.req_id, []) if not future.done()]
            self._saving[job.req_id] = [*running, self._jobs.save(self._blocks(work.names, job))]

    @guarded(_nothing_finished)
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        work = self._work_of_step()
        self._ended |= work.ended
        ending = [future for req_id in self._ended for future in self._saving.get(req_id, [])]
        if work.is_idle and (self._loading or ending):
            wait([*(future for _, future in self._loading.values()), *ending], _PATIENCE, FIRST_COMPLETED)
        sent = {req_id for req_id in self._ended if all(save.done() for save in self._saving.get(req_id, []))}
        self._ended -= sent
        for req_id in sent:
            self._saving.pop(req_id, None)
        received = {req_id for req_id, (_, future) in self._loading.items() if future.done()}
        for req_id in received:
            job, future = self._loading.pop(req_id)
            self._lost |= {block for block, arrived in zip(job.blocks, future.result(), strict=True) if not arrived}
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded since the last step."""
        lost, self._lost = self._lost, set()
        return lost

    def _work_of_step(self) -> Work:
        return cast(Work, self._get_connector_metadata())

    # -- in both -------------------------------------------------------------------------------------------------------

    @guarded(lambda: None)
    def shutdown(self) -> None:
        self._jobs.close(_SHUTDOWN)

    @guarded(_no_counts)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counts since the last step."""
        return Counts(self._jobs.take_counts())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return counts from another process."""
        return Counts(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> KVConnectorPromMetrics | None:
        """Return the Prometheus counters."""
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
