"""The value of stored contexts: the first token of a returning agent, from each tier, compared with full prefill.

All on the real small model, in one run. Loading is also compared by itself with reading files from the system's page
cache, ours, plain safetensors and mlx-lm's, and saving with the time of the generation that is saved.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import engine  # noqa: F401 - picks the BLAS before MLX is imported

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from benchmarks.coming_back import (
    FILE,
    HOT_TOKENS,
    MAPPED,
    MLX_LM,
    POOL_BLOCKS,
    SERVER,
    SOONER,
    Machine,
    Remembered,
    Tokens,
    cache_of,
    compute,
    first_tokens,
    mapped_url,
    tiers,
    times_as_long,
)
from benchmarks.findings import RESULTS, Finding, show, write
from benchmarks.first_tokens import rewrite_tiers
from benchmarks.servers import start_kvpage
from engine import model
from engine.agent_engine import AgentEngine
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier
from engine.tiers.store import AgentCacheStore

SMOLLM2 = Path(__file__).parent.parent / "models" / "smollm2"
PLAIN = 2.0  # target: the time to load mapped blocks, at most so many times that of a plain file in the page cache
SAVING = 0.05  # target: share of a generation's wall time, at most
ROUNDS, QUICK_ROUNDS = 7, 1
SAVED, QUICK_SAVED = (512, 64), (256, 16)  # tokens of the prompt and of the answer of a saved context
COLOURS = {"hot": "tab:green", SERVER: "tab:orange", MAPPED: "tab:red", "cold file": "tab:blue"}
INTRO = (
    "SmolLM2-135M in float32; time to first token, from the prompt's arrival on, of an agent that comes back with the "
    "same prompt of so many tokens, or with its context and a question of 11 tokens; medians, of up to 1,024 tokens' "
    "full prefill too, of more it is one"
)


def loads(
    machine: Machine, one: Remembered, url: str, mapped_url: str, directory: Path, rounds: int
) -> Iterator[Finding]:
    """Yield the findings for the load of a context from the page server, over TCP and by KVMAP, compared with files in
    the page cache.
    """
    pool = BlockPool(POOL_BLOCKS)
    pages, mapped = (PageTier(each, machine.spec, pool) for each in (url, mapped_url))
    cold = SafetensorsCacheAdapter(machine.spec, pool, directory / "checked")
    pages.save(one.context)
    mapped.save(one.context)
    cold.save(one.context)
    plain, theirs = str(directory / "plain.safetensors"), str(directory / "mlx-lm.safetensors")
    cache = cache_of(machine, one)
    mx.save_safetensors(
        plain, {f"{n}.{i}": getattr(layer, n) for i, layer in enumerate(cache) for n in ("keys", "values")}
    )
    save_prompt_cache(theirs, cache)
    del cache

    def from_server() -> AgentBlocks:
        return evaluated(pages.load(one.agent_id))

    def from_mapped_memory() -> AgentBlocks:
        return evaluated(mapped.load(one.agent_id))

    def from_checked_file() -> AgentBlocks:
        return evaluated(cold.load(one.agent_id))

    def evaluated(found: AgentBlocks | None) -> AgentBlocks:
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
        "blocks by KVMAP": from_mapped_memory,
        "the cold tier's file": from_checked_file,
        "a safetensors file": from_file,
        "a cache": to_cache,
        "mlx-lm's load_prompt_cache": by_mlx_lm,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    print(f"{one.tokens:,} tokens beside files ...", flush=True)
    for turn in range(-1, rounds):
        for name, load in ways.items():
            started = time.perf_counter()
            found = load()
            milliseconds = 1e3 * (time.perf_counter() - started)
            if isinstance(found, AgentBlocks):
                _check(found, one.context)
                pool.free(found.block_ids, one.agent_id)
            del found
            if turn >= 0:
                taken[name].append(milliseconds)
    pages.close()
    mapped.close()
    for ours, file, at_most in (
        ("blocks", "the cold tier's file", FILE),
        ("blocks", "a safetensors file", FILE),
        ("blocks by KVMAP", "a safetensors file", PLAIN if one.tokens == HOT_TOKENS else None),
        ("a cache", "mlx-lm's load_prompt_cache", MLX_LM),
    ):
        work = f"{one.tokens:,} tokens, {one.nbytes / 1e6:.0f} MB, loaded from page server to {ours}"
        yield times_as_long(work, file, taken[ours], taken[file], "{:.0f} / {:.0f} ms", at_most)


def _check(found: AgentBlocks, context: AgentBlocks) -> None:
    for block, other in zip(found.blocks, context.blocks, strict=True):
        for layer, same in zip(block.layers, other.layers, strict=True):
            if not all(mx.array_equal(a, b) for a, b in zip(layer, same, strict=True)):
                raise AssertionError("another context came back than was saved")


def saving(machine: Machine, tokens: Tokens, url: str, rounds: int, answer_tokens: int) -> Finding:
    """Measure a generation whose context is written in the background, until it is written, compared with one without a
    store.
    """
    pool = BlockPool(POOL_BLOCKS)
    store = AgentCacheStore(machine.spec, pool, pages=PageTier(url, machine.spec, pool))
    ways = {"saved": store, "not saved": None}
    engines = {name: AgentEngine(machine.batch(pool), where) for name, where in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, rounds):
        for name, one in engines.items():
            prompt = [turn + 10, *tokens]  # which no tier has
            errors: list[Exception] = []
            started = time.perf_counter()
            one.submit("saved", prompt, max_tokens=answer_tokens, on_done=lambda _: None, on_error=errors.append)
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
        f"a prompt of {len(tokens):,} tokens and an answer of {answer_tokens}, saved to the page server",
        "not saved",
        "of its time more",
        f"{median(taken['saved']):.2f} / {median(taken['not saved']):.2f} s",
        median(a / b - 1 for a, b in pairs),
        at_most=SAVING,
    )


def write_plot(findings: Sequence[Finding], remembered: Sequence[Remembered], path: Path) -> None:
    """Write a chart of the time to first token over the length of the context, with a line for each tier. Needs
    matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = [one.tokens for one in remembered]
    prefill = [one.prefill for one in remembered]
    axes.plot(sizes, prefill, "o-", color="black", label="full prefill")
    sooner = {finding.work: finding.value for finding in findings if finding.what == "times sooner"}
    for tier in ("cold file", SERVER, MAPPED, "hot"):
        for turn, line, more in ((1, "o--", ", and a question"), (0, "o-", "")):
            times = [sooner[f"{one.turns[turn].name} from {tier}"] for one in remembered]
            seconds = [full / faster for full, faster in zip(prefill, times, strict=True)]
            axes.plot(sizes, seconds, line, color=COLOURS[tier], label=tier + more)
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
    compute(machine, batch, text[300:400])  # warm-up
    remembered = []
    for size in sizes:
        print(f"{size:,} tokens ...", flush=True)
        remembered.append(compute(machine, batch, text[:size]))
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        with tiers(machine, remembered, directory / "cold") as found:
            findings = list(first_tokens(machine, remembered, found, directory, rounds))
        for one in remembered:  # on servers of its own: the last bits of a block are those of the first context with it
            with start_kvpage() as server, mapped_url() as mapped:
                findings += loads(machine, one, server.url, mapped, directory, rounds)
        with start_kvpage() as server:
            length, answer_tokens = QUICK_SAVED if quick else SAVED
            print("saving ...", flush=True)
            findings.append(saving(machine, text[:length], server.url, rounds, answer_tokens))
    show(findings, INTRO)
    if not quick:
        write(findings, "engine_tiers", {"rounds": rounds, "load": os.getloadavg()}, intro=INTRO)
        write_plot(findings, remembered, RESULTS / "engine_tiers.png")
        rewrite_tiers(findings)


if __name__ == "__main__":
    main()
