"""OpenBLAS under MLX: it takes effect on a Linux CPU, can be turned off, and harms nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

PRODUCT = """
import engine, mlx.core as mx, numpy as np
a, b = (np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in ((64, 4000), (4000, 64)))
product = np.array(mx.array(a) @ mx.array(b))
print(np.abs(product - a.astype(np.float64) @ b.astype(np.float64)).max() < 1e-3, product.tobytes().hex())
"""


def run(code: str, **environment: str) -> str:
    """Return the output of a new Python that runs `code`. MLX binds its symbols once a process."""
    clean = {name: value for name, value in os.environ.items() if name != "KVPAGE_BLAS"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, encoding="utf-8", timeout=60
    )
    return result.stdout + result.stderr


def loads_openblas() -> bool:
    return run("from engine.platform import prefer_openblas; print(prefer_openblas())") == "True\n"


needs_openblas = pytest.mark.skipif(not loads_openblas(), reason="no OpenBLAS for MLX's CPU wheel here")


@pytest.mark.skipif(find_spec("ngsolve_openblas") is None, reason="has wheels for Linux on x86-64 only")
def test_the_wheel_that_the_engine_depends_on_is_enough() -> None:
    mapped = run("import engine, mlx.core; print(open('/proc/self/maps').read())")
    assert "site-packages/ngsolve_openblas/libopenblas" in mapped


@needs_openblas
def test_mlx_multiplies_with_it_once_the_engine_is_imported() -> None:
    """Each library rounds in its own way: OpenBLAS adds 4,000 terms in parts of some hundred, with every kernel."""
    (right, product), (stock_right, stock_product) = run(PRODUCT).split(), run(PRODUCT, KVPAGE_BLAS="stock").split()
    assert (right, stock_right) == ("True", "True")
    assert product != stock_product
    assert product == run(PRODUCT).split()[1]


def test_it_is_too_late_once_mlx_is_there() -> None:
    assert run("import mlx.core; from engine.platform import prefer_openblas; print(prefer_openblas())") == "False\n"


def test_it_can_be_turned_off() -> None:
    code = "from engine.platform import prefer_openblas; print(prefer_openblas())"
    assert run(code, KVPAGE_BLAS="stock") == "False\n"


def test_a_misspelt_choice_is_refused_with_the_two_there_are() -> None:
    assert "ValueError: KVPAGE_BLAS must be openblas or stock, got 'mkl'" in run("import engine", KVPAGE_BLAS="mkl")


def test_importing_the_engine_does_not_import_mlx() -> None:
    assert run("import engine, sys; print([name for name in sys.modules if name.split('.')[0] == 'mlx'])") == "[]\n"


THREADS = """
import ctypes, engine, re
path = re.search(r"/\\S*libopenblas\\S*", open("/proc/self/maps").read())[0]
print(ctypes.CDLL(path).openblas_get_num_threads())
"""
LIMITS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")


@needs_openblas
def test_openblas_uses_a_quarter_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    assert int(run(THREADS)) == max(1, len(os.sched_getaffinity(0)) // 4)


@needs_openblas
def test_number_of_threads_in_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    assert int(run(THREADS, OPENBLAS_NUM_THREADS="2")) == 2
