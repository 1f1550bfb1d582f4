"""The compiled half of the core. It is optional: where it cannot be built, its Python twin runs instead."""

import os
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

if sys.platform == "win32":
    sys.exit("kvpage runs on Linux and macOS. On Windows, install it in WSL: wsl --install")

NATIVE = Path("kvpage_server/core/native")
SOURCES = sorted(str(path) for pattern in ("*.p[xy][xd]", "*.h") for path in NATIVE.glob(pattern))
DIGEST = runpy.run_path("kvpage_server/core/sources.py")["digest"](NATIVE)
HEADERS = [place for place in ("/opt/homebrew/include", "/opt/local/include") if Path(place, "xxhash.h").exists()]


class BuildCore(build_ext):
    """Builds all modules of the core or none: they know each other's structures, so a part of them is of no use."""

    failed = False

    def initialize_options(self) -> None:
        super().initialize_options()
        self.cython_c_in_temp = True
        self.cython_directives = {"boundscheck": False, "wraparound": False, "cdivision": True}

    def run(self) -> None:
        super().run()
        self._have_all_or_none()  # beside the sources, if it was to be built there

    def build_extensions(self) -> None:
        if not self._compiles():
            self.warn("the C compiler does not work, so the core is not compiled")
            self.failed = True
            self._have_all_or_none()
            return
        self._translate()
        self.parallel = self.parallel or os.cpu_count()  # the C compiler takes most of the time
        super().build_extensions()
        self._have_all_or_none()

    def _compiles(self) -> bool:
        """Return whether the C compiler works. Cython would translate the core in vain for some seconds otherwise."""
        place = Path(self.build_temp)
        place.mkdir(parents=True, exist_ok=True)
        source = place / "empty.c"
        source.write_text("int empty;\n", encoding="utf-8")
        try:
            self.compiler.compile([str(source)], output_dir=str(place))
        except CompileError:
            return False
        return True

    def _translate(self) -> None:
        """Let Cython write the C files, one after the other: it is not made for threads, as the C compiler is."""
        from Cython.Build import cythonize

        options = {"build_dir": self.build_temp, "compiler_directives": self.cython_directives}
        for module, translated in zip(
            self.extensions, cythonize(self.extensions, force=self.force, quiet=True, **options), strict=True
        ):
            module.sources = translated.sources

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception:  # becomes a warning, since the extension is optional
            self.failed = True
            raise

    def _have_all_or_none(self) -> None:
        if self.failed:
            for module in self.extensions:
                Path(self.get_ext_fullpath(module.name)).unlink(missing_ok=True)


setup(
    cmdclass={"build_ext": BuildCore},
    ext_modules=[
        Extension(
            "kvpage_server.core.native." + Path(source).stem,
            [source],
            include_dirs=[str(NATIVE), *HEADERS],
            define_macros=[("XXH_INLINE_ALL", None), ("KVPAGE_SOURCES", f'"{DIGEST}"')],
            depends=SOURCES if Path(source).stem == "built" else [str(path) for path in NATIVE.glob("*.h")],
            extra_compile_args=["-O3"],
            optional=True,
        )
        for source in SOURCES
        if source.endswith(".pyx")
    ],
)
