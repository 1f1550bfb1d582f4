"""`kvpage connectors verify lmcache`: whether one process of LMCache loads the objects that another one stored."""

from __future__ import annotations

import json
import platform
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

OBJECTS, NBYTES = 64, 256 * 1024
_WITHIN = 60.0  # seconds for a task
_RESULT = "kvpage-result "


def verify(url: str) -> list[str]:
    """Print the result of two processes, and return the failures."""
    model, seconds = f"verify-{uuid.uuid4().hex}", dict[str, float]()
    for step in ("store", "load"):
        result, error = _start({"url": url, "model": model, "step": step})
        if result is None:
            return [f"the process that should {step} failed:\n{error}"]
        if result["failures"]:
            return list(result["failures"])
        seconds |= result["seconds"]
        if step == "store":
            print(result["versions"])
    print(
        f"{OBJECTS} objects of {NBYTES // 1024} KiB: stored in {seconds['store']:.3f} s, found in "
        f"{seconds['lookup']:.3f} s, loaded in {seconds['load']:.3f} s by another process, bytes equal"
    )
    return []


def _start(job: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    """Run a process. Return its result, or the last lines of its output. A pipe carries the job: it has a password."""
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, encoding="utf-8", errors="replace")
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode or not lines:
        return None, "\n".join((done.stdout + done.stderr).splitlines()[-20:])
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(_RESULT))
    return result, ""


# -- in a process of its own -------------------------------------------------------------------------------------------


def run_lmcache(job: dict[str, str]) -> dict[str, Any]:
    """Store, or look up and load and delete, objects with bytes that follow from their number."""
    import lmcache
    from lmcache.v1.distributed.api import ObjectKey

    from kvpage_connectors.lmcache_l2 import KvpageL2Adapter

    adapter = KvpageL2Adapter({"url": job["url"], "lookup_seconds": _WITHIN, "transfer_seconds": _WITHIN})
    keys = [ObjectKey(at.to_bytes(32, "little"), job["model"], 0) for at in range(OBJECTS)]
    wanted = [bytes([at]) * NBYTES for at in range(OBJECTS)]
    objects: list[Any] = [_Memory(bytearray(body) if job["step"] == "store" else bytearray(NBYTES)) for body in wanted]
    failures, seconds = list[str](), dict[str, float]()

    def timed(name: str, fd: int, task: int, query: Callable[[], Any]) -> Any:
        begun, poll = time.perf_counter(), select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(1000 * 2 * _WITHIN)
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
        different = sum(bytes(one.byte_array) != body for one, body in zip(objects, wanted, strict=True))
        if different and not failures:
            failures.append(f"{different} of {OBJECTS} objects have other bytes")
        adapter.delete(keys)
    adapter.close()
    versions = f"LMCache {lmcache.__version__}, Python {platform.python_version()}"
    return {"versions": versions, "failures": failures, "seconds": seconds}


def _missing(what: str, bitmap: Any, adapter: Any) -> Sequence[str]:
    count = sum(bitmap.test(at) for at in range(OBJECTS))
    return [] if count == OBJECTS else [f"{count} of {OBJECTS} objects were {what}: {adapter.report_status()}"]


class _Memory:
    """Memory of an object, as LMCache's."""

    def __init__(self, memory: bytearray) -> None:
        self.byte_array = memoryview(memory)

    def get_size(self) -> int:
        """Return the number of bytes."""
        return len(self.byte_array)


def main() -> None:
    """Run the job on standard input, and print the result."""
    print(_RESULT + json.dumps(run_lmcache(json.load(sys.stdin))), flush=True)


if __name__ == "__main__":
    main()
