"""Stub of vLLM's scheduler, worker and model around the two instances of the connector."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
from kvpage_connectors.vllm_connector import KvpageConnector, Work
from kvpage_connectors.vllm_metrics import Counts
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from waiting import until

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 2, 3, 16, 8, 32
NAMES = [f"layers.{layer}" for layer in range(LAYERS)]


class FullAttentionSpec(SimpleNamespace):
    """Kind of the cache, which the connector knows by the name of the class."""


class Tensor:
    """Stub of a torch tensor."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.shape = array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def settings(url: str, **extra: Any) -> SimpleNamespace:
    options = {"url": url, "weights": "0123", "lookup_seconds": 30, "transfer_seconds": 30, **extra}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=options, kv_load_failure_policy="recompute"),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(rank=0, world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(
            kv_cache_layout="LBHNC", cache_dtype="auto", prefix_caching_hash_algo="sha256", hash_block_size=None
        ),
        model_config=SimpleNamespace(
            dtype="torch.float32", quantization=None, hf_config=SimpleNamespace(to_dict=lambda: {"_name_or_path": "x"})
        ),
        load_config=SimpleNamespace(load_format="auto"),
        attention_config=SimpleNamespace(backend=None),
    )


def groups() -> SimpleNamespace:
    spec = FullAttentionSpec(
        num_kv_heads=HEADS,
        block_size=TOKENS,
        head_size=DIM,
        dtype="torch.float32",
        page_size_bytes=HEADS * TOKENS * 2 * DIM * 4,
    )
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=NAMES, kv_cache_spec=spec)])


@dataclass
class Request:
    """A prompt, with the chain of hashes of its full blocks."""

    request_id: str
    tokens: list[int]
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: Any = None
    computed: int = 0  # tokens
    blocks: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        full = range(TOKENS, len(self.tokens) + 1, TOKENS)
        return [sha256(repr(self.tokens[:end]).encode()).digest() for end in full]


def prompt(name: str, length: int, start: int = 0) -> Request:
    return Request(name, list(range(start, start + length)))


@dataclass
class Engine:
    """Stub of vLLM: its calls in their order, a paged cache, and a model that computes bytes from hashes."""

    config: SimpleNamespace
    cache: list[np.ndarray[Any, Any]] = field(init=False)
    lost: set[int] = field(default_factory=set)  # blocks of the paged cache, as reported

    def __post_init__(self) -> None:
        shape = BLOCKS, HEADS, TOKENS, 2 * DIM
        self.cache = [np.zeros(shape, np.float32) for _ in NAMES]
        self.worker = KvpageConnector(self.config, KVConnectorRole.WORKER, groups())
        self.worker.register_kv_caches({name: Tensor(one) for name, one in zip(NAMES, self.cache, strict=True)})
        self.scheduler = KvpageConnector(self.config, KVConnectorRole.SCHEDULER, groups())
        self.free = list(range(BLOCKS))

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def step(
        self, *scheduled: tuple[Request, int], preempted: frozenset[str] = frozenset()
    ) -> tuple[set[str], set[str]]:
        """Run a step that computes some tokens of requests. Return the requests whose saves and loads have ended."""
        tables = {request.request_id: ([*request.blocks],) for request, _ in scheduled}
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=request.request_id, num_computed_tokens=request.computed)
                for request, _ in scheduled
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens={request.request_id: count for request, count in scheduled},
            total_num_scheduled_tokens=sum(count for _, count in scheduled),
            preempted_req_ids=preempted,
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
        )
        work = self.scheduler.build_connector_meta(output)
        assert isinstance(work, Work)
        self.worker.handle_preemptions(work)
        self.worker.bind_connector_metadata(work)
        for request, count in scheduled:
            self.compute(request, count)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        sent, received = self.worker.get_finished(set())
        lost = self.worker.get_block_ids_with_load_errors()
        self.lost |= lost
        self.worker.clear_connector_metadata()
        ended = SimpleNamespace(invalid_block_ids=lost, finished_recving=received, finished_sending=sent)
        self.scheduler.update_connector_output(ended)
        return sent or set(), received or set()

    def compute(self, request: Request, count: int) -> None:
        for index in range(request.computed // TOKENS, (request.computed + count) // TOKENS):
            for layer, cache in enumerate(self.cache):
                cache[request.blocks[index]] = values(request.block_hashes[index], layer)
        request.computed += count

    def matched(self, request: Request) -> tuple[int, bool]:
        """Ask until the connector knows how many tokens it can load."""
        end = time.monotonic() + 60
        while True:
            tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, request.computed)
            if tokens is not None:
                return tokens, is_async
            assert time.monotonic() < end
            self.step()

    def admit(self, request: Request, computed: int = 0) -> int:
        """Load the stored beginning of a prompt after the `computed` tokens. Return the number of loaded tokens."""
        self.scheduler.on_new_request(request)
        request.computed = computed
        while True:
            tokens, is_async = self.matched(request)
            assert is_async == (tokens > 0)
            if not request.blocks:
                request.blocks = [self.free.pop() for _ in range(-(-request.num_tokens // TOKENS))]
            table = SimpleNamespace(get_block_ids=lambda: ([*request.blocks],))
            self.scheduler.update_state_after_alloc(request, table, tokens)
            if not tokens:
                return request.computed - computed
            until(lambda: request.request_id in self.step()[1])
            loaded = [*range(request.computed // TOKENS, (request.computed + tokens) // TOKENS)]
            good = next((i for i in loaded if request.blocks[i] in self.lost), loaded[-1] + 1)
            self.lost.clear()
            request.computed = good * TOKENS
            if good:
                return request.computed - computed

    def finish(self, request: Request) -> None:
        """Compute the rest of a prompt, and free its blocks when its saves have ended."""
        self.step((request, request.num_tokens - request.computed))
        if self.scheduler.request_finished(request, request.blocks)[0]:
            until(lambda: request.request_id in self.step()[0])
        self.free += request.blocks

    def run(self, request: Request) -> int:
        loaded = self.admit(request)
        self.check(request)
        self.finish(request)
        return loaded

    def check(self, request: Request) -> None:
        """Check every byte of the computed blocks of a request."""
        for index in range(request.computed // TOKENS):
            for layer, cache in enumerate(self.cache):
                assert np.array_equal(cache[request.blocks[index]], values(request.block_hashes[index], layer))


def values(digest: bytes, layer: int) -> np.ndarray[Any, Any]:
    seed = int.from_bytes(digest[:8]) + layer
    return np.random.default_rng(seed).random((HEADS, TOKENS, 2 * DIM), np.float32)


@contextmanager
def engine_on(
    url: str, change: Callable[[SimpleNamespace], None] = lambda config: None, **extra: Any
) -> Iterator[Engine]:
    config = settings(url, **extra)
    change(config)
    engine = Engine(config)
    try:
        yield engine
    finally:
        engine.close()


def counts(engine: Engine) -> dict[str, int]:
    both = engine.scheduler.get_kv_connector_stats(), engine.worker.get_kv_connector_stats()
    assert isinstance(both[0], Counts)
    assert isinstance(both[1], Counts)
    return both[0].aggregate(both[1]).data
