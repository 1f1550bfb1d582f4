"""docs/scaling.md: its programs and commands, run on servers and clusters of their own."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from pathlib import Path

from documents import ROOT, blocks, check_program, commands, entry_point
from servers import free_port, start_server
from waiting import PATIENCE

from benchmarks import valkey_cluster
from engine.commands import serve

DOCUMENT = "docs/scaling.md"
SIDE_BY_SIDE, CLUSTER, SIZES = blocks(DOCUMENT, "python")


def test_the_client_of_several_servers_writes_and_reads() -> None:
    with start_server() as first, start_server() as second:
        program = SIDE_BY_SIDE.replace("a:9221", f"127.0.0.1:{first.port}")
        program = program.replace("b:9221", f"127.0.0.1:{second.port}")
        check_program(program + "print(client.prefix([(b'absent', 0)], pages_per_block=1))  # 0\n")


def test_the_program_for_a_cluster_prints_its_comments() -> None:
    with valkey_cluster.run(replicas=False) as cluster:
        check_program(CLUSTER.replace("127.0.0.1:7000,127.0.0.1:7001", cluster.addresses))


def test_a_gateway_starts_with_the_documented_options() -> None:
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    [typed] = re.findall(r"^    kvpage-server (--store cluster .*)$", text, re.MULTILINE)
    with valkey_cluster.run(replicas=False) as cluster:
        typed = typed.replace("10.0.0.1:7000,10.0.0.2:7000", cluster.addresses)
        with start_server(*shlex.split(typed), port=free_port()) as gateway, gateway.client() as client:
            assert client.set("key", "value")
            assert client.mget("key", "absent") == [b"value", None]


def test_the_engine_accepts_the_documented_stores() -> None:
    [block] = [block for block in blocks(DOCUMENT, "text") if "kvpage-engine" in block]
    parser = argparse.ArgumentParser()
    serve.add_to(parser.add_subparsers())
    for line in block.splitlines():
        program, *words = shlex.split(line)
        assert program == "kvpage-engine"
        assert "," in parser.parse_args(words).store


def test_the_replay_prints_the_documented_columns(tmp_path: Path) -> None:
    [(typed, shown)] = commands(DOCUMENT)
    program, *words = shlex.split(typed)
    requests = [{"timestamp": 1000 * at, "hash_ids": [0, 1 + at % 7, 100 + at]} for at in range(50)]
    (tmp_path / words[1]).write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    done = subprocess.run(
        [*entry_point(program), *words],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"},
    )
    [title] = [line for line in shown.splitlines() if line.startswith("segment")]
    assert title.split() in [line.split() for line in done.stdout.splitlines()]
    assert (tmp_path / words[-1]).read_bytes().startswith(b"\x89PNG")


def test_the_arithmetic_has_the_documented_result() -> None:
    check_program(SIZES)
