"""The run queue after an error of one of its sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from kvpage_server.net.run_queue import RunQueue
from kvpage_server.resp import Reply


class Turn:
    """Somebody whose turn is this."""

    def __init__(self, take_turn: Callable[[], object]) -> None:
        self.take_turn = take_turn


def broken() -> None:
    raise RuntimeError("broken")


def broken_steps() -> Iterator[Reply]:
    yield ()
    broken()


@pytest.mark.parametrize(
    "first",
    [lambda line: line.join(Turn(broken)), lambda line: line.finish(broken_steps())],
    ids=["a turn", "the rest of a command"],
)
def test_a_failing_session_is_logged_and_delays_no_other(
    first: Callable[[RunQueue], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def turns() -> None:
        line = RunQueue(asyncio.get_running_loop())
        first(line)
        for _ in range(2):  # a session in the queue, and one that joins it later
            taken = asyncio.Event()
            line.join(Turn(taken.set))
            await asyncio.wait_for(taken.wait(), 20)

    asyncio.run(turns())
    assert "RuntimeError: broken" in caplog.text
