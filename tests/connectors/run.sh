#!/bin/sh
# Runs the tests of the connectors with the real vLLM on the CPU. Arguments are those of pytest.
#
# vLLM has an environment of its own, because its packages conflict with those of the engine. It is outside the checkout,
# in ~/.cache/kvpage/vllm or the folder named by KVPAGE_VLLM_ENV, takes 2 GB, and is made anew when vllm.txt or the version
# of Python changes. Where PyTorch for the CPU cannot be installed, nothing is tested, and the last line says so.
#
# QUICK=1 saves and restores one context with the connector and the tier. Each of its two installations may take 200
# seconds; without an environment after that, nothing is tested.
set -eu

cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
environment=${KVPAGE_VLLM_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/kvpage/vllm}
pins=tests/connectors/vllm.txt
limit=
[ -z "${QUICK:-}" ] || limit="timeout 200"

install() {
    $limit "$environment/bin/python" -m pip install -qq --no-deps --no-compile "$@"
}

skip() {
    echo "SKIPPED: $1 cannot be installed here${limit:+ in time}, so the connectors were not tested with vLLM" >&2
    exit 0
}

wanted=$("$python" --version; cat "$pins")
if [ "$wanted" != "$(cat "$environment/installed" 2>/dev/null)" ]; then
    echo "Installing vLLM into $environment" >&2
    rm -rf "$environment"
    mkdir -p "$environment"
    "$python" -m venv "$environment"
    torch=$(grep '^torch==' "$pins")
    install "$torch" 2>/dev/null || install --retries 1 --index-url https://download.pytorch.org/whl/cpu "$torch" ||
        skip "$torch"
    install -r "$pins" || { [ -n "$limit" ] && skip vLLM; exit 1; }
    echo "$wanted" >"$environment/installed"
fi

export KVPAGE_VLLM="$environment/bin/python"
[ -z "${QUICK:-}" ] || timeout 120 "$KVPAGE_VLLM" -c "import vllm._C" 2>/dev/null || skip "vLLM's kernels for this processor"
[ -z "${QUICK:-}" ] || set -- -k "restored_and_failures or interfaces" "$@"
exec "$python" -m pytest -m vllm -s -rs tests/connectors "$@"
