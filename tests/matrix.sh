#!/bin/sh
# Runs quick tests with the oldest and with the newest version of every dependency that pyproject.toml allows, each in an
# environment of its own in build/matrix, on a copy of this folder. UV and PYTHON name the programs; ONLY=oldest or
# ONLY=newest runs one of both, and arguments replace the tests.
set -eu

cd "$(dirname "$0")/.."
root=$PWD
[ $# -gt 0 ] || set -- -n 5 -m "not slow and not alone and not soak and not model" tests/server tests/engine/caches \
    tests/engine/tiers tests/engine/test_engine_commands.py tests/engine/api/test_api_agents.py \
    tests/connectors/test_mlx_lm.py tests/packages

run() {  # the name of the environment, how uv resolves, and the tests
    name=$1 resolution=$2
    shift 2
    place=$root/build/matrix/$name
    mkdir -p "$place/checkout"
    [ -x "$place/venv/bin/python" ] || "$UV" venv --quiet --seed --python "$PYTHON" "$place/venv"
    rm -rf "$place/checkout" && mkdir "$place/checkout"
    git ls-files -zco --exclude-standard | xargs -0 ls -d 2>/dev/null | tar cf - -T - | tar xf - -C "$place/checkout"
    [ ! -e models ] || ln -s "$root/models" "$place/checkout/models"
    cd "$place/checkout"
    echo "matrix: the $name dependencies" >&2
    "$UV" pip install --quiet --python "$place/venv/bin/python" --resolution "$resolution" --editable '.[dev]'
    "$UV" pip list --quiet --python "$place/venv/bin/python" --format freeze >"$place/versions.txt"
    "$place/venv/bin/python" -m pytest "$@"
    cd "$root"
}

[ "${ONLY:-oldest}" != oldest ] || run oldest lowest-direct "$@"
[ "${ONLY:-newest}" != newest ] || run newest highest "$@"
