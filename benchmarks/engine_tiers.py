"""What it is worth to be remembered: the first token of an agent that comes back, from each tier, beside full prefill.

All on the real small model, in one run. The contexts that come back are compared token by token with what was said
when nothing was known. Loading is also compared with reading safetensors from the system's page cache, plain and as
mlx-lm does it, and saving with the time of the generation that is saved.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import engine  # noqa: F401 - picks the BLAS before MLX is imported

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from benchmarks.findings import RESULTS, Finding, show, write
from benchmarks.readme import rewrite_tiers
from benchmarks.servers import start_kvpage
from engine import kvcache, model
from engine.agent_engine import AgentEngine, Answer
from engine.batch_engine import BlockPoolBatchEngine
from engine.blocks import AgentBlocks
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier
from engine.tiers.store import AgentCacheStore

SMOLLM2 = Path(__file__).parent.parent / "models" / "smollm2"
SOONER = {256: 6.0, 1024: 30.0, 2048: 50.0, 4000: 80.0}  # times, from the page server, by tokens
FILE, MLX_LM = 1.3, 1.0  # times as long as these, at most
SAVING = 0.05  # of a generation's wall time, at most
ROUNDS, QUICK_ROUNDS = 7, 1
MOST_PREFILLED = 3 * 1024  # tokens, in all prefills of one context
QUESTION = " And what else does the keeper have to know?"  # what comes back is asked
ANSWER = 4  # tokens, which are compared
SAVED, QUICK_SAVED = (512, 64), (256, 16)  # tokens of a prompt and of its answer, when saving is measured
POOL_BLOCKS = 64
INTRO = (
    "SmolLM2-135M in float32; time to first token, from the prompt's arrival on, of an agent that comes back with its "
    "context and a question; medians, of up to 1,024 tokens' full prefill too, of more it is one"
)

Tokens = list[int]


@dataclass(frozen=True)
class Machine:
    """The model, and what goes with it."""

    model: Any
    tokenizer: Any
    spec: ModelCacheSpec

    def batch(self, pool: BlockPool) -> BlockPoolBatchEngine:
        """A batch engine with that pool."""
        return BlockPoolBatchEngine(self.model, self.tokenizer, self.spec, pool)


@dataclass(frozen=True)
class Remembered:
    """A context, what computing it took, and the prompt its agent comes back with."""

    context: AgentBlocks
    prefill: float  # seconds to the first token
    prompt: Tokens
    said: Tokens  # to that prompt, by an engine that has the context in its hands

    @property
    def agent_id(self) -> str:
        """Whose."""
        return self.context.agent_id

    @property
    def nbytes(self) -> int:
        """Of its blocks."""
        return sum(block.nbytes for block in self.context.blocks)


@dataclass(frozen=True)
class Tier:
    """An engine with one tier, and how to bring it to the state in which an agent comes back."""

    name: str
    engine: AgentEngine
    store: AgentCacheStore
    forget: Callable[[], object]  # what is in memory


def compute(machine: Machine, batch: BlockPoolBatchEngine, tokens: Tokens) -> Remembered:
    """Full prefill, several times where it is short; the context is the caller's to free."""
    agent_id = f"agent-{len(tokens)}"
    taken = []
    for again in reversed(range(max(1, MOST_PREFILLED // len(tokens)))):
        batch.submit(agent_id, tokens, max_tokens=1)
        (first,) = batch.step()
        taken.append(first.time_to_first_token)
        if again:
            batch.pool.free(first.blocks.block_ids)
    prompt = [*first.blocks.tokens, *machine.tokenizer.encode(QUESTION)]
    batch.submit(agent_id, prompt, first.blocks, max_tokens=ANSWER)
    (second,) = batch.step()
    batch.pool.free(second.blocks.block_ids)
    return Remembered(first.blocks, median(taken), prompt, list(second.tokens))


@contextmanager
def tiers(machine: Machine, remembered: Sequence[Remembered], directory: Path) -> Iterator[dict[str, Tier]]:
    """Engines of their own, to each of which the contexts are known in another tier."""
    with ExitStack() as stack:
        url = stack.enter_context(start_kvpage()).url
        found = {}
        for name in ("hot", "page server", "cold file"):
            pool = BlockPool(4 * POOL_BLOCKS)
            store = AgentCacheStore(
                machine.spec,
                pool,
                pages=PageTier(url, machine.spec, pool) if name == "page server" else None,
                cold=SafetensorsCacheAdapter(machine.spec, pool, directory) if name == "cold file" else None,
            )
            stack.callback(store.close)
            for one in remembered:
                ids = pool.allocate(len(one.context.blocks), one.agent_id, one.nbytes)
                store.save(_moved(one.context, ids))
                pool.free(ids, one.agent_id)
            store.flush_dirty()
            engine = AgentEngine(machine.batch(pool), store)
            found[name] = Tier(name, engine, store, (lambda: None) if name == "hot" else _forgetter(store, pool))
        yield found


def _moved(context: AgentBlocks, ids: Sequence[int]) -> AgentBlocks:
    """The same context under the ids of another pool."""
    blocks = [type(block)(i, block.tokens, block.layers) for i, block in zip(ids, context.blocks, strict=True)]
    return AgentBlocks(context.agent_id, context.tokens, tuple(blocks), context.fingerprint)


def _forgetter(store: AgentCacheStore, pool: BlockPool) -> Callable[[], object]:
    def forget() -> None:
        if not store.make_room(pool.total_blocks):
            raise AssertionError(f"{pool.used_blocks} blocks have stayed in memory")

    return forget


def come_back(tier: Tier, one: Remembered) -> float:
    """Seconds to the first token. Raises AssertionError when nothing was reused, or something else is said."""
    tier.forget()
    answers: list[Answer] = []
    errors: list[Exception] = []
    tier.engine.submit(
        one.agent_id, one.prompt, max_tokens=ANSWER, keep=False, on_done=answers.append, on_error=errors.append
    )
    while tier.engine.step(timeout=1.0):
        pass
    if errors:
        raise errors[0]
    (answer,) = answers
    if answer.reuse.tokens < len(one.context):
        raise AssertionError(f"{tier.name}: {answer.reuse.tokens} of {len(one.context)} tokens came back")
    if list(answer.tokens) != one.said:
        raise AssertionError(f"{tier.name}: said {answer.tokens}, with the context at hand {one.said}")
    return answer.reuse.time_to_first_token


def first_tokens(remembered: Sequence[Remembered], found: dict[str, Tier], rounds: int) -> Iterator[Finding]:
    """From each tier, beside full prefill."""
    for one in remembered:
        for tier in found.values():
            print(f"{len(one.context) - 1:,} tokens from {tier.name} ...", flush=True)
            taken = [come_back(tier, one) for _ in range(rounds + 1)][1:]
            tokens = len(one.context) - 1
            yield Finding(
                f"{tokens:,} tokens from {tier.name}",
                "full prefill",
                "times sooner",
                f"{median(taken):.3f} s / {one.prefill:.2f} s",
                one.prefill / median(taken),
                at_least=SOONER.get(tokens) if tier.name == "page server" else None,
            )


def loads(machine: Machine, one: Remembered, url: str, directory: Path, rounds: int) -> Iterator[Finding]:
    """A context from the page server, all in memory and evaluated, beside files that the system has in memory."""
    pool = BlockPool(POOL_BLOCKS)
    pages = PageTier(url, machine.spec, pool)
    pages.save(one.context)
    plain, theirs = str(directory / "plain.safetensors"), str(directory / "mlx-lm.safetensors")
    cache = kvcache.reconstruct(machine.spec, one.context.blocks, len(one.context))
    mx.eval([layer.state for layer in cache])
    mx.save_safetensors(
        plain, {f"{n}.{i}": getattr(layer, n) for i, layer in enumerate(cache) for n in ("keys", "values")}
    )
    save_prompt_cache(theirs, cache)
    del cache

    def from_server() -> AgentBlocks:
        found = pages.load(one.agent_id)
        assert found
        mx.eval([block.layers for block in found.blocks])
        return found

    def to_cache() -> object:
        found = from_server()
        made = kvcache.reconstruct(machine.spec, found.blocks, len(found))
        mx.eval([layer.state for layer in made])
        return found

    def from_file() -> object:
        arrays = mx.load(plain)
        mx.eval(arrays)
        return arrays

    def by_mlx_lm() -> object:
        made = load_prompt_cache(theirs)
        mx.eval([layer.state for layer in made])
        return made

    ways: dict[str, Callable[[], object]] = {
        "blocks": from_server,
        "a safetensors file": from_file,
        "a cache": to_cache,
        "mlx-lm's load_prompt_cache": by_mlx_lm,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    print(f"{len(one.context) - 1:,} tokens beside files ...", flush=True)
    for turn in range(-1, rounds):
        for name, load in ways.items():
            started = time.perf_counter()
            found = load()
            seconds = time.perf_counter() - started
            if isinstance(found, AgentBlocks):
                _check(found, one.context)
                pool.free(found.block_ids, one.agent_id)
            del found
            if turn >= 0:
                taken[name].append(seconds)
    pages.close()
    for ours, file, at_most in (
        ("blocks", "a safetensors file", FILE),
        ("a cache", "mlx-lm's load_prompt_cache", MLX_LM),
    ):
        yield Finding(
            f"{len(one.context) - 1:,} tokens, {one.nbytes / 1e6:.0f} MB, loaded from page server to {ours}",
            file,
            "times as long",
            f"{median(taken[ours]) * 1e3:.0f} / {median(taken[file]) * 1e3:.0f} ms",
            median(a / b for a, b in zip(taken[ours], taken[file], strict=True)),
            at_most=at_most,
        )


def _check(found: AgentBlocks, context: AgentBlocks) -> None:
    for block, other in zip(found.blocks, context.blocks, strict=True):
        for layer, same in zip(block.layers, other.layers, strict=True):
            if not all(mx.array_equal(a, b) for a, b in zip(layer, same, strict=True)):
                raise AssertionError("another context came back than was saved")


def saving(machine: Machine, tokens: Tokens, url: str, rounds: int, said: int) -> Finding:
    """A generation whose context is written behind it, until it is written, beside one that nobody keeps."""
    pool = BlockPool(POOL_BLOCKS)
    store = AgentCacheStore(machine.spec, pool, pages=PageTier(url, machine.spec, pool))
    ways = {"saved": store, "not saved": None}
    engines = {name: AgentEngine(machine.batch(pool), where) for name, where in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, rounds):
        for name, one in engines.items():
            prompt = [turn + 10, *tokens]  # of which nothing is known
            errors: list[Exception] = []
            started = time.perf_counter()
            one.submit("saved", prompt, max_tokens=said, on_done=lambda _: None, on_error=errors.append)
            while one.step(timeout=1.0):
                pass
            store.flush_dirty()
            if errors:
                raise errors[0]
            if turn >= 0:
                taken[name].append(time.perf_counter() - started)
    store.close()
    pairs = zip(taken["saved"], taken["not saved"], strict=True)
    return Finding(
        f"a prompt of {len(tokens):,} tokens and an answer of {said}, saved to the page server",
        "not saved",
        "of its time more",
        f"{median(taken['saved']):.2f} / {median(taken['not saved']):.2f} s",
        median(a / b - 1 for a, b in pairs),
        at_most=SAVING,
    )


def write_plot(findings: Sequence[Finding], remembered: Sequence[Remembered], path: Path) -> None:
    """Time to first token over the length of the context, a line a tier. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = [len(one.context) - 1 for one in remembered]
    prefill = [one.prefill for one in remembered]
    axes.plot(sizes, prefill, "o-", color="black", label="full prefill")
    for tier in ("cold file", "page server", "hot"):
        sooner = [finding.value for finding in findings if finding.work.endswith(f"from {tier}")]
        axes.plot(sizes, [full / times for full, times in zip(prefill, sooner, strict=True)], "o-", label=tier)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("tokens of the context")
    axes.set_ylabel("seconds to the first token")
    axes.set_title("An agent comes back")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/engine_tiers.json, .md and .png, unless --quick is given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine_tiers")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    loaded, tokenizer = model.load(SMOLLM2)
    machine = Machine(loaded, tokenizer, ModelCacheSpec.probe(loaded, tokenizer))
    text = tokenizer.encode(files("engine.demo").joinpath("handbook.txt").read_text(encoding="utf-8")) * 4
    sizes, rounds = ([256, 300], QUICK_ROUNDS) if quick else (list(SOONER), ROUNDS)
    batch = machine.batch(BlockPool())
    compute(machine, batch, text[300:400])  # warms up
    remembered = []
    for size in sizes:
        print(f"{size:,} tokens ...", flush=True)
        remembered.append(compute(machine, batch, text[:size]))
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        with tiers(machine, remembered, directory / "cold") as found:
            findings = list(first_tokens(remembered, found, rounds))
        with start_kvpage() as server:
            for one in remembered:
                server.admin.flushall()  # a block that another context brought has its bits, which differ in the last
                findings += loads(machine, one, server.url, directory, rounds)
            length, said = QUICK_SAVED if quick else SAVED
            print("saving ...", flush=True)
            findings.append(saving(machine, text[:length], server.url, rounds, said))
    show(findings, INTRO)
    if not quick:
        write(findings, "engine_tiers", {"rounds": rounds, "load": os.getloadavg()}, intro=INTRO)
        write_plot(findings, remembered, RESULTS / "engine_tiers.png")
        rewrite_tiers(findings)


if __name__ == "__main__":
    main()
