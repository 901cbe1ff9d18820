"""The guard's verdicts against plain Python, the optimizer that is told to skip, and who waits for what. Real runs with
faults in them are in faults/test_guards.py."""

import copy
import math
import random
import statistics
from collections import deque
from types import SimpleNamespace

import titan_moe.runtime  # noqa: F401

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import ParamGroupConfig

from tests.sync_free import fake_group, sync_free
from titan_moe import guards
from titan_moe.checkpoint import Progress
from titan_moe.config import Config
from titan_moe.corruption import CorruptionCheck, Place, digest, first_difference
from titan_moe.guards import WINDOW, Guard, judge
from titan_moe.local_gradients import seen_by
from titan_moe.moe.balance import LoadBalancer
from titan_moe.optimizer import Optimizers

NAN, INF = float("nan"), float("inf")


class Schedule:
    steps = 0

    def step(self) -> None:
        self.steps += 1


def make_guard(**settings) -> Guard:
    config = Config()
    config.training.local_batch_size, config.training.seq_len = 4, 16
    for name, value in settings.items():
        setattr(config.guards, name, value)
    return Guard(config, [], Schedule(), Progress(), tensor_ranks=1, device=torch.device("cpu"))  # type: ignore


@pytest.fixture
def one_rank():
    """A real group: the guard's all-reduce needs one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def take(guard: Guard, loss: float, norm: float) -> bool:
    """One step; whether it is skipped."""
    guard.progress.step += 1
    with guard.watching():
        pass
    skip = bool(guard.judge(torch.tensor(loss), torch.tensor(norm)))
    guard.progress.tokens_seen += 4 * 16
    return skip


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts


def is_spike(value: float, history: deque, sigma: float) -> bool:
    return value > statistics.fmean(history) + sigma * statistics.pstdev(history)


def test_verdicts_are_those_of_plain_python(one_rank):
    """400 steps with spikes, in loss or norm, and numbers that are none; the oracle keeps its history in deques."""
    guard, draw = make_guard(max_skipped_steps=400, spike_sigma=3.0), random.Random(1)
    losses, norms = deque(maxlen=WINDOW), deque(maxlen=WINDOW)
    kinds = set()
    for _ in range(400):
        loss, norm = draw.gauss(3, 0.1), draw.gauss(1, 0.1)
        what = draw.choice([None] * 12 + ["loss", "norm", "nan", "inf"])
        loss, norm = {
            None: (loss, norm),
            "loss": (loss + 1, norm),
            "norm": (loss, norm + 1),
            "nan": (NAN, norm),
            "inf": (loss, INF),
        }[what]
        loss, norm = torch.tensor(loss).item(), torch.tensor(norm).item()  # as float32 has them
        spike = len(losses) == WINDOW and (is_spike(loss, losses, 3.0) or is_spike(norm, norms, 3.0))
        expected = spike or not (math.isfinite(loss) and math.isfinite(norm))
        kinds.add((what, expected))
        assert take(guard, loss, norm) == expected
        if not expected:
            losses.append(loss)
            norms.append(norm)
    assert {("loss", True), ("loss", False), ("norm", True), ("nan", True), ("inf", True), (None, False)} <= kinds
    assert sorted(guard.history_2N[0].tolist()) == sorted(losses)
    assert sorted(guard.history_2N[1].tolist()) == sorted(norms)


@pytest.mark.parametrize("sigma", [0.0, 6.0])
def test_losses_that_never_change_are_no_spike_of_themselves(one_rank, sigma):
    """Their deviation is 0. Above them is a spike, unless nothing is; below never."""
    guard = make_guard(spike_sigma=sigma)
    assert not any(take(guard, 2.5, 1.0) for _ in range(WINDOW + 5))
    assert not take(guard, 0.1, 0.1)
    assert take(guard, 1e9, 1.0) == bool(sigma)
    assert take(guard, NAN, 1.0)


def test_a_limit_is_mean_and_sigma_of_the_whole_window():
    history_2N = torch.randn(2, WINDOW, dtype=torch.float64)
    limits = history_2N.mean(1) + 6 * history_2N.var(1, correction=0).sqrt()
    accepted = torch.tensor(WINDOW)
    for i in (0, 1):
        below, above = limits.clone() - 1, limits.clone() - 1
        below[i], above[i] = limits[i] * (1 - 1e-9), limits[i] + 1e-9
        assert not judge(below, history_2N, accepted, 6.0)[0] and judge(above, history_2N, accepted, 6.0)[0]
        assert not judge(above, history_2N, accepted - 1, 6.0)[0], "not before there is as much history"


def test_the_last_bit_of_a_constant_is_no_spike():
    """A run on few samples: loss and norm do not move, so that their deviation is 0."""
    history_2N, accepted = torch.full((2, WINDOW), 2.5, dtype=torch.float64), torch.tensor(WINDOW)
    next_2 = torch.nextafter(torch.full((2,), 2.5), torch.tensor(9.0)).double()
    assert not judge(next_2, history_2N, accepted, 6.0)[0]
    assert judge(torch.full((2,), 2.5 + 1e-5, dtype=torch.float64), history_2N, accepted, 6.0)[0]


# ---------------------------------------------------------------------------------------------------------------------
# One step late


def test_only_an_update_moves_the_schedule_and_one_step_late(one_rank):
    guard = make_guard()
    schedule = guard.lr_schedulers
    take(guard, 3.0, 1.0)
    assert schedule.steps == 0, "nobody has looked yet"
    take(guard, NAN, 1.0)
    assert schedule.steps == 1 and guard.skipped == 0
    take(guard, 3.0, 1.0)
    assert schedule.steps == 1 and guard.skipped == 1
    guard.settle()
    guard.settle()
    assert schedule.steps == 2, "once, however often one looks"


def test_a_checkpoint_has_no_open_question(one_rank):
    """Saving looks first; what is loaded goes on as what was saved."""
    guard, resumed = make_guard(max_skipped_steps=100), make_guard(max_skipped_steps=100)
    for step in range(WINDOW + 3):
        take(guard, NAN if step % 50 == 7 else 3.0 + 0.01 * (step % 5), 1.0)
    take(guard, NAN, 1.0)
    saved = guard.state_dict()
    assert guard.pending is None and guard.lr_schedulers.steps == WINDOW
    kept = copy.deepcopy(saved)
    resumed.load_state_dict(saved)
    assert resumed.skipped == guard.skipped == 4
    for loss in (3.02, 30.0, NAN, 3.0, 3.1):
        assert take(guard, loss, 1.0) == take(resumed, loss, 1.0)
    for key, value in resumed.state_dict().items():
        assert torch.equal(value, guard.state_dict()[key])
        assert torch.equal(saved[key], kept[key]), "a checkpoint may still be written while training goes on"


def test_the_run_ends_after_too_many_in_a_row(one_rank):
    guard = make_guard(max_skipped_steps=2)
    for loss in (3.0, NAN, NAN, 3.0, NAN, NAN, INF):
        take(guard, loss, 1.0)
    with pytest.raises(RuntimeError, match=r"Step 7 skipped: loss inf, .* samples 24 to 27 .* 3 steps in a row"):
        guard.settle()
    none = make_guard(max_skipped_steps=0)
    take(none, NAN, 1.0)
    with pytest.raises(RuntimeError, match="1 steps in a row"):
        take(none, 3.0, 1.0)


class Event:
    """Stands for a device's event: what was waited for, and when."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_nobody_waits_in_the_step_itself(one_rank, monkeypatch):
    """The event of a step's copy is waited for in the next step, after its backward, and not again."""
    guard, events = make_guard(), []
    tell = guard._tell

    def telling(verdict):
        tell(verdict)
        events.append(Event())
        guard.pending.event = events[-1]

    monkeypatch.setattr(guard, "_tell", telling)
    for step in range(1, 4):
        guard.progress.step = step
        with guard.watching():
            assert [event.waits for event in events] == [1] * (step - 2) + [0] * (step > 1)
        guard.judge(torch.tensor(3.0), torch.tensor(1.0))
        assert [event.waits for event in events] == [1] * (step - 1) + [0]


def test_the_verdict_is_made_and_used_without_the_host(monkeypatch):
    """Judging, the optimizer's step and the balancer's, on tensors without values: whoever asks for one fails here."""
    with fake_group(8), sync_free():
        guard = make_guard()
        monkeypatch.setattr(guard, "settle", lambda: None)
        model = nn.Linear(4, 4)
        optimizers, balancer = container(model, "fused"), balancer_of(layer())
        optimizers.register_step_pre_hook(balancer.step)
        for _ in range(2):
            with guard.watching(), seen_by(guard._look):
                model(torch.ones(2, 4)).sum().backward()
                guard._look(["layers.0.weight"], [model.weight.grad])
            skip = guard.judge(torch.ones(()), torch.ones(()))
            optimizers.step(skip=skip)
            optimizers.zero_grad()
        with pytest.raises(Exception, match="data-dependent|local_scalar"):  # the harness does see it
            guard.pending.told.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# What a skipped step leaves alone


def container(model: nn.Module, implementation: str) -> Optimizers:
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1, "weight_decay": decay})
        for pattern, decay in (("bias", 0.0), (".", 0.1))
    ]
    return Optimizers.Config(param_groups=groups, implementation=implementation).build(model_parts=[model])


def layer() -> SimpleNamespace:
    """What the balancer sees of an MoE layer."""
    counts_E = torch.tensor([5, 1, 1, 1])

    def forget():
        counts_E.zero_()
        return torch.zeros(())

    routed = SimpleNamespace(dropped=None)
    return SimpleNamespace(
        tokens_per_expert_E=counts_E, expert_bias_E=torch.zeros(4), load_balance_coeff=0.1, routed_experts=routed,
        forget=forget, decisions_2=None,
    )  # fmt: skip


def balancer_of(moe: SimpleNamespace) -> LoadBalancer:
    return LoadBalancer({"layers.1": moe}, [])  # type: ignore[dict-item]


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_an_optimizer_that_skips_is_one_that_never_saw_the_step(one_rank, implementation):
    """Sharded parameters of two groups: after steps 1, a skipped one whose gradients are no numbers, and 2, everything
    is as after steps 1 and 2, bit for bit; as is what it was at first, when the first step is the skipped one."""
    mesh = init_device_mesh("cpu", (1,))
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        fully_shard(model, mesh=mesh)
    skipping, other = (container(model, implementation) for model in models)
    x_TD = torch.randn(3, 4, 8)

    def step(model, optimizers, i, bad=False):
        model(x_TD[i]).square().sum().backward()
        if bad:
            for parameter in model.parameters():
                parameter.grad.to_local()[0] = NAN
        optimizers.step(skip=torch.tensor(float(bad)))
        optimizers.zero_grad()

    for i, bad in ((0, True), (0, False), (1, True), (2, False)):
        step(models[0], skipping, i, bad)
        if not bad:
            step(models[1], other, i)
        for a, b in zip(models[0].parameters(), models[1].parameters()):
            assert torch.equal(a.to_local(), b.to_local())
    for a, b in zip(skipping.optimizers[0].state.values(), other.optimizers[0].state.values(), strict=True):
        assert a.keys() == b.keys() == {"step", "exp_avg", "exp_avg_sq"} and a["step"] == 2
        assert all(torch.equal(getattr(a[k], "_local_tensor", a[k]), getattr(b[k], "_local_tensor", b[k])) for k in a)


def test_a_bias_moves_only_with_the_weights():
    moe = layer()
    balancer = balancer_of(moe)
    balancer.step(None, (), {"skip": torch.tensor(1.0)})
    assert not moe.expert_bias_E.any() and not moe.tokens_per_expert_E.any(), "its load is forgotten all the same"
    moe.tokens_per_expert_E += torch.tensor([5, 1, 1, 1])
    balancer.step(None, (), {"skip": torch.tensor(0.0)})
    assert moe.expert_bias_E.tolist() == pytest.approx([-0.1, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(
    ("name", "gradient", "said"),
    [
        ("layers.1.attention.wo.weight", [1.0, NAN], guards.GRADIENTS),
        ("layers.1.attention.wo.weight", [1.0, -INF], guards.GRADIENTS),
        ("layers.1.moe.routed_experts.inner_experts.w2_EDF", [NAN, INF], guards.EXPERTS),
        ("layers.1.moe.shared_experts.w1.weight", [3e38, -3e38], guards.GRADIENTS),  # their norm is none
        ("layers.1.moe.shared_experts.w1.weight", [1e18, -1e18], 0),
    ],
)
def test_whose_gradients_are_no_numbers(one_rank, name, gradient, said):
    """Also the smallest piece, beside an empty one; what was said of one step is not said of the next."""
    guard = make_guard()
    with guard.watching():
        guard._look([name, "empty", "fine"], [torch.tensor(gradient), torch.zeros(0), torch.ones(3)])
    assert int(guard.fault) == said
    guard.judge(torch.tensor(1.0), torch.tensor(NAN))
    with guard.watching():
        pass
    assert int(guard.fault) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_flipped_bit_changes_the_digest(dtype):
    x_TD = torch.randn(5, 7).to(dtype)
    whole, bits = digest(x_TD), x_TD.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    assert torch.equal(digest(x_TD.T.contiguous().T), whole), "of values, not of their order in memory"
    width = 8 * dtype.itemsize
    for i in range(x_TD.numel()):
        for bit in range(width):
            mask = torch.tensor(1 << bit if bit < width - 1 else -(1 << bit)).to(bits.dtype)
            bits.view(-1)[i] ^= mask
            assert digest(x_TD) != whole
            bits.view(-1)[i] ^= mask
    assert digest(x_TD) == whole
    assert digest(x_TD[[1, 0, 2, 3, 4]]) != whole, "rows that changed places"


def test_places_sort_in_the_order_of_computation():
    order = [
        Place.of(0, "layers.0"),
        Place.of(0, "layers.10"),
        Place.of(0, "mtp_layers.0"),
        Place.of(1, "loss"),
        Place.of(2, "lm_head.weight", of_parameters=True),
        Place.of(2, "mtp_layers.0"),
        Place.of(2, "layers.10"),
        Place.of(2, "layers.10.moe.router.gate.weight", of_parameters=True),
        Place.of(2, "layers.2"),
        Place.of(2, "tok_embeddings.weight", of_parameters=True),
    ]
    assert sorted(order, key=lambda place: place[:3]) == order == sorted(order)
    once = {place: torch.tensor(i) for i, place in enumerate(order)}
    again = {**once, order[3]: torch.tensor(-1), order[7]: torch.tensor(-1)}
    assert first_difference(once, once) is None and first_difference(once, again) == order[3]
    assert str(order[7]) == "the gradients of layers.10's parameters" and str(order[1]) == "the output of layers.10"


def test_what_promises_no_repetition_is_refused(monkeypatch):
    config, dispatcher = Config(), SimpleNamespace(name="deepep", deterministic=False)
    moe = SimpleNamespace(routed_experts=SimpleNamespace(dispatcher=dispatcher))
    monkeypatch.setattr("titan_moe.corruption.moe_layers", lambda part: {"layers.1": moe})
    CorruptionCheck(config, [nn.Module()], torch.device("cpu"))
    config.guards.corruption_check_every = 10
    with pytest.raises(ValueError, match="which dispatcher deepep does not promise to repeat"):
        CorruptionCheck(config, [nn.Module()], torch.device("cpu"))
