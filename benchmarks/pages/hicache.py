"""SGLang's HiCache backend compared with PageClient: batches of 128 pages, each with a piece of keys and one of values.

The backend's classes of SGLang are the stubs of the tests, where SGLang is not installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.findings import Finding
from benchmarks.pages.client_costs import Way, compared
from benchmarks.pages.rounds import Plan
from benchmarks.servers import Server, start_kvpage
from kvpage_server.bench import PageWork, spell
from kvpage_server.client import Page, PageClient
from kvpage_server.page import DType, PageKey

_PAGES = 128  # of a call of SGLang, at most
_TOKENS = 64  # of a page
_PIECES = (32 * 1024, 256 * 1024)  # bytes: a layer of keys of Llama 3 8B on four ranks, and all layers of a small model
_GENERATIONS = 4
_AT_LEAST = 0.9  # of PageClient's rate
_STUB = Path(__file__).parents[2] / "tests/connectors/stub"


class _Pool:
    """A host pool: the memory of all batches, one after the other, to write from or to read into."""

    layout, dtype, page_size = "page_first", "torch.uint8", _TOKENS

    def __init__(self, batches: list[Any]) -> None:
        self._addresses = [piece.ctypes.data for batch in batches for piece in batch]
        self._size = batches[0][0].nbytes

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Return addresses and sizes of the pieces of pages."""
        pages = [at // _TOKENS for at in indices.tolist()[::_TOKENS]]
        addresses = [address for page in pages for address in self._addresses[2 * page : 2 * page + 2]]
        return addresses, [self._size] * len(addresses)


class _Indices(list[int]):
    """Indices of tokens, as a tensor."""

    def tolist(self) -> list[int]:
        """Return the indices."""
        return self


def hicache_findings(plan: Plan) -> Iterator[Finding]:
    """Yield GB/s and the client's CPU time of batches that are written and read. Raises AssertionError for wrong
    bytes.
    """
    sys.path[1:1] = [str(_STUB.parents[2] / "connectors")]
    if importlib.util.find_spec("sglang") is None:
        sys.path.append(str(_STUB))
    with start_kvpage() as server:
        for nbytes in _PIECES[:1] if plan.quick else _PIECES:
            print(f"HiCache, {_PAGES} pages of two pieces of {spell(nbytes)} ...", flush=True)
            yield from _of_size(server, nbytes, plan)
            server.admin.flushall()


def _of_size(server: Server, nbytes: int, plan: Plan) -> Iterator[Finding]:
    work = PageWork(2 * _PAGES, nbytes, _GENERATIONS)
    sources = _backend(server, _Pool([batch.written for batch in work.batches]))
    targets = _backend(server, _Pool([batch.read for batch in work.batches]))
    hashes = [[f"{generation}{i:063x}" for i in range(_PAGES)] for generation in range(_GENERATIONS)]
    places = [list(batch.read) for batch in work.batches]
    # PageClient moves the same pages. It gets their keys and memory ready-made.
    keys = [
        [PageKey(name, 0, 0, page, plane) for name, page in sources._pool().named(b"", some) for plane in (0, 1)]
        for some in hashes
    ]
    pages = [
        [
            Page(key, body, DType.UINT8, _TOKENS, nbytes // _TOKENS)
            for key, body in zip(some, batch.written, strict=True)
        ]
        for some, batch in zip(keys, work.batches, strict=True)
    ]

    def indices(generation: int) -> _Indices:
        return _Indices(range(generation * _PAGES * _TOKENS, (generation + 1) * _PAGES * _TOKENS))

    def checked(move: Callable[[int], list[bool]]) -> Way:
        def right(generation: int, moved: list[bool]) -> bool:
            work.batches[generation].check()
            return all(moved)

        return move, right

    with PageClient(server.url) as client:
        ways: dict[str, tuple[Way, Way]] = {
            "write": (
                (lambda g: sources.batch_set_v1(hashes[g], indices(g)), lambda _, moved: all(moved)),
                (lambda g: client.mset(pages[g]), lambda _, answer: answer is None),
            ),
            "read": (
                checked(lambda g: targets.batch_get_v1(hashes[g], indices(g))),
                checked(lambda g: client.mget_into(keys[g], places[g])),
            ),
        }
        for op, (ours, theirs) in ways.items():
            names = f"HiCache, {op} {_PAGES} pages of two pieces of {spell(nbytes)}", "PageClient"
            yield from compared(names, (ours, theirs), work, server, rounds=plan.sets * plan.rounds, at_least=_AT_LEAST)
    for backend in (sources, targets):
        backend.close()


def _backend(server: Server, pool: _Pool) -> Any:
    from kvpage_connectors.sglang_hicache import KvpageHiCache
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    flags = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
    extra = {"interface_v1": 1, "url": server.url, "weights": "benchmark", "lookup_seconds": 60, "transfer_seconds": 60}
    backend = KvpageHiCache(HiCacheStorageConfig(**ranks, **flags, model_name="", extra_config=extra), {})
    backend.register_mem_pool_host(pool)
    return backend
