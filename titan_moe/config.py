"""The schema: one dataclass per TOML section, torchtitan 0.2's section and key names for everything we support.

The string under a field is its help text. A field typed `X | None` that is None is unset: TOML has no null, so an
absent key is how one says it, or "none" to take back what a base file sets. `config_file.py` reads TOML and the command
line into these classes and checks them; nothing here checks anything. Imports neither torch nor torchtitan, so that the
planner and `--help` answer at once.
"""

from dataclasses import dataclass, field
from typing import Literal

from titan_moe.flavors import Family, ScoreFunction


@dataclass(kw_only=True)
class Job:
    dump_folder: str = ""
    """Folder of this run; empty: a new folder under ./outputs, chosen by run_train.sh and printed"""

    description: str = ""
    """One line about the run, kept in its run.json"""


@dataclass(kw_only=True)
class Model:
    name: Family = "deepseek_v3"
    """Model family. "qwen3" and "mixtral" have grouped-query attention, and experts in every layer"""

    flavor: Literal[
        "debugmodel",
        "16B",
        "236B",
        "671B",
        "Moonlight-16B-A3B",
        "Kimi-K2",
        "30B-A3B",
        "235B-A22B",
        "8x7B",
        "8x22B",
    ] = "debugmodel"
    """Model size; the fields below replace single numbers of it. "debugmodel", and of deepseek_v3 "16B", "236B",
    "671B", "Moonlight-16B-A3B" and "Kimi-K2", of qwen3 "30B-A3B" and "235B-A22B", of mixtral "8x7B" and "8x22B\""""

    scale_down: bool = False
    """Train the configuration's twin: the same structure with few and narrow layers, laid out for the processes there
    are, on a CPU in seconds (titan_moe/scale_down.py has the rule). What the command line sets stays"""

    hf_assets_path: str = ""
    """Folder that holds a tokenizer.json, or that file; empty: the built-in byte-level tokenizer"""

    vocab_size: int | None = None
    """Rows of the embedding and of the output head; at least the tokenizer's size"""

    dim: int | None = None
    """Model width D"""

    n_layers: int | None = None
    """Transformer layers, dense and MoE together"""

    n_dense_layers: int | None = None
    """How many of the first layers have a dense feed-forward instead of an MoE"""

    n_heads: int | None = None
    """Attention heads"""

    q_lora_rank: int | None = None
    """Rank of the low-rank query projection; 0: a full query projection"""

    kv_lora_rank: int | None = None
    """Rank of the compressed keys and values"""

    qk_nope_head_dim: int | None = None
    """Width of the part of a query or key head without rotary positions"""

    qk_rope_head_dim: int | None = None
    """Width of the part of a query or key head with rotary positions: all of it with grouped-query attention"""

    v_head_dim: int | None = None
    """Width of a value head"""

    dense_hidden_dim: int | None = None
    """Hidden width of a dense feed-forward"""

    moe_hidden_dim: int | None = None
    """Hidden width F of one expert; the shared expert has num_shared_experts times that"""

    num_experts: int | None = None
    """Routed experts E of one layer"""

    num_shared_experts: int | None = None
    """Shared experts of one layer, fused into one feed-forward"""

    top_k: int | None = None
    """Experts K that a token is routed to"""

    score_func: ScoreFunction | None = None
    """How router logits become scores"""

    num_expert_groups: int | None = None
    """Groups for group-limited routing; 1: none"""

    num_limited_groups: int | None = None
    """Groups that one token may use"""

    scores_per_group: int | None = None
    """How many of its best scores a group is judged by: their sum. 2 in DeepSeek-V3, 1 in DeepSeek-V2"""

    route_norm: bool | None = None
    """Divide the K scores of a token by their sum"""

    route_scale: float | None = None
    """Factor on the routing weights"""

    mscale: float | None = None
    """YaRN's attention temperature factor"""

    rope_theta: float | None = None
    """Base of the rotary frequencies"""

    rope_factor: float | None = None
    """YaRN's context extension factor; 1: none"""

    rope_beta_fast: float | None = None
    """Frequencies that turn so often within original_seq_len are left as they are by YaRN"""

    max_seq_len: int | None = None
    """Longest sequence that the rotary table of this model allows"""

    original_seq_len: int | None = None
    """Sequence length that YaRN extends from"""

    num_mtp_layers: int | None = None
    """Multi-token prediction layers, each predicting one token further ahead (arXiv 2412.19437, 2.2)"""

    norm_eps: float | None = None
    """Added to the mean square that a norm divides by"""

    latent_norm_eps: float | None = None
    """The same of the norms on compressed queries, keys and values, with latent attention"""

    num_kv_heads: int | None = None
    """With grouped-query attention: heads of keys and values, which the query heads share"""


@dataclass(kw_only=True)
class MoE:
    dispatcher: Literal["auto", "local", "alltoall", "dedup", "te_ep", "deepep", "hybridep"] = "auto"
    """How tokens reach their experts: "alltoall" sends a copy per expert, "dedup" one per rank; "local" for one
    expert-parallel rank; "te_ep": Transformer Engine's NCCL EP, in bfloat16 on Hopper and newer GPUs, at most 8,192
    tokens per rank and microbatch; "deepep" and "hybridep": these libraries' kernels, in bfloat16"""

    experts: Literal["auto", "loop", "grouped_mm", "te", "te_fused"] = "auto"
    """What computes the experts; "loop" is slow and readable, and takes any number type; "grouped_mm" is torch's, "te"
    Transformer Engine's grouped GEMM; "te_fused" is for precision.recipe = "mxfp8" on Blackwell, with SwiGLU inside
    the GEMM"""

    weighting: Literal["early", "late"] = "early"
    """Where the routing weight is multiplied in: "early" inside the expert, "late" on its output"""

    ranks_per_node: int | None = None
    """With "dedup": a token crosses to each node of so many ranks once and fans out inside it; unset: it is sent to
    each rank"""

    hop_chunks: int = 1
    """With ranks_per_node: tokens are sent in so many parts, and while one fans out inside a node the next one crosses
    to it"""

    capacity_factor: float | None = None
    """Each (rank, expert) pair keeps at most factor x tokens x K / E copies and drops the rest; unset: nothing is
    dropped. Losses then depend on how many ranks there are"""

    drop_policy: Literal["probs", "position"] = "probs"
    """Which copies are dropped: those of lowest routing weight, or of the last tokens"""

    recv_buffer: Literal["exact", "worst_case"] | float = "exact"
    """Rows that a rank has room for when it receives tokens: "exact", as many as come, which the host must wait to
    learn; "worst_case", as many as could, so that it never waits; or a factor of the mean, 1 or more, and then a step
    with more is repeated with a larger buffer"""

    te_ep_payload: Literal["bf16", "mxfp8"] = "bf16"
    """With "te_ep": type of the rows that are sent to experts, and of their gradients coming back to them; "mxfp8"
    halves the bytes, on Blackwell. What experts return, and the gradient of what they were sent, is always bf16"""

    overlap: Literal["none", "shared_expert", "half_batch"] = "none"
    """What runs while tokens travel to their experts and back, forward and backward: "shared_expert", the layer's
    shared expert, during dispatch; "half_batch", the other half of a microbatch's sequences, which go through a layer
    one step apart. With the dispatchers "dedup" and "alltoall" (docs/overlap.md)"""

    redispatch: bool = False
    """Under activation checkpointing, send tokens to their experts again in backward, instead of keeping what was
    received: less memory, more traffic"""

    router: Literal["torch", "te"] = "torch"
    """What chooses experts from the router's logits; "te": Transformer Engine's fused kernel, for routers that it can
    match"""

    load_balance_coeff: float = 1e-3
    """Step of the auxiliary-loss-free router bias per optimizer step (arXiv 2408.15664); 0: no bias"""

    load_balance_centred: bool = False
    """Take the mean off each change of the bias, as torchtitan does"""

    sequence_loss_coeff: float = 0.0
    """Weight of the sequence-wise auxiliary loss; DeepSeek-V3 has 1e-4. 0: off, as in torchtitan"""

    z_loss_coeff: float = 0.0
    """Weight of the router z-loss; 0: off"""

    force_balance: Literal["none", "round_robin", "balanced_random"] = "none"
    """Ignore the router's choice and spread tokens evenly, for benchmarks: the model does not learn to route.
    "balanced_random" respects the expert groups"""


@dataclass(kw_only=True)
class Precision:
    recipe: Literal["fp32", "bf16", "fp8_current", "fp8_block", "mxfp8", "nvfp4"] | None = None
    """Number format of the GEMMs (docs/precision.md); unset: training.mixed_precision_param, which also stays the type
    of everything that a low-precision recipe leaves alone"""

    backend: Literal["auto", "te", "emulated"] = "auto"
    """Who quantizes: Transformer Engine, on GPUs that have the format, or torch operations anywhere, which round alike
    and save no time; "auto": the first where it can"""

    experts: bool = True
    """Whether the recipe holds for the routed experts"""

    linears: list[str] = field(default_factory=lambda: ["attention", "feed_forward", "shared_experts"])
    """Linear layers that the recipe holds for besides: groups, or single ones such as "attention.wo", "w2", "lm_head",
    "eh_proj". The router's gate, norms and the embedding always stay in high precision"""

    keep_high_precision_layers: str = ""
    """Layers that the recipe leaves alone: "first 1, last 2", or numbers from 0 and ranges as in "0, 5-7"; those of
    multi-token prediction have the numbers behind the last. Empty: none"""


@dataclass(kw_only=True)
class Optimizer:
    name: Literal["AdamW", "Muon"] = "AdamW"
    """Optimizer. "Muon" is for the matrices of attention, feed-forwards and experts: one momentum instead of two
    moments, learning rate and weight decay as AdamW's, which embedding, head, router and norms keep"""

    lr: float = 8e-4
    """Peak learning rate"""

    beta1: float = 0.9
    """Decay of the first moment"""

    beta2: float = 0.95
    """Decay of the second moment"""

    momentum: float = 0.95
    """With "Muon", decay of its momentum"""

    eps: float = 1e-8
    """Added to the root of the second moment"""

    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none"""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How the update loops over parameters"""

    moments_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the two moments; unset: training.dtype. "bfloat16" beside parameters in float32 takes 8 bytes per
    parameter instead of 12, and decays of at most 0.996; updates are computed in float32 either way"""


@dataclass(kw_only=True)
class LRScheduler:
    warmup_steps: int = 200
    """Steps of linear warm-up"""

    total_steps: int | None = None
    """Steps that the schedule spans; unset: training.steps"""

    decay_ratio: float | None = None
    """Share of all steps that the final decay takes (warmup-stable-decay); unset: decay begins right after warm-up"""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay"""

    min_lr_factor: float = 0.0
    """Learning rate at the end, as a share of the peak"""


@dataclass(kw_only=True)
class DataLoader:
    num_workers: int = 0
    """Processes that read and tokenize ahead, each its share of a rank's shards; 0: in the training process"""

    prefetch_factor: int = 2
    """Batches that each worker keeps ready"""

    num_shards: int = 64
    """Logical shards the text is split into: part of what fixes the global sample order, so it never follows the mesh.
    A data-parallel degree that divides it reads only its own share"""

    text_field: str = "text"
    """Field of a .jsonl line, or column of a .parquet or a hub's dataset, that holds a document's text"""

    on_error: Literal["raise", "skip"] = "raise"
    """What a broken document does: end the run with its file and line, or be left out, counted and shown"""


@dataclass(kw_only=True)
class DataSource:
    """One [[training.mixture]] entry."""

    dataset: str
    """As training.dataset"""

    weight: float = 1.0
    """Share of the training tokens, relative to the other entries"""

    text_field: str | None = None
    """Unset: training.dataloader.text_field"""

    on_error: Literal["raise", "skip"] | None = None
    """Unset: training.dataloader.on_error"""

    add_bos: bool | None = None
    """Begin each document with the tokenizer's bos; unset: if its files say so. Not for token ids"""

    add_eos: bool | None = None
    """End each document with the tokenizer's eos; unset: yes. Not for token ids"""


@dataclass(kw_only=True)
class Training:
    dataset: str = "python_stdlib"
    """File, folder or glob of text, .jsonl or .parquet, a folder that titan_moe.tokenize wrote, "hf:owner/name:split",
    "synthetic", or "python_stdlib" (this Python's own source code)"""

    mixture: list[DataSource] = field(default_factory=list)
    """Weighted sources in place of `dataset`, each a [[training.mixture]] with dataset, weight, text_field, on_error,
    add_bos, add_eos"""

    local_batch_size: int = 8
    """Sequences per rank in one forward and backward"""

    global_batch_size: int = -1
    """Sequences per optimizer step over all ranks; -1: local_batch_size x data-parallel degree"""

    seq_len: int = 2048
    """Tokens per sequence"""

    max_norm: float = 1.0
    """Gradients are scaled down to this norm, experts included"""

    steps: int = 10000
    """Optimizer steps"""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored parameters and gradients, and of the moments unless optimizer.moments_dtype says otherwise"""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the gathered parameters and of the compute, experts included"""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type in which gradients are reduced"""

    gc_freq: int = 50
    """Steps between runs of Python's garbage collector, so that all ranks pause together"""

    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass(kw_only=True)
class Loss:
    num_chunks: int = 8
    """The output head and the cross-entropy run over this many pieces of a microbatch, so that the logits of all of
    its tokens never exist at once; 1: all at once"""

    mtp_coeff: float = 0.3
    """Weight of the mean cross-entropy of the multi-token prediction layers; DeepSeek-V3 had 0.3, then 0.1"""


@dataclass(kw_only=True)
class ValidationSet:
    """One [[validation.sets]] entry."""

    name: str
    """What it is called in the log: validation_loss/NAME and validation_perplexity/NAME"""

    dataset: str
    """As training.dataset"""

    text_field: str | None = None
    """Unset: training.dataloader.text_field"""

    on_error: Literal["raise", "skip"] | None = None
    """Unset: training.dataloader.on_error"""


@dataclass(kw_only=True)
class Validation:
    enable: bool = False
    """Report the loss on held-out documents"""

    sets: list[ValidationSet] = field(default_factory=list)
    """Further documents, each a [[validation.sets]] with name, dataset, text_field, on_error, and with a loss and a
    perplexity of its own"""

    dataset: str = ""
    """As training.dataset; empty: the documents of training.dataset that `holdout` keeps away from training"""

    holdout: float = 0.02
    """Share of documents kept away from training; used when validation.dataset is empty"""

    freq: int = 10
    """Steps between validations; the last step always has one"""

    steps: int = 10
    """Batches of the training's global batch size per validation, the same ones each time"""


@dataclass(kw_only=True)
class Parallelism:
    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model (HSDP)"""

    data_parallel_shard_degree: int = -1
    """Ranks that one copy is sharded over (FSDP2); -1: all that are left"""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered parameters are freed between forward and backward; "default": yes, but not in a pipeline, where
    every microbatch would gather them again"""

    fsdp_prefetch_layers: int = 1
    """Layers whose parameters are gathered ahead of the one that computes; each costs the memory of a whole layer"""

    fsdp_reduce_every_microbatch: bool = False
    """With gradient accumulation, reduce the gradients of each microbatch rather than keep those of the whole model,
    unsharded and in fp32, until the last one: much less memory, more traffic. Not in a pipeline, which reduces once"""

    expert_parallel_degree: int = 1
    """Ranks that the experts are spread over; they are taken from the shard, context and tensor ranks"""

    tensor_parallel_degree: int = 1
    """Ranks that heads and hidden widths are split over, with activations split by sequence between them"""

    context_parallel_degree: int = 1
    """Ranks that one sequence is split over"""

    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """Which pieces of a sequence a context rank holds: one of the start and one of the end, so that causal attention
    costs all ranks the same, or one piece"""

    pipeline_parallel_degree: int = 1
    """Ranks that the layers are split over"""

    pipeline_parallel_schedule: Literal[
        "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """In which order a pipeline's microbatches run"""

    pipeline_parallel_microbatch_size: int = 1
    """Sequences of one pipeline microbatch"""

    pipeline_parallel_layers_per_stage: list[int] = field(default_factory=list)
    """Layers of each stage, first to last; the first stage also has the embedding, the last one the head. As many
    numbers as stages: the pipeline degree with 1F1B, a multiple of it with interleaved schedules, twice it with
    V-shaped ones; only the last may be 0. Empty: balanced by FLOPs, two stages per rank where the schedule has
    several"""


@dataclass(kw_only=True)
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full"] = "selective"
    """What backward recomputes: nothing, cheap operations, or whole layers"""

    recompute: list[Literal["mla_up_proj", "swiglu", "norms", "shared_expert"]] = field(default_factory=list)
    """With mode "none": parts of every layer that backward makes again rather than keep. "norms": outputs of the norms,
    and the router's fp32 copy of one; "mla_up_proj": q, k and v of the attention kernel, from the latents; "swiglu":
    activations of dense layers and of the shared expert (those of routed experts are never kept); "shared_expert": all
    that the shared expert keeps. The start-up report says what each saves"""


@dataclass(kw_only=True)
class ActivationOffload:
    tensors: list[Literal["layer_input", "attn_q", "attn_k", "attn_v", "attn_out", "moe_expert_input"]] = field(
        default_factory=list
    )
    """Activations of every layer that wait for backward in host memory. "layer_input"; "attn_q", "attn_k", "attn_v":
    what the attention kernel takes; "attn_out": what it gives; "moe_expert_input": the rows that a rank's experts
    receive. Under activation checkpointing only what that keeps can be named. The start-up report says how much each
    is. Empty: none"""


@dataclass(kw_only=True)
class Compile:
    enable: bool = False
    """Use torch.compile"""

    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """What is compiled"""

    backend: str = "inductor"
    """torch.compile backend"""


@dataclass(kw_only=True)
class CUDAGraph:
    scope: Literal["none", "full"] = "none"
    """What is launched at once, as a CUDA graph: "full", forward and backward of a whole step. For runs whose host
    never waits for the device: with experts on several ranks only if moe.recv_buffer is not "exact". Not in a
    pipeline"""


@dataclass(kw_only=True)
class Checkpoint:
    enable: bool = False
    """Save checkpoints, and resume from the newest one in the run folder"""

    folder: str = "checkpoint"
    """Folder of the checkpoints inside the run folder"""

    interval: int = 500
    """Steps between checkpoints; the last step always has one"""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Whether training goes on while a checkpoint is written; async_with_pinned_mem needs a GPU"""

    initial_load_path: str = ""
    """What to start from when the run folder holds no checkpoint: one of another run, or a Hugging Face folder
    (config.json and safetensors in bfloat16, float16, float32, or FP8 as DeepSeek publishes)"""

    upcycle: bool = False
    """initial_load_path is a Hugging Face folder of a dense model (Qwen3, Mistral, Llama): every expert begins as its
    feed-forward, and the loss as its loss (docs/hugging_face.md)"""

    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path, not optimizer, schedule and data position"""

    last_save_model_only: bool = False
    """Leave optimizer, schedule and data position out of the last checkpoint: smaller, but the run cannot be
    extended"""

    last_save_in_hf: bool = False
    """After the last step, also write the weights as a Hugging Face folder, hf/step-N in the run folder, for
    transformers; python -m titan_moe.convert does it at any time"""

    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in a last checkpoint that holds only them, and in a Hugging Face folder"""

    keep_latest_k: int = 10
    """Checkpoints kept, at least 2; 0: all"""

    load_step: int = -1
    """Step to resume from; -1: the newest"""

    verify: Literal["full", "size", "none"] = "full"
    """What a checkpoint must pass to be loaded, or else the one before it is: all of its files are there and have the
    content that was written, or have their size; "none" also takes what has no manifest.json, as stock torchtitan's"""

    create_seed_checkpoint: bool = False
    """Save the initial weights as step 0 and stop"""

    load_only: bool = False
    """Load, but never save"""


@dataclass(kw_only=True)
class Metrics:
    log_freq: int = 10
    """Steps between logged lines; the first and the last step are always logged"""

    enable_tensorboard: bool = False
    """Write TensorBoard events"""

    save_tb_folder: str = "tb"
    """Folder of the TensorBoard events inside the run folder"""

    enable_wandb: bool = False
    """Send metrics to Weights & Biases; WANDB_PROJECT and the like say where to. A failure never stops training"""

    enable_trackio: bool = False
    """Send metrics to trackio; TRACKIO_PROJECT and the like say where to. A failure never stops training"""

    disable_color_printing: bool = False
    """Console lines without colour"""


@dataclass(kw_only=True)
class Profiling:
    step: int | None = None
    """Record this one step with torch's profiler: a trace of each rank in the run folder, see docs/profiling.md"""

    enable_profiling: bool = False
    """Record a trace every profile_freq steps"""

    save_traces_folder: str = "profile_traces"
    """Folder of the traces inside the run folder"""

    profile_freq: int = 10
    """Steps from one trace, or memory snapshot, to the next"""

    profiler_active: int = 1
    """Steps in one trace, the last of which is a multiple of profile_freq"""

    profiler_warmup: int = 3
    """Steps before them that the profiler runs and forgets, because its own start takes time"""

    ranks: list[int] = field(default_factory=list)
    """Ranks that record; empty: all"""

    enable_memory_snapshot: bool = False
    """Keep a history of the GPU's allocations, and write it every profile_freq steps, at `step`, and when memory runs
    out. Left out on a CPU"""

    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the memory snapshots inside the run folder"""

    nvtx: bool = False
    """Show the phases of each step to Nsight Systems, as NVTX ranges. Left out on a CPU"""


@dataclass(kw_only=True)
class Comm:
    mode: Literal["default", "fake_backend"] = "default"
    """"fake_backend", on run_train.sh's command line: a dry run. One process builds rank RANK of NNODES x NGPU (or of
    plan.gpus) without memory, takes a step and reports bytes and collectives; see docs/dry_run.md"""

    init_timeout_seconds: int = 300
    """Time limit of a collective until the first step is done"""

    train_timeout_seconds: int = 100
    """Time limit of a collective afterwards"""

    hang_seconds: int = 1800
    """Seconds without a collective of any rank, after which the run ends with an error, and the Python stacks of all
    ranks in its folder. Ranks that others wait for are named sooner, within the time limit of a collective. 0: no
    watchdog"""

    trace_buf_size: int = 20000
    """Entries of the NCCL flight recorder; 0: off"""


@dataclass(kw_only=True)
class Guards:
    max_skipped_steps: int = 10
    """Steps in a row that may be skipped, because loss or gradients are not finite or because of spike_sigma; one more
    ends the run. 0: the first one does. A skipped step changes no weight"""

    spike_sigma: float = 6.0
    """Skip also a step whose loss or gradient norm is more than so many standard deviations above the mean of the last
    128 that were not skipped; 0: never"""

    corruption_check_every: int = 0
    """Steps between two at which every rank computes one microbatch twice (a pipeline: a whole step) and compares it
    bit for bit, to find hardware that computes wrongly; the run ends if it differs. 0: never. Only with
    debug.deterministic"""


@dataclass(kw_only=True)
class Debug:
    seed: int = 0
    """Seed of the initial weights and of the order of the data"""

    deterministic: bool = False
    """Refuse operations that do not repeat bit for bit; slower on GPUs, where the default may use them"""

    comm_delay_ns_per_byte: float = 0.0
    """For tests of what hides communication, on CPUs: a transfer of expert parallelism takes so many nanoseconds for
    each byte that a rank receives from others, and transfers of one rank follow each other. 0: as fast as they are"""


@dataclass(kw_only=True)
class Plan:
    hardware: str = ""
    """The GPU, by a name that the planner knows (GB300, H100, ...) or the path of a TOML file with another one. For
    --plan; training takes from it only which ranks share an NVLink domain, and says if a layout does not fit them"""

    gpus: int | None = None
    """For --plan: GPUs of the whole job, in the place of NNODES x NGPU"""

    json: bool = False
    """For --plan: print the plan as JSON"""

    png: str = ""
    """For --plan: folder for a timeline, a memory chart and, with plan.scale, a scaling chart"""

    scale: list[int] = field(default_factory=list)
    """For --plan: further numbers of GPUs to plan, as in --plan.scale=1024,16384: with as many sequences per GPU and
    with as many in all as at plan.gpus, how often to save, and what failures cost"""

    calibrate: list[str] = field(default_factory=list)
    """For --plan: folders of runs on the machine to plan for, as in --plan.calibrate=RUN,RUN: their times of phases
    replace the planner's tables (CPUs), or correct them (GPUs)"""

    failure_gpu_hours: float = 50_700.0
    """For plan.scale: GPU hours for each failure that stops the job; the default is Llama 3 405B's on 16,384 H100"""

    restart_seconds: float = 600.0
    """For plan.scale: from a failure to the moment at which the checkpoint is read; the default is an assumption"""

    storage_gb_s: float = 0.12
    """For plan.scale: GB/s of each GPU when all write or read a checkpoint; the default is Llama 3's 2 TB/s for 16,384
    (arXiv 2407.21783, 3.3.1)"""

    search: bool = False
    """For --plan: look for the fastest layout of this model, batch and sequence length on these GPUs that fits them,
    instead of planning the one there is (docs/planner_search.md)"""

    search_also: list[Literal["precision", "libraries"]] = field(default_factory=list)
    """What a search may change besides: "precision", the recipe, and with it the numbers; "libraries", dispatchers and
    experts of libraries that the file does not ask for: te_ep, deepep, hybridep, te_fused"""

    toml: str = ""
    """For --plan.search: file to write the layout that was found to, based on the one that was given"""

    diff: str = ""
    """For --plan: another configuration, to say in which terms of time and memory this one differs from it. [plan] on
    the command line holds for both"""


@dataclass(kw_only=True)
class Config:
    """A whole configuration; the fields are the TOML sections."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    moe: MoE = field(default_factory=MoE)
    precision: Precision = field(default_factory=Precision)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    loss: Loss = field(default_factory=Loss)
    validation: Validation = field(default_factory=Validation)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    activation_offload: ActivationOffload = field(default_factory=ActivationOffload)
    compile: Compile = field(default_factory=Compile)
    cuda_graph: CUDAGraph = field(default_factory=CUDAGraph)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    guards: Guards = field(default_factory=Guards)
    debug: Debug = field(default_factory=Debug)
    plan: Plan = field(default_factory=Plan)
