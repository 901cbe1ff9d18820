"""Predictions from runs: a machine that is known is found again, measured runs predict others, broken ones are named.

cpu_runs.json are the medians of runs of train_configs/debug_model.toml as benchmarks/calibrate.py starts them, in
processor time of a rank, which other programs on the machine disturb little.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.folders import line, write
from titan_moe import config_file
from titan_moe.config import Config
from titan_moe.config_file import ConfigError
from titan_moe.plan import calibrate, machine, report, work
from titan_moe.plan.__main__ import main
from titan_moe.plan.calibrate import GROUPS, Measured
from titan_moe.plan.machine import Machine
from titan_moe.plan.step import predict

ROOT = Path(__file__).parents[2]
DEBUG = str(ROOT / "train_configs" / "debug_model.toml")
REFERENCE = str(ROOT / "train_configs" / "deepseek_v3_671b.toml")
EP2, EP4 = (f"--parallelism.expert_parallel_degree={ranks}" for ranks in (2, 4))
WIDE = ("--model.dim=512", "--model.moe_hidden_dim=512", "--model.dense_hidden_dim=1536")


def debug(*words: str) -> Config:
    return config_file.load([DEBUG, *words])


def measured_here() -> list[Measured]:
    return [
        Measured(
            folder=" ".join([f"{run['ranks']} ranks", *run["words"]]),
            config=debug(*run["words"]),
            ranks=run["ranks"],
            device="CPU",
            cores=1_000,
            threads=1,
            step=run["step"],
            phases=run["phases"],
            sent=0.0,
            lines=5,
        )
        for run in json.loads(Path(__file__).with_name("cpu_runs.json").read_text())
    ]


# ---------------------------------------------------------------------------------------------------------------------
# CPUs


def test_one_and_two_ranks_predict_four_and_a_model_twice_as_wide():
    """Within 10 %; the rest of 15 % is for waits and whatever else differs on the wall."""
    runs = measured_here()
    assert [(run.ranks, run.config.model.dim) for run in runs[:2]] == [(1, None), (2, None)]
    learnt = machine.learn(runs[:2])
    errors = {run.folder: sum(learnt.predict(machine.job_of(run)).values()) / run.step - 1 for run in runs}
    assert {run.ranks for run in runs[2:]} == {1, 2, 4} and len(errors) == 7
    assert all(abs(error) < 0.10 for error in errors.values()), errors
    assert runs[5].step > 2 * runs[0].step, "what is predicted is far from what was learnt from"


def test_what_a_rank_cannot_have_alone_takes_longer():
    learnt = replace(machine.learn(measured_here()[:2]), cores=2)
    four, two = (machine.job_of(replace(measured_here()[1], ranks=ranks)) for ranks in (4, 2))
    alone, crowded = replace(learnt, cores=4).predict(four), learnt.predict(four)
    assert crowded == {phase: pytest.approx(2 * seconds) for phase, seconds in alone.items()}
    assert learnt.predict(two) == replace(learnt, cores=100).predict(two)
    assert replace(learnt, threads=2).crowd(2) == 2.0


KNOWN = Machine(
    cores=2,
    threads=1,
    flop=1e-11,
    byte=2e-10,
    operation=5e-6,
    factors=dict.fromkeys(work.PHASES, 1.0),
    links={"dispatch and combine": 4e-9, "fsdp": 1e-9},
)


def run_folder(folder: Path, ranks: int, *words: str, **facts) -> Path:
    """Of a run on KNOWN; its first lines are slow, as those of real runs are."""
    config = debug(*words)
    job = machine.Job.from_config(config, ranks, machine.ANY)
    phases = {}
    for phase, seconds in KNOWN.predict(job).items():
        for name in work.PHASES[phase]:
            halves = [name] if name in work.PHASES["rest"] + ("clip", "optimizer") else [f"{name}.forward"]
            phases |= {f"phase/{half}": seconds / len(work.PHASES[phase]) for half in halves}
    step = sum(phases.values())
    slow = {name: 10 * seconds for name, seconds in phases.items()}
    lines = [
        line(i, **({"step_s": 10 * step} | slow if i <= 3 else {"step_s": step} | phases), **{"phase/step": step})
        for i in range(1, 9)
    ]
    facts = {"world": ranks, "cores": 2, "threads": 1} | facts
    return write(folder, lines, config, **facts)


def test_a_known_machine_is_found_again(tmp_path):
    folders = [run_folder(tmp_path / "one", 1), run_folder(tmp_path / "two", 2, EP2)]
    runs = [calibrate.measured(str(folder)) for folder in folders]
    learnt = machine.learn(runs)
    for name in ("flop", "byte", "operation"):
        assert getattr(learnt, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6)
    assert learnt.links == {phase: pytest.approx(link, rel=1e-4) for phase, link in KNOWN.links.items()}
    for ranks, words in ((4, (EP4,)), (4, (EP2,)), (2, (*WIDE, EP2)), (1, ("--training.seq_len=512",))):
        job = machine.Job.from_config(debug(*words), ranks, machine.ANY)
        assert sum(learnt.predict(job).values()) == pytest.approx(sum(KNOWN.predict(job).values()), rel=1e-4)


def test_work_grows_as_it_should():
    base, wide = (work.of_job(machine.Job.from_config(debug(*words), 1, machine.ANY)) for words in ((), WIDE))
    assert wide["dense"].flops == 4 * base["dense"].flops and wide["dense"].moved < 4 * base["dense"].moved
    deep = work.of_job(machine.Job.from_config(debug("--model.n_layers=7"), 1, machine.ANY))
    assert deep["experts"].flops == 2 * base["experts"].flops and deep["loss"] == base["loss"]
    twice = work.of_job(machine.Job.from_config(debug("--training.global_batch_size=16"), 1, machine.ANY))
    assert twice["attention"] == base["attention"] * 2 and twice["optimizer"] == base["optimizer"]
    assert base["fsdp"].wire == base["dispatch and combine"].wire == 0
    two = work.of_job(machine.Job.from_config(debug(EP2), 2, machine.ANY))
    assert two["optimizer"].moved == base["optimizer"].moved / 2 and two["dispatch and combine"].wire > 0


def test_bytes_on_the_wire_are_those_that_a_run_counted():
    """5.08 and 5.05 MB of a rank's dispatch and combine in a step of the debug model on two ranks (telemetry)."""
    two = work.of_job(machine.Job.from_config(debug(EP2), 2, machine.ANY))
    assert two["dispatch and combine"].wire == pytest.approx(5.08e6 + 5.05e6, rel=0.15)


# ---------------------------------------------------------------------------------------------------------------------
# As a user calls it


def plan(capsys, *words: str) -> tuple[int, str, str]:
    status = main([DEBUG, *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_plan_of_this_machine_needs_no_gpu(tmp_path, capsys):
    folders = f"{run_folder(tmp_path / 'one', 1)},{run_folder(tmp_path / 'two', 2, EP2)}"
    status, out, err = plan(capsys, "--plan.gpus=4", EP4, f"--plan.calibrate={folders}")
    job = machine.Job.from_config(debug(EP4), 4, machine.ANY)
    seconds = sum(KNOWN.predict(job).values())
    assert status == 0 and err == "" and f"{seconds:,.3f} s per step" in out
    assert "4 ranks with 1 thread(s) each share 2 cores: all takes 2.0 times as long" in out
    assert "100.0 GFLOPS, 5.0 GB/s of memory, 5.0 us an operation" in out
    status, out, _ = plan(capsys, "--plan.gpus=4", "--plan.json", EP4, f"--plan.calibrate={folders}")
    data = json.loads(out)
    assert data["step_seconds"] == pytest.approx(seconds) and data["crowd"] == 2.0
    assert sum(data["step_parts_seconds"].values()) == pytest.approx(seconds) and len(data["runs"]) == 2


def cut(folder: Path) -> None:
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[: len(text) - 40])


def without(*names: str):
    def change(folder: Path) -> None:
        lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        kept = [{k: v for k, v in each.items() if not k.startswith(names)} for each in lines]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in kept))

    return change


def short(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]))


BROKEN = {
    "metrics.jsonl is missing": lambda folder: (folder / "metrics.jsonl").unlink(),
    "metrics.jsonl has no step": lambda folder: (folder / "metrics.jsonl").write_text(""),
    "1 line could not be read: it is cut off": cut,
    "metrics.jsonl has 2 lines behind the first one and step 3": short,
    "metrics.jsonl has no times of phases": without("phase/"),
    "run.json is missing": lambda folder: (folder / "run.json").unlink(),
    "run.json is broken": lambda folder: (folder / "run.json").write_text('{"wor'),
    "config.toml is missing": lambda folder: (folder / "config.toml").unlink(),
    "config.toml is broken": lambda folder: (folder / "config.toml").write_text("[model\n"),
    "unknown key": lambda folder: (folder / "config.toml").write_text("[model]\nnaem = 1\n"),
}


@pytest.mark.parametrize("said", BROKEN)
def test_broken_runs_are_named(said, tmp_path, capsys):
    folder = run_folder(tmp_path / "broken", 1)
    BROKEN[said](folder)
    status, out, err = plan(capsys, "--plan.gpus=1", f"--plan.calibrate={folder}")
    assert (status, out) == (2, "") and f"plan.calibrate: {folder}: " in err and said in err


STRANGE = [
    (("--plan.calibrate={tmp}/nowhere",), "nowhere: there is no such folder"),
    (("--plan.calibrate={tmp}/one,{tmp}/qwen",), "qwen: ran with model.name = qwen3, and asked is deepseek_v3"),
    (("--plan.calibrate={tmp}/one,{tmp}/threads",), "must be the same machine; start them all with the same OMP_NUM"),
    (("--plan.calibrate={tmp}/one,{tmp}/gpu",), "ran on NVIDIA H100 80GB HBM3: must be the same machine"),
    (("--plan.calibrate={tmp}/cores",), "run.json has no number of cores"),
    (("--plan.calibrate={tmp}/pipeline",), "pipeline: pp = 2: only FSDP and expert parallelism are counted for CPUs"),
    (("--plan.calibrate={tmp}/one", "--plan.gpus=2"), "no run had ranks that talk to each other"),
    (("--plan.calibrate={tmp}/one", "--plan.gpus=none"), "plan.gpus: is not set; give the number of ranks"),
    (("--plan.calibrate={tmp}/one", "--plan.scale=2"), "plan.scale: is of GPUs"),
    (("--plan.calibrate={tmp}/one", "--plan.png=x"), "plan.png: is of GPUs"),
    (("--plan.calibrate={tmp}/one", "--model.num_mtp_layers=1"), "multi-token prediction is not counted for CPUs"),
    (("--plan.calibrate={tmp}/one", EP4), "parallelism.expert_parallel_degree = 4: must divide"),
    (("--plan.calibrate={tmp}/one", "--training.mixed_precision_param=bfloat16"), "mixed_precision_param = float32"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    tmp = tmp_path_factory.mktemp("runs")
    for name in ("one", "qwen", "threads", "gpu", "cores", "pipeline"):
        run_folder(tmp / name, 1)
    facts = json.loads((tmp / "one" / "run.json").read_text())
    for name, changed in (
        ("threads", {"threads": 2}),
        ("gpu", {"device": "NVIDIA H100 80GB HBM3"}),
        ("cores", {"cores": True}),
        ("pipeline", {"world": 2}),
    ):
        (tmp / name / "run.json").write_text(json.dumps(facts | changed))
    for name, words in (("qwen", ["--model.name=qwen3"]), ("pipeline", ["--parallelism.pipeline_parallel_degree=2"])):
        (tmp / name / "config.toml").write_text(config_file.to_toml(debug(*words)))
    return tmp


@pytest.mark.parametrize(("words", "said"), STRANGE, ids=[said[:40] for _, said in STRANGE])
def test_runs_that_say_nothing_of_what_is_asked_are_refused(words, said, folders, capsys):
    status, out, err = plan(capsys, "--plan.gpus=1", *(word.format(tmp=folders) for word in words))
    assert (status, out) == (2, "") and said in err, err


# ---------------------------------------------------------------------------------------------------------------------
# GPUs


TRUE = {"computing": 1.3, "dispatch and combine": 0.7, "data parallelism": 1.1, "optimizer": 2.0}
"""Times what is planned, on a cluster that there is not"""
EXTRA = 0.5  # s for data and the like


def gpu_run(folder: Path) -> Path:
    """A run of the reference on 256 GB300 where everything takes what is planned times TRUE."""
    config = config_file.load([REFERENCE, "--plan.hardware="])
    speed = report.make(config_file.load([REFERENCE]), "reference").speed
    seconds = {
        phases[0]: TRUE.get(group, 1.0) * sum(speed.parts.get(part, 0.0) for part in parts)
        for group, (phases, parts) in GROUPS.items()
    }
    phases = {f"phase/{name}": value for name, value in {**seconds, "data": EXTRA}.items() if value}
    lines = [line(step, step_s=sum(phases.values()), **phases) for step in range(1, 11)]
    return write(folder, lines, config, world=256, device="NVIDIA GB300", cores=144, threads=1)


def test_on_gpus_each_group_of_causes_is_corrected_and_the_scale_stays_the_planners(tmp_path):
    folder = gpu_run(tmp_path / "run")
    words = [REFERENCE, f"--plan.calibrate={folder}"]
    config = config_file.load(words)
    found = calibrate.corrections(calibrate.runs(config, REFERENCE), REFERENCE)
    assert found.factors == {
        group: pytest.approx(TRUE[group]) for group in ("computing", "dispatch and combine", "data parallelism")
    }
    same = report.make(config, REFERENCE, found)
    assert same.speed.step_seconds == pytest.approx(calibrate.measured(str(folder)).step)
    assert sum(same.speed.parts.values()) == pytest.approx(same.speed.step_seconds)

    larger = config_file.load([*words, "--plan.gpus=1024", "--training.global_batch_size=61440", "--plan.scale=4096"])
    planned, corrected = (report.make(larger, REFERENCE, c) for c in (None, found))
    expected = dict(planned.speed.parts)
    for group, factor in found.factors.items():
        for part in GROUPS[group][1]:
            if part in expected:
                expected[part] *= factor
    seconds = sum(expected.values()) + sum(found.added.values())
    assert corrected.speed.step_seconds == pytest.approx(seconds) and seconds > planned.speed.step_seconds
    rate = larger.training.global_batch_size * larger.training.seq_len / seconds / 1024
    assert corrected.speed.tokens_per_s_per_gpu == pytest.approx(rate)
    low, high = corrected.speed.band
    assert low < rate < high
    assert corrected.scaling[0].speed.step_seconds == pytest.approx(corrected.speed.step_seconds)
    assert "computing: 1.30 times what is planned" in report.to_text(corrected)


def test_what_is_next_to_nothing_is_carried_over_as_a_difference(tmp_path):
    """A ratio of two small numbers would say that what a run hid stays hidden at any scale."""
    folder = gpu_run(tmp_path / "run")
    config = config_file.load([REFERENCE, f"--plan.calibrate={folder}"])
    found = calibrate.corrections(calibrate.runs(config, REFERENCE), REFERENCE)
    assert "optimizer" in found.added and 0 < found.added["optimizer"] < 0.1
    assert found.added["rest"] == EXTRA


@pytest.mark.parametrize(
    ("device", "status", "said"),
    [
        ("NVIDIA T4", 2, "ran on NVIDIA T4, which is none of A100"),
        # Another GPU than the plan's: as the planner sees it, such a run was merely fast.
        ("NVIDIA A100-SXM4-80GB", 0, "Corrected by runs on this machine"),
    ],
)
def test_a_run_on_another_gpu_counts_if_the_planner_knows_that_one(device, status, said, tmp_path, capsys):
    folder = gpu_run(tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text()) | {"device": device}
    (folder / "run.json").write_text(json.dumps(facts))
    assert main([REFERENCE, f"--plan.calibrate={folder}"]) == status
    captured = capsys.readouterr()
    assert said in (captured.err if status else captured.out)


def test_no_prediction_is_changed_by_a_run_that_went_as_planned():
    plan = report.make(config_file.load([REFERENCE]), "reference")
    nothing = calibrate.Corrections(factors={}, added={}, told=())
    assert nothing.apply(plan.job, plan.speed).step_seconds == pytest.approx(predict(plan.job).step_seconds)


def test_problems_are_told_together(tmp_path):
    config = debug(f"--plan.calibrate={tmp_path}/a,{tmp_path}/b")
    with pytest.raises(ConfigError) as raised:
        calibrate.runs(config, DEBUG)
    assert str(raised.value).count("there is no such folder") == 2
