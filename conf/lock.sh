#!/bin/sh
# Renews conf/locks, with the uv named by the argument: for each extra that `make` installs, all dependencies in their
# newest versions, for every platform and Python, with the hashes of their files.
set -eu

compile() {  # an extra, and options of uv
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
        --custom-compile-command "make lock" --extra "$1" --output-file "conf/locks/$1.txt" "$2" "$3" pyproject.toml
}

uv=$1
compile dev --upgrade --no-progress
compile engine --constraint conf/locks/dev.txt
compile web --constraint conf/locks/dev.txt
compile docs --constraint conf/locks/dev.txt
