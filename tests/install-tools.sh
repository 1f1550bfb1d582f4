#!/bin/sh
# The tools of other people that the tests and the engine use: redis-cli and its friends, promtool, a browser, and
# OpenBLAS for MLX on a Linux CPU. As root on Debian or Ubuntu they are installed; elsewhere it says what is missing and goes on.
set -eu

wanted="redis-tools redis-server prometheus chromium"
[ "$(uname -s)" = Linux ] && wanted="$wanted libopenblas0-pthread"

if command -v dpkg-query >/dev/null 2>&1; then
    missing=""
    for package in $wanted; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
    done
    [ -z "$missing" ] && exit 0
    if [ "$(id -u)" = 0 ]; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq || true
        refused=""
        for package in $missing; do  # one at a time: what can't be had takes nothing else with it
            apt-get install -y -qq --no-install-recommends "$package" >/dev/null || refused="$refused $package"
        done
        missing=$refused
        [ -z "$missing" ] && exit 0
    fi
    echo "Not installed:$missing. Tests that need them are skipped; to have them: sudo apt-get install$missing" >&2
elif ! command -v redis-cli >/dev/null 2>&1; then
    echo "redis-cli is not installed: tests that need it are skipped. On macOS: brew install redis" >&2
fi
