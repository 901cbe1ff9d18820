# Two images, from the repository's root; docs/cluster.md says how to use them:
#
#     docker build --tag titan_moe .                       for GPUs, with Transformer Engine built: some 20 minutes
#     docker build --tag titan_moe:cpu --target cpu .      for CPUs: the debug model, the planner, the tests
#
# Both run the repository's own set-up, scripts/setup_env.py, which knows all versions: here are none. The packages go to
# /opt/titan_moe/.venv, and PYTHON names the Python there, which run_train.sh takes as it is. The code is there too, but
# is meant to be mounted, and edited, from outside: whatever run_train.sh is called uses the code beside it.

FROM python:3.12-slim-bookworm AS cpu

# g++: torch.compile and Triton compile on the machine they run on.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

# torch's index for CPUs: a version with "+cpu" comes before the same one without, whose CUDA packages take 3 GB.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_NO_CACHE_DIR=1

WORKDIR /opt/titan_moe
COPY pyproject.toml LICENSE ./
COPY scripts/setup_env.py scripts/
RUN python3 scripts/setup_env.py --dev
ENV PYTHON=/opt/titan_moe/.venv/bin/python

COPY . .
CMD ["./run_train.sh", "train_configs/debug_model.toml"]


# Not a devel image: nvcc, headers, cuDNN, NCCL and cuBLAS are the packages that torch and Transformer Engine run with.
# A toolkit beside them would be of other versions, and its NCCL the first that a compiler finds.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS gpu

# ib*, librdmacm1: NCCL over InfiniBand and RoCE. numactl: NUMA_BINDING of run_train.sh. python3-dev: Triton.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++ git ibverbs-providers libibverbs1 librdmacm1 numactl python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1
# Of the compilers that build Transformer Engine: about 2 GB of memory each (default: one per CPU, 16 at most).
ARG MAX_JOBS=""

WORKDIR /opt/titan_moe
COPY pyproject.toml LICENSE ./
COPY scripts/setup_env.py scripts/
# The set-up goes on when Transformer Engine's build fails, as runs do without it; an image without it is a mistake.
RUN MAX_JOBS=$MAX_JOBS TITAN_MOE_TE=1 python3 scripts/setup_env.py && grep '^built' .venv/.titan_moe_te
# What NCCL EP compiles its kernels with when a run starts: scripts/cluster_env.sh says more.
ENV PYTHON=/opt/titan_moe/.venv/bin/python \
    NCCL_EP_JIT_BUILD_INCLUDE_DIR=/opt/titan_moe/.venv/lib/python3.12/site-packages/nvidia/nccl/include \
    NCCL_EP_JIT_CUDA_INCLUDE_DIR=/opt/titan_moe/.venv/lib/python3.12/site-packages/nvidia/cu13/include \
    NCCL_EP_JIT_NVCC=/opt/titan_moe/.venv/lib/python3.12/site-packages/nvidia/cu13/bin/nvcc

COPY . .
CMD ["./run_train.sh", "train_configs/debug_model.toml"]
