#!/bin/sh
# Runs the tests of the connectors with the real vLLM, LMCache and SGLang on the CPU. Arguments are those of pytest.
#
# Each host has an environment of its own, because its packages conflict with those of the engine. They are outside the
# checkout, in ~/.cache/kvpage/vllm and ~/.cache/kvpage/adapters (LMCache and SGLang), or in the folders named by
# KVPAGE_VLLM_ENV and KVPAGE_ADAPTERS_ENV. They take 2 GB each, and are made anew when their list of packages or the
# version of Python changes. Where PyTorch for the CPU cannot be installed, they are not tested, and the last lines say so.
#
# QUICK=1 saves and restores one context with vLLM's connector and tier. Each of its two installations may take 200
# seconds; without an environment after that, nothing is tested.
set -u

cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvpage
limit=
[ -z "${QUICK:-}" ] || limit="timeout 200"
skipped=
result=0

skip() {
    skipped="$skipped
SKIPPED: $1 cannot be installed here${limit:+ in time}, so the connectors were not tested with $2"
    return 1
}

# prepare FOLDER PINS HOSTS: install the packages of PINS into an environment, unless it has them.
prepare() {
    wanted=$("$python" --version; cat "$2")
    [ "$wanted" != "$(cat "$1/installed" 2>/dev/null)" ] || return 0
    echo "Installing $3 into $1" >&2
    rm -rf "$1"
    mkdir -p "$1"
    "$python" -m venv "$1" || { result=1; return 1; }
    install="$limit $1/bin/python -m pip install -qq --no-deps --no-compile"
    torch=$(grep '^torch==' "$2")
    $install "$torch" 2>/dev/null || $install --retries 1 --index-url https://download.pytorch.org/whl/cpu "$torch" ||
        skip "$torch" "$3" || return 1
    $install -r "$2" || { [ -n "$limit" ] || result=1; skip "a package of $2" "$3"; } || return 1
    echo "$wanted" >"$1/installed"
}

vllm=${KVPAGE_VLLM_ENV:-$cache/vllm}
if prepare "$vllm" tests/connectors/vllm.txt vLLM; then
    if [ -n "${QUICK:-}" ] && ! timeout 120 "$vllm/bin/python" -c "import vllm._C" 2>/dev/null; then
        skip "vLLM's kernels for this processor" vLLM
    else
        export KVPAGE_VLLM="$vllm/bin/python"
    fi
fi
if [ -z "${QUICK:-}" ]; then
    adapters=${KVPAGE_ADAPTERS_ENV:-$cache/adapters}
    if prepare "$adapters" tests/connectors/adapters.txt "LMCache and SGLang"; then
        export LMCACHE="$adapters/bin/lmcache" KVPAGE_SGLANG="$adapters/bin/python"
    fi
else
    set -- -k "restored_and_failures or interfaces" "$@"
fi

if [ -n "${KVPAGE_VLLM:-}${LMCACHE:-}" ]; then
    "$python" -m pytest -m "vllm or lmcache or sglang" -s -rs tests/connectors "$@" || result=$?
fi
[ -z "$skipped" ] || echo "$skipped" >&2
exit $result
