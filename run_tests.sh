#!/usr/bin/env bash
# usage: ./run_tests.sh [pytest arguments]        (-m "" runs the slow tests too)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
python=$("${PYTHON:-python3}" scripts/setup_env.py --dev)
exec "$python" -m pytest "$@"
