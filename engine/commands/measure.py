"""`kvpage-engine bench` and `kvpage-engine doctor`: measurements of the model, the link and the store.

Both commands delete their contexts from the store.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import redis

from kvpage_server.address import shown
from kvpage_server.client import names_several
from kvpage_server.client.commands import BlockCode
from kvpage_server.client.page import readable
from kvpage_server.client.raw_commands import plain_client
from kvpage_server.system.terminal import out, table_of
from kvpage_server.system.text import as_size

from . import Failure
from .options import add_engine, count, open_engine
from .talk import ask

if TYPE_CHECKING:
    from ..agent_engine import Answer
    from ..memory.blocks import AgentBlocks
    from ..startup import Engine
    from ..tiers.pages import PageTier

LEAST_TOKENS = 2
DECODED_TOKENS = 16  # tokens of the answer that measures the speed of decode
PINGS = 50


def add_to(commands: Any) -> None:
    bench_ = commands.add_parser("bench", help="measure the time to the first token: computed, and from each tier")
    bench_.set_defaults(run=bench)
    doctor_ = commands.add_parser(
        "doctor", help="measure model, link and store, and report when fetching is faster than computing"
    )
    doctor_.set_defaults(run=doctor)
    for parser in (bench_, doctor_):
        add_engine(parser)
        parser.add_argument(
            "--tokens", type=_tokens, default=1024, metavar="N", help="length of the prompt (%(default)s)"
        )


def _tokens(text: str) -> int:
    """Parse the length of a prompt: one token is computed each time, so nothing of a shorter one could be fetched."""
    if (tokens := count(text)) < LEAST_TOKENS:
        raise argparse.ArgumentTypeError(f"expected a number, {LEAST_TOKENS} or more, got {text!r}")
    return tokens


@dataclass(frozen=True, slots=True)
class Fetching:
    """Estimate of the time to fetch a context of n tokens: `fixed` + n * `each` seconds."""

    fixed: float
    each: float

    @classmethod
    def of(cls, short: tuple[int, float], long: tuple[int, float]) -> Fetching:
        """Return the estimate from the tokens and seconds of two contexts. The difference of their times is noise where
        it is small, so the tokens by which they differ take at least a tenth of the longer time.
        """
        (few, quick), (many, slow) = short, long
        each = max(slow - quick, slow / 10) / (many - few)
        return cls(max(0.0, quick - few * each), each)

    def pays_from(self, prefill: float) -> int | None:
        """Return the least number of tokens that are fetched faster than computed, for a model that computes `prefill`
        tokens per second; None if there is no such number.
        """
        saved = 1 / prefill - self.each
        return max(1, round(self.fixed / saved + 0.5)) if saved > 0 else None


def bench(args: argparse.Namespace) -> int:
    """Print a table with the time to the first token of a prompt: computed, restored from memory, and from the page
    server. Return 0. Raises Failure.
    """
    engine = open_engine(args)
    try:
        prompt = _prompt(engine, args.tokens)
        _warm_up(engine)
        with _scratch(engine) as agent:
            cold = _first(engine, agent, prompt)
            rows = [("computed", cold), ("from memory", _first(engine, agent, prompt))]
            if engine.pages:
                engine.store.evict_all_to_disk()
                rows.append(("from the page server", _first(engine, agent, prompt)))
            speed = _decode(engine, agent, prompt)
    finally:
        engine.close()
    table = table_of(f"{len(prompt):,} tokens", "reused", "first token", "", numbers_from=1)
    for name, answer in rows:
        seconds = answer.reuse.time_to_first_token
        sooner = cold.reuse.time_to_first_token / seconds
        table.add_row(name, f"{answer.reuse.tokens:,}", f"{1000 * seconds:,.0f} ms", f"{sooner:.1f}x sooner")
    out.print(table, soft_wrap=False)
    print(f"Then {speed:.1f} tokens a second.")
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Measure model, link and store, and print the number of tokens from which on fetching is faster than computing.
    Return 0. Raises Failure.
    """
    engine = open_engine(args)
    try:
        store = _about(engine.pages, args.store) if engine.pages else "none; --store URL measures one"
        spec = engine.spec
        _say("model", f"{engine.model_id}, {as_size(spec.token_nbytes)} a token, fingerprint {spec.fingerprint:016x}")
        if spec.refusal:
            _say("", f"contexts of this model cannot be stored: {spec.refusal}")
        _say("", "prompts run in one batch" if spec.batches else "prompts run in turns: the model cannot be batched")
        short, long = _prompt(engine, min(args.tokens // 4, 256) or 1), _prompt(engine, args.tokens)
        _warm_up(engine)
        with _scratch(engine) as agent:
            prefill = len(long) / _first(engine, agent, long).reuse.time_to_first_token
            _say("speed", f"prefill {prefill:,.0f} tokens a second, decode {_decode(engine, agent, long):,.1f}")
        _say("store", store)
        if not engine.pages:
            return 0
        fetching = _fetching(engine, short, long)
        rate = as_size(round(spec.token_nbytes / fetching.each))
        _say("link", f"{1000 * _ping(engine.pages):.2f} ms round trip, {rate} a second")
        _say("code", _about_code(engine, long))
        _say("verdict", _verdict(fetching, prefill))
    finally:
        engine.close()
    return 0


def _verdict(fetching: Fetching, prefill: float) -> str:
    tokens = fetching.pays_from(prefill)
    if tokens is None:
        return "fetching is never faster than computing here: a token takes longer on the link than in the model"
    times = 1 / prefill / fetching.each
    least = "1 token" if tokens == 1 else f"{tokens:,} tokens"
    return f"fetching is faster than computing here from {least} on, and up to {times:,.0f} times as fast"


def _about_code(engine: Engine, prompt: list[int]) -> str:
    """Return a text about the lossless code of the blocks of a context with the tokens `prompt`: the ratio, the rates,
    and the rate of a link below which blocks arrive sooner in the code. Raises Failure if the context is not found.
    """
    from ..tiers.server.manifest import block_shape

    code, raw, coded = BlockCode(always=True), 0, 0
    with _stored(engine, prompt) as agent:
        context = _load(engine, agent, prompt)
        for block in context.blocks:
            shapes = engine.spec.token_shapes(block.tokens)
            if not block.nbytes or not any(shapes):
                continue
            shape = block_shape(shapes)
            body = b"".join(readable(cast(Any, array)) for layer in block.layers for array in layer)
            raw, coded = raw + len(body), coded + code.measure(body, shape)
        engine.pool.free(context.block_ids, agent)
    if raw == coded:
        return "the lossless code would not shorten the blocks of this model by a tenth"
    ratio, rates = raw / coded, [as_size(round(rate.value or 0)) for rate in (code.encoder, code.decoder)]
    least = [as_size(round(code.break_even(ratio, receives=receives))) for receives in (True, False)]
    return (
        f"blocks are {ratio:.2f} times shorter in the lossless code; it encodes {rates[0]} a second, and decodes "
        f"{rates[1]}: faster if a link receives less than {least[0]} a second, or sends less than {least[1]}"
    )


def _fetching(engine: Engine, short: list[int], long: list[int]) -> Fetching:
    """Estimate the time to fetch contexts, from the medians of three loads of `short` and of `long` (token ids). Raises
    Failure if a context is not found.
    """
    found = []
    for prompt in (short, long):
        with _stored(engine, prompt) as agent:
            found.append((len(prompt), median(_load_seconds(engine, agent, prompt) for _ in range(3))))
    return Fetching.of(*found)


def _load_seconds(engine: Engine, agent: str, prompt: list[int]) -> float:
    started = time.perf_counter()
    loaded = _load(engine, agent, prompt)
    seconds = time.perf_counter() - started
    engine.pool.free(loaded.block_ids, agent)
    return seconds


def _load(engine: Engine, agent: str, prompt: list[int]) -> AgentBlocks:
    assert engine.pages
    loaded = engine.pages.load(agent, prompt)
    if not loaded or len(loaded) < len(prompt) - 1:
        raise Failure(f"what was stored can't be fetched: {dict(engine.pages.misses)}, {dict(engine.pages.unsaved)}")
    return loaded


def _warm_up(engine: Engine) -> None:
    """Answer a first prompt, which is slower than the following ones, so that it is not measured."""
    with _scratch(engine) as agent:
        ask(engine, agent, _prompt(engine, 64), max_tokens=2)


def _decode(engine: Engine, agent: str, prompt: list[int]) -> float:
    """Return the decoded tokens per second after the first token; 0 for an answer of fewer than two tokens."""
    times: list[float] = []
    ask(engine, agent, prompt, max_tokens=DECODED_TOKENS, on_token=lambda token: times.append(time.perf_counter()))
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def _first(engine: Engine, agent: str, prompt: list[int]) -> Answer:
    return ask(engine, agent, prompt, max_tokens=1)


@contextmanager
def _scratch(engine: Engine) -> Iterator[str]:
    """Yield the name of a new agent, and delete the agent at the end."""
    agent = f"measured-{secrets.token_hex(8)}"
    try:
        yield agent
    finally:
        engine.store.delete(agent)


@contextmanager
def _stored(engine: Engine, prompt: list[int]) -> Iterator[str]:
    """Yield the name of a new agent whose context with the tokens `prompt` is stored, and delete it at the end."""
    with _scratch(engine) as agent:
        ask(engine, agent, prompt, max_tokens=1)
        engine.store.flush_dirty()
        yield agent


def _prompt(engine: Engine, tokens: int) -> list[int]:
    """Return a prompt of random tokens, which no cache has. Raises Failure if it is too long for the model's
    context.
    """
    context = engine.spec.context
    if context and tokens + DECODED_TOKENS >= context:
        raise Failure(f"--tokens {tokens} leaves no room in a context of {context}")
    return [secrets.randbelow(engine.spec.vocab_size) for _ in range(tokens)]


def _about(pages: PageTier, url: str) -> str:
    """Return a text with the version and address of the server at `url`, or with the addresses of several. Raises
    Failure if none answers.
    """
    where = shown(url)
    if names_several(url):
        servers = pages.servers()
        if not servers:
            raise Failure(f"no store at {where}: {', '.join(pages.unasked)}")
        return f"{len(servers)} servers: {', '.join(servers)}"
    try:
        with plain_client(url, socket_timeout=5, socket_connect_timeout=5) as client:
            info: Any = client.info("server")
    except (redis.RedisError, ValueError) as error:
        raise Failure(f"no store at {where}: {error}") from error
    version = info.get("kvpage_version")
    return f"kvpage-server {version} at {where}" if version else f"{where} is no kvpage-server: it has no pages"


def _ping(pages: PageTier) -> float:
    """Return the median time of a small request, in seconds."""
    times = []
    for _ in range(PINGS):
        started = time.perf_counter()
        pages.has("nobody")
        times.append(time.perf_counter() - started)
    return median(times)


def _say(about: str, what: str) -> None:
    print(f"{about:8} {what}", flush=True)
