"""L2 adapter of LMCache: objects of its KV cache on a kvpage-server, without a copy. Tried with LMCache 0.5.6.

LMCache's server loads this module, see docs/lmcache.md, and with it the serde of `lmcache_serde`. An object is one
page of bytes, whose name is LMCache's key and whose checksum is compared after each load. A lookup leases the found
objects. Nothing ends a lease early, so an unlock does nothing, and the objects of a process that died are protected no
longer than the lease.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from threading import Lock
from typing import Any
from urllib.parse import quote, unquote

import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import EncodedObjectKey, KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvpage_connectors import lmcache_serde
from kvpage_connectors.jobs import Blocks, Jobs
from kvpage_connectors.reasons import guarded, reason_of
from kvpage_server.client import BlockName
from kvpage_server.client.page import BlockPages, PageLayout
from kvpage_server.client.raw_commands import RawCommand, integer, scanned
from kvpage_server.page import MAX_REQ_ID, DType

logger = init_logger("lmcache.kvpage")

TRIED = ("0.5.6",)  # versions of LMCache
if lmcache.__version__ not in TRIED:
    raise ImportError(f"kvpage_connectors.lmcache_l2 needs LMCache {', '.join(TRIED)}, found {lmcache.__version__}")
lmcache_serde.register()

_BEGIN = "lmcache."
_GIB = 1024**3
_CLOSE = 5.0  # seconds for stores in progress
_SAVING = 2  # threads that share a store; the others are free for loads
_STORE, _LOOKUP, _LOAD = "store", "lookup", "load"
_REMEMBERED = 1_000_000  # objects whose sizes an adapter knows, with 140 bytes of memory each
_Part = tuple[Sequence[int], Future[list[bool]]]  # positions of keys in a task, and whether their job did each of them


def name_of(key: ObjectKey) -> bytes:
    """Return the request id of an object: its key in words, or a digest of it if these are too long."""
    model, salt = quote(key.model_name), quote(key.cache_salt)
    words = f"{model}@{key.kv_rank:x}@{key.object_group_id:x}@{key.chunk_hash.hex()}@{salt}"
    name = f"{_BEGIN}{words}".encode()
    return name if len(name) <= MAX_REQ_ID else f"{_BEGIN}{hashlib.sha256(name).hexdigest()}".encode()


def key_named(name: bytes) -> EncodedObjectKey | None:
    """Return the key with this request id, None for a digest or the name of another program's value."""
    match name.decode(errors="replace").removeprefix(_BEGIN).split("@"):
        case [model, rank, group, chunk, salt]:
            try:
                return EncodedObjectKey(chunk, unquote(model), int(rank, 16), int(group, 16), unquote(salt))
            except ValueError:
                return None
    return None


def _bitmap(found: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(found))
    bitmap.batched_set([at for at, is_found in enumerate(found) if is_found])
    return bitmap


class _Sizes:
    """Bytes of the objects that an adapter stored last, _REMEMBERED at most, for LMCache's count of used bytes. The
    store knows the sizes of older ones; an older one that is stored again counts twice. Threads can share it.
    """

    def __init__(self) -> None:
        # By the hash of the key, which takes a tenth of the key's memory; the object that was stored last is the last.
        self._bytes: OrderedDict[int, int] = OrderedDict()
        self._has_forgotten = False
        self._lock = Lock()

    def add(self, key: ObjectKey, size: int) -> int:
        """Note a stored object. Return by how many bytes it is larger than the one it replaced, if that is known."""
        with self._lock:
            before = self._bytes.pop(hash(key), 0)
            self._bytes[hash(key)] = size
            if len(self._bytes) > _REMEMBERED:
                self._bytes.popitem(last=False)
                self._has_forgotten = True
        return size - before

    def pop(self, key: ObjectKey, deleted: int) -> int | None:
        """Forget a deleted object, of which the store has deleted so many bytes. Return its size, or None if this
        adapter has not stored it.
        """
        with self._lock:
            return self._bytes.pop(hash(key), deleted if deleted and self._has_forgotten else None)


class KvpageL2Adapter(L2AdapterInterface):
    """Adapter for ``"type": "plugin"``. Methods have LMCache's documentation, and raise no exceptions."""

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """Connect to the store.

        `config` has `url`, `max_capacity_gb`, which is 0 unless LMCache's own eviction is wanted, and options of Jobs
        and PageClient. Raises ValueError or TypeError for an invalid one.
        """
        options = dict(config)
        capacity = options.pop("max_capacity_gb", 0)
        super().__init__(max_capacity_bytes=int(capacity * _GIB))
        self._jobs = Jobs(options.pop("url", ""), logger, **options)
        self.reasons = self._jobs.reasons
        self._notifiers = {kind: create_event_notifier() for kind in (_STORE, _LOOKUP, _LOAD)}
        self._results: dict[str, dict[int, Any]] = {kind: {} for kind in self._notifiers}
        self._tasks = count()
        self._lock = Lock()
        self._sizes = _Sizes()
        self._is_closed = False

    def get_store_event_fd(self) -> int:
        return self._notifiers[_STORE].fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._notifiers[_LOOKUP].fileno()

    def get_load_event_fd(self) -> int:
        return self._notifiers[_LOAD].fileno()

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        start = partial(_started, partial(self._jobs.save, threads=_SAVING), keys, objects)
        return self._begin(_STORE, len(keys), start, partial(self._stored, keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            results, self._results[_STORE] = self._results[_STORE], {}
        return results

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        def chains() -> Iterator[_Part]:
            """Yield the keys of each rank and group: one command looks up a chain."""
            found: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
            for at, key in enumerate(keys):
                found[key.model_name, key.cache_salt, key.kv_rank, key.object_group_id].append(at)
            for some in found.values():
                yield some, self._jobs.lock(partial(_named, [keys[at] for at in some]), len(some))

        return self._begin(_LOOKUP, len(keys), chains, _bitmap)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        with self._lock:
            return self._results[_LOOKUP].pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: leases end by themselves."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        def loaded(moved: Sequence[bool]) -> Any:
            self._report(self._notify_keys_accessed, [key for key, ok in zip(keys, moved, strict=True) if ok])
            return _bitmap(moved)

        return self._begin(_LOAD, len(keys), partial(_started, self._jobs.load, keys, objects), loaded)

    def query_load_result(self, task_id: int) -> Any:
        with self._lock:
            return self._results[_LOAD].pop(task_id, None)

    def _begin(
        self, kind: str, length: int, start: Callable[[], Iterable[_Part]], end: Callable[[Sequence[bool]], Any]
    ) -> int:
        """Begin a task of `length` keys. `start` starts its jobs, each for some keys. When all of them have ended,
        `end` makes the task's result. An exception of `start` is a miss of the keys without a job.
        """
        task, done, parts = next(self._tasks), [False] * length, list[_Part]()
        try:
            parts.extend(start())
        except Exception as error:  # noqa: BLE001 - a miss, whatever the reason
            self.reasons.count(kind, reason_of(error), length - sum(len(some) for some, _ in parts), repr(error))
        running = len(parts)

        def ended(some: Sequence[int], future: Future[list[bool]]) -> None:
            nonlocal running
            for at, is_done in zip(some, future.result(), strict=True):
                done[at] = is_done
            with self._lock:
                running -= 1
                is_last = running == 0
            if is_last:
                finish()

        def finish() -> None:
            result = end(done)
            with self._lock:
                self._results[kind][task] = result
                if not self._is_closed:
                    self._notifiers[kind].notify()

        for some, future in parts:
            future.add_done_callback(partial(ended, some))
        if not parts:
            finish()
        return task

    def _stored(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj], moved: Sequence[bool]) -> L2StoreResult:
        """Report stored objects to LMCache; one that was stored before counts no bytes again."""
        good = [at for at, is_moved in enumerate(moved) if is_moved]
        sizes = [self._sizes.add(keys[at], objects[at].get_size()) for at in good]
        self._report(self._notify_keys_stored, [keys[at] for at in good], sizes)
        return L2StoreResult(all(moved), sum(objects[at].get_size() for at in good))

    @guarded(lambda: None)
    def _report(self, notify: Callable[..., None], *what: Any) -> None:
        """Call the listeners of LMCache. If one raises, the task ends all the same."""
        notify(*what)

    # -- deletion, listing, state --------------------------------------------------------------------------------------

    @guarded(lambda: None)
    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, and report those whose server has answered."""
        every = [*dict.fromkeys(keys)]
        commands = []
        for name in map(name_of, every):
            commands.append(RawCommand([b"KVPAGEINDEX", name, b"TOTAL"], _size))
            commands.append(RawCommand([b"KVPAGEDEL", name], integer))
        answers = self._jobs.ask("delete", lambda: commands, len(every), gone=None).result()
        gone, sizes = list[ObjectKey](), list[int]()
        for key, deleted, answer in zip(every, answers[::2], answers[1::2], strict=False):
            if answer is not None and (size := self._sizes.pop(key, deleted)) is not None:
                gone.append(key)
                sizes.append(size)
        self._report(self._notify_keys_deleted, gone, sizes)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Return some of the stored objects. A page may have more or fewer entries than `page_size`.

        Raises ValueError for an invalid argument, RuntimeError if the store does not answer.
        """
        if page_size <= 0 or not (cursor is None or cursor.isdigit()):
            raise ValueError(f"page_size must be positive and cursor a number, got {page_size} and {cursor!r}")
        pattern = f"kv:{_BEGIN}{quote(model_name) + '@' if model_name is not None else ''}*:0:0:0:0"
        scan = RawCommand([b"SCAN", cursor or "0", b"MATCH", pattern, b"COUNT", page_size], scanned)
        following, keys = self._answers([scan])[0]
        known = [(name, key) for name in (key.split(b":")[1] for key in keys) if (key := key_named(name))]
        sizes = (
            self._answers([RawCommand([b"KVPAGEINDEX", name, b"TOTAL"], _size) for name, _ in known]) if known else []
        )
        entries = tuple(KeyEntry(key=key, size_bytes=size) for (_, key), size in zip(known, sizes, strict=True) if size)
        return KeyListPage(entries=entries, next_page_token=following.decode() if following != b"0" else None)

    def _answers(self, commands: Sequence[RawCommand]) -> list[Any]:
        answers = self._jobs.ask("list", lambda: commands, len(commands)).result()
        if not answers:
            raise RuntimeError("the kvpage-server did not answer; the log has the reason")
        return answers

    def report_status(self) -> dict[str, Any]:
        missed = {f"{job}/{reason}": n for (job, reason), n in dict(self.reasons.counts).items()}
        return {"is_healthy": not self._is_closed, "type": "kvpage", **dict(self._jobs.moved), **missed}

    def close(self) -> None:
        """Wait for stores, end the other tasks as misses, and close the connections."""
        self._jobs.close(_CLOSE)
        with self._lock:
            self._is_closed = True
            for notifier in self._notifiers.values():
                notifier.close()


def _named(keys: Sequence[ObjectKey]) -> list[BlockName]:
    return [(name_of(key), 0) for key in keys]


def _started(
    move: Callable[[Blocks], Future[list[bool]]], keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]
) -> Iterator[_Part]:
    """Start to store or load objects. Those of one size are a job. Raises ValueError for keys without objects."""
    sizes: dict[int, list[int]] = defaultdict(list)
    for at, (_, one) in enumerate(zip(keys, objects, strict=True)):
        sizes[one.get_size()].append(at)
    for size, some in sizes.items():
        pages = partial(_pages, [keys[at] for at in some], [objects[at] for at in some])
        yield some, move(Blocks(len(some), max(size, 1), pages))


def _pages(keys: Sequence[ObjectKey], objects: Sequence[MemoryObj], part: slice) -> BlockPages:
    memory = [one.byte_array for one in objects[part]]
    return BlockPages(_named(keys[part]), PageLayout([(0, 0, 0, DType.UINT8, 1, len(memory[0]))]), memory)


def _size(value: Any) -> int:
    """Return the bytes in KVPAGEINDEX's reply, 0 for an object that was removed."""
    if not value:
        return 0
    fields = value[0] if isinstance(value[0], dict) else dict(zip(value[0][::2], value[0][1::2], strict=True))
    return int(fields[b"bytes"])
