"""The check before torchrun: every mistake once on stderr and exit status 2, or run id and run folder on stdout."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from titan_moe import launch

ROOT = Path(__file__).parent.parent


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty configuration in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").touch()
    return "mine.toml"


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], env: dict[str, str]) -> str:
    assert launch.main(argv, env) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def accepted(capsys: pytest.CaptureFixture[str], argv: list[str], env: dict[str, str]) -> tuple[str, str]:
    """(run id, run folder) as printed."""
    assert launch.main(argv, env) == 0
    out, err = capsys.readouterr()
    run_id, folder = out.splitlines()
    assert err == f"Run folder: {folder}\n"
    return run_id, folder


def test_a_sound_run_gets_a_new_id_and_creates_nothing(capsys: pytest.CaptureFixture[str], config: str) -> None:
    run_id, folder = accepted(capsys, [config], {})
    assert re.fullmatch(r"\d{8}-\d{6}-mine-[0-9a-f]{4}", run_id) and folder == f"outputs/{run_id}"
    assert [path.name for path in Path().iterdir()] == [config]
    assert accepted(capsys, [config, "--job.dump_folder=here"], {})[1] == "here"


def test_help_without_the_shell(capsys: pytest.CaptureFixture[str], config: str) -> None:
    assert launch.main([config, "--help", "loss"], {}) == launch.main(["--help", "loss"], {}) == 0
    out, err = capsys.readouterr()
    assert out.startswith("[loss]\n") and err == ""


def test_where_the_run_id_comes_from(capsys: pytest.CaptureFixture[str], config: str) -> None:
    slurm = {"SLURM_JOB_ID": "77", "NNODES": "2", "NGPU": "4"}
    requeued, again = accepted(capsys, [config], slurm), accepted(capsys, [config], slurm)
    assert requeued == again and re.fullmatch(r"slurm-77-mine-[0-9a-f]{4}", requeued[0])
    # Another configuration in the same allocation is another run.
    assert accepted(capsys, [config, "--optimizer.lr=1e-4"], slurm)[0] != requeued[0]
    assert accepted(capsys, [config], {**slurm, "RUN_ID": "mine.2"}) == ("mine.2", "outputs/mine.2")
    assert "2 nodes must agree" in refused(capsys, [config], {"NNODES": "2"})


@pytest.mark.parametrize("run_id", [".", "..", "a/b", "a b", "ä", "a\n"])
def test_run_ids_that_name_no_folder(capsys: pytest.CaptureFixture[str], config: str, run_id: str) -> None:
    assert "RUN_ID = " in refused(capsys, [config], {"RUN_ID": run_id})


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", " "])
def test_counts_that_are_none(capsys: pytest.CaptureFixture[str], config: str, count: str) -> None:
    assert f"NGPU = {count!r} in the environment" in refused(capsys, [config], {"NGPU": count})


def test_all_problems_at_once(capsys: pytest.CaptureFixture[str], config: str) -> None:
    """World size 2 x 3 = 6; what is wrong with it, the batch and the run id comes in one list under the file's name."""
    argv = [config, "--parallelism.expert_parallel_degree=4", "--training.global_batch_size=5"]
    lines = refused(capsys, argv, {"NNODES": "2", "NGPU": "3"}).splitlines()
    assert lines[0] == f"{config}: 3 mistakes" and len(lines) == 4
    assert (
        "RUN_ID" in lines[1] and "must divide data_parallel_shard_degree = 6" in lines[2] and "8 x 6 = 48" in lines[3]
    )


def test_a_taken_run_folder_is_refused_unless_resumed(capsys: pytest.CaptureFixture[str], config: str) -> None:
    Path("taken/checkpoint/step-5").mkdir(parents=True)
    Path("taken/run.json").write_text('{"run_id": "r1", "attempt": 1}')
    argv = [config, "--job.dump_folder=taken"]
    assert "holds another run (r1)" in refused(capsys, argv, {})
    assert accepted(capsys, [*argv, "--checkpoint.enable"], {})[1] == "taken"
    assert accepted(capsys, argv, {"RUN_ID": "r1"}) == ("r1", "taken")
    assert "is not a folder" in refused(capsys, [config, f"--job.dump_folder={config}/x"], {})


def test_as_the_shell_runs_it() -> None:
    """A process of its own: one line on stdout when sound; else nothing there, the list on stderr, status 2."""
    command = [sys.executable, "-m", "titan_moe.launch", "train_configs/debug_model.toml"]
    sound = subprocess.run(command, cwd=ROOT, env={"RUN_ID": "r1"}, capture_output=True, text=True, check=False)
    assert (sound.returncode, sound.stdout, sound.stderr) == (0, "r1\noutputs/r1\n", "Run folder: outputs/r1\n")
    broken = subprocess.run([*command, "--a.b=1", "c"], cwd=ROOT, env={}, capture_output=True, text=True, check=False)
    assert (broken.returncode, broken.stdout) == (2, "")
    assert broken.stderr.splitlines()[0] == "train_configs/debug_model.toml: 2 mistakes"
    assert len(broken.stderr.splitlines()) == 3


def test_missing_inputs_are_all_named_before_the_start(capsys: pytest.CaptureFixture[str], config: str) -> None:
    argv = [config, "--training.dataset=no/such/*.txt", "--model.hf_assets_path=nowhere", "--checkpoint.enable"]
    argv += ["--checkpoint.initial_load_path=gone", "--checkpoint.load_step=3", "--training.global_batch_size=7"]
    message = refused(capsys, argv, {})
    for named in ("no/such/*.txt", "nowhere", "gone", "load_step = 3", "global_batch_size = 7"):
        assert named in message
    assert "set model.vocab_size to at least 258" in refused(capsys, [config, "--model.vocab_size=100"], {})


def test_an_older_step_is_not_resumed_beside_newer_ones(capsys: pytest.CaptureFixture[str], config: str) -> None:
    for step in (10, 20):
        (Path("mine") / "checkpoint" / f"step-{step}").mkdir(parents=True)
    argv = [config, "--job.dump_folder=mine", "--checkpoint.enable"]
    assert "has steps [10, 20]; choose one" in refused(capsys, [*argv, "--checkpoint.load_step=15"], {})
    assert "also has steps [20]" in refused(capsys, [*argv, "--checkpoint.load_step=10"], {})
    accepted(capsys, [*argv, "--checkpoint.load_step=20"], {})


def test_a_folder_of_checkpoints_is_none(capsys: pytest.CaptureFixture[str], config: str) -> None:
    newest = Path("mine") / "checkpoint" / "step-20"
    newest.mkdir(parents=True)
    for start in (newest.parent, newest.parent.parent):
        message = refused(capsys, [config, "--checkpoint.enable", f"--checkpoint.initial_load_path={start}/"], {})
        assert f"is no checkpoint, but holds some; name one of them, such as {newest}" in message
    start = [config, "--checkpoint.enable", f"--checkpoint.initial_load_path={newest}/"]
    assert "holds neither a checkpoint (manifest.json, .metadata) nor Hugging Face weights" in refused(
        capsys, start, {}
    )
    (newest / "manifest.json").touch()
    accepted(capsys, start, {})
    gone = [config, "--checkpoint.enable", "--checkpoint.initial_load_path=gone"]
    assert "is no folder" in refused(capsys, gone, {})
    accepted(capsys, [*gone, "--job.dump_folder=mine"], {})  # a run that has checkpoints of its own does not look at it


def test_what_only_gpus_cannot_do_is_refused_where_there_are_some(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    argv = [config, "--parallelism.context_parallel_degree=2", "--training.seq_len=320"]
    assert accepted(capsys, argv, {"NGPU": "2", "GPUS": "0"})
    assert "context_parallel_degree x 128" in refused(capsys, argv, {"NGPU": "2", "GPUS": "2"})
