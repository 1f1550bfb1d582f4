"""The README and the guides are true: their examples are run, or at least use existing words.

Port 9221 is replaced by the test server's.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from io import StringIO
from pathlib import Path

import pytest
import redis
from api_engines import write_tiny
from documents import NO_REDIS_CLI, REDIS_CLI, ROOT, blocks, check, check_program, commands, entry_point, run
from rich.console import Console
from servers import RunningServer
from test_demo import KEPT

from benchmarks.findings import RESULTS, Finding
from benchmarks.first_tokens import DOCUMENT, with_first_tokens
from benchmarks.pages import tables
from benchmarks.pages.tables import DOCUMENTS as WITH_TABLES
from benchmarks.pages.tables import with_tables
from conf.parameters import reference
from engine.demo import story

GUIDES = "start", "redis-cli", "pikiwidb", "engine", "configuration", "architecture", "lmcache", "vllm"
DOCUMENTS = ["README.md", *(f"docs/{name}.md" for name in GUIDES)]
ANY_MODEL = ["docs/engine.md"]  # examples that run with any model
INSTALLED = ["docs/start.md"]  # examples that tests/packages/test_wheel.py runs outside of the checkout
NUMBER = r"\d[\d.,]*"
README = ROOT / "README.md"
MARKDOWN = [README, *ROOT.glob("docs/**/*.md")]
SOURCES = "kvpage_server", "engine", "connectors", "conf"


CASES = [
    pytest.param(shlex.split(typed), shown, id=f"{document}: {typed}")
    for document in DOCUMENTS
    for typed, shown in commands(document)
    if not typed.startswith("curl ")  # an engine has to be asked: test_api_doc.py
]


@pytest.mark.parametrize(("words", "shown"), CASES)
def test_a_command_has_the_documented_output(words: list[str], shown: str, server: RunningServer) -> None:
    program, *rest = words
    if program == "make":  # other tests cover it
        run(["make", "--dry-run", *rest])
    elif program == "pip":  # `test_every_pip_command_names_an_extra` checks the requirement
        assert rest[0] == "install"
    elif program == "kvpage-engine" and rest[0] in ("demo", "fetch-model"):
        described = run([*entry_point(program), rest[0], "--help"])
        assert {word for word in rest if word.startswith("--")} <= set(re.findall(r"--\w+", described))
    elif program == "kvpage-engine":
        check(run([*entry_point(program), *rest]), shown)
    elif program == "kvpage-server":
        checked = rest if "--check-config" in rest else ["--check-config", *rest]
        check(run([*entry_point(program), *checked]), shown or "the configuration is valid")
    elif program == "redis-cli":
        if not REDIS_CLI:
            pytest.skip(NO_REDIS_CLI)
        assert rest[:2] == ["-p", "9221"]
        if "TTL" in rest:  # a second may have passed, or more
            shown = "(integer) 3..."
        check(run([REDIS_CLI, "--no-raw", "-p", str(server.port), *rest[2:]]), shown)
    else:
        pytest.fail(f"nobody knows how to check {program}")


def examples(document: str, server: RunningServer) -> str:
    return "\n".join(blocks(document, "python")).replace("9221", str(server.port))


@pytest.mark.model
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(name, marks=[pytest.mark.soak] * (name in INSTALLED))
        for name in DOCUMENTS
        if blocks(name, "python")
    ],
)
def test_the_python_examples_have_the_documented_output(
    document: str, server: RunningServer, client: redis.Redis
) -> None:
    check_program(examples(document, server))


@pytest.mark.parametrize("document", ANY_MODEL)
def test_they_run_with_any_model(document: str, tmp_path: Path, server: RunningServer, client: redis.Redis) -> None:
    tiny = write_tiny(tmp_path / "tiny", max_position_embeddings=8192)
    run([sys.executable, "-c", examples(document, server).replace("models/smollm2", str(tiny))])


def test_every_pip_command_names_an_extra() -> None:
    """Documents and errors name the checkout, because the package is not published."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    sources = [path for folder in SOURCES for path in ROOT.glob(f"{folder}/**/*.*") if path.suffix in (".py", ".conf")]
    texts = [path.read_text(encoding="utf-8") for path in (*MARKDOWN, *sources)]
    found = [match for text in texts for match in re.findall(r"pip install (?:'([^']*)'|([\w.-]*))", text)]
    ours = {quoted or plain for quoted, plain in found if re.match(r"\.|kvpage", quoted or plain)}
    assert {".[engine]", ".[web]"} <= ours
    for name in ours - {"."}:
        (listed,) = re.findall(r"^\.\[([\w,{}]+)\]$", name)
        assert set(listed.split(",")) <= {*extras, "{extra}"}


def test_the_figures_of_the_readme_are_in_the_linked_documents() -> None:
    rows = re.findall(r"^\|(.*)\[how\]\(([^)#]+)", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 4
    for cells, document in rows:
        text = (ROOT / document).read_text(encoding="utf-8")
        assert [figure for figure in re.findall(r"([\d.,]+) (?:s|tokens)\b", cells) if figure not in text] == []


def test_the_first_steps_show_the_output_of_the_demo() -> None:
    """Figures differ between runs; the questions, the table's rows and the promises do not."""
    (shown,) = (block for block in blocks("docs/start.md", "text") if "promised" in block)
    output = StringIO()
    story.show(KEPT, Console(file=output))
    for part in (r"^(?:turn|[123]) +(?:engine|[ABC].*?)  ", r"^kept .*$"):
        found, expected = (
            [re.sub(NUMBER, "#", line) for line in re.findall(part, text, re.MULTILINE)]
            for text in (shown, output.getvalue())
        )
        assert found == expected
        assert found
    for question in story.QUESTIONS:
        assert f"    {question}\n" in shown


def test_the_configuration_is_described_as_it_is_declared() -> None:
    how = "run: python -m conf.parameters > docs/configuration.md"
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == reference(), how


def test_the_first_tokens_are_those_that_were_measured() -> None:
    measured = json.loads((RESULTS / "engine_tiers.json").read_text(encoding="utf-8"))["findings"]
    findings = [Finding(**{name: found[name] for name in found.keys() - {"met"}}) for found in measured]
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_first_tokens(text, findings) == text


@pytest.mark.parametrize("document", WITH_TABLES, ids=lambda document: document.name)
def test_the_tables_of_pages_match_the_measurements(document: Path) -> None:
    assert with_tables(document.read_text(encoding="utf-8"), tables.found()) == document.read_text(encoding="utf-8")
