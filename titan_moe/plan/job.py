"""Everything that fixes a planned run, in one frozen record: model, hardware, parallel layout, precision, software.

A `Job` comes from a row of published runs (`Job.from_row`, whose columns are those of published_runs.csv) or from this
trainer's configuration (`Job.from_config`). Everything in the planner takes a Job and nothing else, so that "what would
change if" is `dataclasses.replace` and another prediction.

Imports neither torch nor torchtitan.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from titan_moe.config import Config
from titan_moe.config_check import data_parallel_degree, model_flavor
from titan_moe.flavors import Flavor
from titan_moe.mesh_check import microbatch_size, sequences_per_step
from titan_moe.optimizer_check import moments_dtype
from titan_moe.pipeline_layout import V_SHAPED, pipeline_layout
from titan_moe.plan import stages as stage_layout
from titan_moe.plan.hardware import Hardware, Precision
from titan_moe.plan.parameters import Kind
from titan_moe.plan.stages import Stage
from titan_moe.precision import layers

Routing = Literal["natural", "balanced_random", "round_robin"]
Overlap = Literal["none", "shared_expert", "half_batch", "1f1b", "1f1b_delayed_wgrad", "dualpipe"]
Dispatcher = Literal["local", "alltoall", "dedup", "te_ep", "deepep", "hybridep"]
Graphs = Literal["none", "router", "attention", "full"]

RECOMPUTE_NAMES = {
    "mla_up_proj": "mla_up_proj",
    "moe_act": "swiglu",
    "swiglu": "swiglu",
    "layernorm": "norms",
    "norms": "norms",
    "shared_experts": "shared_expert",
    "shared_expert": "shared_expert",
    "mlp": "mlp",
    "core_attn": "core_attention",
    "core_attention": "core_attention",
    "moe": "moe",
}
"""Modules that backward may recompute, by this trainer's and Megatron's names; "mlp" is the dense feed-forward"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A planned run. Counts are whole numbers; sequence lengths in tokens; degrees in GPUs."""

    model: Flavor
    model_name: str
    hardware: Hardware
    gpus: int
    precision: Precision
    low_precision: frozenset[str] | None = None
    """Linear layers that are in `precision`, by their names in precision/layers.py and "experts"; the others are in
    BF16. None: all but the output head, as in published runs"""
    kept_layers: frozenset[int] = frozenset()
    """Layers that are in BF16 whatever `precision` is; MTP layers have the numbers behind the others"""
    global_batch_size: int
    """Sequences per optimizer step"""
    micro_batch_size: int
    """Sequences of one forward and backward on one data-parallel rank"""
    seq_len: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int = 1
    """Pipeline stages per rank"""
    ep: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    stages: tuple[Stage, ...]
    """pp x vp of them, first to last"""
    schedule: str = "1F1B"
    sharding: Literal["fsdp", "zero1"] = "zero1"
    """"fsdp": parameters gathered per layer (FSDP2); "zero1": whole parameters, sharded optimizer (Megatron)"""
    reshard_after_forward: bool = True
    """With fsdp: parameters are gathered again for backward"""
    prefetch_layers: int = 1
    """With fsdp: layers gathered ahead of the one that computes"""
    reduce_every_microbatch: bool = False
    """With fsdp: gradients of every microbatch are reduced, not kept whole until the last one"""
    recompute_mode: Literal["none", "selective", "full"] = "none"
    recompute: frozenset[str] = frozenset()
    """Modules recomputed in every layer, values of RECOMPUTE_NAMES"""
    offload: frozenset[str] = frozenset()
    """Activations that wait for backward in host memory: values of activation_offload.tensors"""
    dispatcher: Dispatcher = "alltoall"
    mxfp8_payload: bool = False
    """Whether rows travel to experts as MXFP8, as with moe.te_ep_payload"""
    recv_buffer: Literal["exact", "worst_case"] | float = "exact"
    """Rows that a rank has room for; only te_ep's own memory follows it here"""
    ranks_per_node: int | None = None
    """With dedup: a token crosses to a node of so many ranks once, and is handed on there"""
    routing: Routing = "natural"
    early_weighting: bool = True
    """Routing weights multiplied in at SwiGLU rather than on the experts' output"""
    redispatch: bool = False
    """Tokens are dispatched again in backward"""
    overlap: Overlap = "none"
    """How expert-parallel communication is hidden: inside a layer, as moe.overlap does, or behind another microbatch"""
    comm_sms: int = 20
    """Streaming multiprocessors that expert-parallel communication takes while it runs"""
    release: str = "titan"
    """Software profile (profiles.py)"""
    graphs: Graphs = "none"
    """What CUDA graphs cover: "router" router and preprocessing, "attention" that and attention, "full" all"""
    fp8_attention: bool = False
    fused_grouped_mlp: bool = False
    """Grouped GEMM, SwiGLU and quantization in one kernel each way"""
    sync_free: bool = False
    """The host never waits for counts"""
    param_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    muon: bool = False
    """Matrices of layers have one momentum, and updates made of whole matrices"""
    loss_chunks: int = 1
    notes: tuple[str, ...] = ()
    """What the source left open, and what was assumed"""

    def __post_init__(self) -> None:
        if self.tp * self.cp * self.pp * self.dp != self.gpus:
            raise ValueError(
                f"tp x cp x pp x data-parallel = {self.tp} x {self.cp} x {self.pp} x {self.dp} = "
                f"{self.tp * self.cp * self.pp * self.dp}, but there are {self.gpus} GPUs"
            )
        if self.model.num_experts % self.ep:
            raise ValueError(f"ep = {self.ep}: must divide the {self.model.num_experts} experts")
        if self.tp * self.cp * self.dp_shard * self.dp_replicate % self.ep:
            raise ValueError(f"ep = {self.ep}: must divide the {self.gpus // self.pp} ranks of a pipeline stage")
        if len(self.stages) != self.pp * self.vp:
            raise ValueError(f"{len(self.stages)} stages: must be pp x vp = {self.pp} x {self.vp}")
        if self.global_batch_size % (self.micro_batch_size * self.dp):
            raise ValueError(
                f"global batch size {self.global_batch_size}: must be a multiple of micro batch size x data-parallel "
                f"degree = {self.micro_batch_size} x {self.dp} = {self.micro_batch_size * self.dp}"
            )

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts of the same stage."""
        return self.gpus // (self.pp * self.ep)

    @property
    def microbatches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank, outside attention and the dense GEMMs (TP splits the sequence)."""
        return self.micro_batch_size * self.seq_len // (self.tp * self.cp)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    @property
    def num_mtp_layers(self) -> int:
        return sum(stage.mtp for stage in self.stages)

    def precision_of(self, linears: Iterable[str]) -> Precision:
        """What a GEMM over these linear layers at once computes in: the low precision only if it holds for each."""
        if self.low_precision is None:
            low = "lm_head" not in linears
        else:
            low = self.low_precision.issuperset(linears)
        return self.precision if low else "bf16"

    def kept_in(self, index: int) -> dict[Kind, int]:
        """How many layers of each kind in a stage are left in BF16."""
        before, stage = self.stages[:index], self.stages[index]
        first, first_mtp = sum(s.dense + s.moe for s in before), self.model.n_layers + sum(s.mtp for s in before)
        starts: dict[Kind, int] = {"dense": first, "moe": first + stage.dense, "mtp": first_mtp}
        return {
            kind: len(self.kept_layers.intersection(range(start, start + getattr(stage, kind))))
            for kind, start in starts.items()
        }

    def stage_indices(self, rank: int) -> list[int]:
        """Places in `stages` of what one pipeline rank holds: every pp-th, or with a V-shaped schedule one from each
        end."""
        if self.vp == 2 and self.schedule in V_SHAPED:
            return [rank, 2 * self.pp - 1 - rank]
        return list(range(rank, len(self.stages), self.pp))

    def stages_of_rank(self, rank: int) -> list[Stage]:
        """The stages that one pipeline rank holds."""
        return [self.stages[i] for i in self.stage_indices(rank)]

    @staticmethod
    def from_row(row: Mapping[str, str]) -> "Job":
        """The run that a row in the format of published_runs.csv describes. Raises ValueError, naming the column, for a
        value that is no such thing; LookupError for a row without a layout or with a model that has no sizes here."""
        from titan_moe.plan.rows import job_from_row  # rows.py makes Jobs

        return job_from_row(row)

    @staticmethod
    def from_config(config: Config, gpus: int, hardware: Hardware) -> "Job":
        """The run that `gpus` processes would make of this trainer's `config`. Raises the trainer's own errors."""
        return _from_config(config, gpus, hardware)


def _from_config(config: Config, gpus: int, hardware: Hardware) -> Job:
    from titan_moe.config_file import raise_on_problems  # needs tomli, which reading published runs does not

    raise_on_problems(config, gpus)
    model, p = model_flavor(config), config.parallelism
    tp, cp, pp = p.tensor_parallel_degree, p.context_parallel_degree, p.pipeline_parallel_degree
    replicate, shard = data_parallel_degree(config, gpus)
    counts = pipeline_layout(config, model).layers if pp > 1 else [model.n_layers]
    auto = "local" if p.expert_parallel_degree == 1 else "dedup"
    ac, q = config.activation_checkpoint, config.precision
    low, _ = layers.named(q.linears, layers.linears(model))
    low |= {"experts"} if q.experts else set()
    return Job(
        model=model,
        model_name=f"{config.model.name} {config.model.flavor}",
        hardware=hardware,
        gpus=gpus,
        precision="bf16" if q.recipe is None or q.recipe == "fp32" else q.recipe,
        low_precision=frozenset(low),
        kept_layers=layers.kept_layers(q.keep_high_precision_layers, model.n_layers, model.num_mtp_layers),
        global_batch_size=sequences_per_step(config, gpus),
        micro_batch_size=microbatch_size(config),
        seq_len=config.training.seq_len,
        tp=tp,
        cp=cp,
        pp=pp,
        vp=len(counts) // pp,
        ep=p.expert_parallel_degree,
        dp_replicate=replicate,
        dp_shard=shard,
        stages=stage_layout.from_counts(list(counts), model.n_dense_layers, model.num_mtp_layers),
        schedule=p.pipeline_parallel_schedule,
        sharding="fsdp",
        prefetch_layers=p.fsdp_prefetch_layers,
        reshard_after_forward={"always": True, "never": False}.get(p.fsdp_reshard_after_forward, pp == 1),
        reduce_every_microbatch=p.fsdp_reduce_every_microbatch,
        recompute_mode=ac.mode,
        recompute=frozenset(ac.recompute),
        offload=frozenset(config.activation_offload.tensors),
        dispatcher=auto if config.moe.dispatcher == "auto" else config.moe.dispatcher,
        mxfp8_payload=config.moe.te_ep_payload == "mxfp8",
        recv_buffer=config.moe.recv_buffer,
        ranks_per_node=config.moe.ranks_per_node,
        routing="natural" if config.moe.force_balance == "none" else config.moe.force_balance,
        early_weighting=config.moe.weighting == "early",
        redispatch=config.moe.redispatch,
        fused_grouped_mlp=config.moe.experts == "te_fused",
        overlap=config.moe.overlap,  # torch runs DualPipeV's paired forward and backward one after the other
        release="titan",
        graphs=config.cuda_graph.scope,
        sync_free=p.expert_parallel_degree == 1 or config.moe.recv_buffer != "exact",
        param_dtype=config.training.dtype,
        grad_dtype=config.training.dtype,
        moment_dtype=moments_dtype(config),
        muon=config.optimizer.name == "Muon",
        loss_chunks=config.loss.num_chunks,
    )
