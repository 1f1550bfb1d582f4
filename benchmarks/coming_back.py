"""An agent returns: its first token from each tier, compared with full prefill, our own files and mlx-lm's.

Twice: with the same prompt, as after a restart, of which the last token alone has to be computed, and with its whole
context and a question after it. The answer is compared token by token with the answer before, and with mlx-lm's answer
from its own prompt cache file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import engine  # noqa: F401 - picks the BLAS before MLX is imported

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache, trim_prompt_cache

from benchmarks.findings import Finding
from benchmarks.servers import start_kvpage
from engine.agent_engine import AgentEngine, Answer
from engine.batch_engine import BlockPoolBatchEngine
from engine.memory import kvcache
from engine.memory.blocks import AgentBlocks
from engine.memory.kvcache import Cache
from engine.pool import BlockPool
from engine.spec import BLOCK_TOKENS, ModelCacheSpec
from engine.tiers.cold import SafetensorsCacheAdapter
from engine.tiers.pages import PageTier
from engine.tiers.store import AgentCacheStore, CacheConfig

SOONER = {256: 6.0, 1024: 30.0, 2048: 50.0, 4000: 80.0}  # targets: prefill time / page server time, by tokens
FILE, MLX_LM = 1.3, 1.0  # targets: at most so many times the time with our file, and with mlx-lm's
HOT, HOT_TOKENS = 1.1, 4000  # target: the time with mapped memory, at most so many times that with the engine's memory
MOST_PREFILLED = 3 * 1024  # tokens in all prefills of one context, at most
QUESTION = " And what else does the keeper have to know?"  # the prompt of a returning agent
ANSWER = 4  # tokens, which are compared
POOL_BLOCKS = 64
SERVER, FILES, MLX_LM_FILE = "page server", "cold file", "mlx-lm's prompt cache"  # only a file needs an agent id
MAPPED = "mapped memory of the page server"  # read on its unix socket, with KVMAP

Tokens = list[int]


@dataclass(frozen=True)
class Machine:
    """The model and its tokenizer."""

    model: Any
    tokenizer: Any
    spec: ModelCacheSpec

    def batch(self, pool: BlockPool) -> BlockPoolBatchEngine:
        """Return a batch engine with this pool."""
        return BlockPoolBatchEngine(self.model, self.tokenizer, self.spec, pool)


@dataclass(frozen=True)
class Turn:
    """The prompt of a returning agent, and its answer with the context in memory."""

    name: str
    prompt: Tokens
    answer: Tokens
    reused: int  # tokens that must be reused, at least


@dataclass(frozen=True)
class Remembered:
    """A context, the cost of computing its prompt, and the turns of its returning agent."""

    context: AgentBlocks
    prefill: float  # seconds to the first token
    turns: tuple[Turn, Turn]  # the same prompt again, and the context with a question

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the prompt."""
        return len(self.turns[0].prompt)

    @property
    def agent_id(self) -> str:
        """Return the agent's id."""
        return self.context.agent_id

    @property
    def nbytes(self) -> int:
        """Return the size of its blocks."""
        return sum(block.nbytes for block in self.context.blocks)


@dataclass(frozen=True)
class Tier:
    """An engine with one tier, and its preparation for a returning agent."""

    name: str
    engine: AgentEngine
    store: AgentCacheStore
    forget: Callable[[], object]  # drops contexts from memory, so that the tier is used


def compute(
    machine: Machine, batch: BlockPoolBatchEngine, tokens: Tokens, most_prefilled: int = MOST_PREFILLED
) -> Remembered:
    """Measure full prefill, of a short prompt several times. The caller frees the returned context."""
    agent_id, name = f"agent-{len(tokens)}", f"{len(tokens):,} tokens"
    taken = []
    for again in reversed(range(max(1, most_prefilled // len(tokens)))):
        batch.submit(agent_id, tokens, max_tokens=ANSWER)
        (first,) = batch.step()
        taken.append(first.time_to_first_token)
        if again:
            batch.pool.free(first.blocks.block_ids)
    context, prompt = first.blocks, [*first.blocks.tokens, *machine.tokenizer.encode(QUESTION)]
    batch.submit(agent_id, prompt, context, max_tokens=ANSWER)
    (second,) = batch.step()
    batch.pool.free(second.blocks.block_ids)
    same = Turn(name, tokens, list(first.tokens), len(tokens) - 1)
    question = Turn(f"{name} and a question", prompt, list(second.tokens), len(context))
    return Remembered(context, median(taken), (same, question))


@contextmanager
def mapped_url() -> Iterator[str]:
    """Run another server, and yield the URL of its unix socket: a client of that server's TCP port uses it, too."""
    with TemporaryDirectory() as directory, start_kvpage("--unixsocket", f"{directory}/socket"):
        yield f"unix://{directory}/socket"


@contextmanager
def tiers(
    machine: Machine, remembered: Sequence[Remembered], directory: Path, several: Mapping[str, str] | None = None
) -> Iterator[dict[str, Tier]]:
    """Engines of their own, to each of which the contexts are known in another tier; or on one server, and on
    `several` by their URLs."""
    with ExitStack() as stack:
        url = stack.enter_context(start_kvpage()).url
        found = {}
        urls = {SERVER: url, **(several or {MAPPED: stack.enter_context(mapped_url())})}
        for name in urls if several else ("hot", *urls, FILES):
            pool = BlockPool(4 * POOL_BLOCKS)
            pages = PageTier(urls[name], machine.spec, pool) if name in urls else None
            cold = SafetensorsCacheAdapter(machine.spec, pool, directory) if name == FILES else None
            # Prompts are not stored on the server, otherwise the next one would be known.
            store = AgentCacheStore(machine.spec, pool, pages=pages, cold=cold, config=CacheConfig(keep="named"))
            stack.callback(store.close)
            keep = pages.publish if pages else store.save if cold else store.publish
            remember = partial(_remember, keep, pool, remembered)
            remember()
            forget = _forgetter(store, pool, (lambda: None) if pages else remember, to_memory=name == "hot")
            found[name] = Tier(name, AgentEngine(machine.batch(pool), store), store, forget)
        yield found


def _moved(context: AgentBlocks, ids: Sequence[int]) -> AgentBlocks:
    """Return the context with block ids of another pool."""
    blocks = [type(block)(i, block.tokens, block.layers) for i, block in zip(ids, context.blocks, strict=True)]
    return AgentBlocks(context.agent_id, context.tokens, tuple(blocks), context.fingerprint)


def _remember(keep: Callable[[AgentBlocks], object], pool: BlockPool, remembered: Sequence[Remembered]) -> None:
    for one in remembered:
        ids = pool.allocate(len(one.context.blocks), one.agent_id, one.nbytes)
        keep(_moved(one.context, ids))
        pool.free(ids, one.agent_id)


def _forgetter(
    store: AgentCacheStore, pool: BlockPool, remember: Callable[[], object], *, to_memory: bool
) -> Callable[[], object]:
    """Return a function that resets the tier to its state before the last turn."""

    def forget() -> None:
        if to_memory:
            store.evict_all_to_disk()
            remember()
            return
        remember()
        store.flush_dirty()  # contexts stay in memory until they are written
        if not store.make_room(pool.total_blocks):
            raise AssertionError(f"{pool.used_blocks} blocks have stayed in memory")

    return forget


def come_back(tier: Tier, agent_id: str, turn: Turn) -> float:
    """Seconds to the first token. Raises AssertionError when too little was reused, or something else is said."""
    tier.forget()
    answers: list[Answer] = []
    errors: list[Exception] = []
    named = tier.name == FILES
    tier.engine.submit(
        agent_id, turn.prompt, max_tokens=ANSWER, keep=named, on_done=answers.append, on_error=errors.append
    )
    while tier.engine.step(timeout=1.0):
        pass
    if errors:
        raise errors[0]
    (answer,) = answers
    last = turn.reused % BLOCK_TOKENS
    stored = turn.reused - last if last < BLOCK_TOKENS // 16 else turn.reused  # see `least_tail`
    if answer.reuse.tokens < (turn.reused if named else stored):
        raise AssertionError(f"{tier.name}: {answer.reuse.tokens} of {turn.reused} tokens came back")
    _check_answer(tier.name, list(answer.tokens), turn)
    return answer.reuse.time_to_first_token


def come_back_by_mlx_lm(machine: Machine, file: Path, held: int, turn: Turn) -> float:
    """Return the same for a file of `held` tokens that mlx-lm has saved, with mlx-lm's generate_step."""
    started = time.perf_counter()
    cache = load_prompt_cache(str(file))
    trim_prompt_cache(cache, held - turn.reused)
    steps = generate_step(mx.array(turn.prompt[turn.reused :]), machine.model, max_tokens=ANSWER, prompt_cache=cache)
    answer = [next(steps)[0]]
    seconds = time.perf_counter() - started
    _check_answer(MLX_LM_FILE, [*answer, *(token for token, _ in steps)], turn)
    return seconds


def _check_answer(where: str, answer: Tokens, turn: Turn) -> None:
    if answer != turn.answer:
        raise AssertionError(f"{where}: said {answer}, with the context at hand {turn.answer}")


def first_tokens(
    machine: Machine, remembered: Sequence[Remembered], found: dict[str, Tier], directory: Path, rounds: int
) -> Iterator[Finding]:
    """Yield the findings: each tier, full prefill, our files and mlx-lm's files, measured in turns."""
    for one in remembered:
        file = directory / "context.safetensors"
        save_prompt_cache(str(file), cache_of(machine, one))
        for turn in one.turns:
            print(f"{turn.name} ...", flush=True)
            taken: dict[str, list[float]] = {name: [] for name in (*found, MLX_LM_FILE)}
            for round_ in range(-1, rounds):  # round -1 is a warm-up
                seconds = {name: come_back(tier, one.agent_id, turn) for name, tier in found.items()}
                seconds[MLX_LM_FILE] = come_back_by_mlx_lm(machine, file, len(one.context), turn)
                if round_ >= 0:
                    for name in taken:
                        taken[name].append(seconds[name])
            yield from _times_sooner(one, turn, taken)
            yield from _times_as_long(turn, taken)


def _times_sooner(one: Remembered, turn: Turn, taken: dict[str, list[float]]) -> Iterator[Finding]:
    for name, seconds in taken.items():
        same_on_server = turn is one.turns[0] and name == SERVER
        yield Finding(
            f"{turn.name} from {name}",
            "full prefill",
            "times sooner",
            f"{median(seconds):.3f} s / {one.prefill:.2f} s",
            one.prefill / median(seconds),
            at_least=SOONER.get(one.tokens) if same_on_server else None,
        )


def _times_as_long(turn: Turn, taken: dict[str, list[float]]) -> Iterator[Finding]:
    pairs: list[tuple[str, str, float | None]] = [(SERVER, FILES, FILE), (SERVER, MLX_LM_FILE, MLX_LM)]
    if MAPPED in taken:
        pairs.append((MAPPED, "hot", HOT if len(turn.prompt) == HOT_TOKENS else None))
    for tier, other, at_most in pairs:
        yield times_as_long(f"{turn.name} from {tier}", other, taken[tier], taken[other], "{:.3f} / {:.3f} s", at_most)


def times_as_long(
    work: str, other: str, ours: Sequence[float], theirs: Sequence[float], template: str, at_most: float | None
) -> Finding:
    """Return the ratio of measurements made in pairs. `template` is the text with places for the two medians."""
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    return Finding(work, other, "times as long", template.format(median(ours), median(theirs)), ratio, at_most=at_most)


def cache_of(machine: Machine, one: Remembered) -> Cache:
    """Return an evaluated cache of mlx-lm with the context."""
    cache = kvcache.reconstruct(machine.spec, one.context.blocks, len(one.context))
    mx.eval([layer.state for layer in cache])
    return cache
