"""`kvpage-engine demo`, as a user runs it: its promises, its report of a broken promise, and its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import httpx
import pytest
from api_engines import write_tiny
from rich.console import Console
from waiting import eventually

from engine.demo import story
from engine.demo.story import ProcessError, Turn, listens, running_engine, running_store

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"


def test_a_conversation_moves_between_engines(tmp_path: Path) -> None:
    """In five processes. Of the tokens of this model each is a letter."""
    outcome = story.run(str(write_tiny(tmp_path, max_position_embeddings=8192)), Console(file=StringIO()))
    assert (outcome.moved[0].tokens_reused, outcome.moved[0].tier) == (0, "none")
    assert [turn.tier for turn in outcome.moved[1:]] == ["page", "page"]
    assert outcome.reused >= 0.95
    assert outcome.same_text
    assert outcome.uninterrupted[0].tokens_reused == 0, "it had nothing to be compared with"


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.soak  # it promises a ratio of times to the first token, and takes a minute
def test_a_conversation_moves_between_engines_as_promised() -> None:
    """With the real model."""
    output = StringIO()
    outcome = story.run(str(SMOLLM2), Console(file=output))
    first, second, third = outcome.moved
    assert first.prompt_tokens > 1000
    assert (first.tokens_reused, first.tier) == (0, "none")
    assert second.tier == third.tier == "page"
    assert outcome.reused >= 0.95
    assert outcome.sooner > 2, "how much sooner is for a machine that does nothing else: `kvpage-engine demo`"
    assert outcome.same_text
    assert [turn.text for turn in outcome.moved] == [turn.text for turn in outcome.uninterrupted]
    assert len(third.text) >= 15
    assert outcome.uninterrupted[0].tokens_reused == 0, "it had nothing to be compared with"
    story.show(outcome, Console(file=output))
    missed = [line for line in output.getvalue().splitlines() if "MISSED" in line]
    assert all("times sooner" in line for line in missed), missed


def turn(**changes: object) -> Turn:
    return replace(Turn("So it is.", 1000, 990, "page", 0.5), **changes)


COLD = turn(tokens_reused=0, tier="none", first_token=9.0)
KEPT = story.Outcome((COLD, turn(), turn()), (COLD, turn(tier="hot"), turn(tier="hot")))


@pytest.mark.parametrize(
    ("third", "complaint"),
    [
        (turn(tokens_reused=949, why="gap"), "94.9% of what .* the store: gap"),
        (turn(text="So it is not."), "not that of the uninterrupted conversation"),
        (turn(first_token=0.91), "9.9 times sooner"),
    ],
)
def test_a_promise_that_is_not_kept_is_named(third: Turn, complaint: str) -> None:
    assert all(KEPT.promises().values())
    outcome = replace(KEPT, moved=(COLD, turn(), third))
    (broken,) = [promise for promise, kept in outcome.promises().items() if not kept]
    assert re.search(complaint, broken)
    output = StringIO()
    story.show(outcome, Console(file=output))
    assert f"MISSED  {broken}" in output.getvalue()


def test_the_exit_code_reports_broken_promises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from engine import cli

    late = replace(KEPT, moved=(replace(COLD, first_token=4.0), turn(), turn()))
    for outcome, code in ((KEPT, 0), (late, 1)):
        monkeypatch.setattr(story, "run", lambda model, console, outcome=outcome: outcome)
        assert cli.main(["demo", "--model", str(tmp_path)]) == code


def test_without_a_model_it_explains_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from engine import cli

    assert cli.main(["demo", "--model", str(tmp_path / "none")]) == 1
    assert "kvpage-engine fetch-model smollm2" in capsys.readouterr().err


def test_an_unloadable_model_is_reported_and_no_process_is_left(tmp_path: Path) -> None:
    with running_store() as store, running_engine("engine A", str(tmp_path), store.url) as engine:
        assert listens(port_of(store.url))
        assert "kvpage store" in httpx.get(store.page, timeout=60, follow_redirects=True).text
        with pytest.raises(ProcessError, match=r"^engine A: .* is no model directory: it has no config\.json$"):
            engine.answer([{"role": "user", "content": "Are you there?"}])
    assert gone(port_of(store.url), engine.pid)
    assert gone(port_of(store.page), engine.pid)


@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_no_process_is_left_after_any_end(tmp_path: Path, how: signal.Signals, code: int) -> None:
    model = write_tiny(tmp_path, max_position_embeddings=8192)
    command = [sys.executable, "-u", "-m", "engine.cli", "demo", "--model", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8") as demo:
        try:
            lines = [demo.stdout.readline(), demo.stdout.readline()]
            port, pid = port_of(lines[0]), int(lines[1].split("process ")[1].split(".")[0])
            assert listens(port)
            demo.send_signal(how)
            _, errors = demo.communicate(timeout=100)
            assert demo.returncode == code
            assert errors == ("kvpage-engine: interrupted\n" if how == signal.SIGINT else "")
            assert gone(port, pid)
        finally:
            demo.kill()


def port_of(text: str) -> int:
    return int(re.search(r"://127\.0\.0\.1:(\d+)", text)[1])


def gone(port: int, pid: int) -> bool:
    """Whether nobody listens on `port` and `pid` has ended, in the end."""
    return eventually(lambda: not listens(port) and not runs(pid))


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
