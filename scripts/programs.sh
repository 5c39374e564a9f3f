#!/usr/bin/env bash
# programs.sh     What tests run and pip does not bring, where it is missing and can be had (Debian, root): Chromium for
# the coordinator's page, Redis for the tier in it, ip and tc for hosts that are network namespaces.
# Never fails: without a program its tests say that they were skipped, and why.
set -uo pipefail

missing=()
wants() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || missing+=("$2"); }
wants chromium chromium
wants redis-server redis-server
wants ip iproute2
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "programs.sh: no ${missing[*]}, installed for root on Debian only: tests that need them are skipped"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
get() { timeout 100 apt-get -qq -o DPkg::Lock::Timeout=60 -o Acquire::Retries=2 "$@" >/dev/null 2>&1; }
# A server that the package starts by itself would take a port, and memory, that nobody asked for.
if [ ! -e /usr/sbin/policy-rc.d ] && printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d 2>/dev/null; then
    chmod +x /usr/sbin/policy-rc.d
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
if get update && get install -y --no-install-recommends "${missing[@]}"; then
    echo "programs.sh: installed ${missing[*]} in $SECONDS s"
else
    echo "programs.sh: ${missing[*]} could not be installed (after $SECONDS s): tests that need them are skipped"
fi
exit 0
