"""Cost of KV events for the server: pages of 16 KiB are written, with and without events and a subscriber, in turns.

A block has the pages of SmolLM2-135M: 30 layers, 3 heads, K and V. In the worst case, each page is a block of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from statistics import median

from benchmarks.ports import free_port
from benchmarks.servers import pin_client, start_kvpage, unpin
from kvpage_server.client import Page, PageClient
from kvpage_server.page import DType, PageKey

BODY = bytes(16 * 1024)
SHAPES = {"blocks of 180 pages": (30, 3, 2), "blocks of one page": (1, 1, 1)}
BATCH = 180  # pages of a call

_SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.connect(sys.argv[1])
socket.subscribe(b"")
while True:
    socket.recv_multipart()
"""


@contextmanager
def _subscribed(address: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", _SUBSCRIBER, address])
    try:
        unpin(process.pid)
        yield
    finally:
        process.kill()
        process.wait()


def _write(url: str, shape: tuple[int, int, int], seconds: float) -> tuple[float, float]:
    """Write batches of pages, and return the gigabytes and the seconds."""
    layers, heads, planes = shape
    spots = [(layer, head, plane) for layer in range(layers) for head in range(heads) for plane in range(planes)]
    with PageClient(url) as client:
        written, begun = 0, time.perf_counter()
        for number in count():
            names = (b"vllm.bench.0123456789abcdef.%064x" % (number * BATCH + at // len(spots)) for at in range(BATCH))
            places = (spots[at % len(spots)] for at in range(BATCH))
            pages = [
                Page(PageKey(name, layer, head, 0, plane), BODY, DType.FLOAT16, 64, 128)
                for name, (layer, head, plane) in zip(names, places, strict=True)
            ]
            client.mset(pages)
            written += len(pages) * len(BODY)
            if (took := time.perf_counter() - begun) > seconds:
                return written / 1e9, took
    raise AssertionError("unreachable")


def _measure(shape: tuple[int, int, int], seconds: float, *, events: bool) -> tuple[float, float]:
    """Return GB/s, and the server's processor time of a GB in seconds."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with start_kvpage(*(["--kv-events", address] if events else [])) as server, _subscribed(address):
        before = server.cpu_seconds()
        gigabytes, took = _write(server.url, shape, seconds)
        return gigabytes / took, (server.cpu_seconds() - before) / gigabytes


def main(arguments: list[str] | None = None) -> None:
    """Print the medians of pairs of runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kv_events", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three short pairs")
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args(arguments)
    pairs, seconds = (3, 0.5) if args.quick else (args.pairs, 3.0)
    pin_client()
    for name, shape in SHAPES.items():
        runs = [[_measure(shape, seconds, events=events) for events in (False, True)] for _ in range(pairs)]
        speed = median(with_events[0] / without[0] for without, with_events in runs)
        cost = median(with_events[1] / without[1] for without, with_events in runs)
        found = {"GB/s without": round(median(without[0] for without, _ in runs), 3)}
        found |= {"GB/s with / without": round(speed, 4), "processor time with / without": round(cost, 4)}
        print(f"{name}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
