"""Muon: each matrix's update against its decomposition in float64 and against torch's Muon; the same on every mesh; its
state, skipped steps, and who is whose parameter."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import titan_moe.runtime as runtime

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader

from tests import muon_worker
from tests.faults.checkpoint_run import Job
from tests.skipped_step import assert_skipped
from titan_moe import muon
from titan_moe.config import Config, Model, Parallelism
from titan_moe.config_check import check
from titan_moe.model import build_model, init_weights
from titan_moe.muon import Muon
from titan_moe.optimizer import apply_hyperparameters, build_lr_schedulers, build_optimizers

LR, DECAY, MU = 0.02, 0.1, 0.9
SHAPES = [(24, 40), (40, 24), (1, 7), (3, 16, 24), (4, 12, 2, 20), (2, 20, 2, 12)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    """Of very different sizes; some singular values are far from others, one gradient is zero."""
    generator = torch.Generator().manual_seed(100 + step)
    found = [torch.randn(shape, generator=generator) * 10.0**-i for i, shape in enumerate(SHAPES)]
    found[0][:, 5:] *= 1e-3
    found[3][1] = 0
    return found


def optimizer_of(params: list[nn.Parameter], dtype: torch.dtype = torch.float32) -> Muon:
    return Muon(params, dtype=dtype, lr=LR, weight_decay=DECAY, momentum=MU)


def take(optimizer: Muon, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, grad in zip(params, gradients(step)):
            parameter.grad = grad.to(parameter.dtype)
        optimizer.step()


def decomposed(n: Tensor) -> Tensor:
    """O of one matrix in float64, from its singular values."""
    if n.norm() == 0:
        return n
    u, s, vh = torch.linalg.svd(n / n.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def matrices(value: Tensor) -> list[Tensor]:
    """Views of the matrices of a parameter, as its shape says."""
    if value.ndim == 2:
        return [value]
    if value.ndim == 3:
        return list(value)
    return [value[e, :, half] for e in range(value.shape[0]) for half in range(2)]


def in_float64(steps: range) -> list[Tensor]:
    params = [p.detach().double() for p in parameters()]
    moments = [torch.zeros_like(p) for p in params]
    for step in steps:
        for value, moment, grad in zip(params, moments, gradients(step)):
            for w, b, g in zip(matrices(value), matrices(moment), matrices(grad.double())):
                b.copy_(MU * b + (1 - MU) * g)
                w.copy_((1 - LR * DECAY) * w - LR * 0.2 * max(w.shape) ** 0.5 * decomposed((1 - MU) * g + MU * b))
    return params


@pytest.mark.parametrize("elements", [muon.BATCH_ELEMENTS, 500])
def test_steps_are_those_of_decompositions_in_float64(elements, monkeypatch):
    """Four steps, matrix by matrix, whole stacks at once and one after the other; bf16 products stay near."""
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", elements)
    start, params, rough = parameters(), parameters(), parameters()
    take(optimizer_of(params), params, range(4))
    take(optimizer_of(rough, torch.bfloat16), rough, range(4))
    for before, parameter, near, expected in zip(start, params, rough, in_float64(range(4))):
        for w0, w, n, e in zip(*map(matrices, (before.detach().double(), parameter.detach(), near.detach(), expected))):
            assert (w.double() - e).norm() < 1e-4 * (e - w0).norm()
            assert (n.double() - e).norm() < 0.1 * (e - w0).norm()


def test_small_matrices_of_one_shape_are_multiplied_at_once(monkeypatch):
    """A model has hundreds, and on CPUs each product alone waits for all threads: the same steps, in fewer products."""
    shapes, weights, calls = [(8, 12), (2, 8, 12), (12, 8), (3, 8, 2, 12), (8, 12)], [], []
    products = muon.newton_schulz
    monkeypatch.setattr(muon, "newton_schulz", lambda x_MRC: calls.append(len(x_MRC)) or products(x_MRC))
    for elements, expected in ((1 << 24, [10, 1]), (8 * 12 * 4, [3, 6, 1, 1]), (1, [1, 2, 6, 1, 1])):
        monkeypatch.setattr(muon, "TOGETHER_ELEMENTS", elements)
        generator, params = torch.Generator().manual_seed(4), [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer_of(params).step()
        assert sorted(calls) == sorted(expected)
        calls.clear()
        weights.append(params)
    for many, some, single in zip(*weights):
        assert (many - single).norm() < 1e-5 * single.norm() and (some - single).norm() < 1e-5 * single.norm()


def test_it_is_torchs_rule():
    """Which takes matrices alone, and makes products in bf16."""
    ours, theirs = parameters()[:3], parameters()[:3]
    reference = torch.optim.Muon(theirs, lr=LR, weight_decay=DECAY, momentum=MU, adjust_lr_fn="match_rms_adamw")
    take(optimizer := optimizer_of(ours, torch.bfloat16), ours, range(3))
    for step in range(3):
        for parameter, grad in zip(theirs, gradients(step)):
            parameter.grad = grad
        reference.step()
    for a, b, start in zip(ours, theirs, parameters()):
        assert (a - b).norm() < 0.02 * (b - start).norm()
        assert torch.allclose(optimizer.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"], rtol=1e-6)


def test_a_step_is_skipped_on_the_device_and_a_loaded_state_goes_on_bit_for_bit():
    params, plain = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, other = optimizer_of(params), optimizer_of(plain)
    for each in (optimizer, other):
        each.found_inf = torch.zeros(())
    take(optimizer, params, range(2))
    assert_skipped(optimizer, params)
    take(optimizer, params, range(2, 4))
    take(other, plain, range(2))
    third = optimizer_of(plain)
    third.load_state_dict(copy.deepcopy(other.state_dict()))
    third.found_inf = torch.zeros(())
    take(third, plain, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(params, plain))


SIZES = {"vocab_size": 288, "dim": 32, "n_layers": 3, "n_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
SIZES |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "dense_hidden_dim": 48, "moe_hidden_dim": 24}
SIZES |= {"n_dense_layers": 1, "num_experts": 4, "num_expert_groups": 1, "num_limited_groups": 1, "top_k": 2}


def configuration(**sizes: int) -> Config:
    config = Config(model=Model(**SIZES | sizes))  # type: ignore[arg-type]
    config.optimizer.name, config.optimizer.lr, config.training.mixed_precision_param = "Muon", LR, "float32"
    config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = 32, 1, 8
    return config


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_matrices_of_layers_are_muons_and_the_rest_is_adamws():
    with one_rank():
        config = configuration(num_mtp_layers=1)
        model = build_model(config).to_empty(device="cpu")
        init_weights(model, seed=0)
        optimizers = build_optimizers(config, [model], runtime.build_meshes(config))
        schedulers = build_lr_schedulers(config, optimizers)
        config.optimizer.momentum, config.optimizer.weight_decay, config.optimizer.lr = 0.8, 0.3, LR
        apply_hyperparameters(config, optimizers, schedulers)
    adamw, own = optimizers
    assert isinstance(own, Muon) and type(adamw) is torch.optim.AdamW and own.dtype == torch.float32
    (group,) = own.param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.8, 0.3) and group["lr"] == adamw.param_groups[1]["lr"] > 0
    norms, rest = (each["param_names"] for each in adamw.param_groups)
    assert [each["weight_decay"] for each in adamw.param_groups] == [0.0, 0.3]
    assert all("norm" in name for name in norms)
    assert set(rest) == {"tok_embeddings.weight", "lm_head.weight"} | {
        f"{layer}.moe.router.gate.weight" for layer in ("layers.1", "layers.2", "mtp_layers.0")
    }
    own_names = set(group["param_names"])
    layer = {f"layers.1.attention.{name}.weight" for name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")}
    layer |= {f"layers.1.moe.shared_experts.{name}.weight" for name in ("w1", "w2", "w3")}
    layer |= {f"layers.1.moe.routed_experts.inner_experts.{name}" for name in ("w13_EF2D", "w2_EDF")}
    assert {name for name in own_names if name.startswith("layers.1.")} == layer
    assert "mtp_layers.0.eh_proj.weight" in own_names and "layers.0.feed_forward.w2.weight" in own_names


MESHES: dict[str, tuple[Parallelism, dict[str, int]]] = {
    "EP 2": (Parallelism(expert_parallel_degree=2), {}),
    "TP 2": (Parallelism(tensor_parallel_degree=2), {}),
    "EP 2 x FSDP 2, which cuts F": (Parallelism(expert_parallel_degree=2), {"num_experts": 2}),
    "HSDP 2 x 2, EP 2": (Parallelism(data_parallel_replicate_degree=2, expert_parallel_degree=2), {}),
    "PP 2 x FSDP 2": (
        Parallelism(
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule="Interleaved1F1B",
            pipeline_parallel_layers_per_stage=[1, 1, 1, 0],
        ),
        {"n_dense_layers": 2},
    ),
}


@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [
        (2, ["EP 2", "TP 2"]),
        pytest.param(4, ["EP 2", "HSDP 2 x 2, EP 2"], marks=pytest.mark.slow),
        pytest.param(4, ["EP 2 x FSDP 2, which cuts F"], marks=pytest.mark.slow),
        pytest.param(4, ["TP 2", "PP 2 x FSDP 2"], marks=pytest.mark.slow),
    ],
)
def test_every_mesh_takes_the_steps_of_one_rank_and_goes_on_from_the_state_of_another(ranks, meshes, tmp_path: Path):
    """Cut between matrices, inside them, along rows and columns at once, copied, and in stages, of which some have
    nothing for one of the optimizers: every parameter after two steps, a skipped one and, with the state that another
    mesh has saved, a third."""
    configs: dict[str, Config] = {}
    for name in meshes:
        mesh, sizes = MESHES[name]
        configs[name] = configuration(**sizes)
        configs[name].parallelism = mesh
        assert check(configs[name], ranks) == []
    job = Job(tmp_path / "store", muon_worker.on_meshes, configs, tmp_path, world_size=ranks)
    told = [job.hear() for _ in meshes]
    assert told == [[name] * ranks for name in meshes]
    job.end()
    for name, config in configs.items():
        start, expected = alone(config)
        found = [torch.load(tmp_path / name / f"rank-{rank}.pt") for rank in range(ranks)]
        assert set().union(*found) == expected.keys()
        for whole in found:
            for key, value in whole.items():
                moved = (expected[key] - start[key]).norm()
                assert moved > 0 and (value - expected[key]).norm() < 1e-4 * moved, (name, key)
    saved = FileSystemReader(tmp_path / meshes[0] / "optimizer").read_metadata().state_dict_metadata
    experts, count = "layers.2.moe.routed_experts.inner_experts", configs[meshes[0]].model.num_experts
    for key, shape in (("w1_EFD", (24, 32)), ("w3_EFD", (24, 32)), ("w2_EDF", (32, 24))):
        assert tuple(saved[f"state.{experts}.{key}.momentum_buffer"].size) == (count, *shape)
    assert not any("w13" in key or key.endswith("w1_EFD.exp_avg") for key in saved)


def alone(config: Config) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after all of these steps on one rank."""
    config = configuration(num_experts=config.model.num_experts, n_dense_layers=config.model.n_dense_layers)
    with one_rank():
        model = build_model(config).to_empty(device="cpu")
        init_weights(model, seed=3)
        start = muon_worker.whole([model])
        optimizers = build_optimizers(config, [model], runtime.build_meshes(config))
        optimizers._optimizer_step_pre_hooks.clear()
        muon_worker.take_steps([model], optimizers, range(4), skip=1)
        return start, muon_worker.whole([model])
