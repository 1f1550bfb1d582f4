"""examples/router.py with two engines: conversations stay where their contexts are, and have the same text."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from api_engines import start_engine, write_tiny
from documents import ROOT
from forked import begin
from servers import free_port
from waiting import until

Chat = list[dict[str, str]]
CHATS, TURNS = 4, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("router") / "tiny", max_position_embeddings=8192)


@contextmanager
def routed(model: Path, directory: Path) -> Iterator[str]:
    """Two engines, and the router before them."""
    with ExitStack() as stack:
        places = list[str]()
        for _ in range(2):
            events, replay = free_port(), free_port()
            options = ["--kv-events", f"tcp://127.0.0.1:{events}", "--kv-events-replay", f"tcp://127.0.0.1:{replay}"]
            engine = stack.enter_context(start_engine(model, *options))
            places.append(f"127.0.0.1:{engine.port}:{events}:{replay}")
        port = free_port()
        log = stack.enter_context((directory / "router.log").open("wb"))
        command = [sys.executable, str(ROOT / "examples" / "router.py"), str(model), str(port), *places]
        router = begin(command, log)
        try:
            until(lambda: _listens(port, router))
            yield f"http://127.0.0.1:{port}"
        finally:
            router.terminate()
            router.wait()


def _listens(port: int, router: Any) -> bool:
    assert router.poll() is None, "the router has ended"
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def ask(url: str, chat: Chat, **options: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": chat, "temperature": 0, "max_tokens": 12, **options}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply


def text_of(reply: httpx.Response) -> str:
    return str(reply.json()["choices"][0]["message"]["content"])


def ask_first(url: str, chat: Chat) -> httpx.Response:
    """Ask, and wait until the router knows the blocks of the chat, whose events arrive after the reply."""
    before = count_blocks(url)
    reply = ask(url, chat)
    until(lambda: count_blocks(url) > before)
    return reply


def count_blocks(url: str) -> int:
    """Return how many blocks the router knows."""
    return sum(engine["blocks"] for engine in httpx.get(f"{url}/engines").json().values())


def new_chats() -> list[Chat]:
    return [[{"role": "system", "content": f"Number {number}. " + "Be brief. " * 20}] for number in range(CHATS)]


def test_turns_reach_the_engine_that_has_the_context(model: Path, tmp_path: Path) -> None:
    """In each turn, the conversations have another order, so that a router without events would mix them."""
    chats, last = new_chats(), [""] * CHATS
    right, reused = 0, 0
    with routed(model, tmp_path) as url:
        for turn in range(TURNS):
            for number in random.Random(turn).sample(range(CHATS), CHATS):
                chat = chats[number]
                chat.append({"role": "user", "content": f"Question {turn}?"})
                reply = ask(url, chat) if turn else ask_first(url, chat)
                chat.append({"role": "assistant", "content": text_of(reply)})
                if turn:
                    right += reply.headers["x-engine"] == last[number]
                    reused += reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 150
                last[number] = reply.headers["x-engine"]
    later = CHATS * (TURNS - 1)
    assert right == later, f"{right} of {later} turns reached the engine with their context"
    assert reused >= 0.9 * later
    assert len(set(last)) == 2, "new conversations are shared equally"
    with start_engine(model) as alone:
        for chat in chats:
            texts = [text_of(ask(alone.url, chat[:end])) for end in range(2, len(chat), 2)]
            assert texts == [message["content"] for message in chat if message["role"] == "assistant"]


def test_streams_pass_the_router(model: Path, tmp_path: Path) -> None:
    with routed(model, tmp_path) as url:
        text = ask(url, [{"role": "user", "content": "Go"}], stream=True).text
        assert text.startswith("data: ")
        assert text.rstrip().endswith("data: [DONE]")


_FOLLOWER = """
import runpy, sys
from itertools import chain, repeat

_, program, events, replay, *waits = sys.argv
Engine = runpy.run_path(program)["Engine"]
patience = chain(map(int, waits), repeat(int(waits[-1])))
Engine.patience = property(lambda _: next(patience))
engine = Engine("127.0.0.1", "0", events, replay)
for _ in sys.stdin:
    print(engine.next, flush=True)
"""


@contextmanager
def following(events: int, replay: int, *waits: int) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of the next batch which the router expects of an engine.

    The router's threads end with the process. `waits` has the milliseconds of each wait, the last one of all
    later ones.
    """
    command = [
        sys.executable,
        "-c",
        _FOLLOWER,
        str(ROOT / "examples" / "router.py"),
        *map(str, (events, replay, *waits)),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout

        def next_batch() -> int:
            process.stdin.write(b"\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        try:
            yield next_batch
        finally:
            process.kill()


def test_late_replies_do_not_hide_newer_batches() -> None:
    """A replay is answered too late. The reply to the next one counts."""
    with zmq.Context.instance().socket(zmq.XPUB) as events, zmq.Context.instance().socket(zmq.ROUTER) as replay:
        ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (events, replay)]
        replay.setsockopt(zmq.RCVTIMEO, 60_000)
        with following(*ports, 1_000, 60_000) as next_batch:
            late = replay.recv_multipart()[0]
            assert events.recv() == b"\x01"  # the subscription
            batches = [[number.to_bytes(8, "big"), msgspec.msgpack.encode([number + 1.0, [], 0])] for number in (0, 5)]
            events.send_multipart([b"kvpage", *batches[1]])
            asked = replay.recv_multipart()[0]
            for identity, batch in zip((late, asked), batches, strict=True):
                for frames in ([b"kvpage", *batch], [b"", (-1).to_bytes(8, "big", signed=True), b""]):
                    replay.send_multipart([identity, b"", *frames])
            until(lambda: next_batch() == 6)


def test_lost_batches_are_noticed_without_a_later_one() -> None:
    """No batch is published. The router asks for the batches after its last one if none arrives for a while."""
    batches = [(number.to_bytes(8, "big"), msgspec.msgpack.encode([number + 1.0, [], 0])) for number in range(3)]
    with zmq.Context.instance().socket(zmq.ROUTER) as replay:
        port = replay.bind_to_random_port("tcp://127.0.0.1")
        with following(free_port(), port, 10) as next_batch:

            def follows(kept: list[tuple[bytes, bytes]]) -> bool:
                while replay.poll(0):
                    identity, _, first = replay.recv_multipart()
                    for frames in (*kept[int.from_bytes(first, "big") :], ((-1).to_bytes(8, "big", signed=True), b"")):
                        replay.send_multipart([identity, b"", b"", *frames])
                return next_batch() == len(kept)

            until(lambda: follows(batches[:1]))
            until(lambda: follows(batches))
            until(lambda: follows(batches[:1]))  # the engine was restarted
