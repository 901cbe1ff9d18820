"""A run that ends and goes on is the run that never ended: bit for bit on as many ranks, the same samples on others.

Every case compares one uninterrupted training with one that was ended and resumed, several times in a row, at steps
that are no multiples of what is logged, validated or drawn by workers ahead. Compared is all that metrics.jsonl says
but times: losses, gradient norm, rate, load and drops, validation.
"""

import tempfile
from itertools import chain
from pathlib import Path

import pytest

from tests.distributed.cases import ALLTOALL, CP2, EP2, FULL, HSDP2, MTP1, PP2, TP2, pipeline
from tests.faults.corpora import HUB_FILES, mixture, written
from tests.faults.trainings import SAVING, Training, consumed, in_parts, repeated, run_all
from tests.hub_server import serving
from titan_moe.metrics import read_metrics

RARELY = ["--metrics.log_freq=2", "--validation.freq=2", "--validation.dataset=synthetic"]
WORKERS = ["--training.dataloader.num_workers=2"]
RANDOM = "--moe.force_balance=balanced_random"


# What a resume has to carry over, or to come to anew: drawn random numbers, also where a step runs again; buffers that
# had grown; the bias, MTP's too; workers ahead; samples in the middle of a document.
DEFAULT = {
    "mixture": in_parts("mixture", [1, 3, 6], [*RARELY, *WORKERS]),
    "ep2_random_factor_mtp": in_parts("ep2_random_factor_mtp", [1, 3], [EP2, RANDOM, MTP1, "--moe.recv_buffer=1"], 2),
}
ONE_STEP_EACH = [1, 2, 3, 4]
SLOW = {
    "pp2_random": in_parts("pp2_random", [1, 3], [PP2, RANDOM], 2),
    "ep2_full_factor_mtp": in_parts("ep2_full_factor_mtp", [1, 3], [EP2, MTP1, FULL, "--moe.recv_buffer=1"], 2),
    **{kind: in_parts(kind, ONE_STEP_EACH, [*RARELY]) for kind in ("text", "lines", "rows", "tokens", "hub")},
    "python_stdlib": in_parts("python_stdlib", ONE_STEP_EACH, [*WORKERS, "--training.dataset=python_stdlib"]),
    "hub_workers": in_parts("hub_workers", [1, 3], [*RARELY, *WORKERS]),
    "ep2_random_drops": in_parts("ep2_random_drops", ONE_STEP_EACH, [EP2, RANDOM, "--moe.capacity_factor=1.0"], 2),
    "ep2_drops_alltoall": in_parts("ep2_drops_alltoall", [1, 3], [EP2, ALLTOALL, "--moe.capacity_factor=1.0"], 2),
    "pp2_zbv_ep2": in_parts("pp2_zbv_ep2", [1, 3], [*pipeline("ZBVZeroBubble"), EP2, RANDOM], 4),
    "tp2_ep2": in_parts("tp2_ep2", [1, 3], [TP2, EP2, "--moe.recv_buffer=worst_case"], 2),
    "cp2_mtp": in_parts("cp2_mtp", [1, 3], [CP2], 2),
    "hsdp2": in_parts("hsdp2", [1, 3], [HSDP2, *WORKERS, "--training.local_batch_size=4"], 2),
}


def part(name: str, ranks: int, steps: int, argv: list[str], run: str) -> Training:
    return Training(name, ranks, [*argv, *SAVING, f"--training.steps={steps}"], run)


# By ranks, microbatches and workers: each part goes on where the last one ended.
ELASTIC = [
    part("elastic-1", 2, 1, [*RARELY, *WORKERS, EP2, "--metrics.enable_tensorboard"], "elastic"),
    part("elastic-2", 1, 3, [*RARELY, "--training.local_batch_size=8"], "elastic"),
    part("elastic-3", 4, 6, [*RARELY, PP2, "--training.local_batch_size=1", *WORKERS], "elastic"),
]
FURTHER = [
    part("further-1", 4, 2, [*RARELY, "--training.local_batch_size=1", EP2], "further"),
    part("further-2", 2, 3, [*RARELY, TP2, EP2], "further"),
    part("further-3", 4, 5, [*RARELY, HSDP2, "--training.local_batch_size=1", *WORKERS], "further"),
    part("further-4", 2, 6, [*RARELY, CP2, *WORKERS], "further"),
]
# Half of the sequences a step from step 3 on.
HALVED = [
    part("halved-1", 1, 2, RARELY, "halved"),
    part("halved-2", 1, 4, [*RARELY, "--training.global_batch_size=4"], "halved"),
]


def prepared(trainings: list[Training], folder: Path) -> list[Training]:
    """With the data that their names ask for."""
    datasets = written(folder)
    config = mixture(datasets, folder / "mixture.toml")
    for training in trainings:
        kind = training.name.split("-")[0]
        if kind in ("mixture", "elastic", "further", "halved"):
            training.config = config
        elif kind in datasets:
            training.argv = [*training.argv, f"--training.dataset={datasets[kind]}"]
        elif kind.startswith("hub"):
            training.argv = [*training.argv, "--training.dataset=hf:me/texts"]
    return trainings


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the default cases ran in."""
    out = tmp_path_factory.mktemp("resume")
    print(run_all(prepared([*chain(*DEFAULT.values()), *ELASTIC], out / "data"), out))
    return out


@pytest.fixture(scope="module")
def ran_slow(ran: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for slow ones, beside the default ones."""
    trainings = prepared([*chain(*SLOW.values()), *FURTHER, *HALVED], ran / "data-slow")
    with serving(HUB_FILES) as server:
        hub = {"HF_ENDPOINT": server.url, "HF_HOME": str(ran / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        for training in trainings:
            training.env = {**hub, "no_proxy": "127.0.0.1"}
        print(run_all(trainings, ran))
    return ran


def check_exact(out: Path, trainings: list[Training]) -> None:
    whole, *parts = trainings
    expected = repeated(read_metrics(out / whole.name))
    found = repeated(read_metrics(out / parts[-1].folder))
    last = max(expected)
    assert last == int(parts[-1].name.split("-")[-1]) and expected[last]["loss"] > 0
    starts = {int(each.name.split("-")[-1]) + 1 for each in parts[:-1]}
    for step, record in expected.items():  # the parts say more: they log, and validate, at the end of each
        differs = {key for key in record if found[step].get(key) != record[key]}
        if step in starts and found[step]["overflow_replays"]:  # buffers of a new process grow anew, and rows go twice
            differs = {key for key in differs if not key.startswith("comm/")}
        assert not differs, (step, {key: (record[key], found[step].get(key)) for key in differs})
    attempts = {record["attempt"] for record in read_metrics(out / parts[-1].folder).values()}
    assert attempts == set(range(1, len(parts) + 1))
    samples = consumed(out, [whole.name])
    assert consumed(out, [each.name for each in parts]) == samples and len(samples) == 8 * last


@pytest.mark.parametrize("name", DEFAULT)
def test_resumed_twice_equals_uninterrupted_bit_for_bit(ran: Path, name: str) -> None:
    check_exact(ran, DEFAULT[name])


def test_a_run_writes_to_its_folder_only(ran: Path) -> None:
    """Checkpoints, metrics and TensorBoard's events, by all ranks and data workers of all runs above."""
    seen = set()
    for training in [*chain(*DEFAULT.values()), *ELASTIC]:
        for rank in range(training.ranks):
            name, folder = f"{training.name}-{rank}", (ran / training.folder).resolve()
            written = {Path(line) for line in (ran / f"{name}.written").read_text().splitlines()}
            outside = {path for path in written if not path.resolve().is_relative_to(folder)}
            outside -= {ran / f"{name}.json"}  # this test's own
            sockets = {path for path in outside if str(path).startswith(f"{tempfile.gettempdir()}/pymp-")}
            assert not [path for path in sockets if path.exists()], "data workers left theirs"
            assert not [path for path in outside - sockets if path.parts[1] not in ("dev", "proc")], name
            seen |= {path.name.split(".")[0] for path in written - outside}
    assert seen >= {"metrics", "run", "config", "data", "checkpoint", "step-3", "__0_0", "events"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_kind_of_data_and_mesh_resumes_bit_for_bit(ran_slow: Path, name: str) -> None:
    check_exact(ran_slow, SLOW[name])


def check_elastic(out: Path, parts: list[Training]) -> None:
    assert consumed(out, [each.name for each in parts]) == consumed(out, ["mixture"]), "samples lost, repeated or moved"
    expected, found = read_metrics(out / "mixture"), read_metrics(out / parts[-1].folder)
    for step, record in expected.items():
        for quantity in ("loss", "grad_norm", "lr", "tokens_seen"):
            assert found[step][quantity] == pytest.approx(record[quantity], rel=1e-5), (step, quantity)


def test_2_ranks_then_1_then_4_consume_the_samples_of_one_in_order(ran: Path) -> None:
    """Other degrees of FSDP, EP and PP, another accumulation, with and without workers, from an odd step on."""
    check_elastic(ran, ELASTIC)


@pytest.mark.slow
def test_4_ranks_then_2_then_4_then_2_consume_the_samples_of_one_in_order(ran_slow: Path) -> None:
    check_elastic(ran_slow, FURTHER)


@pytest.mark.slow
def test_another_global_batch_goes_on_at_the_right_sample(ran_slow: Path) -> None:
    samples = consumed(ran_slow, ["halved-1", "halved-2"])
    assert len(samples) == 2 * 8 + 2 * 4 and samples == consumed(ran_slow, ["mixture"])[: len(samples)]
    metrics = read_metrics(ran_slow / "halved")
    assert [metrics[step]["tokens_seen"] for step in (2, 4)] == [2 * 8 * 64, (2 * 8 + 2 * 4) * 64]
    uninterrupted = read_metrics(ran_slow / "mixture")
    assert metrics[2]["loss"] == uninterrupted[2]["loss"] and metrics[4]["loss"] != uninterrupted[4]["loss"]
