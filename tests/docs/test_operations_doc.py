"""The pages for operators: their commands, in this order, against real servers, and the files that they show."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from browsing import start_seen_server
from documents import NO_REDIS_CLI, REDIS_CLI, ROOT, blocks, check, check_program, commands, entry_point, run
from keyspaces import block, set_block
from redis.exceptions import NoPermissionError
from servers import RunningServer, free_port, start_server
from test_kvpage_cli import kvpage
from test_tls import certificates, files, needs_openssl
from waiting import PATIENCE

from kvpage_server.page import DType

__all__ = ["certificates"]  # a fixture

OPERATIONS, WATCH = "docs/operations.md", "docs/watch.md"
PAGES = [
    "docs/install.md",
    "docs/size.md",
    OPERATIONS,
    WATCH,
    "docs/troubleshooting.md",
    "docs/backup.md",
    "docs/upgrade.md",
]
SHAPE = block([(0, DType.FLOAT16, 64), (1, DType.FLOAT16, 64)], layers=4, heads=2, page_size=16)


class Machines:
    """The machines kv1, which also has port 9221, and kv2 of the documents, and their directories."""

    def __init__(self, directory: Path, certificates: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._directory, self._configuration = directory, directory / "kvpage.conf"
        shutil.copy(ROOT / "conf" / "kvpage.conf", self._configuration)
        for name in ("backups", "tmp", "log/kvpage", "run/kvpage"):
            (directory / name).mkdir(parents=True)
        for new, old in (("2027.crt", "server.crt"), ("2027.key", "server.key"), ("authorities-2027.crt", "ca.crt")):
            shutil.copy(certificates / old, directory / new)
        self._certificates = certificates
        self.first, self.second = self._start("kv1"), self._start("kv2")
        self._names = {
            "redis://kv2:9221": self.second.url,
            "redis://kv1:9221": self.first.url,
            "redis://127.0.0.1:9221": self.first.url,
            "-p 9221": f"--no-raw -p {self.first.port}",
            "/etc/kvpage/": f"{directory}/",
            "/var/": f"{directory}/",
            "/run/": f"{directory}/run/",
        }

    def _start(self, name: str, port: int | None = None) -> RunningServer:
        """Start a server with the shipped configuration and the documented disk settings."""
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        received = dict(line.split() for line in blocks(OPERATIONS, "conf")[0].splitlines())
        assert received.pop("dir") == "/var/lib/kvpage"
        if name == "kv1":
            received |= {"pidfile": f"{self._directory}/run/kvpage/kvpage.pid", "tls-port": str(free_port())}
            received["logfile"] = f"{self._directory}/log/kvpage/kvpage.log"
        options = [word for option, value in received.items() for word in (f"--{option}", value)]
        options += files(self._certificates)
        return self._stack.enter_context(
            start_server(*options, port=port, file=self._configuration, directory=directory)
        )

    def here(self, text: str) -> str:
        """Replace the documents' names by the names in this test."""
        for name, own in self._names.items():
            text = text.replace(name, own)
        return text

    def run(self, typed: str) -> str:
        if "$(" in typed:
            return run(["sh", "-c", self.here(typed)])
        program, *words = shlex.split(self.here(typed))
        if typed == "kvpage-server /etc/kvpage/kvpage.conf":  # as a service, on the port that the other one had
            self.first.process.wait(PATIENCE)  # it answers nobody any more, and may still be writing
            self._start("kv1", self.first.port)
            return ""
        if program == "redis-cli":
            assert REDIS_CLI
            return run([REDIS_CLI, *words])
        if program == "kvpage":
            code, shown, errors = kvpage(
                *words, url="" if words[0] == "inspect" or "--url" in words else self.first.url
            )
            assert code == 0, shown + errors
            return shown.rstrip("\n")
        return run([*(entry_point(program) if program == "kvpage-server" else [program]), *words])


@pytest.fixture
def machines(tmp_path: Path, certificates: Path) -> Iterator[Machines]:
    """Start two servers; the first has a conversation and an engine's keys of an agent."""
    with ExitStack() as stack:
        machines = Machines(tmp_path, certificates, stack)
        with machines.first.client() as client:
            for page in range(3):
                set_block(client, "chat-7", page, SHAPE)
            set_block(client, "agent/alice", 7, SHAPE, ttl=3600)
            client.mset({"manifest:alice": "what the engine keeps", "seal:0123": "a digest"})
        yield machines


@needs_openssl
@pytest.mark.skipif(not REDIS_CLI, reason=NO_REDIS_CLI)
@pytest.mark.skipif(subprocess.run(["cp", "--version"], capture_output=True).returncode != 0, reason="needs GNU's cp")
def test_the_commands_have_the_documented_output(machines: Machines) -> None:
    for page in PAGES:
        for typed, shown in commands(page):
            check(machines.run(typed), machines.here(shown))
        if program := blocks(page, "python"):
            check_program("\n".join(map(machines.here, program)))
    for server in (machines.first, machines.second):
        with server.client() as client:
            assert client.dbsize() == 4 * SHAPE.pages + 2


def test_the_documented_fields_exist() -> None:
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in (OPERATIONS, WATCH))
    table = re.findall(r"^\| (`.*?`) \| ", text, re.MULTILINE)
    received = {field for row in table for field in re.findall(r"`(\w+)`", row) if not field.startswith("SIG")}
    assert len(received) > 20
    with start_server("--store", "tiered") as server, server.client() as client:
        assert received <= client.info("everything").keys()


def test_its_rights_suffice_to_dump_and_restore(tmp_path: Path) -> None:
    text = " ".join((ROOT / "docs" / "backup.md").read_text(encoding="utf-8").split())
    ((of_dump, of_restore),) = re.findall(r"the user of `dump` needs `(.*?)`, and that of `restore` `(.*?)`", text)
    directory = str(tmp_path / "dump")
    with start_server() as server, server.client() as client:
        set_block(client, "chat-7", 0, SHAPE)
        for name, rights in (("dump", of_dump), ("restore", of_restore)):
            client.execute_command("ACL", "SETUSER", name, "on", ">word", "~*", "-@all", *rights.split())
            code, _, errors = kvpage(name, directory, url=server.url.replace("//", f"//{name}:word@"))
            assert code == 0, errors
            client.flushall()


def test_the_documented_user_may_run_redis_exporter_queries(tmp_path: Path) -> None:
    (configuration,) = blocks(WATCH, "conf")
    file = tmp_path / "kvpage.conf"
    file.write_text(configuration, encoding="utf-8")
    questions = [
        "CLIENT SETNAME exporter",
        "CONFIG GET *",
        "INFO ALL",
        "LATENCY LATEST",
        "SLOWLOG LEN",
    ]
    with start_server(file=file) as server, server.client(username="metrics", password="a-third-password") as client:
        for question in questions:
            client.execute_command(*question.split())
        with pytest.raises(NoPermissionError):
            client.set("a", "b")
        for question in ("GET a", "SLOWLOG GET 1"):
            with pytest.raises(NoPermissionError):
                client.execute_command(*question.split())
    with start_seen_server("--requirepass", "another", file=file) as seen:
        assert seen.metrics(auth=("metrics", "a-third-password"))["kvpage_blocks",] == 0
