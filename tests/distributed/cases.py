"""Every training that the tests of whole runs look at, by the number of ranks: one job each (see
conftest.py)."""

from pathlib import Path

from tests.distributed.edits import edited_copies, slow_copy
from tests.distributed.harness import Case

BIAS_OFF = "--moe.load_balance_coeff=0"
EP2 = "--parallelism.expert_parallel_degree=2"
EP4 = "--parallelism.expert_parallel_degree=4"
NONE, SELECTIVE, FULL = (f"--activation_checkpoint.mode={mode}" for mode in ("none", "selective", "full"))
ALLTOALL, DEDUP, LOOP = "--moe.dispatcher=alltoall", "--moe.dispatcher=dedup", "--moe.experts=loop"
BF16 = "--training.mixed_precision_param=bfloat16"
LOSSES = ["--moe.sequence_loss_coeff=0.01", "--moe.z_loss_coeff=0.001"]  # large, to be seen in fp32
TP2, CP2 = "--parallelism.tensor_parallel_degree=2", "--parallelism.context_parallel_degree=2"
PP2, SCHEDULE = "--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule"
LAYERS = "--parallelism.pipeline_parallel_layers_per_stage"
PARTS = [NONE, "--activation_checkpoint.recompute=mla_up_proj,swiglu,norms,shared_expert"]
# Every schedule, and between them every kind of recompute with schedules that split backward.
PIPELINES = {
    "1F1B": [NONE],
    "Interleaved1F1B": [FULL],
    "InterleavedZeroBubble": [SELECTIVE],
    "ZBVZeroBubble": PARTS,
    "DualPipeV": [SELECTIVE],
}
COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
MTP1, MTP2 = "--model.num_mtp_layers=1", "--model.num_mtp_layers=2"
REDUCE_EVERY = "--parallelism.fsdp_reduce_every_microbatch"
HSDP2 = "--parallelism.data_parallel_replicate_degree=2"
# With two experts on four ranks FSDP has no whole expert left to hand out, so it cuts them along F, as at 1,024 GPUs.
TWO_EXPERTS = [
    *("--model.num_experts=2", "--model.top_k=1", "--model.num_expert_groups=1", "--model.num_limited_groups=1"),
]
# Grouped-query attention has no latents, and these families no dense layers.
GQA = [*(f"--model.{size}=none" for size in ("q_lora_rank", "kv_lora_rank", "dense_hidden_dim")), "--model.n_heads=4"]
QWEN3, MIXTRAL = ([f"--model.name={name}", *GQA] for name in ("qwen3", "mixtral"))
OFFLOAD, REST = "--activation_offload.tensors", "layer_input,attn_out"
SEED_ONLY = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
# The schedule must not follow training.steps where runs of different lengths are compared.
SCHEDULE_100 = "--lr_scheduler.total_steps=100"
MOMENTS = ["--optimizer.moments_dtype=bfloat16", SCHEDULE_100]
MUON = ["--optimizer.name=Muon", SCHEDULE_100]
# Over doubles of Transformer Engine; in bf16, which NCCL EP is limited to and a CPU is slow in.
TE = [BF16, "--moe.dispatcher=te_ep", "--moe.experts=te", "--training.steps=3", SCHEDULE_100]

# Emulated low precision in fp32 compute, where nothing but the formats rounds; widths that their blocks tile, also cut.
TILED = ["--model.moe_hidden_dim=64", "--model.dense_hidden_dim=128", "--training.steps=4", SCHEDULE_100]
MXFP8, NVFP4 = ([f"--precision.recipe={name}", *TILED] for name in ("mxfp8", "nvfp4"))
LINEARS = "--precision.linears=attention,feed_forward,shared_experts,eh_proj,lm_head"
DEBUG = [
    *("train_configs/debug_model.toml", BF16, "--training.local_batch_size=2", "--training.steps=3"),
    *("--lr_scheduler.warmup_steps=1", "--metrics.log_freq=1", "--metrics.enable_tensorboard=false"),
    "--validation.enable=false",
]
"""The debug model as it is, on fewer tokens"""


SLOW: dict[int, set[str]] = {
    1: {
        *("one_rank_mxfp8_loop_full", "one_rank_mxfp8_parts_mtp", "one_rank_mxfp8_mtp", "one_rank_nvfp4_selective"),
        *("one_rank_fp8_current", "one_rank_fp8_block", "resumed_nvfp4", "resumed_nvfp4_again"),
        *("debug_fp8_current", "debug_fp8_block", "debug_nvfp4", "one_rank_mixtral", "one_rank_mtp2"),
    },
    2: {
        *("fsdp2_ep2_fp8_current", "fsdp2_ep2_fp8_block", "fsdp2_ep2_mxfp8_full", "fsdp2_ep2_mxfp8_compiled"),
        *("tp2_nvfp4", "pp2_nvfp4", "pp2_mxfp8"),
        *("fsdp2_no_bias", "fsdp2_ep2_no_bias", "fsdp2_ep2_compiled", "tp2_losses", "tp2_mtp2", "tp2_ep2"),
        *("fsdp2_ep2_alltoall_selective_offload", "pp2_DualPipeV_offload"),
        *("cp2_plain_order", "pp2_uneven", "pp2_losses", "pp2_zbv_losses", "te_mxfp8", "emulated_mxfp8"),
        *("fsdp2_ep2_mixtral", "fsdp2_ep2_nvfp4", "tp2_mxfp8", "fsdp2_ep2_alltoall_selective"),
        *("pp2_InterleavedZeroBubble", "pp2_DualPipeV", "pp2_1F1B_offload", "fsdp2_ep2_full_offload"),
        *("fsdp2_ep2_muon", "tp2_muon"),
    },
    4: {
        *("fsdp4", "fsdp4_ep2_no_bias", "hsdp2x2", "fsdp2_cp2", "hsdp2_tp2", "hsdp2_cp2", "hsdp2_pp2", "pp2_tp2"),
        *("pp2_ep2_bf16", "pp2_te_ep", "pp2_ep2", "fsdp2_pp2", "then_pp2_ep2", "then_tp2_ep2", "then_hsdp2"),
        *("tp2_cp2_ep4_qwen3", "hsdp2x2_reduce_every", "ep4_chunks_full"),
        *("fsdp4_ep2", "ep4_alltoall", "fsdp2_tp2_ep2", "pp2_cp2_ep2_factor"),
    },
}
"""By number of ranks, cases that the default tests leave out: what they combine is there singly, or in others"""


def pipeline(schedule: str) -> list[str]:
    """Two ranks; schedules with two stages per rank have four for three layers, the last one with the head alone."""
    return [PP2, f"{SCHEDULE}={schedule}", *([] if schedule == "1F1B" else [f"{LAYERS}=[1, 1, 1, 0]"])]


def chain(first: Path, out: Path, meshes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Cases that hand one training on from mesh to mesh: each loads what the one before has saved, `first` being that
    of 3 steps, trains one step and saves."""
    cases, source = {}, first
    for step, (name, mesh) in enumerate(meshes.items(), start=4):
        load = [f"--checkpoint.initial_load_path={source}", "--checkpoint.initial_load_model_only=false"]
        cases[name] = ["--checkpoint.enable", *load, SCHEDULE_100, f"--training.steps={step}", *mesh]
        source = out / name / "checkpoint" / f"step-{step}"
    return cases


def cases(world_size: int, out: Path) -> dict[str, Case]:
    """Name -> case, in the order they run; `out` is their folder, which some cases share a run folder in."""
    return {1: cases_of_1, 2: cases_of_2, 4: cases_of_4}[world_size](out)


def cases_of_1(out: Path) -> dict[str, Case]:
    finished = ["--checkpoint.enable", SCHEDULE_100, f"--job.dump_folder={out / 'extended'}"]
    moments_folder = f"--job.dump_folder={out / 'moments_extended'}"
    muon_folder = f"--job.dump_folder={out / 'muon_extended'}"
    argvs = {
        "one_rank": [],
        "one_rank_no_bias": [BIAS_OFF],
        "one_rank_two_experts": TWO_EXPERTS,
        "one_rank_whole_batch": ["--training.local_batch_size=8"],
        "one_rank_loop": [LOOP, FULL],
        "one_rank_losses": LOSSES,
        "one_rank_mtp": [MTP1],
        "one_rank_mtp2": [MTP2],
        "one_rank_qwen3": QWEN3,
        "one_rank_mixtral": MIXTRAL,
        "one_rank_drops": ["--moe.capacity_factor=1.0", "--training.steps=2"],
        "one_rank_seed": SEED_ONLY,
        "golden": ["--training.steps=10"],
        "repeat": [BF16],
        "repeat_again": [BF16],
        "uninterrupted": ["--training.steps=6", SCHEDULE_100],
        "saved": ["--training.steps=3", "--checkpoint.enable", SCHEDULE_100],
        "extended": ["--training.steps=3", *finished],
        "extended_again": ["--training.steps=6", *finished],
        "moments": MOMENTS,
        "moments_extended": [*MOMENTS, "--training.steps=3", "--checkpoint.enable", moments_folder],
        "moments_extended_again": [*MOMENTS, "--checkpoint.enable", moments_folder],
        "muon": MUON,
        "muon_extended": [*MUON, "--training.steps=3", "--checkpoint.enable", muon_folder],
        "muon_extended_again": [*MUON, "--checkpoint.enable", muon_folder],
        "workers": ["--training.steps=3", "--training.dataloader.num_workers=2"],
        "one_rank_tiled": TILED,
        "one_rank_mxfp8": MXFP8,
        "one_rank_mxfp8_loop_full": [*MXFP8, LOOP, FULL],
        "one_rank_mxfp8_parts_mtp": [*MXFP8, *PARTS, MTP1, LINEARS],
        "one_rank_mxfp8_mtp": [*MXFP8, MTP1, LINEARS],
        "one_rank_fp8_current": ["--precision.recipe=fp8_current", *TILED],
        "one_rank_fp8_block": ["--precision.recipe=fp8_block", *TILED],
        "one_rank_nvfp4": NVFP4,
        "one_rank_nvfp4_selective": [*NVFP4, SELECTIVE],
        "resumed_nvfp4": [*NVFP4, "--training.steps=2", "--checkpoint.enable"],
        "resumed_nvfp4_again": [*NVFP4, "--checkpoint.enable", f"--job.dump_folder={out / 'resumed_nvfp4'}"],
    }
    debug = {
        f"debug_{recipe}": Case([f"--precision.recipe={recipe}"], base=DEBUG)
        for recipe in ("bf16", "fp8_current", "fp8_block", "mxfp8", "nvfp4")
    }
    edits = {name: Case(["--training.steps=3"], path) for name, path in edited_copies(out / "edits").items()}
    return {name: Case(argv) for name, argv in argvs.items()} | debug | edits


def cases_of_2(out: Path) -> dict[str, Case]:
    argvs = {
        "fsdp2": [],
        "fsdp2_no_bias": [BIAS_OFF, "--loss.num_chunks=1", "--parallelism.fsdp_reshard_after_forward=always"],
        "fsdp2_ep2": [EP2],
        "fsdp2_ep2_no_bias": [EP2, BIAS_OFF],
        "fsdp2_ep2_reduce_every": [EP2, REDUCE_EVERY],
        "fsdp2_ep2_full": [EP2, FULL],
        "fsdp2_ep2_selective": [EP2, SELECTIVE, "--moe.weighting=late"],
        "fsdp2_ep2_alltoall": [EP2, ALLTOALL, LOOP],
        "fsdp2_ep2_alltoall_full": [EP2, ALLTOALL, FULL],
        "fsdp2_ep2_alltoall_selective": [EP2, ALLTOALL, SELECTIVE],
        "fsdp2_ep2_alltoall_redispatch": [EP2, ALLTOALL, FULL, "--moe.redispatch"],
        "fsdp2_ep2_losses": [EP2, FULL, *LOSSES],
        "fsdp2_ep2_losses_factor": [EP2, FULL, *LOSSES, "--moe.recv_buffer=1"],
        "fsdp2_whole_batch": ["--training.local_batch_size=4"],
        "fsdp2_ep2_moments": [EP2, *MOMENTS],
        "fsdp2_ep2_muon": [EP2, *MUON],
        "tp2_muon": [TP2, *MUON],
        "fsdp2_ep2_parts": [EP2, *PARTS, "--parallelism.fsdp_reshard_after_forward=always"],
        "fsdp2_ep2_compiled": [EP2, *COMPILED],
        "tp2": [TP2],
        "tp2_losses": [TP2, "--loss.num_chunks=1", *LOSSES],
        "tp2_ep2": [TP2, EP2, *PARTS],
        "tp2_ep2_losses": [TP2, EP2, *LOSSES],
        "tp2_ep2_losses_worst_case": [TP2, EP2, *LOSSES, "--moe.recv_buffer=worst_case"],
        "tp2_mtp2": [TP2, MTP2],
        "fsdp2_ep2_mtp_full": [EP2, MTP1, FULL],
        "fsdp2_ep2_qwen3": [EP2, *QWEN3, NONE, "--activation_checkpoint.recompute=norms"],
        "fsdp2_ep2_mixtral": [EP2, *MIXTRAL, SELECTIVE],
        "cp2": [CP2, *PARTS],
        "cp2_ep2_losses": [CP2, EP2, *LOSSES],
        "cp2_plain_order": [CP2, "--parallelism.context_parallel_load_balancer=none", SELECTIVE],
        **{f"pp2_{schedule}": [*pipeline(schedule), *mode] for schedule, mode in PIPELINES.items()},
        "fsdp2_ep2_offload": [EP2, f"{OFFLOAD}={REST},moe_expert_input"],
        "fsdp2_ep2_full_offload": [EP2, FULL, f"{OFFLOAD}=layer_input,moe_expert_input"],
        "fsdp2_ep2_alltoall_selective_offload": [EP2, ALLTOALL, SELECTIVE, f"{OFFLOAD}={REST},moe_expert_input"],
        "pp2_1F1B_offload": [*pipeline("1F1B"), *PIPELINES["1F1B"], f"{OFFLOAD}={REST}"],
        "pp2_ZBVZeroBubble_offload": [*pipeline("ZBVZeroBubble"), *PARTS, f"{OFFLOAD}={REST}"],
        "pp2_DualPipeV_offload": [*pipeline("DualPipeV"), *PIPELINES["DualPipeV"], f"{OFFLOAD}=layer_input"],
        "pp2_uneven": [PP2, f"{LAYERS}=[1, 2]", FULL, "--parallelism.pipeline_parallel_microbatch_size=2"],
        "pp2_losses": [PP2, SELECTIVE, *LOSSES],
        "pp2_zbv_losses": [*pipeline("ZBVZeroBubble"), FULL, *LOSSES],
        **chain(
            out.parent / "1" / "saved" / "checkpoint" / "step-3",
            out,
            {"then_tp2": [TP2], "then_pp2": pipeline("ZBVZeroBubble"), "then_cp2_ep2": [CP2, EP2]},
        ),
        "uninterrupted": [EP2, "--training.steps=10", SCHEDULE_100, BF16],
        "fsdp2_ep2_mxfp8": [*MXFP8, EP2],
        "fsdp2_ep2_mxfp8_full": [*MXFP8, EP2, FULL],
        "fsdp2_ep2_mxfp8_compiled": [*MXFP8, EP2, *COMPILED],
        "tp2_mxfp8": [*MXFP8, TP2],
        "pp2_mxfp8": [*MXFP8, *pipeline("ZBVZeroBubble"), FULL],
        "fsdp2_ep2_nvfp4": [*NVFP4, EP2],
        "fsdp2_ep2_fp8_current": ["--precision.recipe=fp8_current", *TILED, EP2],
        "fsdp2_ep2_fp8_block": ["--precision.recipe=fp8_block", *TILED, EP2],
        "tp2_nvfp4": [*NVFP4, TP2],
        "pp2_nvfp4": [*NVFP4, *pipeline("ZBVZeroBubble"), SELECTIVE],
        "te_ep": [EP2, *TE, SELECTIVE],
        "te_ep_static": [EP2, *TE, FULL, "--moe.recv_buffer=1.0"],
        "te_mxfp8": [EP2, *MXFP8, *TE, "--precision.backend=te", SELECTIVE],
        "emulated_mxfp8": [EP2, *MXFP8, BF16, "--training.steps=3", SELECTIVE],
    }
    few_labels = Case([EP2], few_labels=True)
    slow_rank = Case([EP2, NONE, "--profiling.step=3", "--profiling.ranks=1"], slow_copy(out / "edits" / "slow_rank"))
    overflow = Case([EP2, MTP1, FULL, "--moe.recv_buffer=1.4"], overflow=True)
    more = {
        "few_labels": few_labels,
        "overflow": overflow,
        "tp2_stops": Case([TP2], stops=True),
        "slow_rank": slow_rank,
    }
    return {name: Case(argv) for name, argv in argvs.items()} | more


def cases_of_4(out: Path) -> dict[str, Case]:
    argvs = {
        "fsdp4": [],
        "fsdp4_ep2": [EP2],
        "fsdp4_ep2_no_bias": [EP2, BIAS_OFF],
        "hsdp2x2_ep2": [EP2, HSDP2],
        "ep4_alltoall": [EP4, ALLTOALL],
        "ep4_nodes_full": [EP4, DEDUP, "--moe.ranks_per_node=2", FULL],
        "ep4_chunks_full": [EP4, DEDUP, "--moe.ranks_per_node=2", "--moe.hop_chunks=3", FULL],
        "ep2_two_experts": [EP2, *TWO_EXPERTS],
        "hsdp2x2": [HSDP2],
        "hsdp2x2_reduce_every": [HSDP2, REDUCE_EVERY, "--training.local_batch_size=1"],
        "fsdp2_tp2_ep2": [TP2, EP2],
        "tp2_cp2_ep4": [TP2, CP2, EP4],
        "tp2_cp2_ep4_qwen3": [TP2, CP2, EP4, *QWEN3],
        "fsdp2_cp2": [CP2],
        "pp2_ep2": [PP2, EP2],
        "hsdp2_tp2": [HSDP2, TP2, SELECTIVE],
        "hsdp2_cp2": [HSDP2, CP2, FULL],
        "fsdp2_pp2": [*pipeline("DualPipeV"), FULL],
        "hsdp2_pp2": [HSDP2, *pipeline("InterleavedZeroBubble"), FULL],
        "pp2_tp2": [PP2, TP2],
        "pp2_cp2_ep2": [*pipeline("ZBVZeroBubble"), CP2, EP2],
        "pp2_cp2_ep2_factor": [*pipeline("ZBVZeroBubble"), CP2, EP2, FULL, "--moe.recv_buffer=1"],
        "pp2_ep2_bf16": [*pipeline("ZBVZeroBubble"), EP2, BF16, "--training.steps=3", SCHEDULE_100],
        "pp2_te_ep": [*pipeline("ZBVZeroBubble"), EP2, *TE, FULL, "--moe.redispatch"],
        **chain(
            out.parent / "1" / "saved" / "checkpoint" / "step-3",
            out,
            {
                "then_pp2_ep2": [PP2, EP2],
                "then_tp2_ep2": [TP2, EP2],
                "then_hsdp2": [HSDP2],
            },
        ),
        "ep2_seed": [EP2, *SEED_ONLY],
    }
    stops = {"pp2_cp2_stops": Case([*pipeline("ZBVZeroBubble"), CP2], stops=True)}
    return {name: Case(argv) for name, argv in argvs.items()} | stops
