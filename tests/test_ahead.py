"""Memory that is made before it is needed: what the system refuses is not counted, and is tried again."""

from __future__ import annotations

import mmap
import sys
import time

import pytest

from kvpage_server.store import ahead
from kvpage_server.store.ahead import Ahead

MB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is made ahead elsewhere")


def wait_for(made: Ahead, size: int) -> None:
    deadline = time.monotonic() + 10
    while size not in made._ready:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_was_made_is_taken_once() -> None:
    made = Ahead()
    made.want(MB)
    assert made.bytes == MB
    wait_for(made, MB)
    assert made.bytes == MB
    taken = made.take(MB)
    assert taken is not None
    assert len(taken) == MB
    assert (made.bytes, made.take(MB)) == (0, None)


def test_what_the_system_refused_is_not_counted_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        @staticmethod
        def mmap(descriptor: int, size: int) -> mmap.mmap:
            raise OSError(12, "Cannot allocate memory")

    made = Ahead()
    with monkeypatch.context() as patched:
        patched.setattr(ahead, "mmap", Refusing)
        made.want(MB)
        wait_for(made, MB)
        assert made.bytes == 0
        assert made.take(MB) is None
        made.want(MB)
        wait_for(made, MB)
    made.want(MB)  # nobody took the refusal
    deadline = time.monotonic() + 10
    while (taken := made.take(MB)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert len(taken) == MB
