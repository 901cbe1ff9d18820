# shellcheck shell=bash
# The environment of runs on a cluster, for scripts/train.slurm and anybody who starts run_train.sh on nodes by hand:
#     source scripts/cluster_env.sh
# Each line has its reason. What is not here is left to the libraries on purpose: docs/cluster.md. A value that is set
# already is kept.

# Processes stay on the CPUs next to their GPU. Of the steps that took DeepSeek-V3 on 256 GB200 from 494 to 970 TFLOPS
# (docs/planner.md has that run), CPU binding was one of the largest: 691 to 762. torchrun does it when it is told.
export NUMA_BINDING=${NUMA_BINDING-node}

# Transformer Engine's NCCL EP (moe.dispatcher = "te_ep") compiles its kernels with nvcc when a run starts, against the
# headers of NCCL, and looks for both in /usr unless it is told. They have to be of the NCCL that the run loads, which is
# not the machine's own but the package beside torch (scripts/setup_env.py installs it, and nvcc).
_nvidia=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && echo "$PWD"/.venv/lib/python3*/site-packages/nvidia)
if [[ -d $_nvidia/nccl/include ]]; then # else a container that brings its own, and knows where
    export NCCL_EP_JIT_BUILD_INCLUDE_DIR=${NCCL_EP_JIT_BUILD_INCLUDE_DIR-$_nvidia/nccl/include}
    export NCCL_EP_JIT_CUDA_INCLUDE_DIR=${NCCL_EP_JIT_CUDA_INCLUDE_DIR-$_nvidia/cu13/include}
    export NCCL_EP_JIT_NVCC=${NCCL_EP_JIT_NVCC-$_nvidia/cu13/bin/nvcc}
fi
unset _nvidia
