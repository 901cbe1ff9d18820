"""Text from a checkpoint: token for token what transformers generates from the same weights; and what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import titan_moe.runtime  # noqa: F401

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from tests.distributed.harness import REPO
from tests.huggingface import peers
from tests.pieces import write_tokenizer
from titan_moe.checkpoint_io import Writer
from titan_moe.config import Config, Model
from titan_moe.config_file import to_toml
from titan_moe.huggingface.export import export
from titan_moe.sample import choice, main, sample
from titan_moe.tokenizer import ByteTokenizer

GREEDY = choice(0.0, 1.0, 0)


def run_of(config: Config, folder: Path, step: int = 3, scale: float = 3) -> Path:
    """A run folder with a checkpoint, of random weights that are far from all alike."""
    config.checkpoint.initial_load_path = ""
    model = peers.ours(config)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(scale)
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "checkpoint").mkdir(exist_ok=True)
    dcp.save(model.state_dict(), storage_writer=Writer(str(folder / "checkpoint" / f"step-{step}")))
    return folder


@pytest.fixture
def run(tmp_path: Path, group: dist.ProcessGroup) -> Path:
    return run_of(peers.configuration("mixtral"), tmp_path / "run")


@pytest.mark.parametrize("shape", ["deepseek_v3 yarn, 12 experts, full queries", "qwen3", "mixtral"])
def test_greedy_text_is_that_of_transformers(shape, tmp_path, group, monkeypatch):
    """The tokens themselves: text would hide those that are no UTF-8. Rows of the head without a token are left out."""
    config, prompt = peers.configuration(shape), "Grüße, 世界".encode()
    run = run_of(config, tmp_path / "run")
    export(config, run / "checkpoint" / "step-3", tmp_path / "hf", None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, **peers.EAGER)
    ids = torch.tensor([[256, *prompt]])
    rows = {"suppress_tokens": [*range(258, peers.ROWS)], "eos_token_id": 257, "pad_token_id": 257}
    (expected,) = theirs.generate(ids, max_new_tokens=24, do_sample=False, **rows).tolist()
    told: list[list[int]] = []
    monkeypatch.setattr(ByteTokenizer, "decode", lambda _, tokens: told.append(list(tokens)) or "")
    sample(run, None, prompt, 24, GREEDY)
    assert told == [expected] and len(set(expected[-24:])) > 3


WORDS = ["--prompt", "世", "--tokens", "8", "--temperature", "1", "--top-p", "0.9", "--seed"]


def test_the_same_seed_draws_the_same_text(run, capsysbinary):
    expected = sample(run, 3, "世".encode(), 8, choice(1.0, 0.9, 5))
    for seed, same in (("5", True), ("6", False)):
        assert main([str(run), *WORDS, seed]) == 0
        text = capsysbinary.readouterr().out.decode()
        assert (text == expected + "\n") is same and text.startswith("世")


@pytest.mark.slow
def test_the_command_prints_nothing_but_the_text_in_any_locale(run):
    command, env = [sys.executable, "-m", "titan_moe.sample", str(run), *WORDS, "5"], {"PATH": "/bin", "LC_ALL": "C"}
    done = subprocess.run(command, env=env, cwd=REPO, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == sample(run, 3, "世".encode(), 8, choice(1.0, 0.9, 5)) + "\n"
    assert b"4 tokens of prompt, 8 more, as many as asked for" in done.stderr and b"Warning" not in done.stderr


def test_an_empty_prompt_a_long_one_and_a_text_that_ends(run):
    assert sample(run, None, b"", 1, lambda _: ord("x")) == "x"
    assert sample(run, None, b"a\xff", 9, lambda _: 257) == "a\ufffd"  # eos at once; a byte that is no UTF-8
    sample(run, None, b"x" * (4096 - 1 - 1), 1, lambda _: 257)  # with bos, all that the rotary table has
    with pytest.raises(ValueError, match=r"^4097 tokens of prompt and --tokens = 1 are 4098, .* ends at .* = 4096;"):
        sample(run, None, b"x" * 4096, 1, GREEDY)


def test_a_tokenizer_of_words_and_mtp_layers(tmp_path, group):
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    write_tokenizer(tmp_path / "with", added=["</s>", "<s>"])
    write_tokenizer(tmp_path / "without", added=["</s>"])
    config = peers.configuration("deepseek_v3")
    config.model.num_mtp_layers, config.model.hf_assets_path = 1, str(tmp_path / "with")
    run = run_of(config, tmp_path / "run")
    assert sample(run, None, b"", 3, GREEDY)
    config.model.hf_assets_path = str(tmp_path / "without")
    (run / "config.toml").write_text(to_toml(config))
    with pytest.raises(ValueError, match="--prompt: is empty, and the tokenizer has no bos token"):
        sample(run, None, b"", 3, GREEDY)
    with pytest.raises(ValueError, match="--prompt is not UTF-8: byte 0xff"):
        sample(run, None, b"\xff", 3, GREEDY)


def test_drawn_tokens_follow_the_softmax_of_what_top_p_leaves():
    logits_V = torch.tensor([0.0, 2.0, 1.0, -3.0, 1.5])
    choose = choice(0.7, 0.8, 0)
    counts_V = torch.bincount(torch.tensor([choose(logits_V) for _ in range(4000)]), minlength=5)
    p_V = (logits_V.double() / 0.7).softmax(0)
    assert p_V[1] < 0.8 < p_V[1] + p_V[4]
    kept_V = torch.where(torch.tensor([False, True, False, False, True]), p_V, 0)
    expected_V = kept_V / kept_V.sum()
    spread_V = (expected_V * (1 - expected_V) * 4000).sqrt()
    assert ((counts_V - 4000 * expected_V).abs() <= 4 * spread_V).all()
    assert {choice(5.0, 1e-9, 1)(logits_V) for _ in range(20)} == {1}
    assert {choice(1e-320, 1.0, 1)(logits_V) for _ in range(20)} == {1}  # by which nothing can be divided


def damaged(run: Path) -> None:
    file = next((run / "checkpoint" / "step-3").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def half_copied(run: Path) -> None:
    (run / "checkpoint" / "step-3" / "manifest.json").unlink()


def of_another_model(run: Path) -> None:
    config = peers.configuration("mixtral 12 experts")
    config.checkpoint.initial_load_path = ""
    (run / "config.toml").write_text(to_toml(config))


def of_a_larger_model(run: Path) -> None:
    """Which would take 60 GiB."""
    (run / "config.toml").write_text(to_toml(Config(model=Model(flavor="16B"))))


def cut_short(run: Path) -> None:
    next((run / "checkpoint" / "step-3").glob("*.distcp")).write_bytes(b"x")


NOTHING: Any = lambda run: None  # noqa: E731
REFUSED = {
    "no run": (lambda run: (run / "config.toml").unlink(), [], "is no run folder: it has no config.toml"),
    "no checkpoint": (lambda run: (run / "checkpoint").rename(run / "x"), [], "holds no checkpoint: a run saves them"),
    "no such step": (NOTHING, ["--step=4"], "has steps [3]; choose one"),
    "damaged": (damaged, [], "is damaged: __0_0.distcp has another content"),
    "half copied": (half_copied, [], "is damaged: it has no manifest.json"),
    "cut short": (cut_short, ["--verify=none"], "cannot be read: "),
    "another model": (of_another_model, [], "is not of the model in its run's config.toml: layers."),
    "a larger model": (of_a_larger_model, [], "config.toml: tok_embeddings.weight is [102400, 2048] there"),
    "no tokens": (NOTHING, ["--tokens=0"], "--tokens = 0: must be at least 1"),
    "cold": (NOTHING, ["--temperature=-1"], "--temperature = -1.0: must be at least 0"),
    "hot": (NOTHING, ["--temperature=inf"], "must be at least 0 and finite"),
    "nothing left": (NOTHING, ["--top-p=0"], "--top-p = 0.0: must be greater than 0"),
    "seed": (NOTHING, ["--seed=-1"], "--seed = -1: must lie in"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_said(case, run, capsys):
    change, more, expected = REFUSED[case]
    change(run)
    assert main([str(run), *more]) == 2
    assert expected in capsys.readouterr().err


def test_weights_that_are_not_finite_have_no_text(tmp_path, group):
    run = run_of(peers.configuration("mixtral"), tmp_path / "run", scale=torch.inf)
    for choose in (GREEDY, choice(1.0, 1.0, 0)):
        with pytest.raises(ValueError, match="After 1 tokens the model's logits are not finite: .* earlier checkpoint"):
            sample(run, None, b"", 3, choose)


def test_a_pipe_that_closes_is_no_mistake(run):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "titan_moe.sample", str(run), "--tokens=1"]
    done = subprocess.run(command, cwd=REPO, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 0 and b"Error" not in done.stderr, done.stderr.decode()


def test_unverified_is_what_was_asked_for(run, capsysbinary):
    half_copied(run)
    assert main([str(run), "--verify=none", "--tokens=1"]) == 0
    assert capsysbinary.readouterr().out.endswith(b"\n")
