"""One rank of a run of any size, without GPUs: `./run_train.sh CONFIG.toml --comm.mode=fake_backend`.

    NGPU=256 RANK=3 ./run_train.sh train_configs/deepseek_v3_671b.toml --comm.mode=fake_backend

builds what rank 3 of 256 would build, with the functions of train.py, on fake tensors (shapes without memory) and
torch's fake process group (collectives that do nothing), takes two optimizer steps and reports the second: bytes by
kind, collectives, and how the planner's figures compare.

    gpu.py        what stands in for a GPU's kernels
    routing.py    an even load in the place of one that nobody knows: there are no values to route by
    ledger.py     which memory lived when, and what it was for
    collectives.py  which collectives ran, in which group, with how many bytes
    watch.py      the dispatch mode that feeds both
    report.py     both beside the planner's figures
    __main__.py   builds and runs
"""
