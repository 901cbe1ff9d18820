"""What is wrong with the data is told before torchrun: the fields, the tokenizer, the files of a run that goes on."""

import multiprocessing
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.pieces import jsonl, write, write_tokenizer
from titan_moe import launch
from titan_moe.config import Config
from titan_moe.config_file import load
from titan_moe.data import build_dataloaders
from titan_moe.preflight import data_problems, list_sources
from titan_moe.sources import record
from titan_moe.sources.record import list_all
from titan_moe.tokenizer import ByteTokenizer

DOCS = Path(__file__).parents[1] / "docs" / "data.md"


def config_of(dataset: str) -> Config:
    config = Config()
    config.training.dataset, config.checkpoint.enable = dataset, True
    return config


def test_a_changed_file_is_named_before_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"texts/a.jsonl": jsonl(["a", "b"]), "texts/b.jsonl": jsonl(["c"]), "mine.toml": b""})
    config, run = config_of("texts"), tmp_path / "run"
    (run / "checkpoint" / "step-5").mkdir(parents=True)
    record.save(list_all(config), run)
    command = ["mine.toml", "--training.dataset=texts", "--job.dump_folder=run", "--checkpoint.enable"]
    assert launch.main(command, {}) == 0
    (tmp_path / "texts" / "b.jsonl").write_bytes(jsonl(["d"]))
    assert launch.main(command, {}) == 2
    message = capsys.readouterr().err
    assert (
        'the data of the run in run is not what it was: training source "texts" changed: changed: b.jsonl (' in message
    )
    assert "Put it back to resume, or start a new run from the weights" in message
    with pytest.raises(ValueError, match=r"is not what it was: .*b\.jsonl"):  # and rank 0, when nobody asked before
        list_sources(config, ByteTokenizer(), run)
    assert (
        launch.main(["mine.toml", "--training.dataset=texts", "--job.dump_folder=new", "--checkpoint.enable"], {}) == 0
    )


def test_settings_that_the_position_in_the_data_counts_by_are_named_before_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("training.seq_len = 64\n")
    config, run = config_of("synthetic"), tmp_path / "run"
    (run / "checkpoint" / "step-5").mkdir(parents=True)
    record.save(list_all(config), run)
    command = ["mine.toml", "--training.dataset=synthetic", "--job.dump_folder=run", "--checkpoint.enable"]
    assert launch.main([*command, "--training.dataloader.num_shards=2"], {}) == 2
    message = capsys.readouterr().err
    for line in (
        "mine.toml:1: the data of the run in run is not what it was: training.seq_len was 2048, now 64",
        "command line: the data of the run in run is not what it was: training.dataloader.num_shards was ",
    ):
        assert line in message
    command.append("--training.seq_len=2048")
    assert launch.main([*command, "--debug.seed=5"], {}) == 2
    assert f"debug.seed was {config.debug.seed}, now 5" in capsys.readouterr().err
    assert launch.main(command, {}) == 0


def test_all_problems_of_all_sources_are_told_together(tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": b"broken\n", "b.jsonl": jsonl(["a"], "body")})
    toml = tmp_path / "mine.toml"
    toml.write_text(
        "".join(f'[[training.mixture]]\ndataset = "{tmp_path}/{name}"\n' for name in ("a.jsonl", "b.jsonl"))
        + '[[training.mixture]]\ndataset = "synthetic"\nadd_bos = true\n'
    )
    write_tokenizer(tmp_path, ["</s>"])
    found = data_problems(load([str(toml), f"--model.hf_assets_path={tmp_path}"]), tmp_path / "run")
    assert len(found) == 3
    assert "a.jsonl:1: is not JSON" in found[0] and 'b.jsonl:1: has no field "text"' in found[1]
    assert 'training.mixture, "synthetic": add_bos = true, but the tokenizer has no bos token' in found[2]


def test_each_source_that_cannot_be_listed_is_told_at_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"a.jsonl": jsonl(["a"]), "b.gz": b"x"})
    entries = "".join(f'[[training.mixture]]\ndataset = "{name}"\n' for name in ("gone", "a.jsonl", "b.gz", "away"))
    write(tmp_path, {"mine.toml": entries.encode()})
    assert launch.main(["mine.toml", "--validation.enable", "--validation.dataset=lost"], {}) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in lines[1:]] == [
        ["    mine.toml:2", 'training.mixture[0].dataset = "gone"'],
        [
            f"    {tmp_path}/b.gz is not plain text",
            "write its texts to .jsonl or .txt files and train on those, or leave it out with a glob",
        ],
        ["    mine.toml:8", 'training.mixture[3].dataset = "away"'],
        ["    command line", 'validation.dataset = "lost"'],
    ]


def test_the_mixture_of_the_docs_is_read_and_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [part.split("```")[0] for part in DOCS.read_text().split("```toml\n")[1:]]
    assert len(blocks) == 3
    for i, block in enumerate(blocks):
        (tmp_path / f"{i}.toml").write_text(block)
        load([str(tmp_path / f"{i}.toml")])
    config = load([str(tmp_path / "1.toml")])
    config.training.seq_len, config.validation.enable = 16, True
    write(tmp_path, {f"code/{i}.py": b"print(%d)\n" % i * 90 for i in range(3)})
    write(tmp_path, {f"notes/{i}.jsonl": jsonl(["note"] * 900, "body") + b"broken\n" for i in range(3)})
    write(tmp_path, {f"texts/{i}.txt": b"text " * 9000 for i in range(3)})
    monkeypatch.chdir(tmp_path)
    from titan_moe import tokenize

    assert tokenize.main(["texts", "my_tokens"]) == 0
    assert data_problems(config, tmp_path / "run") == []
    training, validation = build_dataloaders(config, list_all(config), ByteTokenizer(), 0, 1)
    for loader in (training, validation[""]):
        assert next(iter(loader))[1].shape == (8, 16)


def _two_ranks(rank: int, folder: str) -> None:
    from titan_moe import runtime

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    config = config_of(f"{folder}/texts")
    listing = runtime.on_rank_0(lambda: list_sources(config, ByteTokenizer(), Path(folder, f"only rank 0 {rank}")))
    assert [piece.name for piece in listing.training[0].pieces] == ["a.jsonl"]
    Path(folder, "texts", "a.jsonl").write_bytes(b"broken\n")
    dist.barrier()
    try:
        runtime.on_rank_0(lambda: list_sources(config, ByteTokenizer(), Path(folder)))
    except ValueError as error:
        Path(folder, f"rank {rank}").write_text(str(error))
    dist.destroy_process_group()


def test_what_rank_0_finds_wrong_ends_all_ranks(tmp_path: Path) -> None:
    write(tmp_path, {"texts/a.jsonl": jsonl(["a"])})
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_two_ranks, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    messages = {(tmp_path / f"rank {rank}").read_text() for rank in range(2)}
    assert len(messages) == 1 and "a.jsonl:1: is not JSON" in messages.pop()
