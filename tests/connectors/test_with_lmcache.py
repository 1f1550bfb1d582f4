"""LMCache's own benchmark and checks, with the plugin and the clients of docs/lmcache.md, on kvpage and on Valkey."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import documents
import pytest
from servers import start_server

from benchmarks.servers import start_valkey

ROOT = documents.ROOT
PORT = 9221  # of the documented configurations
ADAPTERS = {json.loads(text)["type"]: text for text in documents.blocks("docs/lmcache.md", "json")}
(REMOTE,) = documents.blocks("docs/lmcache.md", "yaml")
LMCACHE = os.environ.get("LMCACHE") or shutil.which("lmcache")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "connectors")])}
STORES = [("plugin", "kvpage"), ("resp", "kvpage"), ("valkey", "kvpage"), ("resp", "Valkey"), ("valkey", "Valkey")]

needs_lmcache = [
    pytest.mark.lmcache,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not LMCACHE, reason="`make test-connectors` runs it; LMCACHE=... says where its command is"),
]
on_stores = pytest.mark.parametrize(("adapter", "store"), STORES, ids=[f"{one} on {other}" for one, other in STORES])


def test_documented_configurations_name_plugin_and_clients() -> None:
    assert [*ADAPTERS] == ["plugin", "resp", "valkey"]
    assert f'remote_url: "redis://127.0.0.1:{PORT}"' in REMOTE


@contextmanager
def running(store: str, adapter: str) -> Iterator[dict[str, Any]]:
    """Run a store, and yield the documented configuration of an adapter with its port."""
    server = start_server("--maxmemory", "2gb") if store == "kvpage" else start_valkey()
    with server as started:
        config = json.loads(ADAPTERS[adapter].replace(str(PORT), str(started.port)))
        patient = {"request_timeout": 60, "connection_timeout": 60} if adapter == "valkey" else {}  # a busy machine
        yield {**config, **patient}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


class TestLmcache:
    """Programs of LMCache."""

    pytestmark = needs_lmcache

    @on_stores
    def test_its_benchmark_compares_every_byte(self, adapter: str, store: str) -> None:
        """Its own benchmark stores, looks up, reads and compares."""
        with running(store, adapter) as config:
            words = ["bench", "l2", "--l2-adapter", json.dumps(config), "--num-keys", "32", "--data-size-kb", "256"]
            run(str(LMCACHE), *words, "--rounds", "3", "--no-skip-verify", "--lookup-max-hit-rate", "1.0")

    @on_stores
    @pytest.mark.parametrize(("faults", "loaded"), [([], 8), ([2, 5], 6)], ids=["alone", "with faults"])
    def test_its_check_of_adapters(self, adapter: str, store: str, faults: list[int], loaded: int) -> None:
        """Its own check, also through its adapter that makes loads fail."""
        python = str(Path(str(LMCACHE)).with_name("python"))
        with running(store, adapter) as config:
            if faults:
                config = {"type": "fault_inject", "gap_indices": faults, "inner": config}
            words = ["-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--model", "m", "--num-keys", "8"]
            output = run(python, *words, "--l2-adapter", json.dumps(config))
        assert [line.strip() for line in output.splitlines() if "Validation" in line] == [
            "Validation: 8/8 correctly absent",
            "Validation: 8/8 found",
            f"Validation (loaded): {loaded}/8",
            f"Validation (content): {loaded}/8",
        ]

    def test_its_memory_and_wrapper_with_the_serde(self) -> None:
        """Objects are equal after a store and a load, and take three quarters of their bytes."""
        python = str(Path(str(LMCACHE)).with_name("python"))
        with start_server() as server:
            output = run(python, str(Path(__file__).with_name("lmcache_host.py")), server.url)
        told = json.loads(output.partition("RESULT ")[2])
        assert (told["stored"], told["found"], told["equal"]) == (True, [True] * 4, [True] * 4)
        assert len(told["sizes"]) == 4
        assert max(told["sizes"]) < 0.751 * told["raw"]

    def test_its_check_of_the_remote_backend(self, tmp_path: Path) -> None:
        """Its own check of a remote, which uses redis-py."""
        python = Path(str(LMCACHE)).with_name("python")
        with start_server() as server:
            config = tmp_path / "lmcache.yaml"
            config.write_text(REMOTE.replace(str(PORT), str(server.port)), encoding="utf-8")
            process = subprocess.Popen(
                [python, "-m", "lmcache.v1.basic_check", "--mode", "test_remote"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                env={**ENVIRONMENT, "LMCACHE_CONFIG_FILE": str(config)},
            )
            assert process.stdout
            received = []
            for line in process.stdout:
                received.append(line)
                if "Performance Results" in line:  # its threads keep it from ending, whatever server it talked to
                    break
            process.kill()
            process.wait()
            process.stdout.close()
            assert "  Validation (content correct): 5/5 passed (100.0%)\n" in received, "".join(received)
