"""The README and the guides tell the truth: what they show is run, or at least asked for by the same words.

A fenced block is `console` (commands after ``$ ``, their output below), `python`, or `text`, which claims nothing. The
Python blocks of a document are one program. Port 9221 is replaced by the test server's.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import redis
from rich.console import Console
from servers import RunningServer
from test_demo import KEPT

from engine.demo import story
from kvpage_server.parameters import reference

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "docs/engine.md", "docs/configuration.md", "docs/architecture.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = r"\d[\d.,]*"
REDIS_CLI = shutil.which("redis-cli")


def blocks(document: str, kind: str) -> list[str]:
    """The contents of a document's blocks of one kind."""
    return [body for found, body in FENCE.findall((ROOT / document).read_text()) if found == kind]


def commands(document: str) -> Iterator[tuple[list[str], str]]:
    """What is typed in a document's console blocks, as words, and what it shows below."""
    for block in blocks(document, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            typed, _, shown = part.partition("\n")
            yield shlex.split(typed), shown.rstrip("\n")


CASES = [
    pytest.param(words, shown, id=f"{document}: {shlex.join(words)}")
    for document in DOCUMENTS
    for words, shown in commands(document)
]


@pytest.mark.parametrize(("words", "shown"), CASES)
def test_a_command_does_what_is_shown(words: list[str], shown: str, server: RunningServer) -> None:
    program, *rest = words
    if program == "make":  # what it does is tested elsewhere
        run(["make", "--dry-run", *rest])
    elif words == ["kvpage-engine", "demo"]:
        assert "--model" in run([*entry_point("kvpage-engine"), "demo", "--help"])
    elif program == "kvpage-engine":
        check(run([*entry_point(program), *rest]), shown)
    elif program == "kvpage-server":
        checked = rest if "--check-config" in rest else ["--check-config", *rest]
        check(run([*entry_point(program), *checked]), shown or "the configuration is valid")
    elif program == "redis-cli":
        if not REDIS_CLI:
            pytest.skip("redis-cli is not installed (Debian: redis-tools)")
        assert rest[:2] == ["-p", "9221"]
        check(run([REDIS_CLI, "--no-raw", "-p", str(server.port), *rest[2:]]), shown)
    else:
        pytest.fail(f"nobody knows how to check {program}")


def entry_point(name: str) -> list[str]:
    """A command of the project, as it is installed."""
    return [str(Path(sys.executable).with_name(name))]


def run(command: list[str]) -> str:
    """What a command prints when it succeeds."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.rstrip("\n")


def check(output: str, shown: str) -> None:
    """That the output is what is shown, '...' standing for any."""
    assert re.fullmatch(re.escape(shown).replace(re.escape("..."), "(?s:.*)"), output), output


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("document", [name for name in DOCUMENTS if blocks(name, "python")])
def test_the_python_examples_are_programs_that_run(document: str, server: RunningServer, client: redis.Redis) -> None:
    """A line that prints and ends in a comment prints that."""
    program = "\n".join(blocks(document, "python")).replace("9221", str(server.port))
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert promised
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert [line for line in promised if line not in printed] == []


def test_the_readme_shows_what_the_demo_prints() -> None:
    """Figures differ from run to run; what is asked, the table's rows and the promises do not."""
    (shown,) = (block for block in blocks("README.md", "text") if "first token" in block)
    said = StringIO()
    story.show(KEPT, Console(file=said))
    for part in (r"^(?:turn|[123]) +(?:engine|[ABC].*?)  ", r"^kept .*$"):
        found, expected = (
            [re.sub(NUMBER, "#", line) for line in re.findall(part, text, re.MULTILINE)]
            for text in (shown, said.getvalue())
        )
        assert found == expected
        assert found
    for question in story.QUESTIONS:
        assert f"    {question}\n" in shown


def test_the_configuration_is_described_as_it_is_declared() -> None:
    how = "run: python -m kvpage_server.parameters > docs/configuration.md"
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), how


@pytest.mark.parametrize(
    "document", [str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]]
)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", re.sub(FENCE, "", path.read_text()))
    dead = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert dead == []
