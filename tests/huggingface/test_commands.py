"""The five lines of docs/hugging_face.md take a Hugging Face folder to a training run and back, as they stand there."""

import json
import os
import shutil
import sys
from pathlib import Path

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.huggingface.peers import drawn, files
from tests.shell_blocks import bash, clone, shell_blocks
from titan_moe import config_file
from titan_moe.config_check import model_flavor
from titan_moe.huggingface import model_config, tokenizer_files

TOML = "train_configs/qwen3_30b_a3b.toml"
TWIN = f'base = "whole/{Path(TOML).name}"\n\n[model]\nscale_down = true\n'
DOWNLOAD = '#!/bin/sh\n[ "$1 $3" = "download --local-dir" ] && cp -r "{}" "$4"\n'


@pytest.mark.slow
def test_a_folder_becomes_a_run_and_a_folder_again(tmp_path: Path) -> None:
    """What differs is the model, a twin of the file's that a CPU trains in seconds, and where `hf` gets its weights:
    from a folder that transformers has written."""
    copy = clone(tmp_path / "clone")
    (copy / "train_configs" / "whole").mkdir()
    shutil.move(copy / TOML, copy / "train_configs" / "whole")
    (copy / TOML).write_text(TWIN)
    published = tmp_path / "published"
    content = model_config.content(model_flavor(config_file.load([str(copy / TOML)])), "bfloat16", 256, 257)
    published.mkdir()
    (published / "config.json").write_text(json.dumps(content))
    theirs = drawn(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(published)), seed=0).bfloat16()
    theirs.save_pretrained(published)
    tokenizer_files.write("", published)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "hf").write_text(DOWNLOAD.format(published))
    (programs / "hf").chmod(0o755)

    lines = shell_blocks("docs/hugging_face.md")[0]
    assert len(lines.replace("\\\n", "").splitlines()) <= 5
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed = bash(lines, copy, PATH=path)

    assert "step: 20 " in printed and "Qwen3MoeForCausalLM" in printed
    before, after = files(published), files(copy / "run" / "hf" / "step-20")
    assert before.keys() == after.keys() and {value.dtype for value in after.values()} == {torch.bfloat16}
    for name, value in before.items():
        moved = (after[name].float() - value.float()).norm() / value.float().norm()
        assert 1e-4 < moved < 0.5, (name, moved)
