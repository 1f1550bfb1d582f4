"""The compiled half of the core. It is optional: where it cannot be built, its Python twin runs instead."""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

SOURCES = sorted(Path("kvpage_server/core/native").glob("*.pyx"))

setup(
    ext_modules=cythonize(
        [
            Extension(
                f"kvpage_server.core.native.{source.stem}",
                [str(source)],
                define_macros=[("XXH_INLINE_ALL", None)],
                extra_compile_args=["-O3"],
                optional=True,
            )
            for source in SOURCES
        ],
        compiler_directives={"language_level": "3", "boundscheck": False, "wraparound": False, "cdivision": True},
    )
)
