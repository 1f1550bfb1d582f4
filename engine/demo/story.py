"""A conversation of three turns about a handbook. After the second its engine is stopped; another one goes on.

For comparison the third turn is asked once more of that engine with the store emptied, and the whole conversation is
had again with an engine that is never stopped and keeps everything in its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import redis
from rich.console import Console
from rich.table import Table

from engine.demo.processes import Engine, running_engine, running_store
from engine.demo.worker import Turn

QUESTIONS = (
    "How long did the longest fog on record last?",
    "What are the words that every keeper says?",
    "What is the name of the supply boat?",
)
REUSED = 0.95  # of the third prompt, at least
SOONER = 10.0  # times, at least


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured."""

    moved: tuple[Turn, ...]  # two turns at engine A, the third at B
    recomputed: Turn  # the third, at B with an empty store
    uninterrupted: tuple[Turn, ...]  # all three at one engine

    @property
    def reused(self) -> float:
        """The part of the third prompt, its new question included, that B did not compute."""
        return share_reused(self.moved[-1])

    @property
    def sooner(self) -> float:
        """How many times sooner B's first token came than it does without the store."""
        return self.recomputed.time_to_first_token / self.moved[-1].time_to_first_token

    @property
    def same_text(self) -> bool:
        """Whether every answer is, token for token, the one of the uninterrupted conversation."""
        return [turn.tokens for turn in self.moved] == [turn.tokens for turn in self.uninterrupted]

    def promises(self) -> dict[str, bool]:
        """What was promised, as it turned out, and whether that is what was promised."""
        trouble = ", ".join(self.moved[-1].store_trouble)
        said = f"; the store: {trouble}" if trouble else ""
        return {
            f"{self.reused:.1%} of B's prompt was not computed again (promised: {REUSED:.0%}{said})": (
                self.reused >= REUSED
            ),
            f"B's text is {'' if self.same_text else 'not '}that of the uninterrupted conversation": self.same_text,
            f"B's first token came {self.sooner:.1f} times sooner than without the store (promised: {SOONER:.0f})": (
                self.sooner >= SOONER
            ),
        }


def share_reused(turn: Turn) -> float:
    """The part of the prompt that was not computed."""
    return turn.tokens_reused / turn.prompt_tokens


def run(model: str, console: Console) -> Outcome:
    """Have the conversations, telling `console` as they go. Raises ProcessError and redis-py's errors."""
    handbook = files("engine.demo").joinpath("handbook.txt").read_text(encoding="utf-8")
    opening = [{"role": "system", "content": f"Answer from this handbook.\n\n{handbook}"}]
    with running_store() as store:
        say(console, "The store", f"listens on {store} and is empty.")
        messages = list(opening)
        with running_engine("engine A", model, store) as a:
            say(console, "Engine A", f"is process {a.pid}. It reads a handbook of {len(handbook.split()):,} words.")
            first, second = (ask(a, messages, question, console) for question in QUESTIONS[:2])
        say(console, "Engine A", "is stopped.")
        with running_engine("engine B", model, store) as b:
            say(console, "Engine B", f"is process {b.pid} and goes on.")
            third = ask(b, list(messages), QUESTIONS[2], console)
            with redis.Redis.from_url(store) as client:
                client.flushall()
            say(console, "The store", "is emptied and B asked once more.")
            recomputed = ask(b, messages, QUESTIONS[2], console)
    with running_engine("engine C", model) as c:
        say(console, "Engine C", f"is process {c.pid} and has the whole conversation, without a store.")
        uninterrupted = tuple(ask(c, opening, question, console) for question in QUESTIONS)
    return Outcome((first, second, third), recomputed, uninterrupted)


def say(console: Console, who: str, what: str) -> None:
    """A step of the story."""
    console.print(f"[bold]{who}[/] {what}", highlight=False, soft_wrap=True)


def ask(engine: Engine, messages: list[dict[str, str]], question: str, console: Console) -> Turn:
    """Ask, show and return the answer; both are added to `messages`."""
    messages.append({"role": "user", "content": question})
    with console.status(question):
        turn = engine.answer(messages)
    messages.append({"role": "assistant", "content": turn.text})
    for line in (question, " ".join(turn.text.split())):
        console.print(f"    {line}", style="dim", markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
    return turn


def table(outcome: Outcome) -> Table:
    """What each turn took."""
    shown = Table("turn", "engine", box=None, header_style="bold", pad_edge=False, padding=(0, 2))
    for column in ("prompt", "reused", "", "first token", "text"):
        shown.add_column(column, justify="right")
    first, second, third = outcome.moved
    rows = [
        (1, "A", first),
        (2, "A", second),
        (3, "B", third),
        (3, "B, store emptied", outcome.recomputed),
        *((i, "C, uninterrupted", turn) for i, turn in enumerate(outcome.uninterrupted, start=1)),
    ]
    for number, where, turn in rows:
        same = turn.tokens == outcome.uninterrupted[number - 1].tokens
        shown.add_row(
            str(number),
            where,
            f"{turn.prompt_tokens:,}",
            f"{turn.tokens_reused:,}",
            f"{share_reused(turn):.1%}",
            f"{turn.time_to_first_token:.2f} s",
            "same" if same else "differs",
        )
    return shown


def show(outcome: Outcome, console: Console) -> None:
    """The table, and what became of each promise."""
    console.print("", table(outcome), "", highlight=False)
    for promise, kept in outcome.promises().items():
        console.print("kept   " if kept else "[bold red]MISSED [/]", promise, highlight=False, soft_wrap=True)
