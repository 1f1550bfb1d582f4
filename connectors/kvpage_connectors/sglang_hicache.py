"""A storage backend for SGLang's HiCache: pages of the KV cache on a kvpage-server.

SGLang copies pages between GPU and the memory of its host pools. This backend moves them between these pools and the
server, without a copy. SGLang calls it in threads of its own, which wait for the server. Tried with SGLang 0.5.23.

A page of SGLang is a block on the server. A pool says which pieces of memory a page has; each piece is a page of the
server, opaque bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.version import __version__

from kvpage_connectors.jobs import Blocks, Jobs
from kvpage_connectors.names import DTYPES, Identity, weights_digest
from kvpage_connectors.reasons import Away, guarded
from kvpage_server.client import BlockName
from kvpage_server.client.page import BlockPages, PageLayout, StateName
from kvpage_server.client.raw_commands import RawCommand, ok, text
from kvpage_server.page import MAX_KV_TYPE, DType

logger = logging.getLogger("sglang.kvpage")

_TRIED = "0.5."  # versions of SGLang
_SHUTDOWN = 4.0  # seconds for transfers in progress
_SAVING = 2  # threads that share a save; the others are free for loads
_FRESH = 1.0  # seconds after which a process reads again when the pages were cleared
_OPTIONS = (  # of `extra_config`; the others are those of SGLang
    "url", "username", "password", "threads", "lookup_seconds", "transfer_seconds", "lease_ms",
)  # fmt: skip

_Job = Future[list[bool]]
_Move = Callable[..., _Job]  # Jobs.load or Jobs.save


def _no_hits() -> int:
    return 0


def _nothing() -> Any:
    return None


class _Indices(list[int]):
    """Indices of tokens in a host pool, as a pool takes them."""

    def tolist(self) -> list[int]:
        return self


@dataclass(frozen=True, slots=True)
class _Pool:
    """A host pool: its memory, and the names of its pages."""

    host: Any
    sizes: tuple[int, ...]  # bytes of the pieces of a page
    tokens: int  # of a page
    names: bytes  # beginning of the names
    dtype: DType

    def blocks(self, mark: bytes, keys: Sequence[str], indices: Any) -> Blocks:
        """Return the pages at every `tokens`-th index. Raises ValueError for another number, or other sizes."""
        if len(indices) != len(keys) * self.tokens:
            raise ValueError(f"{len(keys)} pages of {self.tokens} tokens have {len(indices)} indices")
        pointers, sizes = self.host.get_page_buffer_meta(indices)
        if [*sizes] != [*self.sizes] * len(keys) or len(pointers) != len(sizes):
            raise ValueError(f"the pieces of a page must have {self.sizes} bytes, as when the pool was registered")
        pages = partial(_pages, self.named(mark, keys), pointers, self.sizes, self.dtype, self.tokens)
        return Blocks(len(keys), sum(self.sizes), pages)

    def named(self, mark: bytes, keys: Sequence[str]) -> list[BlockName]:
        begin = self.names + mark
        return [(begin + key.encode(), 0) for key in keys]


def _pages(
    names: Sequence[BlockName], starts: Sequence[int], sizes: tuple[int, ...], dtype: DType, tokens: int, part: slice
) -> BlockPages:
    """Return the pages of some of the blocks, whose pieces have these sizes and `starts`, their addresses."""
    layout, kinds = _layout(sizes, dtype, tokens)
    here = starts[part.start * len(sizes) : part.stop * len(sizes)]
    return BlockPages(names[part], layout, [kind.from_address(at) for kind, at in zip(cycle(kinds), here)])


@lru_cache(64)
def _layout(sizes: tuple[int, ...], dtype: DType, tokens: int) -> tuple[PageLayout, list[Any]]:
    """Return the pages of a block whose pieces have these sizes, and the type of the memory of each piece."""
    planes, row = _planes(sizes), tokens * dtype.itemsize
    shapes = [(DType.UINT8, 1, size) if size % row else (dtype, tokens, size // row) for size in sizes]
    layout = PageLayout([(i // planes, 0, i % planes, *shape) for i, shape in enumerate(shapes)])
    return layout, [ctypes.c_ubyte * size for size in sizes]


def _planes(sizes: Sequence[int]) -> int:
    """Return the number of planes of a block: K and V, unless its pieces differ, as those of states do."""
    if len(sizes) % 2 == 0 and len(set(sizes)) == 1:
        return 2
    return len(sizes) if len(sizes) <= MAX_KV_TYPE + 1 else 1


class _Cleared:
    """The mark in the names of a model's pages: when they were last cleared, empty if they never were.

    It is a value of the store, which all ranks and engines with the model read once in _FRESH seconds. So the store
    evicts it after the pages only, which are used less often.
    """

    def __init__(self, jobs: Jobs, weights: str) -> None:
        self._jobs = jobs
        self._key = b"kv:sglang.cleared." + hashlib.sha256(weights.encode()).hexdigest()[:16].encode()
        self._mark: bytes | None = None  # until the store has answered
        self._fresh_until = 0.0

    def mark(self, end: float) -> bytes:
        """Return the mark, or the last known one if the store does not answer until `end`. Raises Away if it has never
        answered: the pages without a mark may have been cleared.
        """
        if time.monotonic() >= self._fresh_until:
            command = RawCommand([b"GET", self._key], text)
            answer = self._jobs.ask("clear", lambda: [command], 0, end=end).result()
            if answer:
                self._mark = answer[0] + b"-" if answer[0] else b""
                self._fresh_until = time.monotonic() + _FRESH
        if self._mark is None:
            raise Away("the store has not said when the pages were cleared")
        return self._mark

    def clear(self) -> None:
        """Set a new mark."""
        milliseconds = time.time_ns() // 1_000_000
        command = RawCommand([b"SET", self._key, b"%x" % milliseconds], ok)
        self._jobs.ask("clear", lambda: [command], 1).result()
        self._fresh_until = 0.0


class KvpageHiCache(HiCacheStorage):
    """Backend for ``--hicache-storage-backend dynamic``. Methods have SGLang's documentation; exceptions in them are
    counted misses.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        """Connect. ``extra_config`` has ``url``, options of Jobs, and a name of the ``weights``.

        Raises ValueError for an invalid option, RuntimeError for a version of SGLang that was not tried.
        """
        if not __version__.startswith(_TRIED):
            raise RuntimeError(f"this backend was tried with SGLang {_TRIED}x, not with {__version__}")
        self._config = storage_config
        extra = storage_config.extra_config or {}
        options = {name: extra[name] for name in _OPTIONS if name in extra}
        self._weights: str | None = extra.get("weights")
        self._has_pieces = bool(extra.get("interface_v1"))
        self._jobs = Jobs(options.pop("url", ""), logger, **options)
        self.reasons = self._jobs.reasons
        self._pools: dict[str, _Pool] = {}
        self._cleared: _Cleared | None = None  # known with the weights

    # -- pools ---------------------------------------------------------------------------------------------------------

    @guarded(_nothing)
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._add(str(PoolName.KV), mem_pool_host)

    @guarded(_nothing)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(str(host_pool_name), host_pool)

    def _add(self, name: str, host: Any) -> None:
        tokens = int(getattr(host, "logical_page_size", 0) or host.page_size)
        if self._has_pieces or name != str(PoolName.KV):
            sizes = tuple(map(int, host.get_page_buffer_meta(_Indices(range(tokens)))[1]))
        else:
            sizes = (0,)  # a flat page, of a size that SGLang gives with it
        identity = self._identity(name, host, sizes, tokens)
        config = self._config
        rank = config.dcp_rank if self._is_replicated(name, host) else config.tp_rank
        ranks = f"{rank}-{config.pp_rank}-{config.attn_cp_rank}."
        names, dtype = identity.names("sglang") + ranks.encode(), DTYPES.get(str(host.dtype), DType.UINT8)
        self._pools[name] = _Pool(host, sizes, tokens, names, dtype)
        logger.info("kvpage: the names of pages of %s begin with %s", name, self._pools[name].names.decode())

    def _is_replicated(self, name: str, host: Any) -> bool:
        """Return whether all tensor-parallel ranks have the same pages, which one of them writes: those of models with
        MLA, except for states and for heads of a draft model, which are divided among the ranks.
        """
        has_heads = any("MHA" in kind.__name__ for kind in type(host).__mro__)
        return bool(self._config.is_mla_model) and name != str(PoolName.MAMBA) and not has_heads

    def _identity(self, name: str, host: Any, sizes: Sequence[int], tokens: int) -> Identity:
        """Return the identity of a pool. Raises OSError or ValueError if the weights can't be read."""
        config, tag = self._config, getattr(host, "storage_format_tag", None)  # SGLang appends the tag to the name
        model = Path((config.model_name or "").removesuffix(f"-{tag}"))
        if self._weights is None:
            if not (config.model_name and model.is_dir()):
                raise ValueError(
                    f'{config.model_name} is no folder: set "weights" to a name of the model and its revision'
                )
            self._weights = weights_digest(model)
        self._cleared = self._cleared or _Cleared(self._jobs, self._weights)
        settings = model / "config.json"
        return Identity(
            weights=self._weights,
            dtype=str(host.dtype),
            block_size=tokens,
            layout=f"{name}-{host.layout}{'' if self._has_pieces else '-flat'}",
            isa=platform.machine(),
            backend=f"{type(host).__name__} of SGLang {__version__}",
            tp=1 if self._is_replicated(name, host) and config.dcp_size == 1 else config.tp_size,
            pp=config.pp_size,
            hash="sha256",
            model={
                "pieces": list(sizes),
                "format": tag,
                "config": hashlib.sha256(settings.read_bytes()).hexdigest() if settings.is_file() else "",
                "context parallel": config.attn_cp_size,
                "decode context parallel": config.dcp_size,
            },
        )

    def _mark(self, end: float) -> bytes:
        """Return the mark in the names. Raises ValueError if no pool has names."""
        if self._cleared is None:
            raise ValueError("no pool is registered, or none has an identity")
        return self._cleared.mark(end)

    def _pool(self, name: object = PoolName.KV) -> _Pool:
        """Raises ValueError for a pool without names."""
        found = self._pools.get(str(name))
        if found is None:
            raise ValueError(f"the pool {name} is not registered, or has no identity")
        return found

    # -- lookups -------------------------------------------------------------------------------------------------------

    @guarded(_no_hits)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        end = time.monotonic() + self._jobs.lookup_seconds
        return self._prefix(self._pool(), self._mark(end), keys, end)

    @guarded(lambda: False)
    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _prefix(self, pool: _Pool, mark: bytes, keys: Sequence[str], end: float, lease_ms: int | None = None) -> int:
        """Return the number of stored pages from the first one on. They are leased, unless `lease_ms` is 0."""
        lookup = self._jobs.lookup(
            lambda: pool.named(mark, keys), len(keys), len(pool.sizes), lease_ms=lease_ms, end=end
        )
        while (count := lookup.answer(1.0)) is None:
            pass
        return count

    @guarded(PoolTransferResult.empty)
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        end = time.monotonic() + self._jobs.lookup_seconds
        mark = self._mark(end)
        whole, states = [self._pool()], list[StateName]()
        longest = self._prefix(whole[0], mark, keys, end, lease_ms=0 if pool_transfers else None)
        hits = {str(PoolName.KV): longest}
        for transfer in pool_transfers or []:
            pool = self._pool(transfer.name)
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                whole.append(pool)
                hits[str(transfer.name)] = longest = self._prefix(pool, mark, keys[:longest], end, lease_ms=0)
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                states += _trailing(pool, mark, keys, max(1, len(transfer.keys or ())))
            else:
                raise ValueError(f"the pool {transfer.name} has an unknown policy, {transfer.hit_policy}")
        lengths = [*range(1, longest + 1)]
        if states := [state for state in states if state[2] <= longest]:
            pool = whole.pop(0)
            lengths = self._jobs.lengths(pool.named(mark, keys[:longest]), states, len(pool.sizes), end)
        # Lease exactly the pages of the longest length, as `lengths` has. Without other pools, they are leased already.
        for pool in whole if pool_transfers else ():
            leased = self._prefix(pool, mark, keys[: lengths[-1]], end) if lengths else 0
            lengths = [length for length in lengths if length <= leased]
        found = lengths[-1] if lengths else 0
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                hits[str(transfer.name)] = found
        return PoolTransferResult(found, {name: count for name, count in hits.items() if count}, lengths)

    # -- transfers: all jobs of a call begin before it waits, and have one deadline ------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._moved([(PoolName.KV, keys, host_indices)], self._jobs.load)[0]

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._moved([(PoolName.KV, keys, host_indices)], partial(self._jobs.save, threads=_SAVING))[0]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._moved_v2(transfers, self._jobs.load)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._moved_v2(transfers, partial(self._jobs.save, threads=_SAVING))

    def _moved_v2(self, transfers: list[PoolTransfer], move: _Move) -> dict[str, list[bool]]:
        pages = [(one.name, one.keys or [], one.host_indices) for one in transfers]
        moved = self._moved(pages, move)
        return {one.name: some for one, some in zip(transfers, moved, strict=True)}

    def _moved(self, pages: Sequence[tuple[object, list[str], Any]], move: _Move) -> list[list[bool]]:
        """Load or save pages, given by pool, keys and indices, and wait for the end. Return for each whether it was
        moved.
        """
        end = time.monotonic() + self._jobs.transfer_seconds
        begun = [self._begun(*one, move, end, one is pages[-1]) for one in pages]
        return [job.result() if job else [False] * len(keys) for job, (_, keys, _) in zip(begun, pages, strict=True)]

    @guarded(_nothing)
    def _begun(self, name: object, keys: list[str], indices: Any, move: _Move, end: float, here: bool) -> _Job | None:
        return move(self._pool(name).blocks(self._mark(end), keys, indices), end, here=here)

    # -- flat pages, without "interface_v1": SGLang copies them to and from its pool -----------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        moved = self._moved_flat(keys, target_locations, self._jobs.load) or [False] * len(keys)
        return [target if is_moved else None for target, is_moved in zip(target_locations or keys, moved, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        moved = self._moved_flat(keys, values, partial(self._jobs.save, threads=_SAVING))
        return len(moved) == len(keys) and all(moved)

    @guarded(lambda: list[bool]())
    def _moved_flat(self, keys: list[str], tensors: Any, move: _Move) -> list[bool]:
        pool = self._pool()
        starts, sizes = [one.data_ptr() for one in tensors], {one.numel() * one.element_size() for one in tensors}
        are_contiguous = len(sizes) == 1 and all(tensor.is_contiguous() for tensor in tensors)
        if self._has_pieces or not are_contiguous or len(starts) != len(keys):
            raise ValueError("flat pages are contiguous tensors of one size on the CPU, without interface_v1")
        end = time.monotonic() + self._jobs.transfer_seconds
        pages = partial(_pages, pool.named(self._mark(end), keys), starts, (*sizes,), DType.UINT8, 1)
        return move(Blocks(len(keys), max(sizes), pages), end, here=True).result()

    # -- the end -------------------------------------------------------------------------------------------------------

    @guarded(_nothing)
    def clear(self) -> None:
        """Give the pages of this model new names, in all ranks and engines on the store. Old pages are evicted."""
        if self._cleared is None:
            raise ValueError("no pool is registered, or none has an identity")
        self._cleared.clear()

    @guarded(_nothing)
    def close(self) -> None:
        """Wait for transfers in progress, and close the connections."""
        self._jobs.close(_SHUTDOWN)


def _trailing(pool: _Pool, mark: bytes, keys: Sequence[str], count: int) -> list[StateName]:
    """Return the states that each length needs: the last `count` pages before it."""
    names = pool.named(mark, keys)
    return [(*names[i], length) for length in range(1, len(keys) + 1) for i in range(max(0, length - count), length)]
