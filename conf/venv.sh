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

output=$("$python" -m venv "$venv" 2>&1) && exit 0
rm -rf "$venv"
case $output in
    *ensurepip* | *"No module named venv"*) ;;  # Debian has them in a package of their own
    *) printf '%s\n' "$output" >&2; exit 1 ;;
esac
version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    DEBIAN_FRONTEND=noninteractive sh -c "apt-get update -qq && apt-get install -y -qq --no-install-recommends $version-venv >/dev/null"
    exec "$python" -m venv "$venv"
fi
echo "$python cannot create virtual environments. On Debian or Ubuntu: sudo apt-get install $version-venv" >&2
exit 1
