"""Packages of npm that the tests use: those in tests/node/package.json."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = Path(__file__).parents[1] / "node"


def installed() -> Path:
    """Return the folder with the scripts and their packages. npm fetches packages that are missing. Without node the
    test is skipped.
    """
    for tool in ("node", "npm"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed")
    wanted = json.loads((NODE / "package.json").read_text(encoding="utf-8"))["dependencies"]
    if not all((NODE / "node_modules" / name).exists() for name in wanted):
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--prefix", str(NODE)]
        got = subprocess.run(command, cwd=NODE, capture_output=True, encoding="utf-8", timeout=100)
        assert got.returncode == 0, got.stderr
    return NODE
