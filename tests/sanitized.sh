#!/bin/sh
# Runs a command in build/sanitized: a copy of this folder whose compiled core ends the process, and says where, when it
# uses memory that is not its own, or does what C leaves undefined. Python's own memory is watched likewise.
set -eu

cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
copy=build/sanitized
sources=$(cat setup.py kvpage_server/core/native/*.p[xy][xd] kvpage_server/core/native/*.h | cksum)
[ "$(cat $copy/sources 2>/dev/null)" = "$sources" ] || rm -rf $copy  # by their times alone a copy would be half new
mkdir -p $copy
rm -rf $copy/kvpage_server $copy/tests
git ls-files -zco --exclude-standard | xargs -0 ls -d 2>/dev/null | tar cf - -T - | tar xf - -C $copy
cd $copy

export CFLAGS="-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
LDFLAGS="-fsanitize=address,undefined" "$python" setup.py -q build_ext --inplace

LD_PRELOAD=$(${CC:-cc} -print-file-name=libasan.so)
export LD_PRELOAD PYTHONMALLOC=malloc PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/support"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
echo "$sources" >sources
"$python" -c 'from kvpage_server import core; assert core.NAME == "native", core.REASON'
exec "$python" "$@"
