"""What te_ep refuses, in our words and before NCCL EP would: as a configuration, as a machine, as a dispatcher.

Each rule of Transformer Engine and NCCL EP is broken once. Real exchanges, over doubles of theirs that hold every call
to the rules: tests/distributed/te_ep_checks.py, whole runs: tests/distributed/test_te_ep.py.
"""

import atexit
import os
from dataclasses import replace
from types import SimpleNamespace

import titan_moe.runtime as runtime

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from tests import te_doubles
from tests.sync_free import fake_group, sync_free
from tests.te_doubles import FACTS
from titan_moe import config_check, config_file, launch, te_ep_check
from titan_moe.moe import te, te_ep_ops
from titan_moe.moe.dispatch import make_dispatcher
from titan_moe.moe.te_ep import KernelPlan, problems
from titan_moe.pipeline_layout import V_SHAPED, default_stages

TE_EP, EP2 = "--moe.dispatcher=te_ep", "--parallelism.expert_parallel_degree=2"
PP2 = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"]
MODEL = ["--model.num_expert_groups=1", "--model.num_limited_groups=1"]


def mistakes(*arguments: str, world: int = 2) -> list[str]:
    defaults = ["--training.seq_len=2048", "--training.local_batch_size=4", "--training.mixed_precision_param=bfloat16"]
    given = {argument.split("=")[0] for argument in arguments}
    defaults = [argument for argument in defaults if argument.split("=")[0] not in given]
    return config_check.check(config_file.load(["train_configs/debug_model.toml", *defaults, *arguments]), world)


def test_the_debug_model_may_use_it():
    assert mistakes(TE_EP, EP2) == []


@pytest.mark.parametrize(
    ("arguments", "world", "said"),
    [
        ([], 2, ["expert_parallel_degree = 1", '"local"']),
        ([EP2, "--training.mixed_precision_param=float32"], 2, ["bfloat16", 'mixed_precision_param = "float32"']),
        ([EP2, "--moe.capacity_factor=1.25"], 2, ["moe.capacity_factor = 1.25", "not documented", '"alltoall"']),
        ([EP2, "--moe.ranks_per_node=2"], 2, ["only the dispatcher dedup"]),
        ([EP2, "--training.local_batch_size=9"], 2, ["8,192", "9 x seq_len 2048 = 18,432", "lower it to 4"]),
        (
            [EP2, "--training.local_batch_size=12", "--parallelism.tensor_parallel_degree=2"],
            2,
            ["12 x seq_len 2048 / (tensor_parallel_degree 2) = 12,288", "lower it to 8"],
        ),
        (
            [EP2, "--training.local_batch_size=1", "--training.seq_len=16384", "--model.max_seq_len=16384"],
            2,
            ["1 x seq_len 16384 = 16,384", "raise parallelism.context_parallel_degree"],
        ),
        (
            [EP2, *PP2, "--parallelism.pipeline_parallel_microbatch_size=8", "--training.local_batch_size=16"],
            4,
            ["pipeline_parallel_microbatch_size = 8", "8 x seq_len 2048 = 16,384", "lower it to 4"],
        ),
        ([EP2, "--training.seq_len=63", "--training.local_batch_size=1"], 2, ["63 tokens", "2 = 126", "multiple of 4"]),
        ([EP2, *MODEL, "--model.num_experts=6"], 2, ["3 x 2 = 6 experts", "groups of 4"]),
        ([EP2, *MODEL, "--model.num_experts=64", "--model.top_k=33"], 2, ["top_k = 33", "1 to 32"]),
        ([EP2, "--model.dim=260"], 2, ["dim = 260", "260 x 2 = 520 bytes", "multiple of 8"]),
    ],
)
def test_configurations_that_cannot_be(arguments, world, said):
    """With te_ep, that is: other dispatchers may have them."""
    found = mistakes(TE_EP, *arguments, world=world)
    assert len(found) == 1, found
    assert all(part in found[0] for part in said), found[0]
    assert mistakes(*arguments, world=world) == []


def test_without_a_gpu_it_is_refused_before_torchrun(capsys):
    assert launch.main(["train_configs/debug_model.toml", TE_EP, EP2], {"NGPU": "2"}) == 2
    assert 'moe.dispatcher = "te_ep": needs a GPU' in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_a_buffer_is_free_again_when_its_turn_comes(schedule):
    """Of torch's own schedules, on every rank: plans take a stage's buffers in turn, and no buffer is taken before the
    last backward of the microbatch that had it. With one buffer fewer, one is. Without a pipeline one is enough."""
    assert te_ep_check.in_flight(config_file.load(["train_configs/debug_model.toml", TE_EP]), 2) == 1
    for pp in (2, 3, 4):
        for count in (2 * pp, 2 * pp + 2, 12 * pp):
            pipeline = (
                f"--parallelism.pipeline_parallel_degree={pp} --parallelism.pipeline_parallel_schedule={schedule}"
            )
            arguments = [TE_EP, *pipeline.split(), f"--training.local_batch_size={count}"]
            buffers = te_ep_check.in_flight(config_file.load(["train_configs/debug_model.toml", *arguments]), pp)
            assert taken_too_early(schedule, pp, count, buffers) == 0, (pp, count, buffers)
            if count == 12 * pp:
                assert taken_too_early(schedule, pp, count, buffers - 1) > 0


def taken_too_early(schedule: str, pp: int, count: int, buffers: int) -> int:
    """How often a stage that has so many buffers plans with one that is still needed."""
    too_early = 0
    for actions in orders(schedule, pp, count):
        flat = [part for action in actions if action for part in action.sub_actions or (action,)]
        last = {(action.stage_index, action.microbatch_index): i for i, action in enumerate(flat)}
        planned: dict[int, list[int]] = {}
        for i, action in enumerate(flat):
            if action.computation_type == schedules.FORWARD:
                stage = planned.setdefault(action.stage_index, [])
                stage.append(action.microbatch_index)
                if len(stage) > buffers:
                    too_early += last[action.stage_index, stage[-1 - buffers]] > i
    return too_early


def orders(schedule: str, pp: int, count: int) -> list[list]:
    """What each rank does, in its order."""
    stages = default_stages(schedule, pp)
    held = (0, stages - 1) if schedule in V_SHAPED else range(0, stages, pp)
    parts = [
        SimpleNamespace(
            stage_index=i, num_stages=stages, group_rank=0, group_size=pp, submod=None, is_first=i == 0, is_last=False
        )
        for i in held
    ]
    made = schedules.get_schedule_class(schedule)(parts[0] if stages == pp else parts, count, loss_fn=lambda: None)
    found = made._get_pipeline_order() if stages == pp else made.pipeline_order
    return list(found.values())


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (FACTS, []),
        (replace(FACTS, capability=(9, 0), nccl=(2, 33, 0)), []),
        (te.Facts(), ["not installed"]),
        (replace(FACTS, version="2.19.0"), ["2.19.0 is too old", te.PINNED]),
        (replace(FACTS, extension="ImportError: no module"), ["not its torch extension (ImportError: no module)"]),
        (replace(FACTS, capability=None), ["torch sees none"]),
        (replace(FACTS, capability=(8, 0)), ["compute capability 9.0", "has 8.0"]),
        (replace(FACTS, nccl=(2, 30, 7)), ["no NCCL older than 2.32.3", "has 2.30.7", "nvidia-nccl-cu13==2.32.3"]),
        (replace(FACTS, nccl=None), ["none was found"]),
        (replace(FACTS, nccl_ep=False), ["libnccl_ep.so"]),
        (replace(FACTS, nvcc=None), ["no nvcc", "CUDA_HOME"]),
        (replace(FACTS, nccl_headers=None), ["no nccl.h", "NCCL_EP_JIT_BUILD_INCLUDE_DIR"]),
    ],
)
def test_machines_that_lack_something(facts, said):
    found = problems(facts)
    assert len(found) == bool(said)
    assert all(part in found[0] for part in said), found


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(te, "facts", lambda: FACTS)
    with fake_group(4) as ranks:
        yield ranks


def te_ep(group, **changes):
    sizes = {"num_experts": 8, "top_k": 3, "alignment": 16, "dim": 64, "max_tokens": 200, "ep_group": group}
    return make_dispatcher("te_ep", **(sizes | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 6}, ["6 experts", "4 expert-parallel ranks"]),
        ({"top_k": 33, "num_experts": 64}, ["top_k = 33"]),
        ({"dim": 12}, ["12 x 2 = 24 bytes"]),
        ({"alignment": 24}, ["alignment = 24", "power of two"]),
        ({"max_tokens": 8193}, ["8,192", "8,193"]),
        ({"max_tokens": None}, ["pass max_tokens"]),
        ({"capacity_factor": 1.0}, ["capacity_factor = 1.0", "not documented"]),
        ({"ranks_per_node": 2}, ["ranks_per_node", "use dedup"]),
        ({"dim": 12, "alignment": 24}, ["24 bytes", "power of two"]),
        ({"ep_group": None}, ["needs ep_group"]),
    ],
)
def test_dispatchers_that_cannot_be(changes, said, group):
    with pytest.raises(ValueError) as error:
        te_ep(group, **changes)
    assert all(part in str(error.value) for part in said), error.value


def test_experts_of_a_node_come_in_fours(group, monkeypatch):
    """Eight experts on four ranks: a node of two has four of them, a node of one would have two."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    te_ep(group)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="2 x 1 = 2 experts"):
        te_ep(group)


def test_a_group_of_one_is_refused(monkeypatch):
    monkeypatch.setattr(te, "facts", lambda: FACTS)
    with fake_group(1) as alone, pytest.raises(ValueError, match="no group of one; use the dispatcher local"):
        te_ep(alone)


def test_rows_as_mxfp8_want_blackwell():
    hopper = replace(FACTS, capability=(9, 0))
    assert problems(FACTS, True) == problems(hopper) == []
    (said,) = problems(hopper, True)
    assert 'moe.te_ep_payload = "mxfp8"' in said and "10.0 to 11.x" in said and "this GPU has 9.0" in said


def test_a_machine_is_refused_when_the_dispatcher_is_built(group, monkeypatch):
    monkeypatch.setattr(te, "facts", lambda: replace(FACTS, nccl=(2, 30, 7), nvcc=None))
    with pytest.raises(ValueError, match=r"2\.30\.7.*; .*no nvcc"):
        te_ep(group)


def test_what_keeps_nccl_ep_from_being_set_up_is_told(group, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("ncclInvalidUsage")

    dispatcher = te_ep(group)
    with te_doubles.installed(), monkeypatch.context() as patch:
        from transformer_engine.pytorch import ep

        patch.setenv("NCCL_EP_JIT_NVCC", "/no/such/nvcc")
        patch.setattr(ep, "ep_bootstrap", fail)
        with pytest.raises(ValueError, match=r"top_k = 3.*ncclInvalidUsage.*GPU-initiated networking.*dedup"):
            dispatcher.plan(torch.zeros(2, 3, dtype=torch.int64))
        assert os.environ["NCCL_EP_JIT_NVCC"] == FACTS.nvcc, "the one that was found, not the one that is not there"
        assert te_ep_ops._signature is None


def test_other_types_than_bfloat16_are_refused(group):
    dispatcher, none = te_ep(group), torch.zeros(0)
    plan = KernelPlan(none, none, none, None, 2, ids_TK=none, ticket=0, rows=0)
    with pytest.raises(ValueError, match=r"bfloat16, not in torch\.float32"):
        dispatcher.dispatch(torch.zeros(2, 64), torch.zeros(2, 3), plan)
    with pytest.raises(ValueError, match=r"bfloat16, not in torch\.float32"):
        dispatcher.combine(torch.zeros(0, 64), plan)


def test_the_group_lasts_until_it_is_given_back(group, monkeypatch):
    left = []
    with monkeypatch.context() as patch:
        patch.setattr(te_ep_ops, "finalize", lambda: left.append("finalize"))
        patch.setattr(dist, "destroy_process_group", lambda: left.append("destroy"))
        runtime.leave_process_group()
    assert left == ["finalize", "destroy"]


def test_a_rank_that_fails_does_not_wait_for_the_others(group, monkeypatch):
    """Neither now nor when Python ends."""
    left = []
    with te_doubles.installed(), monkeypatch.context() as patch:
        from transformer_engine.pytorch import ep

        patch.setattr(te_ep_ops, "finalize", lambda: left.append("finalize"))
        patch.setattr(dist, "destroy_process_group", lambda: left.append("destroy"))
        patch.setattr(atexit, "unregister", left.append)
        patch.setattr(te_ep_ops, "_signature", te_ep(group).ring.signature)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            runtime.leave_process_group()
        assert left == [ep._atexit_finalize]


def test_its_kernels_wait_as_long_as_a_first_step_may_take(monkeypatch, tmp_path):
    """Not as long as a user says otherwise; and for other dispatchers nothing is set."""
    monkeypatch.setattr(runtime.dist_utils, "init_distributed", lambda *args, **kwargs: None)
    for arguments, before, after in (([], None, None), ([TE_EP], None, "400000"), ([TE_EP], "5", "5")):
        config = config_file.load(["train_configs/debug_model.toml", "--comm.init_timeout_seconds=400", *arguments])
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", {} if before is None else {"NCCL_EP_TIMEOUT_MS": before})
            runtime.init_process_group(config, tmp_path)
            assert os.environ.get("NCCL_EP_TIMEOUT_MS") == after


@pytest.mark.parametrize(
    ("recv_buffer", "rows", "drops"),
    [("exact", None, False), ("worst_case", 1600, False), (1.0, 608, True), (2.0, 1216, True), (9, 1600, False)],
)
def test_receive_buffers(recv_buffer, rows, drops, group):
    """200 tokens, which come in whole chunks, for 3 of 8 experts, on 4 ranks of 2."""
    dispatcher = te_ep(group, recv_buffer=recv_buffer)
    signature = dispatcher.ring.signature
    assert (signature.max_tokens, signature.rows, signature.drops) == (256, rows, drops)
    assert dispatcher.sync_free == (recv_buffer != "exact")


@pytest.mark.parametrize("recv_buffer", [1.0, "worst_case"])
def test_receive_buffers_hold_a_ranks_own_tokens(recv_buffer, group):
    """NCCL EP takes no smaller ones, whatever the routing needs."""
    assert te_ep(group, recv_buffer=recv_buffer, top_k=1, max_tokens=20).ring.signature.rows == 128


class Waits(Exception):
    pass


@pytest.mark.parametrize("recv_buffer", ["worst_case", 1.5, "exact"])
def test_only_exact_sizes_wait_for_the_device(recv_buffer, group, monkeypatch):
    """What the ops do around the kernels, on a device without values: with fixed sizes nothing of it comes back to the
    host; with exact ones the host waits, in the plan."""

    def wait():
        raise Waits

    def buffer(*args, **kwargs):
        on_device = [torch.empty(n, dtype=torch.int64, device="cuda") for n in (1, 2)]
        return SimpleNamespace(handle_mem=None, total_recv_tokens=on_device[0], tokens_per_expert=on_device[1])

    def region(dispatcher):
        ids_TK = torch.zeros(8, 3, dtype=torch.int64, device="cuda")
        x_TD, w_TK = torch.empty(8, 64, dtype=torch.bfloat16, device="cuda"), torch.empty(8, 3, device="cuda")
        *_, ticket, rows = te_ep_ops._plan_te_ep._init_fn(ids_TK, dispatcher.ring.number)
        x_RD, w_R = te_ep_ops._dispatch._init_fn(x_TD, w_TK, ids_TK, ticket, rows, False)
        te_ep_ops._combine._init_fn(x_RD, ticket, 8, False)
        grad_RD = te_ep_ops._combine_backward._init_fn(x_TD, ticket, rows, False)
        te_ep_ops._dispatch_backward._init_fn(grad_RD, w_R, ticket, 8, 3)

    with te_doubles.installed():
        import transformer_engine_torch as tex
        from transformer_engine.pytorch import ep

        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=wait))
        monkeypatch.setattr(ep, "EpBuffer", buffer)
        monkeypatch.setattr(ep, "ep_prepare", lambda buffer, ids_TK: buffer.tokens_per_expert)
        for module, names in (
            (ep, ["_ep_dispatch_raw", "_ep_combine_raw"]),
            (tex, ["ep_dispatch_bwd", "ep_combine_bwd"]),
        ):
            for name in names:
                monkeypatch.setattr(module, name, lambda *args: None)
        dispatcher = te_ep(group, recv_buffer=recv_buffer)
        with sync_free(), torch.no_grad():
            if dispatcher.sync_free:
                region(dispatcher)
            else:
                with pytest.raises(Waits):
                    region(dispatcher)
