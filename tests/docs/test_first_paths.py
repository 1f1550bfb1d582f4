"""The first steps of the documents, as they are written: a page, a conversation that survives a restart, a graph.

Each takes at most three commands. The steps with vLLM are in tests/connectors/test_serve_with_vllm.py.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from documents import HANGS, NO_REDIS_CLI, REDIS_CLI, ROOT, blocks, run
from servers import answers, free_port
from waiting import until

PROMETHEUS = shutil.which("prometheus")
SHORT = "--max-tokens", "12"  # of an answer


class Newcomer:
    """A reader who copies commands, with a port and a directory of this test in place of the usual ones."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port, self.http = directory, free_port(), free_port()
        shutil.copytree(ROOT / "conf", directory / "conf")
        (directory / "models").symlink_to(ROOT / "models")
        for name in ("kvpage.conf", "prometheus.yml"):
            file = directory / "conf" / name
            file.write_text(self.here(file.read_text(encoding="utf-8")), encoding="utf-8")

    def here(self, text: str) -> str:
        ports = {"9221": str(self.port), "9223": str(self.http)}
        return re.sub("9221|9223", lambda found: ports[found[0]], text)

    def words(self, typed: str) -> list[str]:
        program, *words = shlex.split(self.here(typed))
        own = Path(sys.executable).with_name(Path(program).name)
        return [str(own) if own.exists() else program, *words]

    def made(self, target: str) -> list[str]:
        """Run the first commands of a target of make, and return the last one."""
        done = (".venv/server.stamp", ".venv/engine.stamp", "models/smollm2/model.safetensors")
        options = [word for name in done for word in ("-o", name)]
        *first, last = run(["make", "--no-print-directory", "--dry-run", *options, target]).splitlines()
        for line in first:
            subprocess.run(shlex.split(line), cwd=self.directory, check=True)
        return self.words(last)

    @contextmanager
    def started(self, command: list[str]) -> Iterator[None]:
        """Run a server until it has stopped in order."""
        with (self.directory / "log").open("ab") as log:
            process = subprocess.Popen(command, cwd=self.directory, stdout=log, stderr=log, start_new_session=True)
        try:
            until(lambda: answers(self.port), "the server")
            yield
        finally:
            process.terminate()
            assert process.wait(60) == 0, (self.directory / "log").read_text(encoding="utf-8")

    def answer(self, command: list[str], typed: str = "") -> str:
        done = subprocess.run(
            command, cwd=self.directory, input=typed, capture_output=True, encoding="utf-8", timeout=HANGS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    return Newcomer(tmp_path)


@pytest.mark.parametrize(
    "page", ["docs/start.md", "docs/vllm.md", "docs/monitoring/README.md#a-graph-in-three-commands"]
)
def test_the_first_screen_links_to_each_path(page: str) -> None:
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Why not")[0]
    assert f"]({page})" in first_screen


@pytest.mark.skipif(not REDIS_CLI, reason=NO_REDIS_CLI)
def test_a_page_is_stored_with_three_commands(newcomer: Newcomer) -> None:
    (block,) = (block for block in blocks("docs/start.md", "console") if "KVPAGESET" in block)
    store, read, *_ = re.findall(r"^\$ (.* KVPAGE[SG]ET .*)$", block, re.MULTILINE)
    with newcomer.started(newcomer.made("run")):
        assert newcomer.answer(newcomer.words(store)) == "OK\n"
        assert newcomer.answer(newcomer.words(read)) == "BLOB_DATA\n"


@pytest.mark.model
@pytest.mark.slow
def test_a_conversation_survives_a_restart_of_both(newcomer: Newcomer) -> None:
    commands = [line for block in blocks("README.md", "console") for line in block.splitlines()]
    assert commands[:2] == ["$ make run", "$ make chat"]
    server = newcomer.made("run")
    with newcomer.started(server):
        first = newcomer.answer([*newcomer.made("chat"), *SHORT], "What is the capital of France?\n")
    assert "Paris" in first
    assert re.search(r"\[0 of \d+ tokens reused", first)
    with newcomer.started(server):
        second = newcomer.answer([*newcomer.made("chat"), *SHORT], "And of Italy?\n")
    assert "Rome" in second
    assert re.search(r"\[[1-9]\d+ of \d+ tokens reused from the page server", second), second


@pytest.mark.slow
@pytest.mark.skipif(not PROMETHEUS, reason="prometheus is not installed (Debian: apt-get install prometheus)")
def test_prometheus_draws_a_graph_with_three_commands(newcomer: Newcomer) -> None:
    text = (ROOT / "docs/monitoring/README.md").read_text(encoding="utf-8").partition("## A graph in three")[2]
    start, watch, load = re.findall(r"^\$ (.*)$", text.partition("\n## ")[0], re.MULTILINE)
    (link,) = re.findall(r"<(http://127.0.0.1:9090/\S+)>", text)
    port = free_port()
    listening = ["--web.listen-address", f"127.0.0.1:{port}"]
    place = str(newcomer.directory / "metrics")
    here = ["--port", str(newcomer.port), "--dir", str(newcomer.directory)]
    configuration = newcomer.directory / "conf" / "prometheus.yml"
    often = configuration.read_text(encoding="utf-8").replace("scrape_interval: 5s", "scrape_interval: 500ms")
    configuration.write_text(often, encoding="utf-8")
    with (
        newcomer.started([*newcomer.words(start), *here]),
        subprocess.Popen(
            [*newcomer.words(watch.replace("/tmp/kvpage-metrics", place)), *listening],
            cwd=newcomer.directory,
            stderr=subprocess.DEVNULL,
        ) as prometheus,
        httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60) as client,
    ):

        def figures() -> Any:
            query = parse_qs(urlsplit(link).query)["g0.expr"][0]
            try:
                found = client.get("/query", params={"query": query})
            except httpx.TransportError:  # it has just been started
                return None
            return found.json()["data"]["result"] if found.is_success else None

        try:
            short = load.replace("--seconds 10", "--seconds 0.02 --quick")
            newcomer.answer([*newcomer.words(short), "--url", f"redis://127.0.0.1:{newcomer.port}"])
            until(lambda: any(float(found["value"][1]) > 0 for found in figures() or ()), "a rate above 0")
        finally:
            prometheus.kill()
