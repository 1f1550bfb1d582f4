"""One kvpage-server and one redis-server for all tests that need no options of their own."""

from __future__ import annotations

import gc
import importlib
import os
import re
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest
import redis
import surroundings
from servers import NO_REDIS, REDIS_SERVER, RunningServer, start_redis, start_server
from xdist.scheduler import LoadFileScheduling

from benchmarks import valkey_cluster
from benchmarks.valkey_cluster import Cluster
from kvpage_server import core
from kvpage_server.core.choice import STALE

surroundings.make_usual()
surroundings.keep_limit_of_open_files()
surroundings.share_certificates()
_DATA = TemporaryDirectory()  # a server without options writes nothing to the user's home directory
os.environ["XDG_DATA_HOME"] = _DATA.name
importlib.import_module("engine")  # it chooses the BLAS, before a test imports MLX
gc.disable()  # until all is imported

# Other load on the machine is no failure; the same examples are tried again. `make soak` tries new ones.
hypothesis.settings.register_profile("the same again", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.register_profile("anything", deadline=None, max_examples=300)
hypothesis.settings.load_profile("the same again")


def pytest_configure() -> None:
    """Refuse to test a core that was compiled from other sources."""
    if core.REASON == STALE:
        raise pytest.UsageError(f"the page core would not run: {core.REASON}. To compile it: make core")


SHARED = {  # a process, by tests in several files, because they share an engine
    "families": re.compile("test_engine_families"),
    "frameworks": re.compile("tests/frameworks"),
    "smollm2": re.compile(r"test_api_framework_requests|test_api_text|test_api_\w+\.py::test_\w*real_model"),
}


APART = re.compile("test_known_failing_seeds_pass")  # tests of half a minute each, for any process


class ByFile(LoadFileScheduling):
    """A file's tests run in one process, and so do those of an entry of SHARED. Each test of APART is a unit."""

    def _split_scope(self, nodeid: str) -> str:
        if APART.search(nodeid):
            return nodeid
        file: str = super()._split_scope(nodeid)
        return next((group for group, tests in SHARED.items() if tests.search(nodeid)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


SLOW = re.compile(  # modules that start servers by the dozen, compile, or wait for a clock
    r"test_(access|app|async_several|bench|clients|cluster_client|cluster_faults|cold|cold_commands|core_choice|crash|"
    r"defaults|differential|disk|disk_full|disk_policies|full_disk_after_restart|gateway|guesses|hostile_dumps|kvpage_cli|"
    r"kvpage_cli_several|limits|many_names|mapped|monitor|private_files|quotas|redis_py_suite|redis_tools|renewal|"
    r"replay|shares|signals|snapshot|stalls|storm|stress|tiered|tls)"
)
LONG = re.compile(  # modules that would keep a core busy alone at the end
    r"test_(agent_engines_shared|api_agents|api_calls|api_diagnosis|api_doc|api_framework_requests|api_lifetimes|"
    r"api_models|api_page|cluster_faults|core_choice|demo|disk_full|engine_benchmarks|engine_every_family|"
    r"engine_families.*|engine_hub|engine_quantised_batch|engine_trial|first_paths|gateway|hostile_dumps|monitor|"
    r"openai_package|redis_py_suite|simulation|small_values|store_page|wheel)"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that take long are marked as such in one place, and begin first: one process runs all of a module."""
    for item in items:
        if SLOW.fullmatch(item.path.stem):
            item.add_marker("slow")
    items.sort(key=lambda item: not LONG.fullmatch(item.path.stem))


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that later garbage collections are short."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Disable garbage collections, which scan every object that tests have imported."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """A kvpage-server. Other tests leave keys in it: flush first, or use keys of your own."""
    with start_server("--maxmemory", "2gb") as server:
        yield server


@pytest.fixture(scope="session")
def second_server() -> Iterator[RunningServer]:
    """Another kvpage-server, in addition to the first."""
    with start_server("--maxmemory", "2gb") as server:
        yield server


@pytest.fixture(scope="session")
def masters() -> Iterator[Cluster]:
    """Three masters of a Valkey Cluster, which are patient with each other."""
    with valkey_cluster.run("--cluster-node-timeout", "60000", replicas=False) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RunningServer]:
    """Debian's redis-server, to compare with."""
    if not REDIS_SERVER:
        pytest.skip(NO_REDIS)
    with start_redis() as server:
        yield server


@pytest.fixture(params=["kvpage-server", "redis-server"])
def either_server(request: pytest.FixtureRequest) -> RunningServer:
    """Each of the two in turn, emptied."""
    name = "server" if request.param == "kvpage-server" else "redis_server"
    either: RunningServer = request.getfixturevalue(name)
    with either.client() as client:
        client.flushall()
    return either


@pytest.fixture
def client(server: RunningServer) -> Iterator[redis.Redis]:
    """A client of the emptied server."""
    with server.client() as client:
        client.flushall()
        yield client
