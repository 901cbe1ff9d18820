#!/usr/bin/env bash
# usage: ./run_train.sh CONFIG.toml [--section.key=value ...]
#        CONFIG_FILE=CONFIG.toml ./run_train.sh [--section.key=value ...]
#        ./run_train.sh CONFIG.toml [--section.key=value ...] --print_config    prints the resolved configuration
#        ./run_train.sh CONFIG.toml --plan [--plan.hardware=GB300 --plan.gpus=256 --plan.json --plan.png=FOLDER ...]
#        ./run_train.sh CONFIG.toml --plan.search [--plan.toml=BEST.toml]    the fastest layout for the GPUs of [plan]
#        ./run_train.sh CONFIG.toml --plan.diff=OTHER.toml    what in time and memory differs from that configuration
#        ./run_train.sh --doctor [CONFIG.toml] [--section.key=value ...]    checks this node, or all nodes of a job
#        ./run_train.sh CONFIG.toml --comm.mode=fake_backend    a dry run: bytes and collectives of a rank, without GPUs
#        ./run_train.sh --help [SECTION or SECTION.KEY]    prints this and all keys, or those of one section in full
#
# Sets up .venv on first use, checks the configuration once, then starts one process per GPU with torchrun.
# Relative paths, those in the configuration too, are relative to the directory this is called from. With --plan it
# starts nothing: it predicts whether the run fits the GPUs named in [plan], how fast it is and what limits it. With
# --doctor it measures in under a minute what the run would run on, and exits with 1 if anything is slow or wrong.
# docs/cluster.md is about several nodes; scripts/train.slurm starts this on each node of a SLURM job.
#
# SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1 or SIGUSR2, or a file "stop" in the run folder, end the run after the step
# that is under way, with a checkpoint of it if checkpoint.enable; a second signal ends it at once. Exit status:
#
#   0        the run is complete
#   75       stopped as asked, and nothing is lost: the same command goes on from there
#   1        it failed
#   2        a mistake in the command or the configuration
#   128 + N  ended by signal N, and what was not saved before is lost
#
#   NGPU           processes on this node (default: its visible GPUs, or 1; in a dry run: those of plan.gpus)
#   RANK           in a dry run: which of the NNODES x NGPU ranks to look at (default: 0)
#   LOG_RANK       local ranks whose output is shown, as in 0,3 (default: 0)
#   NNODES         nodes of the job (default: 1); start this script on each of them
#   MASTER_ADDR    name of one of the nodes, the same on all, when NNODES > 1
#   MASTER_PORT    a free port there (default: 29500)
#   NODE_RANK      place of this node in the order of ranks, from 0 on MASTER_ADDR (default: nodes by name, as text)
#   NVLINK_DOMAINS one word per node in the order of ranks, the same for nodes that share an NVLink domain
#                  (default: as plan.hardware says, the nodes of a domain one after the other)
#   RUN_ID         names the run; the same on all nodes and when it is continued (default: from SLURM, or a new one)
#   NUMA_BINDING   as torchrun's --numa-binding: "node" keeps processes on CPUs next to their GPU (default: anywhere)
#   MAX_RESTARTS   times that torchrun starts the processes again after a failure, from the newest checkpoint (default: 0)
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

prints="" doctor=""
for ((i = 1; i <= $#; i++)); do
    case ${!i} in
        -h | --help) # needs no packages, so nothing is set up for it
            python=$root/.venv/bin/python
            [[ -x $python ]] || python=${PYTHON:-python3}
            [[ $i -lt $# ]] || usage
            exec "$python" -m titan_moe.config_help "${@:i+1}" ;;
        --print_config | --print-config) prints=yes ;;
        --doctor) doctor=yes ;;
    esac
done
if [[ -n $doctor ]]; then # it may stand before the configuration, or behind it
    for word; do
        shift
        [[ $word == --doctor ]] || set -- "$@" "$word"
    done
fi

if [[ $# -gt 0 && $1 != -* ]]; then
    config=$1
    shift
else
    config=${CONFIG_FILE:-}
fi
if [[ -z $config && " $*" =~ \ --(job.config_file|plan.diff) ]]; then # as torchtitan users write it; two to compare
    config=$1
    shift
fi
[[ -n $config || (-n $doctor && -z $prints && " $* " != *" --plan"*) ]] || die "$(usage)"

if [[ " $config $* " =~ \ --plan(\.json|\.png|\.search|\.diff)?[\ =] ]]; then # a prediction: no processes, no run folder
    python=${PYTHON:-$root/.venv/bin/python} # any Python that is new enough will do: nothing is set up for it
    command -v "$python" >/dev/null || python=python3
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "--plan needs Python >= 3.11 (PYTHON=...)"
    exec "$python" -m titan_moe.plan "$config" "$@"
fi

export NNODES=${NNODES:-1}
# A dry run: one process, whatever the number of nodes.
if [[ -z $prints$doctor && " $* " =~ \ --comm\.mode[=\ ]fake_backend\  ]]; then
    python=$("${PYTHON:-python3}" "$root/scripts/setup_env.py")
    exec "$python" -m titan_moe.dry_run "$config" "$@"
fi

gpus=$(visible_gpus)
default_ngpu=$((gpus > 0 ? gpus : 1))
export NGPU=${NGPU:-$default_ngpu}

count='^[1-9][0-9]{0,5}$' # NNODES or NGPU that is none is told with all other mistakes
if [[ $NNODES == 1 || ! $NNODES =~ $count ]]; then
    rendezvous=(--rdzv_backend c10d --rdzv_endpoint localhost:0) # any free port
elif [[ -z ${MASTER_ADDR:-} ]]; then
    die "NNODES=$NNODES needs MASTER_ADDR: the name of one of the nodes, the same on all of them"
elif [[ -z ${NODE_RANK:-} ]]; then
    rendezvous=(--rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}")
elif [[ ${MAX_RESTARTS:-0} != 0 ]]; then # nodes with fixed ranks do not hear of each other's restarts, and would hang
    die "MAX_RESTARTS=$MAX_RESTARTS needs torchrun to number the nodes: unset NODE_RANK, or let the scheduler start a \
failed job again"
else
    rendezvous=(--rdzv_backend static --rdzv_endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" --node_rank "$NODE_RANK")
fi

# torchrun keeps one store for all attempts (torch 2.14), where restarted ranks would find the addresses of dead ones.
[[ ${MAX_RESTARTS:-0} == 0 ]] || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

python=$("${PYTHON:-python3}" "$root/scripts/setup_env.py")
[[ -z $prints ]] || exec "$python" -m titan_moe.launch "$config" "$@"

export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}
# On CPUs, torchrun's default of one thread wastes the other cores.
if [[ $gpus == 0 && -z ${OMP_NUM_THREADS:-} && $NGPU =~ $count ]]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    threads=$((cores / NGPU))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi
# OpenMP's threads wait for each other in a loop, for up to milliseconds before they sleep. Where another program wants a
# core too, the one that is waited for is not running, and a step took fifty times as long. So they sleep early.
[[ $gpus != 0 || -n ${OMP_WAIT_POLICY:-} ]] || export GOMP_SPINCOUNT=${GOMP_SPINCOUNT-1000}

[[ -z $doctor ]] || GPUS=$gpus exec "$python" -m titan_moe.doctor ${config:+"$config"} "$@"

# One report of all mistakes, before any process starts.
answer=$(GPUS=$gpus "$python" -m titan_moe.launch "$config" "$@")
export RUN_ID=${answer%%$'\n'*}
folder=${answer#*$'\n'}

numa=()
if [[ -n ${NUMA_BINDING:-} && $gpus != 0 ]]; then # torchrun asks an accelerator for its place
    if command -v numactl >/dev/null; then
        numa=(--numa-binding "$NUMA_BINDING")
    else
        echo "note: NUMA_BINDING=$NUMA_BINDING needs numactl, which is not installed: processes run on any CPU" >&2
    fi
fi

# exec: signals sent to this script, by a scheduler for one, have to reach the process that knows what to do with them.
exec "$python" -m titan_moe.supervise "$folder" \
    --nnodes "$NNODES" --nproc_per_node "$NGPU" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv_id "$RUN_ID" "${rendezvous[@]}" ${numa[@]+"${numa[@]}"} \
    --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3 \
    "$root/train.py" "$config" "$@"
