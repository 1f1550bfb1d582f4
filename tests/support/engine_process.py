"""An engine with its store, as a process: prompts arrive as lines of JSON on stdin, answers are lines on stdout.

Run as ``python -m engine_process MODEL STORE_URL [COLD_DIRECTORY]``; MODEL is a directory, ``tiny`` or ``adapted``; a
load takes RESTORE_WITHIN seconds at most, from the environment. Input lines:

    {"id": 1, "agent": "alice", "tokens": [...], "max_tokens": 8}   a prompt; each token is printed, too; an agent
                                                                    "anon-..." has no name
    {"flush": true}                                                 all dirty contexts are written
    {"adapter": 1}                                                  running prompts are answered, then the model changes
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_models import adapt, adapted_llama, letter_tokenizer, tiny_llama
from forked import Process, converse

# isort: split
from engine import model as models
from engine.agent_engine import AgentEngine
from engine.batch_engine import BlockPoolBatchEngine
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier
from engine.tiers.store import AgentCacheStore, CacheConfig

WITHIN = 60.0  # seconds, for anything that is asked of it


def main() -> None:
    """Answer until the input ends."""
    name, url, *directories = sys.argv[1:]
    within = float(os.environ.get("RESTORE_WITHIN", 10))
    made = {"tiny": tiny_llama, "adapted": adapted_llama}.get(name)
    model, tokenizer = (made(), letter_tokenizer()) if made else models.load(name)
    if made:
        tokenizer.eos_token_ids = []
    received: deque[dict[str, Any]] = deque()
    ended = threading.Event()

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    class Life:
        """The engine, from one switch of the adapter to the next."""

        def __init__(self) -> None:
            spec = ModelCacheSpec.probe(model, tokenizer)
            self.pool = BlockPool(256)
            self.pages = PageTier(url, spec, self.pool, restore_within=within)
            cold = SafetensorsCacheAdapter(spec, self.pool, Path(directories[0])) if directories else None
            config = CacheConfig(keep="all", restore_within=within)
            self.store = AgentCacheStore(spec, self.pool, pages=self.pages, cold=cold, config=config)
            self.engine = AgentEngine(BlockPoolBatchEngine(model, tokenizer, spec, self.pool), self.store)

        def submit(self, asked: dict[str, Any]) -> None:
            number = asked["id"]
            self.engine.submit(
                asked["agent"],
                asked["tokens"],
                max_tokens=asked["max_tokens"],
                keep=not asked["agent"].startswith("anon-"),
                on_token=lambda token: say(id=number, token=token.token),
                on_done=lambda answer: say(
                    id=number,
                    text=answer.text,
                    tokens=answer.tokens,
                    tier=answer.reuse.tier,
                    reused=answer.reuse.tokens,
                    why=answer.reuse.why,
                    restored=answer.reuse.restore_seconds,
                    waited=answer.reuse.waited_seconds,
                    not_kept=answer.not_kept,
                ),
                on_error=lambda error: say(id=number, error=repr(error)),
            )

        def end(self) -> None:
            self.engine.drain()
            self.close()

        def close(self) -> None:
            self.engine.shutdown()
            self.store.close()
            self.pages.close()
            self.pool.check_empty()

    life = Life()

    def listen() -> None:
        for line in sys.stdin:
            received.append(json.loads(line))
            life.engine.wake()
        ended.set()
        life.engine.wake()

    threading.Thread(target=listen, daemon=True).start()
    say(ready=True)
    while not ended.is_set():
        while received:
            asked = received.popleft()
            if "flush" in asked:
                life.store.flush_dirty()
                say(flushed=True)
            elif "adapter" in asked:
                life.end()
                adapt(model, asked["adapter"])
                life = Life()
                say(adapted=True)
            else:
                life.submit(asked)
        life.engine.step(timeout=1.0)
    life.close()


@dataclass
class EngineProcess:
    """The other side of it."""

    process: Process
    tokens: dict[int, list[int]] = field(default_factory=dict)  # received so far, by the prompt's number
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    _messages: deque[dict[str, Any]] = field(default_factory=deque)
    _asked: int = 0

    def ask(self, agent_id: str, tokens: Sequence[int], max_tokens: int = 8) -> int:
        """Without waiting for the answer; its number."""
        self._asked += 1
        self.tokens[self._asked] = []
        self._notify(id=self._asked, agent=agent_id, tokens=list(tokens), max_tokens=max_tokens)
        return self._asked

    def answer(self, number: int) -> dict[str, Any]:
        while number not in self.answers:
            self._hear()
        answer = self.answers[number]
        assert "error" not in answer, answer
        return answer

    def complete(self, agent_id: str, tokens: Sequence[int], max_tokens: int = 8) -> dict[str, Any]:
        return self.answer(self.ask(agent_id, tokens, max_tokens))

    def first_token(self, number: int) -> None:
        while not self.tokens[number]:
            self._hear()

    def flush(self) -> None:
        """Have all that is dirty written; waits."""
        self._have_done("flushed", flush=True)

    def adapt(self, adapter: int) -> None:
        """Have the model switched to another adapter; waits."""
        self._have_done("adapted", adapter=adapter)

    def wait_until_ready(self) -> None:
        """It takes prompts then."""
        while not self._messages:
            self._hear()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe and not pipe.closed:
                with suppress(BrokenPipeError):
                    pipe.close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WITHIN)

    def stop(self) -> None:
        """Let it write its contexts, and end: with exit code 0 and an empty pool."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(WITHIN) == 0

    def _have_done(self, done: str, **what: Any) -> None:
        self._notify(**what)
        while not self._messages or done not in self._messages[-1]:
            self._hear()
        self._messages.clear()

    def _notify(self, **what: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _hear(self) -> None:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the engine has ended with {self.process.wait(WITHIN)}"
        message = json.loads(line)
        self._messages.append(message)
        if "token" in message:
            self.tokens[message["id"]].append(message["token"])
        elif "id" in message:
            self.answers[message["id"]] = message


@contextmanager
def start_engines(
    count: int, url: str, directory: Path | None = None, model: str = "tiny"
) -> Iterator[list[EngineProcess]]:
    """Start `count` engines on one server; the running ones are stopped at the end, and must exit with 0."""
    engines: list[EngineProcess] = []
    try:
        engines += [start_process(url, directory, model) for _ in range(count)]
        for engine in engines:
            engine.wait_until_ready()
        yield engines
        for engine in engines:
            if engine.process.poll() is None:
                engine.stop()
    finally:
        for engine in engines:
            engine.close()


def start_process(
    url: str, directory: Path | None = None, model: str = "tiny", errors: int = 2, **environment: str
) -> EngineProcess:
    """Start an engine, without waiting for it. `errors` is a file descriptor for its standard error."""
    command = [sys.executable, "-m", "engine_process", model, url, *([str(directory)] if directory else [])]
    return EngineProcess(converse(command, errors, **environment))


if __name__ == "__main__":
    main()
