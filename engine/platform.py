"""Settings of the process before the import of MLX: memory allocator, limit of open files, and BLAS."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import resource
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from kvpage_server.system.process import ARENA_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD, tune_malloc

# -- freed memory ------------------------------------------------------------------------------------------------------
# New memory from the system costs a page fault for every 4 KiB: on a virtual machine up to a second for a gigabyte,
# which is longer than to receive or copy a context. MLX's CPU backend keeps 32 MiB of freed memory. glibc returns the
# rest to the system, and requests it again for the next context. So glibc is configured to keep it. A process then
# keeps no more than its peak, and the block pool limits that.

_KEPT_BYTES = 512 << 20  # of free memory at the end of the heap: a few contexts of a few thousand tokens
_LARGEST_BYTES = 32 << 20  # glibc's maximum; larger blocks are mapped, and unmapped when freed


def keep_freed() -> bool:
    """Make glibc keep freed memory for later requests. Return False with another C library. Must be called before
    threads start.

    All threads then share one heap, so that memory that one thread has received a block into, and another has freed, is
    used again by both.
    """
    return tune_malloc({ARENA_MAX: 1, MMAP_THRESHOLD: _LARGEST_BYTES, TRIM_THRESHOLD: _KEPT_BYTES})


# -- open files --------------------------------------------------------------------------------------------------------
# An import of mlx_lm sets the limit of open files to 2048, and the hard limit to 4096, which only root could raise
# again. A server with many clients needs more, so the limits are kept.

OTHERS = 256  # file descriptors that a server needs in addition to one for each client


def import_mlx_lm() -> None:
    """Import mlx_lm and leave the limit of open files as it is."""
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda which, limits: None
    try:
        importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = setrlimit


# -- openblas ----------------------------------------------------------------------------------------------------------
# On Linux, MLX's CPU wheel links the reference BLAS, which is single-threaded and 20 to 30 times slower. Its symbols
# (``cblas_sgemm`` and friends) are looked up in the process's global scope first, so an OpenBLAS that was loaded there
# before MLX takes their place, as with ``LD_PRELOAD``, but without a second process.

log = logging.getLogger(__name__)

THREADS_SET = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")  # the variables that OpenBLAS reads
ADVICE = (
    "pip install ngsolve-openblas (x86-64), or the package libopenblas0-pthread (Debian) or openblas-threads (Fedora)"
)


def prefer_openblas() -> bool:
    """Load OpenBLAS for MLX's matrix products. Return True if it is loaded. Must be called before the first import of
    mlx.

    Return False, without a change, on another system than Linux, without MLX's CPU wheel, if MLX is already imported,
    without OpenBLAS on this machine, or with ``KVPAGE_BLAS=stock`` in the environment. Raises ValueError for any other
    KVPAGE_BLAS than "openblas" (the default) and "stock".
    """
    choice = os.environ.get("KVPAGE_BLAS", "openblas")
    if choice not in ("openblas", "stock"):
        raise ValueError(f"KVPAGE_BLAS must be openblas or stock, got {choice!r}")
    bundled = _directory("mlx", "../mlx_cpu.libs") if sys.platform == "linux" else None
    if choice == "stock" or bundled is None or "mlx.core" in sys.modules:
        return False
    for library in _libraries():
        try:
            loaded = _load(library, bundled)
        except OSError as error:
            log.debug("%s is of no use: %s", library, error)
            continue
        if hasattr(loaded, "cblas_sgemm"):
            _limit_threads(loaded)
            log.debug("MLX multiplies with %s", library)
            return True
    log.info("MLX multiplies with its slow reference BLAS. For 20 times the speed: %s", ADVICE)
    return False


def _limit_threads(library: ctypes.CDLL) -> None:
    """Set OpenBLAS's number of threads to a quarter of the cores, at least one, unless the environment sets a number.

    OpenBLAS uses all cores by default, and its threads wait for each other at every multiplication. While another
    program uses one of these cores, the model runs many times slower. docs/engine.md has the measurement.
    """
    if not any(name in os.environ for name in THREADS_SET) and hasattr(library, "openblas_set_num_threads"):
        library.openblas_set_num_threads(max(1, len(os.sched_getaffinity(0)) // 4))


def _libraries() -> Iterator[Path]:
    """Yield the possible paths of OpenBLAS: builds from PyPI, Debian and Fedora, and names for the linker.
    Multi-threaded builds are first.
    """
    if wheel := _directory("ngsolve_openblas"):
        yield from wheel.glob("libopenblas*.so*")
    yield from Path("/usr/lib").glob("*-linux-gnu/openblas-pthread/libopenblas.so.0")
    yield from (Path("libopenblasp.so.0"), Path("libopenblas.so.0"))


def _load(library: Path, bundled: Path) -> ctypes.CDLL:
    """Load `library` into the process's global scope, and return it. `bundled` is the directory of libraries in MLX's
    wheel. Raises OSError.

    PyPI's build of OpenBLAS needs libgfortran.so.5, which few machines have. MLX's wheel has it under another name, in
    `bundled`. Links to both in one directory let the loader find it.
    """
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    with TemporaryDirectory() as directory:
        link = Path(directory, library.name)
        link.symlink_to(library)
        for quadmath in bundled.glob("libquadmath*"):
            ctypes.CDLL(str(quadmath))
        for fortran in bundled.glob("libgfortran*.so.5*"):
            link.with_name("libgfortran.so.5").symlink_to(fortran)
        return ctypes.CDLL(str(link), mode=ctypes.RTLD_GLOBAL)


def _directory(package: str, relative: str = ".") -> Path | None:
    """Return the directory at the path `relative` to an installed package, without importing the package. Return None
    if it does not exist.
    """
    spec = find_spec(package)
    places = [Path(place, relative) for place in (spec.submodule_search_locations or [])] if spec else []
    return next((place.resolve() for place in places if place.is_dir()), None)
