"""The page commands of `test_page_commands`, with a disk below, and in front of a Valkey Cluster."""

from __future__ import annotations

from typing import Any, ClassVar
from unittest import skip

import pytest
import test_page_commands as there
from servers import RunningServer

CASES = (
    there.BadInputTest,
    there.BatchTest,
    there.DocumentedExampleTest,
    there.ExpiryTest,
    there.OneKeyspaceTest,
    there.SetAndGetTest,
)


@pytest.fixture(scope="class", autouse=True)
def running(request: pytest.FixtureRequest) -> None:
    """The server of a class's kind."""
    request.cls.server = request.getfixturevalue(request.cls.kind)


class OnTiered(there.PageCommandsTest):
    kind: ClassVar = "tiered"
    server: ClassVar[RunningServer]

    def port(self) -> int:
        return self.server.port


class OnCluster(OnTiered):
    kind: ClassVar = "gateway"
    has_mset = False  # each node of a cluster has a part of the keys

    def forget(self, req: Any) -> None:
        """A cluster does not know which pages a request has. Each test has a request of its own."""


def on(place: type[OnTiered]) -> dict[str, type]:
    """The cases with servers of a kind."""
    return {f"{case.__name__}{place.__name__}": type(case.__name__, (place, case), {}) for case in CASES}


globals().update({**on(OnTiered), **on(OnCluster)})
globals()["ExpiryTestOnCluster"].test_an_unused_page_expires_too = skip(
    "in a gateway nothing expires: the cluster's nodes count what does"
)(there.ExpiryTest.test_an_unused_page_expires_too)
