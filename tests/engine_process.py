"""An engine with its store, as a process: prompts come as lines of JSON on stdin, answers go as lines to stdout.

Run as ``python engine_process.py MODEL STORE_URL [COLD_DIRECTORY]``; MODEL is a directory, or ``tiny``. It is told:

    {"id": 1, "agent": "alice", "tokens": [...], "max_tokens": 8}   to be answered; each token is told, too
    {"flush": true}                                                 all that is dirty is written
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WITHIN = 60.0  # seconds, for anything that is asked of it


def main() -> None:
    """Answer until the input ends."""
    from engine_models import letter_tokenizer, tiny_llama

    # isort: split
    from engine import model as models
    from engine.agent_engine import AgentEngine
    from engine.batch_engine import BlockPoolBatchEngine
    from engine.pool import BlockPool
    from engine.spec import ModelCacheSpec
    from engine.tiers.cold import SafetensorsCacheAdapter
    from engine.tiers.pages import PageTier
    from engine.tiers.store import AgentCacheStore

    name, url, *directories = sys.argv[1:]
    model, tokenizer = (tiny_llama(), letter_tokenizer()) if name == "tiny" else models.load(name)
    if name == "tiny":
        tokenizer.eos_token_ids = []
    spec = ModelCacheSpec.probe(model, tokenizer)
    pool = BlockPool(256)
    pages = PageTier(url, spec, pool)
    cold = SafetensorsCacheAdapter(spec, pool, Path(directories[0])) if directories else None
    store = AgentCacheStore(spec, pool, pages=pages, cold=cold)
    engine = AgentEngine(BlockPoolBatchEngine(model, tokenizer, spec, pool), store)
    told: deque[dict[str, Any]] = deque()
    ended = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            told.append(json.loads(line))
            engine.wake()
        ended.set()
        engine.wake()

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    def submit(asked: dict[str, Any]) -> None:
        number = asked["id"]
        engine.submit(
            asked["agent"],
            asked["tokens"],
            max_tokens=asked["max_tokens"],
            on_token=lambda token: say(id=number, token=token.token),
            on_done=lambda answer: say(
                id=number,
                text=answer.text,
                tokens=answer.tokens,
                tier=answer.reuse.tier,
                reused=answer.reuse.tokens,
                why=answer.reuse.why,
                waited=answer.reuse.waited_seconds,
                not_kept=answer.not_kept,
            ),
            on_error=lambda error: say(id=number, error=repr(error)),
        )

    threading.Thread(target=listen, daemon=True).start()
    say(ready=True)
    while not ended.is_set():
        while told:
            asked = told.popleft()
            if "flush" in asked:
                store.flush_dirty()
                say(flushed=True)
            else:
                submit(asked)
        engine.step(timeout=1.0)
    engine.shutdown()
    store.close()
    pages.close()
    pool.check_empty()


@dataclass
class EngineProcess:
    """The other side of it."""

    process: subprocess.Popen[str]
    tokens: dict[int, list[int]] = field(default_factory=dict)  # told so far, by the prompt's number
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    _said: deque[dict[str, Any]] = field(default_factory=deque)
    _asked: int = 0

    def ask(self, agent_id: str, tokens: Sequence[int], max_tokens: int = 8) -> int:
        """Without waiting for the answer; its number."""
        self._asked += 1
        self.tokens[self._asked] = []
        self._tell(id=self._asked, agent=agent_id, tokens=list(tokens), max_tokens=max_tokens)
        return self._asked

    def answer(self, number: int) -> dict[str, Any]:
        """Waits for it."""
        while number not in self.answers:
            self._hear()
        answer = self.answers[number]
        assert "error" not in answer, answer
        return answer

    def complete(self, agent_id: str, tokens: Sequence[int], max_tokens: int = 8) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        return self.answer(self.ask(agent_id, tokens, max_tokens))

    def first_token(self, number: int) -> None:
        """Waits for it."""
        while not self.tokens[number]:
            self._hear()

    def flush(self) -> None:
        """Have all that is dirty written; waits."""
        self._tell(flush=True)
        while not self._said or "flushed" not in self._said[-1]:
            self._hear()

    def kill(self) -> None:
        """As a power failure would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WITHIN)

    def stop(self) -> None:
        """Let it write what it has, and end: well, with an empty pool."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(WITHIN) == 0

    def _tell(self, **what: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _hear(self) -> None:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the engine has ended with {self.process.wait(WITHIN)}"
        said = json.loads(line)
        self._said.append(said)
        if "token" in said:
            self.tokens[said["id"]].append(said["token"])
        elif "id" in said:
            self.answers[said["id"]] = said


@contextmanager
def start_engines(
    count: int, url: str, directory: Path | None = None, model: str = "tiny"
) -> Iterator[list[EngineProcess]]:
    """So many engines on one server; those that have not been stopped or killed are stopped, and must end well."""
    command = [sys.executable, __file__, model, url, *([str(directory)] if directory else [])]
    environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(count)]
    try:
        engines = [EngineProcess(process) for process in processes]
        for engine in engines:
            while not engine._said:
                engine._hear()
        yield engines
        for engine in engines:
            if engine.process.poll() is None:
                engine.stop()
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe and not pipe.closed:
                    pipe.close()


if __name__ == "__main__":
    main()
