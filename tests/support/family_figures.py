"""Comparison of the engine's answers with mlx-lm's for every family of mlx-lm: the second table of docs/engine.md.

`python tests/support/family_figures.py` measures all and writes the table; with names, it prints their rows.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from engine_bench import EngineBench
from engine_models import letter_tokenizer
from every_family import WINDOW, modules, random_model
from family_matrix import DOCUMENT, kept
from reference_answers import MlxLm, ReferenceAnswer, recorder
from servers import start_server

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from engine.memory.blocks import AgentBlocks
from engine.scheduling.model_runner import ModelWatch
from engine.scheduling.request import CompletedGeneration
from engine.spec import ModelCacheSpec
from engine.tiers.pages import PageTier

BEGIN, END = "<!-- every family: begin -->\n", "<!-- every family: end -->\n"
ROUNDING = 1e-4
BLOCK = 32
TOKENIZER = letter_tokenizer()
TOKENIZER.eos_token_ids = []
TOKENS = np.random.default_rng(5).integers(1, 96, 300).tolist()
PROMPTS = [TOKENS[: WINDOW + 6], TOKENS[50 : WINDOW + 55], TOKENS[120:125], TOKENS[130:164]]  # the last joins late
QUESTION = TOKENS[200:211]
ANSWERED = 4
HEAD = ["family", "its layers keep", "prompts run", "a short question", "mlx-lm's batch", "together", "restored"]


class NotBuilt(Exception):
    """Why there is no tiny model of a family here."""


@dataclass(frozen=True)
class Figures:
    """The furthest that a log-probability is from mlx-lm's own; None where there is nothing to measure."""

    keeps: str
    batches: bool
    resumes: bool
    refusal: str | None
    forced: float | None  # in mlx-lm's batch, whether or not the engine trusts it
    together: float  # as the engine runs it
    restored: float | None  # a question to a context that has been on a page server
    at_once: float | None  # the same in one pass, where the engine takes two

    @property
    def row(self) -> list[str]:
        passes = "one pass" if self.resumes else "two passes"
        if self.at_once is not None:
            passes += f" ({_shown(self.at_once)} in one)"
        runs = "in one batch" if self.batches else "in turns"
        restored = f"not kept: {self.refusal}" if self.refusal else _shown(self.restored)
        return [self.keeps, runs, passes, _shown(self.forced), _shown(self.together), restored]


def _shown(figure: float | None) -> str:
    if figure is None:
        return "none"
    if figure == float("inf"):
        return "fails"
    return f"{figure:.1f}" if figure >= 0.1 else f"{figure:.0e}" if figure else "0"


class Tiny:
    """A family's model and how it is asked."""

    def __init__(self, name: str) -> None:
        try:
            self.model = random_model(name)
            mx.eval(self.model(mx.array([TOKENS[:3]]), cache=self.empty()))
        except (Exception, SystemExit) as error:
            raise NotBuilt(_reason(error)) from error
        self.spec = ModelCacheSpec.probe(self.model, TOKENIZER, model_id=name, block_tokens=BLOCK)
        self.chunk = BLOCK if self.spec.has_state else 2048  # of prompts: they end at checkpoints

    def empty(self) -> list[Any]:
        return list(make_prompt_cache(self.model))


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "it ends the process when a library of its own is missing"
    return f"{error}".splitlines()[0]


class Bench(EngineBench):
    """An engine, and its answers."""

    def __init__(self, of: Tiny, spec: ModelCacheSpec) -> None:
        super().__init__(of, TOKENIZER, 64)
        self.batch = type(self.batch)(self.model, TOKENIZER, spec, self.pool)
        self.batch._watch = ModelWatch(of.model, spec)  # who looks on makes no other model
        self._seen: dict[int, list[Any]] = {}

    def submit(self, prompt: Sequence[int], known: AgentBlocks | None = None) -> int:
        seen: list[Any] = []
        uid = self.batch.submit("agent", prompt, known, max_tokens=ANSWERED, sampler=recorder(seen))
        self._seen[uid] = seen
        return uid

    def answer(self, done: CompletedGeneration) -> ReferenceAnswer:
        return ReferenceAnswer(list(done.tokens), np.array(self._seen[done.uid][: len(done.tokens)]))


def measure(name: str, url: str) -> Figures:
    of = Tiny(name)
    mergeable = bool(of.spec.layers) and all(hasattr(layer.KIND, "merge") for layer in of.spec.layers)
    alone = [MlxLm(of).answer(prompt, ANSWERED, of.chunk) for prompt in PROMPTS]
    together = _furthest(_together(of, of.spec), alone)
    forced = together if of.spec.batches else None
    if mergeable and not of.spec.batches:
        forced = _try(lambda: _furthest(_together(of, replace(of.spec, batches=True)), alone))
    restored = at_once = None
    if not of.spec.refusal:
        theirs = MlxLm(of)
        first = theirs.answer(PROMPTS[0], ANSWERED, of.chunk)
        second = theirs.answer(QUESTION, ANSWERED)
        received = [*PROMPTS[0], *first.tokens, *QUESTION]
        restored = _distance(_restored(of, of.spec, received, url), second)
        if of.spec.batches and not of.spec.resumes:
            at_once = _distance(_restored(of, replace(of.spec, resumes=True), received, url), second)
    keeps = kept(of.empty())
    return Figures(keeps, of.spec.batches, of.spec.resumes, of.spec.refusal, forced, together, restored, at_once)


def _together(of: Tiny, spec: ModelCacheSpec) -> list[ReferenceAnswer]:
    """All prompts, the last when another has said its first token."""
    bench = Bench(of, spec)
    asked = {bench.submit(prompt): i for i, prompt in enumerate(PROMPTS[:-1])}
    answers: dict[int, ReferenceAnswer] = {}
    while bench.batch.pending:
        for done in bench.batch.step_once():
            if done.error is not None:
                raise done.error
            answers[asked[done.uid]] = bench.answer(done)
            bench.free(done)
        if len(asked) < len(PROMPTS) and any(bench._seen.values()):
            asked[bench.submit(PROMPTS[-1])] = len(PROMPTS) - 1
    bench.pool.check_empty()
    return [answers[i] for i in range(len(PROMPTS))]


def _restored(of: Tiny, spec: ModelCacheSpec, received: Sequence[int], url: str) -> ReferenceAnswer:
    """Return the answer to a question after a turn that was stored and loaded again."""
    bench = Bench(of, spec)
    pages = PageTier(url, spec, bench.pool)
    try:
        bench.submit(PROMPTS[0])
        (first,) = bench.batch.step()
        assert first.not_kept is None, first.not_kept
        assert pages.save(first.blocks), pages.unsaved
        bench.free(first)
        known = pages.load("agent", received)
        assert known, pages.misses
        assert not pages.misses
        bench.submit(received, known)
        (second,) = bench.batch.step()
        assert second.tokens_reused == len(received) - len(QUESTION)
        bench.free(second)
        bench.pool.free(known.block_ids, "agent")
        pages.delete("agent")
        return bench.answer(second)
    finally:
        pages.close()


def _try(work: Callable[[], float]) -> float:
    try:
        return work()
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return float("inf")


def _furthest(ours: Sequence[ReferenceAnswer], theirs: Sequence[ReferenceAnswer]) -> float:
    return max(_distance(one, other) for one, other in zip(ours, theirs, strict=True))


def _distance(ours: ReferenceAnswer, theirs: ReferenceAnswer) -> float:
    """Return the largest difference up to the first token that differs."""
    same = 0
    while same < ANSWERED - 1 and ours.tokens[same] == theirs.tokens[same]:
        same += 1
    a, b = ours.logprobs[: same + 1], theirs.logprobs[: same + 1]
    with np.errstate(invalid="ignore"):
        distance = float(np.abs(np.where(a == b, 0, a - b)).max())
    return float("inf") if np.isnan(distance) else distance


@contextmanager
def store() -> Iterator[str]:
    with start_server() as server:
        yield server.url


def row(name: str, url: str) -> list[str]:
    try:
        return [f"`{name}`", *measure(name, url).row]
    except NotBuilt as error:
        return [f"`{name}`", f"not built: {error}", *[""] * (len(HEAD) - 2)]


def applies() -> bool:
    """Return whether the table was made with the installed mlx-lm, on a machine that has its requirements."""
    return platform.system() == "Linux" and f"{BEGIN}{_made_of()}" in DOCUMENT.read_text(encoding="utf-8")


def _made_of() -> str:
    return f"mlx-lm {version('mlx-lm')}:\n\n"


def documented() -> dict[str, list[str]]:
    lines = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[4:]]
    return {cells[0].strip("`"): [*cells, *[""] * (len(HEAD) - len(cells))] for cells in rows}


def write(rows: Sequence[Sequence[str]]) -> None:
    lines = [HEAD, ["---"] * 3 + ["---"] * (len(HEAD) - 3), *rows]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + _made_of() + table + END + rest.partition(END)[2], encoding="utf-8")


def main(names: Sequence[str]) -> None:
    with store() as url:
        rows = []
        for name in names or modules():
            rows.append(row(name, url))
            print(" | ".join(rows[-1]), flush=True)
    if not names:
        write(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
