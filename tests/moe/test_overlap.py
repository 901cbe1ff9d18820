"""The pieces of moe.overlap on one process: the log of transfers, the slow link, moving in steps, halves of masks, and
what configurations are refused. Between ranks: tests/distributed/test_overlap.py."""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.faults.checkpoint_run import joined
from titan_moe import clock, config_file, in_flight
from titan_moe.attention import documents
from titan_moe.clock import Mark
from titan_moe.config_check import check
from titan_moe.half_batch import halves_of
from titan_moe.in_flight import InFlight, Transfer, summary
from titan_moe.mesh_check import dispatched_tokens, region_tokens
from titan_moe.moe import exchange
from titan_moe.moe.exchange import start_dispatch
from titan_moe.moe.moving import Moving


def transfer(name, *times, backward=False, sent=10, received=20):
    issued, ended, waited, done = (None if time is None else Mark(time) for time in times)
    assert issued is not None
    return Transfer(name, backward, sent, received, issued, ended, waited, done)


def test_a_summary_adds_up_what_has_been_waited_for():
    """Two dispatches: one of 4 s whose last second somebody waited, one that was there before anybody asked."""
    found = summary(
        [
            transfer("dispatch", 0.0, 4.0, 3.0, 4.0),
            transfer("dispatch", 10.0, 12.0, 15.0, 15.0),
            transfer("combine", 0.0, None, 1.0, 3.0, backward=True),
            transfer("combine", 0.0, None, None, None),
        ]
    )
    dispatch, combine = found["dispatch"], found["combine backward"]
    assert set(found) == {"dispatch", "combine backward"}
    assert (dispatch.calls, dispatch.sent, dispatch.in_flight, dispatch.exposed) == (2, 20, 6.0, 1.0)
    assert combine.in_flight == 3.0 and combine.exposed == 2.0  # nobody noted its end: at the latest the wait's
    assert summary([]) == {}


class Done:
    """A collective that is over."""

    def wait(self) -> None:
        pass

    def get_future(self):
        return SimpleNamespace(add_done_callback=lambda call: call(None))


class Clock:
    """Time that passes only in sleep."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_transfers_of_a_slow_link_follow_each_other(monkeypatch):
    """Two of 20 s each over one link take 40 s; meanwhile a third over another link takes 20 s, and who asks for it
    after 35 s does not wait."""
    time = Clock()
    monkeypatch.setattr(in_flight, "time", time)
    monkeypatch.setattr(clock, "time", time)
    monkeypatch.setattr(in_flight, "seconds_per_byte", 1.0)
    monkeypatch.setattr(in_flight, "log", [])

    def start(link):
        return InFlight([Done()], (torch.ones(1),), "dispatch", backward=False, sent=0, received=20, link=link)

    first, second, other = start("slow"), start("slow"), start("another")
    time.sleep(15)
    first.wait()
    assert time.now == 20
    time.sleep(15)
    other.wait()
    assert time.now == 35
    assert second.wait() == (torch.ones(1),) and time.now == 40
    assert start("slow").wait() and time.now == 60, "the link is free again"
    log = in_flight.log
    assert log is not None
    assert [(each.in_flight, each.exposed) for each in log] == [(20, 5), (40, 5), (20, 0), (20, 20)]


def test_without_a_delay_nobody_sleeps(monkeypatch):
    monkeypatch.setattr(in_flight, "log", None)
    started = InFlight([Done()], (torch.ones(1),), "combine", backward=True, sent=1, received=10**12)
    assert started.until == 0.0 and started.transfer is None
    started.wait()


def test_what_moves_in_steps():
    """The first exchange starts at once; `advance` starts the next, and never waits for the last."""
    done = []

    def steps():
        for hop in range(3):
            done.append(f"start {hop}")
            yield
            done.append(f"end {hop}")
        return "rows"

    moving = Moving(steps(), 3)
    assert done == ["start 0"]
    moving.advance()
    assert done == ["start 0", "end 0", "start 1"]
    for _ in range(3):
        moving.advance()
    assert done[-1] == "start 2"
    assert moving.wait() == "rows" == moving.wait() and done[-1] == "end 2"
    moving.advance()
    assert moving.wait() == "rows"
    whole = Moving(steps(), 3)
    whole.wait(), whole.advance()
    assert whole.wait() == "rows" and Moving.done(7).wait() == 7


@pytest.mark.parametrize("L", [40, 1100])
def test_halves_of_documents(L):
    """With the whole mask made once, and without."""
    positions_BL = torch.arange(L).expand(5, L) % torch.tensor([[7], [L], [20], [11], [13]])
    masks = documents(positions_BL.contiguous())
    for half, expected in zip(halves_of(masks, [3, 2]), (positions_BL[:3], positions_BL[3:])):
        alone = documents(expected.contiguous())
        assert torch.equal(half.start_BL, alone.start_BL) and torch.equal(half.index_Q, alone.index_Q)
        assert (half.mask_B1QL is None) == (alone.mask_B1QL is None)
        assert alone.mask_B1QL is None or torch.equal(half.mask_B1QL, alone.mask_B1QL)


def test_halves_of_a_block_mask():
    """Each half attends as it does in the whole; layers that ask again get the same."""
    B, L = 3, 64
    document_BL = torch.randint(0, 3, (B, L), generator=torch.Generator().manual_seed(0)).sort(1).values

    def same_document(b, h, q, k):
        return (q >= k) & (document_BL[b, q] == document_BL[b, k])

    masks = create_block_mask(same_document, B, None, L, L, device="cpu", BLOCK_SIZE=32)
    q, k, v = torch.randn(3, B, 2, L, 16)
    whole = flex_attention(q, k, v, block_mask=masks)
    halves = halves_of(masks, [2, 1])
    assert halves_of(masks, [2, 1])[0] is halves[0]
    parts = [
        flex_attention(q[rows], k[rows], v[rows], block_mask=half)
        for rows, half in zip((slice(0, 2), slice(2, 3)), halves)
    ]
    torch.testing.assert_close(torch.cat(parts), whole)
    everywhere = create_block_mask(lambda b, h, q, k: q >= k, None, None, L, L, device="cpu")
    assert halves_of(everywhere, [2, 1]) == [everywhere, everywhere]


def test_no_masks():
    assert halves_of(None, [1, 1]) == [None, None]


EP2 = ["train_configs/debug_model.toml", "--parallelism.expert_parallel_degree=2"]
SHARED, HALVES = "--moe.overlap=shared_expert", "--moe.overlap=half_batch"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([SHARED, "--parallelism.expert_parallel_degree=1"], "expert_parallel_degree = 1 sends nothing"),
        ([HALVES, "--training.local_batch_size=1"], "one sequence has no halves"),
        (
            [HALVES, "--parallelism.pipeline_parallel_degree=2"],
            "parallelism.pipeline_parallel_microbatch_size = 1",
        ),
        ([HALVES, "--moe.capacity_factor=1.5"], "drop others than without"),
        ([HALVES, "--moe.dispatcher=deepep"], "does both in one call"),
        ([SHARED, "--moe.dispatcher=te_ep"], "does both in one call"),
        (
            [
                *(SHARED, "--model.name=qwen3", "--model.flavor=30B-A3B", "--model.vocab_size=512"),
                "--parallelism.expert_parallel_degree=2",
            ],
            "nothing would run beside dispatch",
        ),
        (["--debug.comm_delay_ns_per_byte=-1"], "must be at least 0"),
    ],
)
def test_refusals(options, expected):
    config = config_file.load([*EP2, *options])
    found = check(config, 2)
    assert any(expected in sentence for sentence in found), found


@pytest.mark.parametrize("options", [[SHARED], [HALVES], [SHARED, "--moe.capacity_factor=1.5"]])
def test_accepted(options):
    assert check(config_file.load([*EP2, *options]), 2) == []


def test_a_delay_is_for_cpus():
    config = config_file.load([*EP2, "--debug.comm_delay_ns_per_byte=5"])
    assert check(config, 2) == []
    assert any("for tests on CPUs" in sentence for sentence in check(config, 2, accelerator=True))


def test_buffers_of_half_a_batch():
    """For the larger half if the number of sequences is odd."""
    config = config_file.load([*EP2, HALVES, "--training.local_batch_size=5", "--training.seq_len=100"])
    assert (region_tokens(config), dispatched_tokens(config)) == (500, 300)
    config.moe.overlap = "none"
    assert dispatched_tokens(config) == 500


def test_what_an_exception_has_ended_is_not_in_the_way(tmp_path):
    """A transfer that nobody can wait for any more is over when the next one starts, and what it received is free; one
    whose ticket is alive stays."""
    splits = ([3], [3])

    def start():
        arrived = start_dispatch(torch.arange(12.0).view(3, 4), torch.ones(3), splits, splits, dist.group.WORLD)
        (newest,) = list(exchange._under_way.values())[-1:]
        return arrived, weakref.ref(newest)

    with joined(0, 1, str(tmp_path / "store")):
        waits, abandoned = start()
        assert abandoned() is not None and len(exchange._under_way) == 1
        del waits
        waits, kept = start()
        assert abandoned() is None and len(exchange._under_way) == 1
        others, _ = start()
        assert kept() is not None and len(exchange._under_way) == 2
        for each in (others, waits):
            x_RD, weights = each()
            assert torch.equal(x_RD[:3], torch.arange(12.0).view(3, 4)) and torch.equal(weights, torch.ones(3))
        assert not exchange._under_way
