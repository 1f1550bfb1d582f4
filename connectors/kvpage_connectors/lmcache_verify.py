"""`kvpage connectors verify lmcache`: whether one process of LMCache loads the objects that another one stored."""

from __future__ import annotations

import platform
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvpage_connectors.verify import NOT_LEASED, WITHIN, Job, answer_job, body_of, verify_objects

MODULE = "kvpage_connectors.lmcache_verify"
OBJECTS, NBYTES = 64, 256 * 1024


def verify(url: str) -> list[str]:
    """Print the result of two processes, and return the failures."""
    return verify_objects(f"{OBJECTS} objects of {NBYTES // 1024} KiB", MODULE, url)


# -- in a process of its own -------------------------------------------------------------------------------------------


def run_lmcache(job: Job) -> Job:
    """Store, or look up and load and delete, the objects."""
    import lmcache
    from lmcache.v1.distributed.api import ObjectKey

    from kvpage_connectors.lmcache_l2 import KvpageL2Adapter

    adapter = KvpageL2Adapter({"url": job["url"], "lookup_seconds": WITHIN, "transfer_seconds": WITHIN})
    keys = [ObjectKey(at.to_bytes(32, "little"), job["model"], 0) for at in range(OBJECTS)]
    bodies = [body_of(at, NBYTES) for at in range(OBJECTS)]
    objects: list[Any] = [_Memory(bytearray(body) if job["step"] == "store" else bytearray(NBYTES)) for body in bodies]
    failures, seconds = list[str](), dict[str, float]()

    def timed(name: str, fd: int, task: int, query: Callable[[], Any]) -> Any:
        begun, poll = time.perf_counter(), select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(1000 * 2 * WITHIN)
        seconds[name] = time.perf_counter() - begun
        return query()

    if job["step"] == "store":
        task = adapter.submit_store_task(keys, objects)
        results = timed("store", adapter.get_store_event_fd(), task, adapter.pop_completed_store_tasks)
        if not results[task].is_successful():
            failures.append(f"objects were not stored: {adapter.report_status()}")
    else:
        task = adapter.submit_lookup_and_lock_task(keys, {})
        fd = adapter.get_lookup_and_lock_event_fd()
        found = timed("lookup", fd, task, lambda: adapter.query_lookup_and_lock_result(task))
        failures += _missing("found", found, adapter)
        load = adapter.submit_load_task(keys, objects)
        fd = adapter.get_load_event_fd()
        failures += _missing("loaded", timed("load", fd, load, lambda: adapter.query_load_result(load)), adapter)
        different = sum(bytes(one.byte_array) != body for one, body in zip(objects, bodies, strict=True))
        if different and not failures:
            failures.append(f"{different} of {OBJECTS} objects have other bytes")
        adapter.delete(keys)
    adapter.close()
    versions = f"LMCache {lmcache.__version__}, Python {platform.python_version()}"
    return {"versions": versions, "failures": failures, "seconds": seconds}


def _missing(what: str, bitmap: Any, adapter: Any) -> Sequence[str]:
    count = sum(bitmap.test(at) for at in range(OBJECTS))
    return (
        []
        if count == OBJECTS
        else [f"{count} of {OBJECTS} objects were {what}: {NOT_LEASED}; {adapter.report_status()}"]
    )


class _Memory:
    """Memory of an object, as LMCache's."""

    def __init__(self, memory: bytearray) -> None:
        self.byte_array = memoryview(memory)

    def get_size(self) -> int:
        """Return the number of bytes."""
        return len(self.byte_array)


if __name__ == "__main__":
    answer_job(run_lmcache)
