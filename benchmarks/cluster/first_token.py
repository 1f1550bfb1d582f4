"""An agent returns: its first token from a Valkey Cluster and from several servers, compared with one page server."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import valkey_cluster
from benchmarks.coming_back import SERVER, Machine, come_back, compute, tiers, times_as_long
from benchmarks.findings import Finding
from benchmarks.servers import start_kvpage
from engine import model
from engine.pool import BlockPool
from engine.spec import ModelCacheSpec

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"
SIZES, QUICK_SIZES = (256, 1024, 4000), (256,)  # tokens
ROUNDS, QUICK_ROUNDS = 5, 1
MOST = 1.15  # target: at most so many times the time from the page server
CLUSTER, SIDE_BY_SIDE = "a cluster of three masters", "two servers side by side"
INTRO = "SmolLM2-135M in float32; seconds to the first token of an agent that comes back, medians of pairs"


def measured(quick: bool) -> Iterator[Finding]:
    """Yield the findings for contexts of each size."""
    loaded, tokenizer = model.load(SMOLLM2)
    machine = Machine(loaded, tokenizer, ModelCacheSpec.probe(loaded, tokenizer))
    text = tokenizer.encode(files("engine.demo").joinpath("handbook.txt").read_text(encoding="utf-8")) * 4
    batch = machine.batch(BlockPool())
    compute(machine, batch, text[300:400])  # warm-up
    remembered = [compute(machine, batch, text[:size], 0) for size in (QUICK_SIZES if quick else SIZES)]
    with (
        TemporaryDirectory() as scratch,
        valkey_cluster.run("--maxmemory", "4gb", replicas=False) as cluster,
        start_kvpage() as one,
        start_kvpage() as other,
    ):
        several = {CLUSTER: cluster.url, SIDE_BY_SIDE: f"{one.url},{other.url}"}
        with tiers(machine, remembered, Path(scratch), several) as found:
            for context in remembered:
                for turn in context.turns:
                    print(f"{turn.name} ...", flush=True)
                    taken: dict[str, list[float]] = {name: [] for name in (SERVER, *several)}
                    for round_ in range(-1, QUICK_ROUNDS if quick else ROUNDS):  # round -1 is a warm-up
                        for name in taken:
                            seconds = come_back(found[name], context.agent_id, turn)
                            taken[name] += [seconds] if round_ >= 0 else []
                    for name in several:
                        template = "{:.3f} / {:.3f} s"
                        work = f"{turn.name} from {name}"
                        yield times_as_long(work, SERVER, taken[name], taken[SERVER], template, MOST)
