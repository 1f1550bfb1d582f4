"""The cores that are there: the plain one, and the compiled one where it was built."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

import pytest

from kvpage_server.core import python

CORES: list[Any] = [python]
with suppress(ImportError):
    CORES.append(importlib.import_module("kvpage_server.core.native"))

on_each_core = pytest.mark.parametrize("core", CORES, ids=[core.__name__.rsplit(".", 1)[-1] for core in CORES])
