#!/bin/sh
# Installs this folder into the virtual environment named by the first argument, with the dependencies of conf/locks for the
# extra named by the second, and its core compiled if that can be done. As root on Debian or Ubuntu what compiling takes is
# installed; elsewhere it says in one line what is missing, and the core's Python twin runs.
set -eu

venv=$1 extra=$2
python=$venv/bin/python

# Runs pip. If it fails, the last line says what to do.
install() {
    output=$("$python" -m pip install --quiet "$@" 2>&1) && return 0
    case $output in
        *"No space left"* | *"Errno 28"* | *"Disk quota"*)
            why="the disk of $(cd "$venv" && pwd) is full: free 1 GB (4 GB for the engine and the tests), then make again" ;;
        *"No module named pip"* | *"No module named 'pip"* | *"cannot import name"*)
            why="$(cd "$venv" && pwd) is incomplete, an earlier make was interrupted: make clean, then make again" ;;
        *"Max retries"* | *"onnection broken"* | *"ConnectionError"* | *"timed out"* | *"from versions: none"*)
            why="no package registry can be reached: check the network and PIP_INDEX_URL or HTTPS_PROXY, then make again" ;;
        *"No matching distribution"*)
            why="the package registry lacks a version for $("$python" --version), see above: check PIP_INDEX_URL" ;;
        *) why="pip failed, see above" ;;
    esac
    printf '%s\n' "$output" | tail -n 20 >&2
    echo "kvpage is not installed: $why" >&2
    exit 1
}

core() {
    KVPAGE_CORE= "$python" -c 'from kvpage_server import core; print(core.NAME)'
}

# What Debian calls what is missing. A Python that is not Debian's brings its headers.
missing() {
    wanted="gcc libc6-dev libxxhash-dev"
    case $("$python" -c 'import sys; print(sys.base_prefix)') in
        /usr) wanted="$wanted $("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')" ;;
    esac
    for package in $wanted; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || printf ' %s' "$package"
    done
}

compile() {
    install --no-build-isolation --no-deps --editable .
}

echo "Installing kvpage and the packages it needs into $venv, which takes some minutes the first time" >&2
options=--require-hashes
[ "$extra" != dev ] || options="$options --no-compile"  # for 14,000 modules, of which tests import a part: 20 seconds
install $options --requirement conf/locks/build.txt --requirement "conf/locks/$extra.txt"
compile
[ "$(core)" = native ] && exit 0

how="a C compiler, Python's headers and xxhash.h, then:"
[ "$(uname -s)" = Darwin ] && how="xcode-select --install; brew install xxhash;"
if command -v dpkg-query >/dev/null 2>&1; then
    packages=$(missing)
    if [ -n "$packages" ] && [ "$(id -u)" = 0 ]; then
        export DEBIAN_FRONTEND=noninteractive
        if { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages; } >/dev/null 2>&1; then
            compile
            [ "$(core)" = native ] && exit 0
            packages=$(missing)
        fi
    fi
    how="${packages:+sudo apt-get install$packages &&}"
fi
echo "The page core is not compiled, so its Python twin runs, which is slower. To change that: ${how:+$how }make core" >&2
