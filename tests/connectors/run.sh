#!/bin/sh
# Runs the tests of the connectors with the real vLLM on the CPU. Arguments are those of pytest.
#
# vLLM has an environment of its own, because its packages conflict with those of the engine. It is outside the checkout,
# in ~/.cache/kvpage/vllm or the folder named by KVPAGE_VLLM_ENV, takes 2 GB, and is made anew when vllm.txt or the version
# of Python changes. Where PyTorch for the CPU cannot be installed, nothing is tested, and the last line says so.
set -eu

cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
environment=${KVPAGE_VLLM_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpage/vllm}
pins=tests/connectors/vllm.txt

install() {
    "$environment/bin/python" -m pip install -qq --no-deps "$@"
}

wanted=$("$python" --version; cat "$pins")
if [ "$wanted" != "$(cat "$environment/installed" 2>/dev/null)" ]; then
    echo "Installing vLLM into $environment" >&2
    rm -rf "$environment"
    mkdir -p "$environment"
    "$python" -m venv "$environment"
    torch=$(grep '^torch==' "$pins")
    install "$torch" 2>/dev/null || install --retries 1 --index-url https://download.pytorch.org/whl/cpu "$torch" || {
        echo "SKIPPED: $torch cannot be installed here, so the connectors were not tested with vLLM" >&2
        exit 0
    }
    install -r "$pins"
    echo "$wanted" >"$environment/installed"
fi

KVPAGE_VLLM=$environment/bin/python exec "$python" -m pytest -m vllm -s -rs tests/connectors "$@"
