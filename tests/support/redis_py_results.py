"""A pytest plugin for redis-py's own tests, which run in a process of their own: writes how each ended, as JSON."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_ended: dict[str, tuple[str, str]] = {}  # by test: passed, failed or skipped, and the error


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path)


def pytest_configure() -> None:
    vars(tracemalloc)["start"] = _nothing  # which every test would pay for


def _nothing() -> None:
    """Start nothing."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report = yield
    if report.failed or (item.nodeid not in _ended and (report.skipped or report.when == "call")):
        _ended[item.nodeid] = (report.outcome, call.excinfo.exconly() if call.excinfo is not None else "")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.getoption("--results").write_text(json.dumps(_ended), encoding="utf-8")
