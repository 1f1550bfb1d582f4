"""A decoder in the graph language gives the result of the same decoder in plain MLX, bit by bit, also when it is killed
repeatedly and continues elsewhere from the page server.
"""

from __future__ import annotations

import sys

from forked import converse
from servers import RunningServer

# isort: split
import mlx.core as mx
import pytest
import redis
from persistent_models import attention, report

from benchmarks.decoder import Plain, decoder
from engine.persistent import PersistentStore, Simulator

TOKENS = 64


def plain_reports(tokens: int = TOKENS) -> list[str]:
    plain, reports = Plain(decoder()), []
    for step in range(1, tokens + 1):
        plain.step()
        reports.append(report(step, plain.word, plain.logits))
    return reports


def test_a_graph_decodes_as_plain_mlx_does() -> None:
    run = Simulator(decoder(), attention()).make_executor()
    reports = []
    for _ in range(TOKENS):
        run.step()
        reports.append(report(run.steps, run.fetch("word"), run.fetch("logits")))
    assert reports == plain_reports()
    assert run.fetch("K").shape == run.fetch("V").shape == (2, TOKENS, 2, 16)


@pytest.mark.parametrize("life", [16, pytest.param(8, marks=pytest.mark.soak)])
def test_a_run_killed_every_few_tokens_continues_identically(
    server: RunningServer, client: redis.Redis, life: int
) -> None:
    wanted = dict(enumerate(plain_reports(TOKENS + 2 * life), start=1))
    reached, processes = 0, 0
    while reached < TOKENS:
        process = converse([sys.executable, "-m", "persistent_models", server.url, "decoder"])
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(2 * life * "\n")  # no more steps than these, however fast it is
            process.stdin.flush()
            lines = [process.stdout.readline().rstrip() for _ in range(life)]
        finally:
            process.kill()  # wherever it is: in a step, in a save, between the pages and the manifest
            process.wait()
        lines += process.stdout.read().split("\n")[:-1]
        process.stdout.close()
        process.stdin.close()
        steps = [int(line.split()[0]) for line in lines]
        assert steps[0] in (reached + 1, reached + 2), "what was reported had been saved; one more step may have been"
        assert lines == [wanted[step] for step in steps]
        reached, processes = steps[-1], processes + 1
    assert processes >= TOKENS // (2 * life)
    store = PersistentStore(server.url)
    run = Simulator(decoder(), attention(), store=store).resume("decoder")
    assert run.steps in (reached, reached + 1)
    plain = Plain(decoder())
    for _ in range(run.steps):
        plain.step()
    assert mx.array_equal(run.fetch("K"), mx.stack([keys[: plain.t] for keys in plain.keys]))
    assert mx.array_equal(run.fetch("V"), mx.stack([values[: plain.t] for values in plain.values]))
    store.close()
