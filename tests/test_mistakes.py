"""How an error ends the run: a user's mistake as a message, once; anything else with its traceback."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.pieces import jsonl, listed, made, make_loader, write
from titan_moe import config_file, mistakes
from titan_moe.config import Config
from titan_moe.mistakes import ConfigError, readable
from titan_moe.mixture import Shard
from titan_moe.tokenizer import build_tokenizer


def ends(mistake: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    @readable
    def main(argv: list[str]) -> None:
        mistake()

    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def wrong_degree() -> None:
    config = Config()
    config.parallelism.data_parallel_shard_degree = 3
    config_file.raise_on_problems(config, 2)


def no_tokenizer() -> None:
    build_tokenizer("/no/such/folder", 100)


def test_a_users_mistake_is_a_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("RANK", "0")
    assert ends(no_tokenizer, capsys).startswith("model.hf_assets_path = '/no/such/folder': there is no file")
    assert ends(wrong_degree, capsys).startswith("configuration for 2 processes: 1 mistake\n    parallelism.data_par")


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_broken_data_is_a_message_from_a_worker_too(
    tmp_path: Path, num_workers: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same one; torch alone would raise it in its own code, with the worker's traceback."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    # Ending the worker of an iterator that the garbage collector found takes this long.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    source = listed(write(tmp_path, {"a.jsonl": jsonl(["a"] * 2000) + b"broken\n" + jsonl(["b"] * 2000)}))

    def train() -> None:
        for _ in make_loader(source, num_workers=num_workers):
            pass

    message = ends(train, capsys)
    assert message.startswith(f"{tmp_path.resolve()}/a.jsonl:2001: is not JSON") and message.count("\n") == 1
    gc.collect()


def test_a_fault_of_ours_in_a_worker_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacks(self: Shard, k: int) -> None:
        _, _ = [k]

    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(Shard, "sample", unpacks)
    with pytest.raises(ValueError, match=r"Traceback[\s\S]*in unpacks[\s\S]*not enough values to unpack") as error:
        next(iter(make_loader(made(5, 5, 5, 5), num_workers=1)))
    assert not mistakes.is_mistake(error.value)
    gc.collect()


def test_a_configuration_is_told_by_rank_0_and_another_mistake_by_the_rank_that_has_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under torchrun in the file that it shows, as the launcher hides what most ranks print."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert ends(wrong_degree, capsys) == ""
    assert ends(no_tokenizer, capsys).startswith("model.hf_assets_path")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert ends(wrong_degree, capsys) == "" and not (tmp_path / "error.json").exists()
    assert ends(no_tokenizer, capsys) == ""
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["extraInfo"]["py_callstack"].startswith("model.hf_assets_path") and int(
        message["extraInfo"]["timestamp"]
    )


def test_other_errors_keep_their_traceback() -> None:
    @readable
    def main(argv: list[str]) -> None:
        if argv == ["library"]:
            json.loads("{")  # a ValueError raised in the standard library
        raise AssertionError("ours")

    with pytest.raises(json.JSONDecodeError):
        main(["library"])
    with pytest.raises(AssertionError):
        main([])


def test_only_a_raise_makes_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who edits train.py and unpacks too many values needs to see where."""
    monkeypatch.setattr(mistakes, "OURS", (Path(__file__),))

    def of_python() -> None:
        _, _ = [1]

    def of_ours() -> None:
        raise ValueError(
            "a message that takes more than one line, as most of ours do: "
            "with the arithmetic, and with the remedy at its end"
        )

    for function, expected in ((of_python, False), (of_ours, True)):
        with pytest.raises(ValueError) as error:
            function()
        assert mistakes.is_mistake(error.value) is expected


def test_the_count_is_in_the_first_line() -> None:
    assert str(ConfigError("a.toml", ["x"])) == "a.toml: 1 mistake\n    x"
    assert str(ConfigError("a.toml", ["x", "y"])) == "a.toml: 2 mistakes\n    x\n    y"
