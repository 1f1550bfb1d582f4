#!/bin/sh
# Renews conf/locks, with the uv named by the argument: for each extra that `make` installs, and for the build, all
# dependencies in their newest versions, for every platform and Python, with the hashes of their files.
set -eu

uv=$1

compile() {  # the name of the lock, and options of uv
    name=$1
    shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
        --custom-compile-command "make lock" --output-file "conf/locks/$name.txt" "$@"
}

compile dev --extra dev --upgrade --no-progress pyproject.toml
for extra in engine web docs wheels; do
    compile "$extra" --extra "$extra" --constraint conf/locks/dev.txt pyproject.toml
done
sed -n 's/^requires = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '" ' | sed 's/,\([A-Za-z]\)/\n\1/g' |
    compile build --constraint conf/locks/dev.txt -
