#!/bin/sh
# exclusive.sh TARGET SOURCES COMMAND: runs a command of sh while no other make in this folder runs one. It does nothing if
# the file TARGET exists and none of the files SOURCES is newer, because another make has made it. Without a name in
# TARGET, it runs the command always.
#
# The kernel releases the lock of .venv.lock when its process ends, so a killed make blocks no other one. Where there is
# no flock, as on macOS, Python takes the same lock. Without both, the lock is not taken, and conf/venv.sh says what is
# missing.
set -eu

target=$1 sources=$2 command=$3
python=${PYTHON:-python3}

lock() {  # -n: fail if another process has it
    if command -v flock >/dev/null 2>&1; then
        flock "$@" 9
    elif "$python" -c '' 2>/dev/null; then
        "$python" -c 'import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB * len(sys.argv[1:]))' "$@"
    fi
}

exec 9>.venv.lock
if ! lock -n 2>/dev/null; then
    echo "make: another make sets up this folder, waiting for it" >&2
    lock || true  # a file system without locks
fi
[ -e "$target" ] && [ -z "$(find -L $sources "$target" -newer "$target")" ] && exit 0
echo "$command" >&2  # make would print the sources, too
sh -euc "$command" 9>&-  # a daemon that an installation starts does not keep the lock
