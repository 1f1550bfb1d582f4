"""A subscriber of KV events, with pyzmq, as routers have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

Event = dict[str, Any]
LAST = (1 << 64) - 1
WITHIN = 60_000  # milliseconds


class Subscriber:
    """Sockets for the events of a publisher on this machine, and for batches again. `next` is the next number."""

    def __init__(self, events: int, replay: int) -> None:
        self.next = 0
        self._context = zmq.Context()
        self._live, self._again = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        for socket, port in ((self._live, events), (self._again, replay)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, WITHIN)
            socket.connect(f"tcp://127.0.0.1:{port}")
        self._live.subscribe(b"kvpage")

    def close(self) -> None:
        self._context.destroy(linger=0)

    def replay(self, start: int) -> Iterator[tuple[int, list[Event]]]:
        """The batches from number `start` on."""
        self._again.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            empty, topic, number, payload = self._again.recv_multipart()
            assert empty == b""
            assert topic == (b"kvpage" if payload else b"")
            if not payload:
                assert int.from_bytes(number, "big") == LAST
                return
            yield int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1]

    def live(self) -> tuple[int, list[Event]]:
        """The next batch that is published."""
        topic, number, payload = self._live.recv_multipart()
        seconds, events, rank = msgspec.msgpack.decode(payload)
        assert topic == b"kvpage"
        assert seconds > 1.7e9
        assert rank == 0
        return int.from_bytes(number, "big"), events

    def until(self, is_enough: Callable[[list[Event]], bool]) -> list[Event]:
        """All events so far, once they are enough. Missed batches are asked for again."""
        found: list[Event] = []

        def add(number: int, events: list[Event]) -> None:
            if number >= self.next:
                assert number == self.next, "a batch is missing"
                found.extend(events)
                self.next = number + 1

        for batch in self.replay(self.next):
            add(*batch)
        while not is_enough(found):
            number, events = self.live()
            if number > self.next:
                for batch in self.replay(self.next):
                    add(*batch)
            add(number, events)
        return found


@contextmanager
def subscribed(events: int, replay: int) -> Iterator[Subscriber]:
    subscriber = Subscriber(events, replay)
    try:
        yield subscriber
    finally:
        subscriber.close()


def hashes(events: list[Event]) -> set[Any]:
    """The blocks that are stored after some events."""
    found: set[Any] = set()
    for event in events:
        if event["type"] == "AllBlocksCleared":
            found.clear()
        elif event["type"] == "BlockStored":
            found |= set(event["block_hashes"])
        else:
            found -= set(event["block_hashes"])
    return found
