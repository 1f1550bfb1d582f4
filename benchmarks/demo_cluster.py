"""A conversation at two engines on a Valkey Cluster, whose masters die: ``make demo-cluster``.

One is killed between the first turn and the second, another one while the third turn's context is being fetched. The
whole conversation is had again with an engine that has no store, for comparison.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files

from rich.console import Console
from rich.table import Table

from benchmarks import valkey_cluster
from benchmarks.valkey_cluster import Cluster, Node
from engine.demo.story import QUESTIONS, ProcessError, Turn, ask, running_engine, say, share_reused

_DIES_AFTER = 0.5  # seconds for which the second master does not answer, while it is asked
_WITHIN = 60.0  # seconds until a replica has taken over, at most


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of both conversations."""

    turns: tuple[Turn, ...]  # on the cluster
    uninterrupted: tuple[Turn, ...]

    def promises(self) -> dict[str, bool]:
        """Return a sentence for each promise, and whether it was kept."""
        same = [turn.text for turn in self.turns] == [turn.text for turn in self.uninterrupted]
        text = f"the text is {'' if same else 'not '}that of the uninterrupted conversation"
        lost = [turn for turn in self.turns[1:] if share_reused(turn) < 0.9]
        return {
            f"every turn was answered, and {text}": same,
            f"what a dead master had was computed again: {_computed(self.turns[1:])} tokens": bool(lost),
            f"the engine said why: {', '.join(sorted({turn.why for turn in lost if turn.why})) or 'nothing'}": all(
                turn.why for turn in lost
            ),
        }


def _computed(turns: tuple[Turn, ...]) -> str:
    return " and ".join(f"{turn.prompt_tokens - turn.tokens_reused:,} of {turn.prompt_tokens:,}" for turn in turns)


def run(model: str, console: Console) -> Outcome:
    """Run both conversations, and print the progress on `console`. Raises ProcessError."""
    handbook = files("engine.demo").joinpath("handbook.txt").read_text(encoding="utf-8")
    opening = [{"role": "system", "content": f"Answer from this handbook.\n\n{handbook}"}]
    with ExitStack() as stack:
        cluster = stack.enter_context(valkey_cluster.run())
        say(console, "The cluster", f"has three masters and three replicas: {cluster.url}")
        b = stack.enter_context(running_engine("engine B", model, cluster.url))
        messages = list(opening)
        with running_engine("engine A", model, cluster.url) as a:
            say(console, "Engine A", f"reads a handbook of {len(handbook.split()):,} words.")
            first = ask(a, messages, QUESTIONS[0], console)
            a.save()
        master, keys = min(_holders(cluster), key=lambda held: held[1])
        _kill(master)
        say(console, f"Master {master.port}", f"is killed. It had {keys} of the context's {_all(cluster) + keys} keys.")
        second = ask(b, messages, QUESTIONS[1], console)
        _await_whole(cluster)
        b.save()
        say(console, "Its replica", "has taken over. Engine A has been stopped, and is started again.")
        again = stack.enter_context(running_engine("engine A", model, cluster.url))
        assert again.url  # it is ready
        master, keys = max(_holders(cluster), key=lambda held: held[1])
        master.signal(signal.SIGSTOP)
        dying = threading.Timer(_DIES_AFTER, _kill, [master])
        dying.start()
        say(console, f"Master {master.port}", f"stops while engine A asks it, and dies. It had {keys} keys.")
        third = ask(again, messages, QUESTIONS[2], console)
        dying.join()
    with running_engine("engine C", model) as c:
        say(console, "Engine C", "has the whole conversation, without a store.")
        uninterrupted = tuple(ask(c, opening, question, console) for question in QUESTIONS)
    return Outcome((first, second, third), uninterrupted)


def _holders(cluster: Cluster) -> list[tuple[Node, int]]:
    """Return the masters that have keys, and the number of keys of each."""
    found = [(node, node.ask("DBSIZE")) for node in _living_masters(cluster)]
    return [(node, keys) for node, keys in found if keys]


def _living_masters(cluster: Cluster) -> list[Node]:
    living = [node for node in cluster.nodes if node.process.poll() is None]
    return [node for node in living if node.info_of("INFO", "replication")["role"] == "master"]


def _all(cluster: Cluster) -> int:
    return sum(keys for _, keys in _holders(cluster))


def _kill(node: Node) -> None:
    node.signal(signal.SIGKILL)
    node.process.wait()


def _await_whole(cluster: Cluster) -> None:
    """Wait until all slots are served again. Raises ProcessError."""
    deadline = time.monotonic() + _WITHIN
    while any(node.info_of("CLUSTER", "INFO")["cluster_state"] != "ok" for node in _living_masters(cluster)):
        if time.monotonic() > deadline:
            raise ProcessError(f"no replica has taken over within {_WITHIN:g} s")
        time.sleep(0.1)


def table(outcome: Outcome) -> Table:
    """Return the table of turns."""
    shown = Table("turn", "engine", box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    for column in ("prompt", "reused", "", "first token", "why not more", "text"):
        shown.add_column(column, justify="right")
    rows = [*zip("ABA", outcome.turns, strict=True), *(("C, alone", turn) for turn in outcome.uninterrupted)]
    for number, (engine, turn) in enumerate(rows):
        same = turn.text == outcome.uninterrupted[number % 3].text
        shown.add_row(
            str(number % 3 + 1),
            engine,
            f"{turn.prompt_tokens:,}",
            f"{turn.tokens_reused:,}",
            f"{share_reused(turn):.1%}",
            f"{turn.first_token:.2f} s",
            turn.why or "",
            "same" if same else "differs",
        )
    return shown


def main() -> None:
    """Run the demonstration, and exit with 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_cluster", description=__doc__)
    parser.add_argument("--model", default="models/smollm2", help="its directory")
    console = Console()
    try:
        outcome = run(parser.parse_args().model, console)
    except ProcessError as error:
        sys.exit(str(error))
    console.print("", table(outcome), "", highlight=False)
    promises = outcome.promises()
    for promise, kept in promises.items():
        console.print("kept   " if kept else "[bold red]MISSED [/]", promise, highlight=False, soft_wrap=True)
    sys.exit(0 if all(promises.values()) else 1)


if __name__ == "__main__":
    main()
