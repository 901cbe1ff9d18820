#!/usr/bin/env bash
# usage: ./run_train.sh CONFIG.toml [--section.key=value ...]
#        CONFIG_FILE=CONFIG.toml ./run_train.sh [--section.key=value ...]
#        ./run_train.sh CONFIG.toml [--section.key=value ...] --print_config    prints the resolved configuration
#        ./run_train.sh CONFIG.toml --plan [--plan.hardware=GB300 --plan.gpus=256 --plan.json --plan.png=FOLDER ...]
#        ./run_train.sh --help [SECTION or SECTION.KEY]    prints this and all keys, or those of one section in full
#
# Sets up .venv on first use, checks the configuration once, then starts one process per GPU with torchrun.
# Relative paths, those in the configuration too, are relative to the directory this is called from. With --plan it
# starts nothing: it predicts whether the run fits the GPUs named in [plan], how fast it is and what limits it.
#
#   NGPU           processes on this node (default: its visible GPUs, or 1)
#   LOG_RANK       local ranks whose output is shown, as in 0,3 (default: 0)
#   NNODES         nodes of the job (default: 1); start this script on each of them
#   MASTER_ADDR    name of one of the nodes, the same on all, when NNODES > 1
#   MASTER_PORT    a free port there (default: 29500)
#   RUN_ID         names the run; the same on all nodes and when it is continued (default: from SLURM, or a new one)
#   MAX_RESTARTS   times that torchrun starts the processes again after a failure (default: 0)
#   PYTHON         Python >= 3.11 to set up with, or to use when it has all packages (default: python3)
#   TITAN_MOE_TE   0: do not build Transformer Engine on a machine with a GPU
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() { sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; }

die() {
    printf '%s\n' "$1" >&2
    exit 2
}

visible_gpus() {
    if ! command -v nvidia-smi >/dev/null; then
        echo 0
    elif [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then # empty or -1 hides all of them
        tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cvE '^(-1)?$' || true
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true
    fi
}

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # titan_moe need not be installed, nor this be called from here

prints=""
for ((i = 1; i <= $#; i++)); do
    case ${!i} in
        -h | --help) # needs no packages, so nothing is set up for it
            python=$root/.venv/bin/python
            [[ -x $python ]] || python=${PYTHON:-python3}
            [[ $i -lt $# ]] || usage
            exec "$python" -m titan_moe.config_help "${@:i+1}" ;;
        --print_config | --print-config) prints=yes ;;
    esac
done

if [[ $# -gt 0 && $1 != -* ]]; then
    config=$1
    shift
else
    config=${CONFIG_FILE:-}
fi
if [[ -z $config && " $*" == *" --job.config_file"* ]]; then # as torchtitan users write it
    config=$1
    shift
fi
[[ -n $config ]] || die "$(usage)"

if [[ " $* " =~ \ --plan(\.json|\.png)?[\ =] ]]; then # a prediction: no processes, no run folder
    python=${PYTHON:-$root/.venv/bin/python} # any Python that is new enough will do: nothing is set up for it
    command -v "$python" >/dev/null || python=python3
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "--plan needs Python 3.11 or newer (PYTHON=...)"
    PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m titan_moe.plan "$config" "$@"
fi

gpus=$(visible_gpus)
default_ngpu=$((gpus > 0 ? gpus : 1))
export NNODES=${NNODES:-1} NGPU=${NGPU:-$default_ngpu}

if [[ $NNODES == 1 ]]; then
    endpoint=localhost:0 # any free port
elif [[ -n ${MASTER_ADDR:-} ]]; then
    endpoint=$MASTER_ADDR:${MASTER_PORT:-29500}
else
    die "NNODES=$NNODES needs MASTER_ADDR: the name of one of the nodes, the same on all of them"
fi

python=$("${PYTHON:-python3}" "$root/scripts/setup_env.py")
[[ -z $prints ]] || exec "$python" -m titan_moe.launch "$config" "$@"
# One report of all mistakes, before any process starts.
RUN_ID=$(GPUS=$gpus "$python" -m titan_moe.launch "$config" "$@")
export RUN_ID

export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}
if [[ $gpus == 0 && -z ${OMP_NUM_THREADS:-} ]]; then # on CPUs, torchrun's default of one thread wastes the other cores
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    threads=$((cores / NGPU))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi

# -u: lines reach a file as they come. exec: a signal sent to this script, by a scheduler for one, has to reach torchrun.
exec "$python" -u -m torch.distributed.run \
    --nnodes "$NNODES" --nproc_per_node "$NGPU" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv_backend c10d --rdzv_id "$RUN_ID" --rdzv_endpoint "$endpoint" \
    --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3 \
    "$root/train.py" "$config" "$@"
