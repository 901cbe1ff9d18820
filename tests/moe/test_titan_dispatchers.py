"""The dispatchers on DeepEP and HybridEP on one process: what they refuse, what HybridEP's fixed buffer never asks.

Between ranks: tests/distributed/test_titan_dispatch.py.
"""

import itertools
import sys

import titan_moe.runtime  # noqa: F401

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.sync_free import RefuseCopiesToHost
from tests.te_doubles import DOUBLES
from titan_moe import config_check, config_file, launch, titan_dispatchers_check
from titan_moe.moe import layout
from titan_moe.moe.dispatch import make_dispatcher

D, E, K, T, RANKS = 512, 8, 3, 16, 4


@pytest.fixture
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def installed(monkeypatch):
    """The double, in this test alone."""
    monkeypatch.syspath_prepend(str(DOUBLES))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_ep"]:
        del sys.modules[name]


def arguments(group, **changes):
    sizes = {"num_experts": E, "top_k": K, "alignment": 4, "max_tokens": T, "dim": D}
    return {**sizes, "ep_group": group, **changes}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("recv_buffer", ["worst_case", 1.25])
def test_hybridep_with_a_fixed_buffer_never_asks_the_host(group, installed, monkeypatch, recv_buffer, device):
    """Fake tensors have no values: whatever needs one raises. torchtitan has fake kernels for its ops, with a handle
    that holds nothing, so it gets the flag that ours is to read. Autograd wants a device, so there is no backward on
    the fake GPU."""
    from torchtitan.distributed.deepep import hybridep

    dispatcher = make_dispatcher("hybridep", **arguments(group, recv_buffer=recv_buffer))
    assert dispatcher.sync_free and dispatcher.deterministic
    backward = device == "cpu"
    with FakeTensorMode(), RefuseCopiesToHost(), torch.set_grad_enabled(backward):
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        monkeypatch.setattr(hybridep.DispatchHandle.__init__, "__defaults__", ((flag,),))
        x_TD = torch.randn(T, D, device=device, dtype=torch.bfloat16, requires_grad=backward)
        w_TK = torch.rand(T, K, device=device, requires_grad=backward)
        plan = dispatcher.plan(torch.zeros(T, K, device=device, dtype=torch.int64))
        received = dispatcher.dispatch(x_TD, w_TK, plan)
        assert received.x_RD.shape == (dispatcher.fixed_rows(), D) and received.counts_e.shape == (E // RANKS,)
        if recv_buffer == "worst_case":
            assert plan.overflow is None
        else:
            assert plan.overflow.dtype == torch.bool and plan.overflow.shape == ()
        out_TD = dispatcher.combine(received.x_RD * received.weight_R[:, None].bfloat16(), received.state)
        assert out_TD.shape == (T, D)
        if backward:
            out_TD.sum().backward()


@pytest.mark.parametrize("alignment", [1, 4, 128])
def test_hybridep_has_room_for_the_padding_too(group, installed, alignment):
    """torchtitan's own arithmetic, with the factor that we give it, makes the number of rows that we count on; its
    1.0, which it calls the worst case, makes too few."""
    from torchtitan.distributed.deepep.hybridep import _num_permuted_tokens_for_non_blocking as rows_of

    for tokens, top_k, recv_buffer in itertools.product((1, 7, 16, 4096), (1, 3, 8), ("worst_case", 1.0, 1.25, 2.0)):
        sizes = {"max_tokens": tokens, "top_k": top_k, "alignment": alignment, "recv_buffer": recv_buffer}
        dispatcher = make_dispatcher("hybridep", **arguments(group, **sizes))
        e, factor = E // RANKS, dispatcher._factor()
        assert rows_of(tokens, RANKS, e, top_k, factor, pad_multiple=alignment) == dispatcher.fixed_rows()
        worst = layout.worst_rows(tokens, top_k, e, alignment, RANKS)
        assert dispatcher.max_rows(tokens) == worst and dispatcher.fixed_rows() <= worst
        if recv_buffer == "worst_case":
            assert dispatcher.fixed_rows() == worst
            if alignment > 1 and top_k == 1:
                assert rows_of(tokens, RANKS, e, top_k, 1.0, pad_multiple=alignment) < worst


@pytest.mark.parametrize("algorithms", [False, True])
def test_deepep_repeats_to_the_bit_only_when_torch_is_told_to(group, installed, algorithms):
    torch.use_deterministic_algorithms(algorithms)
    try:
        dispatcher = make_dispatcher("deepep", **arguments(group))
    finally:
        torch.use_deterministic_algorithms(False)
    assert dispatcher.deterministic == algorithms and not dispatcher.sync_free


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("deepep", {"capacity_factor": 1.25}, ["capacity_factor = 1.25", "drops nothing", "use dedup"]),
        ("deepep", {"recv_buffer": "worst_case"}, ["recv_buffer = 'worst_case'", "only in inference", "hybridep"]),
        ("hybridep", {"max_tokens": None}, ["max_tokens"]),
        ("hybridep", {"ep_group": None}, ["hybridep", "use local"]),
        ("hybridep", {"max_tokens": None, "capacity_factor": 1.0}, ["max_tokens", "capacity_factor = 1.0"]),
    ],
)
def test_refused_arguments(group, installed, name, changes, said):
    with pytest.raises(ValueError) as error:
        make_dispatcher(name, **arguments(group, **changes))
    for words in said:
        assert words in str(error.value)


@pytest.mark.parametrize(("name", "buffer"), [("deepep", "ElasticBuffer"), ("hybridep", "HybridEPBuffer")])
def test_a_missing_library_or_another_version_of_it_is_named(group, tmp_path, monkeypatch, name, buffer):
    """Before training, by every rank: `parallelize` makes the dispatchers."""
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # as if it were not there
    with pytest.raises(ValueError, match=f'needs deep_ep.{buffer}.*use "dedup"'):
        make_dispatcher(name, **arguments(group))
    monkeypatch.delitem(sys.modules, "deep_ep")
    (tmp_path / "deep_ep.py").write_text("Buffer = object\n")  # DeepEP 1
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ValueError, match=f"needs deep_ep.{buffer}.*from github.com/deepseek-ai/DeepEP"):
            make_dispatcher(name, **arguments(group))
    finally:
        sys.modules.pop("deep_ep", None)


EP4 = ["--parallelism.expert_parallel_degree=4", "--training.mixed_precision_param=bfloat16"]
DEEPEP, HYBRIDEP = ["--moe.dispatcher=deepep", *EP4], ["--moe.dispatcher=hybridep", "--model.dim=512", *EP4]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (DEEPEP, []),
        (HYBRIDEP, []),
        ([*DEEPEP, "--parallelism.expert_parallel_degree=1"], ['"deepep": exchanges tokens', '"auto" or "local"']),
        (
            [*DEEPEP, "--training.mixed_precision_param=float32"],
            ["moves bfloat16 only", 'mixed_precision_param = "float32"'],
        ),
        ([*HYBRIDEP, "--moe.capacity_factor=1.5"], ["drops nothing", "moe.capacity_factor = 1.5", '"dedup"']),
        (
            [*DEEPEP, "--moe.redispatch", "--activation_checkpoint.mode=full"],
            ["planning again", "moe.redispatch = true"],
        ),
        ([*DEEPEP, "--moe.redispatch", "--activation_checkpoint.mode=none"], []),
        ([*DEEPEP, "--moe.recv_buffer=1.5"], ["moe.recv_buffer = 1.5", "only in inference", '"hybridep"']),
        ([*HYBRIDEP, "--moe.recv_buffer=1.5"], []),
        ([*DEEPEP, "--moe.ranks_per_node=2"], ["moe.ranks_per_node = 2: only the dispatcher dedup"]),
        ([*DEEPEP, "--model.dim=260"], ["model.dim = 260 has 520 bytes", "a multiple of 8"]),
        ([*HYBRIDEP, "--model.dim=256"], ["model.dim = 256 is no multiple of 512", '"deepep"']),
        ([*HYBRIDEP, "--model.num_experts=12", "--parallelism.expert_parallel_degree=1"], ["exchanges tokens"]),
        (
            [
                *HYBRIDEP,
                "--model.num_experts=6",
                "--model.num_expert_groups=3",
                "--parallelism.expert_parallel_degree=2",
            ],
            ["experts in multiples of 4", "2 ranks and model.num_experts = 6"],
        ),
    ],
)
def test_configurations(options, said):
    found = "\n".join(config_check.check(config_file.load(["train_configs/debug_model.toml", *options]), 4))
    assert all(words in found for words in said), found
    assert said or not found


@pytest.mark.parametrize("options", [DEEPEP, HYBRIDEP])
def test_the_launcher_asks_for_a_gpu_and_for_the_library(options, capsys, monkeypatch):
    argv, ranks = ["train_configs/debug_model.toml", *options], {"NGPU": "4"}
    name = options[0].split("=")[1]
    assert launch.main(argv, ranks) == 2
    assert f'moe.dispatcher = "{name}": needs a GPU' in capsys.readouterr().err
    monkeypatch.setattr(titan_dispatchers_check, "PACKAGE", "no_such_package")
    assert launch.main(argv, {**ranks, "GPUS": "4"}) == 2
    assert f'moe.dispatcher = "{name}": needs the package no_such_package' in capsys.readouterr().err
    monkeypatch.setattr(titan_dispatchers_check, "PACKAGE", "torch")
    assert launch.main(argv, {**ranks, "GPUS": "4"}) == 0
