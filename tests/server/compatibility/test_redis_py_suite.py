"""redis-py's own tests against kvpage-server: each test that fails here and not on redis-server is listed with a
reason.

They come with redis-py's source, which pip gets from the index it is configured for. Tests of missing commands are
recognised by their error. docs/compatibility.md lists the other failing tests, and is read here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from archives import unpack
from servers import NO_REDIS, REDIS_SERVER, RunningServer, start_redis, start_server
from test_differential import table_under

from kvpage_server.commands.access.user import ABSENT

ROOT = Path(__file__).parents[3]
SUITES = [
    ["tests/test_commands.py"],
    [f"tests/test_{name}.py" for name in ("pipeline", "pubsub", "encoding", "monitor", "cache")],
]
# Of other servers than the one they are given: sentinels, one with TLS, one on port 6379.
ELSEWHERE = "not TestSentinel and not TestSSL and not test_client_setinfo"
MARKS = "not redismod and not onlycluster and not replica and not ssl and not cp_integration and not experimental"

Results = dict[str, tuple[str, str]]  # by test: passed, failed or skipped, and the error


@pytest.fixture(scope="module")
def sources() -> Path:
    """The source of the redis-py that is installed, with its tests; got once."""
    folder = ROOT / "build" / f"redis-{redis.__version__}"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as place:
            wanted = f"redis=={redis.__version__}"
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--no-binary",
                ":all:",
                "-d",
                place,
                wanted,
            ]
            try:
                got = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)
            except subprocess.TimeoutExpired:
                pytest.skip("pip gets no source of redis-py in time")
            if got.returncode:
                pytest.skip(f"pip gets no source of redis-py: {got.stderr.strip().splitlines()[-1:]}")
            [archive] = Path(place).glob("*.tar.gz")
            unpack(archive, Path(place))
            shutil.copytree(Path(place, folder.name), folder)
    return folder


def ended(sources: Path, server: RunningServer, tests: list[str]) -> Results:
    """How tests of redis-py end on a server."""
    with tempfile.TemporaryDirectory() as place:
        results = Path(place, "results")
        options = ["-p", "redis_py_results", "--results", str(results), "--redis-url", f"{server.url}/0"]
        options += ["-p", "no:cacheprovider", "-o", "addopts=", "-q", "--tb=no", "-W", "ignore", "--timeout", "20"]
        command = [sys.executable, "-m", "pytest", *options, "-m", MARKS, "-k", ELSEWHERE, *tests]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "support")}
        run = subprocess.run(command, cwd=sources, env=environment, capture_output=True, encoding="utf-8", timeout=900)
        assert results.exists(), run.stdout[-2000:] + run.stderr[-2000:]
        found: Results = json.loads(results.read_text(encoding="utf-8"))
        return found


def concerns_what_is_absent(error: str) -> bool:
    """Whether a test failed because a command of Redis does not exist here."""
    found = re.search(r"unknown (?:sub)?command '?([^' ,]+)", error)
    names = {part for name in ABSENT for part in name.split("|")}
    return found is not None and found[1].lower() in names


def cannot_run(error: str) -> bool:
    """Whether a test failed before it asked anything: it wants a fixture that redis-py's tests have not."""
    return "FixtureLookupError" in error


def bare(name: str) -> str:
    """A test's name without its file, class and parameters."""
    return name.rpartition("::")[2].partition("[")[0]


@pytest.mark.timeout(1000)
@pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)
def test_each_failing_test_has_a_reason(sources: Path) -> None:
    def run(tests: list[str]) -> Results:
        with start_server("--store", "tiered") as server:
            return ended(sources, server, tests)

    with ThreadPoolExecutor() as pool:
        here = {name: end for results in pool.map(run, SUITES) for name, end in results.items()}
    failed = [
        name
        for name, (outcome, error) in here.items()
        if outcome == "failed" and not concerns_what_is_absent(error) and not cannot_run(error)
    ]
    with start_redis() as theirs:
        there = ended(sources, theirs, failed)
    known = {test for names in table_under("Tests of redis-py that fail here") for test in names.split(", ")}
    different = {name for name in failed if there[name][0] != "failed"}
    news = [name for name in sorted(different) if bare(name) not in known]
    for _ in range(3):  # some look at the clock, and the machine may have been busy
        again = run(news) if news else {}
        different -= {name for name in news if again[name][0] == "passed"}
        news = sorted({*news} & different)
    received = "".join(f"\n{name}: {here[name][1][:300]}" for name in sorted(different))
    assert set(map(bare, different)) == known, received
    assert sum(outcome == "passed" for outcome, _ in here.values()) > 300
