#!/bin/sh
# Creates the virtual environment named by the first argument with Python 3.11 or newer.
set -eu

venv=$1
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    for newer in python3.14 python3.13 python3.12 python3.11; do
        command -v "$newer" >/dev/null 2>&1 && python=$newer && break
    done
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "kvpage needs Python 3.11 or newer; $("$python" --version) was found. Name another: make PYTHON=python3.12" >&2
    exit 1
}

"$python" -m venv "$venv" 2>/dev/null && exit 0

# Debian splits venv's pip off into a package of its own.
rm -rf "$venv"
version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    DEBIAN_FRONTEND=noninteractive sh -c "apt-get update -qq && apt-get install -y -qq --no-install-recommends $version-venv >/dev/null"
    exec "$python" -m venv "$venv"
fi
echo "$python cannot create virtual environments. On Debian or Ubuntu: sudo apt-get install $version-venv" >&2
exit 1
