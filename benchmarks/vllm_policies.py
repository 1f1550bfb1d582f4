"""`python -m benchmarks vllm_policies --trace FILE`: hit ratios of policies in vLLM's RAM tier on a trace.

It needs an environment with vLLM, such as the one of `make test-connectors`. vLLM's own manager of the tier runs the
requests of the trace, without a model. Traces have the format of `kvpage replay`; a chunk is a block of the trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvpage_connectors import vllm_policy
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvpage_server.replay import CAPACITIES, Outcome, TracedPrompt, read_trace

POLICIES = {"lru": None, "arc": None, "PrefixPolicy": vllm_policy.__name__}


def simulate(policy: str, trace: Sequence[TracedPrompt], capacity: int) -> Outcome:
    """Run the requests of a trace one after the other, with a capacity in chunks."""
    manager = CPUOffloadingManager(capacity, policy, POLICIES[policy])
    outcome = Outcome()
    for number, prompt in enumerate(trace):
        vllm_policy.monotonic = lambda second=prompt.second: second
        context = ReqContext(str(number))
        keys = [make_offload_key(name.rjust(32, b"0"), 0) for name in prompt.blocks[:capacity]]
        for end, key in enumerate(keys, start=1):
            context.set_offload_key_position(key, end)
        manager.on_new_request(context)
        found = [manager.lookup(key, context) is LookupResult.HIT for key in keys]
        hits = keys[: [*found, False].index(False)]
        outcome.asked += len(prompt.blocks)
        outcome.hits += len(hits)
        manager.prepare_load(hits, context)
        manager.complete_load(hits, context)
        stored = manager.prepare_store(keys, context)
        assert stored is not None
        manager.complete_store(stored.keys_to_store, context)
        outcome.written += len(stored.keys_to_store)
        outcome.evicted += len(stored.evicted_keys)
        manager.on_request_finished(context)
    return outcome


def main(arguments: Sequence[str]) -> None:
    """Print a row of hit ratios for each policy, in percent of all requested chunks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks vllm_policies", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--capacity", type=int, nargs="+", default=CAPACITIES, help="of the tier, in chunks")
    options = parser.parse_args(arguments)
    trace = read_trace(options.trace)
    print("capacity", *options.capacity, sep="\t")
    for policy in POLICIES:
        print(policy, *(f"{simulate(policy, trace, capacity).ratio:.2%}" for capacity in options.capacity), sep="\t")
