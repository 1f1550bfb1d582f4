"""`kvpage savings`: the prefill, the energy and the memory that reuse saves, of running engines or of a trace.

    time    reused tokens / rate of prefill in tokens a second - duration of the loads
    energy  time * power of the machine
    memory  bytes of a block * (contexts that have it - 1), of all blocks

The rate of prefill is a recent one, and prefill of a longer context is slower per token. So the time is an estimate.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from kvpage_server.address import shown
from kvpage_server.look.output import LookError, UsageError, titled
from kvpage_server.look.top import EngineSubscription
from kvpage_server.observe.asking import ask
from kvpage_server.observe.engines import EngineFigures
from kvpage_server.observe.memory_by_agent import Holdings, holdings_of_store
from kvpage_server.system.terminal import for_people, out, print_json
from kvpage_server.system.text import as_size, plural

WATTS = 60.0  # power of a desktop processor that computes
BLOCK_TOKENS = 512  # tokens of a block in Mooncake's traces
_LISTEN_SECONDS = 6.0  # engines publish every five seconds
_JOULES_PER_KWH = 3_600_000


@dataclass(frozen=True, slots=True)
class Savings:
    """The savings of reuse: tokens, seconds of prefill, kWh, and bytes of memory. None: unknown."""

    prompt_tokens: int
    reused_tokens: int
    seconds: float | None
    kwh: float | None
    bytes: int | None


def savings(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Print the savings of the engines of a store since their start, or the savings of a store without a limit on
    the trace `args.trace`. Return True.

    Raises RedisError, and LookError if no engine publishes statistics, OSError and ValueError for a trace, UsageError
    for an option of traces without a trace.
    """
    if args.trace is not None:
        found, source = of_trace(args.trace, args), str(args.trace)
    elif args.rate or args.token_bytes or args.block_tokens:
        raise UsageError("--rate, --token-bytes and --block-tokens are for a trace: engines publish theirs")
    else:
        engines = _connected(store, args)
        holdings = ask(store, holdings_of_store())
        found, source = of_engines(engines, holdings, args.watts), shown(args.url)
        if holdings.refused and not args.json:
            out.print(f"Memory is a lower bound: {holdings.refused}")
        elif holdings.cut and not args.json:
            out.print(f"The store has more {' and '.join(holdings.cut)} than were read: memory is a lower bound.")
    if args.json:
        print_json({"source": source, "watts": args.watts} | {name: getattr(found, name) for name in Savings.__slots__})
    else:
        out.print(titled(_lines(found, args.watts)))
    return True


def of_engines(engines: list[EngineFigures], holdings: Holdings, watts: float) -> Savings:
    """Return the savings of engines since their start, with the memory of blocks that several contexts share."""
    reused = sum(engine.reused for engine in engines)
    prompts = reused + sum(engine.computed for engine in engines)
    known = [engine.seconds_saved for engine in engines if engine.prefill_rate]
    seconds = sum(known) if known or not reused else None
    return Savings(prompts, reused, seconds, _kwh(seconds, watts), shared_bytes(holdings))


def shared_bytes(holdings: Holdings) -> int:
    """Return the bytes that sharing saves: one copy of each block for each context but the first."""
    contexts: Counter[bytes] = Counter()
    sizes: dict[bytes, int] = {}
    for agent in holdings.agents:
        contexts.update(block.name for block in agent.blocks)
        sizes.update((block.name, block.bytes) for block in agent.blocks)
    return sum(sizes[name] * (count - 1) for name, count in contexts.items())


def of_trace(trace: Path, args: argparse.Namespace) -> Savings:
    """Return the savings of a store without a limit on a trace: a prompt reuses its blocks up to the first new one.

    Raises TraceError, OSError.
    """
    from kvpage_server.replay import read_trace  # imports every eviction policy

    block_tokens = args.block_tokens or BLOCK_TOKENS
    stored: set[bytes] = set()
    requested = reused = 0
    for prompt in read_trace(trace):
        new = next((i for i, block in enumerate(prompt.blocks) if block not in stored), len(prompt.blocks))
        reused += new
        requested += len(prompt.blocks)
        stored.update(prompt.blocks)
    tokens = reused * block_tokens
    seconds = tokens / args.rate if args.rate else None
    shared = (requested - len(stored)) * block_tokens * args.token_bytes if args.token_bytes else None
    return Savings(requested * block_tokens, tokens, seconds, _kwh(seconds, args.watts), shared)


def _connected(store: redis.Redis, args: argparse.Namespace) -> list[EngineFigures]:
    """Return the engines that publish within _LISTEN_SECONDS. Raises LookError if there is none."""
    subscription = EngineSubscription(store, args.url)
    with out.status("listening to the engines, which publish every five seconds"):
        until = time.monotonic() + _LISTEN_SECONDS
        while (left := until - time.monotonic()) > 0:
            engines = subscription.connected()
            time.sleep(min(left, 0.2))
    if not engines:
        url = shown(args.url)
        raise LookError(f"no engine publishes statistics on {url}: start one with --store {url}")
    return engines


def _kwh(seconds: float | None, watts: float) -> float | None:
    return None if seconds is None else seconds * watts / _JOULES_PER_KWH


def _lines(found: Savings, watts: float) -> Iterator[tuple[str, Any]]:
    share = f" ({found.reused_tokens / found.prompt_tokens:.1%})" if found.prompt_tokens else ""
    yield "tokens", f"{found.reused_tokens:,} of {plural(found.prompt_tokens, 'prompt token')} reused{share}"
    if found.seconds is None or found.kwh is None:
        yield "time", "unknown: no rate of prefill"
    else:
        spent = for_people(found.seconds) if found.seconds >= 60 else f"{found.seconds:.1f} s"
        yield "time", f"{spent} of prefill: reused tokens / rate of prefill - time of the loads"
        yield "energy", f"{found.kwh:,.3g} kWh: time * {watts:g} W"
    if found.bytes is not None:
        yield "memory", f"{as_size(found.bytes)}: bytes of a block * (contexts that have it - 1)"
