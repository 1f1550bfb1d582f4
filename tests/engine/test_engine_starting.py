"""An engine that is loading prints its steps, and can be stopped at any moment."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from api_engines import SMOLLM2, write_family, write_tiny

# isort: split
import mlx.core as mx

WITHIN = 60.0  # seconds


@contextmanager
def serving(model: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "engine.cli", "serve", "--model", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[bytes], text: str) -> str:
    """Return its output up to a line with that text, or to its end."""
    assert process.stdout
    output, end = b"", time.monotonic() + WITHIN
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while text.encode() not in output and selector.select(end - time.monotonic()):
            if not (more := os.read(process.stdout.fileno(), 1 << 16)):
                break
            output += more
    return output.decode()


@pytest.mark.model
@pytest.mark.parametrize(
    ("after", "seconds"),
    [("importing MLX", 0.3), ("loading the weights", 0.0), ("hashing the weights", 0.3)],
)
def test_a_signal_while_the_model_loads_ends_the_engine_well(after: str, seconds: float) -> None:
    """Nothing is to be kept yet: it is not waited for."""
    with serving(SMOLLM2) as process:
        output = read_until(process, after)
        assert after in output
        time.sleep(seconds)
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        output += read_until(process, "never said")
        assert process.wait(WITHIN) == 0, output
        assert time.monotonic() - begun < WITHIN / 2
        assert "Traceback" not in output
        assert "is served on" not in output or seconds


def test_long_steps_of_loading_are_printed(tmp_path: Path) -> None:
    with serving(write_tiny(tmp_path / "tiny")) as process:
        output = read_until(process, "is served on")
        lines = [
            "importing MLX",
            "loading the weights of ",
            "hashing the weights",
            "memory: weights ",
            "tiny was loaded in ",
            "is served on",
        ]
        places = [output.find(line) for line in lines]
        assert places == sorted(places)
        assert min(places) >= 0, output
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN) == 0


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="a GPU computes experts in 16 bits")
def test_a_model_that_mlx_cannot_compute_ends_the_start(tmp_path: Path) -> None:
    with serving(write_family(tmp_path / "experts", "gpt_oss", mx.float16)) as process:
        output = read_until(process, "is served on")
        assert output.splitlines()[-1].startswith("kvpage-engine: experts cannot be computed on this machine: ")
        assert "float32" in output
        assert process.wait(WITHIN) == 1
