"""Broken configurations, each with the exact messages it must give: tests/golden/broken_configurations.txt.

Most are found by walking the schema, so a new key has its cases by itself; what must hold between keys has cases in
CASES, and a message of a check that no case gives is a failure here. After a change of keys, checks or messages run

    python -m tests.test_broken_configurations

and read the difference of the golden file as a user would: does each line name the place, the mistake and the way out?
"""

import ast
import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest.mock import patch

from titan_moe import (
    config_check,
    config_file,
    flavor_check,
    flavors,
    launch,
    mesh_check,
    mixture_check,
    moe_check,
    optimizer_check,
    pipeline_check,
    precision_check,
    preflight,
    recompute_facts,
    te_ep_check,
    te_router_check,
    titan02,
    titan_dispatchers_check,
    upcycle_check,
)
from titan_moe.config_file import LEAVES, SECTIONS
from titan_moe.config_keys import build, get, not_none
from titan_moe.config_print import literal
from titan_moe.sources.record import Listing

GOLDEN = Path(__file__).parent / "golden" / "broken_configurations.txt"
REGENERATE = "run `python -m tests.test_broken_configurations` and review the difference of the golden file"


@dataclass(frozen=True, kw_only=True)
class Case:
    text: str = ""  # of run.toml
    words: str = ""  # of the command line
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # others beside it; an empty name in "x/" is a folder

    def __str__(self) -> str:
        others = [f"({name}) {line}" for name, text in self.files.items() for line in text.split("\n")]
        env = [f"{name}={value}" for name, value in self.env.items()]
        command = [f"$ {' '.join([*env, self.words])}".rstrip()] if env or self.words else []
        return "\n".join([*(self.text.split("\n") if self.text else []), *others, *command])


def case(text: str = "", *words: str, world: int = 1, **files: str) -> Case:
    env = {"NGPU": str(world)} if world > 1 else {}
    return Case(text=text, words=" ".join(words), env=env, files={f"{name}.toml": t for name, t in files.items()})


# ---------------------------------------------------------------------------------------------------------------------
# Found by walking the schema


def wrong_types() -> Iterator[Case]:
    """Every key with a value of another type."""
    for key, hint in LEAVES.items():
        kind = not_none(hint)
        yield case(f"{key} = {5 if kind is str or get_origin(kind) is Literal else literal('x')}")
        if get_origin(kind) is list:
            yield case(f"{key} = [true]")


def misspelt_choices() -> Iterator[Case]:
    """Every choice without its last letter, or with one more."""
    for key, hint in LEAVES.items():
        kind = not_none(hint)
        element = get_args(kind)[0] if get_origin(kind) is list else kind
        if get_origin(element) is Literal:
            for choice in get_args(element):
                wrong = choice[:-1] if len(choice) > 1 and choice[:-1] not in get_args(element) else f"{choice}x"
                yield case(f"{key} = {literal([wrong] if get_origin(kind) is list else wrong)}")


def misspelt_keys() -> Iterator[Case]:
    """In every section its last key without its second letter, and every section without its second letter."""
    for section in SECTIONS:
        key = [leaf for leaf in LEAVES if leaf.rpartition(".")[0] == section][-1].rpartition(".")[2]
        yield case(f"{section}.{key[0]}{key[2:]} = 1")
        yield case(f"[{section[0]}{section[2:]}]")


def broken_rules() -> Iterator[Case]:
    """Every rule on a single number, for every key that it goes for; and no float may be infinite or not a number."""
    candidates = [0, -1, -2, 1, 2, 0.0, -0.5, 1.0, 1.5, 2**63]
    for _, holds, paths in config_check.RULES:
        for key in paths.split():
            kinds = not_none(LEAVES[key]), *get_args(LEAVES[key])
            yield case(f"{key} = {next(n for n in candidates if type(n) in kinds and not holds(n))}")
    for key, hint in LEAVES.items():
        if float in (hint, *get_args(hint)):
            yield case(f"{key} = nan")
            yield case(f"{key} = inf")


def from_torchtitan() -> Iterator[Case]:
    """Every key of 0.2, and every former one of ours, that is not taken, or not with every value."""
    other = {False: True, "": "x", 1: 2}
    for key, change in (titan02.CHANGED | titan02.FORMER).items():
        match change:
            case titan02.Renamed():
                yield case(f"{key} = 1")
            case titan02.Refused(unless=unless, only=only):
                values: list[Any] = [4 if value is int else value for value in only]
                values = values or [["x"] if unless[0] == [] else other[unless[0]]]
                yield from (case(f"{key} = {literal(value)}") for value in values)
            case titan02.Translated():
                yield case(f'{key} = "x"')


# ---------------------------------------------------------------------------------------------------------------------
# Written by hand: what must hold between keys, files and the command line

UNFIT_FOR_A_LIBRARY = """parallelism.expert_parallel_degree = 3
training.mixed_precision_param = "float32"
moe.capacity_factor = 1.25
moe.recv_buffer = 1.5
moe.redispatch = true
activation_checkpoint.mode = "full"
model.dim = 260
model.num_experts = 9
model.num_expert_groups = 1
model.num_limited_groups = 1"""
TE_EP = 'moe.dispatcher = "te_ep"\nparallelism.expert_parallel_degree = 2'
CASES = [
    # guards
    case(f"guards.corruption_check_every = 100\n{TE_EP}", world=2),
    # degrees and batch
    case("parallelism.data_parallel_replicate_degree = 4", world=6),
    case("parallelism.data_parallel_shard_degree = 4", world=6),
    case("parallelism.data_parallel_replicate_degree = 2\nparallelism.data_parallel_shard_degree = 4", world=4),
    case("parallelism.expert_parallel_degree = 8", world=4),
    case("parallelism.expert_parallel_degree = 16", world=16),
    case("parallelism.expert_parallel_degree = 3", world=4),
    case("training.global_batch_size = 40", world=4),
    case("training.global_batch_size = 8", world=2),
    case("training.global_batch_size = 0"),
    case("[training]\nlocal_batch_size = 3\nglobal_batch_size = -16", "--parallelism.data_parallel_shard_degree=2"),
    case("[parallelism]\ndata_parallel_replicate_degree = 2\ntensor_parallel_degree = 2", world=6),
    case("[parallelism]\ndata_parallel_shard_degree = 3\ntensor_parallel_degree = 2", world=8),
    case("parallelism.tensor_parallel_degree = 3", world=3),
    case("[parallelism]\ntensor_parallel_degree = 2\nexpert_parallel_degree = 16", world=8),
    case("model.num_experts = 8\nmodel.moe_hidden_dim = 250\nparallelism.data_parallel_shard_degree = 16", world=16),
    case("model.moe_hidden_dim = 250\nparallelism.expert_parallel_degree = 4", world=16),
    case("parallelism.context_parallel_degree = 2\ntraining.seq_len = 250", world=2),
    case("[parallelism]\ncontext_parallel_degree = 3\ntensor_parallel_degree = 2", world=6),
    Case(text="parallelism.context_parallel_degree = 2\ntraining.seq_len = 320", env={"NGPU": "2", "GPUS": "2"}),
    case("model.num_mtp_layers = 1\nparallelism.pipeline_parallel_degree = 2", world=2),
    case("model.num_mtp_layers = 1\nparallelism.context_parallel_degree = 2", world=2),
    case("model.num_mtp_layers = 8\ntraining.seq_len = 8"),
    # low precision
    case('[precision]\nrecipe = "mxfp8"\nlinears = ["atention", "wqa", "router.gate"]\nexperts = false'),
    case('[precision]\nrecipe = "mxfp8"\nlinears = []\nexperts = false'),
    case('[precision]\nrecipe = "mxfp8"\nlinears = []\nkeep_high_precision_layers = "last 3"'),
    case('precision.keep_high_precision_layers = "last 1"'),
    case('[precision]\nrecipe = "bf16"\nkeep_high_precision_layers = "0"'),
    *(
        case(f'[precision]\nrecipe = "mxfp8"\nkeep_high_precision_layers = "{layers}"')
        for layers in ("first 5, last 1", "first 1, 4", "3-1", "first one")
    ),
    case('model.num_mtp_layers = 1\n[precision]\nrecipe = "mxfp8"\nkeep_high_precision_layers = "4, 5"'),
    case('precision.recipe = "fp32"', "--training.mixed_precision_param=bfloat16"),
    case('[model]\ndim = 248\nmoe_hidden_dim = 72\n[precision]\nrecipe = "nvfp4"'),
    case(
        'parallelism.tensor_parallel_degree = 2\n[model]\nmoe_hidden_dim = 96\n[precision]\nrecipe = "mxfp8"', world=2
    ),
    # the pipeline
    case("parallelism.pipeline_parallel_layers_per_stage = [2, 2]"),
    case("parallelism.pipeline_parallel_microbatch_size = 2"),
    case("parallelism.pipeline_parallel_degree = 8", world=8),
    # a number that cannot be, and what has nothing to do with it
    case(
        "model.num_mtp_layers = 1\n[training]\nlocal_batch_size = 0\nglobal_batch_size = 7\n[parallelism]\n"
        "pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = [5, -1]",
        world=2,
    ),
    case(
        'activation_checkpoint.recompute = ["norms"]\ntraining.seq_len = 129\n[parallelism]\n'
        "pipeline_parallel_degree = 0\ntensor_parallel_degree = 3\nexpert_parallel_degree = 3\n"
        "pipeline_parallel_layers_per_stage = [2, 3]",
    ),
    case("comm.train_timeout_seconds = 1000000000000000000000000"),
    case('[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = "Interleaved1F1B"', world=4),
    case("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = [1, 1, 2]", world=2),
    case(
        '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "DualPipeV"\n'
        "pipeline_parallel_layers_per_stage = [2, 2]",
        world=2,
    ),
    case(
        '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"\n'
        "pipeline_parallel_layers_per_stage = [2, 1, 1]",
        world=2,
    ),
    case("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = [5, -1]", world=2),
    case("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = [2, 3]", world=2),
    case("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = [0, 4]", world=2),
    case("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3", world=2),
    case("[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_microbatch_size = 4", world=4),
    case(
        "training.local_batch_size = 5\n[parallelism]\npipeline_parallel_degree = 2\n"
        'pipeline_parallel_schedule = "Interleaved1F1B"',
        world=2,
    ),
    case(
        '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"\n'
        "[compile]\nenable = true",
        world=2,
    ),
    case(
        '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "DualPipeV"\n'
        'fsdp_reshard_after_forward = "always"',
        world=2,
    ),
    case("[parallelism]\npipeline_parallel_degree = 2\nfsdp_reduce_every_microbatch = true", world=2),
    # recompute
    case('activation_checkpoint.recompute = ["norms"]'),
    case('model.name = "qwen3"\n[activation_checkpoint]\nmode = "none"\nrecompute = ["mla_up_proj"]'),
    case('[activation_checkpoint]\nmode = "none"\nrecompute = ["norms", "swiglu"]\n[compile]\nenable = true'),
    # the MoE region
    case('moe.router = "te"\nmoe.force_balance = "round_robin"'),
    case('moe.router = "te"\nmodel.route_norm = false'),
    case('moe.router = "te"\nmodel.score_func = "softmax"'),
    *(case(f'moe.dispatcher = "{name}"\n{UNFIT_FOR_A_LIBRARY}', world=3) for name in ("deepep", "hybridep")),
    Case(text='moe.dispatcher = "deepep"\nparallelism.expert_parallel_degree = 2', env={"NGPU": "2", "GPUS": "2"}),
    case("moe.ranks_per_node = 2\nmoe.recv_buffer = 1.5\nparallelism.expert_parallel_degree = 4", world=4),
    case('moe.dispatcher = "te_ep"'),
    case(f'{TE_EP}\ntraining.mixed_precision_param = "float32"\nmoe.capacity_factor = 1.25', world=2),
    case(f"{TE_EP}\nmodel.dim = 260\nmodel.top_k = 33\nmodel.num_experts = 66", world=2),
    case(f"{TE_EP}\ntraining.local_batch_size = 9", world=2),
    case(f"{TE_EP}\ntraining.local_batch_size = 1\ntraining.seq_len = 63", world=2),
    case(f"{TE_EP}\ntraining.seq_len = 16384\ntraining.local_batch_size = 1\nmodel.max_seq_len = 16384", world=2),
    case('moe.experts = "te"'),
    case('moe.experts = "te_fused"'),
    case(f'{TE_EP}\nmoe.te_ep_payload = "mxfp8"\ntraining.local_batch_size = 1\ntraining.seq_len = 68', world=2),
    case('moe.te_ep_payload = "mxfp8"'),
    # low precision by Transformer Engine
    case('[precision]\nrecipe = "mxfp8"\nbackend = "te"\n[plan]\nhardware = "H100"'),
    case('moe.experts = "te"\n[precision]\nrecipe = "fp8_current"\nbackend = "emulated"'),
    case('moe.experts = "loop"\n[precision]\nrecipe = "nvfp4"\nbackend = "te"\n[plan]\nhardware = "MI300X"'),
    case('precision.backend = "emulated"'),
    case('moe.dispatcher = "local"\nparallelism.expert_parallel_degree = 2', world=2),
    case('moe.dispatcher = "alltoall"'),
    case('moe.dispatcher = "dedup"'),
    case("moe.ranks_per_node = 3\nparallelism.expert_parallel_degree = 4", world=4),
    case("moe.hop_chunks = 2\nparallelism.expert_parallel_degree = 4", world=4),
    case('moe.dispatcher = "alltoall"\nmoe.ranks_per_node = 2\nparallelism.expert_parallel_degree = 4', world=4),
    # moments of the optimizer
    case('optimizer.moments_dtype = "bfloat16"\noptimizer.beta2 = 0.999'),
    case('optimizer.moments_dtype = "float32"\ntraining.dtype = "bfloat16"'),
    case('[optimizer]\nname = "Muon"\nmomentum = 1.0\nmoments_dtype = "bfloat16"'),
    # lengths and steps
    case("training.seq_len = 32768"),
    case("lr_scheduler.total_steps = 99"),
    case("[lr_scheduler]\ntotal_steps = 99\n[training]\nsteps = 100"),
    case("[validation]\nenable = true\nholdout = 1.0"),
    # files and checkpoints
    case('training.dataset = ""'),
    case('training.dataset = "gone"'),
    case('[validation]\nenable = true\ndataset = "gone/*.txt"\n[training]\ndataset = "synthetic"'),
    case('[[training.mixture]]\ndataset = ""\n[[training.mixture]]\ndataset = "synthetic"\nweight = 0'),
    case(
        '[[training.mixture]]\ndataset = "synthetic"\n[[training.mixture]]\ndataset = "synthetic"\nweight = -1\n'
        '[[training.mixture]]\nweight = nan\ndataset = "synthetic"'
    ),
    case('training.mixture = [\n  { dataset = "synthetic" },\n  { dataset = "synthetic", weight = 1e-9 },\n]'),
    case('[[training.mixture]]\ndataset = "synthetic"\nweight = 1e308'),
    case(
        '[[validation.sets]]\nname = "a"\ndataset = "synthetic"\n[[validation.sets]]\nname = "a"\ndataset = ""\n'
        '[[validation.sets]]\nname = "x/y"\ndataset = "synthetic"'
    ),
    case('[validation]\nenable = true\nsets = [{ name = "code", dataset = "gone" }, { dataset = "gone" }]'),
    case('[validation]\nenable = true\nsets = [\n  { name = "code", dataset = "gone" },\n]'),
    case('[[training.mixture]]\ndataset = "synthetic"\n[[training.mixture]]\nweigth = 2.0\non_error = "skpi"'),
    case('training.mixture = [\n  { dataset = "gone" },\n]'),
    case(
        '[[training.mixture]]\ndataset = "synthetic"\nweigth = 2.0\nweight = 0\n[[training.mixture]]\n'
        'dataset = "synthetic"\nweight = nan'
    ),
    case('training.dataset = "python_stdlib"\n[[training.mixture]]\ndataset = "synthetic"'),
    case('[[training.mixture]]\ndataset = "synthetic"', "--training.dataset=gone"),
    case(
        'base = "a.toml"\n[training]\ndataset = "gone"',
        a='[training]\ndataset = "away"\n[[training.mixture]]\ndataset = "synthetic"',
    ),
    case('[[training.mixture]]\ndataset = "gone"\n[[training.mixture]]\nweight = 2\ndataset = "away/*.txt"'),
    case('job.dump_folder = "s3://bucket/run"'),
    case('checkpoint.folder = "s3://bucket"'),
    case('checkpoint.folder = ""'),
    case('checkpoint.folder = "/x"'),
    case('checkpoint.folder = "x/../.."'),
    case('metrics.save_tb_folder = "."'),
    case('checkpoint.initial_load_path = "."'),
    case('checkpoint.initial_load_path = "gone"\ncheckpoint.enable = true'),
    case('[checkpoint]\nenable = true\nupcycle = true\n[model]\nname = "qwen3"\nroute_norm = false\nroute_scale = 2.5'),
    case("checkpoint.upcycle = true"),
    Case(
        text='checkpoint = { enable = true, upcycle = true, initial_load_path = "step-1" }\nmodel.name = "qwen3"',
        files={"step-1/manifest.json": "{}"},
    ),
    case('comm.mode = "fake_backend"'),
    case("checkpoint.load_step = 5"),
    case("checkpoint.load_step = 5\ncheckpoint.enable = true", "--job.dump_folder=here"),
    Case(
        text='checkpoint.load_step = 5\ncheckpoint.enable = true\njob.dump_folder = "."',
        files={"checkpoint/step-5/x": "", "checkpoint/step-10/x": ""},
    ),
    case("checkpoint.create_seed_checkpoint = true"),
    case("checkpoint.create_seed_checkpoint = true\ncheckpoint.enable = true\ncheckpoint.load_only = true"),
    case('checkpoint.create_seed_checkpoint = true\ncheckpoint.enable = true\ncheckpoint.initial_load_path = "step-1"'),
    case('checkpoint.async_mode = "async_with_pinned_mem"'),
    case('model.hf_assets_path = "gone"'),
    case("model.vocab_size = 100"),
    case('job.dump_folder = "~nobody-has-this-name/x"'),
    case('job.dump_folder = "a\\u0000b"'),
    Case(text='job.dump_folder = "taken"', files={"taken/run.json": '{"run_id": "r1", "attempt": 1}'}),
    # the model's sizes
    case("model.vocab_size = 0\nmodel.dim = 0\nmodel.n_layers = 0\nmodel.n_heads = 0\nmodel.kv_lora_rank = 0"),
    case("model.moe_hidden_dim = 0\nmodel.num_experts = 0\nmodel.num_shared_experts = 0\nmodel.num_expert_groups = 0"),
    case("model.qk_rope_head_dim = 31"),
    case("model.n_dense_layers = 4"),
    case("model.top_k = 0"),
    case("model.num_expert_groups = 3"),
    case("model.num_expert_groups = 8"),
    case("model.scores_per_group = 3"),
    case('model.name = "mixtral"\nmodel.rope_beta_fast = 1.0\nmodel.latent_norm_eps = 1e-5'),
    case("model.num_limited_groups = 5"),
    case("model.top_k = 5"),
    case('model.name = "qwen3"\nmodel.flavor = "671B"'),
    case('[model]\nname = "mixtral"\nflavor = "16B"\nscale_down = true'),
    case('[model]\nname = "qwen3"\nn_dense_layers = 1\nq_lora_rank = 32\nnum_mtp_layers = 1\nmscale = 0.7'),
    case('[model]\nname = "mixtral"\nv_head_dim = 32\nnum_kv_heads = 3'),
    case("model.num_kv_heads = 2"),
    # the environment
    Case(env={"NGPU": "two", "NNODES": "0"}),
    Case(env={"RUN_ID": "a/b"}),
    Case(env={"NNODES": "2"}),
    # TOML itself
    case("[training\nsteps = 5"),
    case("[training]\nsteps = 5\n\nsteps = 6"),
    case("[training]\nsteps = 5\n[job]\n[training]\nseq_len = 5"),
    case("training.steps = "),
    case('job.description = "half'),
    case("training = 5"),
    case("[[training]]\nsteps = 5"),
    case("[training.steps]\nx = 5"),
    case("steps = 5"),
    case("[optimizer]\nwarmup_steps = 5"),
    case("[moe.routing]\nx = 5"),
    case('"training.steps" = 5'),
    case('[training]\n"a\\nb" = 5\n"" = 5'),
    case('[compile]\ncomponents = [\n  "loss",  # = "modle"\n  "modle",\n  5,\n]'),
    case("training.dataloader = { num_workers = -1, prefetch_factor = 2.5 }"),
    # a base
    case('base = "gone.toml"'),
    case('base = "run.toml"'),
    case('base = "a.toml"', a='base = "run.toml"'),
    case('base = ["a.toml", "b.toml"]'),
    case('base = "a.toml"\ntraining.stpes = 5', a="[training]\nsteps = 'x'\nseq_len = 32768"),
    case('base = "a.toml"\nlr_scheduler.total_steps = 5', "--training.seq_len=32768", a="[training]\nsteps = 10"),
    case('base = "a.toml"', a="[training"),
    case('[training]\nbase = "a.toml"'),
    # the command line
    case("", "--training.stpes=5", "--a.b=1", "--training.steps", "--training.dataloader=2", "stray"),
    case("", "--training.steps=ten", "--checkpoint.enable=1", "--compile.components=loss,modle", "--base=a.toml"),
    case("", "--training.compile", "--optimizer.lr=nan", "--model.flavor=16b", "--job.config_file=b.toml"),
    case("", "--parallelism.expert_parallel_degree=3", "--training.global_batch_size=5", world=4),
    # two keys for one thing
    case('debug.moe_force_load_balance = true\nmoe.force_balance = "balanced_random"'),
    # five different mistakes
    case(
        '[optimizer]\nlr = "8e-4"\n[lr_scheduler]\nlr_min = 0.1\n[training]\nstpes = 10\nseq_len = 32768\n'
        '[activation_checkpoint]\nmode = "selectiv"'
    ),
]


def all_cases() -> list[Case]:
    found = [*wrong_types(), *misspelt_choices(), *misspelt_keys(), *broken_rules(), *from_torchtitan(), *CASES]
    return list({str(case): case for case in found}.values())


def messages(broken: Case) -> str:
    """What the check before the start says, without the line that counts the mistakes."""
    err = io.StringIO()
    with contextlib.ExitStack() as stack, contextlib.redirect_stderr(err):
        stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))
        for name, text in {"run.toml": broken.text, **broken.files}.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, encoding="utf-8")
        if "dataset" not in broken.text:  # listing one takes longer than all else
            stack.enter_context(patch.object(preflight, "list_all", return_value=Listing([], None, {})))
        folder = os.getcwd()
        status = launch.main(["run.toml", *broken.words.split()], broken.env)
    first, *rest = err.getvalue().splitlines()
    while first.startswith("note: "):
        first, *rest = rest
    assert status == 2, f"is accepted, but should not be:\n{broken}"
    assert re.fullmatch(r"run.toml: \d+ mistakes?", first) and int(first.split()[1]) == len(rest)
    assert all(line.startswith("    ") for line in rest)
    return "\n".join(rest).replace(folder, "/FOLDER")


def rendered() -> str:
    return "\n\n".join(f"{broken}\n{messages(broken)}" for broken in all_cases()) + "\n"


# ---------------------------------------------------------------------------------------------------------------------


def test_every_broken_configuration_gives_its_messages() -> None:
    golden, now = (text.rstrip().split("\n\n") for text in (GOLDEN.read_text(encoding="utf-8"), rendered()))
    changed = [f"{block}\n" for block in now if block not in golden] + [f"(gone) {b}\n" for b in golden if b not in now]
    assert not changed, f"{len(changed)} differ from {GOLDEN.name}; {REGENERATE}:\n\n" + "\n".join(changed[:20])
    assert golden == now, f"another order than in {GOLDEN.name}; {REGENERATE}"
    assert len(golden) > 300


def test_every_message_of_a_check_has_a_case() -> None:
    """Each text in the checks that reads like a message, as a pattern, is found among the golden messages."""
    given = GOLDEN.read_text(encoding="utf-8")
    missing = []
    modules = (
        *(config_check, flavor_check, flavors, launch, mesh_check, mixture_check, moe_check, pipeline_check),
        *(optimizer_check, precision_check, recompute_facts, te_ep_check, te_router_check, titan_dispatchers_check),
        upcycle_check,
    )
    for module in modules:
        path = Path(module.__file__ or "")
        for line, pattern in templates(ast.parse(path.read_text(encoding="utf-8"))):
            if not re.search(pattern, given):
                missing.append(f"{path.name}:{line}: no broken configuration gives this message: add one to CASES here")
    assert not missing, "\n".join([*missing, f"then {REGENERATE}"])


def templates(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and pattern of every text with a colon in the functions that check, with anything for what is put in."""
    functions = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name not in ("main", "_print_config")]
    for function in functions:
        formatted = [node for node in ast.walk(function) if isinstance(node, ast.JoinedStr)]
        parts = {inner for node in formatted for inner in ast.walk(node)}
        docstring = function.body[0].value if isinstance(function.body[0], ast.Expr) else None
        for node in ast.walk(function):
            if isinstance(node, ast.JoinedStr):
                pieces = [p.value if isinstance(p, ast.Constant) else None for p in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
                pieces = [node.value]
            else:
                continue
            if node is not docstring and any(": " in piece for piece in pieces if piece):
                yield node.lineno, "".join(".*" if piece is None else re.escape(piece) for piece in pieces)


def test_the_values_that_cases_start_from_are_sound() -> None:
    """Or a case would give messages that are not its own."""
    assert config_check.check(build({}), 1) == []
    assert all(get(build({}), key) is not None or type(None) in get_args(hint) for key, hint in LEAVES.items())
    assert config_file.LEAVES is LEAVES


if __name__ == "__main__":
    GOLDEN.write_text(rendered(), encoding="utf-8")
    print(f"{len(all_cases())} broken configurations written to {GOLDEN}")
