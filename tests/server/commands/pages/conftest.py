"""The page commands do the same in memory, with a disk below, and in front of a Valkey Cluster: the tests run on each.

What can't hold before a cluster is named here, with the reason, and has to fail there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from servers import RunningServer, start_server

from benchmarks.valkey_cluster import Cluster

MODULES = ("test_blocks", "test_page_protection", "test_page_queries")
LISTS = "a cluster does not know which pages there are: not of a request, nor how many"
ONE_BY_ONE = "in a cluster, pages that were written one by one are no block"
AS_ONE = "in a cluster, a page of a block lives and dies with its block"
LEASES = "a cluster pins nothing, and its leases are times to live"
TRANSACTIONS = "a gateway has no transactions"
COUNTS = "a gateway does not count misses by reason in INFO, and has no coded blocks"
NOT_BEFORE_A_CLUSTER = {
    LISTS: (
        "test_each_page_of_a_block_is_a_key",
        "test_a_block_takes_the_place_of_a_larger_one",
        "test_bad_blocks_leave_no_keys",
        "test_in_resp2_a_map_is_a_flat_array",
        "test_a_request_is_deleted_whole_and_nothing_else",
        "test_blocks_of_a_request_are_deleted",
        "test_pages_that_have_expired_are_neither_counted_nor_listed",
        "test_the_index_lists_the_pages_of_each_block",
        "test_commands_without_replies_are_executed",
        "test_intact_pages_verify",
        "test_bad_arguments_about_requests_are_refused_by_name",
    ),
    ONE_BY_ONE: (
        "test_pages_set_one_by_one_are_a_block_once_it_is_complete",
        "test_any_shape_is_written_and_read",
        "test_overwriting_one_page_changes_the_block",
        "test_a_page_of_another_shape_makes_the_block_incomplete",
    ),
    AS_ONE: (
        "test_a_block_without_one_of_its_pages_is_not_there",
        "test_when_one_page_expires_the_block_is_not_there",
        "test_a_prefix_counts_no_block_of_which_a_page_has_expired",
    ),
    LEASES: (
        "test_exactly_the_counted_prefix_is_leased",
        "test_only_the_longest_length_is_leased",
        "test_protection_is_from_eviction_alone",
        "test_a_lease_is_prolonged_never_cut_short",
        "test_protected_memory_counts_as_it_grows",
    ),
    COUNTS: ("test_a_block_in_another_shape_is_a_counted_miss",),
    TRANSACTIONS: (
        "test_a_block_expires_as_one",
        "test_a_deletion_in_a_transaction_precedes_the_next_command",
    ),
}
WHY_NOT = {name: reason for reason, names in NOT_BEFORE_A_CLUSTER.items() for name in names}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of these modules that needs a server runs on each kind."""
    if metafunc.module.__name__ in MODULES and "server" in metafunc.fixturenames:
        reason = WHY_NOT.get(metafunc.definition.originalname)
        marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
        kinds = ("memory", "tiered", pytest.param("cluster", marks=marks))
        metafunc.parametrize("server", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def tiered() -> Iterator[RunningServer]:
    """One with a disk."""
    with start_server("--store", "tiered", "--maxmemory", "2gb") as server:
        yield server


@pytest.fixture(scope="session")
def gateway(masters: Cluster) -> Iterator[RunningServer]:
    """One that keeps nothing, in front of a cluster."""
    with start_server("--store", "cluster", "--cluster-nodes", masters.addresses) as server:
        yield server


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, server: RunningServer) -> RunningServer:
    """A server of the kind that a test is to run on: one in memory unless it is said."""
    other = {"tiered": "tiered", "cluster": "gateway"}.get(getattr(request, "param", "memory"))
    found: RunningServer = request.getfixturevalue(other) if other else server
    return found


@pytest.fixture
def client(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[redis.Redis]:
    """A client of the emptied server, or of a gateway whose cluster was emptied."""
    with server.client() as client:
        if is_gateway(server):
            for node in request.getfixturevalue("masters").masters:
                node.ask("FLUSHALL")
        else:
            client.flushall()
        yield client


@pytest.fixture
def tier(server: RunningServer) -> str:
    """Return the tier of a page that was just written."""
    return "cluster" if is_gateway(server) else "memory"


def is_gateway(server: RunningServer) -> bool:
    words = server.process.args
    return isinstance(words, list) and "--cluster-nodes" in words
