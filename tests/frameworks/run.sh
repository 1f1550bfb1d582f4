#!/bin/sh
# Runs the tests of the agent frameworks with their real packages and the real small model. Arguments are those of pytest.
#
# The frameworks have an environment of their own, as on a client's machine. It is outside the checkout, in
# ~/.cache/kvpage/frameworks or the folder named by KVPAGE_FRAMEWORKS_ENV, takes 600 MB, and is made anew when
# frameworks.txt or the version of Python changes. The engine runs in the environment of PYTHON.
set -eu

cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
environment=${KVPAGE_FRAMEWORKS_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpage/frameworks}
pins=tests/frameworks/frameworks.txt

wanted=$("$python" --version; cat "$pins")
if [ "$wanted" != "$(cat "$environment/installed" 2>/dev/null)" ]; then
    echo "Installing the agent frameworks into $environment" >&2
    rm -rf "$environment"
    mkdir -p "$environment"
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install -qq --no-deps -r "$pins"
    echo "$wanted" >"$environment/installed"
fi

cd tests/frameworks
KVPAGE_PYTHON=$python exec "$environment/bin/python" -m pytest -c environment.ini -rs "$@"
