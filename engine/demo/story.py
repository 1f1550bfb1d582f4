"""A conversation of three turns about a handbook, at two engines in turn; one of them is restarted in between.

For comparison, an engine that is never stopped and has no store answers the same conversation.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files

from rich.console import Console
from rich.table import Table

from engine.demo.processes import EngineProcess, running_engine, running_store
from engine.demo.turn import Turn
from kvpage_server.system.terminal import table_of

QUESTIONS = (
    "How long did the longest fog on record last?",
    "What are the words that every keeper says?",
    "What is the name of the supply boat?",
)
ENGINES = ("A", "B", "A, restarted")  # who answers them
REUSED = 0.95  # of every prompt but the first, at least
SOONER = 10.0  # times, at least


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured."""

    moved: tuple[Turn, ...]  # from engine to engine
    uninterrupted: tuple[Turn, ...]  # at one

    @property
    def reused(self) -> float:
        """The smallest share of a later prompt that was not computed."""
        return min(map(share_reused, self.moved[1:]))

    @property
    def sooner(self) -> float:
        """How many times sooner the last turn's first token came than the first turn's, whose prompt is shorter."""
        return self.moved[0].first_token / self.moved[-1].first_token

    @property
    def same_text(self) -> bool:
        """Whether every answer is the one of the uninterrupted conversation."""
        return [turn.text for turn in self.moved] == [turn.text for turn in self.uninterrupted]

    def promises(self) -> dict[str, bool]:
        """Each result as a sentence, and whether it keeps the promise."""
        reasons = ", ".join(turn.why for turn in self.moved[1:] if turn.why)
        said = f"; the store: {reasons}" if reasons and self.reused < REUSED else ""
        return {
            f"{self.reused:.1%} of what each engine was told was not computed again (promised: {REUSED:.0%}{said})": (
                self.reused >= REUSED
            ),
            f"the text is {'' if self.same_text else 'not '}that of the uninterrupted conversation": self.same_text,
            f"the restarted engine's first token came {self.sooner:.1f} times sooner than the first turn's "
            f"(promised: {SOONER:.0f})": self.sooner >= SOONER,
        }


def share_reused(turn: Turn) -> float:
    """The share of the prompt that was not computed."""
    return turn.tokens_reused / turn.prompt_tokens


def run(model: str, console: Console) -> Outcome:
    """Run both conversations, and report to `console`. Raises ProcessError."""
    handbook = files("engine.demo").joinpath("handbook.txt").read_text(encoding="utf-8")
    opening = [{"role": "system", "content": f"Answer from this handbook.\n\n{handbook}"}]
    with ExitStack() as stack:
        store = stack.enter_context(running_store())
        say(console, "The store", f"listens on {store.url} and is empty. {store.page} shows what it has.")
        messages = list(opening)
        with running_engine("engine A", model, store.url) as a:
            b = stack.enter_context(running_engine("engine B", model, store.url))
            say(console, "Engine A", f"is process {a.pid}. It reads a handbook of {len(handbook.split()):,} words.")
            first = ask(a, messages, QUESTIONS[0], console)
            a.save()
            say(console, "Engine B", f"is process {b.pid} and goes on.")
            second = ask(b, messages, QUESTIONS[1], console)
            b.save()
        say(console, "Engine A", "is stopped, and started again.")
        with running_engine("engine A", model, store.url) as again:
            say(console, "Engine A", f"is process {again.pid} and goes on.")
            third = ask(again, messages, QUESTIONS[2], console)
    with running_engine("engine C", model) as c:
        say(console, "Engine C", f"is process {c.pid} and has the whole conversation, without a store.")
        uninterrupted = tuple(ask(c, opening, question, console) for question in QUESTIONS)
    return Outcome((first, second, third), uninterrupted)


def say(console: Console, who: str, what: str) -> None:
    console.print(f"[bold]{who}[/] {what}", highlight=False, soft_wrap=True)


def ask(engine: EngineProcess, messages: list[dict[str, str]], question: str, console: Console) -> Turn:
    """Ask, show and return the answer; both are added to `messages`."""
    messages.append({"role": "user", "content": question})
    with console.status(question):
        turn = engine.answer(messages)
    messages.append({"role": "assistant", "content": turn.text})
    for line in (question, " ".join(turn.text.split())):
        console.print(f"    {line}", style="dim", markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
    return turn


def table(outcome: Outcome) -> Table:
    shown = table_of("turn", "engine", "found in", "prompt", "reused", "", "first token", "text", numbers_from=3)
    moved = zip(ENGINES, outcome.moved, strict=True)
    alone = (("C, alone", turn) for turn in outcome.uninterrupted)
    for number, (where, turn) in [*enumerate(moved, start=1), *enumerate(alone, start=1)]:
        same = turn.text == outcome.uninterrupted[number - 1].text
        shown.add_row(
            str(number),
            where,
            turn.tier,
            f"{turn.prompt_tokens:,}",
            f"{turn.tokens_reused:,}",
            f"{share_reused(turn):.1%}",
            f"{turn.first_token:.2f} s",
            "same" if same else "differs",
        )
    return shown


def show(outcome: Outcome, console: Console) -> None:
    """The table, and what became of each promise."""
    console.print("", table(outcome), "", highlight=False)
    for promise, kept in outcome.promises().items():
        console.print("kept   " if kept else "[bold red]MISSED [/]", promise, highlight=False, soft_wrap=True)
