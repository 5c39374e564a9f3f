#!/usr/bin/env bash
# browser.sh     Chromium, for the tests of the coordinator's page, where it is missing and can be had (Debian, root).
# Never fails: without a browser those tests say that they were skipped, and why.
set -uo pipefail

[ -x /usr/bin/chromium ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "browser.sh: no Chromium, and it is installed for root on Debian only: tests in a browser are skipped"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
get() { timeout 100 apt-get -qq -o DPkg::Lock::Timeout=60 -o Acquire::Retries=2 "$@" >/dev/null 2>&1; }
if get update && get install -y --no-install-recommends chromium; then
    echo "browser.sh: installed Chromium in $SECONDS s"
else
    echo "browser.sh: Chromium could not be installed (after $SECONDS s): tests in a browser are skipped"
fi
exit 0
