"""The twin of a configuration: the same structure with few and narrow layers, which trains on a CPU in seconds.

`--model.scale_down` turns a file for 1,024 GPUs into a run for however many processes there are here, so that a mistake
in the structure or in the layout shows there first. The rule, for every file:

- The family stays, and what it has: low-rank queries, grouped keys, a dense first layer, shared experts, multi-token
  prediction. Sizes become those below; at most one dense layer and two MoE layers are left, in a pipeline one layer
  for each stage.
- Routing stays: scores, expert groups and how many a token may use, top-k, bias rate, loss weights. Experts become the
  smallest power of two per group that leaves a choice.
- Degrees above 1 become 2 while the processes last, in the order of DEGREES; data-parallel ranks shard the rest, and
  experts are spread over as many of these as before at most. Schedule, recompute and FSDP's policies stay.
- Two microbatches per step where the file sets a global batch; in a pipeline two for each stage.
- Sequences of 64 tokens, 20 steps, fp32, nothing compiled, bytes as tokens, Python's own sources as data, the debug
  model's learning rate, which narrow layers bear. Backends that need a GPU give way.

What the command line sets stays as it is set there. Imports no torch.
"""

import math
from collections.abc import Collection
from copy import deepcopy
from operator import attrgetter
from typing import Any

from titan_moe.config import Config
from titan_moe.config_check import NEEDS_GPU, model_flavor
from titan_moe.mesh_check import data_parallel_degree
from titan_moe.pipeline_layout import default_stages
from titan_moe.precision.layers import quantizes

DEGREES = ("pipeline_parallel", "context_parallel", "tensor_parallel", "data_parallel_replicate")
"""Which degree gets its processes first"""
SIZES = {"vocab_size": 288, "dim": 64, "n_heads": 4, "moe_hidden_dim": 32, "v_head_dim": 16}
MLA_SIZES = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "dense_hidden_dim": 96}
GQA_SIZES = {"num_kv_heads": 2, "qk_rope_head_dim": 16}
QUANTIZED_SIZES = {"moe_hidden_dim": 64, "v_head_dim": 32, "qk_rope_head_dim": 32}
"""Where a recipe quantizes: its blocks tile these, also cut in two"""
LEAST_EXPERTS = 8
SHORT: dict[str, Any] = {
    "training.seq_len": 64,
    "training.mixed_precision_param": "float32",
    "training.dataset": "python_stdlib",
    "training.mixture": [],
    "training.dataloader.num_shards": 64,
    "model.hf_assets_path": "",
    "optimizer.lr": 3e-3,
    "lr_scheduler.total_steps": None,
    "compile.enable": False,
    "metrics.log_freq": 1,
    "validation.dataset": "",
    "validation.sets": [],
    "plan.hardware": "",
    "plan.gpus": None,
}


def scale_down(config: Config, world_size: int, keep: Collection[str] = ()) -> tuple[Config, list[str]]:
    """(the twin of `config` for `world_size` processes, the keys that it changed). Keys in `keep` stay. `config` is not
    `unsound`."""
    twin, changed = deepcopy(config), []

    def put(values: dict[str, Any]) -> None:
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            if key not in keep and attrgetter(key)(twin) != value:
                setattr(attrgetter(section)(twin), name, value)
                changed.append(key)

    put(SHORT | _steps(config))
    if not quantizes(config):  # then it says no more than the type, which is that above
        put({"precision.recipe": None})
    put(_degrees(config, world_size))
    put(_model(config, twin))
    if quantizes(config) and config.precision.keep_high_precision_layers:  # which the twin may not have
        put({"precision.keep_high_precision_layers": "last 1"})
    put(_experts(twin, world_size))
    put(_batch(config, twin, world_size))
    twin.model.scale_down = False
    return twin, changed


def _steps(config: Config) -> dict[str, Any]:
    return {
        "training.steps": min(config.training.steps, 20),
        "lr_scheduler.warmup_steps": min(config.lr_scheduler.warmup_steps, 2),
    }


def _degrees(config: Config, world_size: int) -> dict[str, Any]:
    found, left = {}, world_size
    for name in DEGREES:
        key = f"parallelism.{name}_degree"
        found[key] = 2 if attrgetter(key)(config) > 1 and left % 2 == 0 else 1
        left //= found[key]
    return found | {
        "parallelism.data_parallel_shard_degree": -1,
        "parallelism.pipeline_parallel_layers_per_stage": [],
        "parallelism.pipeline_parallel_microbatch_size": 1,
    }


def _stages(twin: Config) -> int:
    p = twin.parallelism
    pp = p.pipeline_parallel_degree
    return 1 if pp == 1 else default_stages(p.pipeline_parallel_schedule, pp)


def _model(config: Config, twin: Config) -> dict[str, Any]:
    f = model_flavor(config)
    dense, groups = min(f.n_dense_layers, 1), f.num_expert_groups
    per_group = max(LEAST_EXPERTS / groups, 2 * f.top_k / f.num_limited_groups)
    sizes = SIZES | (MLA_SIZES if f.attention == "mla" else GQA_SIZES)
    if quantizes(config):
        sizes |= QUANTIZED_SIZES | ({"dense_hidden_dim": 128} if f.attention == "mla" else {})
    sizes |= {
        "n_layers": min(f.n_layers, max(dense + 2, _stages(twin))),
        "n_dense_layers": dense,
        "q_lora_rank": min(f.q_lora_rank, 32),
        "num_experts": min(f.num_experts, groups * 2 ** math.ceil(math.log2(per_group))),
    }
    return {f"model.{name}": value for name, value in sizes.items()}


def _experts(twin: Config, world_size: int) -> dict[str, Any]:
    p, moe = twin.parallelism, twin.moe
    _, shard = data_parallel_degree(twin, world_size)
    ranks = shard * p.context_parallel_degree * p.tensor_parallel_degree
    ep = math.gcd(ranks, model_flavor(twin).num_experts, p.expert_parallel_degree)
    found: dict[str, Any] = {"parallelism.expert_parallel_degree": ep}
    found |= {key: portable for key, (portable, values) in NEEDS_GPU.items() if attrgetter(key)(twin) in values}
    if ep == 1:
        found |= {"moe.dispatcher": "auto", "moe.overlap": "none"}
        names = [name for name in twin.activation_offload.tensors if name != "moe_expert_input"]
        found["activation_offload.tensors"] = names  # one rank keeps no expert input
    if moe.ranks_per_node is not None:
        found["moe.ranks_per_node"] = 2 if ep > 2 else None
        found["moe.hop_chunks"] = moe.hop_chunks if ep > 2 else 1
    return found


def _batch(config: Config, twin: Config, world_size: int) -> dict[str, Any]:
    if (stages := _stages(twin)) > 1:
        return {"training.local_batch_size": 2 * stages, "training.global_batch_size": -1}
    local, dp = min(config.training.local_batch_size, 2), math.prod(data_parallel_degree(twin, world_size))
    whole = -1 if config.training.global_batch_size == -1 else 2 * local * dp
    return {"training.local_batch_size": local, "training.global_batch_size": whole}
