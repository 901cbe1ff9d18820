#!/usr/bin/env bash
# usage: scripts/gpu_check.sh REPORT.md
#
# Runs the tests that need GPUs, and the benchmarks' gpu suite; the tables go to REPORT.md too, the records to
# benchmarks/results.json, of which benchmarks/run.py --docs makes docs/benchmarks.md. Sized for 5 minutes, which no GPU
# has shown yet; the set-up before it builds Transformer Engine once, 20 minutes on two cores.
set -euo pipefail

[[ $# -eq 1 ]] || { sed -n '2s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
report=$(realpath -m "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$("${PYTHON:-python3}" scripts/setup_env.py --dev)
gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
((gpus > 0)) || { echo "torch sees no CUDA GPU on this machine: nothing to check" >&2; exit 2; }

status=0
"$python" -m pytest -m gpu || status=1
{
    echo "# $gpus GPUs: $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sort -u)"
    "$python" -c "import torch; from titan_moe.moe import te; print(f'torch {torch.__version__}, {te.facts()}')"
    "$python" benchmarks/run.py --suite gpu --quick --json benchmarks/results.json
} | tee "$report"
exit $status
